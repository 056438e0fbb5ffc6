"""When a certificate ends, to the second."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import trustme
from tokenloom_proto import certificate


@pytest.mark.parametrize("year", [1951, 2021, 2049, 2050, 2400])
def test_the_end_is_read_in_both_of_its_forms(year: int, monkeypatch: pytest.MonkeyPatch) -> None:
    end = datetime(year, 12, 31, 23, 59, 58, tzinfo=UTC)
    authority = trustme.CA(key_type=trustme.KeyType.RSA if year == 2021 else trustme.KeyType.ECDSA)
    begin = datetime(1950, 1, 1, tzinfo=UTC)
    issued = authority.issue_cert("a.example", common_name="n" * 60, not_before=begin, not_after=end)
    chain = "".join(pem.bytes().decode() for pem in (*issued.cert_chain_pems, authority.cert_pem))

    class Clock(datetime):
        now_is = end

        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return cls.now_is

    monkeypatch.setattr(certificate, "datetime", Clock)
    with pytest.raises(
        ValueError, match=rf"^it has a certificate that expired at {year}-12-31 23:59:58 UTC: renew it$"
    ):
        certificate.refuse_expired("it", chain)
    Clock.now_is = end - timedelta(seconds=1)
    certificate.refuse_expired("it", chain)


def test_what_is_no_certificate_is_left_to_tls() -> None:
    certificate.refuse_expired("it", "no certificate")
