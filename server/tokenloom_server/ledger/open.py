"""From the ledger's URL to the ledger."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tokenloom_server.errors import ConfigError
from tokenloom_server.ledger.base import Ledger

_EXPECTED = (
    "expected sqlite:///relative.db, sqlite:////absolute.db, redis://[user:password@]host:port/db, "
    "rediss://… (TLS) or unix:///path/to/redis.sock?db=0"
)


def open_ledger(url: str, base_dir: Path) -> Ledger:
    """Opens the ledger that ``url`` names; relative SQLite paths are relative to ``base_dir``.

    Raises ``ConfigError`` for a URL or file that cannot be a ledger. A Redis is not asked before
    ``check()``, which every caller owes before the first write.
    """
    # Each is imported where it is wanted: the client of Redis alone takes a tenth of a server's start.
    scheme = url.partition(":")[0]
    if scheme == "sqlite":
        from tokenloom_server.ledger.sqlite import SqliteLedger

        return SqliteLedger(base_dir / _sqlite_path(url))
    if scheme in ("redis", "rediss", "unix"):
        from tokenloom_server.ledger.redis import RedisLedger

        try:
            return RedisLedger(url)
        except ValueError as error:
            raise ConfigError(f"Ledger {without_secrets(url)}: {error}; {_EXPECTED}") from None
    raise ConfigError(f"Ledger {without_secrets(url)!r}: unknown scheme; {_EXPECTED}")


def without_secrets(url: str) -> str:
    """A URL, however malformed, as it may be shown: without user and password, and without its query."""
    return re.sub(r"//.*@", "//***@", url).partition("?")[0]


def _sqlite_path(url: str) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path).removeprefix("/")
    if parts.netloc or parts.query or parts.fragment or not path:
        raise ConfigError(f"Ledger {without_secrets(url)!r}: a file path and nothing else goes there; {_EXPECTED}")
    if path == ":memory:":
        raise ConfigError(f"Ledger {url!r}: a ledger in memory would lose every commit; {_EXPECTED}")
    return Path(path)
