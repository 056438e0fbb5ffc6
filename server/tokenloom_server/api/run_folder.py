"""A folder whose mixture files are the runs of a server, and how runs are added and removed while it serves."""

from __future__ import annotations

import math
import os
import stat
import threading
from pathlib import Path
from time import monotonic

from tokenloom_proto.files import resolved

from tokenloom_server import errors
from tokenloom_server.api.mixture_origin import INDEX_FOLDER, MixtureOrigin
from tokenloom_server.api.service import Reason, Runs
from tokenloom_server.api.watched_files import Watched, Watcher
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.errors import ConfigError, RunBusy

#: When a file was changed, its size and its inode: what tells whether it is still the same.
FileVersion = tuple[int, int, int]
#: That of no file.
_AGAIN: FileVersion = (0, 0, -1)


class RunFolder(Watched):
    """Follows the files ``*.yaml`` of a folder, or of none: then runs are added and removed until the server ends. A
    file is taken once two looks in a row found it the same."""

    def __init__(
        self, runs: Runs, folder: Path | None, index_dir: Path | None, data_roots: DataRoots
    ) -> None:
        super().__init__(f"--runs-dir {folder}")
        self._runs, self._index_dir, self._data_roots = runs, index_dir, data_roots
        self.folder = folder
        self._reason: Reason | None = None
        #: One change of the folder at a time. As it was when it was looked into last, and as its runs are served.
        self._lock = threading.Lock()
        self._seen: dict[Path, FileVersion] = {}
        self._identity = (0, 0)
        self._followed: dict[Path, FileVersion | None] = {}
        self._watcher = Watcher("runs-dir", self.step)

    def begin(self, reason: Reason | None) -> None:
        """Serves what is there, and follows the folder from then on. ``reason``: as ``--revise`` has it. Raises
        ``ConfigError`` where the folder cannot be read."""
        if self.folder is None:
            return
        self._reason = reason
        self._seen = self._look(self.folder)
        self._follow(self._seen)
        self._good_at = monotonic()
        self._watcher.start()

    def step(self) -> None:
        """Looks into the folder, and follows what is as it was at the look before. Raises ``ConfigError`` where the
        folder cannot be read, which tells nothing: no run is removed for that."""
        assert self.folder is not None
        with self._lock:
            before, self._seen = self._seen, self._look(self.folder)
            self._good_at = math.inf  # to open a run may take minutes
            try:
                self._follow(before)
            finally:
                self._good_at = monotonic()

    def end(self) -> None:
        self._watcher.ending.set()

    def origin(self, file: Path) -> MixtureOrigin:
        """Of a mixture file of this server."""
        return MixtureOrigin.of_file(file, self._index_dir or resolved(file).parent / INDEX_FOLDER)

    def add(self, file: str | None, text: str | None, reason: Reason | None) -> str:
        """Serves a mixture file of the server's machine, or the text of one; returns the run's name. The folder gets a
        link to the file, or one with the text, and nothing stays there where that fails. Raises ``ConfigError``, and
        what ``Runs.add_from`` raises."""
        if file is not None:
            self._data_roots.check_paths("file", Path("/"), [file])
        if self.folder is None:
            if file is None:
                raise ConfigError(
                    "mixture: this server has no folder in which it could keep the text of a mixture file; name a file "
                    "of its machine, or start it with --runs-dir"
                )
            return self._runs.add_from(self.origin(Path(file)), reason).name
        draft = self.folder / f".sent.{os.getpid()}"
        with self._lock:
            try:
                if file is not None:
                    name = self._runs.run_of(self.origin(Path(file)))
                    draft.symlink_to(file)
                else:
                    draft.write_text(text or "", encoding="utf-8")
                    name = self._runs.run_of(self.origin(draft))
                path = self.folder / f"{name}.yaml"
                if path.exists():
                    raise ConfigError(
                        f"{path} is there already: change it there, or remove run {name!r} first"
                    )
                draft.replace(path)
            except OSError as error:
                why = errors.reason(error)
                raise ConfigError(f"--runs-dir {self.folder}: cannot be written ({why})") from None
            finally:
                draft.unlink(missing_ok=True)
            try:
                self._runs.add_from(self.origin(path), reason)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        return name

    def remove(self, name: str) -> Path | None:
        """Removes a run. Its file in the folder is renamed, so that the run stays away; returns the new name. Raises
        ``NotFound``, ``ConfigError`` where the folder cannot be written, ``RunBusy``."""
        with self._lock:
            file, away = self._runs.origin(name).file, None
            if file is not None and file.parent == self.folder:
                away = file.with_name(f"{file.name}.removed")
                try:
                    file.replace(away)
                except OSError as error:
                    raise ConfigError(
                        f"{file}: cannot be renamed ({errors.reason(error)}), and the run would "
                        "come back with it: take the file out of the folder"
                    ) from None
            self._runs.remove(name)
        return away

    def _follow(self, before: dict[Path, FileVersion]) -> None:
        """Serves what the folder has, where it has had that before."""
        # What is gone goes first: a file that was renamed brings the run that it had.
        for path in sorted(
            self._followed.keys() | self._seen.keys(), key=lambda path: (path in self._seen, path)
        ):
            version = self._seen.get(path)
            if (
                self._watcher.ending.is_set()
                or version == self._followed.get(path)
                or version != before.get(path)
            ):
                continue
            origin = self.origin(path)
            error = (
                self._runs.forget(origin)
                if version is None
                else self._runs.follow(origin, self._reason)
            )
            self._followed[path] = _AGAIN if isinstance(error, RunBusy) else version
            if version is None:
                # What could not be served beside it is tried again, or forgotten where it is gone, too.
                broken = {problem.origin.file for problem in self._runs.problems()}
                self._followed |= {each: _AGAIN for each in self._followed if each in broken}

    def _look(self, folder: Path) -> dict[Path, FileVersion]:
        files: dict[Path, FileVersion] = {}
        try:
            status = folder.stat()
            for path in folder.iterdir():
                if path.suffix == ".yaml" and not path.name.startswith("."):
                    files[path] = _version(path)
        except OSError as error:
            raise ConfigError(
                f"--runs-dir {folder}: cannot be read ({errors.reason(error)}); expected a folder of mixture files"
            ) from None
        is_another = (status.st_dev, status.st_ino) != self._identity
        if is_another and self._seen and not files:
            raise ConfigError(
                f"--runs-dir {folder}: is another folder than before, and empty, so no run is removed for that: is its "
                "disk away? To remove runs, use tokenloom runs --remove"
            )
        self._identity = status.st_dev, status.st_ino
        return files


def _version(path: Path) -> FileVersion:
    """The same for all that is no regular file, or cannot be looked at: to read it says why it is no mixture."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return (
        (status.st_mtime_ns, status.st_size, status.st_ino)
        if stat.S_ISREG(status.st_mode)
        else (0, 0, 0)
    )
