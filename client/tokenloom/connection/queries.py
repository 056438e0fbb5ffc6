"""Questions to the server that take no part in the run: they need no Join."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any, TypeVar

import grpc
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.credentials import Credentials
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub

from tokenloom.connection.address import Address
from tokenloom.connection.channel import Retry, failure, open_channel, retryable

Answer = TypeVar("Answer")


def plan(address: Address, credentials: Credentials, until_tokens: int, timeout_s: float) -> dict[str, Any]:
    """The run's plan from its beginning; 0: as far as its data go."""
    request = wire.PlanRequest(run=address.run, until_tokens=until_tokens)
    answer = _ask(address, credentials, timeout_s, lambda stub, options: stub.Plan(request, **options))
    document: dict[str, Any] = json.loads(answer.plan_json)
    return document


def stats(address: Address, credentials: Credentials, timeout_s: float) -> dict[str, Any]:
    """The run's figures."""
    request = wire.StatsRequest(run=address.run)
    answer = _ask(address, credentials, timeout_s, lambda stub, options: stub.Stats(request, **options))
    document: dict[str, Any] = json.loads(answer.stats_json)
    return document


def _ask(
    address: Address,
    credentials: Credentials,
    timeout_s: float,
    call: Callable[[DataLoaderStub, dict[str, Any]], Answer],
) -> Answer:
    """Asks until a server answers. Raises what it refuses with, and ``ServerUnavailable`` after ``timeout_s``."""
    retry = Retry(timeout_s, len(address.targets))
    targets = cycle(address.targets)
    while True:
        with open_channel(address, next(targets), credentials) as channel:
            try:
                options = {"timeout": max(retry.remaining_s(), 0.001), "metadata": credentials.metadata}
                return call(DataLoaderStub(channel), options)
            except grpc.RpcError as error:
                delay_s = retry.next_delay_s()
                if delay_s is None or not retryable(error):
                    raise failure(error, address) from error
        time.sleep(delay_s)
