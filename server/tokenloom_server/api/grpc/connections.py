"""Closes the connection by which a call came: gRPC itself waits for ever for a client that reads nothing."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path


def close_connection(address: str) -> None:
    """``address``: of the client, as gRPC has it, such as ``ipv4:10.0.0.7:40312``. Where it is gone, does nothing."""
    host, _, port = address.partition(":")[2].rpartition(":")
    with suppress(ValueError):
        peer = _plain(host.strip("[]")), int(port)
        for descriptor in Path("/dev/fd").iterdir():
            with suppress(OSError, ValueError):
                _shut(int(descriptor.name), peer)


def _shut(descriptor: int, peer: tuple[IPv4Address | IPv6Address, int]) -> None:
    own = os.dup(descriptor)  # else another thread might close it, and the number be another file's
    if not stat.S_ISSOCK(os.fstat(own).st_mode):
        os.close(own)
        return
    with socket.socket(fileno=own) as connection:
        host, port = connection.getpeername()[:2]
        if (_plain(host), port) == peer:
            connection.shutdown(socket.SHUT_RDWR)


def _plain(host: str) -> IPv4Address | IPv6Address:
    """An address, that of IPv4 where it is one within IPv6's."""
    address = ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address
