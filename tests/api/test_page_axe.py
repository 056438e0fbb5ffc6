"""The page for whoever does not see it, or uses no mouse: axe-core finds nothing, in both colour schemes."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from support.lived_run import NAME
from support.memory_service import MemoryService, run_stats
from support.page import open_tab, opened
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.served_run import ServedRun

#: Colours alone differ between the schemes.
CONTRAST = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}


def assert_nothing_found(page: Page, options: dict[str, Any] | None = None) -> None:
    found = Axe().run(page, options=options)
    assert found.violations_count == 0, f"{page.url}: {found.generate_report()}"


@pytest.mark.browser
def test_axe_finds_nothing_in_any_tab(browser: Browser, lived: tuple[ServedRun, str]) -> None:
    with opened(browser, f"{lived[1]}#/run/{NAME}/mix", 404) as page:
        tabs = page.get_by_role("navigation").get_by_role("link")
        expect(tabs.first).to_be_visible()
        titles = tabs.all_inner_texts()
        assert titles[0] == "Mix" and len(titles) >= 5
        for title in titles:
            open_tab(page, title)
            expect(page.get_by_role("region", name=title, exact=True)).to_be_visible()
            if title == "Mix":
                page.get_by_text("As a table").click()
            page.wait_for_load_state("networkidle") if title == "Events" else page.wait_for_timeout(100)
            assert_nothing_found(page)
            page.emulate_media(color_scheme="dark")
            page.set_viewport_size({"width": 360, "height": 740})
            assert_nothing_found(page, CONTRAST)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, title
            page.emulate_media(color_scheme="light")
            page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.browser
def test_axe_finds_nothing_in_the_list_of_runs(page: Page, service: MemoryService, server: RestServer) -> None:
    service.put(run_stats("stopped", error="SourceChanged: source 'code' changed"))
    service.put(run_stats("waits", generation=0, ranks=[]))
    expect(page.locator("table.runs tbody tr")).to_have_count(3)
    assert_nothing_found(page)
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.emulate_media(color_scheme="dark")
    assert_nothing_found(page, CONTRAST)
    page.emulate_media(color_scheme="light")
