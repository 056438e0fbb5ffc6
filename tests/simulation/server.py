"""A server process: the product's own parts, called where their threads would call them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from tokenloom.snapshot import Base, Point
from tokenloom_proto.seal import canonical
from tokenloom_server.api.grpc.messages import counts_of
from tokenloom_server.api.mixture_origin import MixtureOrigin
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.core.state import digest_hex
from tokenloom_server.errors import Fenced, NotFound, TokenloomError
from tokenloom_server.ledger.records import Opening, StoredRun
from tokenloom_server.run.context import RunContext, Wakes
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.evaluation_streams import EvaluationStreams
from tokenloom_server.run.generation import Delivery, EndOfData, Waiting
from tokenloom_server.run.join import RANK_0_WAIT_S, Joined, no_rank_0
from tokenloom_server.run.join_call import JoinCall
from tokenloom_server.run.sessions import Session

from tests.simulation.ledger import LedgerLink
from tests.simulation.network import Stream, Unavailable
from tests.simulation.scheduler import OneAtATime, Process

if TYPE_CHECKING:
    from tests.simulation.trainer import Rank
    from tests.simulation.world import World

RUN, STREAM = "world", "train"
HEARTBEAT_S = 5.0
#: How soon a thread runs that was woken, seconds.
WOKEN_S = 0.003
#: How long the end of a client's stream waits for its last commit, seconds.
FINISH_S = 2.0


class MicroStep(NamedTuple):
    end_index: int
    slice: int
    total_tokens: int
    real_tokens: int
    digest: str
    counts: tuple[bytes, int]
    source_ids: list[int]
    ids: list[bytes]


class Batches(NamedTuple):
    begin_index: int
    steps: list[MicroStep]
    base: Base | None


class Heartbeat(NamedTuple):
    waiting_for: str


class Accepted(NamedTuple):
    """The answer to a Join."""

    uid: str
    opening: Opening
    start: Point
    template: bytes
    server_epoch: int


class Sleeps(Exception):
    """A thread of the server would sleep now: until ``is_over``, or for so long."""

    def __init__(self, is_over: Callable[[], object], timeout_s: float | None) -> None:
        self.is_over = is_over
        self.timeout_s = timeout_s


class Wake(threading.Condition):
    """A condition on which nobody sleeps: whoever would leaves what it is in, and comes again when it is told to."""

    def __init__(self, lock: threading.Lock, woken: Callable[[], None]) -> None:
        super().__init__(lock)
        self._woken = woken

    def notify(self, n: int = 1) -> None:
        self._woken()

    def wait(self, timeout: float | None = None) -> bool:
        raise Sleeps(lambda: False, timeout)

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:  # type: ignore[override]
        if not predicate():
            raise Sleeps(predicate, timeout)
        return True


class JoinWake(Wake):
    """Whoever waits for rank 0 comes again, even where it has joined meanwhile."""

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:  # type: ignore[override]
        raise Sleeps(predicate, timeout)


class SimulatedWakes(Wakes):
    """Those of a server's coordinator: each wakes an event of the world."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.producer = Wake(self.lock, server.wake_producer)
        self.committer = Wake(self.lock, server.wake_committer)
        self.changed = JoinWake(self.lock, server.wake_joins)
        self.lease = Wake(self.lock, server.wake_lease)
        self._server = server
        #: Whether the present generation's streams are woken: from the end of the call on that began it.
        self.hooked = True

    def set_ranks(self, world_size: int) -> None:
        super().set_ranks(world_size)
        self.hooked = not world_size

    def hook(self) -> None:
        """Makes the ranks' conditions wake their streams."""
        self.hooked = True
        self.ranks = [
            Wake(self.lock, partial(self._server.wake_rank, rank))
            for rank in range(len(self.ranks))
        ]


def _no_other_run(name: str) -> NoReturn:
    raise NotFound(f"there is no run {name!r} on this server")


class _Waiting:
    """A Join that is being answered."""

    def __init__(self, rank: Rank, call: JoinCall, number: int) -> None:
        self.rank = rank
        self.call = call
        self.number = number
        #: Where it waits for rank 0: whether that is over.
        self.is_over: Callable[[], object] | None = None


class _Stream:
    """The server's end of a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.session: Session | None = None
        #: Progress that came before the session began.
        self.inbox: list[tuple[int, int, str]] = []
        self.closed_at: float | None = None
        self.over = False
        self.pump_due = False
        self.heartbeat_at = 0.0


class Server(Process):
    """One life of a server."""

    def __init__(self, world: World, address: int, life: int) -> None:
        super().__init__(f"server {address}, life {life}")
        #: What it is in the ledger: a restart on the same port is the same.
        self.holder = f"server {address}"
        self._world = world
        self.reachable = False
        #: Its clocks: how far they are off, and by how much they run too fast.
        self._ahead_s = world.rng.random() * 1000
        self._rate = 1 + world.plan.clock_drift * (2 * world.rng.random() - 1)
        self._wall_ahead_s = 1e6 + world.rng.random()
        self.coordinator: RunCoordinator | None = None
        self.streams: dict[Stream, _Stream] = {}
        #: Joins that were sent here and not answered, and those that arrived.
        self.calls: dict[tuple[Rank, int], None] = {}
        self._joining: dict[_Waiting, None] = {}
        self._joins_due = False
        self._producing = self._committing = False
        self._producer_due = self._committer_due = False
        self._keeping_lease = False
        self._lease_at = 0.0

    def held_up(self) -> bool:
        return self.paused or (self.coordinator is not None and self.wakes.lock.locked())

    def is_changing(self) -> bool:
        """Whether an opening, a revision or a fork is under way: no part of a world enters twice."""
        return self.coordinator is not None and self.coordinator.one_change.locked()

    def clock(self) -> float:
        return self._world.now * self._rate + self._ahead_s

    def wall_clock(self) -> float:
        return self._world.now + self._wall_ahead_s

    # Coming up and going down

    def boot(self) -> None:
        """Serves the run, as ``Runs.add`` does on standby."""
        world = self._world
        order = world.order.breathing(self._breathe_while_producing, world.draw_readers(self.name))
        ledger = LedgerLink(world, self)
        try:
            stored: StoredRun | None = ledger.read_run(RUN, STREAM)
            if stored is None:
                stored = ledger.create_run(RUN, STREAM, world.new_uid(), world.record)
        except TokenloomError as error:
            world.note(self.name, "cannot start", error.name, str(error))
            world.kill_server(self)
            return
        self.wakes = SimulatedWakes(self)
        context = RunContext(
            order,
            ledger,
            world.plan.timeouts,
            clock=self.clock,
            wall_clock=self.wall_clock,
            lease_clock=self.wall_clock,
            wakes=self.wakes,
            # Messages and groups have few steps, so that a small world has many of each.
            message_steps=lambda *_: world.plan.message_steps,
            group_micro_steps=lambda *_: world.plan.group_micro_steps,
        )
        context.one_change = OneAtATime()  # type: ignore[assignment]
        self.coordinator = coordinator = RunCoordinator(context, stored.uid, self.holder)
        self.leadership = coordinator.leadership
        streams, origin = (
            EvaluationStreams(order, order.config, {}),
            MixtureOrigin(where="the world", index_dir=None),
        )
        self.served = ServedRun(coordinator, streams, _no_other_run, origin, order.config)
        self.producer, self.committer = coordinator.producer, coordinator.committer
        self.reachable = True
        self._keep_lease()
        self._tick()

    def wake_lease(self) -> None:
        self._world.soon(WOKEN_S, self, self._keep_lease)

    def _keep_lease(self) -> None:
        """The thread of the lease."""
        assert self.coordinator is not None
        if self.coordinator.stopping or self._keeping_lease:
            return
        self._keeping_lease = True
        led = self.coordinator.lease.held
        pause_s = self.leadership.step()
        self._keeping_lease = False
        lease = self.coordinator.lease
        if lease.held != led:
            self._world.note(self.name, "leads" if lease.held else "leads no longer", lease.epoch)
        self._hook()
        self._lease_at = self._world.now + pause_s
        self._world.at_time(self._lease_at, self, self._lease_is_due)

    def _tick(self) -> None:
        """What the thread of the lease does while it waits: the server runs."""
        assert self.coordinator is not None
        self.coordinator.view()
        self._world.at(self._world.plan.timeouts.tick_s, self, self._tick)

    def _lease_is_due(self) -> None:
        if self._world.now >= self._lease_at:
            self._keep_lease()

    def killed(self) -> None:
        """Ends it here and now; ``Killed`` unwinds what it is in the middle of."""
        self.alive = False
        self.reachable = False
        for stream in self._world.streams:
            if stream.server is self:
                stream.cut()
        for rank, number in self.calls:
            self._world.soon(1.0, rank, rank.answered, number, Unavailable("the connection broke"))

    def stop(self) -> None:
        """SIGTERM: commits what is acknowledged, ends streams, and goes."""
        if self.coordinator is None:
            self._world.kill_server(self)
            return
        self.reachable = False
        self.coordinator.stop()
        self._world.soon(1.0, self, self._leave)

    def _leave(self) -> None:
        self.leadership.end(0.0)
        self.leadership.let_go()
        self._world.kill_server(self)

    def _breathe_while_producing(self) -> None:
        if self._world.rng.random() < self._world.plan.overlap:
            self._world.breathe(self, 0.004)

    # Threads

    def wake_producer(self) -> None:
        if not self._producer_due:
            self._producer_due = True
            self._world.soon(WOKEN_S, self, self._produce)

    def _produce(self) -> None:
        self._producer_due = False
        if self._producing or self.coordinator is None or self.coordinator.stopping:
            return
        self._producing = True
        try:
            worked = self.producer.step()
        except Sleeps:
            worked = False
        self._producing = False
        self._world.checker.look_at_memory(self)
        self._hook()
        if worked:
            self.wake_producer()

    def wake_committer(self) -> None:
        if not self._committer_due:
            self._committer_due = True
            self._world.soon(WOKEN_S, self, self._commit)

    def _commit(self) -> None:
        self._committer_due = False
        if self._committing or self.coordinator is None:
            return
        self._committing = True
        try:
            worked = self.committer.step()
        except Sleeps as sleep:
            if sleep.timeout_s is not None:
                self._world.at(sleep.timeout_s, self, self.wake_committer)
            return
        finally:
            self._committing = False
        self._hook()
        if worked or not self.coordinator.stopping:
            self.wake_committer()

    # Joins

    def join(self, rank: Rank, call: JoinCall, number: int) -> None:
        """A Join arrives. ``number`` −1: nobody waits for the answer."""
        world = self._world
        if self.coordinator is None or not self.reachable:
            self.calls.pop((rank, number), None)
            world.soon(0.3, rank, rank.answered, number, Unavailable("nobody listens there"))
            return
        waiting = _Waiting(rank, call, number)
        self._joining[waiting] = None
        world.at(RANK_0_WAIT_S, self, self._give_up, waiting)
        self._try_join(waiting)

    def _try_join(self, waiting: _Waiting) -> None:
        if waiting not in self._joining or self.coordinator is None:
            return
        world, join_handler, call = self._world, self.served.join_handler, waiting.call
        if (
            call.rank == 0 or call.state
        ) and self.is_changing():  # any rank's state may bring revisions
            world.soon(0.02, self, self._try_join, waiting)
            return
        try:
            self._answer(waiting, self._accepted(join_handler.join(call)))
        except Sleeps as sleep:
            waiting.is_over = sleep.is_over
            self.wake_joins()  # it was decided meanwhile, perhaps
        except TokenloomError as error:
            self._answer(waiting, error)
        finally:
            self._hook()

    def _give_up(self, waiting: _Waiting) -> None:
        if waiting in self._joining and waiting.is_over is not None:
            self._answer(waiting, no_rank_0(waiting.call))

    def _answer(self, waiting: _Waiting, answer: Accepted | TokenloomError) -> None:
        self._joining.pop(waiting, None)
        self.calls.pop((waiting.rank, waiting.number), None)
        self._world.checker.answered(self, waiting.call, answer)
        if waiting.number >= 0:
            self._world.at(
                self._world.latency(), waiting.rank, waiting.rank.answered, waiting.number, answer
            )

    def wake_joins(self) -> None:
        if self._joining and not self._joins_due:
            self._joins_due = True
            self._world.soon(WOKEN_S, self, self._look_at_joins)

    def _look_at_joins(self) -> None:
        """The Joins that wait for rank 0 look again where it was decided."""
        self._joins_due = False
        coordinator = self.coordinator
        assert coordinator is not None
        for waiting in list(self._joining):
            is_over = waiting.is_over
            if (
                coordinator.stopping
                or not coordinator.leads()
                or (is_over is not None and is_over())
            ):
                self._try_join(waiting)

    def _accepted(self, joined: Joined) -> Accepted:
        assert self.coordinator is not None
        start, opening = joined.start, joined.opening
        template = self.coordinator.order.record.template(joined.uid, STREAM, opening.generation)
        base = Base(start.sample_index, opening.start_state.encode())
        point = Point(
            start.sample_index,
            start.total_tokens,
            start.real_tokens,
            digest_hex(start.digest),
            base,
        )
        return Accepted(
            joined.uid, opening, point, canonical(template).encode(), self.coordinator.lease.epoch
        )

    # Streams

    def open_stream(
        self,
        stream: Stream,
        uid: str,
        generation: int,
        nonce: str,
        received: Point,
        committed_through: int,
        server_epoch: int,
        consumed: Point,
        credit_micro_steps: int,
        number: int,
    ) -> None:
        if self.coordinator is None or not self.reachable:
            stream.end(Unavailable("nobody listens there"))
            return
        state = self.streams[stream] = _Stream(stream)
        rank = stream.rank.number
        try:
            session = self.coordinator.sessions.attach(
                uid, generation, rank, nonce, received.sample_index, committed_through,
                received.digest, server_epoch, stream.rank.launch.attempt, "", number,
            )  # fmt: skip
            self._world.checker.attached(self, stream.rank, session)
            state.session = session
            self.coordinator.sessions.progress(
                session, consumed.sample_index, credit_micro_steps, consumed.digest
            )
            while state.inbox:
                self.coordinator.sessions.progress(session, *state.inbox.pop(0))
        except TokenloomError as error:
            self._end(state, error)
            return
        self._hook()
        if state.over:
            self._detach(state)
        else:
            self._pump_soon(state, WOKEN_S)

    def progress(self, stream: Stream, consumed: Point, credit_micro_steps: int) -> None:
        state = self.streams.get(stream)
        if state is None or state.over or self.coordinator is None:
            return
        report = consumed.sample_index, credit_micro_steps, consumed.digest
        if state.session is None:
            state.inbox.append(report)
            return
        try:
            self.coordinator.sessions.progress(state.session, *report)
        except TokenloomError as error:
            self._end(state, error)

    def close_stream(self, stream: Stream) -> None:
        """The client has said all."""
        state = self.streams.get(stream)
        if state is not None and not state.over:
            state.closed_at = self._world.now
            self._finish(state)

    def lost_stream(self, stream: Stream) -> None:
        """The connection is gone."""
        state = self.streams.pop(stream, None)
        if state is not None and not state.over:
            state.over = True
            self._detach(state)

    def _finish(self, state: _Stream) -> None:
        """Waits, bounded, until all that every rank acknowledged is committed; as ``Sessions.finish`` does."""
        if state.over or self.coordinator is None or state.closed_at is None:
            return
        late = self._world.now - state.closed_at > FINISH_S
        generation = state.session.active.generation if state.session is not None else None
        if late or generation is None or generation.all_committed() or self.coordinator.stopping:
            if state.session is not None:
                self.coordinator.sessions.leave(state.session)
            self._end(state, None)
        else:
            self._world.soon(0.1, self, self._finish, state)

    def _pump_soon(self, state: _Stream, longest_s: float) -> None:
        if not state.pump_due:
            state.pump_due = True
            self._world.soon(longest_s, self, self._pump, state)

    def _pump(self, state: _Stream) -> None:
        """The stream's thread: sends one message, or sleeps."""
        state.pump_due = False
        if (
            state.over
            or state.closed_at is not None
            or self.coordinator is None
            or state.session is None
        ):
            return
        coordinator, stream, session, world = (
            self.coordinator,
            state.stream,
            state.session,
            self._world,
        )
        try:
            found = coordinator.sessions.next_for(session, 0.0, lambda: False)
            committed = coordinator.committed_through
            if isinstance(found, Delivery):
                message = self._batches(session.rank, found)
                world.checker.sent(self, stream.rank, session, committed)
                stream.down(stream.rank.receive, message, committed, coordinator.lease.epoch)
            elif isinstance(found, EndOfData):
                world.checker.sent(self, stream.rank, session, committed)
                stream.down(stream.rank.receive, found, committed, coordinator.lease.epoch)
            elif isinstance(found, Waiting) and world.now >= state.heartbeat_at:
                stream.down(
                    stream.rank.receive,
                    Heartbeat(found.waiting_for),
                    committed,
                    coordinator.lease.epoch,
                )
                state.heartbeat_at = world.now + HEARTBEAT_S
                world.at_time(state.heartbeat_at, self, self._pump_soon, state, WOKEN_S)
        except TokenloomError as error:
            self._end(state, error)
            return
        if not isinstance(found, Waiting):
            self._pump_soon(state, WOKEN_S)

    def _batches(self, rank: int, delivery: Delivery) -> Batches:
        group, first, last, with_base = delivery
        size = group.plan.batch_size
        ids = [one.tobytes() for one in group.ids(rank, first, last)]
        if not ids:
            raise Fenced(
                f"a newer stream of rank {rank} has consumed what this one was about to send"
            )
        steps = [
            MicroStep(
                end_index=group.marks[step].sample_index,
                slice=group.slice_of(step, rank),
                total_tokens=group.marks[step].total_tokens,
                real_tokens=group.run_real_tokens(step),
                digest=digest_hex(group.marks[step].digest),
                counts=(counts_of(group, first, last), step - first + 1),
                source_ids=group.source_ids[rank, step].tolist(),
                ids=ids[(step - first) * size : (step - first + 1) * size],
            )
            for step in range(first, last)
        ]
        base = Base(group.begin, group.resume_state.encode()) if with_base else None
        return Batches(group.step_begin(first), steps, base)

    def _end(self, state: _Stream, error: TokenloomError | None) -> None:
        state.over = True
        self.streams.pop(state.stream, None)
        self._detach(state)
        state.stream.end(error)

    def _detach(self, state: _Stream) -> None:
        if state.session is not None and self.coordinator is not None:
            self.coordinator.sessions.detach(state.session)

    def _hook(self) -> None:
        """Makes the slots' conditions of a new generation wake their streams."""
        if self.coordinator is not None and not self.wakes.hooked:
            self.wakes.hook()
            for state in self.streams.values():
                self._pump_soon(state, WOKEN_S)  # those of the generation before
            self.wake_producer()

    def wake_rank(self, rank: int) -> None:
        for state in self.streams.values():
            if state.stream.rank.number == rank:
                self._pump_soon(state, WOKEN_S)
