"""What a rank can say of its own stream, as plain numbers."""

from __future__ import annotations

from tokenloom.connection.stream import Connection

NAMES = (
    *(
        "wait_ms_last",
        "wait_ms_mean",
        "wait_ms_max",
        "queue_micro_steps",
        "queue_capacity_micro_steps",
        "micro_steps",
        "tokens",
    ),
    *("sample_index", "total_tokens", "uncommitted_samples", "reconnects"),
)


def read(connection: Connection | None) -> dict[str, float]:
    """Those of ``ConnectedDataset.metrics``; waits are those since this was asked last."""
    if connection is None:
        return dict.fromkeys(NAMES, 0)
    buffer = connection.buffer
    waited, point = buffer.waits(), buffer.consumed
    return {
        "wait_ms_last": 1000 * waited.last_s,
        "wait_ms_mean": 1000 * waited.mean_s,
        "wait_ms_max": 1000 * waited.longest_s,
        "queue_micro_steps": buffer.waiting_steps(),
        "queue_capacity_micro_steps": buffer.capacity_steps,
        "micro_steps": buffer.taken,
        "tokens": point.total_tokens - buffer.start.total_tokens,
        "sample_index": point.sample_index,
        "total_tokens": point.total_tokens,
        "uncommitted_samples": max(0, point.sample_index - buffer.committed_through),
        "reconnects": connection.reconnects,
    }
