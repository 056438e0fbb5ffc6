"""The files at a URL: one listing for a pattern or a folder, with sizes and signatures."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from glob import has_magic
from typing import Any

from tokenloom_proto.threads import pool

from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.remote import Entry, asked, entry_of, stat
from tokenloom_server.storage.urls import before_wildcards, root

#: Files that are asked for one by one, where a listing has names alone.
STATS_AT_ONCE = 16


def find(pattern: str, io_stats: IoStats) -> tuple[Entry, ...]:
    """The files that a URL with wildcards matches, by their paths; as of local files, those below or with a name that
    begins with a dot only where the pattern has the dot. Raises what ``HedgedRead.result`` does."""
    return tuple(
        entry for entry in _matching(pattern, io_stats) if not _is_hidden(entry.path, pattern)
    )


def _is_hidden(path: str, pattern: str) -> bool:
    pattern_parts = pattern.split("/")
    literal = next(i for i, part in enumerate(pattern_parts) if has_magic(part))
    dotted = [part for part in pattern_parts[literal:] if part.startswith(".")]
    return any(
        name.startswith(".") and not any(fnmatchcase(name, part) for part in dotted)
        for name in path.split("/")[literal:]
    )


def _matching(pattern: str, io_stats: IoStats) -> tuple[Entry, ...]:
    # Within a name, more stars are one, as in local patterns; fsspec takes none but ** alone.
    pattern = "/".join(
        part if part == "**" else re.sub(r"\*+", "*", part) for part in pattern.split("/")
    )
    beginning = before_wildcards(pattern)
    above = beginning.rpartition("/")[0]
    depth = sys.maxsize if "**" in pattern else pattern.count("/") - above.count("/")
    # What fsspec would list twice, and ask for by itself: nothing but the folder is before the wildcard.
    is_folder = depth == 1 and beginning.endswith("/")

    def glob(files: Any) -> Iterable[Mapping[str, Any]] | None:
        find = getattr(files, "_find", getattr(files, "find", None))
        # fsspec's own takes a folder that fails for an empty one.
        is_walked = is_folder or (find is not None and find.__module__.startswith("fsspec."))
        return None if is_walked else files.glob(pattern, detail=True).values()

    infos = asked(root(pattern), glob, pattern, io_stats).result()
    if infos is None:
        from fsspec.utils import glob_translate

        matches = re.compile(glob_translate(pattern[len(above) + 1 :])).match
        infos = [info for path, info in _below(above, depth, io_stats) if matches(path)]
    return _entries(pattern, infos, io_stats)


def folder(url: str, io_stats: IoStats) -> tuple[Entry, ...]:
    """The files directly in a folder; none where there is no such folder. Raises ``StorageError``."""
    return _entries(url, (info for _, info in _below(url, 1, io_stats)), io_stats)


def _below(url: str, depth: int, io_stats: IoStats) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The files in a folder, and in so many levels of folders from it on, by their paths below it."""
    try:
        infos = asked(root(url), lambda files: files.ls(url, detail=True), url, io_stats).result()
    except FileNotFoundError:
        return
    for info in infos:
        name = str(info["name"]).rstrip("/").rpartition("/")[2]
        if info["type"] != "directory":
            yield name, info
        elif depth > 1:
            yield from (
                (f"{name}/{path}", file)
                for path, file in _below(f"{url}/{name}", depth - 1, io_stats)
            )


def _entries(url: str, infos: Iterable[Mapping[str, Any]], io_stats: IoStats) -> tuple[Entry, ...]:
    # Some stores list an empty object as the mark of a folder.
    files = [
        info for info in infos if info.get("type") == "file" and not str(info["name"]).endswith("/")
    ]

    def entry(info: Mapping[str, Any]) -> Entry:
        if info.get("size") is not None:
            return entry_of(root(url), info)
        # The index page of a web server, say, has names alone.
        file_url = str(info["name"])
        return stat(file_url, repr(file_url), io_stats)

    if all(info.get("size") is not None for info in files):
        return tuple(sorted(set(map(entry, files))))
    with pool(STATS_AT_ONCE, "listing") as threads:
        return tuple(sorted(set(threads.map(entry, files))))
