"""Questions to the server that take no part in the run: they need no Join."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import grpc
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub

from tokenloom.connection.channel import Retry, failure, open_channel, retryable
from tokenloom.connection.join import Request


def plan(request: Request, until_tokens: int) -> dict[str, Any]:
    """The run's plan from its beginning; 0: as far as its data go."""
    message = wire.PlanRequest(run=request.address.run, until_tokens=until_tokens)
    return _ask(request, lambda stub, **options: stub.Plan(message, **options).plan_json)


def stats(request: Request) -> dict[str, Any]:
    """The run's figures."""
    message = wire.StatsRequest(run=request.address.run)
    return _ask(request, lambda stub, **options: stub.Stats(message, **options).stats_json)


def _ask(request: Request, call: Callable[..., str]) -> dict[str, Any]:
    """The document that a call answers with, as soon as a server does. Raises what it refuses with, and
    ``ServerUnavailable`` after ``connect_timeout_s``."""
    address = request.address
    retry = Retry(request.options.connect_timeout_s, len(address.targets))
    targets = cycle(address.targets)
    while True:
        with open_channel(address, next(targets), request.credentials) as channel:
            timeout_s = max(retry.remaining_s(), 0.001)
            try:
                text = call(
                    DataLoaderStub(channel),
                    timeout=timeout_s,
                    metadata=request.credentials.metadata,
                )
                document: dict[str, Any] = json.loads(text)
                return document
            except grpc.RpcError as error:
                delay_s = retry.next_delay_s()
                if delay_s is None or not retryable(error, address):
                    raise failure(error, address) from None
        time.sleep(delay_s)
