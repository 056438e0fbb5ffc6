"""What a rank can say of its own stream, as plain numbers."""

from __future__ import annotations

from tokenloom.connection.stream import Connection

NAMES = (
    *("wait_ms_last", "wait_ms_mean", "wait_ms_max", "queue_steps", "queue_capacity_steps", "steps", "tokens"),
    *("sample_index", "total_tokens", "uncommitted_samples", "reconnects"),
)


def read(connection: Connection | None) -> dict[str, float]:
    """Those of ``ConnectedDataset.metrics``; waits are those since this was asked last."""
    if connection is None:
        return dict.fromkeys(NAMES, 0)
    buffer = connection.buffer
    waited, at = buffer.waits(), buffer.consumed
    figures = (
        *(1000 * waited.last_s, 1000 * waited.mean_s, 1000 * waited.longest_s),
        *(buffer.waiting_steps(), buffer.capacity_steps, buffer.taken, at.total_tokens - buffer.start.total_tokens),
        *(at.sample_index, at.total_tokens, max(0, at.sample_index - buffer.committed_through), connection.reconnects),
    )
    return dict(zip(NAMES, figures, strict=True))
