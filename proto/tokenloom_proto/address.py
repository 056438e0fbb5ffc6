"""Where a run is served: ``grpc://host:port/run``, or ``grpcs://`` with TLS."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

EXPECTED = (
    "expected grpc://HOST:PORT/RUN, such as grpc://127.0.0.1:50051/wiki-and-code, or, where others stand by, "
    "grpc://HOST:PORT,HOST:PORT/RUN; with TLS grpcs://…; or, for a dataset, the path of a mixture file (.yaml)"
)
EITHER = (
    "expected HOST:PORT of its gRPC or REST port, such as 127.0.0.1:8080, or the URL of a run, such as "
    "grpc://127.0.0.1:50051/wiki-and-code or http://127.0.0.1:8080/v1/runs/wiki-and-code"
)
_DEFAULT_PORTS = {"": None, "grpc": None, "grpcs": None, "http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """The gRPC targets of the servers that may lead a run, and its name."""

    targets: tuple[str, ...]
    run: str
    tls: bool = False
    connect: Callable[[], Any] | None = field(default=None, repr=False, compare=False)
    """Gives the channel to a run of this process, whose one target is its mixture file; None for servers."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Reads a URL; raises ``ValueError``, with the expected form, for any other text."""
        try:
            scheme, _, rest = url.partition("://")
            places, _, path = rest.partition("/")
            # One place at a time: several are no URL, and some releases of Python refuse brackets in their midst.
            targets = tuple(map(_target, places.split(",")))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{url!r} is not the address of a run ({error}): {EXPECTED}") from None
        run = unquote(path)
        if scheme not in ("grpc", "grpcs") or not run or set("/?#") & set(path) or "/" in run:
            raise ValueError(f"{url!r} is not the address of a run: {EXPECTED}")
        return cls(targets, run, scheme == "grpcs")

    def __str__(self) -> str:
        if self.connect is not None:
            return f"run {self.run!r} of {self.targets[0]}"
        return f"{'grpcs' if self.tls else 'grpc'}://{','.join(self.targets)}/{self.run}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Without ports; an IPv6 one in brackets."""
        return tuple(target.rpartition(":")[0] for target in self.targets)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """What people name a server by: ``HOST:PORT`` of either port, or a URL, with or without a run."""

    scheme: str
    """``grpc``, ``grpcs``, ``http`` or ``https``; empty where none is given."""
    targets: tuple[str, ...]
    run: str
    """Empty where none is given."""

    @classmethod
    def parse(cls, text: str) -> ServerAddress:
        """Reads ``HOST:PORT[/RUN]``, or a URL of a run, of a server's page, or of one of REST's routes.

        Raises ``ValueError``, without what stands after ``#``: the page's link has a token there.
        """
        scheme, _, rest = text.rpartition("://")
        places, _, path = re.split("[?#]", rest)[0].partition("/")
        try:
            if scheme not in _DEFAULT_PORTS:
                raise ValueError(f"its scheme is {scheme!r}")
            targets = tuple(_target(place, _DEFAULT_PORTS[scheme]) for place in places.split(","))
        except ValueError as error:
            raise ValueError(
                f"{text.partition('#')[0]!r} is not the address of a server ({error}): {EITHER}"
            ) from None
        return cls(
            scheme, targets, unquote(path.removeprefix("v1/runs").strip("/").partition("/")[0])
        )

    def is_tls(self, default: bool) -> bool:
        """Whether it is reached over TLS, ``default`` where it has no scheme."""
        return self.scheme.endswith("s") if self.scheme else default

    @property
    def is_grpc(self) -> bool:
        """Whether it is said to be that of gRPC."""
        return self.scheme.startswith("grpc")


def reached_at(address: str, target: str) -> str:
    """The address at which a server says that its other port listens, as it is reached by who reaches ``target`` of it:
    at the host that was named. To the server's own word for it another machine may answer here, such as this one to
    127.0.0.1, and its certificate need not be for that."""
    return f"{target.rpartition(':')[0]}:{address.rpartition(':')[2]}"


def _target(place: str, default_port: int | None = None) -> str:
    parts = urlsplit(f"//{place}")
    host, port = parts.hostname, parts.port or default_port
    if not host or not port or parts.username or parts.password:
        raise ValueError(f"{place!r} is not HOST:PORT")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
