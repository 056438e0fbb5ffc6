"""Messages as a server would send them, without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenloom.batch.layout import Layout, StepNumbers
from tokenloom.batch.packed import Message
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.steps import StepGroup

#: Every packing with what changes the tensors of a sample, as fields of a mixture file.
PACKINGS: dict[str, dict[str, Any]] = {
    "concat": {"packing": "concat"},
    "concat, tail padded": {"packing": "concat", "tail": "pad"},
    "concat, tail padded on the left": {"packing": "concat", "tail": "pad", "padding": "left"},
    "best fit": {"packing": "best_fit", "pack_window_rows": 9},
    "best fit, left": {"packing": "best_fit", "pack_window_rows": 9, "padding": "left"},
    "none": {"packing": "none"},
    "none, left": {"packing": "none", "padding": "left"},
    "none, split": {"packing": "none", "long_rows": "split"},
}


def layout_of(order: PipelineFactory, batch_size: int, *columns: str) -> Layout:
    """As a Join makes it."""
    return Layout(
        batch_size=batch_size,
        sequence_length=order.config.sequence_length,
        id_type=order.record.dtype.newbyteorder("<").str,
        shifted=order.config.labels == "shifted",
        lengths=order.form.lengths,
        pads_left=order.form.padding == "left",
        loss_masks=order.form.masked,
        mask_boundaries=order.config.mask_boundaries,
        columns=frozenset(columns),
    )


def step_numbers(
    sources: Sequence[int], steps: int = 1, *, ranks: int = 1, first: int = 0, **fields: Any
) -> StepNumbers:
    """Of steps whose samples, ``sources`` by step, have index ``first`` and further on; the first rank's is the first
    slice. ``fields`` in place of counts that are made up."""
    size = ranks * (len(sources) // max(steps, 1))
    made: dict[str, Any] = {
        "begin_indices": [first + i * size for i in range(steps)],
        "end_indices": [first + (i + 1) * size for i in range(steps)],
        "slices": [i % ranks for i in range(steps)],
        "source_ids": list(sources),
    }
    counts = ("total_tokens", "real_tokens", "tokens", "label_tokens")
    made |= {name: [1000 * (at + 1) + i for i in range(steps)] for at, name in enumerate(counts)}
    return StepNumbers(**made | fields)


def message_of(layout: Layout, group: StepGroup, rank: int = 0) -> Message:
    """All steps of a group that is filled, as one rank gets them."""
    count = len(group.marks)
    counts, starts = group.document_starts(rank, 0, count)
    tokens = [group.real_tokens(step) for step in range(count)]
    return Message(
        layout,
        StepNumbers(
            begin_indices=[group.step_begin(step) for step in range(count)],
            end_indices=[mark.sample_index for mark in group.marks],
            slices=[group.slice_of(step, rank) for step in range(count)],
            total_tokens=[mark.total_tokens for mark in group.marks],
            real_tokens=[group.run_real_tokens(step) for step in range(len(group.marks))],
            tokens=[real for real, _ in tokens],
            label_tokens=[labels for _, labels in tokens],
            source_ids=group.source_ids[rank, :count].ravel().tolist(),
        ),
        ids=b"".join(group.ids(rank, 0, count)),
        document_counts=counts if layout.document_starts else (),
        document_starts=starts.tolist() if layout.document_starts else (),
    )
