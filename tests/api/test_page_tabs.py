"""The page's tabs Samples, Ranks and Mixture: of a real run with its trainer, and with what no small run has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect
from support.corpora import DOCS, PROSE, flat, write_corpus
from support.hostile import TEXTS, is_shown_as_it_is
from support.memory_service import MemoryService, rank_stats, run_stats
from support.page import RUN, assert_fits, assert_no_axe_finding, open_tab, opened, watched
from support.served import Place, Trainer
from tokenloom_server.api.auth import Access
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.served_run import ServedRun
from tokenloom_tools.cli.serve import tool_routes
from tokenloom_tools.trace import Traces

pytestmark = pytest.mark.browser

CONTROL, READ = "control-token-0123456789", "read-token-0123456789abc"
MARKUP = '<img src=x onerror="document.title=1"><b>bold</b>'
WEB = "jsonl:data/web.jsonl:text"


class Real(NamedTuple):
    """A run that is trained, and the addresses of its page: open to all, and for those with a token."""

    served: ServedRun
    trainer: Trainer
    url: str
    guarded: str


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    texts = [text.partition("\ud83d")[0] + MARKUP for text in TEXTS] * 8
    (folder / "data/web.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    document = flat(
        [WEB, PROSE, DOCS], sequence_length=64, mask_boundaries=True, window_micro_steps=4
    )
    for child, alias in zip(document["mixture"]["children"], ("web", "prose", "docs"), strict=True):
        child |= {"alias": alias, "epochs": 40}
    with pytest.MonkeyPatch.context() as patch:
        # State boundaries every few steps, so that revisions hold soon.
        patch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 4)
        place = Place(folder, tmp_path_factory.mktemp("ledger"), document)
        served = place.serve()
        trainer = Trainer(served, 2, 1).train_to(60)
        servers = [
            RestServer("127.0.0.1", 0, routes=tool_routes),
            RestServer("127.0.0.1", 0, Access(CONTROL, READ), routes=tool_routes),
        ]
        for server in servers:
            server.start(place.runs)
            # FastAPI sets the process's filter of warnings while it makes an app: one is made after the other.
            assert httpx.get(f"{server.url}healthz", trust_env=False, timeout=60).status_code == 200
        yield Real(served, trainer, *(server.url.rstrip("/") for server in servers))
        for server in servers:
            server.stop(timeout=2)
        place.stop()


# Samples


def test_samples_are_shown_as_the_model_saw_them_each_at_its_address(
    window: Page, real: Real
) -> None:
    at = f"{real.url}/#/run/test/samples"
    web = next(i for i in range(5, 60) if real.trainer.taken()[i].source == 0)
    with watched(window, 416) as page:
        page.goto(f"{at}?index={web}")
        expect(page.get_by_role("heading", name=f"Sample {web}")).to_be_visible()
        sample = real.served.companion(Traces).sample(web, None, True)
        shown = page.locator(".document-text").evaluate_all(
            "all => all.map(each => each.textContent)"
        )
        assert len(shown) == len(sample.documents) > 1
        whole = "".join(shown)
        assert MARKUP[5:] in whole and is_shown_as_it_is(whole, lines=True)
        assert (
            page.title() == "test · Tokenloom"
            and page.locator(".document-text img, .document-text b").count() == 0
        )
        # Where a document begins, its first token is no label.
        assert page.locator(".uncounted").count() == sum(
            each.position > 0 for each in sample.documents
        )
        row = page.locator(".sample-rows tbody tr").nth(1)
        second = sample.documents[1]
        cells = [
            "2",
            second.shard,
            second.row,
            second.epoch,
            second.position,
            f"{second.begin} to {second.end - 1}",
        ]
        assert row.locator("td").all_inner_texts() == [*map(str, cells), str(second.row_tokens)]
        expect(
            page.get_by_text(f"generation 1, micro-step {web // 2}: place 0 of rank")
        ).to_be_visible()
        assert_fits(page, 360, 760, 1280, 3840)

        page.get_by_role("button", name="Next").click()
        expect(page.get_by_role("heading", name=f"Sample {web + 1}", exact=True)).to_be_visible()
        page.get_by_role("heading", name="Samples").click()
        for _ in range(2):
            page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("heading", name=f"Sample {web - 1}", exact=True)).to_be_visible()
        assert page.url == f"{at}?index={web - 1}"
        page.reload()
        expect(page.get_by_role("heading", name=f"Sample {web - 1}", exact=True)).to_be_visible()

        page.get_by_role("button", name="Next").click()
        expect(page.locator(".sample-source .alias")).to_have_text("web")
        page.get_by_label("Source").select_option("docs")
        page.get_by_role("button", name="Random one").click()
        expect(page.locator(".sample-source .alias")).to_have_text("docs")
        drawn = int(re.findall(r"index=(\d+)", page.url)[0])
        assert real.trainer.taken()[drawn].source == 2

        page.get_by_role("spinbutton", name="Sample").fill("99999")
        page.get_by_role("button", name="Show", exact=True).click()
        expect(
            page.get_by_role("alert").filter(
                has_text="sample 99999 of run 'test' was not delivered"
            )
        ).to_be_visible()
        expect(page.locator(".sample")).to_be_hidden()


def test_a_long_sample_is_shown_as_far_as_a_page_can_and_ids_where_there_is_no_text(
    page: Page, service: MemoryService
) -> None:
    length = 2**20
    service.put(run_stats(RUN, sequence_length=length))
    page.goto(f"{page.url}#/run/{RUN}/samples?index=12")
    expect(page.get_by_text("The text goes on.")).to_be_visible()
    assert page.locator(".document-text").evaluate("text => text.textContent.length") == 400_000
    service.without_text = True
    page.get_by_role("button", name="Next").click()
    expect(page.locator(".document-text.ids")).to_have_text(re.compile(r"^97 97 97"))


# Ranks


def test_each_of_512_ranks_has_a_cell_and_the_keyboard_reaches_them(
    page: Page, service: MemoryService
) -> None:
    lags = {3: 3 * 512, 200: 20 * 512}
    ranks = [
        rank_stats(i, lag=lags.get(i, 0), state="away" if i == 511 else "connected")
        for i in range(512)
    ]
    service.put(run_stats(RUN, world_size=512, batch_size=1, ranks=ranks))
    open_tab(page, "Ranks")
    expect(page.get_by_text("The 16 that lag most, of 512")).to_be_visible()
    expect(page.locator("table.ranks tbody tr")).to_have_count(16)
    cells = page.get_by_role("option")
    expect(cells).to_have_count(512)
    expect(page.get_by_text("1 away, 1 lagging far, 1 lagging, 509 keeping up")).to_be_visible()
    expect(page.get_by_role("option", name="Rank 200: lagging far")).to_be_visible()
    first = page.locator("table.ranks tbody tr").all_inner_texts()[:3]
    assert [row.split()[0] for row in first] == ["511", "200", "3"]
    page.get_by_role("listbox").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(page.get_by_text("Rank 3: connected, at sample 4,104, lag 1,536")).to_be_visible()
    page.keyboard.press("End")
    expect(page.get_by_text("Rank 511: away")).to_be_visible()
    # What changes is written, and the cells stay.
    page.evaluate("document.querySelector('.cell').kept = true")
    service.put(
        run_stats(RUN, world_size=512, batch_size=1, ranks=[rank_stats(i) for i in range(512)])
    )
    expect(page.get_by_text("512 keeping up")).to_be_visible()
    assert page.evaluate("document.querySelector('.cell').kept")
    assert_fits(page, 360, 760, 1280, 3840)


# The mixture


def test_a_change_is_tried_with_the_token_for_reading_and_made_with_the_one_for_control(
    browser: Browser, real: Real
) -> None:
    with opened(browser, f"{real.guarded}/#token={READ}", 401, 403, 422) as page:
        page.goto(f"{real.guarded}/#/run/test/mixture")
        rows = page.locator(".tree tbody tr")
        expect(rows).to_have_count(4)
        assert rows.nth(1).inner_text().split()[:2] == ["web", WEB]
        expect(page.get_by_text("None was made yet")).to_be_visible()
        page.get_by_role("button", name="Change …").click()
        page.get_by_role("button", name="Dry run").click()
        expect(page.get_by_role("alert").filter(has_text="Nothing is changed yet")).to_be_visible()
        page.get_by_label("Weight of web").fill("4")
        page.get_by_label("docs is paused").check()
        page.get_by_role("button", name="Dry run").click()
        expect(page.get_by_text("web: weight 1 → 4")).to_be_visible()
        expect(page.get_by_text("docs: live → paused")).to_be_visible()
        for picture in page.locator("svg.shares").all():
            assert picture.locator("polygon").count() == 3
        assert not real.served.coordinator.timeline.revisions
        assert_no_axe_finding(page)
        assert_fits(page, 360, 760, 1280, 3840)
        page.set_viewport_size({"width": 1280, "height": 900})

        # A reason is wanted, and then the token.
        page.get_by_role("button", name="Apply").click()
        assert page.get_by_label("Reason").evaluate("field => field.matches(':invalid')")
        page.get_by_label("Reason").fill("more web")
        page.get_by_label("Author").fill("ada")
        page.get_by_role("button", name="Apply").click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_text("this call takes 'control'")).to_be_visible()
        dialog.get_by_label("Token").fill("another-token-0123456789")
        dialog.get_by_role("button", name="Go on").click()
        expect(dialog.get_by_text("the token is none of this server's")).to_be_visible()
        dialog.get_by_label("Token").fill(CONTROL)
        dialog.get_by_role("button", name="Go on").click()
        expect(
            page.get_by_role("status").filter(has_text="Revision 1 holds from sample")
        ).to_be_visible()
        expect(dialog).to_have_count(0)
        (made,) = real.served.coordinator.timeline.revisions
        assert (made.reason, made.author) == ("more web", "ada")
        assert page.evaluate("[Object.values(sessionStorage), Object.values(localStorage)]") == [
            [READ],
            [],
        ]

        # It is to come, and is taken back.
        revision = page.locator(".revisions tbody tr")
        expect(revision).to_contain_text("more web")
        revision.get_by_role("button").click()
        revision.get_by_role("button", name="Take back").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        expect(
            page.get_by_role("alert").filter(has_text="this call takes 'control'")
        ).to_be_visible()
        revision.get_by_role("button").click()
        revision.get_by_role("button").click()
        page.get_by_role("dialog").get_by_label("Token").fill(CONTROL)
        page.keyboard.press("Enter")
        expect(page.get_by_text("Revision 1 is taken back.")).to_be_visible()
        assert not real.served.coordinator.timeline.revisions


def test_a_field_that_cannot_be_is_refused_with_the_servers_words(window: Page, real: Real) -> None:
    with watched(window, 422) as page:
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(f"{real.url}/#/run/test/mixture")
        page.get_by_role("button", name="Change …").click()
        page.get_by_label("Weight of web").fill("[[0, 1], [2")
        page.get_by_role("button", name="Dry run").click()
        expect(
            page.get_by_role("alert").filter(has_text="A weight is a number, or a schedule as JSON")
        ).to_be_visible()
        page.get_by_label("Weight of web").fill("-3")
        page.get_by_role("button", name="Dry run").click()
        expect(page.get_by_role("alert").filter(has_text="weight")).to_be_visible()
        page.get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("alert").filter(has_text="weight")).to_be_hidden()
        expect(page.get_by_role("button", name="Change …")).to_be_focused()
