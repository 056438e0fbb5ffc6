"""A Redis that is a ledger: how it is reached, how scripts run on it, whether it may be trusted."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import redis
from redis import exceptions
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from tokenloom_server.errors import LedgerError, LedgerUnavailable, LedgerUnsafe

_log = logging.getLogger(__name__)

#: A Redis on the same network answers a connect in milliseconds.
CONNECT_TIMEOUT_S = 2.0

#: An answer comes after an fsync, which a loaded disk can hold up for seconds.
SOCKET_TIMEOUT_S = 5.0

#: Bridges a dropped connection, and keeps the longest call (a Redis that accepts and never answers) under
#: 20 s. Longer absences are the caller's to wait for, with a reason to show.
RETRIES = 1
BACKOFF_BASE_S = 0.05
BACKOFF_CAP_S = 0.5

#: A Redis writes its append-only file anew at tens of megabytes a second, and a ledger has a few hundred at most.
REWRITE_TIMEOUT_S = 60.0
REWRITE_POLL_S = 0.05

#: Options that a URL may carry; others could change what answers look like.
_URL_OPTIONS = re.compile(r"db|socket_timeout|socket_connect_timeout|ssl_[a-z_]+")

#: Redis's own words for "not now", wherever they stand in an error that a script passes on.
_NOT_NOW = re.compile(
    r"\b(OOM|MISCONF|READONLY|LOADING|BUSY|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOAUTH|NOPERM|UNKILLABLE)\b"
)

#: Errors whose code redis-py removes from their text.
_NOT_NOW_TYPES = (
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)

#: Setting, what it must be, and why.
_SAFE_SETTINGS = (
    ("appendonly", "yes", "without it, a restart loses commits"),
    ("appendfsync", "always", "otherwise a power cut or a kill loses acknowledged commits"),
    (
        "no-appendfsync-on-rewrite",
        "no",
        "otherwise commits are not synced while the file is rewritten",
    ),
    ("maxmemory-policy", "noeviction", "others may delete the ledger's keys when memory is short"),
)

_REMEDY = (
    "Start Redis with --appendonly yes --appendfsync always --no-appendfsync-on-rewrite no "
    "--maxmemory-policy noeviction (or set them with CONFIG SET and in its configuration file)"
)


class RedisClient:
    """One Redis. Any thread may call; every call is bounded by the constants above."""

    def __init__(self, url: str) -> None:
        """Raises ``ValueError`` for a malformed URL. Connects on the first call."""
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        unknown = [name for name in options if not _URL_OPTIONS.fullmatch(name)]
        if unknown:
            raise ValueError(f"option {unknown[0]!r} is not for a ledger")
        database = (
            options.get("db") or [parts.path.strip("/") if parts.scheme != "unix" else "0"]
        )[0] or "0"
        if not database.isdecimal():
            raise ValueError(f"database {database!r} is not a number")
        if parts.scheme == "unix":
            if not parts.path.strip("/"):
                raise ValueError("no socket is named")
            self.address = parts.path
            self.description = f"unix://{parts.path}?db={database}"
        else:
            host = parts.hostname or "localhost"
            self.address = f"{f'[{host}]' if ':' in host else host}:{parts.port or 6379}"
            self.description = f"{parts.scheme}://{self.address}/{database}"
        pool = redis.ConnectionPool.from_url(
            url,
            decode_responses=True,
            protocol=2,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(ExponentialBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S), RETRIES),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError],
        )
        self._redis = redis.Redis(connection_pool=pool)
        self._scripts = load_scripts()

    def run_script(
        self, name: str, keys: Sequence[str], arguments: Sequence[str | int | float]
    ) -> list[Any]:
        """Runs one of the scripts of ``lua/``: by its digest, and in full where Redis does not know it yet."""
        text, digest = self._script(name)
        with self._translated():
            try:
                return cast("list[Any]", self._redis.evalsha(digest, len(keys), *keys, *arguments))
            except exceptions.NoScriptError:
                return cast("list[Any]", self._redis.eval(text, len(keys), *keys, *arguments))

    def run_script_often(
        self, name: str, calls: Sequence[tuple[Sequence[str], Sequence[str | int | float]]]
    ) -> list[Any]:
        """Runs one of the scripts for several (keys, arguments), at one moment and in one durable write."""
        text, digest = self._script(name)
        with self._translated(), self._redis.pipeline(transaction=True) as pipeline:
            for number, (keys, arguments) in enumerate(calls):
                run = pipeline.evalsha if number else pipeline.eval  # the first one makes it known
                run(digest if number else text, len(keys), *keys, *arguments)
            return pipeline.execute()

    def _script(self, name: str) -> tuple[str, str]:
        """(text, digest)"""
        text = self._scripts[name]
        return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def read(self, *requests: tuple[str | int, ...]) -> list[Any]:
        """The answers to several Redis commands, at one moment."""
        with self._translated(), self._redis.pipeline(transaction=len(requests) > 1) as pipeline:
            for request in requests:
                cast("Any", pipeline).execute_command(*request)
            return pipeline.execute()

    def change(
        self, key: str, requests: Callable[[dict[str, str], float], Sequence[tuple[Any, ...]]]
    ) -> None:
        """Sends, in one transaction, the Redis commands that ``requests`` makes of a hash and of Redis's time; anew
        where somebody wrote the hash meanwhile."""

        def write(pipeline: Any) -> None:
            seconds, microseconds = pipeline.time()
            sent = requests(pipeline.hgetall(key), seconds + microseconds / 1e6)
            pipeline.multi()
            for request in sent:
                pipeline.execute_command(*request)

        with self._translated():
            self._redis.transaction(write, key)

    def keys(self, pattern: str) -> list[str]:
        """The names of all keys of a pattern; those that come or go meanwhile may be among them."""
        with self._translated():
            return list(cast("Any", self._redis.scan_iter(pattern, 1000)))

    def check(self) -> None:
        """Raises ``LedgerUnavailable``, or ``LedgerUnsafe`` where an acknowledged write could be lost."""
        with self._translated():
            settings = self._settings()
        for setting, expected, reason in _SAFE_SETTINGS:
            value = settings.get(setting)
            if value is None:
                raise LedgerUnsafe(
                    f"Redis at {self.address} does not show its setting {setting} (CONFIG is forbidden); expected "
                    f"{expected}: {reason}. Let this user read it (ACL SETUSER … +config|get), or use another Redis. "
                    f"{_REMEDY}."
                )
            if value != expected:
                raise LedgerUnsafe(
                    f"Redis at {self.address} has {setting} {value}; expected {expected}: {reason}. {_REMEDY}."
                )
        self._await_append_only_file()
        self._warn_of_replicas()

    def _await_append_only_file(self) -> None:
        """Waits for a rewrite of the file. From CONFIG SET appendonly yes until the one that it begins is done, Redis
        calls the file on, and what it acknowledges is in memory alone. It does not say which rewrite it is at, so any
        is waited for."""
        deadline = time.monotonic() + REWRITE_TIMEOUT_S
        while True:
            with self._translated():
                persistence = self._redis.info("persistence")
            if not any(
                int(persistence.get(f"aof_rewrite_{name}", 0))
                for name in ("in_progress", "scheduled")
            ):
                return
            if time.monotonic() >= deadline:
                raise LedgerUnsafe(
                    f"Redis at {self.address} has been writing its append-only file anew for {REWRITE_TIMEOUT_S:g} s; "
                    "expected it to be done: where appendonly was switched on just now, a restart would lose what is "
                    "written until then. Try again once INFO persistence says aof_rewrite_in_progress:0 and "
                    "aof_rewrite_scheduled:0; where that stays away, Redis's log says why (its memory, its disk)."
                )
            time.sleep(REWRITE_POLL_S)

    def _warn_of_replicas(self) -> None:
        with self._translated():
            replicas = self._redis.info("replication").get("connected_slaves")
        if replicas:
            _log.warning(
                "Redis at %s has %d replica(s): a commit is durable there, and comes to them later, so a fail-over may "
                "lose commits. Then LedgerRolledBack ends the launch, and the job goes on from its last checkpoint",
                self.address, replicas,
            )  # fmt: skip

    def close(self) -> None:
        self._redis.close()
        self._redis.connection_pool.disconnect()

    def _settings(self) -> dict[str, str]:
        """By CONFIG GET; where that is forbidden, as on managed servers, by INFO."""
        settings: dict[str, str] = {}
        try:
            for setting, _, _ in _SAFE_SETTINGS:
                settings |= cast("dict[str, str]", self._redis.config_get(setting))
        except exceptions.ResponseError as error:
            if (
                not isinstance(error, exceptions.NoPermissionError)
                and "unknown command" not in str(error).lower()
            ):
                raise
            info = self._redis.info("persistence")
            if "aof_enabled" in info:
                settings["appendonly"] = "yes" if int(info["aof_enabled"]) else "no"
        return settings

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (
            exceptions.AuthenticationError,
            exceptions.AuthorizationError,
            exceptions.NoPermissionError,
        ) as error:
            raise LedgerUnavailable(
                f"Redis at {self.address} refuses this user: {str(error).rstrip('.')}. Look at the user and password "
                f"in the ledger's URL, and at the user's ACL."
            ) from error
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise LedgerUnavailable(
                f"Redis at {self.address} cannot be reached: {str(error).rstrip('.')}. Look whether it runs, whether "
                f"host and port are right, and whether a firewall stands between."
            ) from error
        except exceptions.RedisError as error:
            if _NOT_NOW.search(f"{type(error).__name__} {error}") or isinstance(
                error, _NOT_NOW_TYPES
            ):
                raise LedgerUnavailable(
                    f"Redis at {self.address} cannot write now: {error}. Look at its memory, its disk and its role."
                ) from error
            raise LedgerError(f"Redis at {self.address} refuses: {error}") from error


def load_scripts() -> dict[str, str]:
    """The scripts of ``lua/`` by name, each with ``run.lua`` before it."""
    folder = resources.files("tokenloom_server.ledger") / "lua"
    texts = {
        entry.name.removesuffix(".lua"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".lua")
    }
    before = texts.pop("run")
    return {name: before + text for name, text in texts.items()}
