"""The page's list of runs."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect
from support.memory_service import MemoryService, rank_stats, run_stats, source_stats
from support.page import RUN
from tokenloom_server.reports.stats import NewestEvent
from tokenloom_server.run.recorder import Recent

#: Changes of the document that the page makes while a function of a test waits, counted.
COUNT_CHANGES = """milliseconds => new Promise(resolve => {
    let changes = 0;
    const observer = new MutationObserver(records => { changes += records.length; });
    observer.observe(document.body, {subtree: true, childList: true, characterData: true, attributes: true});
    setTimeout(() => { observer.disconnect(); resolve(changes); }, milliseconds);
})"""


@pytest.mark.browser
def test_what_is_wrong_comes_first_and_each_run_is_one_click_away(
    page: Page, service: MemoryService
) -> None:
    left = [
        source_stats(0, remaining_samples=100_000),
        source_stats(1, exhausted=True, target_share=0.0),
    ]
    service.put(run_stats(RUN, sequence_length=1000, tokens_per_s=1e6, sources=left))
    off = [source_stats(0, alias="code", actual_share=0.48), source_stats(1, actual_share=0.52)]
    service.put(run_stats("stopped", error="SourceChanged: source 'code' changed", sources=off))
    event = NewestEvent(kind="exhausted", time=1.8e9, text="source code ran out")
    service.recent["stopped"] = Recent([1000.0, 500.0, 0.0], event)
    service.put(run_stats("ended", ended="every source is exhausted", tokens_per_s=0.0))
    service.put(run_stats("endless", sources=[source_stats(0, remaining_samples=None)]))
    service.put(
        run_stats(
            "one-away", ranks=[rank_stats(0), rank_stats(1, state="away")], waiting_for="rank 1"
        )
    )
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(5)
    expect(page.get_by_text("5 on this server; 2 to look at")).to_be_visible()
    assert [row.split()[0] for row in rows.all_inner_texts()] == [
        "stopped",
        "one-away",
        "endless",
        RUN,
        "ended",
    ]
    expect(rows.nth(0)).to_contain_text("SourceChanged: source 'code' changed")
    expect(rows.nth(0).locator('[data-label="Off plan"]')).to_have_text("code −2.00\u00a0pp")
    expect(rows.nth(0).get_by_role("link", name="source ran out")).to_have_attribute(
        "title", "source code ran out"
    )
    expect(rows.nth(0).locator("polyline")).to_have_attribute(
        "points", "0.0,2.0 36.0,11.0 72.0,20.0"
    )
    expect(rows.nth(1).locator("td")).to_contain_text(
        ["1 of 2 ranks connected", "", "", "", "1 of 2", "–", "", "waiting for rank 1"]
    )
    # That the data have ended is nothing wrong.
    expect(rows.nth(4).locator("td")).to_have_text(
        ["Ended", "2.10\u00a0M", "0", "–", "2 of 2", "–", "", ""]
    )
    expect(rows.nth(2).locator('[data-label="Ends in"]')).to_have_text("–")
    expect(rows.nth(3).locator('[data-label="Ends in"]')).to_have_text("100\u00a0s")
    page.get_by_role("link", name="stopped").click()
    expect(page.get_by_role("alert").filter(has_text="The run has stopped")).to_be_visible()


@pytest.mark.browser
def test_of_64_runs_a_poll_changes_only_what_is_new(page: Page, service: MemoryService) -> None:
    for number in range(64):
        service.put(run_stats(f"run-{number:02}"))
    service.runs.pop(RUN)
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(64)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    service.put(run_stats("run-07", total_tokens=123_000_000))
    changes = page.evaluate(COUNT_CHANGES, 2500)
    expect(rows.nth(7)).to_contain_text("123\u00a0M")
    assert 0 < changes < 10
    assert {url.rsplit("/", 1)[1] for url in asked} == {"runs", "summaries"}, (
        "one answer for all runs"
    )
