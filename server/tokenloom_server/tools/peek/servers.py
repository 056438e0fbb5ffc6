"""The servers of a run, as a gRPC URL names them: how they are reached, and what their errors mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

import grpc
from tokenloom_proto.credentials import NO_FILES, Credentials, TlsFiles
from tokenloom_proto.errors import named

from tokenloom_server.errors import ConfigError, TokenloomError
from tokenloom_server.tools.remote import ServerUnreachable, token_to_look

_OPTIONS = [
    # A proxy of the environment is for the outside world, not for the cluster.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
]


class Servers:
    """The servers of a run, and the credentials for them."""

    def __init__(
        self,
        url: str,
        environment: Mapping[str, str],
        *,
        token_file: Path | None = None,
        files: TlsFiles = NO_FILES,
    ) -> None:
        """Token and files of TLS are those given, else the environment's (see ``Credentials``).

        Raises ``ConfigError`` for another URL than ``grpc://host:port/run`` or ``grpcs://…`` (several addresses with
        commas between), and where the token would travel unencrypted to another machine.
        """
        self.url = url
        self.targets, self.run, tls = _parse(url)
        try:
            self._credentials = Credentials.find(
                [target.rpartition(":")[0] for target in self.targets],
                tls=tls,
                token=token_to_look(environment, token_file),
                files=files,
                environment=environment,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.metadata = self._credentials.metadata

    def channel(self, target: str) -> grpc.Channel:
        """To one of ``targets``."""
        credentials = self._credentials
        if not credentials.tls:
            return grpc.insecure_channel(target, options=_OPTIONS)
        tls = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)
        return grpc.secure_channel(target, tls, options=_OPTIONS)

    def failure(self, error: grpc.RpcError) -> TokenloomError:
        """The server's own error, by its name; else that nothing answers."""
        details = error.details() or error.code().name
        trailing = error.trailing_metadata() or ()
        name = next((str(entry.value) for entry in trailing if entry.key == "tokenloom-error"), "")
        if name:
            return named(name, details)
        return ServerUnreachable(
            f"{self.url}: no answer ({error.code().name}: {details}); give the gRPC address that `tokenloom serve` "
            "printed, and the run's name"
        )


def _parse(url: str) -> tuple[list[str], str, bool]:
    """(targets, run, whether with TLS)"""
    scheme, _, rest = url.partition("://")
    netloc, _, path = rest.partition("/")
    targets, run = netloc.split(","), unquote(path)
    if scheme not in ("grpc", "grpcs") or not run or set(run) & set("/?#") or not all(map(_is_target, targets)):
        raise ConfigError(
            f"{url!r}: expected what trainers use, grpc://HOST:PORT/RUN, such as grpc://127.0.0.1:50051/wiki-and-code"
        )
    return targets, run, scheme == "grpcs"


def _is_target(target: str) -> bool:
    host, _, port = target.rpartition(":")
    return bool(host) and port.isdecimal()
