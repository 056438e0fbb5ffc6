"""Readers as one sees them: what is waited for and why, nodes and sources in stats, metrics, command and page."""

from __future__ import annotations

import json
import os
import platform
import re
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect
from support.page import open_tab, opened
from support.ray_cluster import ray_cluster
from support.server_process import CommandLine, ServerProcess
from support.trainer import World
from tokenloom_server.workers.cluster.connection import Needs, connect

BOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "run.json"
RUN = "looked-at"
MIXTURE = f"""{{run: {RUN}, tokenizer: bytes, sequence_length: 64, mixture: {{policy: least_consumed, children: [
{{source: "jsonl:docs.jsonl:text", alias: docs}}]}}}}"""


def stats_where(server: ServerProcess, found: Any) -> Any:
    """The first stats in which something is found."""
    until = monotonic() + 240
    while not found(stats := server.get(f"/v1/runs/{RUN}/stats")):
        assert monotonic() < until, stats
        sleep(0.2)
    return stats


def metrics_of(server: ServerProcess) -> dict[str, float]:
    lines = server.request("GET", "/metrics").text.splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_readers_are_seen_at_work_and_in_want_of_it(
    tmp_path: Path, tokenloom: CommandLine, browser: Browser
) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    node, flags = platform.node(), ["--readers", "auto"]
    rows = [json.dumps({"text": f"{i} " * (i % 50 + 1)}) for i in range(2000)]
    (tmp_path / "docs.jsonl").write_text("\n".join(rows) + "\n")
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(MIXTURE)
    with ray_cluster() as cluster, connect(cluster.address, Needs(), option="--ray"):
        place = {"RAY_ADDRESS": cluster.address}
        server = ServerProcess(tmp_path / "server", mixture, flags=flags, environment=place).start()
        try:
            # Somebody else has the only CPU, and each file got another time.
            others = placement_group([{"CPU": 1}])
            assert others.wait(240)
            os.utime(tmp_path / "docs.jsonl", (0, 0))
            with World(server.url(RUN), batch_size=4) as world:
                trainer = threading.Thread(target=world.steps, args=[100])
                trainer.start()
                wait = stats_where(server, lambda stats: "no CPU is free" in stats["waiting_for"])
                assert wait["waiting_reason"] == "readers"
                said = r"readers: rows from 0 on of docs: docs\.jsonl \(for \d+ s; no CPU is free for a task of 1 CPU\)"
                assert re.fullmatch(said, wait["waiting_for"])
                assert (
                    metrics_of(server)[
                        f'tokenloom_waiting{{reason="readers",run="{RUN}",stream="train"}}'
                    ]
                    == 1
                )
                (asked,) = wait["readers"]["sources"]
                assert asked["waiting_for"].startswith("readers: rows from 0 on")
                assert (
                    "waiting for readers: rows from 0"
                    in tokenloom("stats", f"{server.rest_url}/{RUN}").output
                )

                kill_child()
                away = stats_where(
                    server, lambda stats: "ended with status -9)" in stats["waiting_for"]
                )
                assert (
                    away["readers"]["away"]
                    == "Ray is away: the process that speaks to it ended with status -9"
                )
                stats_where(server, lambda stats: not stats["readers"]["away"])
                remove_placement_group(others)
                trainer.join(240)
                stats = stats_where(server, lambda stats: stats["sample_index"] == 400)
            (done,), (at,) = stats["readers"]["sources"], stats["readers"]["nodes"]
            assert done["tokens"] == at["tokens"] >= 400 * 64 and at["answers"] >= 1
            assert (at["name"], at["cpus"], done["asked_again"] > 0) == (node, 1, True)
            assert at["ns_per_token"] == pytest.approx(1e9 * at["cpu_s"] / at["tokens"], 0.01)
            metrics, labels = metrics_of(server), f'run="{RUN}",source="docs",stream="train"'
            assert metrics[f"tokenloom_reader_asked_again_total{{{labels}}}"] == done["asked_again"]
            assert (
                metrics[
                    f'tokenloom_reader_tokens_total{{node="{node}",run="{RUN}",stream="train"}}'
                ]
                >= at["tokens"]
            )
            asked_for = set(re.findall(r"tokenloom_reader_\w+", BOARD.read_text(encoding="utf-8")))
            assert len(asked_for) == 4 and asked_for <= {name.partition("{")[0] for name in metrics}
            shown = tokenloom("stats", f"{server.rest_url}/{RUN}").output
            assert f"readers on {node}: 1 CPUs" in shown and "readers of docs: " in shown
            assert f"{RUN}: source docs on {node}: 'docs.jsonl' was written or copied" in server.log
            look_at_page(browser, server, node)
        finally:
            server.terminate()


def kill_child() -> None:
    """Kills the process that speaks to Ray; others of this test's may end meanwhile."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "tokenloom_server.workers.cluster.readers.child" in process.cmdline():
                process.kill()


def look_at_page(browser: Browser, server: ServerProcess, node: str) -> None:
    with opened(browser, f"{server.rest_url}/#/run/{RUN}/mix", 404) as page:
        open_tab(page, "Sources")
        tables = page.locator('[data-slot="readers"] table')
        expect(tables.nth(0).get_by_role("row", name="docs")).to_contain_text("docs")
        expect(tables.nth(1).get_by_role("row", name=node)).to_contain_text(node)
        assert Axe().run(page).violations_count == 0
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
