"""The page at ``/``: its files as they are, and in a real browser against a real server."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from importlib.resources import files

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright
from support.hostile import TEXTS, is_shown_as_it_is
from support.memory_service import MemoryService, rank_stats, report_stats, run_losses, run_stats, source_stats
from tokenloom_server.api.auth import Access
from tokenloom_server.api.page import FILES
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.errors import LedgerUnavailable
from tokenloom_server.reports.stats import LedgerStats

RUN = "wiki-and-code"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LEDGER_AWAY = LedgerStats(
    backend="redis://host:6379/0",
    available=False,
    error="connection refused",
    last_commit_index=0,
    last_commit_age_s=99,
)


def content(name: str) -> str:
    return files("tokenloom_server.api.page").joinpath(name).read_text(encoding="utf-8")


# The files


class Markup(HTMLParser):
    """What the content security policy would refuse, and what the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.urls: list[str] = []
        self.templates: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if (tag == "script" and "src" not in given) or tag == "style":
            self.inline.append(tag)
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        self.urls += [value or "" for name, value in attributes if name in ("src", "href", "action")]
        if tag == "template":
            self.templates.add(given["id"] or "")


def test_the_page_has_nothing_inline_and_points_to_this_server_only() -> None:
    markup = Markup()
    markup.feed(content("index.html"))
    assert not markup.inline
    served = {url.lstrip("/") for url in FILES} | {"v1/runs", "openapi.json", "metrics", "readyz"}
    assert set(markup.urls) <= served, "relative URLs of this server, so that it also works behind a path prefix"
    for name in ("page.js", "page.css"):
        assert "://" not in re.sub(r"grpcs?://", "", content(name))


def test_the_script_writes_texts_only_as_text() -> None:
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", content("page.js")
    )


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_readable_in_both_colour_schemes(scheme: str) -> None:
    light, dark, *_ = re.findall(r":root \{(.*?)\}", content("page.css"), re.DOTALL)
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", light))
    if scheme == "dark":
        colours |= dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", dark))
    pairs = [(text, ground) for text in ("ink", "muted", "accent") for ground in ("ground", "card", "track")]
    pairs += [("warn", "warn-ground"), ("bad", "bad-ground"), ("warn", "card")]
    for text, ground in pairs:
        assert contrast(colours[text], colours[ground]) >= 4.5, f"{text} on {ground}"


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: install chromium to run the tests of the page")
    with sync_playwright() as playwright:
        # --no-sandbox: as root, in a container, Chromium has none; it only visits this test's own server.
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[MemoryService, RestServer]]:
    service = MemoryService()
    server = RestServer("127.0.0.1", 0)
    server.start(service, grpc_address="127.0.0.1:50051")
    yield service, server
    server.stop(timeout=2)


@pytest.fixture
def service(shared: tuple[MemoryService, RestServer]) -> MemoryService:
    """Fresh content in the service behind the one server of this module."""
    shared[0].__init__()  # type: ignore[misc]
    shared[0].put(run_stats(RUN))
    return shared[0]


@pytest.fixture
def server(shared: tuple[MemoryService, RestServer], service: MemoryService) -> RestServer:
    return shared[1]


@contextmanager
def opened(browser: Browser, url: str, *statuses: int) -> Iterator[Page]:
    """The page as somebody opens it for the first time, with every fault of its script or its policy an error of the
    test, but for answers with these statuses."""
    faults: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(10_000)
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    page.goto(url)
    yield page
    context.close()
    known = ("net::ERR", *(f"status of {status}" for status in statuses))
    assert not [fault for fault in faults if not any(text in fault for text in known)]


@pytest.fixture
def page(browser: Browser, server: RestServer) -> Iterator[Page]:
    with opened(browser, f"http://{server.address}/", 503) as page:
        yield page


def assert_rows_fit(page: Page, *widths: int) -> None:
    for width in widths:
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        card = page.locator('[data-slot="mix"]').bounding_box()
        row = page.locator("table.mix tbody tr").first.bounding_box()
        assert card is not None and row is not None
        assert row["x"] + row["width"] <= card["x"] + card["width"], width


def cell(page: Page, alias: str, label: str) -> str:
    row = page.locator("table.mix tbody tr", has=page.get_by_role("rowheader", name=alias))
    return row.locator(f'[data-label="{label}"]').inner_text().replace("\u00a0", " ")


@pytest.mark.browser
def test_shares_are_shown_and_follow_the_service(page: Page, service: MemoryService) -> None:
    expect(page.get_by_role("heading", name=RUN)).to_be_visible()
    assert cell(page, "prose", "So far") == "50.0 %"
    assert cell(page, "code", "Tokens") == "1.05 M"
    bar = page.locator("table.mix tbody tr").first.locator('[data-slot="actual"]')
    assert bar.evaluate("bar => bar.style.width") == "100%"  # of a scale that ends at the greatest share
    sources = [
        source_stats(0, alias="code", actual_share=0.75, tokens=12_345_678_901, epochs=None, remaining_samples=None),
        source_stats(1, alias="prose", actual_share=0.25, exhausted=True, dropped_tokens=311),
    ]
    service.put(run_stats(RUN, sample_index=1_234_567, produced_index=1_234_600, sources=sources))
    expect(page.get_by_text("1,234,567", exact=True)).to_be_visible()
    assert cell(page, "code", "So far") == "75.0 %"
    assert cell(page, "code", "Tokens") == "12.3 B"
    assert page.get_by_title("12,345,678,901").count() == 1
    assert cell(page, "code", "Epochs") == "0.42 of ∞"
    assert cell(page, "code", "Samples left") == "–"
    assert cell(page, "prose", "Samples left") == "0"
    expect(page.get_by_text("exhausted", exact=True)).to_have_attribute("title", "311 tokens filled no sample")


@pytest.mark.browser
def test_a_warning_is_shown_while_the_run_goes_on(page: Page, service: MemoryService) -> None:
    warning = "'a.txt' was written or copied since the run began"
    service.put(run_stats(RUN, warning=warning))
    expect(page.get_by_text(warning)).to_be_visible()
    service.put(run_stats(RUN))
    expect(page.get_by_text(warning)).to_be_hidden()


@pytest.mark.browser
def test_names_are_shown_and_never_obeyed(page: Page, service: MemoryService) -> None:
    # What is no pair of surrogates does not travel in JSON's UTF-8.
    texts = [text.partition("\ud83d")[0] for text in TEXTS]
    service.put(run_stats(RUN, sources=[source_stats(i, alias=text, spec=text[::-1]) for i, text in enumerate(texts)]))
    expect(page.locator("table.mix tbody tr")).to_have_count(len(texts))
    shown = page.locator("table.mix").evaluate("table => table.textContent")
    assert "\\u001b[2J" in shown and "\\u202egpj.exe" in shown
    assert is_shown_as_it_is(shown, lines=True)


@pytest.mark.browser
def test_rows_that_gave_no_tokens_are_shown(page: Page, service: MemoryService) -> None:
    expect(page.get_by_text("bad rows")).to_have_count(0)
    service.put(run_stats(RUN, sources=[source_stats(0, bad_rows=1234, filtered_rows=5)]))
    expect(page.get_by_text("1,234 bad rows", exact=True)).to_be_visible()
    title = "1,311; 1,234 did not decode; 5 did not pass the filter, or are blank lines"
    assert page.get_by_title(title).inner_text() == "1,311"


@pytest.mark.browser
def test_the_revision_in_force_and_the_next_one_are_shown(page: Page, service: MemoryService) -> None:
    expect(page.get_by_text("Revision 1 in force; revision 2 from sample 8,192 on, in about 26 s")).to_be_visible()
    sources = [source_stats(0, excluded_rows=1200)]
    service.put(run_stats(RUN, revision=0, next_revision=None, sources=sources))
    expect(page.get_by_text("in force")).to_have_count(0)
    assert page.get_by_title("1,311; 1,200 of each epoch are left out").inner_text() == "1,311"


@pytest.mark.browser
def test_pins_and_skips_are_shown(page: Page, service: MemoryService) -> None:
    expect(page.get_by_text("The order passes over 12 samples at sample 96.")).to_be_visible()
    expect(page.get_by_text("for the next launch")).to_have_count(0)
    pin = {"sample_index": 1280, "digest": "0" * 32, "skips": {96: 12, 1280: 2048}}
    service.put(run_stats(RUN, skips={}, pin=pin))
    pinned = "A restore pinned sample 1,280 for the next launch; from then on the order passes over "
    expect(page.get_by_text(f"{pinned}12 samples at sample 96, 2,048 samples at sample 1,280.")).to_be_visible()
    expect(page.locator('[data-text="skips"]')).to_be_hidden()
    service.put(run_stats(RUN, pin=pin | {"skips": {}}))
    expect(page.get_by_text(f"{pinned}nothing.")).to_be_visible()


@pytest.mark.browser
def test_padding_and_documents_that_were_cut_are_told(page: Page, service: MemoryService) -> None:
    packed = {"padding_tokens": 12, "cut_documents": 7, "lost_tokens": 1234, "fill_rate": 0.994, "cut_rate": 0.012}
    service.put(run_stats(RUN, sources=[source_stats(0, **packed)]))
    title = "1,048,576; 99.4\u00a0% filled, 1.20\u00a0% of the rows cut (1,234 tokens lost)"
    assert page.get_by_title(title).inner_text() == "1.05\u00a0M"


@pytest.mark.browser
def test_losses_stand_beside_the_shares_with_a_curve_for_each_source(page: Page, service: MemoryService) -> None:
    heading = page.get_by_role("columnheader", name="Loss")
    expect(page.get_by_role("heading", name=RUN)).to_be_visible()
    expect(heading).to_be_hidden()
    expect(page.get_by_text("Losses of step")).to_be_hidden()
    sources = [source_stats(0, alias="code", loss=2.34567, last_loss=2.5), source_stats(1, alias="prose")]
    service.curves[RUN] = run_losses(RUN, code=[4.0, 2.0, None, 3.0])
    service.put(run_stats(RUN, sources=sources, reported=report_stats(step=512)))
    expect(heading).to_be_visible()
    assert cell(page, "code", "Loss") == "2.346"
    assert cell(page, "prose", "Loss") == "–"
    expect(page.get_by_title("smoothed; 2.500 in the last report")).to_be_visible()
    note = page.get_by_text("Losses of step 512, sample 4,096, 1.5 s ago; 3.250 over all; learning rate 6.00e-4")
    expect(note).to_be_visible()
    expect(note).to_have_attribute("title", re.compile("since it took the run up, 15 Jan 2027"))
    # From left to right by sample index, the greatest at the top; where nothing was measured the line goes on.
    code, prose = page.locator("table.mix tbody polyline").all()
    expect(code).to_have_attribute("points", "0.0,2.0 24.0,20.0 72.0,11.0")
    expect(prose).to_have_attribute("points", "")
    assert_rows_fit(page, 360, 760, 1140, 1141, 1280)
    # More of the curve is shown as it comes; a server that was restarted knows nothing of it.
    service.curves[RUN] = run_losses(RUN, code=[4.0, 2.0])
    service.put(run_stats(RUN, sources=sources, reported=report_stats(sample_index=5000)))
    expect(code).to_have_attribute("points", "0.0,2.0 72.0,20.0")
    service.put(run_stats(RUN))
    expect(heading).to_be_hidden()
    expect(page.get_by_text("Losses of step")).to_be_hidden()


@pytest.mark.browser
def test_the_button_takes_a_snapshot_and_links_to_its_exact_bytes(
    page: Page, service: MemoryService, server: RestServer
) -> None:
    expect(page.get_by_text("None is saved in the ledger yet.")).to_be_visible()
    page.get_by_role("button", name="Take a snapshot").press("Enter")
    expect(page.get_by_text("Saved at sample 4,096.")).to_be_visible()
    link = page.get_by_role("link", name="s0-4096")
    expect(link).to_be_visible()
    expect(page.get_by_role("button", name="Take a snapshot")).to_be_focused()
    url = link.evaluate("link => link.href")
    assert httpx.get(url, trust_env=False).text == service.saved[RUN]["s0-4096"]


@pytest.mark.browser
def test_shares_in_force_as_expected_and_of_the_last_window_are_told_apart(page: Page, service: MemoryService) -> None:
    figures = {"target_share": 0.2, "expected_share": 0.4, "actual_share": 0.41, "window_share": None}
    service.put(run_stats(RUN, sources=[source_stats(0, alias="code", **figures)]))
    row = page.get_by_role("row").filter(has_text="code")
    expect(row.get_by_role("cell").nth(1)).to_have_text("20.0\u00a0%")
    expect(row.get_by_role("cell").nth(2)).to_have_text("40.0\u00a0%")
    expect(row.get_by_role("cell").nth(3)).to_have_text("41.0\u00a0%")
    # No commit came lately, and that is no share of 0.
    expect(row.get_by_role("cell").nth(4)).to_have_text("–")
    expect(row.get_by_role("cell").nth(4)).to_have_attribute("title", "no commit in the last 30 s")
    # The mark on the bars is where "so far" should be.
    expect(row.locator(".bar b")).to_have_attribute("style", "left: 80%;")


@pytest.mark.browser
@pytest.mark.parametrize(
    ("share", "waiting", "state", "words", "note"),
    [
        (0.02, ("rank 1 to go on", "ranks"), "good", "Running", "samples are ready; waiting for rank 1 to go on"),
        (0.63, ("samples to be read", "rows"), "warn", "The data is slow", "waiting for samples to be read"),
        (0.02, ("storage: s3://a", "storage"), "warn", "Waiting for storage", "waiting for storage: s3://a"),
        (None, ("", None), "good", "Running", ""),
    ],
)
def test_one_look_tells_slow_gpus_from_slow_data(
    page: Page,
    service: MemoryService,
    share: float | None,
    waiting: tuple[str, str | None],
    state: str,
    words: str,
    note: str,
) -> None:
    service.put(run_stats(RUN, data_wait_share=share, waiting_for=waiting[0], waiting_reason=waiting[1]))
    pill = page.locator("article .pill")
    expect(pill).to_have_text(words)
    expect(pill).to_have_attribute("data-state", state)
    if share is not None:
        pace = f"{'the data' if share > 0.5 else 'training'} sets the pace"
        note = f"{pace}: ranks waited for data {share:.0%} of the last half a minute; {note}".replace("%", "\u00a0%")
    expect(page.locator("article header .note").first).to_have_text(note)
    expect(page.get_by_role("row", name="connected").first).to_contain_text("3.5\u00a0s")


@pytest.mark.browser
def test_the_plan_of_a_run_is_one_click_away(page: Page) -> None:
    page.get_by_role("link", name="Plan").click()
    page.wait_for_url(f"**/v1/runs/{RUN}/plan.svg")
    expect(page.get_by_text(f"run {RUN}: ends at 10.2M tokens")).to_be_visible()


@pytest.mark.browser
def test_in_the_dark_the_plan_is_dark(browser: Browser, service: MemoryService, server: RestServer) -> None:
    brightness = {}
    for scheme in "light", "dark":
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1100, "height": 600})  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(f"http://{server.address}/v1/runs/{RUN}/plan.svg")
        picture = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("L"))
        # Beside the picture, and in its margin.
        brightness[scheme] = picture[-5, -5], picture[470, 300]
        context.close()
    assert min(brightness["light"]) > 240 and max(brightness["dark"]) < 50


@pytest.mark.browser
def test_a_plan_that_cannot_be_drawn_says_what_to_install_beside_its_link(
    browser: Browser, service: MemoryService, server: RestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with opened(browser, f"http://{server.address}/", 422) as page:
        page.get_by_role("link", name="Plan").click()
        expect(page.get_by_role("alert").filter(has_text="pip install 'tokenloom[plot]'")).to_be_visible()
        expect(page.get_by_role("status").filter(has_text="Live")).to_be_visible()
        assert page.url.endswith("/")


@pytest.mark.browser
def test_a_script_in_an_alias_is_shown_as_text(page: Page, service: MemoryService) -> None:
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    source = source_stats(0, alias=evil, spec=f"txt:{evil}:text")
    service.put(run_stats(RUN, sources=[source], error=evil, ranks=[rank_stats(0)], tokenizer=evil))
    shown = page.locator(".alias", has_text="onerror")
    expect(shown).to_have_text(evil)
    assert page.locator("main img, main script").count() == 0
    assert page.title() == "Tokenloom"


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
        expect(page.get_by_role("alert").filter(has_text="The server does not answer.")).to_be_hidden()
    finally:
        page.goto("about:blank")
        again.stop(timeout=2)


@pytest.mark.browser
def test_figures_that_cannot_be_read_are_marked_as_old_with_the_reason(page: Page, service: MemoryService) -> None:
    expect(page.get_by_role("heading", name=RUN)).to_be_visible()
    service.fault = LedgerUnavailable("redis://host:6379 refused the connection")
    expect(page.get_by_text("These figures cannot be read now: redis://host:6379 refused")).to_be_visible()
    expect(page.locator("article.run.stale")).to_be_visible()
    service.fault = None
    expect(page.get_by_text("These figures cannot be read now")).to_be_hidden()
    expect(page.locator("article.run.stale")).to_be_hidden()


@pytest.mark.browser
def test_what_is_wrong_with_a_run_is_said_beside_its_name(page: Page, service: MemoryService) -> None:
    # Micro-steps have 8 × 2 samples.
    missing = [rank_stats(0, lag=2 * 16), rank_stats(1, state="away", lag=2 * 16 + 1)]
    finished = [rank_stats(0, state="finished"), rank_stats(1, state="finished")]
    service.put(run_stats("ledger-away", ledger=LEDGER_AWAY))
    service.put(run_stats("stopped", error="source 'code' changed: restore the file"))
    service.put(run_stats("ended", ended="every source is exhausted"))
    service.put(run_stats("rank-missing", ranks=missing, world_size=2, batch_size=8, waiting_for="rank 1"))
    service.put(run_stats("done", ranks=finished))
    service.put(run_stats("begins", ranks=[], generation=0, opening=True))

    def run(name: str) -> Locator:
        return page.locator("article.run", has=page.get_by_role("heading", name=name))

    expect(run("ledger-away").get_by_text("The ledger is away: connection refused")).to_be_visible()
    expect(run("ledger-away").get_by_text("99 s ago")).to_be_visible()
    expect(run("stopped").get_by_role("alert")).to_have_text(
        "The run has stopped: source 'code' changed: restore the file"
    )
    expect(run("ended").get_by_text("The data has ended: every source is exhausted")).to_be_visible()
    expect(run("rank-missing").get_by_text("1 of 2 ranks connected")).to_be_visible()
    expect(run("rank-missing").get_by_text("waiting for rank 1")).to_be_visible()
    expect(run("rank-missing").locator(".lagging")).to_have_text("33")
    expect(run("done").get_by_text("All ranks finished")).to_be_visible()
    expect(run("done").get_by_role("cell", name="finished")).to_have_count(2)
    expect(run("begins").get_by_text("Is being opened")).to_be_visible()
    expect(run(RUN).get_by_text("Running")).to_be_visible()


@pytest.mark.browser
def test_of_ten_thousand_ranks_those_that_lag_most_are_shown(page: Page, service: MemoryService) -> None:
    ranks = [rank_stats(rank, lag=rank % 97) for rank in range(10_000)]
    service.put(run_stats(RUN, world_size=10_000, ranks=ranks))
    expect(page.get_by_text("The 16 that lag most, of 10,000")).to_be_visible()
    assert page.locator("table.ranks tbody tr").count() == 16
    assert page.locator("table.ranks tbody tr").first.inner_text().split()[0] == "96"


@pytest.mark.browser
def test_a_newcomer_gets_three_lines_with_the_address(page: Page, service: MemoryService) -> None:
    service.put(
        run_stats(
            RUN, generation=0, world_size=0, batch_size=0, sample_index=0, produced_index=0, total_tokens=0, ranks=[]
        )
    )
    lines = page.get_by_text(f'RemoteDataset("grpc://127.0.0.1:50051/{RUN}", batch_size=4)')
    expect(lines).to_be_visible()
    assert len(lines.inner_text().splitlines()) == 3
    service.runs.clear()
    expect(page.get_by_role("heading", name="No run is served yet")).to_be_visible()
    expect(page.get_by_text('RemoteDataset("grpc://127.0.0.1:50051/RUN", batch_size=4)')).to_be_visible()


CONTROL, READ = "control-token-0123456789", "read-token-0123456789abc"


@pytest.fixture
def guarded(browser: Browser) -> Iterator[tuple[Page, MemoryService]]:
    """The page of a server that wants a token, as somebody opens it for the first time."""
    service = MemoryService()
    service.put(run_stats(RUN))
    server = RestServer("127.0.0.1", 0, Access(CONTROL, READ))
    server.start(service)
    with opened(browser, server.url, 401, 403) as page:
        yield page, service
    server.stop(timeout=2)


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
def test_a_token_in_the_address_is_taken_out_at_once_and_kept_in_the_tab(guarded: tuple[Page, MemoryService]) -> None:
    page, _ = guarded
    url = page.url
    # First in a tab that is open, then as somebody follows the link of the server's log.
    for leave in (url, "about:blank"):
        page.goto(leave)
        page.goto(f"{url}#token={READ}")
        expect(page.get_by_role("heading", name=RUN)).to_be_visible()
        expect(page).to_have_url(url)
        assert page.evaluate("[Object.values(sessionStorage), Object.values(localStorage)]") == [[READ], []]
        page.get_by_role("button", name="Forget the token").click()
        expect(page.get_by_label("Token")).to_be_visible()


@pytest.mark.browser
def test_a_token_that_comes_while_the_server_is_asked_without_one_is_tried(guarded: tuple[Page, MemoryService]) -> None:
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
def test_the_token_decides_what_the_page_can_do(guarded: tuple[Page, MemoryService]) -> None:
    page, service = guarded
    enter(page, READ)
    page.get_by_role("button", name="Take a snapshot").click()
    expect(page.get_by_text("No snapshot was taken: the token is for reading")).to_be_visible()
    assert not service.saved
    page.get_by_role("button", name="Forget the token").click()
    enter(page, CONTROL)
    page.get_by_role("button", name="Take a snapshot").click()
    expect(page.get_by_text("Saved at sample 4,096.")).to_be_visible()


@pytest.mark.browser
def test_links_bring_the_token_and_give_the_exact_bytes(guarded: tuple[Page, MemoryService]) -> None:
    page, service = guarded
    service.snapshot(RUN, 4096, save=True)
    enter(page, READ)
    for link, content in (
        ("s0-4096", service.saved[RUN]["s0-4096"].encode()),
        ("Plan", b"<?xml"),
        ("Prometheus metrics", b"# HELP"),
        ("OpenAPI", b'{"openapi"'),
    ):
        with page.expect_download() as download:
            page.get_by_role("link", name=link).click()
        assert download.value.path().read_bytes().startswith(content)
        assert READ not in download.value.url


@pytest.mark.browser
def test_at_every_width_nothing_is_cut_and_the_mix_stays_a_table(page: Page) -> None:
    table = page.get_by_role("table").first
    expect(table.get_by_role("row").nth(1)).to_be_visible()
    for width in (360, 520, 760, 900, 1080, 1100, 1600):
        assert_rows_fit(page, width)
        assert table.get_by_role("rowheader").count() == 2
