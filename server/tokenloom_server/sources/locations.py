"""From a location to the files that lie there: patterns on this machine's disks, and in remote storage."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote

from tokenloom_server.config.catalog import Spec
from tokenloom_server.core.control_characters import escaped, refuse_control_characters
from tokenloom_server.errors import SourceError, StorageError, reason
from tokenloom_server.storage import listing
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.remote import Entry, stat

#: How many names an error lists of what lies in a folder.
LISTED_NAMES = 8

#: The name of the folder for rows in which a partition's column is null.
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def partitions(path: str) -> dict[str, str | None]:
    """What the names of folders say of all rows of a file, as Hive writes them: ``lang=en``."""
    named = (part.partition("=") for part in path.split("/")[:-1] if "=" in part)
    return {
        unquote(key): None if value == _HIVE_NULL else unquote(value) for key, _, value in named
    }


def matching_paths(spec: Spec, base_dir: Path) -> tuple[str, ...]:
    """The files that a spec's pattern matches, in the order of the path strings. Raises ``SourceError`` for none."""
    location, where = spec.location, f"source {str(spec)!r}"
    path = base_dir / location
    if path.is_file():
        return (location,)  # also a name that has brackets or stars in it
    if path.is_dir():
        raise SourceError(
            f"{where}: {str(path)!r} is a folder, expected files; name them by a pattern such as {_pattern(spec)!r} "
            f"({listed_names(path)})"
        )
    paths = matching_files(location, base_dir)
    if not paths:
        raise SourceError(f"{where}: no file matches {str(path)!r}; {nearest_folder(path)}")
    return paths


def matching_files(pattern: str, base_dir: Path) -> tuple[str, ...]:
    """The files that a pattern matches, sorted."""
    # Not Path.glob, which takes no absolute pattern. A set, since ** can meet a file twice.
    matches = sorted(set(glob.glob(pattern, root_dir=base_dir, recursive=True)))  # noqa: PTH207
    folders = (
        {match[: match.rfind("/") + 1] for match in matches} if glob.has_magic(pattern) else set()
    )
    # It passes over folders that may not be entered, and their data would be absent without a word.
    for above in filter(glob.has_magic, map(str, Path(pattern).parents)):
        for folder in glob.iglob(f"{above}/", root_dir=base_dir, recursive=True):  # noqa: PTH207
            if Path(folder).name != "lost+found":  # root's alone, on every disk
                folders.add(folder)
    # A listing says what is a file, so that only links and folders are asked.
    listed = {folder + name for folder in folders for name in _plain_files(base_dir / folder)}
    return tuple(match for match in matches if match in listed or is_named(base_dir / match))


def _plain_files(folder: Path) -> list[str]:
    """The names of what is a file in a folder, and no link to one. Raises ``OSError``."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]


def is_named(path: Path) -> bool:
    """Whether there is a file, or a link that leads to nothing: who reads it says that."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def matching_entries(url: str, io_stats: IoStats) -> Sequence[Entry]:
    """The remote files that a URL, or a pattern of URLs, names. Raises what ``HedgedRead.result`` does."""
    return listing.find(url, io_stats) if glob.has_magic(url) else (stat(url, repr(url), io_stats),)


def listed_entries(
    spec: Spec, find: Callable[[Spec, IoStats], Sequence[Entry]]
) -> tuple[Entry, ...]:
    """What ``find`` finds of a remote source. Raises ``SourceError`` where that is nothing, and ``StorageError``."""
    where = f"source {str(spec)!r}"
    try:
        entries = find(spec, IoStats())
    except (FileNotFoundError, NotADirectoryError):
        entries = ()
    except IsADirectoryError:
        raise SourceError(
            f"{where}: {spec.location!r} is a folder, expected files; name them by a pattern such as {_pattern(spec)!r}"
        ) from None
    except StorageError as error:
        raise StorageError(f"{where}: {error}") from None
    if not entries:
        raise SourceError(
            f"{where}: no file matches {spec.location!r}; look at its spelling, and whether the server's credentials "
            "may list it"
        )
    check_names(spec, (entry.path for entry in entries))
    return tuple(entries)


def check_names(spec: Spec, paths: Iterable[str]) -> None:
    """Raises ``SourceError`` for a file name that a manifest cannot hold."""
    where = f"source {str(spec)!r}: rename a file: "
    for path in paths:
        refuse_control_characters(path, where, SourceError)


def nearest_folder(path: Path) -> str:
    """For messages: the nearest folder that exists above a path, and what lies there."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return f"the nearest folder that exists is {str(folder)!r} ({listed_names(folder)})"


def listed_names(folder: Path) -> str:
    """For messages: what lies in a folder, the first ``LISTED_NAMES`` of it."""
    try:
        names = sorted(
            escaped(entry.name) + ("/" if entry.is_dir() else "") for entry in folder.iterdir()
        )
    except OSError as error:
        return f"it cannot be listed: {reason(error)}"
    if not names:
        return "it is empty"
    more = len(names) - LISTED_NAMES
    return f"in it: {', '.join(names[:LISTED_NAMES])}" + (f" and {more} more" if more > 0 else "")


def _pattern(spec: Spec) -> str:
    return f"{spec.location.rstrip('/')}/*.{spec.scheme.name}"
