"""The curve of reported losses: what it holds whatever comes, and how it stays within its bounds."""

from __future__ import annotations

import math
import random

import pytest
from tokenloom_server.errors import ConfigError
from tokenloom_server.run.losses import MAX_CELLS, MAX_POINTS, MIN_POINTS, Curve, Report


def report(index: int, sources: dict[int, tuple[float, int]], **fields: float) -> Report:
    return Report(
        sample_index=index, total_tokens=8 * index, step=index // 4, sources=sources, **fields
    )


def slowly(reports: list[Report], source: int) -> tuple[float, int]:
    """The mean loss of a source over reports, and its tokens."""
    found = [each.sources[source] for each in reports if source in each.sources]
    tokens = sum(count for _, count in found)
    return (
        math.fsum(loss * count for loss, count in found) / tokens if tokens else math.nan
    ), tokens


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 17, 100, 128, 129])
def test_a_curve_joins_reports_by_twos_and_loses_no_token(count: int) -> None:
    draw = random.Random(count)
    curve = Curve(most=8)
    reports = [
        report(
            4 * (i + 1),
            {
                source: (draw.uniform(0, 10), draw.randrange(1, 1000))
                for source in range(3)
                if draw.random() < 0.7
            },
            **({"loss": draw.uniform(0, 10)} if draw.random() < 0.8 else {}),
            **({"learning_rate": draw.random()} if draw.random() < 0.8 else {}),
        )
        for i in range(count)
    ]
    for each in reports:
        curve.add(each)
    found = curve.read(4)
    stride = found["stride"]
    assert stride == 2 ** max(0, math.ceil(math.log2(count / 8)) if count else 0)
    parts = [reports[i : i + stride] for i in range(0, count, stride)]
    assert found["sample_index"] == [part[-1].sample_index for part in parts]
    assert found["total_tokens"] == [part[-1].total_tokens for part in parts]
    assert found["step"] == [part[-1].step for part in parts]
    for source in range(4):
        for i, part in enumerate(parts):
            loss, tokens = slowly(part, source)
            assert found["source_tokens"][source][i] == tokens
            assert found["source_losses"][source][i] == (pytest.approx(loss) if tokens else None)
    for i, part in enumerate(parts):
        told = [
            (each.loss, sum(n for _, n in each.sources.values()) or 1)
            for each in part
            if each.loss is not None
        ]
        weight = sum(n for _, n in told)
        expected = sum((loss or 0) * n for loss, n in told) / weight if told else None
        assert found["loss"][i] == (pytest.approx(expected) if told else None)
        rates = [each.learning_rate for each in part if each.learning_rate is not None]
        assert found["learning_rate"][i] == (rates[-1] if rates else None)


def test_a_launch_that_goes_on_before_the_end_takes_the_rest_back() -> None:
    curve = Curve(most=8)
    for i in range(1, 21):
        curve.add(report(i, {0: (float(i), 10)}))
    assert curve.read(1)["sample_index"] == [4, 8, 12, 16, 20]
    curve.rewind(11)
    assert curve.read(1)["sample_index"] == [4, 8]
    curve.add(report(11, {1: (1.0, 5)}))
    found = curve.read(2)
    assert found["sample_index"] == [4, 8, 11]
    assert found["source_losses"] == [[2.5, 6.5, None], [None, None, 1.0]]
    curve.rewind(0)
    assert curve.read(2)["sample_index"] == []
    curve.add(report(1, {0: (3.0, 2)}))
    assert curve.read(1)["source_losses"] == [[3.0]]


def test_with_many_sources_a_curve_has_fewer_points_and_keeps_what_it_had() -> None:
    curve = Curve()
    for i in range(1, 401):
        curve.add(report(i, {0: (1.0, 1)}))
    assert len(curve.read(1)["sample_index"]) == 400
    sources = MAX_CELLS // MIN_POINTS + 1
    curve.add(report(401, {sources - 1: (2.0, 3)}))
    found = curve.read(sources)
    assert len(found["sample_index"]) <= MIN_POINTS
    assert found["sample_index"][-1] == 401
    assert sum(found["source_tokens"][0]) == 400
    assert sum(found["source_tokens"][-1]) == 3
    for i in range(402, 402 + 2 * MAX_POINTS):
        curve.add(report(i, {1: (1.0, 1)}))
    found = curve.read(sources)
    assert len(found["sample_index"]) <= MIN_POINTS
    assert sum(found["source_tokens"][1]) == 2 * MAX_POINTS


@pytest.mark.parametrize(
    ("fields", "sources", "said"),
    [
        ({}, {2: (1.0, 1)}, "source_id 2 is reported; the run has the sources 0 to 1"),
        ({}, {-1: (1.0, 1)}, "source_id -1 is reported"),
        (
            {},
            {0: (math.nan, 1)},
            r"sources\[0\]\.loss is nan; expected a finite number from -1e\+09 to 1e\+09",
        ),
        ({}, {1: (math.inf, 1)}, r"sources\[1\]\.loss is inf"),
        ({}, {1: (-2e9, 1)}, r"sources\[1\]\.loss is -2000000000\.0"),
        ({}, {1: (1.0, 0)}, r"sources\[1\]\.tokens is 0; expected a number from 1 to 2\^53 - 1"),
        ({}, {1: (1.0, 2**53)}, r"sources\[1\]\.tokens is 9007199254740992"),
        ({"loss": math.nan}, {}, "^loss is nan"),
        ({"learning_rate": -0.1}, {}, r"learning_rate is -0\.1; expected a finite number from 0"),
        ({"learning_rate": math.inf}, {}, "learning_rate is inf"),
        ({"sample_index": -1}, {}, "sample_index is -1; expected a number from 0"),
        ({"total_tokens": 2**53}, {}, "total_tokens is 9007199254740992"),
        ({"step": -3}, {}, "step is -3"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    fields: dict[str, float], sources: dict[int, tuple[float, int]], said: str
) -> None:
    place = {"sample_index": 8, "total_tokens": 64, "step": 1}
    with pytest.raises(ConfigError, match=said):
        Report(**{**place, **fields}, sources=sources).check(2)
    Report(**place, sources={0: (-1e9, 1), 1: (0.0, 2**53 - 1)}, loss=0.0, learning_rate=0.0).check(
        2
    )
