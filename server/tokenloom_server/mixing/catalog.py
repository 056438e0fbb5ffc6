"""The policies that there are. CONTRIBUTING.md shows how to add one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tokenloom_server.mixing.balance_remaining import BalanceRemaining
from tokenloom_server.mixing.least_consumed import LeastConsumed
from tokenloom_server.mixing.policy import Policy
from tokenloom_server.mixing.round_robin import RoundRobin
from tokenloom_server.mixing.schedule import Schedule
from tokenloom_server.mixing.sequential import Sequential
from tokenloom_server.mixing.soft_sequential import SoftSequential
from tokenloom_server.mixing.weighted import Weighted

BUILT_IN: Sequence[type[Policy]] = (
    LeastConsumed,
    Weighted,
    RoundRobin,
    Sequential,
    SoftSequential,
    BalanceRemaining,
    Schedule,
)


@functools.cache
def policies() -> Mapping[str, Policy]:
    """The built-in policies by name: always the same ones, so that configs of equal fields are equal."""
    return MappingProxyType({policy.name: policy() for policy in BUILT_IN})
