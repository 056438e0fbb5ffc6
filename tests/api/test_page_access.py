"""The page where the server wants a token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from support.memory_service import MemoryService, run_stats
from support.page import RUN, open_tab, opened
from tokenloom_server.api.auth import Access
from tokenloom_server.api.rest.server import RestServer
from tokenloom_tools.cli.serve import tool_routes

CONTROL, READ = "control-token-0123456789", "read-token-0123456789abc"


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, MemoryService]]:
    """The page of a server that wants a token."""
    service = MemoryService()
    service.put(run_stats(RUN))
    server = RestServer("127.0.0.1", 0, Access(CONTROL, READ), routes=tool_routes)
    server.start(service)
    yield server.url, service
    server.stop(timeout=2)


@pytest.fixture
def guarded(
    browser: Browser, address: tuple[str, MemoryService]
) -> Iterator[tuple[Page, MemoryService]]:
    """As somebody opens it for the first time."""
    with opened(browser, address[0], 401, 403) as page:
        yield page, address[1]


def enter(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_label("Token").press("Enter")


@pytest.mark.browser
def test_where_a_token_is_wanted_the_page_asks_for_it_and_keeps_it_in_the_tab(
    guarded: tuple[Page, MemoryService], browser: Browser
) -> None:
    page, _ = guarded
    url = page.url
    expect(page.get_by_role("heading", name="This server wants a token")).to_be_visible()
    expect(page.get_by_label("Token")).to_be_focused()
    expect(page.get_by_role("heading", name=RUN)).to_have_count(0)
    enter(page, "another-token-0123456789")
    expect(page.get_by_text("The server does not know this token.")).to_be_visible()
    enter(page, READ)
    expect(page.get_by_role("heading", name=RUN)).to_be_visible()
    expect(page.get_by_label("Token")).to_be_hidden()

    page.reload()
    expect(page.get_by_role("heading", name=RUN)).to_be_visible()
    assert page.url == url
    assert not page.context.cookies()
    stores = page.evaluate("[Object.values(sessionStorage), Object.values(localStorage)]")
    assert stores == [[READ], []]
    assert READ not in page.content()
    second = page.context.new_page()
    second.goto(url)
    expect(second.get_by_label("Token")).to_be_visible()
    second.close()

    page.get_by_role("button", name="Forget the token").click()
    expect(page.get_by_label("Token")).to_be_visible()
    expect(page.get_by_role("heading", name=RUN)).to_be_hidden()
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.browser
def test_a_token_in_the_address_is_taken_out_at_once_and_kept_in_the_tab(
    guarded: tuple[Page, MemoryService],
) -> None:
    page, _ = guarded
    url = page.url
    # First in a tab that is open, then as somebody follows the link of the server's log.
    for leave in (url, "about:blank"):
        page.goto(leave)
        page.goto(f"{url}#token={READ}")
        expect(page.get_by_role("heading", name=RUN)).to_be_visible()
        expect(page).to_have_url(url)
        assert page.evaluate("[Object.values(sessionStorage), Object.values(localStorage)]") == [
            [READ],
            [],
        ]
        page.get_by_role("button", name="Forget the token").click()
        expect(page.get_by_label("Token")).to_be_visible()


@pytest.mark.browser
def test_a_token_that_comes_while_the_server_is_asked_without_one_is_tried(
    guarded: tuple[Page, MemoryService],
) -> None:
    page, _ = guarded
    url = page.url
    asked: list[Route] = []

    def hold_first(route: Route) -> None:
        asked.append(route)
        if len(asked) > 1:
            route.continue_()

    page.route("**/v1/runs", hold_first)
    page.reload()
    while not asked:
        page.wait_for_timeout(10)
    page.goto(f"{url}#token={READ}")
    expect(page).to_have_url(url)
    asked[0].continue_()
    expect(page.get_by_role("heading", name=RUN)).to_be_visible()


@pytest.mark.browser
def test_links_bring_the_token_and_give_the_exact_bytes(
    guarded: tuple[Page, MemoryService],
) -> None:
    page, service = guarded
    service.snapshot(RUN, 4096, save=True)
    enter(page, READ)
    for tab, link, content in (
        ("Events", "s0-4096", service.saved[RUN]["s0-4096"].encode()),
        ("Mix", "Plan", b"<?xml"),
        ("Mix", "Prometheus metrics", b"# HELP"),
        ("Mix", "OpenAPI", b'{"openapi"'),
    ):
        open_tab(page, tab)
        with page.expect_download() as download:
            page.get_by_role("link", name=link).click()
        assert download.value.path().read_bytes().startswith(content)
        assert READ not in download.value.url
