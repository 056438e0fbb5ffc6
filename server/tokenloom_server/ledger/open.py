"""From the ledger's URL to the ledger."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tokenloom_server.errors import ConfigError, LedgerUnsafe
from tokenloom_server.ledger.base import Ledger

_log = logging.getLogger(__name__)

#: A SQLite file where one is safe: beside the mixture file, or else on a disk of this machine.
AUTO = "auto"
#: The file of a SQLite ledger for which no path is given.
FILE_NAME = "tokenloom.db"

_EXPECTED = (
    "expected auto, sqlite:///relative.db, sqlite:////absolute.db, redis://[user:password@]host:port/db, "
    "rediss://… (TLS) or unix:///path/to/redis.sock?db=0"
)


def open_ledger(url: str, base_dir: Path, *, must_exist: bool = False) -> Ledger:
    """Opens the ledger that ``url`` names; relative SQLite paths are relative to ``base_dir``.

    Raises ``ConfigError`` for a URL or file that cannot be a ledger, or with ``must_exist`` is none yet; its disk may
    be full then. A Redis is not reached before ``check()``, which every caller must call before the first write.
    """
    # Each is imported where it is needed: the client of Redis alone takes a tenth of a server's start.
    scheme = url.partition(":")[0]
    if scheme == "sqlite" or url == AUTO:
        from tokenloom_server.ledger.sqlite import SqliteLedger

        path = _safe_path(base_dir) if url == AUTO else base_dir / _sqlite_path(url)
        if must_exist and not path.exists():
            raise ConfigError(
                f"{path} does not exist; expected a ledger. Give its path: {_EXPECTED}"
            )
        return SqliteLedger(path, reads_only=must_exist)
    if scheme in ("redis", "rediss", "unix"):
        from tokenloom_server.ledger.redis import RedisLedger

        try:
            return RedisLedger(url)
        except ValueError as error:
            raise ConfigError(f"Ledger {without_secrets(url)}: {error}; {_EXPECTED}") from None
    raise ConfigError(f"Ledger {without_secrets(url)!r}: unknown scheme; {_EXPECTED}")


def _safe_path(base_dir: Path) -> Path:
    """``tokenloom.db`` in the folder, unless other machines may share that or it cannot be written to: then in a
    folder of this machine that has its own file for each such folder.

    Where the next launch is on another machine it finds an empty ledger, which goes on from the trainer's state.
    """
    from tokenloom_server.ledger.sqlite_file import refuse_shared

    path = base_dir / FILE_NAME
    if not base_dir.is_dir():
        raise ConfigError(f"{base_dir} does not exist; expected the folder of the mixture file")
    try:
        refuse_shared(path)
        if os.access(base_dir, os.W_OK):
            return path
        reason = f"{base_dir} cannot be written to"
    except LedgerUnsafe as error:
        reason = str(error).partition(";")[0]
    folder = Path(tempfile.gettempdir()) / f"tokenloom-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = (
        folder.lstat()
    )  # anybody may make such a folder, or a link, in the system's folder for temporary files
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise LedgerUnsafe(
            f"The ledger's folder {folder} is not this user's own. Name a file with --ledger."
        )
    name = hashlib.sha256(os.fsencode(base_dir.resolve())).hexdigest()[:16]
    local = folder / f"{name}.db"
    _log.warning("the ledger is %s, on this machine: %s", local, reason)
    return local


def without_secrets(url: str) -> str:
    """A URL, however malformed, as it may be shown: without user and password, and without its query."""
    return re.sub(r"//.*@", "//***@", url).partition("?")[0]


def _sqlite_path(url: str) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path).removeprefix("/")
    if parts.netloc or parts.query or parts.fragment or not path:
        raise ConfigError(
            f"Ledger {without_secrets(url)!r}: a file path and nothing else goes there; {_EXPECTED}"
        )
    if path == ":memory:":
        raise ConfigError(
            f"Ledger {url!r}: a ledger in memory would lose every commit; {_EXPECTED}"
        )
    return Path(path)
