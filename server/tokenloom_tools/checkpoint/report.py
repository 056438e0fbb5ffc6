"""What the ``checkpoint`` commands print: the same content as tables and trees, or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from tokenloom_tools.checkpoint.content import INDEX, Child, Content, Node
from tokenloom_tools.checkpoint.difference import Difference, place
from tokenloom_tools.checkpoint.faults import faults
from tokenloom_tools.checkpoint.probabilities import Chance, chances, missing, owed_samples
from tokenloom_tools.reports.terminal import table

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
