"""The files at a URL: one listing for a pattern or a folder, with sizes and signatures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from glob import has_magic
from typing import Any

from tokenloom_server.storage.hedged_read import HedgedRead
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.remote import Entry, entry_of, filesystem, stat
from tokenloom_server.storage.urls import root

#: Files that are asked for one by one, where a listing has names alone.
STATS_AT_ONCE = 16


def find(pattern: str, io_stats: IoStats) -> tuple[Entry, ...]:
    """The files that a URL with wildcards matches, by their paths; as of local files, those below or with a name that
    begins with a dot only where the pattern has the dot. Raises ``OSError`` and ``StorageError``."""
    return tuple(entry for entry in _matching(pattern, io_stats) if not _is_hidden(entry.path, pattern))


def _is_hidden(path: str, pattern: str) -> bool:
    pattern_parts = pattern.split("/")
    literal = next(i for i, part in enumerate(pattern_parts) if has_magic(part))
    dotted = [part for part in pattern_parts[literal:] if part.startswith(".")]
    return any(
        name.startswith(".") and not any(fnmatchcase(name, part) for part in dotted)
        for name in path.split("/")[literal:]
    )


def _matching(pattern: str, io_stats: IoStats) -> tuple[Entry, ...]:
    files = filesystem(root(pattern))
    # Within a name, more stars are one, as in local patterns; fsspec takes none but ** alone.
    pattern = "/".join(part if part == "**" else re.sub(r"\*+", "*", part) for part in pattern.split("/"))
    above, _, name = pattern.rpartition("/")
    if name[:1] in tuple("*?[") and "**" not in name and not has_magic(above):
        # What fsspec would list twice, and ask for by itself: nothing but the folder is before the wildcard.
        return tuple(entry for entry in folder(above, io_stats) if fnmatchcase(entry.path.rpartition("/")[2], name))
    infos: Mapping[str, Any] = HedgedRead(lambda: files.glob(pattern, detail=True), pattern, io_stats).result()
    return _entries(pattern, infos.values(), io_stats)


def folder(url: str, io_stats: IoStats) -> tuple[Entry, ...]:
    """The files directly in a folder; none where there is no such folder. Raises ``OSError`` and ``StorageError``."""
    files = filesystem(root(url))
    try:
        infos = HedgedRead(lambda: files.ls(url, detail=True), url, io_stats).result()
    except FileNotFoundError:
        return ()
    return _entries(url, infos, io_stats)


def _entries(url: str, infos: Iterable[Mapping[str, Any]], io_stats: IoStats) -> tuple[Entry, ...]:
    # Some stores list an empty object as the mark of a folder.
    files = [info for info in infos if info.get("type") == "file" and not str(info["name"]).endswith("/")]

    def entry(info: Mapping[str, Any]) -> Entry:
        if info.get("size") is not None:
            return entry_of(root(url), info)
        # The index page of a web server, say, has names alone.
        file_url = str(info["name"])
        return stat(file_url, repr(file_url), io_stats)

    if all(info.get("size") is not None for info in files):
        return tuple(sorted(set(map(entry, files))))
    with ThreadPoolExecutor(STATS_AT_ONCE, thread_name_prefix="listing") as pool:
        return tuple(sorted(set(pool.map(entry, files))))
