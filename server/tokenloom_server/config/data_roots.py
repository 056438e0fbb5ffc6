"""Data roots: the folders and URLs below which everything lies that a mixture file may name."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenloom_proto.files import resolved

from tokenloom_server.errors import ConfigError
from tokenloom_server.storage.urls import before_wildcards, is_remote, lies_below, refuse_unsafe


@dataclass(frozen=True, slots=True)
class DataRoots:
    """None: a mixture file may name whatever the server can read."""

    folders: tuple[Path, ...] = ()
    """With every link resolved."""
    written: tuple[Path, ...] = ()
    """The folders as they were named, absolute."""
    urls: tuple[str, ...] = ()

    @classmethod
    def of(cls, places: Iterable[Path | str]) -> DataRoots:
        """Folders, and URLs such as ``s3://bucket/corpora``. Raises ``ConfigError`` for what is no folder."""
        folders, urls = [], []
        for place in places:
            if is_remote(str(place)):
                refuse_unsafe("--data-root", str(place))
                urls.append(str(place))
                continue
            folder = Path(place)
            if not folder.is_dir():
                raise ConfigError(f"--data-root {folder}: there is no such folder")
            folders.append(folder)
        resolved, written = (
            (folder.resolve() for folder in folders),
            (_absolute(folder) for folder in folders),
        )
        return cls(tuple(resolved), tuple(written), tuple(urls))

    def check_pattern(self, what: str, base_dir: Path, pattern: str) -> None:
        """Before anything is listed: that the part of a pattern (or path) without wildcards lies below a root.

        Raises ``ConfigError``; ``what`` begins its message.
        """
        if is_remote(pattern):
            # The wildcards of a URL match names, never less of the path than what is before them.
            self.check_paths(what, base_dir, [before_wildcards(pattern).rpartition("/")[0]])
            return
        parts = Path(pattern).parts
        wild = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        if self.folders and ".." in parts[wild:]:
            raise self._outside(what, repr(pattern))
        self.check_paths(what, base_dir, [str(Path(*parts[:wild]))])

    def check_paths(self, what: str, base_dir: Path, paths: Iterable[str]) -> None:
        """That each path lies below a root as it is written, before it is looked at, and also with its links resolved.
        Raises ``ConfigError`` naming the first that does not, and never where a link leads; ``what`` begins its
        message."""
        if not self.folders and not self.urls:
            return
        # The files of a source lie in few folders. By those that lie below a root, where they lead: to resolve one is a
        # call for each part of its path.
        below: dict[str, Path] = {}
        for path in paths:
            if is_remote(path):
                refuse_unsafe(what, path)
                if not any(lies_below(path, url) for url in self.urls):
                    raise self._outside(what, repr(path))
                continue
            above, _, name = os.path.join(base_dir, path).rpartition("/")  # noqa: PTH118
            is_plain = name not in ("", ".", "..")
            if is_plain and above in below and not os.path.islink(f"{below[above]}/{name}"):  # noqa: PTH114
                continue
            named = base_dir / path
            if not _is_below(_absolute(named), (*self.folders, *self.written)):
                raise self._outside(what, repr(path))
            folder = (below.get(above) if is_plain else None) or resolved(named.parent)
            if (
                is_plain
                and _is_below(_absolute(named.parent), (*self.folders, *self.written))
                and _is_below(folder, self.folders)
            ):
                below[above] = folder
            real = folder / named.name
            if named.name in ("", "..") or os.path.islink(real):  # noqa: PTH114  # Path's own way raises where it may not look
                real = resolved(real)
            if not _is_below(real, self.folders):
                raise self._outside(what, repr(path))

    def _outside(self, what: str, place: str) -> ConfigError:
        roots = ", ".join([*map(str, self.written), *self.urls])
        return ConfigError(
            f"{what}: {place} lies below no data root; expected it below {roots}: move the data there, or allow its "
            "folder with another --data-root"
        )


def _absolute(path: Path) -> Path:
    """Without ``..``, as it is written: no link is followed."""
    return Path(os.path.abspath(path))  # noqa: PTH100  # Path's own way keeps the dots


def _is_below(path: Path, roots: Iterable[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)
