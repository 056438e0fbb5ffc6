"""A verdict in words, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenloom_tools.verify.compare import Verdict
from tokenloom_tools.verify.digests import DigestSource

#: What a proof is worth; printed with each.
PROVES = (
    "Equal digests at a sample index prove equal samples before it: ids, order, and the number of the source of each. "
    "The digest is a 127-bit polynomial hash over the XXH3-128 of each sample: that n samples meet by accident has a "
    "chance of about n in 2^127. It is not cryptographic, so no proof against somebody who makes other data on "
    "purpose, and it tells nothing of what a trainer did with them."
)


def explain(verdict: Verdict, a: DigestSource, b: DigestSource) -> list[str]:
    """A verdict in words, line by line."""
    lines = [
        f"{letter}: {_described(run, end)}"
        for letter, run, end in zip("AB", (a, b), verdict.ends, strict=True)
    ]
    lines += [
        f"{key}: A has {_short(value)}, B has {_short(other)}"
        for key, (value, other) in verdict.differences.items()
    ]
    same, tokens, end = verdict.same_samples, verdict.same_tokens, min(verdict.ends)
    through = f"the same through sample index {same:,} ({tokens:,} tokens)"
    if verdict.outcome == "same":
        longer = (
            ""
            if len(set(verdict.ends)) == 1
            else f", which is all of {'AB'[verdict.ends.index(end)]}"
        )
        lines.append(f"{through}{longer}")
    elif verdict.outcome == "unknown":
        proven = through if same else "nothing is proven"
        lines.append(
            f"{proven}; no other sample index up to {end:,} is known to both: A knows {_known(a)}, B knows {_known(b)}"
        )
    elif verdict.differ_before == same + 1:
        lines.append(f"{through}; sample {same:,} is the first that differs")
        lines += [
            f"sample {same:,} of {letter} is of {source}"
            for letter, source in zip("AB", verdict.sources, strict=True)
            if source is not None
        ]
    else:
        assert verdict.differ_before is not None
        lines.append(
            f"{through}; the first sample that differs is one of {same:,} to {verdict.differ_before - 1:,}: A knows "
            f"{_known(a)}, B knows {_known(b)}"
        )
    return lines


def document(verdict: Verdict, a: DigestSource, b: DigestSource) -> dict[str, Any]:
    """A verdict for programs."""
    return {
        "outcome": verdict.outcome,
        "same_samples": verdict.same_samples,
        "same_tokens": verdict.same_tokens,
        "first_differing_sample": verdict.same_samples
        if verdict.differ_before == verdict.same_samples + 1
        else None,
        "differ_before": verdict.differ_before,
        "differences": {key: list(values) for key, values in verdict.differences.items()},
        "sides": [
            {
                "name": run.name,
                "run": run.run,
                "run_uid": run.run_uid,
                "sample_index": end,
                "source_of_first_differing_sample": source,
            }
            for run, end, source in zip((a, b), verdict.ends, verdict.sources, strict=True)
        ],
        "proves": PROVES,
    }


def _described(run: DigestSource, end: int) -> str:
    return f"{run.name}: run {run.run}, sample {end:,}, digest {run.point_at(end).digest}"


def _known(run: DigestSource) -> str:
    if run.indices is None:
        return f"{run.first:,} to {run.end:,}"
    return " and ".join(f"{index:,}" for index in run.indices)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, Mapping):
        return " ".join(str(part)[:20] for part in value.values() if part) or "none"
    return str(value)[:20]
