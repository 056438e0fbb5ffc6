"""When a certificate ends, to the second."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import trustme
from tokenloom_proto import credentials


@pytest.mark.parametrize("year", [1951, 2049, 2050, 2400])
def test_the_end_is_read_in_both_of_its_forms(year: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, end = datetime(1950, 1, 1, tzinfo=UTC), datetime(year, 12, 31, 23, 59, 58, tzinfo=UTC)
    authority = trustme.CA()
    issued = authority.issue_cert("a.example", not_before=begin, not_after=end)
    chain = "".join(pem.bytes().decode() for pem in (*issued.cert_chain_pems, authority.cert_pem))
    for now in (end - timedelta(seconds=1), end):
        monkeypatch.setattr(
            credentials, "datetime", type("Clock", (datetime,), {"now": lambda _, at=now: at})
        )
        if now < end:
            credentials.refuse_expired("it", chain)
    with pytest.raises(
        ValueError,
        match=f"^it has a certificate that expired at {year}-12-31 23:59:58 UTC: renew it$",
    ):
        credentials.refuse_expired("it", chain)
    credentials.refuse_expired("it", "no certificate")
