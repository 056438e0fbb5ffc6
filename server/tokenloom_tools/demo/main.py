"""The order of events, of the demonstration and of a run to watch. Everything that is started here is ended here,
whatever happens."""

from __future__ import annotations

import fcntl
import shutil
import signal
import socket
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from tokenloom_server.catalog import environment_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.errors import TokenloomError

from tokenloom_tools.demo import corpus, receipts
from tokenloom_tools.demo.corpus import Corpus
from tokenloom_tools.demo.plan import DEFAULT_STEPS, FEWEST_STEPS, REFERENCE_RUN, RUN, Launch, Plan
from tokenloom_tools.demo.processes import (
    Child,
    DemoFailed,
    Processes,
    Service,
    serve_arguments,
    start_server,
    wait_until,
)
from tokenloom_tools.demo.proof import Evidence
from tokenloom_tools.demo.receipts import Receipts, Step
from tokenloom_tools.demo.report import Report, from_here
from tokenloom_tools.remote import Remote

DEFAULT_FOLDER = Path("tokenloom-demo")
#: Marks a folder as one that the demonstration may change, and is locked while it does.
MARKER = ".tokenloom-demo"
#: Between two steps. The first one includes importing torch and meeting the other rank, on a busy machine.
STALL_TIMEOUT_S = 120.0
INTERRUPTED = 130


def run_demo(
    folder: Path = DEFAULT_FOLDER,
    *,
    steps: int = DEFAULT_STEPS,
    keep: bool = False,
    act: type[Demo] | None = None,
    console: Console | None = None,
) -> int:
    """Runs the whole job, or another ``act``, in ``folder`` and returns the exit status: 0 if every claim holds.

    ``steps`` scales the training. With ``keep`` the server and its page stay up at the end, until Ctrl-C.
    """
    console = console or Console(highlight=False)
    try:
        if steps < FEWEST_STEPS:
            raise DemoFailed(
                f"--steps {steps}: give at least {FEWEST_STEPS}, so that there is something to interrupt"
            )
        with _ends_like_ctrl_c(signal.SIGTERM), _claimed(folder.absolute()) as claimed:
            return (act or Demo)(claimed, Plan(steps=steps), Report(console)).run(keep)
    except KeyboardInterrupt:
        console.print("\n[bold]Interrupted; every process was ended.[/]")
        return INTERRUPTED
    except TokenloomError as error:
        console.print(
            f"\n[bold red]The demonstration failed:[/] {escape(str(error))}", soft_wrap=True
        )
        return 1


class Demo:
    """One demonstration in one folder."""

    def __init__(self, folder: Path, plan: Plan, report: Report, work: str = "run") -> None:
        self.plan = plan
        self.report = report
        self.data = folder / "data"
        self.mixture = folder / "mixture.yaml"
        self.reference_mixture = folder / "reference.yaml"
        self.work = folder / work
        self.logs = self.work / "logs"
        self.ledger = self.work / "ledger.db"
        self.checkpoint = self.work / "checkpoint.pt"
        #: The server whose addresses the next one takes; None for free ones.
        self.predecessor: Service | None = None

    def run(self, keep: bool) -> int:
        """Every part in its order; returns the exit status."""
        text = self.prepare()
        with Processes() as processes:
            self.train_and_kill(processes, text)
            server = self.resume(processes, text)
            reference = self.read_reference(processes)
            self.prove(server, text, reference)
            if keep:
                self.keep_serving(server)
        self.report.claim("every process has ended as it was meant to", processes.all_ended)
        serve = serve_arguments(from_here(self.mixture), from_here(self.ledger))
        return self.report.verdict(serve, self.logs)

    def prepare(self) -> Corpus:
        """The data folder, and a clean folder for this run."""
        self.report.step(
            "Text that every Python carries: three corpora, and a tokeniser trained on them"
        )
        with self.report.progress() as progress:
            text = corpus.build(self.data, progress, corpus.library_folder())
        self.report.corpora(text)
        self.mixture.write_text(self.plan.mixture(RUN), encoding="utf-8")
        self.reference_mixture.write_text(self.plan.mixture(REFERENCE_RUN), encoding="utf-8")
        shutil.rmtree(self.work, ignore_errors=True)
        self.logs.mkdir(parents=True)
        return text

    def train_and_kill(self, processes: Processes, text: Corpus) -> None:
        """Two ranks, a checkpoint half-way, and a SIGKILL for everything some steps later."""
        plan = self.plan
        self.report.step(f"A server, and training on {plan.first}, with a checkpoint half-way")
        server = self.serve(processes, "server", self.mixture, self.ledger)
        ranks = self.launch(
            processes, plan.first, server, text, "--checkpoint-every", str(plan.checkpoint_step)
        )
        self.follow(
            plan.first, ranks, server, lambda: len(self.steps_of(plan.first)) >= plan.kill_step
        )
        self.kill([*ranks, server.child])

    def kill(self, children: Sequence[Child]) -> None:
        """A SIGKILL for each, and what that costs the trainers."""
        self.report.step("SIGKILL for the trainers and the server")
        for victim in children:
            if victim.status is not None:
                raise victim.failure(f"{victim.name} ended by itself, before it could be killed")
            victim.kill_on_purpose()
            self.report.line(f"killed {victim.name} (pid {victim.pid})")
        last = self.steps_of(self.plan.first)[-1]
        self.report.line(
            f"the checkpoint is at sample {self.plan.checkpoint_index}, the trainers were at {last.sample_index}"
        )

    def resume(self, processes: Processes, text: Corpus) -> Service:
        """The server on the same ledger, and one rank with another batch size from the checkpoint to the end."""
        plan = self.plan
        self.report.step(f"The server again, and training from the checkpoint on {plan.second}")
        server = self.serve(processes, "server-again", self.mixture, self.ledger)
        ranks = self.launch(processes, plan.second, server, text, "--resume")
        self.follow(plan.second, ranks, server, lambda: all(rank.status == 0 for rank in ranks))
        end = self.steps_of(plan.second)[-1].sample_index
        if end != plan.end_index:
            raise ranks[0].failure(
                f"the training ended at sample {end}, but {plan.end_index} were planned"
            )
        return server

    def read_reference(self, processes: Processes) -> Receipts:
        """The same data by another name, from another ledger, without an interruption."""
        plan = self.plan
        self.report.step(
            "An uninterrupted run to compare with: another ledger, one reader, no training"
        )
        server = self.serve(
            processes, "reference-server", self.reference_mixture, self.work / "reference.db"
        )
        received = receipts.receive(
            server.url(REFERENCE_RUN), plan.reader_batch_size, plan.end_index
        )
        server.child.stop()
        return received

    def prove(self, server: Service, text: Corpus, reference: Receipts) -> None:
        """Every claim, from what was received; then the figures."""
        self.report.step("The proof, from the samples that the ranks received")
        evidence = Evidence(
            plan=self.plan,
            config=config.load(self.mixture, environment_catalog()),
            vocab_size=text.vocab_size,
            first=self.receipts_of(self.plan.first),
            second=self.receipts_of(self.plan.second),
            reference=reference,
            stats=server.committed(RUN, self.plan.end_index),
        )
        for claim, check in evidence.claims():
            self.report.claim(claim, check)
        self.report.step("The figures")
        self.report.shares(evidence.stats)
        kept = [
            step
            for step in evidence.first[0].steps
            if step.sample_index <= self.plan.checkpoint_index
        ]
        self.report.training(kept, evidence.second[0].steps, (self.plan.first, self.plan.second))

    def keep_serving(self, server: Service) -> None:
        """Until Ctrl-C."""
        self.report.line(f"the server stays up until Ctrl-C: {server.page} and {server.url(RUN)}")
        try:
            server.child.wait()
        except KeyboardInterrupt:
            return
        raise server.child.failure("the server ended by itself")

    # What the parts have in common

    def serve(self, processes: Processes, name: str, mixture: Path, ledger: Path) -> Service:
        log = self.logs / f"{name}.log"
        server = start_server(processes, name, mixture, ledger, log, successor_of=self.predecessor)
        self.report.line(f"{name}: gRPC {server.grpc}, page {server.page}")
        return server

    def launch(
        self, processes: Processes, launch: Launch, server: Service, text: Corpus, *options: str
    ) -> list[Child]:
        """One trainer for each rank, with the variables that torchrun would set."""
        plan = self.plan
        rendezvous = self.work / f"{launch.name}.rendezvous"
        command = [
            "-m",
            "tokenloom_tools.demo.trainer",
            server.url(RUN),
            "--batch-size",
            str(launch.batch_size),
        ]
        command += ["--tokens", str(plan.tokens), "--warmup-tokens", str(plan.warmup_tokens)]
        command += ["--vocab-size", str(text.vocab_size)]
        command += [
            "--checkpoint",
            str(self.checkpoint),
            "--receipts",
            str(self.work / launch.name),
        ]
        command += ["--rendezvous", f"file://{rendezvous}", *options]
        environment = {"WORLD_SIZE": str(launch.ranks)} | _loopback()
        names = [f"{launch.name}-rank-{rank}" for rank in range(launch.ranks)]
        return [
            processes.start(name, command, self.logs / f"{name}.log", RANK=str(rank), **environment)
            for rank, name in enumerate(names)
        ]

    def follow(
        self, launch: Launch, ranks: Sequence[Child], server: Service, done: Callable[[], bool]
    ) -> None:
        """Shows the training until ``done``; fails when no step comes for too long."""
        seen: list[Step] = []

        def moved() -> bool:
            return len(self.steps_of(launch)) > len(seen) or done()

        with self.report.progress() as progress:
            bar = progress.add_task("samples", total=self.plan.end_index)
            while not done():
                awaited = f"step {len(seen) + 1} of the {launch.name} launch, or its end"
                wait_until(moved, awaited, STALL_TIMEOUT_S, [*ranks, server.child])
                seen = self.steps_of(launch)
                if seen:
                    last = seen[-1]
                    progress.update(
                        bar,
                        completed=last.sample_index,
                        description=f"loss {last.loss:.3f}, samples",
                    )

    def steps_of(self, launch: Launch) -> list[Step]:
        """What rank 0 has on record so far."""
        return receipts.read_steps(self.work / launch.name, 0)

    def receipts_of(self, launch: Launch) -> list[Receipts]:
        folder = self.work / launch.name
        return [
            receipts.read(folder, rank, self.plan.sequence_length) for rank in range(launch.ranks)
        ]


def _loopback() -> dict[str, str]:
    """Ties gloo to the loopback interface: host names need not resolve, and nothing leaves the machine."""
    names = {name for _, name in socket.if_nameindex()}
    return next(({"GLOO_SOCKET_IFNAME": name} for name in ("lo", "lo0") if name in names), {})


@contextmanager
def _claimed(folder: Path) -> Iterator[Path]:
    """The folder, made if need be, for this process alone. One that somebody else filled is refused."""
    marker = folder / MARKER
    if folder.exists() and not marker.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DemoFailed(
            f"{folder} is there already, and not from a demonstration; give another --folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with marker.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoFailed(
                f"another demonstration is under way in {folder}; give another --folder"
            ) from None
        yield folder


@contextmanager
def _ends_like_ctrl_c(signal_number: signal.Signals) -> Iterator[None]:
    """The signal raises KeyboardInterrupt, so that everything is ended in order."""
    before = signal.signal(signal_number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal_number, before)


#: Of a run to watch, seconds after each step; and from the kill until the server is started again, so that the page
#: shows that it is away.
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
    """A run to watch in a browser: it trains slowly, its mixture is revised, everything is killed, and it goes on. The
    server keeps its address, so that the page stays open throughout."""

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
