"""The page for whoever does not see it, or uses no mouse: axe-core finds nothing, in both colour schemes."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect
from support.lived_run import NAME
from support.memory_service import MemoryService, run_stats
from support.page import WIDTH, assert_fits, assert_no_axe_finding, open_tab
from tokenloom_server.api.served_run import ServedRun

pytestmark = pytest.mark.browser


def assert_readable(page: Page) -> None:
    assert_no_axe_finding(page)
    assert_fits(page, 360, WIDTH)


def assert_readable_in_the_dark(page: Page) -> None:
    """Colours alone differ between the schemes."""
    page.emulate_media(color_scheme="dark")
    assert_no_axe_finding(page, "color-contrast")
    page.emulate_media(color_scheme="light")


@pytest.mark.timeout(300)  # many looks, on a machine that may be busy
def test_axe_finds_nothing_in_any_tab(page: Page, lived: tuple[ServedRun, str]) -> None:
    page.goto(f"{lived[1]}#/run/{NAME}/mix")
    expect(page.get_by_role("heading", name=NAME)).to_be_visible()
    titles = page.get_by_role("navigation").get_by_role("link").all_inner_texts()
    assert titles[0] == "Mix" and len(titles) >= 5
    for title in titles:
        open_tab(page, title)
        expect(page.get_by_role("region", name=title, exact=True)).to_be_visible()
        if title == "Mix":
            page.get_by_text("As a table").click()
        page.wait_for_load_state("networkidle") if title == "Events" else page.wait_for_timeout(100)
        assert_readable(page)
        if title in ("Mix", "Mixture"):
            assert_readable_in_the_dark(page)


def test_axe_finds_nothing_in_the_list_of_runs(page: Page, service: MemoryService) -> None:
    service.put(run_stats("stopped", error="SourceChanged: source 'code' changed"))
    service.put(run_stats("waits", generation=0, ranks=[]))
    expect(page.locator("table.runs tbody tr")).to_have_count(3)
    assert_readable(page)
    assert_readable_in_the_dark(page)
