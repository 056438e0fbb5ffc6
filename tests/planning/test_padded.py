"""Plans of runs whose samples are padded, and that balance real tokens, against the runs themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.corpora import advanced, flat, order_of, write_txt
from tokenloom_server.core.state import State
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.size_estimates import measure
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.planning.forecast import Part, Planner, forecast
from tokenloom_server.planning.plan import RunPlan

LENGTH = 64
SHORT, LONG, RISING, FALLING, MIXED = (
    f"txt:{name}.txt:text" for name in ("short", "long", "rising", "falling", "mixed")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 11 tokens, of 61, of 4 to 63 that become longer or shorter, and of 2 to 65, with their end of text."""
    path = tmp_path_factory.mktemp("padded")
    lengths = {
        "short": [11] * 400,
        "long": [61] * 400,
        "rising": [4 + row * 59 // 3_999 for row in range(4_000)],
        "falling": [63 - row * 59 // 2_999 for row in range(3_000)],
        "mixed": [2 + row * 37 % 64 for row in range(2_000)],
    }
    for name, tokens in lengths.items():
        write_txt(path / f"{name}.txt", ["x" * (count - 1) for count in tokens])
    return path


def node(
    *children: dict[str, Any], policy: str = "least_consumed", **fields: Any
) -> dict[str, Any]:
    return {"policy": policy, "children": list(children), **fields}


def leaf(spec: str, **fields: Any) -> dict[str, Any]:
    return {"source": spec, "alias": spec.split(":")[1].removesuffix(".txt"), **fields}


def document(root: dict[str, Any], packing: str = "none", **fields: Any) -> dict[str, Any]:
    options = {"packing": packing, "sequence_length": LENGTH, "pad_id": 0, "last_micro_step": "pad"}
    return flat([], **options, **fields) | {"mixture": root}


def run_out(order: PipelineFactory, state: State) -> State:
    pipeline = order.pipeline(state)
    while pipeline.ended is None:
        pipeline.advance(4096)
    return pipeline.state()


def check(plan: RunPlan, end: State, near: float) -> None:
    """Within so much of each, or four samples."""
    samples = 4
    assert plan.count == "real"
    assert plan.ends
    assert plan.until_sample_index == pytest.approx(end.sample_index, rel=near, abs=samples)
    total = sum(source.real_tokens for source in end.sources)
    for source, was in zip(plan.sources, end.sources, strict=True):
        assert source.tokens == pytest.approx(was.tokens, rel=near, abs=samples * LENGTH), (
            source.alias
        )
        assert source.share == pytest.approx(
            was.real_tokens / total, rel=near, abs=samples * LENGTH / total
        )
        # Before anything ended there is one segment.
        if not plan.from_sample_index and len(plan.segments) == 1:
            assert plan.segments[0].shares[source.id] == pytest.approx(source.share)


STOPS: dict[str, dict[str, Any]] = {
    "equal weights": node(leaf(SHORT), leaf(LONG), on_exhausted="stop"),
    "weights": node(
        leaf(SHORT, weight=1), leaf(LONG, weight=2.5), leaf(MIXED, weight=3), on_exhausted="stop"
    ),
    "nested": node(
        leaf(LONG, weight=2, epochs=4),
        node(leaf(SHORT, epochs=5, weight=3), leaf(MIXED), weight=1.5, on_exhausted="stop"),
        on_exhausted="stop",
    ),
    "rising and falling": node(
        leaf(RISING), leaf(FALLING, weight=2), leaf(LONG, epochs=20), on_exhausted="stop"
    ),
    "drawn below": node(
        leaf(LONG, epochs=3), node(leaf(SHORT, weight=2), leaf(MIXED), policy="weighted")
    ),
    "weights that follow": node(
        leaf(RISING), leaf(FALLING), leaf(MIXED), policy="balance_remaining"
    ),
}


#: Of sources whose rows become longer or shorter.
TREND = "rising and falling", "weights that follow"


@pytest.mark.parametrize("packing", ["none", "best_fit"])
@pytest.mark.parametrize("name", STOPS)
def test_a_plan_ends_where_the_run_does(folder: Path, name: str, packing: str) -> None:
    fields = {"pack_window_rows": 250} if packing == "best_fit" else {}
    order = order_of(folder, document(STOPS[name], packing, **fields))
    start, timeline = order.initial(), Timeline(order)
    end = run_out(order, start)
    if packing == "best_fit" and name in TREND:
        # What is packed together is taken to fill its samples everywhere alike.
        check(Planner().plan(timeline, start, None), end, 0.04)
        return
    # From somewhere on its way, too.
    for state in (start, advanced(order, start, end.sample_index // 3)):
        check(Planner().plan(timeline, state, None), end, 0.005)


@pytest.mark.parametrize("name", [name for name in STOPS if name != "rising and falling"])
def test_mean_shares_end_where_the_runs_own_choices_do(folder: Path, name: str) -> None:
    order = order_of(folder, document(STOPS[name]))
    curves = [measure(order, source) for source in range(len(order.record.specs))]
    part = Part(config=order.config, curves=curves, size_estimates=order.record.size_estimates)
    check(forecast([part], order.initial(), exact_picks=0), run_out(order, order.initial()), 0.02)


@pytest.mark.parametrize("exact_picks", [0, 10**6])
def test_a_source_without_tokens_is_out_at_its_first_turn(folder: Path, exact_picks: int) -> None:
    order = order_of(folder, document(node(leaf(SHORT), leaf(LONG))))
    part = Part(
        config=order.config, curves=[TokenCurve((0, 400), (0, 0), (0, 0)), measure(order, 1)]
    )
    plan = forecast([part], order.initial(), exact_picks=exact_picks)
    assert [source.tokens for source in plan.sources] == [0, 400 * LENGTH]
