"""Messages as a server would send them, without one."""

from __future__ import annotations

from tokenloom.batch.layout import Layout, StepNumbers
from tokenloom.batch.packed import Message
from tokenloom_server.order.steps import StepGroup


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
