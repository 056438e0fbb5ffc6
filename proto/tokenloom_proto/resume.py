"""What a client reads of a ``resume_state``: the sources, of which a revision may bring more while a stream lasts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple


class NamedSource(NamedTuple):
    """A source as people know it; ``alias`` is its spec where it has none."""

    spec: str
    alias: str


def sources_of(resume_state: str | bytes) -> dict[int, NamedSource]:
    """By id, all sources that samples from a state boundary on may be of: those of the state,
    and those that revisions bring in between."""
    document = json.loads(resume_state)
    entries = [entry for entry in document["datasets"] if "unknown" not in entry]
    entries += [
        {"id": leaf["id"], "spec": leaf["source"], "alias": leaf.get("alias")}
        for revision in document.get("revisions", ())
        if revision["sample_index"] > document["sample_index"]
        for leaf in _leaves(revision["content"]["mixture"])
    ]
    return {entry["id"]: NamedSource(entry["spec"], entry.get("alias") or entry["spec"]) for entry in entries}


def _leaves(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for child in node["children"]:
        if "children" in child:
            yield from _leaves(child)
        else:
            yield child
