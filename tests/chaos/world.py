"""One world: a ledger, servers, the networks between all, and a training job that is launched again and again.

The world does nothing by itself but what an orchestrator does (a server that ended comes back). Faults come from
``faults``; ``liveness`` of the job is judged here, what it got by ``checker``.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.redis_server import RedisServer
from tokenloom_server.ledger.open import open_ledger
from tokenloom_tools.ledger import run_faults, store_faults

from chaos.checker import read_states
from chaos.corpus import WINDOW_STEPS, write_mixture
from chaos.observer import Observer
from chaos.processes import ChaosServer, ServerError
from chaos.proxy import Proxy, ProxyLoop
from chaos.records import read_records, steps_written
from chaos.trainer import FAILED, RankPlan, Ranks

RUN = "chaos"
#: Once a fault is over, every rank has a batch that is newer than the fault within this time, seconds. A server's
#: start takes about two of them where two cores are busy, a hanging one is noticed after 20; the rest is generous, as a
#: bound in a test must be.
LIVENESS_S = 120.0
#: A server may be replaced once it could not reach the ledger for so long, seconds.
LEASE_S = 2.0
#: A job that was not heard for so long may be followed by another, seconds.
BUSY_S = 1.0
#: Ranks that wait for another one for so long get an error, seconds: longer than any fault here keeps one away.
RANK_TIMEOUT_S = 12.0
OPTIONS = [
    "--lease",
    f"{LEASE_S:g}",
    "--liveness",
    f"{BUSY_S:g}",
    "--rank-timeout",
    f"{RANK_TIMEOUT_S:g}",
]
#: A process that was told to end has ended by then, seconds.
ENDING_S = 120.0
#: Between two looks at the world, seconds; and between two at the ledger.
TICK_S = 0.01
OBSERVE_EVERY_S = 0.1
#: Redis answers within this time or is taken for away, seconds: short, so that a fault does not take long.
REDIS_TIMEOUT_S = 1.0


class LivenessFailed(AssertionError):
    """Training did not go on within its bound, or something ended that had no reason to."""


@dataclass
class Launch:
    """One attempt: its ranks, where it began, and what became of it."""

    folder: Path
    attempt: str
    world_size: int
    batch_size: int
    #: None where the ledger decides.
    start: int | None
    names: list[str]
    prefetch_steps: int
    state: str
    #: What the run passes over from this launch on: (sample index, samples), in the order in which they were skipped.
    skips: list[list[int]]
    #: How many of the world's ``changes`` were made before it.
    changes: int
    #: Errors with which its ranks may end; none while it is the present one.
    may_end_with: set[str] = field(default_factory=set)

    @property
    def step(self) -> int:
        return self.world_size * self.batch_size

    def steps_of(self, rank: int) -> int:
        return steps_written(self.folder / f"rank-{rank}.steps", self.batch_size)

    def steps(self) -> list[int]:
        """How many steps each rank has written down."""
        return [self.steps_of(rank) for rank in range(self.world_size)]

    def begin(self) -> int | None:
        """Where it began; None until that is known."""
        if self.start is None:
            for rank in range(self.world_size):
                if self.steps_of(rank):
                    records = read_records(self.folder / f"rank-{rank}.steps", self.batch_size)
                    self.start = int(records["end"][0]) - self.step
                    break
        return self.start

    def reach(self) -> int:
        """The greatest sample index that a rank has written down."""
        begin = self.begin()
        return 0 if begin is None else begin + max(self.steps()) * self.step

    def states(self) -> dict[int, str]:
        """The states that all ranks have written down, by sample index."""
        by_rank = [read_states(self.folder, rank) for rank in range(self.world_size)]
        return {
            end: text
            for end, text in by_rank[0].items()
            if all(end in states for states in by_rank)
        }

    def end_of(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"rank-{rank}.end.json"
        found: dict[str, Any] = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        )
        return found

    def log(self, rank: int) -> str:
        path = self.folder / f"rank-{rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


class World:
    """``ledger`` is ``redis`` or ``sqlite``. Of several servers, all but one stand by."""

    def __init__(
        self,
        folder: Path,
        corpus: Path,
        seed: str,
        *,
        ledger: str,
        servers: int = 1,
        mutant: str = "",
    ) -> None:
        self.folder = folder
        self.seed = seed
        (folder / "attempts").mkdir(parents=True)
        self._loop = ProxyLoop()
        self.redis: RedisServer | None = None
        #: Between each server and Redis.
        self.ledger_links: list[Proxy] = []
        if ledger == "redis":
            (folder / "redis").mkdir()
            self.redis = RedisServer(folder / "redis").start()
            self.ledger_links = [Proxy(self._loop, self.redis.port) for _ in range(servers)]
            urls = [
                f"redis://127.0.0.1:{link.port}/0?socket_timeout={REDIS_TIMEOUT_S:g}"
                for link in self.ledger_links
            ]
        else:
            urls = [f"sqlite:///{folder}/ledger.db"] * servers
        self.mixture_seed = random.Random(seed).randrange(1000)
        self.mixture = write_mixture(corpus / f"{folder.name}.yaml", RUN, self.mixture_seed)
        self._ledger = self.redis.url() if self.redis else urls[0]
        self.observer = Observer(RUN, folder / "ledger.jsonl", self._ledger)
        options = [*OPTIONS, *(["--standby"] if servers > 1 else [])]
        self.servers = [
            ChaosServer(folder / f"server-{number}", self.mixture, url, options, mutant)
            for number, url in enumerate(urls)
        ]
        #: Between the trainers and each server.
        self.links = [Proxy(self._loop, server.grpc_port) for server in self.servers]
        self.ranks = Ranks()
        self.job: Launch | None = None
        self.launches: list[Launch] = []
        #: Launches that hang, and have to find out that another has taken their place.
        self.zombies: list[Launch] = []
        #: Of what came before this sample index the ledger knows nothing: it was made to lose everything.
        self.history_from = 0
        #: What is left to be seen once a fault is over and training goes on.
        self.afterwards: list[Callable[[], None]] = []
        #: How long it took until another server led and all ranks had what it made, where a fault waits for that.
        self.takeover_s: float | None = None
        #: The total tokens with which the job begins: those of an older data loader's checkpoint, if it brings one.
        self.clock = random.Random(f"{seed}/clock").choice((0, 1_000_003))
        #: Names of faults that did not strike: another one kept them from it.
        self.missed: set[str] = set()
        #: What the run passes over: (sample index, samples), in the order in which they were skipped.
        self.skips: list[list[int]] = []
        #: Sample indices of skips and revisions, in the order of their making: no launch may go on from a state beyond
        #: one that was taken before it was made.
        self.changes: list[int] = []
        self._observed_at = 0.0
        self._launched = 0

    def close(self) -> None:
        """Ends all processes, whatever they are doing."""
        self.ranks.close()
        for server in self.servers:
            server.kill()
        for link in (*self.links, *self.ledger_links):
            link.close()
        if self.redis is not None:
            self.redis.kill()
        self._loop.close()

    # Time

    def tend(self) -> None:
        """What goes on all the while: servers come back, the ledger is looked at, ranks are watched."""
        for server in self.servers:
            server.tend()
        if time.monotonic() - self._observed_at > OBSERVE_EVERY_S:
            self.observer.look()
            self._observed_at = time.monotonic()
        self._watch_ranks()

    def pause(self, seconds: float) -> None:
        """Lets the world go on for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.tend()
            time.sleep(TICK_S)

    def wait(self, happened: Callable[[], bool], what: str, seconds: float = LIVENESS_S) -> float:
        """How long it took. Raises ``LivenessFailed``."""
        began = time.monotonic()
        while not happened():
            self.tend()
            waited = time.monotonic() - began
            if waited > seconds:
                raise LivenessFailed(f"{what} did not happen within {seconds:g} s\n{self.tell()}")
            time.sleep(TICK_S)
        return time.monotonic() - began

    def becomes(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Whether it happens within a time."""
        until = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > until:
                return False
            self.tend()
            time.sleep(TICK_S)
        return True

    def _watch_ranks(self) -> None:
        for launch in self.launches[-4:]:
            for rank, name in enumerate(launch.names):
                status = self.ranks.status(name)
                if status != FAILED:
                    if status is not None and status > 0:
                        raise LivenessFailed(
                            f"rank {rank} of {launch.attempt} broke:\n{launch.log(rank)[-3000:]}"
                        )
                    continue
                error = launch.end_of(rank).get("error")
                if error not in launch.may_end_with:
                    raise LivenessFailed(
                        f"rank {rank} of {launch.attempt} ended with {error}: {launch.end_of(rank).get('message')}\n"
                        f"{launch.log(rank)[-3000:]}\n{self.tell()}"
                    )

    def tell(self) -> str:
        """How the world stands, for a failure's message."""
        lines = []
        if self.job is not None:
            job = self.job
            lines.append(f"{job.attempt}: began at {job.begin()}, steps {job.steps()} x {job.step}")
            lines += [
                f"-- rank {rank} log:\n{job.log(rank)[-800:]}" for rank in range(job.world_size)
            ]
        lines += [
            f"-- {each.folder.name}: running {each.running}, ready {each.ready}\n{each.log[-2500:]}"
            for each in self.servers
        ]
        lines.append(f"ledger: {self.observer.look()}")
        return "\n".join(lines)

    # The job

    def urls(self) -> str:
        return f"grpc://{','.join(f'127.0.0.1:{link.port}' for link in self.links)}/{RUN}"

    def launch(
        self,
        draw: random.Random,
        *,
        state: str = "",
        resume: str = "",
        start: int | None,
        takeover: bool = False,
    ) -> Launch:
        """Starts all ranks of a new attempt, with another world and batch size; does not wait for them."""
        attempt = f"{self._launched:04d}"
        self._launched += 1
        world_size, batch_size = draw.choice((1, 2, 2, 3, 4)), draw.choice((1, 2, 3, 4))
        folder = self.folder / "attempts" / attempt
        folder.mkdir()
        prefetch_steps = draw.choice((1, 2, 3, 20))
        plans = [
            RankPlan(
                folder=str(folder),
                url=self.urls(),
                rank=rank,
                world_size=world_size,
                batch_size=batch_size,
                attempt=attempt,
                state=state,
                resume=resume,
                prefetch_steps=prefetch_steps,
                pace_s=0.005,
                checkpoint_every=draw_checkpoint,
                takeover=takeover,
            )
            for draw_checkpoint in [draw.randint(4, 40)]
            for rank in range(world_size)
        ]
        plan = {
            "attempt": attempt,
            "world_size": world_size,
            "batch_size": batch_size,
            "start": start,
        }
        plan |= {"clock": self.clock, "skips": self.skips}
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        names, skips, changes = [each.name for each in plans], [*self.skips], len(self.changes)
        launch = Launch(
            folder,
            attempt,
            world_size,
            batch_size,
            start,
            names,
            prefetch_steps,
            state,
            skips,
            changes,
        )
        order = list(plans)
        draw.shuffle(order)
        self.launches.append(launch)
        self.job = launch
        for each in order:
            self.ranks.start(each)
        return launch

    def train_apart(self, folder: Path, url: str, attempt: str) -> None:
        """Starts a rank of another run."""
        self.ranks.start(_alone(folder, url, attempt, 4))

    def relaunch(
        self, draw: random.Random, *, oldest: bool = False, takeover: bool = False
    ) -> Launch:
        """A new attempt from a state that all ranks of the one before had written down, mostly the newest."""
        state, start = self.checkpoint(draw, oldest=oldest)
        return self.launch(draw, state=state, start=start, takeover=takeover)

    def note_snapshot(self, found: dict[str, Any]) -> None:
        """For the checker: what a snapshot says of the order."""
        with (self.folder / "snapshots.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps({"skips": self.skips} | found) + "\n")

    def note_skip(self, index: int, samples: int) -> None:
        """From the present launch on the run passes over so many samples at an index."""
        assert self.job is not None
        self.skips.append([index, samples])
        self.changes.append(index)
        self.job.skips, self.job.changes = [*self.skips], len(self.changes)
        path = self.job.folder / "plan.json"
        plan = json.loads(path.read_text(encoding="utf-8")) | {"skips": self.skips}
        path.write_text(json.dumps(plan), encoding="utf-8")

    def ask(
        self, path: str, body: dict[str, Any] | None = None, method: str = "POST"
    ) -> dict[str, Any]:
        """A REST call, repeated until the server is there and its ledger, too. Raises ``ServerError``."""
        answers: list[dict[str, Any]] = []

        def answered() -> bool:
            leader = self.leader(0.0)
            if leader is None:
                return False
            try:
                answers.append(leader.call(method, path, body))
            except ServerError as error:
                if error.status not in (0, 503):
                    raise
            return bool(answers)

        self.wait(answered, f"an answer to {method} {path}")
        return answers[-1]

    def leader(self, seconds: float = LIVENESS_S) -> ChaosServer | None:
        """The server that serves the run; None where there is none within a time."""
        found: list[ChaosServer] = []

        def leads() -> bool:
            found.extend(server for server in self.servers if server.leads())
            return bool(found)

        return found[0] if self.becomes(leads, seconds) else None

    def wait_observed(self) -> dict[str, Any]:
        """What the ledger holds."""
        found: list[dict[str, Any]] = []

        def seen() -> bool:
            look = self.observer.look()
            found.extend([look] if look is not None else [])
            return bool(found)

        self.wait(seen, "the ledger")
        return found[-1]

    def wait_begun(self) -> None:
        """Until every rank of the job has a batch."""
        job = self.job
        assert job is not None
        self.wait(lambda: self.has(job, 1), f"the first batch on every rank of {job.attempt}")

    def wait_states(self, count: int) -> None:
        """Until the job has so many checkpoints."""
        job = self.job
        assert job is not None
        self.wait(lambda: len(job.states()) >= count, f"{count} checkpoints of {job.attempt}")

    def checkpoint(self, draw: random.Random, *, oldest: bool) -> tuple[str, int]:
        """(text, sample index) of the state that the next attempt is to begin with."""
        for launch in reversed(self.launches):
            # Of the job itself, else that which it began with, else of the one before it.
            states = launch.states() or (
                {_index(launch.state): launch.state} if launch.state else {}
            )
            # None from beyond a skip or a revision that was made since: the run's order is another there.
            least = min(self.changes[launch.changes :], default=None)
            states = {end: text for end, text in states.items() if least is None or end <= least}
            if states:
                ends = sorted(states)
                end = (
                    ends[0]
                    if oldest
                    else ends[-1]
                    if draw.random() < 0.7
                    else draw.choice(ends[-3:])
                )
                return states[end], end
        raise LivenessFailed("there is no checkpoint")

    def signal(
        self, number: signal.Signals, launch: Launch | None = None, rank: int | None = None
    ) -> None:
        """Signals one rank, or all of a launch."""
        launch = launch or self.job
        assert launch is not None
        for name in launch.names if rank is None else [launch.names[rank]]:
            self.ranks.signal(name, number)

    def kill_job(self) -> None:
        """As a scheduler does when one rank has died."""
        assert self.job is not None
        self.signal(signal.SIGKILL)
        self.wait_ended(self.job, "the end of killed ranks", ENDING_S)

    def wait_ended(self, launch: Launch, what: str, seconds: float = LIVENESS_S) -> None:
        """Until every rank of a launch has ended, each within a time."""
        for rank, name in enumerate(launch.names):
            self.wait(
                lambda name=name: self.ranks.status(name) is not None,  # type: ignore[misc]
                f"rank {rank} of {launch.attempt}: {what}",
                seconds,
            )

    def fresh_index(self) -> tuple[Launch, int]:
        """The job, and a number of steps: once every rank has so many, it got what was produced after now."""
        assert self.job is not None
        # Production goes a window beyond the committed step, so a step beyond that was made, and another
        # committed, after now.
        return self.job, max(self.job.steps()) + WINDOW_STEPS + 1

    def has(self, launch: Launch, steps: int) -> bool:
        return all(count >= steps for count in launch.steps())

    def recover(self) -> float:
        """Waits until every rank got what was made after now; how long that took, seconds."""
        launch, steps = self.fresh_index()
        return self.wait(
            lambda: self.has(launch, steps), f"step {steps} on every rank of {launch.attempt}"
        )

    def clear_up(self) -> None:
        """When training goes on again: what faults left to be looked at, and zombies. Each of those wakes, and finds
        out that it is over, and how: ``Fenced``."""
        while self.afterwards:
            self.afterwards.pop()()
        while self.zombies:
            launch = self.zombies.pop()
            self.signal(signal.SIGCONT, launch)
            self.wait_ended(launch, "its end, since it is fenced,", ENDING_S)
            self.tend()

    def check_ledger(self) -> None:
        """``tokenloom ledger check`` calls sound what all these servers wrote. Raises ``LivenessFailed``."""
        with closing(open_ledger(self._ledger, self.folder)) as ledger:
            faults = [
                *store_faults(ledger),
                *(each for of in ledger.run_names() for each in run_faults(ledger, *of)),
            ]
        if faults:
            raise LivenessFailed("\n".join(faults))

    # The end

    def finish(self) -> int:
        """Stops the job in order, all ranks at one step, and the servers; the sample index where it stopped."""
        job = self.job
        assert job is not None
        self.wait(lambda: job.begin() is not None, "the first batch")
        begin = job.begin()
        assert begin is not None
        index = begin + (max(job.steps()) + 20) * job.step
        draft = job.folder / "stop.draft"
        draft.write_text(str(index))
        draft.replace(job.folder / "stop")
        self.wait_ended(job, "its end")
        statuses = [self.ranks.status(name) for name in job.names]
        if any(statuses):
            raise LivenessFailed(f"ranks ended with {statuses}:\n{self.tell()}")
        self.wait(
            lambda: (self.observer.look() or {}).get("sample_index") == index,
            "the last commit",
            ENDING_S,
        )
        for server in self.servers:
            # One that is still being loaded, behind the last fault, has nothing to end in order yet.
            self.wait(lambda server=server: server.ready, f"the start of {server.folder.name}")  # type: ignore[misc]
            left = server.children()
            status = server.terminate()
            left = [child for child in left if child.is_running()]
            if status or left:
                raise LivenessFailed(
                    f"{server.folder.name} ended with {status} and left {left}:\n{server.log[-3000:]}"
                )
        return index

    def check_logs(self) -> None:
        """No server met what it did not expect."""
        for server in self.servers:
            at = server.log.find("Traceback")
            if at >= 0:
                raise LivenessFailed(
                    f"{server.folder.name} failed inside:\n{server.log[max(0, at - 500) : at + 3000]}"
                )


def _index(state: str) -> int:
    """The sample index of a state, as any tool may read it."""
    document = json.loads(state)
    # An older data loader's checkpoint has no seal around it.
    return int(json.loads(document.get("tokenloom", state))["sample_index"])


def _alone(folder: Path, url: str, attempt: str, batch_size: int, resume: str = "") -> RankPlan:
    """What one rank does by itself, as fast as it can, until it is told to stop."""
    return RankPlan(
        folder=str(folder),
        url=url,
        rank=0,
        world_size=1,
        batch_size=batch_size,
        attempt=attempt,
        state="",
        resume=resume,
        prefetch_steps=200,
        pace_s=0.0,
        checkpoint_every=2**40,
        takeover=False,
    )


def reference(folder: Path, mixture: Path, end_index: int) -> None:
    """An undisturbed run of one rank up to a sample index, by a server and a ledger of its own."""
    batch_size = 64
    target = folder / "reference"
    target.mkdir()
    server = ChaosServer(
        folder / "reference-server", mixture, f"sqlite:///{folder}/reference.db", [], ""
    )
    ranks = Ranks()
    plan = _alone(
        target, f"grpc://127.0.0.1:{server.grpc_port}/{RUN}", "reference", batch_size, "fresh"
    )
    (target / "plan.json").write_text(
        json.dumps({"attempt": "reference", "world_size": 1, "batch_size": batch_size, "start": 0}),
        encoding="utf-8",
    )
    (target / "stop").write_text(str(end_index))
    server.start()
    try:
        ranks.start(plan)
        status = ranks.wait(plan.name, 600)
        if status:
            raise LivenessFailed(
                f"the reference ended with {status}: {(target / 'rank-0.log').read_text()[-3000:]}"
            )
    finally:
        ranks.close()
        server.kill()
