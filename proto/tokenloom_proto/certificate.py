"""When a certificate ends: of what a TLS handshake checks, what is said before one fails."""

from __future__ import annotations

import re
import ssl
from datetime import datetime, timezone

_FIRST = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
#: ``Validity`` in DER (RFC 5280, section 4.1.2.5): two times, each with two digits of its year (UTCTime) or with four.
_VALIDITY = re.compile(rb"(?:\x17\x0d\d{12}|\x18\x0f\d{14})Z(?:\x17\x0d(\d{12})|\x18\x0f(\d{14}))Z")


def refuse_expired(name: str, pem: str) -> None:
    """Raises ``ValueError``, which begins with ``name``, where the first certificate of a chain has expired."""
    first = _FIRST.search(pem)
    validity = _VALIDITY.search(ssl.PEM_cert_to_DER_cert(first[0])) if first else None
    if validity is None:
        return
    short, long = validity.groups()
    # Two digits of a year are of 1950 to 2049.
    text = (long or (b"19" if short >= b"50" else b"20") + short).decode()
    end = datetime.strptime(f"{text}+0000", "%Y%m%d%H%M%S%z")
    if end <= datetime.now(timezone.utc):
        raise ValueError(
            f"{name} has a certificate that expired at {end:%Y-%m-%d %H:%M:%S} UTC: renew it"
        )
