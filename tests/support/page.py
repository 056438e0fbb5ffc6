"""The page in a real browser: how a test opens it, and what it reads from it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Locator, Page

RUN = "wiki-and-code"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: --no-sandbox: as root, in a container, Chromium has none; it only visits the tests' own servers.
CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
WIDTH, HEIGHT = 1280, 900


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
    context.set_default_timeout(10_000)
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
    return source_row(page, alias).locator(f'[data-label="{label}"]').inner_text().replace("\u00a0", " ")
