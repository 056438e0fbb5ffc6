"""Whether two runs had the same data, and up to which sample.

Each of the two is a served run, which knows its rolling digest at every committed sample index, or a snapshot out of a
checkpoint, which knows it at its own index and at the state boundary before it. Equal digests at an index prove that
the samples before it are the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tokenloom_server.core.state import digest_hex
from tokenloom_server.errors import SnapshotInvalid

from tokenloom_tools.checkpoint.file import find
from tokenloom_tools.remote import Remote

#: What decides about the order: a comparison names what differs.
DECIDES = (
    "seed",
    "sequence_length",
    "order_version",
    "config_digest",
    "manifest_digest",
    "tokenizer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestPoint:
    """The digest at a sample index, and what is known of the samples before it."""

    index: int
    digest: str
    tokens: int
    #: Samples by spec; None where not known.
    samples: Mapping[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestSource:
    """The digests of one run, as a server or a file knows them."""

    #: Where they are from.
    name: str
    run: str
    run_uid: str
    #: Of ``DECIDES``, what is known.
    decides: Mapping[str, Any]
    #: The first and the last sample index that it knows a digest at.
    first: int
    end: int
    #: All that it knows one at; None for every index in between.
    indices: tuple[int, ...] | None
    #: Changes of the mixture, as (sample index, digest); None where they are not known.
    revisions: tuple[tuple[int, str], ...] | None
    #: The digest at an index; where a server is asked, once for each.
    point_at: Callable[[int], DigestPoint]


def of_server(remote: Remote, run: str, name: str) -> DigestSource:
    """A run of a server, asked over REST. Raises what ``Remote.receipt`` raises, as its ``point_at`` does."""
    last = remote.receipt(run)

    @cache
    def point_at(index: int) -> DigestPoint:
        receipt = last if index == last.sample_index else remote.receipt(run, index)
        return DigestPoint(
            index=receipt.sample_index,
            digest=receipt.digest,
            tokens=receipt.total_tokens,
            samples=receipt.samples,
        )

    return DigestSource(
        name=name,
        run=last.run,
        run_uid=last.run_uid,
        decides=last.model_dump(include=set(DECIDES)),
        first=last.oldest_index,
        end=last.committed_index,
        indices=None,
        revisions=tuple((mark.sample_index, mark.digest) for mark in last.revisions),
        point_at=point_at,
    )


def of_file(path: Path, inside: str | None = None) -> DigestSource:
    """A state in a checkpoint, see ``checkpoint.file.find``; that of another data loader has no digest, so nothing but
    the beginning is known of it. Raises ``SnapshotInvalid``."""
    state = find(path, inside)
    document, is_snapshot = state.document, "format" in state.document
    if state.damage is not None:
        raise SnapshotInvalid(f"{path}: {state.damage}")
    # Where both are at one index, the state knows what the snapshot does.
    states: list[Mapping[str, Any]] = [
        own for own in (document, document.get("resume_state")) if own
    ]
    if not is_snapshot:
        states = [{"sample_index": 0, "digest": digest_hex(0), "total_tokens": 0}]
    for key, kind in (("sample_index", int), ("digest", str), ("total_tokens", int)):
        for own in states:
            if type(own.get(key)) is not kind:
                raise SnapshotInvalid(
                    f"{path}: {key} is {own.get(key)!r}, expected {kind.__name__}"
                )
    points = {own["sample_index"]: _point(own) for own in states}
    return DigestSource(
        name=str(path) if is_snapshot else f"{path} (of another data loader, without a digest)",
        run=str(document.get("run", "unknown")),
        run_uid=str(document.get("run_uid")),
        decides={key: document[key] for key in DECIDES if document.get(key) is not None},
        first=min(points),
        end=max(points),
        indices=tuple(sorted(points)),
        revisions=None,
        point_at=points.__getitem__,
    )


def open_source(
    named: str, connect: Callable[[str], Remote], inside: str | None = None
) -> DigestSource:
    """What an argument of the command line names: a server (``http://host:port``, perhaps with ``/run``), or a file.

    Raises ``ConfigError``, ``SnapshotInvalid``, and what asking the server raises.
    """
    if Path(named).exists() or ":" not in named:
        return of_file(Path(named), inside)
    remote = connect(named)
    name = remote.only_run()
    return of_server(remote, name, f"{remote.url}/{name}")


def _point(state: Mapping[str, Any]) -> DigestPoint:
    index, digest, tokens = state["sample_index"], state["digest"], state["total_tokens"]
    return DigestPoint(index=index, digest=digest, tokens=tokens, samples=None)


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
