"""What a client reads of a ``resume_state``: the sources, of which a revision may bring more while a stream lasts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

#: What a level of nested interleaved datasets says of each of them, and of itself.
BY_DATASET = ("child_states", "examples_per_dataset", "datasets_exhausted", "probabilities")
NESTED_KEYS = (*BY_DATASET, "current_example_count", "current_dataset_index")
#: What another data loader's checkpoint is known by: one of these at least.
OLDER_KEYS = ("resume_state", "sample_index", *NESTED_KEYS)
#: What says the token clock beside these: the total, or the tokens of a sample, by the names that tools have for them.
CLOCK_KEYS = ("total_tokens", "context_length", "sequence_length", "block_size", "max_seq_len")


def older_payload(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a checkpoint another data loader wrote of its data; empty where that is nothing."""
    known = state.keys() & set(OLDER_KEYS)
    return {key: state[key] for key in (*OLDER_KEYS, *CLOCK_KEYS) if known and key in state}


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
