"""Large numbers as people write them."""

from __future__ import annotations

import pytest
from tokenloom_server.core.numbers import parse_amount, short
from tokenloom_server.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1", 1),
        ("812", 812),
        ("2_000_000", 2_000_000),
        ("2,000,000", 2_000_000),
        ("500M", 500_000_000),
        ("10B", 10_000_000_000),
        ("10 b", 10_000_000_000),
        ("1.5T", 1_500_000_000_000),
        ("0.1K", 100),
        # Exact, where doubles are not.
        ("4.35B", 4_350_000_000),
        ("9007.199254740991T", 2**53 - 1),
    ],
)
def test_an_amount_is_read_exactly(text: str, amount: int) -> None:
    assert parse_amount(text, "--tokens") == amount


@pytest.mark.parametrize(
    "text", ["", "ten", "10Q", "-5", "1e9", "1.B", ".5B", "B", "1 0", "½", "１０", "nan", "inf"]
)
def test_what_is_no_amount_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^--tokens: .* is no number of tokens; expected a number such as 500M, 10B",
    ):
        parse_amount(text, "--tokens")


@pytest.mark.parametrize("text", ["0", "0.5", "1.2345K", "9008T"])
def test_an_amount_is_whole_and_within_what_counters_hold(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a whole number from 1 to 2\^53"):
        parse_amount(text, "--tokens")


def test_amounts_are_shown_with_three_digits() -> None:
    shown = {
        0: "0",
        812: "812",
        999: "999",
        999.6: "1.00K",
        1000: "1.00K",
        12_345: "12.3K",
        999_499: "999K",
    }
    shown |= {
        999_600: "1.00M",
        99_960_000: "100M",
        9_996_000: "10.0M",
        1.5e12: "1.50T",
        2.5e15: "2,500T",
    }
    assert {amount: short(amount) for amount in shown} == shown
