"""The page at ``/``: its files as they are, and in a real browser against a real server."""

from __future__ import annotations

import io
import re
import sys
from importlib.resources import files
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect
from support.memory_service import MemoryService, rank_stats, run_stats
from support.page import RUN, open_tab
from tokenloom_server.api.mixture_origin import MixtureOrigin
from tokenloom_server.api.page import page_files
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.service import RunProblem
from tokenloom_server.errors import ConfigError, LedgerUnavailable
from tokenloom_server.reports.stats import LedgerStats, Straggler

LEDGER_AWAY = LedgerStats(
    backend="redis://host:6379/0",
    available=False,
    error="connection refused",
    last_commit_index=0,
    last_commit_age_s=99,
)


#: Those that this project writes itself; the others are libraries.
URLS = {url for url, _, _ in page_files()}
OWN_FILES = [
    url.removeprefix("/page/")
    for url in sorted(URLS)
    if url.endswith((".js", ".css")) and "uplot" not in url
]


def content(name: str) -> str:
    return files("tokenloom_server.api.page").joinpath(name).read_text(encoding="utf-8")


# The files


def test_the_page_points_to_this_server_only() -> None:
    assert set(re.findall(r'(?:src|href|action)="([^"]*)"', content("index.html"))) <= {
        *(url.lstrip("/") for url in URLS),
        *("#/", "v1/runs", "openapi.json", "metrics", "readyz"),
    }, "relative URLs, so that it also works behind a path prefix"
    for name in OWN_FILES:
        assert "://" not in re.sub(r"grpcs?://", "", content(name))


def test_the_scripts_write_texts_only_as_text() -> None:
    for name in OWN_FILES:
        written = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\("
        assert not re.findall(written, content(name)), name


def test_what_the_scripts_import_is_served() -> None:
    imported = {
        name for file in OWN_FILES for name in re.findall(r'from "\./([^"]+)"', content(file))
    }
    assert imported and {f"/page/{name}" for name in imported} <= URLS


# In a browser


@pytest.mark.browser
def test_each_view_has_an_address_that_reload_back_and_sharing_keep(
    page: Page, service: MemoryService, server: RestServer
) -> None:
    url = f"http://{server.address}/"
    expect(page.get_by_role("heading", name=RUN)).to_be_visible()
    expect(page.get_by_role("link", name="All runs")).to_be_hidden()
    service.put(run_stats("second"))
    page.get_by_role("link", name="second").click()
    expect(page.get_by_role("heading", name="second")).to_be_visible()
    open_tab(page, "Ranks")
    expect(page).to_have_url(f"{url}#/run/second/ranks")
    page.reload()
    current = page.locator("[aria-current=page]")
    expect(current).to_have_text("Ranks")
    page.go_back()
    expect(current).to_have_text("Mix")
    page.get_by_role("link", name="All runs").click()
    expect(page.get_by_role("link", name=RUN)).to_be_visible()
    page.goto(f"{url}#/run/gone/mix")
    expect(page.get_by_role("heading", name="This server has no run gone")).to_be_visible()


@pytest.mark.browser
def test_a_warning_is_shown_while_the_run_goes_on(page: Page, service: MemoryService) -> None:
    warning = "'a.txt' was written or copied since the run began"
    service.put(run_stats(RUN, warning=warning))
    expect(page.get_by_text(warning)).to_be_visible()
    service.put(run_stats(RUN))
    expect(page.get_by_text(warning)).to_be_hidden()


@pytest.mark.browser
def test_a_mixture_that_is_not_served_is_said_on_every_view(
    page: Page, service: MemoryService
) -> None:
    origin = MixtureOrigin.of_file(Path("/srv/runs/<b>.yaml"), None)
    service.broken.append(
        RunProblem("<b>", origin, ConfigError("mixture: <i>is missing</i>\n" * 100))
    )
    expect(page.locator('[data-slot="runs"]')).to_contain_text(
        "ConfigError: mixture: <i>is missing</i>"
    )
    expect(page.locator("#broken")).to_be_hidden()
    page.get_by_role("link", name=RUN).click()
    expect(page.locator("#broken")).to_have_text("<b> is not served: mixture: <i>is missing</i>")
    service.broken.clear()
    expect(page.locator("#broken")).to_be_hidden()


def test_the_revision_in_force_and_the_next_one_are_shown(
    page: Page, service: MemoryService
) -> None:
    open_tab(page, "Mixture")
    expect(
        page.get_by_text("Revision 1 in force; revision 2 from sample 8,192 on, in about 26 s")
    ).to_be_visible()
    service.put(run_stats(RUN, revision=0, next_revision=None))
    expect(page.get_by_text("in force")).to_have_count(0)


@pytest.mark.browser
def test_pins_and_skips_are_shown(page: Page, service: MemoryService) -> None:
    open_tab(page, "Mixture")
    expect(page.get_by_text("The order passes over 12 samples at sample 96.")).to_be_visible()
    expect(page.get_by_text("for the next launch")).to_have_count(0)
    pin = {"sample_index": 1280, "digest": "0" * 32, "skips": {96: 12, 1280: 2048}}
    service.put(run_stats(RUN, skips={}, pin=pin))
    pinned = (
        "A restore pinned sample 1,280 for the next launch; from then on the order passes over "
    )
    expect(
        page.get_by_text(f"{pinned}12 samples at sample 96, 2,048 samples at sample 1,280.")
    ).to_be_visible()
    expect(page.locator('[data-text="skips"]')).to_be_hidden()
    service.put(run_stats(RUN, pin=pin | {"skips": {}}))
    expect(page.get_by_text(f"{pinned}nothing.")).to_be_visible()


@pytest.mark.browser
def test_the_button_takes_a_snapshot_and_links_to_its_exact_bytes(
    page: Page, service: MemoryService, server: RestServer
) -> None:
    open_tab(page, "Events")
    expect(page.get_by_text("None is saved in the ledger yet.")).to_be_visible()
    page.get_by_role("button", name="Take a snapshot").press("Enter")
    expect(page.get_by_text("Saved at sample 4,096.")).to_be_visible()
    link = page.get_by_role("link", name="s0-4096")
    expect(link).to_be_visible()
    expect(page.get_by_role("button", name="Take a snapshot")).to_be_focused()
    url = link.evaluate("link => link.href")
    assert httpx.get(url, trust_env=False, timeout=60).text == service.saved[RUN]["s0-4096"]


@pytest.mark.browser
def test_one_look_tells_slow_gpus_from_slow_data(page: Page, service: MemoryService) -> None:
    pill, note = page.locator("article .pill"), page.locator("article header .note").first
    for share, waiting, state, words, told in (
        (
            0.02,
            ("rank 1 to go on", "ranks"),
            "good",
            "Running",
            "samples are ready; waiting for rank 1 to go on",
        ),
        (
            0.63,
            ("samples to be read", "rows"),
            "warn",
            "The data is slow",
            "waiting for samples to be read",
        ),
        (
            0.02,
            ("storage: s3://a", "storage"),
            "warn",
            "Waiting for storage",
            "waiting for storage: s3://a",
        ),
        (
            0.02,
            ("readers: rows", "readers"),
            "warn",
            "Waiting for readers",
            "waiting for readers: rows",
        ),
        (None, ("", None), "good", "Running", ""),
    ):
        service.put(
            run_stats(RUN, data_wait_share=share, waiting_for=waiting[0], waiting_reason=waiting[1])
        )
        if share is not None:
            pace = f"{'the data' if share > 0.5 else 'training'} sets the pace"
            waited = f"{share:.0%}".replace("%", "\u00a0%")
            told = f"{pace}: ranks waited for data {waited} of the last half a minute; {told}"
        expect(note).to_have_text(told)
        expect(pill).to_have_text(words)
        expect(pill).to_have_attribute("data-state", state)
    service.put(run_stats(RUN, straggler=Straggler(ranks=[5], waited_share=0.66, seconds=600)))
    expect(pill).to_have_text("Rank 5 holds the others up")
    expect(note).to_have_text(
        "Rank 5 holds the others up: they waited 66\u00a0% of the last 10\u00a0minutes"
    )
    open_tab(page, "Ranks")
    expect(page.get_by_role("row", name="connected").first).to_contain_text("3.5\u00a0s")


@pytest.mark.browser
def test_the_plan_of_a_run_is_one_click_away(page: Page) -> None:
    page.get_by_role("link", name="Plan").click()
    page.wait_for_url(f"**/v1/runs/{RUN}/plan.svg")
    expect(page.get_by_text(f"run {RUN}: ends at 10.2M tokens")).to_be_visible()


@pytest.mark.browser
def test_in_the_dark_the_plan_is_dark(page: Page, server: RestServer) -> None:
    page.goto(f"http://{server.address}/v1/runs/{RUN}/plan.svg")
    brightness = {}
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        picture = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("L"))
        # Beside the picture, and in its margin.
        brightness[scheme] = picture[-5, -5], picture[470, 300]
    assert min(brightness["light"]) > 240 and max(brightness["dark"]) < 50


@pytest.mark.browser
def test_a_plan_that_cannot_be_drawn_says_what_to_install_beside_its_link(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    url = page.url
    page.get_by_role("link", name="Plan").click()
    expect(
        page.get_by_role("alert").filter(has_text="pip install 'tokenloom[plot]'")
    ).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="Live")).to_be_visible()
    assert page.url == url


@pytest.mark.browser
def test_a_server_that_goes_away_is_said_clearly_and_its_return_too(page: Page) -> None:
    service = MemoryService()
    service.put(run_stats(RUN))
    server = RestServer("127.0.0.1", 0)
    server.start(service)
    host, _, port = server.address.rpartition(":")
    page.goto(f"http://{server.address}/")
    expect(page.get_by_role("status").filter(has_text="Live")).to_be_visible()
    server.stop(timeout=2)
    expect(page.get_by_role("alert").filter(has_text="The server does not answer.")).to_be_visible()
    expect(page.get_by_text("Next try in")).to_be_visible()
    expect(page.locator("article.run.stale")).to_be_visible()
    service.put(run_stats(RUN, generation=77))
    again = RestServer(host, int(port))
    again.start(service)
    try:
        page.get_by_role("button", name="Try now").click()
        expect(page.get_by_text("77", exact=True)).to_be_visible()
        expect(
            page.get_by_role("alert").filter(has_text="The server does not answer.")
        ).to_be_hidden()
    finally:
        page.goto("about:blank")
        again.stop(timeout=2)


@pytest.mark.browser
def test_figures_that_cannot_be_read_are_marked_as_old_with_the_reason(
    page: Page, service: MemoryService
) -> None:
    expect(page.get_by_role("heading", name=RUN)).to_be_visible()
    service.fault = LedgerUnavailable("redis://host:6379 refused the connection")
    expect(
        page.get_by_text("These figures cannot be read now: redis://host:6379 refused")
    ).to_be_visible()
    expect(page.locator("article.run.stale")).to_be_visible()
    service.fault = None
    expect(page.get_by_text("These figures cannot be read now")).to_be_hidden()
    expect(page.locator("article.run.stale")).to_be_hidden()


@pytest.mark.browser
def test_what_is_wrong_with_a_run_is_said_beside_its_name(
    page: Page, service: MemoryService, server: RestServer
) -> None:
    # Micro-steps have 8 × 2 samples.
    missing = [rank_stats(0, lag=2 * 16), rank_stats(1, state="away", lag=2 * 16 + 1)]
    finished = [rank_stats(0, state="finished"), rank_stats(1, state="finished")]
    rank_missing = {"ranks": missing, "world_size": 2, "batch_size": 8, "waiting_for": "rank 1"}
    for name, figures, words in (
        (
            "ledger-away",
            {"ledger": LEDGER_AWAY},
            ["The ledger is away: connection refused", "99\u00a0s ago"],
        ),
        (
            "stopped",
            {"error": "source 'code' changed"},
            ["The run has stopped: source 'code' changed"],
        ),
        (
            "ended",
            {"ended": "every source is exhausted"},
            ["The data has ended: every source is exhausted"],
        ),
        ("rank-missing", rank_missing, ["1 of 2 ranks connected", "waiting for rank 1"]),
        ("done", {"ranks": finished}, ["All ranks finished"]),
        ("begins", {"ranks": [], "generation": 0, "opening": True}, ["Is being opened"]),
    ):
        service.put(run_stats(name, **figures))
        page.goto(f"http://{server.address}/#/run/{name}/ranks")
        expect(page.get_by_role("heading", name=name)).to_be_visible()
        for text in words:
            expect(page.get_by_text(text).first).to_be_visible()
        expect(page.locator(".lagging")).to_have_text(["33"] if name == "rank-missing" else [])
        expect(page.get_by_role("cell", name="finished")).to_have_count(2 if name == "done" else 0)


@pytest.mark.browser
def test_a_newcomer_gets_three_lines_with_the_address(page: Page, service: MemoryService) -> None:
    service.put(
        run_stats(
            RUN,
            generation=0,
            world_size=0,
            batch_size=0,
            sample_index=0,
            produced_index=0,
            total_tokens=0,
            ranks=[],
        )
    )
    lines = page.get_by_text(f'RemoteDataset("grpc://127.0.0.1:50051/{RUN}", batch_size=4)')
    expect(lines).to_be_visible()
    assert len(lines.inner_text().splitlines()) == 3
    service.runs.clear()
    expect(page.get_by_role("heading", name="No run is served yet")).to_be_visible()
    expect(
        page.get_by_text('RemoteDataset("grpc://127.0.0.1:50051/RUN", batch_size=4)')
    ).to_be_visible()
