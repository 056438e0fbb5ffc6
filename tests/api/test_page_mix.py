"""The tabs Mix and Events of the page, of a run that was really trained, revised and taken back."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, expect
from support.hostile import TEXTS
from support.lived_run import NAME
from support.memory_service import MemoryService, run_event, run_history, run_stats, source_stats
from support.page import HEIGHT, RUN, WIDTH, open_tab, source_row, watched
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.served_run import ServedRun


@pytest.fixture
def mix(window: Page, lived: tuple[ServedRun, str]) -> Iterator[Page]:
    window.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    with watched(window) as page:
        page.goto("about:blank")
        page.goto(f"{lived[1]}#/run/{NAME}/mix")
        expect(page.get_by_text("Now at")).to_be_visible()
        yield page


def keys(page: Page) -> list[list[str]]:
    """Of each source: its name, its share and what was planned, as the chart's legend shows them."""
    shown = (
        page.get_by_role("list", name="Shares of the sources")
        .get_by_role("listitem")
        .all_inner_texts()
    )
    return [key.replace("\u00a0", " ").split("\n") for key in shown]


@pytest.mark.browser
def test_the_chart_says_shares_and_plan_of_any_point(
    mix: Page, lived: tuple[ServedRun, str]
) -> None:
    history = lived[0].history.read(0, 1e12, 100)
    chart = mix.locator('[data-slot="chart"]')
    assert [key[0] for key in keys(mix)] == ["web", "code", "wiki", "books", "math"]
    web = history.sources[0]
    assert web.window_share[-1] is not None
    assert f"{web.window_share[-1] * 100:.1f} %" in " ".join(keys(mix)[0])
    expect(mix.get_by_text("By plan the data end at")).to_be_visible()
    # From point to point, by keys; what was taken back is none of them.
    chart.focus()
    for _ in range(3):
        chart.press("ArrowLeft")
    expect(mix.locator('[data-text="place"]')).to_contain_text(
        f"generation {history.generation[-3]}, 4 ranks"
    )
    assert not history.rewound[-1] and any(history.rewound)
    # As a table, for whoever does not see the chart.
    mix.get_by_text("As a table").click()
    rows = mix.locator("table.figures tbody tr")
    expect(rows).to_have_count(12)
    expect(rows.first.get_by_role("cell")).to_have_count(1 + 5)


@pytest.mark.browser
def test_a_zoom_stands_in_the_address(mix: Page) -> None:
    chart = mix.locator('[data-slot="chart"]')
    box = chart.bounding_box()
    assert box is not None
    mix.mouse.move(box["x"] + 300, box["y"] + 80)
    mix.mouse.down()
    mix.mouse.move(box["x"] + 500, box["y"] + 90, steps=4)
    mix.mouse.up()
    expect(mix.get_by_role("button", name="Reset")).to_be_enabled()
    assert "from=" in mix.url and "to=" in mix.url
    zoomed = mix.url
    mix.get_by_role("button", name="Over time").click()
    expect(mix.get_by_role("button", name="Over time")).to_have_attribute("aria-pressed", "true")
    assert "over=time" in mix.url and "from=" not in mix.url
    mix.goto(zoomed)
    expect(mix.get_by_role("button", name="Over tokens")).to_have_attribute("aria-pressed", "true")
    chart.press("Escape")
    expect(mix.get_by_role("button", name="Reset")).to_be_disabled()
    chart.press("+")
    assert "from=" in mix.url
    # Ranges of which a chart would draw ticks without end.
    for span in (
        "from=1&to=1.0000000000001",
        "over=time&from=9007199254740990&to=9007199254740991",
    ):
        mix.goto(f"{zoomed.partition('?')[0]}?{span}")
        expect(mix.get_by_text("Now at")).to_be_visible()
        assert mix.evaluate("1 + 1") == 2
    mix.goto(f"{zoomed.partition('/mix')[0]}/sources?sort=__proto__")
    expect(mix.get_by_text("5 sources")).to_be_visible()


@pytest.mark.browser
def test_events_are_listed_by_kind_and_lead_to_their_place_in_the_mix(
    mix: Page, lived: tuple[ServedRun, str]
) -> None:
    open_tab(mix, "Events")
    rows = mix.locator("table.events tbody tr")
    expect(rows.first).to_be_visible()
    events = lived[0].history.events(0, 1e12).events
    expect(rows).to_have_count(len(events))
    kinds = [event.kind for event in events]
    assert {"launch", "rewind", "revision"} <= set(kinds)
    mix.get_by_label("Show").select_option("revision")
    expect(rows).to_have_count(kinds.count("revision"))
    expect(rows.first).to_contain_text("evals of code are flat")
    assert mix.url.endswith("/events?kind=revision")
    revision = next(event for event in events if event.kind == "revision")
    rows.first.get_by_role("link").click()
    expect(mix).to_have_url(f"{lived[1]}#/run/{NAME}/mix?at={revision.total_tokens}")
    mix.go_back()
    for name, first in ("events", "id,time,kind"), ("history", "time,generation"):
        url = mix.get_by_role("link", name=name, exact=True).evaluate("link => link.href")
        assert first in httpx.get(url, trust_env=False, timeout=60).text.splitlines()[0]


@pytest.mark.browser
def test_the_losses_of_the_history_outlast_the_server(mix: Page) -> None:
    open_tab(mix, "Sources")
    expect(source_row(mix, "math").locator("polyline")).to_have_attribute(
        "points", re.compile(r"^0\.0,")
    )
    keys = mix.get_by_role("list", name="Losses of the sources").get_by_role("listitem")
    expect(keys).to_have_count(1 + 5)


@pytest.mark.browser
def test_of_many_sources_the_smaller_ones_are_one_band_and_hostile_texts_are_texts(
    page: Page, service: MemoryService, server: RestServer
) -> None:
    texts = [text.partition("\ud83d")[0] for text in TEXTS]
    aliases = {
        f"{number} {texts[number % len(texts)]}": [number, 100 + number] for number in range(48)
    }
    service.histories[RUN] = run_history(RUN, points=2, **aliases)
    service.happened[RUN] = [
        run_event(number, text=text, author=text, kind="audit") for number, text in enumerate(texts)
    ]
    sources = [source_stats(i, alias=alias) for i, alias in enumerate(aliases)]
    service.put(run_stats(RUN, sources=sources))
    page.reload()
    expect(page.get_by_text("37 other sources")).to_be_visible()
    assert len(keys(page)) == 12
    groups = [one.model_copy(update={"group": f"node-{one.id % 2}"}) for one in sources]
    service.put(run_stats(RUN, sources=groups))
    page.reload()
    expect(page.get_by_role("link", name="node-1")).to_be_visible()
    assert [key[0] for key in keys(page)] == ["node-0", "node-1"]
    open_tab(page, "Events")
    expect(page.locator("table.events tbody tr")).to_have_count(len(texts))
    assert page.locator("main img, main script").count() == 0


@pytest.mark.browser
def test_a_deviation_is_drawn_of_more_than_a_sample_and_lately_says_of_how_many(
    page: Page, service: MemoryService
) -> None:
    history = run_history(RUN, points=2, code=[1, 2], prose=[1, 2])
    # Of 128 samples: 8 too many, and a half.
    code, prose = (
        one.model_copy(update={"actual_share": [0.5, 0.5 + off], "window_share": [0.5, 0.51]})
        for one, off in zip(history.sources, (1 / 16, 1 / 256), strict=True)
    )
    service.histories[RUN] = history.model_copy(update={"sources": [code, prose]})
    page.reload()
    expect(page.get_by_text("shares of 64 samples")).to_be_visible()
    assert keys(page)[0] == ["code", "51.0 %", "planned 50.0 %"]
    page.get_by_role("button", name="Deviation").click()
    expect(page.get_by_text("+6.25\u00a0pp")).to_be_visible()
    assert keys(page) == [["code", "+6.25 pp", "of 50.0 %"], ["prose", "+0.00 pp", "of 50.0 %"]]


@pytest.mark.browser
def test_where_all_points_were_taken_back_the_page_goes_on_and_one_is_enough(
    page: Page, service: MemoryService
) -> None:
    history = run_history(RUN, points=3, code=[1, 2, 3]).model_copy(update={"rewound": [True] * 3})
    service.histories[RUN] = history
    page.reload()
    expect(page.get_by_text("The history begins with the run's first commits")).to_be_visible()
    # A run of a few seconds has one point, which tells of all of it.
    service.histories[RUN] = run_history(RUN, points=1, code=[1])
    page.reload()
    expect(page.get_by_text("Now at 32.8\u00a0k tokens")).to_be_visible()
    expect(page.locator('[data-slot="chart"] canvas')).to_be_visible()
    expect(page.locator("#connection-text")).to_have_text("Live")


@pytest.mark.browser
def test_whoever_left_a_run_before_it_came_stays_elsewhere(
    page: Page, service: MemoryService
) -> None:
    service.put(run_stats("other"))
    stats = f"**/v1/runs/{RUN}/stats"
    page.goto(f"{page.url.partition('#')[0]}#/")
    expect(page.get_by_role("link", name="other")).to_be_visible()
    page.route(stats, lambda route: (page.evaluate("location.hash = '#/'"), route.continue_()))
    with page.expect_response(stats):
        page.evaluate(f"location.hash = '#/run/{RUN}/samples'")
    page.unroute(stats)
    expect(page.get_by_role("link", name="other")).to_be_visible()
    with page.expect_response("**/v1/summaries"):
        pass
    assert page.url.endswith("#/")
