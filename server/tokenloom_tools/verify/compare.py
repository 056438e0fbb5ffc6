"""The comparison of two runs by their digests: a search for the first sample that differs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokenloom_tools.verify.digests import DECIDES, DigestSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a comparison."""

    outcome: Literal["same", "differ", "unknown"]
    #: The first so many samples are proven to be the same, and their tokens.
    same_samples: int
    same_tokens: int
    #: The first sample that differs lies in [``same_samples``, this); None where nothing differs.
    differ_before: int | None
    #: The source of the first that differs, in either run; None where not known.
    sources: tuple[str | None, str | None]
    #: The last sample index of each.
    ends: tuple[int, int]
    #: What decides about the order and is not the same, with both values.
    differences: Mapping[str, tuple[Any, Any]]

    @property
    def status(self) -> int:
        """The exit status."""
        return {"same": 0, "differ": 1, "unknown": 2}[self.outcome]


def compare(a: DigestSource, b: DigestSource) -> Verdict:
    """Finds the last sample index up to which both had the same data. Raises what asking a server raises."""
    ends = (a.end, b.end)
    low, high = _search(a, b)
    outcome: Literal["same", "differ", "unknown"] = "differ"
    if high is None:
        outcome = "same" if low and low == min(ends) else "unknown"
    return Verdict(
        outcome=outcome,
        same_samples=low,
        same_tokens=a.point_at(low).tokens if low else 0,
        differ_before=high,
        sources=(_source(a, low), _source(b, low)) if high == low + 1 else (None, None),
        ends=ends,
        differences=_differences(a, b),
    )


def _differences(a: DigestSource, b: DigestSource) -> dict[str, tuple[Any, Any]]:
    """What decides about the order, is known of both, and is not the same."""
    known = [key for key in DECIDES if key in a.decides and key in b.decides]
    differences = {
        key: (a.decides[key], b.decides[key]) for key in known if a.decides[key] != b.decides[key]
    }
    if a.revisions is not None and b.revisions is not None:
        end = min(a.end, b.end)
        both = [
            [f"{digest[:12]} from sample {index}" for index, digest in revisions if index < end]
            for revisions in (a.revisions, b.revisions)
        ]
        if both[0] != both[1]:
            differences["revisions"] = (both[0], both[1])
    return differences


def _search(a: DigestSource, b: DigestSource) -> tuple[int, int | None]:
    """(the last index at which both are known to be equal, the first at which they are known to differ, or None)."""

    def same(index: int) -> bool:
        return a.point_at(index).digest == b.point_at(index).digest

    if a.indices is not None or b.indices is not None:
        low = 0
        for index in _common(a, b):
            if not same(index):
                return low, index
            low = index
        return low, None
    first, end = max(a.first, b.first), min(a.end, b.end)
    if end < first:
        return 0, None
    if same(end):
        return end, None
    if first and not same(first):
        return 0, first
    # Most differences begin with the run, and steps that double cost no more than the way to the end of them.
    low, step = first, 1
    while low + step < end and same(low + step):
        low, step = low + step, step * 2
    high = bisect_left(
        range(min(low + step, end)), True, low + 1, key=lambda index: not same(index)
    )
    return high - 1, high


def _common(a: DigestSource, b: DigestSource) -> list[int]:
    """The sample indices above 0 that both can tell at, where one of them can only at some."""
    some, other = (a, b) if a.indices is not None else (b, a)
    assert some.indices is not None
    return [
        index
        for index in some.indices
        if index
        and (
            index in other.indices
            if other.indices is not None
            else other.first <= index <= other.end
        )
    ]


def _source(run: DigestSource, index: int) -> str | None:
    """The source of the sample at an index."""
    if run.indices is not None:
        return None
    before, after = run.point_at(index).samples, run.point_at(index + 1).samples
    if before is None or after is None:
        return None
    return next((spec for spec, count in after.items() if count > before.get(spec, 0)), None)
