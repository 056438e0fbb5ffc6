"""Requests to the Hub: the token goes to it alone, and every refusal becomes a sentence that says what to do.

All of huggingface_hub is imported here, and only when a source on the Hub is met: its settings (``HF_ENDPOINT``,
``HF_HOME``, ``HF_HUB_OFFLINE``), its token, its HTTP client with whatever proxy the user gave it. Not its ``HfApi``: a
listing there has no time limit, waits as long as a server asks for, and follows a page's link to another host with the
token (measured: benchmarks/LOG.md).
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit

from tokenloom_server.errors import SourceError
from tokenloom_server.storage.io_stats import IoStats

_log = logging.getLogger(__name__)

#: Seconds without a byte after which a request is given up.
SILENCE_S = 20.0

#: Tries of a request in all; between them a wait that doubles, or what the Hub asks for.
TRIES = 6
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0

#: The longest that the Hub may ask to wait: its own windows are five minutes long.
LONGEST_ASKED_S = 330.0

#: Bytes of an answer that is no file's: a page of 1,000 files has about 300 KB.
ANSWER_BYTES = 64 * 2**20

#: Redirects in a row: a renamed repository, a cached copy, storage.
REDIRECTS = 5

INSTALL = "install it with: pip install 'tokenloom[hf]'"

_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_T = TypeVar("_T")


class HubBusy(OSError):
    """A request that failed and may go through when it is made again."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        #: Seconds that the Hub asks to wait, and the same as whoever retries reads for any storage.
        self.retry_after_s = retry_after_s
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}


class HubRefused(Exception):
    """A request that would fail again. ``kind`` is ``repo``, ``revision``, ``entry``, ``gated``, ``token`` or
    ``other``; the text says what is wrong and what to do."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Reply:
    """The head of an answer, whose body is still to be read."""

    status: int
    headers: Mapping[str, str]
    #: Headers of the last answer that the Hub itself gave on the way; none where it was not asked.
    hub: Mapping[str, str]
    response: Any
    #: Where the body lies. It may be signed, and so is a secret.
    url: str

    def body(self, most: int) -> bytes:
        """All of it. Raises ``HubBusy`` when it is cut short, and for more than ``most`` bytes."""
        content = bytearray()
        for part in self.response.iter_raw():
            content += part
            if len(content) > most:
                raise HubBusy(f"an answer of more than {most} bytes")
        return bytes(content)


class HubClient:
    """Safe for threads. Holds no connection of its own: huggingface_hub's client does."""

    def __init__(self) -> None:
        """Raises ``SourceError`` where huggingface_hub is missing or too old."""
        try:
            self._hub = import_module("huggingface_hub")
            self._constants = import_module("huggingface_hub.constants")
            errors = import_module("huggingface_hub.errors")
            self._cached_tree = self._hub.get_cached_repo_tree
            # The base of all that its HTTP client raises; which library that is differs between releases.
            self._http_error: type[Exception] = errors.HTTPError
        except (ImportError, AttributeError) as error:
            raise SourceError(
                f"sources on the Hub need huggingface_hub 1.33 or later ({error}); {INSTALL}"
            ) from None
        self._no_tree_error: type[Exception] = errors.CachedRepoTreeNotFoundError
        # These log each request with its URL, and the headers of answers: signatures, that is.
        library = self._http_error.__module__.partition(".")[0]
        for name in (library, library.replace("httpx", "httpcore")):
            logging.getLogger(name).setLevel(logging.WARNING)

    @property
    def endpoint(self) -> str:
        """``HF_ENDPOINT``, or the Hub itself."""
        return str(self._constants.ENDPOINT).rstrip("/")

    @property
    def offline(self) -> bool:
        """``HF_HUB_OFFLINE``."""
        return bool(self._constants.is_offline_mode())

    @property
    def cache_dir(self) -> str:
        """Where huggingface_hub keeps the files that it downloaded."""
        return str(self._constants.HF_HUB_CACHE)

    def cached_file(self, repo: str, commit: str, path: str) -> Path | None:
        """Where a dataset's file at a commit lies in the cache."""
        cached = self._hub.try_to_load_from_cache(repo, path, revision=commit, repo_type="dataset")
        return Path(cached) if isinstance(cached, str) else None

    def cached_tree(self, repo: str, commit: str) -> list[Any] | None:
        """Every file of a commit as ``RepoFile``, where the cache knows."""
        try:
            return list(self._cached_tree(repo, repo_type="dataset", revision=commit))
        except self._no_tree_error:
            return None

    def get_json(
        self, path: str, query: Mapping[str, str] | None = None
    ) -> tuple[Any, dict[str, str] | None]:
        """An answer of the Hub's API, and the query that gives the next page of it, if there is one.

        Tries again while the Hub is busy. Raises ``HubRefused``, and ``HubBusy`` after the last try.
        """
        url = f"{self.endpoint}/{path}" + (f"?{urlencode(query)}" if query else "")

        def ask() -> tuple[Any, dict[str, str] | None]:
            with self.ask("GET", url) as reply:
                body = reply.body(ANSWER_BYTES)
                following = reply.response.links.get("next")
            try:
                document = json.loads(body)
            except ValueError:
                raise HubBusy(f"{self.endpoint} answered with something that is no JSON") from None
            # Only the query counts: a mirror may name the Hub's own address, which must not get this one's token.
            return document, following and dict(parse_qsl(urlsplit(following["url"]).query))

        return retried(ask)

    @contextmanager
    def ask(
        self, method: str, url: str, headers: Mapping[str, str] | None = None
    ) -> Iterator[Reply]:
        """One request, without another try. The token goes to the Hub's own address and nowhere else; a HEAD ends where
        that leads to another one.

        Raises ``HubBusy`` and ``HubRefused``. A 416 counts as an answer.
        """
        hub: Mapping[str, str] = {}
        for _ in range(REDIRECTS):
            with self._sent(method, url, headers or {}) as response:
                status, received = int(response.status_code), response.headers
                if self.is_own(url):
                    hub = received
                if status in (301, 302, 303, 307, 308) and received.get("location"):
                    url = urljoin(url, received["location"])
                    # Elsewhere, what a HEAD asks is answered by now, and a signature may be good for GET alone.
                    if method != "HEAD" or self.is_own(url):
                        continue
                elif status >= 400 and status != 416:
                    raise self._fault(url, response)
                yield Reply(status, received, hub, response, url)
                return
        raise HubRefused(
            "other", f"{self._named(url)} leads from one place to the next without an end"
        )

    @contextmanager
    def _sent(self, method: str, url: str, headers: Mapping[str, str]) -> Iterator[Any]:
        if self.offline:
            raise HubRefused("other", f"{self._named(url)} cannot be asked: HF_HUB_OFFLINE is set")
        # Compressed, an answer's ranges would be others.
        sent = {"user-agent": "tokenloom", "accept-encoding": "identity", **headers}
        token = self._token()
        if token and self.is_own(url):
            sent["authorization"] = f"Bearer {token}"
        session = self._hub.utils.get_session()
        try:
            silence_s = min(SILENCE_S, IoStats.default_policy.total_s)
            with session.stream(
                method, url, headers=sent, timeout=silence_s, follow_redirects=False
            ) as response:
                yield response
        except self._http_error as error:
            raise HubBusy(f"{self._named(url)}: {self._scrubbed(error)}") from None

    def is_own(self, url: str) -> bool:
        """Whether an address is the Hub's: the same scheme, host and port."""
        return urlsplit(url)[:2] == urlsplit(self.endpoint)[:2]

    def _named(self, url: str) -> str:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.hostname}"

    def _scrubbed(self, error: object) -> str:
        """An error's text without possible secrets: queries of URLs, and the token."""
        text = (
            re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", str(error)) or type(error).__name__
        )
        token = self._token()
        return text.replace(token, "…") if token else text

    def _token(self) -> str | None:
        """The token of the environment, or of the login on this machine."""
        token: str | None = self._hub.utils.get_token_to_send(None)
        return token

    def _fault(self, url: str, response: Any) -> Exception:
        """What an answer of an error means."""
        status, headers = int(response.status_code), response.headers
        code, said = (
            headers.get("x-error-code", ""),
            self._scrubbed(headers.get("x-error-message") or "")[:300],
        )
        if status in _BUSY:
            asked_s = _asked_s(headers)
            about = f"{self._named(url)} answered {status}" + (
                f" ({said})" if headers.get("x-error-message") else ""
            )
            return HubBusy(
                about + ("" if asked_s is None else f" and asks to wait for {asked_s:.0f} s"),
                asked_s,
            )
        if not self.is_own(url):
            return HubRefused("link", f"{self._named(url)} answered {status}")
        has = (
            "the token that was sent does not open it"
            if self._token()
            else "no token was sent: HF_TOKEN is not set"
        )
        if code == "GatedRepo":
            return HubRefused(
                "gated",
                f"is gated, and {has}; accept its terms on {self.endpoint} with your account, and set HF_TOKEN to a "
                "token of that account",
            )
        if status == 401 and "credentials" in said.lower():
            return HubRefused(
                "token",
                "cannot be asked for: the Hub does not know the token in HF_TOKEN (or has ended it)",
            )
        if code == "RevisionNotFound":
            return HubRefused("revision", "has no such revision")
        if code == "EntryNotFound":
            return HubRefused("entry", "has no such file")
        if code == "RepoNotFound" or status == 401:
            return HubRefused("repo", f"is not on {self.endpoint}, or is private, and {has}")
        if status == 403:
            return HubRefused("other", f"is forbidden ({said or 403}), and {has}")
        return HubRefused(
            "other",
            f"cannot be had: {self._named(url)} answered {status} ({said or 'no reason given'})",
        )


def retried(ask: Callable[[], _T]) -> _T:
    """What ``ask`` gives, tried again while it raises ``HubBusy``; the last of these is raised."""
    wait_s, until = FIRST_WAIT_S, time.monotonic() + IoStats.default_policy.total_s
    for tries in range(1, TRIES + 1):
        try:
            return ask()
        except HubBusy as error:
            asked_s = error.retry_after_s
            pause_s = wait_s if asked_s is None else asked_s
            if tries == TRIES or pause_s > LONGEST_ASKED_S or time.monotonic() + pause_s > until:
                raise
            _log.warning(
                "%s; trying again in %.1f s (try %d of %d)", error, pause_s, tries + 1, TRIES
            )
            time.sleep(pause_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    raise AssertionError("unreachable: the last try returns or raises")


def _asked_s(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait: by ``Retry-After`` (seconds or a date), or by the Hub's ``RateLimit: "api";r=0;t=55``."""
    after = headers.get("retry-after", "").strip()
    if after.isdecimal():
        return float(after)
    if after:
        try:
            return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
        except ValueError:
            pass  # neither: as if it were not there
    window = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("ratelimit", ""))
    return float(window[1]) if window else None
