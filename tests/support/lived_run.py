"""A run that has lived: trained, revised, gone back, and recorded, all of it for real but for the clock on the wall.

As a program: the pictures of the page in ``docs/img``, ``make screenshots``.
"""

from __future__ import annotations

import io
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.run.losses import Report
from tokenloom_tools.cli.serve import tool_routes

from support.corpora import text_rows, write_jsonl
from support.page import CHROMIUM, CHROMIUM_OPTIONS, open_tab
from support.served import Place, Trainer

NAME = "llm-1b"
#: Alias, weight, rows of its corpus for 300 points.
SOURCES = (
    ("web", 6, 3400),
    ("code", 3, 2800),
    ("wiki", 2, 520),
    ("books", 1.5, 1400),
    ("math", 1, 1000),
)
#: Of the wall clock, from one point to the next, seconds.
POINT_S = 300.0
STEPS = 2
TABS = ("Mix", "Sources", "Events")
PICTURES = Path(__file__).resolve().parents[2] / "docs" / "img"


@contextmanager
def lived_run(folder: Path, points: int) -> Iterator[tuple[Place, ServedRun]]:
    """A run with so many recorded points: at 0.3 of them it is launched again from 0.2, at 0.6 code gets more."""
    for number, (alias, _, rows) in enumerate(SOURCES):
        write_jsonl(folder / f"data/{alias}.jsonl", text_rows(rows * points // 300, number, 400))
    children = [
        {"source": f"jsonl:data/{alias}.jsonl:text", "alias": alias, "weight": weight}
        for alias, weight, _ in SOURCES
    ]
    mixture = {"policy": "least_consumed", "children": children}
    of_run = {
        "run": NAME,
        "seed": 7,
        "tokenizer": "bytes",
        "sequence_length": 64,
        "window_micro_steps": 8,
    }
    place = Place(folder, folder, of_run | {"mixture": mixture})
    try:
        served = place.serve()
        # Points are recorded here, on a clock of their own.
        served.recorder.end(10)
        now = itertools.count(time.time() - points * POINT_S, POINT_S)
        clock = [next(now)]
        served.coordinator.wall_clock = lambda: clock[0]
        trainer, checkpoint = Trainer(served, world_size=4, batch_size=16), b""
        for point in range(points):
            if point == int(points * 0.2):
                checkpoint = trainer.state()
            elif point == int(points * 0.3):
                trainer.leave()
                trainer = Trainer(served, world_size=4, batch_size=16, state=checkpoint)
            elif point == int(points * 0.6):
                change: dict[str, Any] = {"reason": "evals of code are flat", "author": "ada"}
                settings = [{"child": "code", "weight": 6}]
                served.mixture.revise(MixtureChange.model_validate(change | {"set": settings}))
            trainer.train(STEPS)
            report(served, trainer, point)
            clock[0] = next(now)
            served.recorder.step()
        yield place, served
    finally:
        place.stop()


def report(served: ServedRun, trainer: Trainer, point: int) -> None:
    """What a trainer would measure: losses that fall."""
    rank, stats = trainer.ranks[0], served.stats.read()
    falling = 1.9 + 3 * math.exp(-point / 60)
    losses = {
        source.id: (falling + 0.25 * source.id + 0.03 * math.sin(point * (source.id + 2)), 512)
        for source in stats.sources
    }
    made = Report(
        sample_index=trainer.index,
        total_tokens=stats.total_tokens,
        step=point + 1,
        sources=losses,
        loss=sum(value for value, _ in losses.values()) / len(losses),
        learning_rate=3e-4,
    )
    served.losses.add(rank.joined.uid, rank.joined.opening.generation, trainer.attempt, made)


def take_pictures() -> None:
    """Writes ``docs/img/page-*.png``: the list of runs and the tabs, light and dark."""
    with (
        tempfile.TemporaryDirectory() as folder,
        lived_run(Path(folder), 300) as (place, _),
        sync_playwright() as web,
    ):
        server = RestServer("127.0.0.1", 0, routes=tool_routes)
        server.start(place.runs)
        browser = web.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        for scheme in ("light", "dark"):
            context = browser.new_context(
                color_scheme=scheme, viewport={"width": 1280, "height": 900}
            )
            page = context.new_page()
            page.goto(server.url)
            page.get_by_text("By plan the data end").wait_for()
            for tab in TABS:
                open_tab(page, tab)
                page.wait_for_timeout(1500)
                save(page, PICTURES / f"page-{tab.lower()}-{scheme}.png")
            context.close()
        browser.close()
        server.stop(timeout=2)


def save(page: Page, path: Path) -> None:
    """Few colours and no more than is seen at first, so that a picture stays small."""
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    picture.crop((0, 0, picture.width, min(picture.height, 1300))).quantize(
        128, dither=Image.Dither.NONE
    ).save(path, optimize=True)
    sys.stderr.write(f"{path.name}: {path.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    take_pictures()
