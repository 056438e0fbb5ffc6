"""The state of nested interleaved datasets, as other training stacks save it.

A level says ``child_states``, ``examples_per_dataset`` and ``datasets_exhausted`` of its datasets; each of these may be
missing. A child state is a level of its own, the counts of one dataset (``input_count``: rows read, ``output_count``:
examples made of them, ``original_length``: rows in all), or nothing. No level names its data: a mixture file does,
whose nodes and sources stand as the levels and datasets do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

from tokenloom_proto.resume import BY_DATASET, NESTED_KEYS

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.errors import SnapshotInvalid

#: Where a dataset has one of these, the rows that were read of it are not the first ones of its files.
_ELSEWHERE = ("shuffle_seed", "shuffle_buffer_size", "shard_config", "split_start_idx")
#: No loader nests deeper.
_MOST_LEVELS = 32

#: Examples that a dataset gave, and that it will have given at its end; None for what is not known.
_Counts = tuple[int | None, int | None]


def is_nested(state: Any) -> bool:
    """Whether this is the state of a level: it has at least two of the keys."""
    return isinstance(state, Mapping) and len(state.keys() & set(NESTED_KEYS)) > 1


def as_resume_state(state: Any, run: RunConfig | None) -> dict[str, Any]:
    """The ``resume_state`` that says the same, in the mixture's order: ``datasets`` with the rows read of each, and
    ``nodes``, parents first, with counters of examples; None stands for what is not known. Where a loader counts no
    rows, its examples stand for them. Without a run specs are places in the state, and the ``mixture`` is its own tree.

    Raises ``SnapshotInvalid`` where the mixture has another shape, or the state is deeper than any loader nests.
    """
    datasets: list[dict[str, Any]] = []
    nodes: list[list[list[Any]]] = []
    tree: list[dict[str, Any]] = []

    def visit(
        own: Any, config: NodeConfig | SourceConfig | None, path: str, given: Any, out: Any
    ) -> _Counts:
        fields = own if isinstance(own, Mapping) else {}
        below = (
            list(zip_longest(*(listed(fields.get(key)) for key in BY_DATASET)))
            if is_nested(fields)
            else []
        )
        children = config.children if isinstance(config, NodeConfig) else []
        if path.count("child_states") > _MOST_LEVELS or (
            config is not None and len(children) != len(below)
        ):
            raise SnapshotInvalid(
                f"{path or 'the state'}: found {len(below)} datasets within, but the mixture file has {len(children)} "
                "children there: give the one whose nodes and sources stand as the old loader's datasets did"
            )
        made = _count(fields.get("output_count"))
        if not below:
            examples = _count(given, made)
            rows, length = (
                _count(fields.get("input_count"), examples),
                _count(fields.get("original_length")),
            )
            total = _count(fields.get("cached_exact_length"))
            if total is None and length is not None:
                total = length * made // rows if made and rows else length
            spec = config.source if isinstance(config, SourceConfig) else path
            counts = {
                "row_offset": rows,
                "rows": rows,
                "samples": examples,
                "exhausted": out is True,
            }
            datasets.append({**fields, **counts, "id": len(datasets), "spec": spec, "place": path})
            return examples, total
        policy, numbers = (
            "weighted" if listed(fields.get("probabilities")) else None,
            list[list[Any]](),
        )
        tree.append({"id": len(tree), "alias": path, "policy": policy, "children": numbers})
        nodes.append(counted := [])
        for i, (child, examples, ended, share) in enumerate(below):
            numbers.append(
                [2 * len(nodes) + 1 if is_nested(child) else 2 * len(datasets), share, "live"]
            )
            child_path = f"{path}.child_states.{i}".lstrip(".")
            gave, total = visit(
                child, children[i] if children else None, child_path, examples, ended
            )
            counted.append([gave, None, None, ended is True, None, total])
        gave, total = (_sum(row[place] for row in counted) for place in (0, -1))
        return _count(given, fields.get("current_example_count"), gave), total

    examples, _ = visit(state, run.mixture if run is not None else None, "", None, False)
    return {
        "sample_index": examples,
        "datasets": datasets,
        "nodes": nodes,
        "mixture": tree if run is None else [],
    }


def read_entries(
    state: Mapping[str, Any], run: RunConfig, example_tokens: int | None
) -> list[dict[str, Any]]:
    """The ``datasets`` of ``as_resume_state`` as those of an older payload, for a run. Their tokens are those of their
    examples, where ``example_tokens`` says how many one has.

    Raises ``SnapshotInvalid`` where a dataset does not say how many rows were read of it, or these were not the first
    ones of its files.
    """
    entries = []
    for own in as_resume_state(state, run)["datasets"]:
        rows, samples, epoch = own["row_offset"], own["samples"], _count(own.get("epoch")) or None
        drawn = next((key for key in _ELSEWHERE if own.get(key) is not None), None)
        if rows is None or (rows and drawn):
            actual = (
                "nothing"
                if rows is None
                else f"{rows} that are not the first ones of its files: {drawn} is set"
            )
            raise SnapshotInvalid(
                f"{own['place']} (spec {own['spec']!r}): input_count: expected how many rows were read from its "
                f"beginning on, found {actual}; write that into the checkpoint's copy, or 0 to read the source anew"
            )
        tokens = (
            samples * example_tokens if example_tokens is not None and samples is not None else None
        )
        entries.append(
            {"spec": own["spec"], "row_offset": rows, "token_offset": tokens, "epoch": epoch}
        )
    return entries


def _count(*values: Any) -> int | None:
    """The first of them that is one."""
    return next(
        (value for value in values if type(value) is int and 0 <= value <= MAX_COUNTER), None
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(count or 0 for count in known)


def listed(value: Any) -> list[Any]:
    """A list of what a checkpoint has there; empty where that is no list."""
    return list(value) if isinstance(value, list | tuple) else []
