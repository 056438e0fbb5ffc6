"""The mixer alone: nanoseconds per sample that is decided and counted, by number of sources and by nesting.

    python -m benchmarks.mixer

A sample of 2,048 tokens has a budget of about 10 µs at 200 M tokens/s, for everything. Mixtures are flat, or nested
two deep with about as many nodes as each has sources; weights from 1 to 20 from a fixed seed. Every node has the same
policy; a schedule's weights are all on their way from one point to the next, so that each update changes all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.mixing.mixer import Mixer, initial_nodes

from benchmarks.results import Figures, Result, Row, show
from benchmarks.workloads import BATCH_SIZE, RANKS, SEQUENCE_LENGTH

SOURCES = (1, 3, 20, 200, 1_000)
#: What the pipeline decides at a time: the steps of one message to each of two ranks.
BURST = 16 * RANKS * BATCH_SIZE
WARM_UP_BURSTS = 20
ESTIMATED = ("soft_sequential", "balance_remaining")
POLICIES = ("least_consumed", "weighted", "round_robin", "sequential", *ESTIMATED, "schedule")


def mixture(policy: str, sources: int, nested: bool) -> RunConfig:
    """So many sources under one node, or under about sqrt(sources) nodes under one."""
    weights = np.exp(np.random.default_rng(3).uniform(0, np.log(20), sources)).round(2).tolist()
    leaves: list[dict[str, Any]] = [
        {"source": f"parquet:{number}.parquet:ids"} for number in range(sources)
    ]
    weigh(policy, leaves, weights)
    if policy not in ESTIMATED:
        leaves = [leaf | {"epochs": float("inf")} for leaf in leaves]
    if nested:
        width = max(1, round(sources**0.5))
        groups = [leaves[first : first + width] for first in range(0, sources, width)]
        leaves = [{"policy": policy, "children": group} for group in groups]
        weigh(policy, leaves, [1 + i % 3 for i in range(len(leaves))])
    return config.parse(
        {
            "run": "mixer",
            "sequence_length": SEQUENCE_LENGTH,
            "vocab_size": 2,
            "end_of_text_id": 0,
            "mixture": {"policy": policy, "children": leaves},
        },
        where="the mixer's benchmark",
        catalog=open_catalog(),
    )


def weigh(policy: str, children: list[dict[str, Any]], weights: Sequence[float]) -> None:
    """Gives the children their weights, where the policy has any."""
    for child, weight, other in zip(children, weights, reversed(weights), strict=True):
        if policy == "schedule":
            child["weight"] = [[0, weight], [10**13, other]]
        elif policy in ("least_consumed", "weighted"):
            child["weight"] = weight


def measure(policy: str, sources: int, nested: bool, seconds: float) -> Figures:
    """One run. CPU time: nothing here waits."""
    found = mixture(policy, sources, nested)
    # Ten to twenty million samples each, in rows of 700 tokens.
    strata = {source: (3 * 10**7 + 10**5 * source) // 64 for source in found.measured_sources}
    size_estimates = {
        source: TokenCurve.of([(rows, 700 * rows)] * 64) for source, rows in strata.items()
    }
    mixer = Mixer(found, initial_nodes(found), size_estimates)
    given = np.zeros(sources, np.int64)

    def rows_picked(source: int) -> tuple[int, int]:
        return divmod(int(given[source]) * SEQUENCE_LENGTH, 700)

    began = samples = index = 0
    burst = 0
    while True:
        if burst == WARM_UP_BURSTS:
            began, samples = time.process_time_ns(), 0
        left = BURST
        while left:
            some = min(left, mixer.update_weights(index, index * SEQUENCE_LENGTH, rows_picked))
            picks = mixer.plan(some)
            mixer.take_planned(some)
            given += np.bincount(picks, minlength=sources)
            index += some
            left -= some
        samples += BURST
        burst += 1
        if burst > WARM_UP_BURSTS and burst % 8 == 0:
            used = time.process_time_ns() - began
            if used > seconds * 1e9:
                return {"ns/sample": used / samples, "ns/token": used / samples / SEQUENCE_LENGTH}


def run(runs: int, seconds: float) -> list[Row]:
    return [
        Row(
            name=f"{policy}, {sources} sources, {'nested' if nested else 'flat'}",
            at={"sources": sources, "nested": float(nested)},
            runs=[measure(policy, sources, nested, seconds) for _ in range(runs)],
        )
        for policy in POLICIES
        for nested in (False, True)
        for sources in SOURCES
        if sources > 1 or not nested
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each; medians are shown (default 3)"
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="per run (default 0.2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args()
    result = Result.begin("mixer", f"the mixer, {BURST} samples at a time")
    result.rows += run(options.runs, options.seconds)
    show(result)
    if options.json:
        result.save(options.json)


if __name__ == "__main__":
    main()
