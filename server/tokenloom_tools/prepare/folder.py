"""A folder that a command writes into, on a disk or below a URL: files appear there whole, or not at all."""

from __future__ import annotations

import errno
import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenloom_server.errors import ConfigError, TokenloomError
from tokenloom_server.storage.file import draft_of, publish
from tokenloom_server.storage.remote import entry_of, filesystem, path_of
from tokenloom_server.storage.urls import is_remote, redacted, refuse_unsafe, root


class Folder:
    """On a disk, or a file system that several machines have; or below a URL, where a log is an object for each line,
    since none can be appended to. Names of files are relative, with ``/``. Its methods raise ``OSError``. Thread-safe.
    """

    def __init__(self, place: Path | str) -> None:
        """Raises ``ConfigError`` for a URL that carries a secret, or is of unknown storage."""
        self.place = str(place).rstrip("/")
        self.is_local = not is_remote(self.place)
        refuse_unsafe("--out", "" if self.is_local else self.place)
        self._files = filesystem("/" if self.is_local else root(self.place))

    def at(self, name: str) -> str:
        """A file's path or URL."""
        return f"{self.place}/{name}"

    def read(self, name: str) -> bytes | None:
        """All of a file; None where it is not there."""
        try:
            return bytes(self._ask("cat_file", self.at(name)))
        except FileNotFoundError:
            return None

    @contextmanager
    def created(self, name: str) -> Iterator[Path]:
        """Where to write a file, which is there durably when the block ends. On a disk its folder has to be there."""
        if self.is_local:
            yield Path(self.at(name))
            publish(Path(self.at(name)), Path(self.at(name)))
            return
        with TemporaryDirectory(prefix="tokenloom-") as folder:
            yield Path(folder, "file")
            self._ask("put_file", f"{folder}/file", self.at(name))

    def write(self, name: str, content: bytes) -> None:
        """Writes a file whole or not at all, in the place of another one."""
        if not self.is_local:
            self._ask("pipe_file", self.at(name), content)
            return
        draft = draft_of(self._path(name))
        draft.write_bytes(content)
        publish(draft, self._path(name))

    def move(self, name: str, to: str) -> str:
        """Gives a file another name, in the place of what has that; gives its signature there, see ``entries``."""
        if self.is_local:
            Path(self.at(name)).replace(self._path(to))
            return ""
        self._ask("cp_file", self.at(name), self.at(to))  # within the storage; it appears whole
        self._ask("rm_file", self.at(name))
        return entry_of(root(self.place), self._ask("info", self.at(to))).signature

    def entries(self, below: str) -> dict[str, tuple[int, str]]:
        """The files in one of its folders, and in folders of that, by their names: size, and what an object store says
        of the content."""
        infos = self._ask("find", self.at(below), detail=True)
        begin = len(path_of(self.place)) + 1
        signed = {
            name: "" if self.is_local else entry_of(root(self.place), infos[name]).signature
            for name in infos
        }
        return {name[begin:]: (int(infos[name]["size"]), signed[name]) for name in sorted(infos)}

    @contextmanager
    def on_disk(self, below: str) -> Iterator[Path]:
        """The files of one of its folders, on this machine: there, or copied until the end."""
        if self.is_local:
            yield Path(self.at(below))
            return
        with TemporaryDirectory(prefix="tokenloom-") as copy:
            for name in self.entries(below):
                self._ask("get_file", self.at(name), f"{copy}/{Path(name).name}")
            yield Path(copy)

    def names(self) -> set[str]:
        """Of the files and folders that lie directly in it."""
        try:
            return {
                name.rstrip("/").rpartition("/")[2]
                for name in self._ask("ls", self.place, detail=False)
            }
        except FileNotFoundError:
            return set()

    def remove(self, below: str) -> None:
        """Removes a file, or one of its folders with all that is in it, if it is there."""
        if not self.is_local:
            if names := self.entries(below):
                self._ask("rm", [self.at(name) for name in names])
        elif (path := Path(self.at(below))).is_dir():
            # Under another name, so that nobody puts anything into it meanwhile.
            shutil.rmtree(draft_of(path), ignore_errors=True)
            shutil.rmtree(path.rename(draft_of(path)))
        else:
            path.unlink(missing_ok=True)

    def lines(self, log: str) -> list[bytes]:
        """The lines of a log; none that was written in part."""
        if not self.is_local:
            names = [self.at(name) for name in self.entries(log)]
            return list(self._ask("cat", names).values()) if names else []
        with Path(self.at(log)).open("a+b") as file:
            file.seek(0)
            content = file.read()
            file.truncate(whole := content.rfind(b"\n") + 1)
        return content[:whole].splitlines()

    def append(self, log: str, key: str, line: bytes) -> None:
        """Adds a line to a log, durably. One with the same ``key``, which is a name, may take its place."""
        if not self.is_local:
            self.write(f"{log}/{key}", line)
            return
        with Path(self.at(log)).open("ab") as file:
            file.write(line + b"\n")
        publish(Path(self.at(log)), Path(self.at(log)))

    @contextmanager
    def exclusive(self, log: str) -> Iterator[None]:
        """Until the end, no other process has a log on a disk. Raises ``ConfigError`` where one has it."""
        if not self.is_local:
            yield
            return
        with self._path(log).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                busy = f"{self.place}: another process prepares into it now; wait for it, or end it"
                raise ConfigError(busy) from None
            yield

    def _path(self, name: str) -> Path:
        path = Path(self.at(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Whatever storage and its library say becomes an ``OSError``."""
        try:
            return getattr(self._files, method)(*arguments, **options)
        except (OSError, TokenloomError):
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {redacted(str(error))}"
            raise OSError(errno.EIO, said, self.place) from error
