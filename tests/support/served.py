"""A run at work without a socket: real files, a real SQLite ledger, and ranks that keep what they got."""

from __future__ import annotations

import io
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import yaml
from rich.console import Console
from tokenloom.snapshot import Base, History, Point
from tokenloom_proto.seal import canonical
from tokenloom_server.api.auth import OPEN_TO_ALL, Access
from tokenloom_server.api.grpc.messages import counts_of
from tokenloom_server.api.grpc.server import GrpcServer
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.api.service import Runs
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.errors import LedgerUnavailable, NotLeader
from tokenloom_server.ledger import commands
from tokenloom_server.ledger.records import CommittedState, StoredRevision, StoredRun
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.order.steps import BatchPlan
from tokenloom_server.reports.stats import RunStats
from tokenloom_server.run.generation import Delivery, EndOfData, Waiting
from tokenloom_server.run.join import Joined
from tokenloom_server.run.join_call import JoinCall
from tokenloom_server.run.sessions import Session
from tokenloom_server.run.timeouts import Timeouts
from tokenloom_tools.reports.terminal import print_stats

RUN = "test"
PATIENCE_S = 120.0
#: A batch size, or pairs (total tokens, batch size).
Sizes: TypeAlias = int | tuple[tuple[int, int], ...]
#: Samples have 8 tokens: 2 at first, 5 from sample 30 on, 1 from 100 on.
SCHEDULE = ((0, 2), (240, 5), (800, 1))
T = TypeVar("T")


class Sample(NamedTuple):
    source: int
    ids: bytes


class Step(NamedTuple):
    """One step of one rank, as it travels."""

    begin: int
    end: int
    samples: dict[int, Sample]
    point: Point


class FaultyLedger(SqliteLedger):
    """A ledger that can be away for commits, lose an opening or the answer to it, and be slow with a revision."""

    away = lose_answer = lose_request = keep_opening = False
    #: The opening that was kept on its way.
    kept: commands.Open | None = None
    #: Is done while a revision is on its way.
    meanwhile: Callable[[StoredRevision], None] = staticmethod(lambda revision: None)

    def execute(self, command: commands.Command) -> int:
        match command:
            case commands.Commit() if self.away:
                raise LedgerUnavailable("away on purpose")
            case commands.Open() if self.lose_request:
                self.lose_request = False
                raise LedgerUnavailable("the request was lost on purpose")
            case commands.Open() if self.keep_opening:
                self.keep_opening, self.kept = False, command
                raise LedgerUnavailable("it is on its way")
            case commands.Revise():
                self.meanwhile(command.revision)
        answer = super().execute(command)
        if self.lose_answer and isinstance(command, commands.Open):
            self.lose_answer = False
            raise LedgerUnavailable("the answer was lost on purpose")
        return answer


class Rank:
    """A client of one slot, which keeps the points that it was at as the real one does."""

    def __init__(self, served: ServedRun, call: JoinCall, loaded: Any = None) -> None:
        self.served = served
        self.call = call
        self.joined: Joined = served.join_handler.join(call)
        opening, start = self.joined.opening, self.joined.start
        self.base = Base(start.sample_index, opening.start_state.encode())
        point = Point(
            start.sample_index,
            start.total_tokens,
            start.real_tokens,
            f"{start.digest:032x}",
            self.base,
        )
        template = canonical(
            served.coordinator.order.record.template(self.joined.uid, "train", opening.generation)
        ).encode()
        self.history = History(template, point, loaded)
        self.buffer: deque[Step] = deque()
        self.received = self.consumed = opening.start_index
        self.committed_seen = 0
        self.taken: dict[int, Sample] = {}
        self.end: EndOfData | None = None
        self.session = self.connect(served)

    def connect(self, served: ServedRun, credit_micro_steps: int = 1000) -> Session:
        """A new stream, perhaps to another server: it goes on after what was received."""
        self.served, self.end = served, None
        coordinator, opening = served.coordinator, self.joined.opening
        self.session = coordinator.sessions.attach(
            self.joined.uid,
            opening.generation,
            self.call.rank,
            self.call.nonce,
            self.received,
            self.committed_seen,
        )
        coordinator.sessions.progress(self.session, self.consumed, credit_micro_steps)
        return self.session

    def receive(self) -> bool:
        """One message; False at the end of data."""
        coordinator = self.served.coordinator
        message = coordinator.sessions.next_for(self.session, PATIENCE_S, never)
        assert not isinstance(message, Waiting), message.waiting_for
        if isinstance(message, EndOfData):
            self.end = message
            return False
        self._keep(message)
        self.committed_seen = max(self.committed_seen, coordinator.committed_through)
        return True

    def _keep(self, message: Delivery) -> None:
        group = message.group
        rank, batch = self.call.rank, group.plan.batch_size
        if message.with_base:
            self.base = Base(group.begin, group.resume_state.encode())
        assert self.base.sample_index == group.begin
        for step in range(message.first, message.last):
            mark, begin = group.marks[step], group.step_begin(step)
            assert begin == self.received
            first = begin + group.slice_of(step, rank) * batch
            samples = {
                first + i: Sample(
                    int(group.source_ids[rank, step, i]),
                    group.ids(rank, step, step + 1)[i].tobytes(),
                )
                for i in range(batch)
                if group.source_ids[rank, step, i] >= 0
            }
            counts = counts_of(group, message.first, message.last), step - message.first + 1
            tokens = mark.total_tokens, group.run_real_tokens(step)
            point = Point(mark.sample_index, *tokens, f"{mark.digest:032x}", self.base, counts)
            self.buffer.append(Step(begin, mark.sample_index, samples, point))
            self.received = mark.sample_index

    def take(self, steps: int) -> int:
        """Consumes steps one by one; returns how many there were before the data ended."""
        for count in range(steps):
            while not self.buffer:
                if not self.receive():
                    return count
            step = self.buffer.popleft()
            assert not self.taken.keys() & step.samples.keys()
            self.taken |= step.samples
            self.history.append(step.point)
            self.consumed = step.end
            self.served.coordinator.sessions.progress(self.session, self.consumed, 1000)
        return steps

    def state(self, index: int | None = None) -> bytes:
        return self.history.text(index).encode()


class Trainer:
    """All ranks of one launch, in step."""

    attempts = 0

    def __init__(
        self, served: ServedRun, world_size: int = 2, batch_size: Sizes = 2, **ask: Any
    ) -> None:
        Trainer.attempts += 1
        self.attempt = f"attempt-{Trainer.attempts}"
        self.ranks = [
            Rank(served, call_of(rank, world_size, batch_size, self.attempt, **ask))
            for rank in range(world_size)
        ]

    def connect(self, served: ServedRun) -> ServedRun:
        """New streams of all ranks, to another server."""
        for rank in self.ranks:
            rank.connect(served)
        return served

    def take(self, steps: int) -> dict[int, Sample]:
        """The samples of the next steps, by index; every rank ends at the same step."""
        before = len(self.taken())
        for _ in range(steps):
            counts = {rank.take(1) for rank in self.ranks}
            assert len(counts) == 1
            if counts == {0}:
                break
        return dict(sorted(self.taken().items())[before:])

    def train(self, steps: int) -> dict[int, Sample]:
        """``take``, until all of it is committed."""
        samples = self.take(steps)
        self.settle()
        return samples

    def train_to(self, index: int) -> Trainer:
        """``train`` up to a sample index, or to the end of the data."""
        while self.index < index and self.take(1):
            pass
        self.settle()
        return self

    def taken(self) -> dict[int, Sample]:
        taken: dict[int, Sample] = {}
        for rank in self.ranks:
            assert not taken.keys() & rank.taken.keys()
            taken |= rank.taken
        return taken

    def settle(self) -> None:
        """Until all that was consumed is committed."""
        self.ranks[0].served.coordinator.sessions.finish(self.ranks[0].session, PATIENCE_S)

    def leave(self, goodbye: bool = True) -> None:
        """The streams end, with a goodbye or as those of a killed process."""
        self.settle()
        for rank in self.ranks:
            if goodbye:
                rank.served.coordinator.sessions.leave(rank.session)
            rank.served.coordinator.sessions.detach(rank.session)

    def state(self, index: int | None = None) -> bytes:
        states = {rank.state(index) for rank in self.ranks}
        assert len(states) == 1, "ranks wrote different states"
        return states.pop()

    @property
    def index(self) -> int:
        return self.ranks[0].consumed


class Place:
    """A folder with a corpus, a mixture file and a ledger; servers come and go."""

    def __init__(self, folder: Path, ledger_folder: Path, document: dict[str, Any]) -> None:
        self.path = folder / f"{ledger_folder.name}.yaml"
        self.path.write_text(yaml.safe_dump(document))
        self.ledger_path = ledger_folder / "ledger.db"
        #: Without liveness, a new attempt need not wait for the one before to be silent.
        self.timeouts = Timeouts(liveness_s=0.0)
        self._up: list[tuple[Runs, FaultyLedger]] = []

    def serve(self, ledger_path: Path | None = None) -> ServedRun:
        """A server comes up (beside one that may still be there)."""
        self.ledger = FaultyLedger(ledger_path or self.ledger_path)
        # One holder for all: a server that comes up beside another is taken for that one's restart, and leads at once.
        self.runs = Runs(self.ledger, "one", self.timeouts)
        self._up.append((self.runs, self.ledger))
        return self.runs.add(self.path, None)

    def stop(self) -> None:
        for runs, ledger in self._up:
            runs.stop()
            ledger.close()
        self._up.clear()

    def restart(self) -> ServedRun:
        self.stop()
        return self.serve()

    def stored(self) -> StoredRun:
        stored = self.ledger.read_run(RUN, "train")
        assert stored is not None
        return stored

    def written(self) -> StoredRun:
        """``stored`` without the lease, which its server renews by itself."""
        return replace(self.stored(), lease=None)

    def committed(self) -> CommittedState:
        commit = self.stored().committed
        assert commit is not None
        return commit

    def counters(self) -> dict[str, tuple[int, int]]:
        """Committed samples and tokens of each source."""
        return {
            spec: (counters.samples, counters.tokens)
            for spec, counters in self.committed().counters.items()
        }


def printed(stats: RunStats) -> str:
    """What ``tokenloom stats`` prints."""
    out = io.StringIO()
    print_stats(Console(file=out, width=200), stats)
    return out.getvalue()


def never() -> bool:
    return False


def call_of(
    rank: int = 0, world_size: int = 2, batch_size: Sizes = 2, attempt: str = "a", **ask: Any
) -> JoinCall:
    fields: dict[str, Any] = {"resume": "", "state": b"", "nonce": f"{attempt}-nonce-{rank}"}
    if not isinstance(batch_size, int):
        fields["batch_sizes"], batch_size = batch_size, 0
    return JoinCall(
        rank=rank, world_size=world_size, batch_size=batch_size, attempt=attempt, **(fields | ask)
    )


def sequence(served: ServedRun) -> list[Sample]:
    """The canonical order to its end, straight from the pipeline."""
    timeline = served.coordinator.timeline
    pipeline = timeline.pipeline(timeline.initial())
    group = pipeline.begin_group(
        BatchPlan(start_index=0, world_size=1, batch_size=1, group_micro_steps=1000)
    )
    pipeline.fill(group, 1000)
    assert pipeline.ended is not None
    return [
        Sample(int(group.source_ids[0, step, 0]), group.ids(0, step, step + 1)[0].tobytes())
        for step in range(len(group.marks))
    ]


def revise(served: ServedRun, **change: Any) -> StoredRevision:
    """A revision as a PATCH of the mixture makes it."""
    return served.revision_handler.revise(
        MixtureChange.model_validate({"reason": "a test", **change})
    )


def part(samples: list[Sample], begin: int, end: int) -> dict[int, Sample]:
    return {index: samples[index] for index in range(begin, end)}


def recount(served: ServedRun, samples: dict[int, Sample]) -> dict[str, tuple[int, int]]:
    """What ``Place.counters`` has to be after these samples."""
    counts = Counter(sample.source for sample in samples.values())
    return {
        spec: (counts[i], counts[i] * 8)
        for i, spec in enumerate(served.coordinator.order.record.specs)
    }


def until_led(call: Callable[[], T]) -> T:
    """What a client does while the server does not lead: it asks again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except NotLeader:
            assert time.monotonic() < deadline, "the server does not lead any more"
            time.sleep(0.01)


@contextmanager
def serving(folder: Path, ledger_folder: Path, document: dict[str, Any]) -> Iterator[ServedRun]:
    """A run of this process over a corpus, with a ledger of its own, until the block ends."""
    place = Place(folder, ledger_folder, document)
    try:
        yield place.serve()
    finally:
        place.stop()


@contextmanager
def runs_of(
    folder: Path,
    *mixtures: Path,
    ledger: str = "ledger.db",
    holder: str | None = None,
    liveness_s: float = 15.0,
) -> Iterator[Runs]:
    """A server's runs, with a ledger in a folder."""
    opened = SqliteLedger(folder / ledger)
    runs = Runs(opened, holder, Timeouts(liveness_s=liveness_s))
    try:
        for path in mixtures:
            runs.add(path, None)
        yield runs
    finally:
        runs.stop()
        opened.close()


@contextmanager
def over_grpc(runs: Runs, access: Access = OPEN_TO_ALL) -> Iterator[str]:
    """The address at which runs are served."""
    server = GrpcServer("127.0.0.1:0", access)
    server.start(runs)
    try:
        yield server.address
    finally:
        server.stop(0.1)


@contextmanager
def url_of(folder: Path, *mixtures: Path) -> Iterator[str]:
    """What stands before ``/RUN`` in the URLs of runs that this process serves. A trainer that was just killed, or
    left without a goodbye, is not waited for."""
    with runs_of(folder, *mixtures, liveness_s=1.0) as runs, over_grpc(runs) as address:
        yield f"grpc://{address}"
