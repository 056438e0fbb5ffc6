"""How large groups are: a state is a small part of what travels, and a group has a bound."""

from __future__ import annotations

import pytest
from tokenloom_server.run import sizing

#: Of a state, at most, for each of its sources.
STATE_BYTES = 206


@pytest.mark.parametrize("sample_bytes", [1_024, 4_096, 16_384])
@pytest.mark.parametrize("sources", [3, 50, 200])
@pytest.mark.parametrize("world_size", [2, 64, 1_024, 4_096])
def test_states_are_at_most_a_twentieth_of_the_ids_and_a_group_has_a_bound(
    world_size: int, sources: int, sample_bytes: int
) -> None:
    steps = sizing.group_micro_steps(sample_bytes, world_size, 4, sources)
    of_rank = steps * 4 * sample_bytes
    bound = max(sizing.GROUP_BYTES, sizing.LARGEST_GROUP_BYTES)
    assert of_rank * world_size <= max(bound, 4 * sample_bytes * world_size)
    message_is_full = sizing.message_steps(sample_bytes, 4) < sizing.MESSAGE_STEPS
    if message_is_full and world_size * sources * sizing.SOURCE_BYTES <= sizing.LARGEST_GROUP_BYTES:
        assert 20 * STATE_BYTES * sources <= of_rank + 4 * sample_bytes, "a micro-step is not cut"
