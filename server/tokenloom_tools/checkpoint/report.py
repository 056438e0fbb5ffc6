"""What lies between two checkpoints of a run; and what the ``checkpoint`` command prints: tables and trees, or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from tokenloom_tools.checkpoint.content import INDEX, Child, Content, Node, Source
from tokenloom_tools.checkpoint.faults import faults
from tokenloom_tools.checkpoint.probabilities import Chance, chances, missing, owed_samples
from tokenloom_tools.reports.terminal import table


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


#: What a chance has.
_SHARES = ("in_force", "with_counters", "without_counters")
_NO_MIXTURE = {"missing": ["the mixture; --mixture FILE says it"]}


def as_json(content: Content) -> dict[str, Any]:
    """All of a checkpoint's content, with what is suspicious of it, for JSON."""
    shown = content.model_dump()
    for node, into in zip(content.nodes, shown["nodes"], strict=True):
        for child, chance in zip(into["children"], chances(content, node), strict=True):
            child["probability"] = chance.in_force
    return shown | {"faults": faults(content)}


def show(content: Content, out: Console) -> None:
    """Everything about one checkpoint."""
    for line in _heading(content):
        out.print(line, soft_wrap=True)
    if content.sources:
        out.print(_sources(content))
    if content.counts:
        fields = ("samples", "tokens", "real_tokens")
        counts = [
            (spec, *(_shown(own.get(field)) for field in fields))
            for spec, own in content.counts.items()
        ]
        title = f"what each source gave up to sample {_shown(content.sample_index)}"
        out.print(
            table(
                ("source", "samples", "tokens", "real tokens"),
                counts,
                left=("source",),
                title=title,
            )
        )
    if content.nodes:
        out.print(_tree(content))
    suspicious = faults(content)
    if not suspicious:
        out.print("nothing is missing, and all counters add up", style="green")
    for fault in suspicious:
        out.print(f"suspicious: {fault}", style="yellow", soft_wrap=True)


def _heading(content: Content) -> Iterator[str]:
    inside = f" ({content.where})" if content.where else ""
    yield (
        f"{content.file}{inside}: {'an' if content.kind == 'older payload' else 'a'} {content.kind}"
        + (" alone" if content.kind == INDEX else "")
    )
    if content.run is not None:
        uid = content.run_uid or "none: it was saved before the run was joined"
        yield f"run {content.run}, stream {content.stream}, uid {uid}, generation {_shown(content.generation)}"
    if content.sample_index is not None:
        yield (
            f"sample {content.sample_index:,}, {_shown(content.total_tokens)} tokens, digest {content.digest or '?'}"
            + (f", sequence length {content.sequence_length:,}" if content.sequence_length else "")
        )
    if content.counted_at is not None:
        yield f"counters below are those at sample {content.counted_at:,}, from which a restore goes forward"
    if content.imported:
        begin = content.imported.get("sample_index")
        yield f"its order began at sample {begin}, from an older data loader's checkpoint"
    if content.clock_offset:
        yield f"its token clock is an older checkpoint's: {content.clock_offset:+,} tokens to those of its samples"
    if content.forked:
        yield f"it was forked from run {content.forked.get('run')} at sample {content.forked.get('sample_index')}"
    for index in content.revisions:
        in_force = content.counted_at is not None and index <= content.counted_at
        yield f"a revision of the mixture {'is in force since' if in_force else 'follows at'} sample {index:,}"


def _sources(content: Content) -> Table:
    skips = any(source.skips for source in content.sources)
    rows = []
    for source in content.sources:
        share = "not in the mixture" if source.unknown else _shown(source.share, ".2%")
        skipped = (
            [f"{source.skipped_samples:,} samples, {source.skipped_tokens:,} tokens"]
            if skips
            else []
        )
        counts = map(_shown, (source.samples, source.rows, source.tokens))
        rows.append((_shown(source.id), source.name, place(source), *counts, share, *skipped))
    index = content.counted_at
    stands = "stands at" if index in (None, content.sample_index) else f"stood at sample {index:,}"
    headings = [
        "id",
        "source",
        stands,
        "samples",
        "rows",
        "tokens",
        "share",
        *(["skipped"] if skips else []),
    ]
    return table(headings, rows, left=("source", stands))


def _tree(content: Content) -> Tree:
    """The mixture as far as it is known; nodes that no other holds stand side by side."""
    by_id = {node.id: node for node in content.nodes}
    held = {child.id for node in content.nodes for child in node.children if child.is_node}
    top = [node for node in content.nodes if node.id not in held] or list(content.nodes[:1])

    def add(tree: Tree, node: Node) -> None:
        issued = sum(child.samples or 0 for child in node.children)
        for child, chance in zip(node.children, chances(content, node), strict=True):
            line = _line(child, chance, owed_samples(content, node, child), issued)
            # Each once, whatever a damaged mixture says: no node is below itself.
            below = by_id.pop(child.id, None) if child.is_node and child.id is not None else None
            if below is None:
                tree.add(line)
            else:
                add(tree.add(f"{line}; {below.policy or '?'}:"), below)

    trees = [
        (node, Tree(f"{node.name}: {node.policy or 'its policy is not known'}")) for node in top
    ]
    for node, tree in trees:
        add(tree, node)
    if len(trees) == 1:
        return trees[0][1]
    whole = Tree("nodes, of which no mixture says how they belong together")
    for _, tree in trees:
        whole.add(tree)
    return whole


def _line(child: Child, chance: Chance, owed: float | None, issued: int) -> str:
    parts = [f"{child.name}: {_shown(child.samples)} samples, {_shown(child.tokens)} tokens"]
    if child.samples is not None and issued:
        parts.append(f"{child.samples / issued:.2%} of the node")
    if chance.in_force is not None:
        parts.append(f"in force {chance.in_force:.2%}")
    if owed:
        parts.append(f"owed {owed:,.2f} samples")
    elif child.credit and owed is None:
        parts.append(f"credit {child.credit:,}")
    if child.total:
        parts.append(f"of about {child.total:,}")
    if child.exhausted:
        parts.append("exhausted")
    if child.presence != "live":
        parts.append(child.presence)
    return ", ".join(parts)


def probabilities(content: Content) -> list[dict[str, Any]]:
    """By node and child, for JSON."""
    return [
        {
            "node": node.id,
            "name": node.name,
            "policy": node.policy,
            "counted_at": content.counted_at,
            "missing": [f"{node.name}: {lack}" for lack in missing(content, node)],
            "children": [
                {
                    "name": child.name,
                    "samples": child.samples,
                    "total": child.total,
                    **asdict(chance),
                }
                for child, chance in zip(node.children, chances(content, node), strict=True)
            ],
        }
        for node in content.nodes
    ]


def show_probabilities(nodes: Sequence[Mapping[str, Any]], out: Console) -> None:
    """A table for each node, as ``probabilities`` has it."""
    for node in nodes:
        rows = [
            (
                child["name"],
                *map(_shown, (child["samples"], child["total"])),
                *(_shown(child[key], ".2%") for key in _SHARES),
            )
            for child in node["children"]
        ]
        headings = ("child", "samples", "total", *(key.replace("_", " ") for key in _SHARES))
        title = f"{node['name']}: {node['policy'] or 'its policy is not known'}"
        if node["counted_at"] is not None:
            title += f", at sample {node['counted_at']:,}"
        out.print(table(headings, rows, left=("child",), title=title))
    for lack in (lack for node in nodes or [_NO_MIXTURE] for lack in node["missing"]):
        out.print(f"missing: {lack}", style="yellow", soft_wrap=True)


def show_difference(difference: Difference, a: Content, b: Content, out: Console) -> None:
    """What lies between two checkpoints."""
    for line in (
        f"run: {difference.relation}",
        f"data: {difference.data}",
        f"from sample {_shown(a.sample_index)} to {_shown(b.sample_index)}: {_signed(difference.samples)} samples, "
        f"{_signed(difference.tokens)} tokens",
    ):
        out.print(line, soft_wrap=True)
    if difference.counted != (a.sample_index, b.sample_index):
        counted = " and ".join(map(_shown, difference.counted))
        out.print(f"sources are counted at the state boundaries before: samples {counted}")
    rows = (
        (
            source.name,
            *map(_signed, (source.samples, source.rows, source.tokens, source.epochs)),
            source.before or "not there",
            source.after or "not there",
        )
        for source in difference.sources
    )
    headings = ("source", "samples", "rows", "tokens", "epochs", "from", "to")
    out.print(table(headings, rows, left=("source", "from", "to")))
    for change in difference.mixture:
        out.print(f"mixture: {change}", soft_wrap=True)
    if not difference.mixture:
        out.print("the mixture is the same")


def _shown(value: float | None, form: str = ",") -> str:
    return "?" if value is None else format(value, form)


def _signed(value: int | None) -> str:
    return _shown(value, "+,")
