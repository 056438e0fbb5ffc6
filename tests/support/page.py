"""The page in a real browser: how a test opens it, and what it reads from it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

RUN = "wiki-and-code"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
#: --no-sandbox: as root, in a container, Chromium has none; it only visits the tests' own servers.
CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
WIDTH, HEIGHT = 1280, 900
#: Longer than a busy machine takes to show anything.
PATIENCE_MS = 30_000
expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def watched(page: Page, *statuses: int) -> Iterator[Page]:
    """Every fault of the page's scripts or of its policy is an error of the test, but for answers with these
    statuses."""
    faults: list[str] = []
    known = ("net::ERR", *(f"status of {status}" for status in statuses))

    def on_console(line: object) -> None:
        if line.type == "error":  # type: ignore[attr-defined]
            faults.append(line.text)  # type: ignore[attr-defined]

    def on_error(error: object) -> None:
        faults.append(str(error))

    page.on("pageerror", on_error)
    page.on("console", on_console)
    yield page
    page.remove_listener("pageerror", on_error)
    page.remove_listener("console", on_console)
    assert not [fault for fault in faults if not any(text in fault for text in known)]


@contextmanager
def opened(browser: Browser, url: str, *statuses: int) -> Iterator[Page]:
    """The page as somebody opens it for the first time, ``watched``."""
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    context.set_default_timeout(PATIENCE_MS)
    try:
        with watched(context.new_page(), *statuses) as page:
            page.goto(url)
            yield page
    finally:
        context.close()


def open_tab(page: Page, title: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=title, exact=True).click()


def source_row(page: Page, alias: str) -> Locator:
    return page.locator("table.mix tbody tr", has=page.get_by_role("rowheader", name=alias))


def cell(page: Page, alias: str, label: str) -> str:
    """What the table of sources shows of one."""
    return (
        source_row(page, alias)
        .locator(f'[data-label="{label}"]')
        .inner_text()
        .replace("\u00a0", " ")
    )


def assert_no_axe_finding(page: Page, rule: str | None = None) -> None:
    """That axe-core finds nothing, by all rules or by one."""
    found = Axe().run(
        page, options={"runOnly": {"type": "rule", "values": [rule]}} if rule else None
    )
    assert not found.violations_count, f"{page.url}: {found.generate_report()}"


def assert_fits(page: Page, *widths: int) -> None:
    """That nothing is cut, on a telephone as on a wall."""
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (
            f"{page.url} at {width}"
        )
