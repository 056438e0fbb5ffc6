"""When a certificate ends, as `cryptography` reads it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from tokenloom_proto.certificate import _end_of, refuse_expired

PAST = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("year", [2021, 2049, 2050, 2400])
def test_the_end_is_read_in_both_of_its_forms(year: int) -> None:
    end = datetime(year, 12, 31, 23, 59, 58, tzinfo=UTC)
    authority = trustme.CA(key_type=trustme.KeyType.RSA if year == 2021 else trustme.KeyType.ECDSA)
    # Names of different lengths: lengths of more than one byte, too.
    issued = authority.issue_cert("a" * 40 + ".example", common_name="n" * 60, not_before=PAST, not_after=end)
    pem = issued.cert_chain_pems[0].bytes()
    certificate = x509.load_pem_x509_certificate(pem)
    der = certificate.public_bytes(serialization.Encoding.DER)
    assert _end_of(der) == certificate.not_valid_after_utc == end
    chain = pem.decode() + authority.cert_pem.bytes().decode()
    if year < 2026:
        with pytest.raises(ValueError, match=rf"it has a certificate that expired at {year}-12-31 23:59:58 UTC"):
            refuse_expired("it", chain)
    else:
        refuse_expired("it", chain)


def test_a_certificate_is_good_until_its_last_second_and_what_is_none_is_left_to_tls() -> None:
    soon = datetime.now(UTC) + timedelta(minutes=5)
    issued = trustme.CA().issue_cert("localhost", not_before=PAST, not_after=soon)
    refuse_expired("it", issued.cert_chain_pems[0].bytes().decode())
    refuse_expired("it", "no certificate")
