"""Fixtures for every test: a real Redis, empty for each test that asks, a browser, the command, and a Hub."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: in its small sums, threads that wait for each other would take most of the CPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import redis
from playwright.sync_api import Browser, sync_playwright
from support.hub import StandInHub, stand_in_hub
from support.page import CHROMIUM, CHROMIUM_OPTIONS
from support.redis_server import RedisServer
from support.server_process import CommandLine

LEFT_OUT = Path(__file__).with_name("exhaustive.toml")
#: Of all tests, those that only ``make test-all`` runs are at most one in so many.
EXHAUSTIVE = 10


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What ``make test`` leaves out has a reason each, and is little."""
    groups = tomllib.loads(LEFT_OUT.read_text(encoding="utf-8"))["left_out"]
    marks = {
        test: pytest.mark.exhaustive(reason=group["reason"])
        for group in groups
        for test in group["tests"]
    }
    kept = {test for group in groups for test in group.get("but", ())}
    by_name = {
        name: item for item in items for name in (item.nodeid, item.nodeid.partition("[")[0])
    }
    for item in items:
        mark = marks.get(item.nodeid) or marks.get(item.nodeid.partition("[")[0])
        if mark is not None and item.nodeid not in kept:
            item.add_marker(mark)
    if config.args == config.getini("testpaths"):
        gone = [name for name in (*marks, *kept) if name not in by_name]
        if gone:
            raise pytest.UsageError(f"{LEFT_OUT.name} names what is no test: {', '.join(gone)}")
        share = (
            sum(item.get_closest_marker("exhaustive") is not None for item in items) * EXHAUSTIVE
        )
        if share > len(items):
            raise pytest.UsageError(
                f"more than one test in {EXHAUSTIVE} is exhaustive, and so not in make test"
            )


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_developers_own() -> None:
    """A token or a data root that is set on this machine is not for the servers of the tests."""
    for name in [name for name in os.environ if name.startswith("TOKENLOOM_")]:
        del os.environ[name]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis with ``appendonly yes`` and ``appendfsync always``. A test that kills it starts it again."""
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of an empty Redis database."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    return redis_server.url()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The one browser of this process: Playwright cannot be started a second time beside it."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: install chromium to run the tests of the page")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def tokenloom(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """The command."""
    return CommandLine(tmp_path_factory.mktemp("commands"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandInHub]:
    """An empty server with the protocol of the Hugging Face Hub, which this process takes for it."""
    with stand_in_hub() as hub:
        hub.stand_in(monkeypatch, tmp_path / "hf")
        yield hub
