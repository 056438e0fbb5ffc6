"""Data roots: the folders below which everything lies that a mixture file may name."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenloom_server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DataRoots:
    """None: a mixture file may name whatever the server can read."""

    folders: tuple[Path, ...] = ()
    """With every link resolved."""

    @classmethod
    def of(cls, folders: Iterable[Path]) -> DataRoots:
        """Raises ``ConfigError`` for what is no folder."""
        found = []
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"--data-root {folder}: there is no such folder")
            found.append(folder.resolve())
        return cls(tuple(found))

    def check_pattern(self, what: str, base_dir: Path, pattern: str) -> None:
        """Before anything is listed: that the part of a pattern (or path) without wildcards lies below a root.

        Raises ``ConfigError``; ``what`` begins its message.
        """
        if "://" in pattern:
            return  # no path; whether such a place is read at all is for the sources to say
        parts = Path(pattern).parts
        wild = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        self.check_paths(what, base_dir, [str(Path(*parts[:wild]))])

    def check_paths(self, what: str, base_dir: Path, paths: Iterable[str]) -> None:
        """That each path, its links resolved, lies below a root. Raises ``ConfigError`` naming the first that does
        not; ``what`` begins its message."""
        if not self.folders:
            return
        folders: dict[Path, Path] = {}
        for path in paths:
            named = base_dir / path
            # The files of a source lie in few folders, and to resolve one is a call for each part of its path.
            folder = folders.get(named.parent)
            if folder is None:
                folder = folders[named.parent] = named.parent.resolve()
            real = folder / named.name
            if named.name in ("", "..") or real.is_symlink():
                real = real.resolve()
            if not any(real.is_relative_to(root) for root in self.folders):
                roots = ", ".join(str(root) for root in self.folders)
                leads = "" if real == named else f", which is {str(real)!r},"
                raise ConfigError(
                    f"{what}: {path!r}{leads} lies below no data root; expected it below {roots}: move the data there, "
                    "or allow its folder with another --data-root"
                )
