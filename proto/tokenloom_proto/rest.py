"""How a client and the command line ask a server's REST interface."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from typing import NamedTuple

from tokenloom_proto.credentials import TlsFiles, authorization
from tokenloom_proto.errors import ConfigError, ProtocolError, TokenloomError, named

#: The route that says whose server it is.
ABOUT = "/v1/runs"
TIMEOUT_S = 10.0


class About(NamedTuple):
    """What a server says of itself."""

    runs: list[str]
    address: str
    """Where its other port listens."""

    @classmethod
    def parse(cls, text: str | bytes, key: str, where: str) -> About:
        """Reads the answer of one port, which has the other's address under ``key``. Raises ``ProtocolError``."""
        try:
            document = json.loads(text)
            return cls([str(run) for run in document["runs"]], str(document[key]))
        except (ValueError, KeyError, TypeError):
            raise ProtocolError(
                f"{where}: what answers there is not a Tokenloom server of this release"
            ) from None


def opener(url: str, files: TlsFiles) -> urllib.request.OpenerDirector:
    """What opens URLs of the server at ``url``. Raises ``OSError`` and ``ValueError`` for what are no files of TLS."""
    # A proxy of the environment is for the outside world, not for the cluster.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        context = ssl.create_default_context(cafile=files.ca)
        if files.cert is not None:
            context.load_cert_chain(files.cert, files.key, password=_no_passphrase)
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)


def get(
    opened: urllib.request.OpenerDirector,
    url: str,
    token: str | None,
    unreachable: type[TokenloomError],
    body: bytes | None = None,
    *,
    method: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> bytes:
    """The answer to a GET, or with a JSON ``body`` to a POST or another ``method``.

    Raises the server's own errors, and ``unreachable`` where nothing answers, or something else.
    """
    try:
        request = urllib.request.Request(url, body, method=method)
        if body is not None:
            request.add_header("Content-Type", "application/json")
        if token is not None:
            # Where the server sends us elsewhere, the token does not go there.
            request.add_unredirected_header("Authorization", authorization(token))
        with opened.open(request, timeout=timeout_s) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            problem = json.loads(text)
            name, message = str(problem["error"]), str(problem["message"])
        except (ValueError, KeyError, TypeError):
            name, message = "", text[:200]
        fault = named(name, f"{url}: {error.code}: {message}")
        if type(fault) is not TokenloomError or name == TokenloomError.__name__:
            raise fault from None
        # What only HTTP has a name for: a request that is wrong, or something that is no Tokenloom server.
        kind = ConfigError if name and error.code < 500 else unreachable
        raise kind(f"{url}: {error.code}: {message}") from None
    except (urllib.error.URLError, OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if type(error) is http.client.BadStatusLine:
            reason = "what answers there does not speak HTTP/1, such as the gRPC port of a server"
        raise unreachable(
            f"{url}: no answer ({reason}); is the server running, and is this the REST address that it printed?"
        ) from None


def _no_passphrase() -> str:
    # Without this, OpenSSL asks for one on the terminal, and waits.
    raise ValueError("the key has a passphrase")
