"""A run to watch in a browser: it trains slowly, its mixture is revised, everything is killed, and it goes on."""

from __future__ import annotations

import time
import webbrowser
from dataclasses import replace
from pathlib import Path

from tokenloom_tools.demo.corpus import Corpus
from tokenloom_tools.demo.main import Demo
from tokenloom_tools.demo.plan import RUN, Launch, Plan
from tokenloom_tools.demo.processes import Child, Processes
from tokenloom_tools.demo.report import Report
from tokenloom_tools.demo.service import Service
from tokenloom_tools.remote import Remote

#: Seconds after each step; and from the kill until the server is started again, so that the page shows that it is away.
PAUSE_S, AWAY_S = 0.3, 6.0
#: More steps than the first act, and smaller ones: a revision begins at the next state boundary, 64 micro-steps apart.
LONGER = 4
FIRST, SECOND = (
    Launch(name="first", ranks=2, batch_size=4),
    Launch(name="second", ranks=1, batch_size=8),
)
#: Little is sent ahead of the ranks, so that a revision is seen soon after it was made.
SHORT_WINDOW = "window_micro_steps: 4\n"
CHANGE = {
    "set": [{"child": "docstrings", "weight": 4}],
    "reason": "the model writes no docstrings yet",
    "author": "tokenloom demo",
}


class LiveDemo(Demo):
    """The demonstration for the page: the server keeps its address, so that the page stays open throughout."""

    def __init__(self, folder: Path, plan: Plan, report: Report) -> None:
        plan = replace(plan, steps=LONGER * plan.steps, first=FIRST, second=SECOND)
        super().__init__(folder, plan, report, "live")

    def run(self, keep: bool) -> int:
        """Every part in its order; returns the exit status."""
        plan = self.plan
        text = self.prepare()
        with Processes() as processes:
            self.report.step(f"A server, its page, and training on {plan.first}, slowly")
            server = self.serve(processes, "server", self.mixture, self.ledger)
            self.open_page(server)
            ranks = self.launch(
                processes, plan.first, server, text, "--checkpoint-every", str(plan.checkpoint_step)
            )
            self.follow(
                plan.first,
                ranks,
                server,
                lambda: len(self.steps_of(plan.first)) >= plan.checkpoint_step // 2,
            )
            self.revise(server)
            self.follow(
                plan.first, ranks, server, lambda: len(self.steps_of(plan.first)) >= plan.kill_step
            )
            self.kill([*ranks, server.child])
            self.report.line(
                f"the page says so; the server comes back in {AWAY_S:g} s, at the same address"
            )
            time.sleep(AWAY_S)
            server = self.resume(processes, text)
            self.report.step("The figures")
            self.report.shares(server.committed(RUN, plan.end_index))
            for made in Remote(server.page, {}).mixture(RUN).revisions:
                since = (
                    f"in force since sample {made.sample_index}"
                    if made.in_force
                    else "not in force"
                )
                self.report.line(f"revision {made.number} is {since}")
            if keep:
                self.keep_serving(server)
        self.report.claim("every process has ended as it was meant to", processes.all_ended)
        return int(self.report.disproved > 0)

    def prepare(self) -> Corpus:
        text = super().prepare()
        with self.mixture.open("a", encoding="utf-8") as mixture:
            mixture.write(SHORT_WINDOW)
        return text

    def open_page(self, server: Service) -> None:
        """In the browser of whoever runs this, if there is one."""
        url = f"{server.page}#/run/{RUN}/mix"
        opened = webbrowser.open(url)
        self.report.line(f"watch it at {url}{' (opened in your browser)' if opened else ''}")

    def revise(self, server: Service) -> None:
        """The share of one source is raised while ranks train."""
        self.report.step(
            "The mixture is revised while they train: docstrings get four times their weight"
        )
        made = Remote(server.page, {}, control=True).revise(RUN, CHANGE)
        self.report.line(
            f"revision {made.number}, from sample {made.sample_index} on: {CHANGE['reason']}"
        )

    def serve(self, processes: Processes, name: str, mixture: Path, ledger: Path) -> Service:
        self.predecessor = super().serve(processes, name, mixture, ledger)
        return self.predecessor

    def launch(
        self, processes: Processes, launch: Launch, server: Service, text: Corpus, *options: str
    ) -> list[Child]:
        return super().launch(processes, launch, server, text, *options, "--pause", str(PAUSE_S))
