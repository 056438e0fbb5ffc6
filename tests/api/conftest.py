"""Fixtures for REST and its page: one window, and one server with runs that are held in memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page
from support.lived_run import lived_run
from support.memory_service import MemoryService, run_stats
from support.page import HEIGHT, PATIENCE_MS, RUN, WIDTH, watched
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.served_run import ServedRun
from tokenloom_tools.cli.serve import tool_routes


@pytest.fixture(scope="session")
def window(browser: Browser) -> Iterator[Page]:
    """One for all tests that need none of their own: a context for each would be most of their time."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    yield context.new_page()
    context.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[tuple[MemoryService, RestServer]]:
    service = MemoryService()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "Loom.example")  # the machine's
        server = RestServer("127.0.0.1", 0, routes=tool_routes)
        server.start(service, grpc_address="127.0.0.1:50051")
        # It is made ready by the first who asks.
        assert httpx.get(f"{server.url}healthz", trust_env=False, timeout=60).status_code == 200
    yield service, server
    server.stop(timeout=2)


@pytest.fixture
def service(shared: tuple[MemoryService, RestServer]) -> MemoryService:
    """Fresh content in the service of the one server."""
    shared[0].__init__()  # type: ignore[misc]
    shared[0].put(run_stats(RUN))
    return shared[0]


@pytest.fixture
def server(shared: tuple[MemoryService, RestServer], service: MemoryService) -> RestServer:
    return shared[1]


@pytest.fixture
def page(window: Page, server: RestServer) -> Iterator[Page]:
    """The page, opened anew in the window."""
    window.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    with watched(window, 404, 422, 503) as page:
        page.goto(f"http://{server.address}/")
        yield page
        page.goto("about:blank")


@pytest.fixture(scope="session")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedRun, str]]:
    """A run that was trained, revised and taken back, with a history of 24 points; and the URL of its server."""
    with lived_run(tmp_path_factory.mktemp("lived"), 24) as (place, served):
        server = RestServer("127.0.0.1", 0, routes=tool_routes)
        server.start(place.runs)
        yield served, server.url
        server.stop(timeout=2)
