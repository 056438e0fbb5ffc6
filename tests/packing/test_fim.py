"""Fill in the middle, against a reading of the same rule in plain Python, token by token."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenloom_server.core.hashing import Purpose, draw, stream
from tokenloom_server.packing.fim import PSM, SPM, FillInMiddle

PREFIX, MIDDLE, SUFFIX, BOS, EOT = 1001, 1002, 1003, 7, 8
MASK = 2**64 - 1


def split_mix(key: int, counter: int) -> int:
    x = (key + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_the_stream_is_splitmix64() -> None:
    # The first outputs of its authors' code for the seed 1234567.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert (
        stream(1234567, np.arange(3, dtype=np.uint64)).tolist()
        == known
        == [split_mix(1234567, i) for i in range(3)]
    )


def expected(
    fim: FillInMiddle, row: list[int], epoch: int, shard: int, number: int
) -> tuple[list[int], int]:
    """A row by definition, and how it was rearranged."""
    key = draw(fim.seed, Purpose.FIM, fim.source_id, shard, epoch)
    drawn = [split_mix(key, 4 * number + k) for k in range(4)]
    if not row or Fraction(drawn[0] >> 11, 2**53) >= Fraction(
        int(Fraction(fim.rate) * 2**53), 2**53
    ):
        return row, 0
    head = row[:1] if fim.bos_id is not None and row[0] == fim.bos_id else []
    body = row[len(head) :]
    tail = body[-1:] if fim.eot_id is not None and body and body[-1] == fim.eot_id else []
    body = body[: len(body) - len(tail)]
    a, b = sorted((x >> 32) * (len(body) + 1) >> 32 for x in drawn[2:])
    prefix, middle, suffix = body[:a], body[a:b], body[b:]
    if (drawn[1] >> 11) < int(Fraction(fim.spm_rate) * 2**53):
        return [*head, PREFIX, SUFFIX, *suffix, MIDDLE, *prefix, *middle, *tail], SPM
    return [*head, PREFIX, *prefix, SUFFIX, *suffix, MIDDLE, *middle, *tail], PSM


def made(**fields: Any) -> FillInMiddle:
    known: dict[str, Any] = {
        "rate": 0.5,
        "spm_rate": 0.5,
        "seed": 3,
        "source_id": 2,
        "bos_id": BOS,
        "eot_id": EOT,
    }
    return FillInMiddle(prefix_id=PREFIX, middle_id=MIDDLE, suffix_id=SUFFIX, **(known | fields))


def rearranged(
    fim: FillInMiddle, rows: list[list[int]], epoch: int = 0, shard: int = 0, first: int = 0
) -> tuple[list[list[int]], list[int]]:
    ids = np.array([token for row in rows for token in row], np.uint16)
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    numbers = np.arange(first, first + len(rows))
    out, out_ends, middles = fim.rearranged(ids, ends, epoch, np.full(len(rows), shard), numbers)
    assert out.dtype == ids.dtype
    assert out_ends.dtype == np.int64
    assert len(out) == (out_ends[-1] if len(rows) else 0)
    begins = [0, *out_ends.tolist()]
    found = [out[begin:end].tolist() for begin, end in zip(begins, out_ends.tolist(), strict=False)]
    return found, [0] * len(rows) if middles is None else middles.tolist()


token = st.integers(0, 20)  # begin- and end-of-text ids also where they are not expected


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(st.lists(token, max_size=9), min_size=1, max_size=12),
    rate=st.sampled_from([1.0, 0.5, 0.1]),
    spm=st.sampled_from([0.0, 0.5, 1.0]),
    ends=st.tuples(st.sampled_from([BOS, None]), st.sampled_from([EOT, None])),
    place=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2**40)),
)
def test_rows_are_rearranged_as_defined(
    rows: list[list[int]],
    rate: float,
    spm: float,
    ends: tuple[int | None, int | None],
    place: tuple[int, int, int],
) -> None:
    fim = made(rate=rate, spm_rate=spm, bos_id=ends[0], eot_id=ends[1])
    epoch, shard, first = place
    found = rearranged(fim, rows, epoch, shard, first)
    known = [expected(fim, row, epoch, shard, first + i) for i, row in enumerate(rows)]
    assert found == ([row for row, _ in known], [how for _, how in known])
