"""A run's mixture for people: the tree in force, its phases and revisions; and as a part of a mixture file."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.tree import Tree
from tokenloom_server.ledger.records import date_of
from tokenloom_server.reports.stats import MixtureInfo, RevisionInfo

from tokenloom_tools.reports.tables import table

#: Of a node or source, what is not printed as ``name value``.
_NOT_OPTIONS = ("alias", "source", "policy", "children")


def print_mixture(out: Console, info: MixtureInfo) -> None:
    """The whole document."""
    out.print(
        f"{info.run}: in force at sample {info.sample_index:,}, sequence length {info.sequence_length:,}"
    )
    out.print(_tree(info.mixture, "mixture", frozenset(info.paused)))
    if info.dropped:
        out.print(f"dropped: {', '.join(info.dropped)}")
    if info.phases:
        out.print(_phases(info))
    if info.revisions:
        out.print(_revisions(info))
    out.print(f"a new revision can hold from sample {info.first_revisable:,} on")


def print_revision(out: Console, run: str, revision: RevisionInfo, verb: str) -> None:
    """One revision and what it changes; ``verb``: that it holds, would hold, or was taken back."""
    when = (
        ""
        if revision.eta_s is None or revision.in_force
        else f", in {revision.eta_s:,.0f} s at the present rate"
    )
    out.print(
        f"{run}: revision {revision.number} {verb} from sample {revision.sample_index:,} on "
        f"({revision.total_tokens:,} tokens{when})"
    )
    for line in revision.changes:
        out.print(f"  {line}", soft_wrap=True)


def as_yaml(info: MixtureInfo) -> str:
    """The mixture in force as the ``mixture:`` section of a mixture file."""
    text: str = yaml.safe_dump(
        {"mixture": _in_yaml(info.mixture)}, sort_keys=False, allow_unicode=True
    )
    paused = f"# paused, which a file cannot say: {', '.join(info.paused)}\n" if info.paused else ""
    return paused + text


def _in_yaml(value: Any) -> Any:
    if isinstance(value, dict):
        fields = {key: _in_yaml(each) for key, each in value.items()}
        # What a node is comes first, its children last.
        return {
            key: fields[key]
            for key in sorted(fields, key=lambda key: (key == "children", key != "policy"))
        }
    if isinstance(value, list):
        return [_in_yaml(each) for each in value]
    return math.inf if value == "inf" else value


def _tree(node: dict[str, Any], place: str, paused: Collection[str]) -> Tree:
    tree = Tree(_line(node, place, paused))
    for i, child in enumerate(node["children"]):
        path = f"{place}.children.{i}"
        tree.add(_tree(child, path, paused) if "children" in child else _line(child, path, paused))
    return tree


def _line(child: dict[str, Any], place: str, paused: Collection[str]) -> str:
    """By the name that changes know it by."""
    name = child.get("alias") or child.get("source") or place
    parts = [
        f"{option} {_text(value)}" for option, value in child.items() if option not in _NOT_OPTIONS
    ]
    if "policy" in child:
        parts.insert(0, child["policy"])
    if child.get("alias") and "source" in child:
        parts.append(child["source"])
    if name in paused:
        parts.append("paused")
    return f"{name}: {', '.join(parts)}" if parts else str(name)


def _text(value: Any) -> str:
    if isinstance(value, list):  # comparisons of a filter, or points of a weight
        return " ".join(
            f'"{each}"' if isinstance(each, str) else f"{each[0]:,}:{each[1]:g}" for each in value
        )
    text = (
        f"{value:g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
    return text.replace("\n", "\\n")  # of a template


def _phases(info: MixtureInfo) -> Table:
    rows = (
        (
            str(phase.number),
            f"{phase.sample_index:,}",
            f"{phase.total_tokens:,}",
            f"{phase.sequence_length:,}",
        )
        for phase in info.phases
    )
    return table(("phase", "from sample", "tokens", "sequence length"), rows, title="phases")


def _revisions(info: MixtureInfo) -> Table:
    rows = (
        (
            str(revision.number),
            f"{revision.sample_index:,}",
            f"{revision.total_tokens:,}",
            "yes" if revision.in_force else "not yet",
            f"{revision.author}, {date_of(revision.made_at)}"
            if revision.author
            else date_of(revision.made_at),
            revision.reason,
            "\n".join(revision.changes),
        )
        for revision in info.revisions
    )
    words = ("in force", "author", "reason", "changes")
    return table(("number", "from sample", "tokens", *words), rows, left=words, title="revisions")
