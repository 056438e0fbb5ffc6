"""What is read of a ``resume_state`` on both sides of the wire: its sources, of which a revision may bring more while a
stream lasts, and what they have given."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice, zip_longest
from typing import Any, NamedTuple, TypeAlias

from tokenloom_proto.dataloader_pb2 import SourceCounts

#: The one key of ``state_dict()``.
KEY = "tokenloom"
#: What a level of nested interleaved datasets says of each of them, and of itself.
BY_DATASET = ("child_states", "examples_per_dataset", "datasets_exhausted", "probabilities")
NESTED_KEYS = (*BY_DATASET, "current_example_count", "current_dataset_index")
#: What another data loader's checkpoint is known by: one of these at least.
OLDER_KEYS = ("resume_state", "sample_index", *NESTED_KEYS)
#: What says the token clock beside these: the total, or the tokens of a sample, by the names that tools have for them.
CLOCK_KEYS = ("total_tokens", "context_length", "sequence_length", "block_size", "max_seq_len")


def older_payload(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a checkpoint another data loader wrote of its data; empty where that is nothing. A list of sources that
    stands alone is that of a ``resume_state``."""
    known, entries = (
        {key: state[key] for key in (*OLDER_KEYS, *CLOCK_KEYS) if key in state},
        state.get("datasets"),
    )
    if (
        isinstance(entries, list | tuple)
        and entries
        and all(isinstance(own, Mapping) and "spec" in own for own in entries)
    ):
        known = {
            "resume_state": {"datasets": entries, "row_offset_of": state.get("row_offset_of")},
            **known,
        }
    return known if known.keys() & set(OLDER_KEYS) else {}


def unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint, or what of it is wrapped in ``dataset`` and is a state of the data."""
    inner = state.get("dataset")
    if (
        isinstance(inner, Mapping)
        and "resume_state" not in state
        and (KEY in inner or older_payload(inner))
    ):
        state = inner
    return dict(state)


#: What sources gave since a state boundary: a ``SourceCounts``, and up to how many of its message's micro-steps.
Given: TypeAlias = tuple[bytes, int]
#: By spec: samples, tokens and real_tokens.
Counts: TypeAlias = dict[str, dict[str, int]]


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
        for leaf in _leaves(revision["content"].get("mixture", {"children": ()}))
    ]
    return {
        entry["id"]: NamedSource(entry["spec"], entry.get("alias") or entry["spec"])
        for entry in entries
    }


def counts_at(
    state: Mapping[str, Any], sample_index: int, total_tokens: int, since: Given = (b"", 0)
) -> Counts:
    """``counts`` of a snapshot at a sample index: by spec, the samples, tokens and real tokens that each source gave,
    without what a restore jumped over; a source that gave nothing is left out.

    ``state``: the ``resume_state`` at the boundary before; ``since``: what came after that.
    """
    message, steps = since
    new, samples_of, padding_of = SourceCounts.FromString(message), Counter[int](), Counter[int]()
    entries = zip_longest(new.source_ids, new.samples, new.padding_tokens, fillvalue=0)
    for source_id, samples, padding in islice(entries, sum(new.entries[: steps + 1])):
        samples_of[source_id] += samples
        padding_of[source_id] += padding
    sample_tokens = (total_tokens - state["total_tokens"]) // max(
        1, sample_index - state["sample_index"]
    )
    counts: Counts = {}
    known = [entry for entry in state["datasets"] if "unknown" not in entry]
    for source_id, entry in enumerate([*known, *({"spec": spec} for spec in new.specs)]):
        samples, padding = samples_of[source_id], padding_of[source_id]
        tokens = (
            samples * sample_tokens + entry.get("token_offset", 0) - entry.get("skipped_tokens", 0)
        )
        samples += entry.get("samples", 0) - entry.get("skipped_samples", 0)
        padding += entry.get("padding_tokens", 0) - entry.get("skipped_padding_tokens", 0)
        if tokens:
            counts[entry["spec"]] = {
                "samples": samples,
                "tokens": tokens,
                "real_tokens": tokens - padding,
            }
    return counts


def real_tokens(total_tokens: int, counts: Counts) -> int:
    """``real_tokens`` of a snapshot: its total tokens without padding."""
    return total_tokens - sum(own["tokens"] - own["real_tokens"] for own in counts.values())


def _leaves(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for child in node["children"]:
        if "children" in child:
            yield from _leaves(child)
        else:
            yield child
