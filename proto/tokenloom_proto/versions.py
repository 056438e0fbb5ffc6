"""Which client and server work together: the version of the wire protocol, and releases."""

from __future__ import annotations

import re

from tokenloom_proto.errors import ProtocolError

# The version of the wire protocol. It stands in the name of the gRPC service, so peers of two versions never misread
# each other: a call of another version finds no method, before anything is done.


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


# Which releases of client and server work together: those that are at most one minor version apart.


#: A release as Join carries it. A development version (``0.2.0.dev3+g1a2b3c``) counts as the release that it leads to.
_RELEASE = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})[0-9A-Za-z.+!-]{0,64}", re.ASCII)


def own_release() -> str:
    """The version of the package that is installed here; empty where its files lie on the path alone."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tokenloom")
    except PackageNotFoundError:
        return ""


def require_compatible(client: str, server: str) -> None:
    """Raises ``ProtocolError`` where the two releases are further apart than one minor version. An empty one is not
    known, as with clients of others: then the wire's version alone decides."""
    theirs, ours = _numbers(client, "client"), _numbers(server, "server")
    if theirs and ours and (theirs[0] != ours[0] or abs(theirs[1] - ours[1]) > 1):
        raise ProtocolError(
            f"this client is Tokenloom {client}, and this server {server}: releases work together that are at most one "
            f"minor version apart; install tokenloom {ours[0]}.{ours[1]} where the trainers run, or "
            f"{theirs[0]}.{theirs[1]} on the server"
        )


def _numbers(text: str, side: str) -> tuple[int, int] | None:
    if not text:
        return None
    match = _RELEASE.fullmatch(text)
    if match is None:
        raise ProtocolError(
            f"release: the {side} says {text[:80]!r}; expected a version such as 0.2.0, or nothing where it is not one "
            "of Tokenloom's"
        )
    return int(match[1]), int(match[2])
