"""When a certificate ends: of what a TLS handshake checks, what is said before one fails."""

from __future__ import annotations

import re
import ssl
from datetime import datetime, timezone

_FIRST = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def refuse_expired(name: str, pem: str) -> None:
    """Raises ``ValueError``, which begins with ``name``, where the first certificate of a chain has expired."""
    match = _FIRST.search(pem)
    end = _end_of(ssl.PEM_cert_to_DER_cert(match[0])) if match else None
    if end is not None and end <= datetime.now(timezone.utc):
        raise ValueError(f"{name} has a certificate that expired at {end:%Y-%m-%d %H:%M:%S} UTC: renew it")


def _end_of(certificate: bytes) -> datetime:
    """``notAfter`` of a DER certificate (RFC 5280, section 4.1): the second time of the fourth element after the
    version."""
    position, _ = _element(certificate, _element(certificate, 0)[0])
    if certificate[position] == 0xA0:
        _, position = _element(certificate, position)
    for _ in ("serial number", "signature", "issuer"):
        _, position = _element(certificate, position)
    _, position = _element(certificate, _element(certificate, position)[0])
    begin, end = _element(certificate, position)
    text = certificate[begin:end].decode("ascii")
    if certificate[position] == 0x17:  # UTCTime has two digits of a year, from 1950 to 2049
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)


def _element(der: bytes, position: int) -> tuple[int, int]:
    """Where the content of the element at a position begins and ends."""
    begin, length = position + 2, der[position + 1]
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[position + 2 : begin], "big")
    return begin, begin + length
