"""The tab Sources of the page: shares, counters and losses."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect
from support.hostile import TEXTS, is_shown_as_it_is
from support.memory_service import MemoryService, report_stats, run_history, run_stats, source_stats
from support.page import RUN, cell, open_tab
from tokenloom_server.api.rest.server import RestServer


def assert_rows_fit(page: Page, *widths: int) -> None:
    for width in widths:
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        card = page.locator('[data-slot="mix"]').bounding_box()
        row = page.locator("table.mix tbody tr").first.bounding_box()
        assert card is not None and row is not None
        assert row["x"] + row["width"] <= card["x"] + card["width"], width


@pytest.mark.browser
def test_shares_are_shown_and_follow_the_service(page: Page, service: MemoryService) -> None:
    open_tab(page, "Sources")
    expect(page.get_by_role("heading", name=RUN)).to_be_visible()
    assert cell(page, "prose", "So far") == "50.0 %"
    assert cell(page, "code", "Tokens") == "1.05 M"
    bar = page.locator("table.mix tbody tr").first.locator('[data-slot="actual"]')
    assert (
        bar.evaluate("bar => bar.style.width") == "100%"
    )  # of a scale that ends at the greatest share
    sources = [
        source_stats(
            0,
            alias="code",
            actual_share=0.75,
            tokens=12_345_678_901,
            epochs=None,
            remaining_samples=None,
        ),
        source_stats(1, alias="prose", actual_share=0.25, exhausted=True, dropped_tokens=311),
    ]
    service.put(run_stats(RUN, sample_index=1_234_567, produced_index=1_234_600, sources=sources))
    expect(page.get_by_text("1,234,567", exact=True)).to_be_visible()
    assert cell(page, "code", "So far") == "75.0 %"
    assert cell(page, "code", "Tokens") == "12.3 B"
    assert page.get_by_title("12,345,678,901").count() == 1
    assert cell(page, "code", "Epochs") == "0.42 of ∞"
    assert cell(page, "code", "Samples left") == "–"
    assert cell(page, "prose", "Samples left") == "0"
    expect(page.get_by_text("exhausted", exact=True)).to_have_attribute(
        "title", "311 tokens filled no sample"
    )


@pytest.mark.browser
def test_names_are_shown_and_never_obeyed(page: Page, service: MemoryService) -> None:
    open_tab(page, "Sources")
    script = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    # What is no pair of surrogates does not travel in JSON's UTF-8.
    texts = [script, *(text.partition("\ud83d")[0] for text in TEXTS)]
    sources = [source_stats(i, alias=text, spec=text[::-1]) for i, text in enumerate(texts)]
    service.put(run_stats(RUN, sources=sources, error=script, tokenizer=script))
    expect(page.locator("table.mix tbody tr")).to_have_count(len(texts))
    shown = page.locator("table.mix").evaluate("table => table.textContent")
    assert script in shown and "\\u001b[2J" in shown and "\\u202egpj.exe" in shown
    assert is_shown_as_it_is(shown, lines=True)
    assert page.locator("main img, main script").count() == 0
    assert page.title() == f"{RUN} · Tokenloom"


@pytest.mark.browser
def test_rows_that_gave_no_tokens_padding_and_documents_that_were_cut_are_told(
    page: Page, service: MemoryService
) -> None:
    open_tab(page, "Sources")
    expect(page.get_by_text("bad rows")).to_have_count(0)
    left_out = {"bad_rows": 1234, "filtered_rows": 5, "excluded_rows": 12}
    packed = {
        "padding_tokens": 12,
        "cut_documents": 7,
        "lost_tokens": 1234,
        "fill_rate": 0.994,
        "cut_rate": 0.012,
    }
    service.put(run_stats(RUN, sources=[source_stats(0, **left_out, **packed)]))
    expect(page.get_by_text("1,234 bad rows", exact=True)).to_be_visible()
    title = "1,311; 1,234 did not decode; 5 did not pass the filter, or are blank lines; 12 of each epoch are left out"
    assert page.get_by_title(title).inner_text() == "1,311"
    title = "1,048,576; 99.4\u00a0% filled, 1.20\u00a0% of the rows cut (1,234 tokens lost)"
    assert page.get_by_title(title).inner_text() == "1.05\u00a0M"


@pytest.mark.browser
def test_losses_stand_beside_the_shares_with_a_curve_for_each_source(
    page: Page, service: MemoryService, server: RestServer
) -> None:
    open_tab(page, "Sources")
    heading = page.get_by_role("columnheader", name="Loss")
    expect(page.get_by_role("rowheader", name="code")).to_be_visible()
    expect(heading).to_be_hidden()
    expect(page.get_by_text("Losses of step")).to_be_hidden()
    sources = [
        source_stats(0, alias="code", loss=2.34567, last_loss=2.5),
        source_stats(1, alias="prose"),
    ]
    service.put(run_stats(RUN, sources=sources, reported=report_stats(step=512)))
    history = run_history(RUN, points=4, code=[1, 2, 3, 4], prose=[1, 2, 3, 4])
    code, prose = history.sources
    code = code.model_copy(update={"loss": [4.0, 2.0, None, 3.0]})
    prose = prose.model_copy(update={"loss": [None] * 4})
    service.histories[RUN] = history.model_copy(update={"sources": [code, prose]})
    page.reload()
    expect(heading).to_be_visible()
    assert cell(page, "code", "Loss") == "2.346"
    assert cell(page, "prose", "Loss") == "–"
    expect(page.get_by_title("smoothed; 2.500 in the last report")).to_be_visible()
    expect(
        page.get_by_text(
            "Losses of step 512, sample 4,096, 1.5 s ago; 3.250 over all; learning rate 6.00e-4"
        )
    ).to_be_visible()
    # From left to right by tokens, the greatest at the top; where nothing was measured the line goes on.
    curves = page.locator("table.mix tbody polyline")
    expect(curves.nth(0)).to_have_attribute("points", "0.0,2.0 24.0,20.0 72.0,11.0")
    expect(curves.nth(1)).to_have_attribute("points", "")
    # The chart has those that have a loss, and that of all.
    keys = page.get_by_role("list", name="Losses of the sources").get_by_role("listitem")
    expect(keys).to_have_text(["all sources 3.000", "code 3.000"])
    expect(page.locator('[data-slot="loss-chart"] canvas')).to_be_visible()
    assert_rows_fit(page, 360, 520, 760, 900, 1100, 1240, 1241, 1280, 1600)
    service.put(run_stats(RUN))
    expect(heading).to_be_hidden()


@pytest.mark.browser
def test_two_hundred_sources_are_sorted_and_filtered_by_what_the_address_says(
    page: Page, service: MemoryService, server: RestServer
) -> None:
    sources = [
        source_stats(
            i, alias=f"part-{i:03}", tokens=(i * 37) % 200, remaining_samples=None if i % 2 else i
        )
        for i in range(200)
    ]
    service.put(run_stats(RUN, sources=sources))
    open_tab(page, "Sources")
    rows = page.locator("table.mix tbody tr")
    # The first, by tokens, and the rest as one.
    expect(rows).to_have_count(24 + 1)
    expect(rows.last).to_contain_text("176 others")
    page.get_by_role("button", name="Show all 200").click()
    expect(rows).to_have_count(200)
    page.get_by_role("button", name="Tokens", exact=True).press("Enter")
    expect(page.get_by_role("columnheader", name="Tokens")).to_have_attribute(
        "aria-sort", "descending"
    )
    most = max(sources, key=lambda source: source.tokens)
    expect(rows.first).to_contain_text(most.alias)
    page.get_by_role("button", name="Tokens", exact=True).click()
    expect(rows.first).to_contain_text("part-000")
    page.get_by_label("Filter").fill("PART-01")
    expect(rows).to_have_count(10)
    expect(page.get_by_text("10 of 200")).to_be_visible()
    assert page.url.endswith(f"#/run/{RUN}/sources?all=1&sort=tokens&filter=PART-01")
    # What is not known comes last, whichever way.
    page.goto(f"http://{server.address}/#/run/{RUN}/sources?all=1&sort=remaining&down=1")
    expect(page.get_by_label("Filter")).to_have_value("")
    expect(rows.first).to_contain_text("part-198")
    expect(rows.last).to_contain_text("part-199")
    # By the mixture's nodes, with a way to what is in one.
    nodes = [source.model_copy(update={"group": f"node-{source.id % 3}"}) for source in sources]
    padding = sum(source.tokens for source in nodes[::3]) // 2
    nodes[0] = nodes[0].model_copy(update={"padding_tokens": padding})
    service.put(run_stats(RUN, sources=nodes))
    page.goto(f"http://{server.address}/#/run/{RUN}/sources")
    expect(page.get_by_text("200 sources in 3 groups")).to_be_visible()
    expect(rows).to_have_count(3)
    assert cell(page, "node-0", "Samples") == f"{67 * 2048 / 1000:.0f} k"
    # Of all of its sources: the first has no tokens.
    expect(page.get_by_title("50.0\u00a0% filled")).to_be_visible()
    page.get_by_role("link", name="node-0").click()
    expect(page.get_by_text("67 of 200")).to_be_visible()


@pytest.mark.browser
def test_shares_in_force_as_expected_and_of_the_last_window_are_told_apart(
    page: Page, service: MemoryService
) -> None:
    open_tab(page, "Sources")
    figures = {
        "target_share": 0.2,
        "expected_share": 0.4,
        "actual_share": 0.41,
        "window_share": None,
    }
    service.put(run_stats(RUN, sources=[source_stats(0, alias="code", **figures)]))
    row = page.get_by_role("row").filter(has_text="code")
    expect(row.get_by_role("cell").nth(1)).to_have_text("20.0\u00a0%")
    expect(row.get_by_role("cell").nth(2)).to_have_text("40.0\u00a0%")
    expect(row.get_by_role("cell").nth(3)).to_have_text("41.0\u00a0%")
    # No commit came lately, and that is no share of 0.
    expect(row.get_by_role("cell").nth(4)).to_have_text("–")
    expect(row.get_by_role("cell").nth(4)).to_have_attribute("title", "no commit in the last 30 s")
    # The mark on the bars is where "so far" should be.
    expect(row.locator(".bar b")).to_have_attribute("style", "left: 80%;")
