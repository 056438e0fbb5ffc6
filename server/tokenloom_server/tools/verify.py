"""`tokenloom verify A B`: whether two runs had the same data, and up to which sample.

A side is a served run, which can tell its digest at every committed sample index, or a snapshot out of a checkpoint,
which can at its own index and at the state boundary before it. Equal digests at one index prove that the samples
before it are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenloom_server.tools.verify_sides import DECIDES, Side

#: What a proof is worth; printed with each.
PROVES = (
    "Equal digests at a sample index prove equal samples before it: ids, order, and the number of the source of each. "
    "The digest is a 127-bit polynomial hash over the XXH3-128 of each sample: that n samples meet by accident has a "
    "chance of about n in 2^127. It is not cryptographic, so no proof against somebody who makes other data on "
    "purpose, and it tells nothing of what a trainer did with them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of it."""

    outcome: Literal["same", "differ", "unknown"]
    #: The first so many samples are proven to be the same, and their tokens.
    same_samples: int
    same_tokens: int
    #: The first sample that differs lies at or behind ``same_samples`` and before this; None where nothing differs.
    differ_before: int | None
    #: The sources of the first that differs, by side; None where not known.
    sources: tuple[str | None, str | None] = (None, None)
    #: How far each side goes.
    ends: tuple[int, int]
    #: What decides about the order and is not the same, with both values.
    differences: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """The exit status."""
        return {"same": 0, "differ": 1, "unknown": 2}[self.outcome]


def explain(verdict: Verdict, a: Side, b: Side) -> list[str]:
    """A verdict in words, line by line."""
    lines = [f"{mark}: {_described(of, end)}" for mark, of, end in zip("AB", (a, b), verdict.ends, strict=True)]
    lines += [
        f"{key}: A has {_short(ours)}, B has {_short(theirs)}" for key, (ours, theirs) in verdict.differences.items()
    ]
    same, tokens, end = verdict.same_samples, verdict.same_tokens, min(verdict.ends)
    through = f"the same through sample index {same:,} ({tokens:,} tokens)"
    if verdict.outcome == "same":
        longer = "" if len(set(verdict.ends)) == 1 else f", which is all of {'AB'[verdict.ends.index(end)]}"
        lines.append(f"{through}{longer}")
    elif verdict.outcome == "unknown":
        what = through if same else "nothing is proven"
        lines.append(
            f"{what}; no other sample index up to {end:,} is known to both: A knows {_known(a)}, B knows {_known(b)}"
        )
    elif verdict.differ_before == same + 1:
        lines.append(f"{through}; sample {same:,} is the first that differs")
        lines += [
            f"sample {same:,} of {mark} is of {source}"
            for mark, source in zip("AB", verdict.sources, strict=True)
            if source is not None
        ]
    else:
        assert verdict.differ_before is not None
        lines.append(
            f"{through}; the first sample that differs is one of {same:,} to {verdict.differ_before - 1:,}: A knows "
            f"{_known(a)}, B knows {_known(b)}"
        )
    return lines


def document(verdict: Verdict, a: Side, b: Side) -> dict[str, Any]:
    """A verdict for programs."""
    return {
        "outcome": verdict.outcome,
        "same_samples": verdict.same_samples,
        "same_tokens": verdict.same_tokens,
        "first_differing_sample": verdict.same_samples if verdict.differ_before == verdict.same_samples + 1 else None,
        "differ_before": verdict.differ_before,
        "differences": {key: list(values) for key, values in verdict.differences.items()},
        "sides": [
            {
                "name": of.identity.name,
                "run": of.identity.run,
                "run_uid": of.identity.run_uid,
                "sample_index": end,
                "source_of_first_differing_sample": source,
            }
            for of, end, source in zip((a, b), verdict.ends, verdict.sources, strict=True)
        ],
        "proves": PROVES,
    }


def _described(of: Side, end: int) -> str:
    point = of.at(end)
    skipped = f", of which {point.skipped:,} samples were skipped" if point.skipped else ""
    return f"{of.identity.name}: run {of.identity.run}, sample {end:,}, digest {point.digest}{skipped}"


def _known(of: Side) -> str:
    if of.indices is None:
        return f"{of.first:,} to {of.end:,}"
    return " and ".join(f"{index:,}" for index in of.indices)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, Mapping):
        return " ".join(str(part)[:20] for part in value.values() if part) or "none"
    return str(value)[:20]


def compare(a: Side, b: Side) -> Verdict:
    """Finds the last sample index up to which both had the same data. Raises what asking a server raises."""
    differences: dict[str, tuple[Any, Any]] = {
        key: (a.identity.decides[key], b.identity.decides[key])
        for key in DECIDES
        if key in a.identity.decides
        and key in b.identity.decides
        and a.identity.decides[key] != b.identity.decides[key]
    }
    ends = (a.end, b.end)
    if a.revisions is not None and b.revisions is not None:
        ours, theirs = (
            [f"{digest[:12]} from sample {index}" for index, digest in side.revisions or () if index < min(ends)]
            for side in (a, b)
        )
        if ours != theirs:
            differences["revisions"] = (ours, theirs)
    low, high = _bounds(a, b)
    tokens = a.at(low).tokens if low else 0
    if high is None:
        outcome: Literal["same", "unknown"] = "same" if low == min(ends) and low else "unknown"
        return Verdict(
            outcome=outcome,
            same_samples=low,
            same_tokens=tokens,
            differ_before=None,
            ends=ends,
            differences=differences,
        )
    sources = (_source(a, low), _source(b, low)) if high == low + 1 else (None, None)
    return Verdict(
        outcome="differ",
        same_samples=low,
        same_tokens=tokens,
        differ_before=high,
        sources=sources,
        ends=ends,
        differences=differences,
    )


def _bounds(a: Side, b: Side) -> tuple[int, int | None]:
    """(the last index at which both are known to be equal, the first at which they are known to differ, or None)."""

    def same(index: int) -> bool:
        return a.at(index).equals(b.at(index))

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
    high = min(low + step, end)
    while high - low > 1:
        middle = (low + high) // 2
        if same(middle):
            low = middle
        else:
            high = middle
    return low, high


def _common(a: Side, b: Side) -> list[int]:
    """The sample indices above 0 that both can tell at, where one of them can only at some."""
    some, other = (a, b) if a.indices is not None else (b, a)
    assert some.indices is not None
    return [
        index
        for index in some.indices
        if index and (index in other.indices if other.indices is not None else other.first <= index <= other.end)
    ]


def _source(side: Side, index: int) -> str | None:
    """The source of the sample at an index."""
    if side.indices is not None:
        return None
    before, behind = side.at(index).samples, side.at(index + 1).samples
    if before is None or behind is None:
        return None
    return next((spec for spec, count in behind.items() if count > before.get(spec, 0)), None)
