"""What the demonstration prints."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenloom_server.reports.stats import RunStats

from tokenloom_tools.demo.corpus import Corpus
from tokenloom_tools.demo.plan import RUN, Launch
from tokenloom_tools.demo.proof import Disproved
from tokenloom_tools.demo.receipts import Step
from tokenloom_tools.reports.terminal import sources_table, table

#: Steps over which a loss is averaged: single batches of a small model scatter.
AVERAGED_STEPS = 4


def from_here(path: Path) -> Path:
    """The path from the working folder, where it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class Report:
    """One console, and whether every claim has held so far."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.disproved = 0
        self._step = 0
        self._begun_s = time.monotonic()

    def step(self, text: str) -> None:
        """Begins the next part."""
        self._step += 1
        self.console.print(f"\n[bold cyan]{self._step}[/] [bold]{escape(text)}[/]")

    def line(self, text: str) -> None:
        self.console.print(f"  {escape(text)}", soft_wrap=True)

    def claim(self, text: str, check: Callable[[], str]) -> None:
        """Checks one claim and prints how it went."""
        try:
            evidence = check()
        except Disproved as fault:
            self.disproved += 1
            self.console.print(f"  [bold red]✗ {escape(text)}: {escape(str(fault))}[/]")
        else:
            self.console.print(f"  [green]✓[/] {escape(text)} [dim]({escape(evidence)})[/]")

    def verdict(self, serve: Sequence[str], logs: Path) -> int:
        """How to go on, the last line, and the exit status."""
        if self.disproved:
            fault = f"{self.disproved} of the claims above did not hold; the logs are in {logs}"
            self.console.print(f"\n[bold red]{escape(fault)}[/]", soft_wrap=True)
            return 1
        self._how_to_go_on(serve)
        seconds = time.monotonic() - self._begun_s
        verdict = "[bold green]Nothing lost, nothing repeated, the same order.[/]"
        self.console.print(f"\n{verdict} ({seconds:.0f} s)")
        return 0

    def progress(self) -> Progress:
        """Bars with a description, such as for files or tokens."""
        columns = (
            TextColumn("  {task.description:22}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        return Progress(*columns, console=self.console)

    def corpora(self, corpus: Corpus) -> None:
        """What the data folder holds."""
        for name, documents in corpus.documents.items():
            characters = corpus.characters[name]
            self.line(
                f"{name:<12}{documents:>7,} documents {characters / 1e6:>7.2f} M characters, "
                f"{characters // documents:>6,} each"
            )
        self.line(f"{'tokeniser':<12}{corpus.vocab_size:>7,} tokens, byte-level BPE")

    def shares(self, stats: RunStats) -> None:
        """The mix, as the ledger has it."""
        without = ("recent", "samples", "left")
        self.console.print(
            sources_table(stats, title="The mix, from the ledger's counters", without=without)
        )

    def training(
        self, first: Sequence[Step], second: Sequence[Step], launches: tuple[Launch, Launch]
    ) -> None:
        """Loss and learning rate on both sides of the kill."""
        before, after = first[-1], second[0]
        parts = (
            (
                "first steps",
                launches[0],
                first[:AVERAGED_STEPS],
                first[min(AVERAGED_STEPS, len(first)) - 1],
            ),
            ("at the checkpoint", launches[0], first[-AVERAGED_STEPS:], before),
            ("resumed", launches[1], second[:AVERAGED_STEPS], after),
            ("last steps", launches[1], second[-AVERAGED_STEPS:], second[-1]),
        )
        rows = (
            (
                name,
                f"{launch.ranks} × {launch.batch_size}",
                f"{point.total_tokens:,}",
                f"{sum(step.loss for step in averaged) / len(averaged):.3f}",
                f"{point.lr:.3e}",
            )
            for name, launch, averaged, point in parts
        )
        headings = ("", "ranks × batch", "tokens", "loss", "learning rate")
        self.console.print(table(headings, rows, left=("",), title="The training, across the kill"))

    def _how_to_go_on(self, serve: Sequence[str]) -> None:
        """Commands that run as they stand from here."""
        program = Path(sys.executable).with_name("tokenloom")
        on_the_path = not program.exists() or shutil.which("tokenloom") == str(program)
        command = ["tokenloom" if on_the_path else str(from_here(program)), *serve]
        self.console.print("\n[bold]To go on[/]")
        self.line("serve the run again:   " + " ".join(shlex.quote(part) for part in command))
        self.line("watch its mix:         http://127.0.0.1:8080/")
        self.line("read it from Python:")
        self.line("    from tokenloom import RemoteDataset")
        self.line(
            f'    for batch in RemoteDataset("grpc://127.0.0.1:50051/{RUN}", batch_size=4, resume="latest"):'
        )
        self.line('        print(batch["sample_ids"], batch["input_ids"].shape)')
