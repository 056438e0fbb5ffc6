"""One world: a plan drawn from the seed, servers, launches, faults, and an end that must come."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.config.run import RunConfig
from tokenloom_server.errors import (
    BeyondHorizon,
    ConfigError,
    LedgerError,
    NotFound,
    SnapshotInvalid,
    TokenloomError,
)
from tokenloom_server.ledger.commands import SaveSnapshot
from tokenloom_server.ledger.records import Opening, StoredSnapshot
from tokenloom_server.run.timeouts import Timeouts

from tests.simulation.checker import Checker
from tests.simulation.corpus import (
    MIXTURES,
    PHASES,
    MemoryFactory,
    older_checkpoint,
    order_of,
    rebuilt,
    reference,
)
from tests.simulation.network import Stream
from tests.simulation.scheduler import Scheduler, Violation
from tests.simulation.server import RUN, STREAM, Server
from tests.simulation.trainer import Launch, Rank, Sizes
from tests.support.drawn_readers import DrawnReaders, drawn_sizes
from tests.support.memory_ledger import MemoryLedger, Store

#: After the last fault all must be done within this time, seconds: a rank waits 120 s for a rank 0 that died.
LIVENESS_S = 400.0
#: And all that every rank used must be committed so soon behind the end, seconds.
SETTLED_S = 60.0

#: Kinds of faults that go together. A world has a theme, or a few kinds of all: many at once hide each other.
THEMES: dict[str, tuple[str, ...]] = {
    "launches": ("kill trainer", "kill rank", "zombies", "launch beside", "launch beside", "rogue"),
    "servers": ("kill server", "stop server", "pause server", "ledger away"),
    "network": ("break streams", "pause rank", "pause server", "kill server"),
    "states": ("snapshot", "pin", "kill trainer", "kill server"),
    "lost data": ("lose data", "kill server", "kill trainer"),
    "revisions": (
        *("revise",) * 5,
        *(
            "drop revisions",
            "revise standing",
            "kill server",
            "kill trainer",
            "pause server",
            "pin",
            "snapshot",
        ),
    ),
}
#: Beside those of a world's theme, where an older checkpoint is at hand.
IMPORT_FAULTS = ("kill trainer", "kill trainer", "kill server", "pin", "snapshot")
#: Where samples are passed over: a theme of its own, whose draws are of its own, too.
SKIP_FAULTS = (
    *("skip",) * 4,
    *(
        "undo skip",
        "cancel pin",
        "kill trainer",
        "kill trainer",
        "kill server",
        "snapshot",
        "revise",
        "revise standing",
    ),
)
FAULTS = tuple(sorted({kind for kinds in THEMES.values() for kind in kinds}))
LEDGER_FAULTS = (
    *(
        "hangs",
        "hangs after",
        "busy",
        "unreachable",
        "late",
        "twice",
        "answer lost",
        "dies before",
        "dies after",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What kind of world it is."""

    mixture: str
    window_micro_steps: int
    message_steps: int
    group_micro_steps: int
    largest_world: int
    in_step: bool
    few_credits: bool
    start_spread_s: float
    latency_s: float
    #: How often something else happens inside a call to the ledger, or inside producing.
    overlap: float
    loses_calls: float
    clock_drift: float
    ledger_faults: tuple[str, ...]
    ledger_fault_rate: float
    faults: tuple[str, ...]
    fault_count: int
    fault_gap_s: float
    servers: int
    timeouts: Timeouts

    @classmethod
    def draw(cls, rng: random.Random) -> Plan:
        message_steps = rng.randint(1, 4)
        theme = rng.choice([*sorted(THEMES), "any", "any", "revisions"])
        faults = THEMES[theme] if theme in THEMES else tuple(rng.sample(FAULTS, rng.randint(0, 5)))
        ledger_faults = tuple(rng.sample(LEDGER_FAULTS, rng.randint(1, 4)))
        ledger_fault_rate = rng.choice([0.0, 0.0, 0.03, 0.1, 0.3])
        if theme == "launches" and rng.random() < 0.7:
            # What a launch that is over still has on its way to the ledger.
            ledger_faults, ledger_fault_rate = ("late", "twice", "answer lost", "hangs"), 0.2
        # A revision holds behind the window only, and the data are few.
        small = theme == "revisions" and rng.random() < 0.8
        if small and rng.random() < 0.5:
            # Production goes on while a revision is being written.
            ledger_faults, ledger_fault_rate = (
                ("hangs", "hangs after", "late", "twice", "answer lost"),
                0.2,
            )
        return cls(
            mixture=rng.choice(sorted(set(MIXTURES) - {"one source"} if small else MIXTURES)),
            window_micro_steps=rng.randint(2, 3 if small else 12),
            message_steps=message_steps,
            group_micro_steps=message_steps * rng.choice([1, 1, 2, 3]),
            largest_world=rng.choice([1, 1, 2] if small else [1, 2, 2, 3, 4, 4, 6, 8, 16, 64]),
            in_step=rng.random() < 0.7,
            few_credits=rng.random() < 0.3,
            start_spread_s=rng.choice([0.01, 0.5, 5.0]),
            latency_s=rng.choice([0.002, 0.02, 0.3]),
            overlap=rng.choice([0.0, 0.1, 0.5]),
            loses_calls=rng.choice([0.0, 0.0, 0.1, 0.3]),
            clock_drift=rng.choice([0.0, 0.001]),
            ledger_faults=ledger_faults,
            ledger_fault_rate=ledger_fault_rate,
            faults=faults,
            fault_count=(rng.randint(4, 12) if small else rng.randint(1, 8)) if faults else 0,
            fault_gap_s=rng.choice([0.05, 0.3, 1.0]),
            servers=rng.choice([1, 1, 2]),
            timeouts=Timeouts(
                lease_s=rng.choice([0.5, 3.0, 15.0]),
                liveness_s=rng.choice([0.5, 3.0, 15.0]),
                rank_timeout_s=rng.choice([30.0, 300.0]),
            ),
        )


@cache
def _order(mixture: str, window_micro_steps: int) -> tuple[MemoryFactory, str]:
    order = order_of(mixture, window_micro_steps)
    return order, order.record.to_json()


class World(Scheduler):
    """See the module."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed = seed
        self.plan = Plan.draw(self.rng)
        self._schedules = random.Random(f"ramps of {seed}")
        # Of draws of their own, too: a world without an older checkpoint is as it was before there were any.
        self._imports = random.Random(f"older checkpoints of {seed}")
        #: What an older data loader had saved, in some worlds.
        self.older = ""
        if self._imports.random() < 0.15:
            mixture = PHASES if self._imports.random() < 0.5 else self.plan.mixture
            # Several launches on few ranks, so that some of them begin from elsewhere than the one before.
            self.plan = replace(
                self.plan,
                mixture=mixture,
                largest_world=min(self.plan.largest_world, 2),
                start_spread_s=0.5,
                faults=(*self.plan.faults, *IMPORT_FAULTS),
                fault_count=self._imports.randint(4, 12),
                fault_gap_s=self._imports.choice([0.3, 1.0]),
            )
            self.older = older_checkpoint(mixture, self._imports)
        # Phases lie by the clock, which a skip does not move: the plain order would have them elsewhere.
        self._skips = random.Random(f"skips of {seed}")
        if self._skips.random() < 0.15 and self.plan.mixture != PHASES:
            self.plan = replace(
                self.plan,
                mixture=self.plan.mixture if self.older else self._skips.choice(sorted(MIXTURES)),
                largest_world=min(self.plan.largest_world, 2),
                window_micro_steps=min(self.plan.window_micro_steps, 4),
                start_spread_s=0.5,
                faults=SKIP_FAULTS,
                fault_count=self._skips.randint(4, 12),
                fault_gap_s=self._skips.choice([0.3, 1.0]),
            )
        # In some worlds most servers have readers, and nothing is otherwise than without them, not even when.
        self._readers = random.Random(f"readers of {seed}")
        self.share_of_readers = 0.8 if self._readers.random() < 0.25 else 0.0
        self.readers: list[DrawnReaders] = []
        self.order, self.record = _order(self.plan.mixture, self.plan.window_micro_steps)
        self.store = Store()
        self.ledger = MemoryLedger(self.store, lambda: self.now)
        self.checker = Checker(self, reference(self.plan.mixture))
        self.servers: list[Server | None] = [None] * self.plan.servers
        self.launches: list[Launch] = []
        self.streams: list[Stream] = []
        self.ledger_is_away = False
        #: The ledger lost data: what was written behind a copy of the store.
        self.lost = False
        self._copies = [self.store.copy()]
        self._checkpoint: str | None = None
        #: All that trainers saved.
        self._checkpoints: list[str] = []
        #: By id.
        self.saved: dict[str, str] = {}
        self._uids = self._lives = 0
        self._faults_left = self.plan.fault_count
        self._quiet_at: float | None = None
        self._completed: Launch | None = None
        self._completed_at = 0.0
        self._next_ask: tuple[str, str] | None = None
        self._relaunch_due = False
        self.over = False

    # The course of events

    def run(self) -> None:
        """Runs the world to its end. Raises ``Violation``."""
        with _quietly(), drawn_sizes(self.seed):
            self.note("world", "plan", str(self.plan))
            for address in range(self.plan.servers):
                self._start_server(address)
            self._launch()
            self.soon(self.plan.fault_gap_s, None, self._fault)
            self.soon(0.3, None, self._save_checkpoint)
            while not self.over:
                if not self.run_one():
                    self.checker.fail("nothing is left to do, and the job is not done")
                self._look_for_end()
            self.checker.look_at_check()

    def _look_for_end(self) -> None:
        launch = self._completed
        if launch is None:
            if self._quiet_at is not None and self.now > self._quiet_at + LIVENESS_S:
                self.checker.fail(
                    f"no end within {LIVENESS_S:.0f} s after the last fault: {self._standing()}"
                )
        elif self.lost or launch.failed is not None or self.checker.present != launch.attempt:
            self.over = True  # its generation is over; what it had is in the next one's start, or given up with it
        elif self.checker.committed == launch.consumed:
            self.over = True
        elif self.now > self._completed_at + SETTLED_S:
            if any(not rank.alive and not rank.said_all for rank in launch.ranks):
                self.over = True  # it was killed after its last step, perhaps before the server heard of that
                return
            self.checker.fail(
                f"{self.checker.committed} is committed {SETTLED_S:.0f} s behind the end"
            )

    def finished(self, launch: Launch) -> None:
        """A rank has all data."""
        if self._completed is None and launch.complete:
            self._completed, self._completed_at = launch, self.now
            self.checker.completed(launch)
            self.note(launch.attempt, "complete", launch.consumed)
            self._become_quiet()

    def _standing(self) -> str:
        ranks = self.launches[-1].ranks
        found = [
            f"{rank.name} alive={rank.alive} joined={rank.joined is not None} at {rank.consumed}"
            for rank in ranks
        ]
        return "; ".join(found[:8])

    def _become_quiet(self) -> None:
        if self._quiet_at is not None:
            return
        self._quiet_at = self.now
        self.note("world", "quiet")
        self.ledger_is_away = False
        for server in self.servers:
            if server is not None and server.paused:
                self.resume(server)
        for launch in self.launches:
            for rank in launch.ranks:
                if rank.paused:
                    self.resume(rank)

    # What the parts ask

    def latency(self) -> float:
        return self.rng.random() * self.plan.latency_s * (10 if self.rng.random() < 0.02 else 1)

    def ledger_fault(self, call: str) -> str | None:
        if self._quiet_at is not None or not self.plan.ledger_fault_rate:
            return None
        # Openings are rare, and matter most.
        rate = self.plan.ledger_fault_rate * (3 if call == "open" else 1)
        return self.rng.choice(self.plan.ledger_faults) if self.rng.random() < rate else None

    @property
    def loses_calls(self) -> float:
        return 0.0 if self._quiet_at is not None else self.plan.loses_calls

    def new_uid(self) -> str:
        self._uids += 1
        return f"uid-{self._uids}"

    def server_at(self, address: int) -> Server | None:
        return self.servers[address % len(self.servers)]

    def launch_of(self, attempt: str) -> Launch:
        return self.launches[int(attempt.partition("-")[2])]

    @property
    def openings(self) -> Sequence[Opening]:
        """What the ledger has of the run's generations."""
        run = self.store.runs.get((RUN, STREAM))
        return run.openings if run is not None else ()

    # Servers

    def draw_readers(self, server: str) -> DrawnReaders | None:
        """The readers of a server that starts, if it has any."""
        if self._readers.random() >= self.share_of_readers:
            return None
        self.readers.append(DrawnReaders(f"{server} of {self.seed}", rebuilt))
        return self.readers[-1]

    def _start_server(self, address: int) -> None:
        self._lives += 1
        server = self.servers[address] = Server(self, address, self._lives)
        self.soon(0.5, server, server.boot)

    def kill_server(self, server: Server) -> None:
        if not server.alive:
            return
        server.killed()
        self.note(server.name, "dead")
        address = self.servers.index(server)
        self.servers[address] = None
        self.soon(1.0, None, self._start_server, address)

    # Launches

    def _launch(self) -> None:
        number = len(self.launches)
        if number > 60:
            self.checker.fail("sixty launches, and no end")
        resume, text = self._ask()
        largest = self.plan.largest_world
        world_size = largest if not number else self.rng.randint(max(1, largest // 2), largest)
        sizes, accumulate = self._schedule(self.rng.randint(1, 3))
        launch = Launch(
            self, number, world_size, sizes, accumulate, resume, text, self.rng.random() < 0.5
        )
        self.launches.append(launch)
        asked = f"state at {launch.loaded.sample_index}" if launch.loaded is not None else resume
        if launch.older:
            asked = f"an older checkpoint: {text}"
        self.note(launch.attempt, "starts", f"{world_size} × {sizes}, {accumulate}", asked)
        launch.start()

    def _schedule(self, batch_size: int) -> tuple[Sizes, int]:
        """The batch size of the next launch by the run's tokens, and steps of an optimiser step."""
        # Of its own draws: a world without a batch_plans is as it was before there were any.
        rng = self._schedules
        if rng.random() < 0.75:
            return ((0, batch_size),), 1
        sizes = [(0, batch_size)]
        for _ in range(rng.randint(1, 3)):
            sizes.append((sizes[-1][0] + rng.randint(1, 200), rng.randint(1, 4)))
        return tuple(sizes), min(rng.randint(1, 3), self.plan.window_micro_steps // 2)

    def _ask(self) -> tuple[str, str]:
        """What the next launch resumes from: (resume, state)."""
        if self._next_ask is not None:
            ask, self._next_ask = self._next_ask, None
            return ask
        if self.older and self._imports.random() < (0.4 if self.launches else 0.7):
            return "", self.older
        if not self.launches:
            return "", ""
        chance = self.rng.random()
        if self.saved and chance < 0.1:
            return self.rng.choice(list(self.saved)), ""
        if self._checkpoint is not None and chance < 0.85:
            return "", self._checkpoint
        return self.rng.choice(["latest", "latest", "fresh", ""]), ""

    def launch_failed(self, launch: Launch, error: TokenloomError) -> None:
        """The job's supervisor: a failed launch is ended, and where none is left, there is another."""
        self.note(launch.attempt, "failed", error.name, str(error))
        launch.given_up = True
        self.soon(1.0, None, launch.kill)
        if any(not other.given_up for other in self.launches):
            return  # another goes on
        if "pinned" in str(error):
            self._next_ask = "", ""
        elif error.name == "ResumePointNeeded":
            self._next_ask = "latest", ""
        elif (error.name == "NotFound" and launch.resume) or error.name == "SnapshotInvalid":
            self._next_ask = self.rng.choice(["latest", "fresh"]), ""
        self._relaunch()

    def _relaunch(self) -> None:
        if not self._relaunch_due:
            self._relaunch_due = True
            self.soon(2.0, None, self._launch_again)

    def _launch_again(self) -> None:
        self._relaunch_due = False
        if self._completed is None:
            self._launch()

    def _save_checkpoint(self) -> None:
        launch = self.launches[-1]
        if launch.failed is None and all(rank.alive and not rank.paused for rank in launch.ranks):
            self._checkpoint = launch.checkpoint() or self._checkpoint
            if self._checkpoint is not None and self._checkpoint not in self._checkpoints[-1:]:
                self._checkpoints.append(self._checkpoint)
        self.soon(0.5, None, self._save_checkpoint)

    # Faults

    def _fault(self) -> None:
        if self._quiet_at is not None:
            return
        if not self._faults_left:
            self._become_quiet()
            return
        self._faults_left -= 1
        kind = self.rng.choice(self.plan.faults)
        self.note("world", "fault", kind)
        self._copies.append(self.store.copy())
        self.checker.look_at_check()
        getattr(self, f"_{kind.replace(' ', '_')}")()
        self.at(self.rng.expovariate(1 / self.plan.fault_gap_s), None, self._fault)

    def _a_server(self) -> Server | None:
        return self.rng.choice(self.servers)

    def _ask_a_server(self, ask: Callable[..., None], *args: object) -> None:
        server = self._a_server()
        if server is not None and server.coordinator is not None:
            self.at(0.0, server, ask, server, *args)

    def _kill_server(self) -> None:
        server = self._a_server()
        if server is not None:
            self.kill_server(server)

    def _stop_server(self) -> None:
        server = self._a_server()
        if server is not None and not server.held_up():
            self.at(0.0, server, server.stop)

    def _pause_server(self) -> None:
        server = self._a_server()
        if server is not None and not server.paused:
            server.paused = True
            self.at(self.rng.expovariate(1 / 5), None, self.resume, server)

    def _kill_trainer(self) -> None:
        self.launches[-1].kill()
        self._relaunch()

    def _a_rank(self) -> Rank | None:
        alive = [rank for rank in self.launches[-1].ranks if rank.alive]
        return self.rng.choice(alive) if alive else None

    def _kill_rank(self) -> None:
        rank = self._a_rank()
        if rank is not None:
            rank.kill()
            rank.launch.given_up = True
            self.soon(3.0, None, rank.launch.kill)
            self._relaunch()

    def _pause_rank(self) -> None:
        rank = self._a_rank()
        if rank is not None and not rank.paused:
            rank.paused = True
            self.at(self.rng.expovariate(1 / 2), None, self.resume, rank)

    def _zombies(self) -> None:
        """Ranks hang, are given up, and come back from the dead beside the next launch."""
        self.launches[-1].given_up = True
        for rank in self.launches[-1].ranks:
            if rank.alive and not rank.paused and self.rng.random() < 0.7:
                rank.paused = True
                self.at(self.rng.expovariate(1 / 5), None, self.resume, rank)
            elif self.rng.random() < 0.5:
                rank.kill()
        self._relaunch()

    def _launch_beside(self) -> None:
        """A second launch, by mistake or not, while the first is well."""
        self._relaunch()

    def _break_streams(self) -> None:
        every = self.rng.random() < 0.3
        self.streams = [stream for stream in self.streams if not stream.broken]
        for stream in self.streams:
            if every or self.rng.random() < 0.3:
                stream.cut(silently=self.rng.random() < 0.2)

    def _ledger_away(self) -> None:
        self.ledger_is_away = True
        self.at(self.rng.expovariate(1 / 3), None, self._ledger_back)

    def _ledger_back(self) -> None:
        self.ledger_is_away = False

    def _snapshot(self) -> None:
        self._ask_a_server(self._save_snapshot)

    def _save_snapshot(self, server: Server) -> None:
        self._make_snapshot(server, True)

    def _make_snapshot(self, server: Server, save: bool) -> str | None:
        """The server's own state at some index is the trainer's; saved, it can be resumed from."""
        coordinator, launch = server.coordinator, self.launches[-1]
        view = coordinator.view() if coordinator is not None else None
        if coordinator is None or view is None or not view.generation.number:
            return None
        low = view.generation.start_index
        index = self.rng.randint(low, max(low, view.commit.sample_index))
        try:
            text, at = server.served.snapshots.at(index)
            self.checker.look_at_text(text, at)
            self.checker.look_at_snapshot(launch, text, at)
            if save:
                snapshot_id = f"{at}-{len(self.saved)}"
                saved = StoredSnapshot(
                    id=snapshot_id, sample_index=at, saved_at=self.now, text=text
                )
                coordinator.ledger.execute(SaveSnapshot(coordinator.uid, coordinator.stream, saved))
                self.saved[snapshot_id] = text
        except (LedgerError, NotFound) as error:
            self.note(server.name, "no snapshot", error.name)
            return None
        except BeyondHorizon as error:
            if coordinator.view().generation.number == view.generation.number:
                self.checker.fail(f"no snapshot at {index}: {error}")
            return None  # another generation began meanwhile, before it
        return text

    def _pin(self) -> None:
        self._ask_a_server(self._ask_for_pin)

    def _ask_for_pin(self, server: Server) -> None:
        text = self._make_snapshot(server, False)
        coordinator = server.coordinator
        if text is None or coordinator is None:
            return
        try:
            coordinator.pins.set(server.served.restores.proven(text))
        except SnapshotInvalid as error:
            self.checker.fail(f"its own snapshot is refused: {error}")
        except (LedgerError, NotFound) as error:
            self.note(server.name, "no pin", error.name)

    def _skip(self, undo: bool = False) -> None:
        self._ask_a_server(self._ask_for_skip, undo)

    def _undo_skip(self) -> None:
        self._skip(undo=True)

    def _ask_for_skip(self, server: Server, undo: bool) -> None:
        """An operator has samples passed over after a snapshot or a trainer's checkpoint, or takes back what it did not
        pass; and begins the job again, mostly."""
        coordinator = server.coordinator
        if coordinator is None or server.is_changing():
            return
        text: str | None
        if self._checkpoints and self._skips.random() < 0.6:
            text = self._skips.choice(self._checkpoints[-12:])
        else:
            text = self._make_snapshot(server, False)
        if text is None or server.is_changing():
            return
        samples, reference = (
            self._skips.choice([0, 0, 3] if undo else [1, 2, 5, 20]),
            self.checker.reference,
        )
        try:
            pinned = server.served.restores.restore(text=text, skip_samples=samples, undo_skip=undo)
        except SnapshotInvalid as error:
            self.checker.not_pinned(text, undo, error)
            self.note(server.name, "no skip", error.name, str(error))
        except (BeyondHorizon, ConfigError, LedgerError, NotFound) as error:
            self.note(server.name, "no skip", error.name, str(error))
        else:
            self.note(server.name, "pinned", pinned.sample_index, samples, undo, pinned.skips)
            self.checker.pinned(text, samples, undo, pinned.skips, reference)
            if self._skips.random() < 0.8 and self._next_ask is None:
                self._next_ask = "", self._skips.choice(["", text])
                self._kill_trainer()

    def _cancel_pin(self) -> None:
        self._ask_a_server(self._ask_to_cancel)

    def _ask_to_cancel(self, server: Server) -> None:
        if server.coordinator is None or server.is_changing():
            return
        try:
            taken_back = server.served.restores.cancel()
        except (LedgerError, NotFound) as error:
            self.note(server.name, "nothing cancelled", error.name)
        else:
            self.note(server.name, "cancelled", taken_back.sample_index)

    def _revise(self) -> None:
        self._ask_a_server(self._ask_for_revision)

    def _ask_for_revision(self, server: Server) -> None:
        """An operator changes the mixture, as the REST API has it done."""
        coordinator = server.coordinator
        if coordinator is None or server.is_changing():
            return
        asked = {
            "reason": f"at {self.now:.3f}",
            **self._change(coordinator.timeline.at(2**40).config),
        }
        if self.rng.random() < 0.4:
            asked["sample_index"] = coordinator.view().first_revisable(None) + self.rng.choice(
                [0, 1, 7, 30]
            )
        closed = coordinator.view().generation.closed
        try:
            revision = server.served.revision_handler.revise(MixtureChange.model_validate(asked))
        except (ConfigError, LedgerError) as error:
            self.note(server.name, "no revision", error.name, str(error))
        except BeyondHorizon as error:
            if "sample_index" not in asked and "the data of run" not in str(error):
                self.checker.fail(f"a revision without a sample index was refused: {error}")
            self.note(server.name, "no revision", error.name)
        else:
            self.note(server.name, "revised", revision.number, revision.sample_index)
            if coordinator.view().generation.closed and not closed:
                self.note(server.name, "closed", coordinator.view().generation.number)
            self.checker.acknowledged(revision)

    def _revise_standing(self) -> None:
        """The mixture is changed between two jobs."""
        self.at(6 * self.rng.random(), None, self._end_job)  # it has begun by then, mostly

    def _end_job(self) -> None:
        """The job is killed, or cut off; the mixture is changed once nobody is taken to train; another job begins."""
        if self._completed is not None:
            return
        wait_s = self.plan.timeouts.liveness_s + self.rng.random()
        for launch in self.launches:
            launch.given_up = True
            for rank in launch.ranks:
                if rank.alive and not rank.paused and self.rng.random() < 0.5:
                    rank.paused = True
                    self.at(wait_s + self.rng.random(), None, self.resume, rank)
                else:
                    rank.kill()
        for stream in self.streams:
            if not stream.broken:
                stream.cut()
        self.at(wait_s, None, self._revise)
        self.at(wait_s + self.rng.random(), None, self._relaunch)

    def _change(self, config: RunConfig) -> dict[str, object]:
        source = self.rng.choice(config.sources)
        kind = self.rng.choice(
            ["weight", "weight", "policy", "pause", "limit", "drop", "bring back"]
        )
        if kind == "weight":
            return {"set": [{"child": source.name, "weight": self.rng.choice([0.1, 1, 3, 20])}]}
        if kind == "policy":
            policy = self.rng.choice(["least_consumed", "weighted", "round_robin"])
            return {"set": [{"child": "mixture", "policy": policy}]}
        if kind == "pause":
            return {"set": [{"child": source.name, "paused": source.presence == "live"}]}
        if kind == "limit":
            return {"set": [{"child": source.name, "max_tokens": self.rng.randint(20, 400)}]}
        if kind == "drop":
            return {"drop": [source.name]}
        return {"add": [{"child": {"source": source.source}}]}

    def _drop_revisions(self) -> None:
        self._ask_a_server(self._ask_for_drop)

    def _ask_for_drop(self, server: Server) -> None:
        coordinator = server.coordinator
        if coordinator is None or server.is_changing() or not coordinator.timeline.revisions:
            return
        number = self.rng.randint(1, len(coordinator.timeline.revisions))
        self.checker.asked_to_drop(coordinator.timeline.revisions[number - 1 :])
        try:
            server.served.revision_handler.drop(number)
        except (BeyondHorizon, LedgerError, NotFound) as error:
            self.note(server.name, "nothing dropped", error.name)
        else:
            self.note(server.name, "dropped", number)
            self.checker.dropped(number)

    def _rogue(self) -> None:
        """Another process takes a rank's place within the attempt: it must be refused."""
        rank = self._a_rank()
        if rank is not None and rank.joined is not None:
            rogue = Rogue(self, rank.launch, rank.number, f"rogue-{self.now}")
            self.soon(0.1, rogue, rogue.join)

    def _lose_data(self) -> None:
        """The store comes back older than it was."""
        copy = self.rng.choice(self._copies)
        self.store.become(copy)
        self.lost = True
        self.checker.lost_data()


class Rogue(Rank):
    """A second process for a slot that was served."""

    def answered(self, number: int, answer: object) -> None:
        if not isinstance(answer, TokenloomError):
            if not self._world.lost:
                self._world.checker.fail(f"{self.name} was given to {self.nonce}, too")
        elif answer.grpc_status == "UNAVAILABLE":
            self._world.soon(1.0, self, self.join)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The product's log is not what a world is told by."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


__all__ = ["Plan", "Violation", "World"]
