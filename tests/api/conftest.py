"""Fixtures for the tests of the page: one window, and one server with runs that are held in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page
from support.lived_run import lived_run
from support.memory_service import MemoryService, run_stats
from support.page import HEIGHT, RUN, WIDTH, watched
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.served_run import ServedRun


@pytest.fixture(scope="session")
def window(browser: Browser) -> Iterator[Page]:
    """One for all tests that need none of their own: a context for each would be most of their time."""
    context = browser.new_context()
    context.set_default_timeout(10_000)
    yield context.new_page()
    context.close()


@pytest.fixture(scope="session")
def page_server() -> Iterator[tuple[MemoryService, RestServer]]:
    service = MemoryService()
    server = RestServer("127.0.0.1", 0)
    server.start(service, grpc_address="127.0.0.1:50051")
    yield service, server
    server.stop(timeout=2)


@pytest.fixture
def service(page_server: tuple[MemoryService, RestServer]) -> MemoryService:
    """Fresh content in the service of the one server."""
    page_server[0].__init__()  # type: ignore[misc]
    page_server[0].put(run_stats(RUN))
    return page_server[0]


@pytest.fixture
def server(page_server: tuple[MemoryService, RestServer], service: MemoryService) -> RestServer:
    return page_server[1]


@pytest.fixture
def page(window: Page, server: RestServer) -> Iterator[Page]:
    """The page, opened anew in the window."""
    window.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    with watched(window, 404, 503) as page:
        page.goto(f"http://{server.address}/")
        yield page
        page.goto("about:blank")


@pytest.fixture(scope="session")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedRun, str]]:
    """A run that was trained, revised and taken back, with a history of 24 points; and the URL of its server."""
    with lived_run(tmp_path_factory.mktemp("lived"), 24) as (place, served):
        server = RestServer("127.0.0.1", 0)
        server.start(place.runs)
        yield served, server.url
        server.stop(timeout=2)
