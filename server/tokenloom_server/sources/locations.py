"""From a spec's location to the paths of its files, in reading order."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable
from pathlib import Path

from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import SourceError
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.files import in_threads, shard_at, shards_of
from tokenloom_server.sources.hub import HubResolver, appended
from tokenloom_server.storage import listing
from tokenloom_server.storage.hub.files import is_hub
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.open import open_file
from tokenloom_server.storage.remote import Entry, stat
from tokenloom_server.storage.urls import is_remote, redacted

#: How many names an error lists of what lies in a folder.
LISTED_NAMES = 8


def paths(spec: Spec, base_dir: Path) -> tuple[str, ...]:
    """The files of a source as the spec names them (relative stays relative), in reading order.

    That is the order of the path strings, for ``arrow:`` the one that ``state.json`` gives, and for ``megatron:`` the
    two files of each dataset, in the order of their prefixes.
    Raises ``SourceError``, with the pattern as it was resolved and what lies there, when there is none.
    """
    if spec.scheme == "hf":
        return tuple(shard.path for shard in HubResolver().shards(spec))
    if is_remote(spec.location):
        return tuple(entry.path for entry in entries(spec))
    try:
        if spec.scheme == "arrow":
            found = _folder_paths(spec, base_dir)
        elif spec.scheme == "megatron":
            found = _dataset_paths(spec, base_dir)
        else:
            found = _glob_paths(spec, base_dir)
    except (OSError, ValueError) as error:
        # A name that no file can have, or a folder that may not be looked into.
        reason = error.strerror if isinstance(error, OSError) else error
        raise SourceError(f"source {str(spec)[:200]!r}: its files cannot be looked up ({reason})") from None
    for path in found:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise SourceError(
                f"source {str(spec)!r}: the file name {path!r} is not UTF-8, so a manifest cannot hold it; rename it"
            ) from None
    return found


def shards(spec: Spec, base_dir: Path, hub: HubResolver | None = None) -> tuple[Shard, ...]:
    """The shards of a source, as they are now; ``hub`` is shared by sources of one moment. Raises ``SourceError``."""
    if spec.scheme == "hf":
        return (hub or HubResolver()).shards(spec)
    if is_remote(spec.location):
        return tuple(shard_at(spec, entry) for entry in entries(spec))
    return shards_of(spec, paths(spec, base_dir), base_dir)


def more_shards(spec: Spec, known: tuple[Shard, ...], base_dir: Path) -> tuple[Shard, ...]:
    """The shards that a source has by now beyond those that are known.

    Raises ``SourceError``, and ``SourceChanged`` where those on the Hub are no longer as they were.
    """
    if any(is_hub(shard.path) for shard in known):
        return appended(spec, known, shards(spec, base_dir))
    paths_known = {shard.path for shard in known}
    return shards_of(spec, [path for path in paths(spec, base_dir) if path not in paths_known], base_dir)


def entries(spec: Spec, io_stats: IoStats | None = None) -> tuple[Entry, ...]:
    """The files of a remote source in reading order, by one listing, with their sizes and signatures.

    Raises ``SourceError`` when there is none, or the place cannot be listed.
    """
    if spec.scheme in ("megatron", "npy"):
        raise SourceError(
            f"source {str(spec)!r}: {redacted(spec.location)!r} is a URL, but files of {spec.scheme}: are mapped; "
            "copy or mount them, and give their path"
        )
    io_stats = io_stats or IoStats()
    try:
        if spec.scheme == "arrow":
            return _remote_folder(spec, io_stats)
        if not glob.has_magic(spec.location):
            return (stat(spec.location, repr(spec.location), io_stats),)
        found = listing.find(spec.location, io_stats)
    except FileNotFoundError:
        found = ()
    except IsADirectoryError:
        raise SourceError(
            f"source {str(spec)!r}: {spec.location!r} is a folder, expected files; name them by a pattern such as "
            f"{spec.location.rstrip('/') + '/*.' + spec.scheme!r}"
        ) from None
    except OSError as error:
        raise SourceError(
            f"source {str(spec)!r}: {spec.location!r} cannot be looked up ({redacted(str(error))}); look at its "
            "spelling, and at the credentials in the server's environment"
        ) from None
    if not found:
        raise SourceError(
            f"source {str(spec)!r}: no file matches {spec.location!r}; look at its spelling, and whether the server's "
            "credentials may list it"
        )
    return found


def _remote_folder(spec: Spec, io_stats: IoStats) -> tuple[Entry, ...]:
    where, folder = f"source {str(spec)!r}", spec.location.rstrip("/")
    listed = {entry.path.rpartition("/")[2]: entry for entry in listing.folder(folder, io_stats)}
    if "dataset_dict.json" in listed:
        raise SourceError(f"{where}: {folder!r} holds a dataset for each split; name one of its folders")
    names = _data_files(listed)
    if "state.json" in listed:
        with open_file(f"{folder}/state.json", Path(), io_stats=io_stats) as file:
            names = _state_files(where, f"{folder}/state.json", bytes(file.read_at(0, file.size)))
    if not names:
        raise SourceError(
            f"{where}: no Arrow file in {folder!r}, expected state.json with data-*.arrow, or *.arrow files"
        )
    missing = [name for name in names if name not in listed]
    if missing:
        raise SourceError(f"{where}: {folder!r} has no {missing[0]!r}, which its state.json names; upload it whole")
    return tuple(listed[name] for name in names)


def _glob_paths(spec: Spec, base_dir: Path) -> tuple[str, ...]:
    location = spec.location
    if (base_dir / location).is_file():
        return (location,)  # also a name that has brackets or stars in it
    if (base_dir / location).is_dir():
        raise SourceError(
            f"source {str(spec)!r}: {str(base_dir / location)!r} is a folder, expected files; "
            f"name them by a pattern such as {location.rstrip('/') + '/*.' + spec.scheme!r} "
            f"({_listing(base_dir / location)})"
        )
    found = _matching_files(location, base_dir)
    if not found:
        raise SourceError(
            f"source {str(spec)!r}: no file matches {str(base_dir / location)!r}; {_nearest(base_dir / location)}"
        )
    return found


def _matching_files(pattern: str, base_dir: Path) -> tuple[str, ...]:
    # Not Path.glob, which takes no absolute pattern. A set, since ** can meet a file twice.
    matches = sorted(set(glob.glob(pattern, root_dir=base_dir, recursive=True)))  # noqa: PTH207
    are_files = in_threads(lambda match: (base_dir / match).is_file(), matches)
    return tuple(match for match, is_file in zip(matches, are_files, strict=True) if is_file)


def _dataset_paths(spec: Spec, base_dir: Path) -> tuple[str, ...]:
    prefix = spec.location
    endings = (".bin", ".idx")
    # Also a prefix that has brackets or stars in it.
    named = [prefix + ending for ending in endings if (base_dir / (prefix + ending)).is_file()]
    there = set(named or [path for ending in endings for path in _matching_files(prefix + ending, base_dir)])
    if not there:
        raise SourceError(
            f"source {str(spec)!r}: no file matches {str(base_dir / (prefix + '.idx'))!r}; "
            f"{_nearest(base_dir / (prefix + '.idx'))}"
        )
    prefixes = sorted({path[: -len(".idx")] for path in there})
    paths = tuple(found + ending for found in prefixes for ending in endings)
    for path in paths:
        if path not in there:
            other = path[:-4] + (".idx" if path.endswith(".bin") else ".bin")
            raise SourceError(
                f"source {str(spec)!r}: {path!r} is missing beside {other!r}, and neither is of use alone; copy it, "
                "or let the prefix match whole datasets only"
            )
    return paths


def _folder_paths(spec: Spec, base_dir: Path) -> tuple[str, ...]:
    where = f"source {str(spec)!r}"
    folder = base_dir / spec.location
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise SourceError(
            f"{where}: {str(folder)!r} {found}, expected a folder that `save_to_disk` wrote; {_nearest(folder)}"
        )
    prefix = spec.location.rstrip("/") or "/"
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = sorted(path.name for path in folder.iterdir() if (path / "state.json").is_file())
        choices = ", ".join(repr(f"arrow:{prefix}/{name}:{spec.column}") for name in names) or "none found"
        raise SourceError(f"{where}: {str(folder)!r} holds a dataset for each split; name one of them: {choices}")
    state = folder / "state.json"
    names = _state_files(where, str(state), state.read_bytes()) if state.is_file() else _arrow_files(folder)
    if not names:
        raise SourceError(
            f"{where}: no Arrow file in {str(folder)!r}, expected state.json with data-*.arrow, or *.arrow files "
            f"({_listing(folder)})"
        )
    return tuple(f"{prefix}/{name}" for name in names)


def _state_files(where: str, state: str, text: bytes) -> list[str]:
    try:
        document = json.loads(text)
        names = [str(entry["filename"]) for entry in document["_data_files"]]
        indices = document.get("_indices_files") or document.get("_indices_data_files")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"{where}: {state!r} is not the state.json of a saved dataset ({type(error).__name__}: {error})"
        ) from None
    if indices:
        raise SourceError(
            f"{where}: the dataset has an indices mapping (it was shuffled, sorted or selected), so its files are "
            "not in its order; call flatten_indices() on it and save it again"
        )
    return names


def _arrow_files(folder: Path) -> list[str]:
    return _data_files(path.name for path in folder.glob("*.arrow") if path.is_file())


def _data_files(names: Iterable[str]) -> list[str]:
    # cache-*.arrow and tmp* are what `datasets` leaves beside the data: results of map and filter.
    found = sorted(name for name in names if name.endswith(".arrow"))
    return [name for name in found if not name.startswith(("cache-", "tmp", "."))]


def _nearest(path: Path) -> str:
    """The nearest folder that exists above a path, and what lies there."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return f"the nearest folder that exists is {str(folder)!r} ({_listing(folder)})"


def _listing(folder: Path) -> str:
    try:
        names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir())
    except OSError as error:
        return f"it cannot be listed: {error.strerror}"
    if not names:
        return "it is empty"
    shown = ", ".join(names[:LISTED_NAMES])
    more = len(names) - LISTED_NAMES
    return f"in it: {shown}" + (f" and {more} more" if more > 0 else "")
