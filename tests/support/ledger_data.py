"""Openings, commits and revisions for tests of the ledger: small, and each index has one canonical form."""

from __future__ import annotations

from collections.abc import Sequence

from tokenloom_proto.seal import canonical
from tokenloom_server.ledger.records import CommittedState, Counters, Opening, StoredRevision

SPECS = ("parquet:a-*.parquet:text", "jsonl:b c.jsonl:text", "txt:ü/*.txt:text")


def commit_at(index: int, order: str = "0", specs: Sequence[str] = SPECS) -> CommittedState:
    """The committed state at a sample index of the order with that name."""
    counters = {
        spec: Counters(samples=index // (k + 1), rows=index * 3 + k, tokens=index // (k + 1) * 512)
        for k, spec in enumerate(specs)
    }
    place = {
        "sample_index": index,
        "total_tokens": 512 * index,
        "digest": f"{order:0>8}{index:024x}",
    }
    datasets = [
        {"spec": spec, "samples": each.samples, "rows": each.rows, "token_offset": each.tokens}
        for spec, each in counters.items()
    ]
    return CommittedState(
        **place,
        state=canonical({**place, "datasets": datasets, "text": "\u20ac"}),
        counters=counters,
    )


def opening_of(generation: int, start: CommittedState, attempt: str | None = None) -> Opening:
    return Opening(
        generation=generation,
        parent=generation - 1,
        attempt=attempt or f"attempt-{generation}",
        world_size=2,
        batch_size=4,
        group_micro_steps=16,
        start_index=start.sample_index,
        start_state=start.state,
        opened_at=1700000000.25 + generation,
    )


def revision_of(
    number: int, sample_index: int, reason: str = "more code", skips: int = 0
) -> StoredRevision:
    """A change, or a skip of so many samples, as an opening makes one."""
    return StoredRevision(
        number=number,
        sample_index=sample_index,
        made_at=1700000000.125 + number,
        author="Zo\u00eb",
        reason=reason,
        content=f'{{"weights":{{"a":{number}}},"text":"\u20ac"}}'
        if not skips
        else f'{{"skips":[[{sample_index},{skips}]]}}',
    )
