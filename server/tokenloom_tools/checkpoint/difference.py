"""What lies between two checkpoints of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenloom_tools.checkpoint.content import Content, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDifference:
    """What a source gave between the two; ``before`` and ``after`` are where it stood, None where it was not there."""

    name: str
    spec: str
    samples: int | None
    rows: int | None
    tokens: int | None
    epochs: int | None
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """From the first checkpoint to the second; negative where the second stands before the first."""

    relation: str
    """What is known of the two being one run's."""
    data: str
    """What the digests say."""
    samples: int | None
    tokens: int | None
    counted: tuple[int | None, int | None]
    """The sample indices at which the sources were counted."""
    sources: tuple[SourceDifference, ...]
    mixture: tuple[str, ...]
    """What changed of it; empty for nothing."""


def difference(a: Content, b: Content) -> Difference:
    """The second compared with the first."""
    before = {source.spec: source for source in a.sources}
    after = {source.spec: source for source in b.sources}
    return Difference(
        relation=_relation(a, b),
        data=_data(a, b),
        samples=_minus(b.sample_index, a.sample_index),
        tokens=_minus(b.total_tokens, a.total_tokens),
        counted=(a.counted_at, b.counted_at),
        sources=tuple(
            _of_source(before.get(spec), after.get(spec)) for spec in {**before, **after}
        ),
        mixture=tuple(_mixture(a, b)),
    )


def _relation(a: Content, b: Content) -> str:
    if a.run_uid is None or b.run_uid is None:
        return "not known: only snapshots of a run that was joined name the run"
    if a.run_uid == b.run_uid:
        generations = f"generation {a.generation}" + (
            "" if a.generation == b.generation else f" and {b.generation}"
        )
        return f"the same, {b.run} ({b.run_uid}), {generations}"
    return f"two runs: {a.run} ({a.run_uid}) and {b.run} ({b.run_uid})"


def _data(a: Content, b: Content) -> str:
    if a.digest is None or b.digest is None:
        return "not known: there are not two digests"
    if a.sample_index == b.sample_index:
        if a.digest == b.digest:
            return f"the same data up to sample {a.sample_index}: the digests are equal"
        return f"other data up to sample {a.sample_index}: the digests differ"
    if a.sample_index == 0 or b.sample_index == 0:
        return "one of them is at the beginning"
    if a.seed != b.seed:
        return "other data: the seeds differ"
    return (
        f"not compared, for the digests are at different samples, {a.sample_index} and {b.sample_index}; compare the "
        "earlier one with a snapshot of the later one's run at sample "
        f"{min(a.sample_index or 0, b.sample_index or 0)}"
    )


def _of_source(before: Source | None, after: Source | None) -> SourceDifference:
    there = after or before
    assert there is not None

    def minus(field: str) -> int | None:
        # A source that was not there had given nothing.
        values = [getattr(source, field) if source is not None else 0 for source in (after, before)]
        return _minus(*values)

    return SourceDifference(
        name=there.name,
        spec=there.spec,
        samples=minus("samples"),
        rows=minus("rows"),
        tokens=minus("tokens"),
        epochs=minus("epoch"),
        before=place(before) if before is not None else None,
        after=place(after) if after is not None else None,
    )


def place(source: Source) -> str:
    """Where a source stands, in words."""
    parts = [f"epoch {source.epoch}"] if source.epoch else []
    parts += [source.shard] if source.shard is not None else []
    parts += [f"window {source.window:,}"] if source.window is not None else []
    parts += [f"row {source.row:,}"] if source.row is not None else []
    parts += [f"token {source.token_in_row:,}"] if source.token_in_row else []
    parts += ["exhausted"] if source.exhausted else []
    return ", ".join(parts) or "the beginning"


def _mixture(a: Content, b: Content) -> list[str]:
    """Changes of policies, weights, children and presence, by node; only of checkpoints that carry their mixtures."""
    if a.mixture != "checkpoint" or b.mixture != "checkpoint":
        if a.config_digest is None or b.config_digest is None:
            return ["not known: not both checkpoints say it"]
        if a.config_digest != b.config_digest:
            return [
                "changed: the config digests differ (not both checkpoints carry it, so how is not known)"
            ]
        return []
    changes = []
    old, new = _members(a), _members(b)
    for key in sorted({**old, **new}, key=lambda key: key[0]):
        if key in old and key in new:
            (_, before), (name, after) = old[key], new[key]
            changes += [
                f"{name}: {field} {before[field]} → {after[field]}"
                for field in after
                if before[field] != after[field]
            ]
        elif len(key) == 1 or (key[0],) in old.keys() & new.keys():
            # The children of a node that is new or gone are so, too.
            name, _ = new.get(key) or old[key]
            changes.append(f"{name} is {'new' if key in new else 'not there any more'}")
    return changes


def _members(content: Content) -> dict[tuple[Any, ...], tuple[str, dict[str, Any]]]:
    """Name and fields of each node, by its id alone, and of each child, by the ids of its node and its own."""
    members: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    for node in content.nodes:
        members[node.id,] = node.name, {"policy": node.policy}
        for child in node.children:
            fields = {"weight": _shortest(child.configured), "presence": child.presence}
            members[node.id, child.is_node, child.id] = f"{node.name}: {child.name}", fields
    return members


def _shortest(weight: Any) -> Any:
    """A weight as text, whether a snapshot or a mixture file wrote it."""
    return repr(weight).removesuffix(".0") if isinstance(weight, float) else weight


def _minus(a: int | None, b: int | None) -> int | None:
    return a - b if a is not None and b is not None else None
