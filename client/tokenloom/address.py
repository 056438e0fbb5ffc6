"""Where a run is served: ``grpc://host:port/run``, or ``grpcs://`` with TLS."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

EXPECTED = "expected grpc://HOST:PORT/RUN, such as grpc://127.0.0.1:50051/wiki-and-code"


@dataclass(frozen=True, slots=True)
class Address:
    """A server's gRPC target and the name of one of its runs."""

    target: str
    run: str
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Address:
        """Reads a URL; raises ``ValueError``, with the expected form, for any other text."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{url!r} is not the address of a run ({error}): {EXPECTED}") from None
        run = unquote(parts.path.removeprefix("/"))
        extra = parts.query or parts.fragment or parts.username or parts.password
        if parts.scheme not in ("grpc", "grpcs") or not host or not port or not run or "/" in run or extra:
            raise ValueError(f"{url!r} is not the address of a run: {EXPECTED}")
        return cls(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", run, parts.scheme == "grpcs")

    def __str__(self) -> str:
        return f"{'grpcs' if self.tls else 'grpc'}://{self.target}/{self.run}"

    @property
    def host(self) -> str:
        """Without port; an IPv6 one in brackets."""
        return self.target.rpartition(":")[0]
