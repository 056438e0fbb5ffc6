"""A plan as a picture."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from support.memory_service import run_plan
from tokenloom_server.errors import ConfigError
from tokenloom_server.planning.plan import PlannedSegment, RunPlan
from tokenloom_tools.reports.picture import SHOWN_SOURCES, draw

SVG = "{http://www.w3.org/2000/svg}"


def texts(plan: RunPlan) -> list[str]:
    root = ET.fromstring(draw(plan, "svg"))
    assert root.tag == f"{SVG}svg"
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def test_an_svg_names_the_sources_the_run_and_its_end() -> None:
    found = texts(run_plan("wiki-and-code"))
    assert {"code", "prose", "run wiki-and-code: ends at 10.2M tokens", "tokens of the run"} <= set(
        found
    )
    assert "100%" in found


def test_the_same_plan_is_the_same_file() -> None:
    assert draw(run_plan(), "svg") == draw(run_plan(), "svg")
    assert draw(run_plan(), "png") == draw(run_plan(), "png")
    assert draw(run_plan(), "png").startswith(b"\x89PNG\r\n")


def test_names_are_taken_literally() -> None:
    sources = [
        source.model_copy(update={"alias": alias})
        for source, alias in zip(run_plan().sources, ("_hidden", "$a$ <b> & \\frac"), strict=True)
    ]
    found = texts(run_plan(sources=sources))
    assert any("_hidden" in text for text in found)
    assert "$a$ <b> & \\frac" in found


def test_the_smallest_of_many_sources_are_one_layer() -> None:
    (first, _), count = run_plan().sources, SHOWN_SOURCES + 8
    sources: list[Any] = [
        first.model_copy(update={"id": i, "alias": f"s{i}", "tokens": 1000 * (i + 1)})
        for i in range(count)
    ]
    segments = [PlannedSegment(from_tokens=0, until_tokens=9, shares=[1 / count] * count)]
    found = texts(run_plan(sources=sources, segments=segments))
    assert "8 others" in found
    assert {f"s{i}" for i in range(count)} & set(found) == {f"s{i}" for i in range(8, count)}


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'tokenloom\[plot\]'"):
        draw(run_plan(), "svg")


def test_in_the_dark_a_picture_is_dark() -> None:
    svg = draw(run_plan(), "svg").decode()
    assert "@media (prefers-color-scheme: dark)" in svg
    ET.fromstring(svg)
