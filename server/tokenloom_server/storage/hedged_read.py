"""Asking storage again: after errors, with pauses that grow; and a second time where it is late.

The second read on slow storage, of which the first answer counts, is the hedged request of Dean and Barroso, "The Tail
at Scale" (2013).
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Generic, TypeVar

from tokenloom_proto.threads import Background

from tokenloom_server.errors import StorageError, TokenloomError
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.urls import redacted

#: How long a wait lasts without a look at whether the server stops, seconds.
LOOK_AGAIN_S = 0.5
_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Attempts under way at one read: the first, and those made because it does not answer.
AT_ONCE = 3
#: What storage answers of a place, and what was made of an answer already.
_ANSWERS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, TokenloomError)
#: What another attempt would meet again.
_FINAL = (*_ANSWERS, NotImplementedError, ImportError, TypeError, AttributeError)
#: The same, of libraries that are not imported here.
_FINAL_NAMES = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "ParamValidationError",
        "InvalidRegionError",
    }
)
#: Statuses of HTTP that are no refusal: a request that took too long, and too many of them.
_AGAIN_STATUSES = (408, 425, 429)
#: Those that say that an object is not there, and that whoever asks may not have it.
_GONE_STATUSES, _REFUSED_STATUSES = (404, 410), (401, 403)


class HedgedRead(Generic[_T]):
    """One thing that storage is asked for. The first attempt begins at once; ``result`` sees to all the rest.

    Each attempt has a thread of its own, which nobody waits for at the end of the process: storage may never answer.
    """

    def __init__(
        self, work: Callable[[], _T], name: str, io_stats: IoStats, length: int = 0
    ) -> None:
        """``length``: bytes that are asked for."""
        self._work = work
        self._name = name
        self._io_stats = io_stats
        self._length = length
        self._changed = threading.Condition()
        self._answer: list[_T] = []
        self._errors: deque[Exception] = deque()
        self._running = 0
        self._began = monotonic()
        self._attempt()

    def result(self) -> _T:
        """The result of the first attempt that succeeds.

        Raises ``FileNotFoundError``, ``IsADirectoryError`` and ``NotADirectoryError`` where storage answers that alone,
        and ``StorageError`` for what it refuses, and where there was no answer within ``RetryPolicy.total_s``.
        """
        with self._changed:
            if self._answer:
                return self._answer[0]
        with self._io_stats.waiting(self._name) as wait, self._changed:
            policy = self._io_stats.retry_policy
            deadline = monotonic() + policy.total_s
            next_at = self._began + self._io_stats.hedge_after_s(self._length)
            pause = policy.pause_s
            while not self._answer:
                while self._errors:
                    error = reason_of(self._errors.popleft())
                    if is_final(error):
                        raise error if isinstance(error, _ANSWERS) else refused(self._name, error)
                    wait.trouble = _said(error)
                    if not self._running:
                        # At least a part of the pause is chance: many who failed together do not come again together.
                        next_at = monotonic() + max(
                            pause * random.uniform(0.5, 1.0), _retry_after_s(error)
                        )
                        pause = min(2 * pause, policy.longest_pause_s)
                    _log.log(
                        logging.DEBUG if wait.attempts == 1 else logging.WARNING,
                        "%s: attempt %d at reading it failed: %s", self._name, wait.attempts, wait.trouble,
                    )  # fmt: skip
                now = monotonic()
                if self._io_stats.stopped:
                    raise StorageError(f"{self._name} is no longer waited for: the server stops")
                if now >= deadline:
                    raise self._given_up(wait.attempts, wait.trouble)
                if now >= next_at and self._running < AT_ONCE:
                    measures = self._io_stats.measures
                    (measures.hedges if self._running else measures.retries).add()
                    self._attempt()
                    wait.attempts += 1
                    next_at = now + policy.attempt_s
                limits = [deadline] if self._running >= AT_ONCE else [deadline, next_at]
                self._changed.wait(min(LOOK_AGAIN_S, max(0.0, min(limits) - now)))
            return self._answer[0]

    def _attempt(self) -> None:
        self._running += 1
        Background("storage", self._run).start()

    def _run(self) -> None:
        began = monotonic()
        try:
            result = self._work()
        except Exception as error:
            with self._changed:
                self._running -= 1
                self._errors.append(error)
                self._changed.notify_all()
            return
        self._io_stats.took(self._length, monotonic() - began)
        with self._changed:
            self._running -= 1
            if not self._answer:
                self._answer.append(result)
            self._changed.notify_all()

    def _given_up(self, attempts: int, trouble: str) -> StorageError:
        last = f"the last answer was: {trouble}" if trouble else "no attempt was answered"
        return StorageError(
            f"{self._name} could not be read for {self._io_stats.retry_policy.total_s:.0f} s, in {attempts} attempts; "
            f"{last}"
            ". Look at the storage and the network, then start again (trainers, from their last checkpoint): nothing "
            "is wrong with the data"
        )


def refused(name: str, error: Exception) -> StorageError:
    """What to say of a read that storage refuses, or that cannot be asked for."""
    return StorageError(
        f"{name} cannot be read: its storage refuses it ({_said(error)}); look at credentials, "
        "region and end point in the server's environment"
    )


def reason_of(error: Exception) -> Exception:
    """What an error is about. A library may raise ``FileNotFoundError`` for whatever fails, a connection even; it stays
    one where what it was raised for is none of storage's other answers, or of none."""
    cause: BaseException = error
    while (
        isinstance(cause, FileNotFoundError)
        and (before := cause.__cause__ or cause.__context__) is not None
    ):
        cause = before
    # Arrow says of a file of HDFS in words alone that there is none.
    is_gone = _status(cause) in _GONE_STATUSES or "does not exist" in str(cause)
    if (
        is_gone
        or isinstance(cause, FileNotFoundError | LookupError)
        or not isinstance(cause, Exception)
    ):
        return error
    return cause


def is_refused(error: Exception) -> bool:
    """Whether storage refuses who asks, and may take other credentials."""
    # gcsfs has no more than the text.
    is_said = isinstance(error, PermissionError) or str(error).startswith("Forbidden: ")
    return is_said or _status(error) in _REFUSED_STATUSES


def is_final(error: Exception) -> bool:
    """Whether another attempt would meet the same."""
    if is_refused(error):
        # What brings new credentials may be late.
        return "expired" not in str(error).lower()
    if isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES:
        return True
    status = _status(error)
    return status is not None and 400 <= status < 500 and status not in _AGAIN_STATUSES


def _response(error: BaseException) -> Any:
    return getattr(error, "response", None)


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of a client library brings, if it does."""
    response = _response(error)
    if isinstance(response, dict):  # of botocore
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    # The last one is gcsfs's; aiohttp has it, too, and warns of it.
    for holder, field in (
        (error, "status"),
        (response, "status_code"),
        (response, "status"),
        (error, "code"),
    ):
        status = getattr(holder, field, None)
        if isinstance(status, int):
            return status
    return None


def _retry_after_s(error: Exception) -> float:
    """How long the server asked to be left alone, seconds."""
    headers = getattr(_response(error), "headers", None) or getattr(error, "headers", None)
    with contextlib.suppress(Exception):
        return max(0.0, float(headers["Retry-After"]))  # type: ignore[index]
    return 0.0


def _said(error: Exception) -> str:
    return redacted(f"{type(error).__name__}: {error}")[:300]
