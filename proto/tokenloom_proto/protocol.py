"""The version of the wire protocol. It stands in the name of the gRPC service, so peers of two versions never misread
each other: a call of another version finds no method, before anything is done."""

from __future__ import annotations

import re

from tokenloom_proto.errors import ProtocolError

#: As in the package of ``dataloader.proto``.
VERSION = 2
_METHOD = re.compile(r"/tokenloom\.v([0-9]+)\.DataLoader/")


def version_of(method: str) -> int | None:
    """The version that a call of a method (``/package.service/name``) speaks; None for other services' methods."""
    match = _METHOD.match(method)
    return int(match[1]) if match else None


def unknown_service(address: object, details: str) -> ProtocolError:
    """What a client says of an address at which nobody knows the service of its version."""
    return ProtocolError(
        f"{address} does not speak version {VERSION} of Tokenloom's wire protocol, which this client speaks "
        f"({details}): it is an older server, or not one of Tokenloom's; install the same release on both sides"
    )
