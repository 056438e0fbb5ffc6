"""A plan as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.table import Table
from tokenloom_server.core.amounts import short
from tokenloom_server.planning.plan import PlannedSource, RunPlan
from tokenloom_server.planning.segments import PlanSegment, merged

#: Columns of the table of shares over time.
SHOWN_SEGMENTS = 6
#: Endings that are named one by one.
SHOWN_ENDINGS = 12


def report(plan: RunPlan) -> Iterator[Table | str]:
    """What is printed, one below the other."""
    yield _sources(plan)
    end = f"{plan.until_tokens:,} tokens (sample {plan.until_sample_index:,})"
    yield f"ends at {end}: {plan.reason}" if plan.ends else f"planned up to {end}: {plan.reason}"
    nodes = {source.alias for source in plan.sources}
    others = [ending for ending in plan.endings if ending.name not in nodes]
    for ending in others[:SHOWN_ENDINGS]:
        yield f"at {short(ending.tokens)} tokens, {ending.name} {ending.why}"
    if len(others) > SHOWN_ENDINGS:
        yield f"and {len(others) - SHOWN_ENDINGS} more nodes end; --json has all"
    if plan.segments:
        yield _shares(plan)


def _sources(plan: RunPlan) -> Table:
    begin = "its beginning" if not plan.from_tokens else f"sample {plan.from_sample_index:,}"
    table = Table(
        title=f"run {plan.run}: sequence length {plan.sequence_length:,}, planned from {begin}"
    )
    for heading in (
        "source",
        "rows",
        "tokens per epoch",
        "epochs",
        "tokens",
        "share",
        "runs out at",
    ):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for source in plan.sources:
        out = source.exhausted_at_tokens
        table.add_row(
            source.alias,
            "—" if source.rows is None else f"{source.rows:,}",
            "—" if source.tokens_per_epoch is None else short(source.tokens_per_epoch),
            _epochs(source),
            short(source.tokens),
            f"{source.share:.2%}",
            short(out) if out is not None else "is out" if source.exhausted else "—",
        )
    return table


def _epochs(source: PlannedSource) -> str:
    if source.epochs_read is None:
        return "dropped"
    allowed = "∞" if source.epochs is None else f"{source.epochs:g}"
    return f"{source.epochs_read:,.2f} of {allowed}"


def _shares(plan: RunPlan) -> Table:
    """A row for each source, a column for each of a few segments."""
    all_of_them = [
        PlanSegment(p.from_tokens, p.until_tokens, np.array(p.shares)) for p in plan.segments
    ]
    real = "of real tokens " if plan.count == "real" else ""
    table = Table(title=f"shares {real}over the run's tokens")
    table.add_column("source")
    few = merged(all_of_them, SHOWN_SEGMENTS)
    for segment in few:
        table.add_column(f"{short(segment.begin)} – {short(segment.end)}", justify="right")
    for source in plan.sources:
        shares = (float(segment.shares[source.id]) for segment in few)
        table.add_row(source.alias, *(f"{share:.2%}" if share else "—" for share in shares))
    return table
