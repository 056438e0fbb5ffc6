"""Where a run is served: ``grpc://host:port/run``, or ``grpcs://`` with TLS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

EXPECTED = (
    "expected grpc://HOST:PORT/RUN, such as grpc://127.0.0.1:50051/wiki-and-code, or, where others stand by, "
    "grpc://HOST:PORT,HOST:PORT/RUN; with TLS grpcs://…; or, for a dataset, the path of a mixture file (.yaml)"
)


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


def _target(place: str) -> str:
    parts = urlsplit(f"//{place}")
    host, port = parts.hostname, parts.port
    if not host or not port or parts.username or parts.password:
        raise ValueError(f"{place!r} is not HOST:PORT")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
