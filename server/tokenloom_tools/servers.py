"""The servers of a run, as a gRPC URL names them: how they are reached, and what their errors mean."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.address import Address, reached_at
from tokenloom_proto.credentials import Credentials
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.errors import named
from tokenloom_proto.rest import TIMEOUT_S, About
from tokenloom_proto.versions import unknown_service
from tokenloom_server.errors import ConfigError, TokenloomError

from tokenloom_tools.remote import ServerUnreachable, token_to_look

_OPTIONS = [
    # A proxy of the environment is for the outside world, not for the cluster.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
]


class Servers:
    """The servers of a run, and the credentials for them."""

    def __init__(
        self,
        address: Address,
        environment: Mapping[str, str],
        *,
        token_file: Path | None = None,
    ) -> None:
        """The token is that of the file, else of the environment, as files of TLS are (see ``Credentials``).

        Raises ``ConfigError``, also where the token would travel unencrypted to another machine.
        """
        self.url = str(address)
        try:
            self._credentials = Credentials.find(
                address.hosts,
                tls=address.tls,
                token=token_to_look(environment, token_file),
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

    def about(self) -> About:
        """The runs of the first server that answers, and where REST is. Raises ``ServerUnreachable``."""
        for target in self.targets:
            with self.channel(target) as channel:
                try:
                    answer = DataLoaderStub(channel).Stats(
                        wire.StatsRequest(), timeout=TIMEOUT_S, metadata=self.metadata
                    )
                    about = About.parse(answer.stats_json, "rest_address", self.url)
                    return about._replace(address=reached_at(about.address, target))
                except grpc.RpcError as error:
                    fault = self.failure(error)
        raise fault

    def is_server(self, identity: str) -> bool:
        """Whether one of them is this process. They are asked without the token."""
        for target in self.targets:
            with self.channel(target) as channel, suppress(grpc.RpcError):
                HealthStub(channel).Check(HealthCheckRequest(service=identity), timeout=TIMEOUT_S)
                return True
        return False

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
            f"{self.url}: no answer ({error.code().name}: {details}); is the server running, and is this an address "
            "that `tokenloom serve` printed?"
        )
