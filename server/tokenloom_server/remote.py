"""A running server's figures, read over REST."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request

from pydantic import ValidationError

from tokenloom_server.errors import ConfigError, NotFound, TokenloomError
from tokenloom_server.stats import RunStats

_TIMEOUT_S = 10.0


class ServerUnreachable(TokenloomError):
    """Nothing answers at the address, or something else does."""


def read_stats(url: str, run: str | None) -> list[RunStats]:
    """The figures of one run, or of all. Raises ``ConfigError``, ``ServerUnreachable`` or ``NotFound``."""
    base = url if "://" in url else f"http://{url}"
    if urllib.parse.urlsplit(base).scheme not in ("http", "https"):
        raise ConfigError(f"{url!r}: expected the REST address that the server printed, such as http://127.0.0.1:8080")
    base = base.rstrip("/")
    names = [run] if run is not None else list(json.loads(_get(f"{base}/v1/runs"))["runs"])
    try:
        return [
            RunStats.model_validate_json(_get(f"{base}/v1/runs/{urllib.parse.quote(name)}/stats")) for name in names
        ]
    except ValidationError:
        raise ServerUnreachable(
            f"{url}: the answer is not a run's figures; is it a Tokenloom server of this release?"
        ) from None


def _get(url: str) -> bytes:
    # A proxy of the environment is for the outside world, not for the cluster.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as response:
            body: bytes = response.read()
            return body
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            message = str(json.loads(text)["message"])
        except (ValueError, KeyError, TypeError):
            message = text[:200]
        raise (NotFound if error.code == 404 else ServerUnreachable)(f"{url}: {error.code}: {message}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerUnreachable(
            f"{url}: no answer ({reason}); give the REST address that `tokenloom serve` printed"
        ) from None
