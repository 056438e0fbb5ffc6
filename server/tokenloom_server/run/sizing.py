"""How many micro-steps a message, a group and the window have: pure arithmetic over bytes."""

from __future__ import annotations

from collections.abc import Sequence

from tokenloom_server.ledger.records import Opening
from tokenloom_server.order.batch_plans import BatchPlans
from tokenloom_server.order.steps import BatchPlan

#: A message to a rank is about this large: what a message costs beside its bytes (its share of a state, woken threads,
#: a report) is then little.
MESSAGE_BYTES = 2 * 2**20
#: Micro-steps of a message are at most this many.
MESSAGE_STEPS = 64
#: Between two state boundaries lies a full message, and one more for so many sources: a state costs what its
#: sources cost. The micro-steps between them take at most this much memory.
SOURCES_PER_MESSAGE = 128
GROUP_BYTES = 64 * 2**20
#: With many ranks it is more: each gets so much, since a message of less costs more than its bytes, and for each source
#: so much, since a state has some 200 bytes of it, and every rank is sent every state. Never more than the largest.
RANK_BYTES, SOURCE_BYTES = 256 * 1024, 5 * 1024
LARGEST_GROUP_BYTES = 256 * 2**20
#: The default window: groups of this much together, but so few and so many at least and at most. A fast
#: trainer acknowledges hundreds of micro-steps until the next commit, and must not wait for it. (What is acknowledged
#: and not yet committed takes no memory to speak of: its ids are gone.)
WINDOW_BYTES = 64 * 2**20
WINDOW_GROUPS = (4, 64)


def message_steps(sample_bytes: int, batch_size: int) -> int:
    """Micro-steps of a full message to a rank."""
    return max(1, min(MESSAGE_BYTES // (batch_size * sample_bytes), MESSAGE_STEPS))


def group_micro_steps(sample_bytes: int, world_size: int, batch_size: int, sources: int) -> int:
    """Micro-steps between two state boundaries: full messages for each rank, or less than one where many ranks would
    make that too large."""
    message = message_steps(sample_bytes, batch_size)
    many_ranks = min(world_size * max(RANK_BYTES, sources * SOURCE_BYTES), LARGEST_GROUP_BYTES)
    most = max(GROUP_BYTES, many_ranks) // (batch_size * sample_bytes * world_size)
    messages = min(1 + sources // SOURCES_PER_MESSAGE, most // message)
    return messages * message if messages else max(1, most)


def window_micro_steps(sample_bytes: int, plan: BatchPlan) -> int:
    """Micro-steps that are produced ahead of the committed one where the mixture file says nothing."""
    fewest, most = WINDOW_GROUPS
    groups = WINDOW_BYTES // (plan.group_samples * sample_bytes)
    return min(max(groups, fewest), most) * plan.group_micro_steps


def horizon_of(batch_plans: BatchPlans, windows: Sequence[int], committed: int) -> int:
    """The micro-step up to which production may go: the committed one and its window, which is the least of those of
    all plans that lie between, so that what is held is never more than the window of one plan's micro-steps."""
    number = batch_plans.number_at(committed)
    window = windows[number]
    horizon = committed + window
    while horizon > batch_plans.plans[number].end_step:
        number += 1
        window = min(window, windows[number])
        horizon = max(batch_plans.plans[number].first_step, committed + window)
    return horizon


def batch_plans_of(opening: Opening) -> BatchPlans:
    """Where each micro-step of a generation lies."""
    first = BatchPlan(
        start_index=opening.start_index,
        world_size=opening.world_size,
        batch_size=opening.batch_size,
        group_micro_steps=opening.group_micro_steps,
    )
    return BatchPlans.read(opening.batch_plans, first)
