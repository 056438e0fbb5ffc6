"""The servers of a run, as a gRPC URL names them: how they are reached, and what their errors mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import grpc
from tokenloom_proto.address import Address
from tokenloom_proto.credentials import NO_FILES, Credentials, TlsFiles
from tokenloom_proto.errors import named
from tokenloom_proto.protocol import unknown_service

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
        try:
            address = Address.parse(url)
            self._credentials = Credentials.find(
                address.hosts,
                tls=address.tls,
                token=token_to_look(environment, token_file),
                files=files,
                environment=environment,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.targets, self.run = address.targets, address.run
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
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return unknown_service(self.url, details)
        return ServerUnreachable(
            f"{self.url}: no answer ({error.code().name}: {details}); give the gRPC address that `tokenloom serve` "
            "printed, and the run's name"
        )
