"""The trainers' side: the client's protocol, rank by rank, and the launches that a job makes of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from tokenloom.snapshot import KEY, Base, History, Loaded, Older, Point
from tokenloom_server.errors import Fenced, TokenloomError
from tokenloom_server.run.generation import EndOfData
from tokenloom_server.run.join_call import JoinCall

from tests.simulation.network import Stream, Unavailable, call_join
from tests.simulation.scheduler import Process
from tests.simulation.server import Accepted, Batches, Heartbeat, MicroStep, Server

if TYPE_CHECKING:
    from tests.simulation.world import World

#: A server that says nothing for so long is taken for gone, seconds.
SILENCE_S = 20.0
#: How long a rank takes for a step at most, seconds.
STEP_S = 0.03
#: The server hears at least so often that a rank is alive, seconds.
SIGN_OF_LIFE_S = 2.0
#: The server hears of consumed steps within this time, seconds.
REPORT_S = 0.02


#: Pairs (total tokens, batch size).
Sizes: TypeAlias = tuple[tuple[int, int], ...]


class Launch:
    """One launch of the training job: its ranks share an attempt."""

    def __init__(
        self,
        world: World,
        number: int,
        world_size: int,
        sizes: Sizes,
        accumulate: int,
        resume: str,
        text: str,
        takeover: bool,
    ) -> None:
        self._world = world
        self.number = number
        self.attempt = f"attempt-{number}"
        self.world_size = world_size
        self.sizes = sizes
        self.accumulate = accumulate
        #: By begin, the batch size of each step as far as it was asked for, and where the next one begins.
        self._sizes: dict[int, int] = {}
        self._next: int | None = None
        self.resume = resume
        self.text = text
        loaded = Loaded.read({KEY: text}) if text else None
        self.loaded = loaded if isinstance(loaded, Loaded) else None
        #: The checkpoint of an older data loader that it brings, if any.
        self.older = text if isinstance(loaded, Older) else ""
        self.takeover = takeover
        self.in_step = world.plan.in_step
        #: Whoever looks after the job takes it for dead, whatever its ranks do.
        self.given_up = False
        self.failed: str | None = None
        self.ranks = [Rank(world, self, rank) for rank in range(world_size)]

    def start(self) -> None:
        for rank in self.ranks:
            self._world.soon(self._world.plan.start_spread_s, rank, rank.join)

    def size_at(self, begin: int, start: int, tokens_at: Callable[[int], int]) -> int | None:
        """The batch size of the step that begins at a sample index, where the launch began at ``start`` and the run
        has so many tokens at an index; None where no step begins there."""
        at = start if self._next is None else self._next
        while at <= begin:
            if len(self._sizes) % self.accumulate == 0:
                size = [size for tokens, size in self.sizes if tokens <= tokens_at(at)][-1]
            else:
                size = next(reversed(self._sizes.values()))
            self._sizes[at] = size
            at += size * self.world_size
        self._next = at
        return self._sizes.get(begin)

    @property
    def consumed(self) -> int:
        """How far every rank is; −1 while one has not joined."""
        return min(rank.consumed if rank.joined is not None else -1 for rank in self.ranks)

    @property
    def complete(self) -> bool:
        return all(rank.finished for rank in self.ranks)

    def may_take(self, rank: Rank) -> bool:
        """Whether a rank may take its next step: each ends with a collective call of all ranks."""
        return not self.in_step or all(other.steps >= rank.steps for other in self.ranks)

    def wake_behind(self, rank: Rank) -> None:
        """The ranks that wait for the others go on, once the last of them took its step."""
        if self.in_step and all(other.steps >= rank.steps for other in self.ranks):
            for other in self.ranks:
                other.take_soon()

    def checkpoint(self) -> str | None:
        """The state at the last sample that every rank has behind it; None while there is none."""
        if not all(rank.history is not None for rank in self.ranks):
            return None
        if (
            len(
                {
                    rank.joined and (rank.joined.uid, rank.joined.opening.generation)
                    for rank in self.ranks
                }
            )
            > 1
        ):
            self._world.checker.joined_apart(self)
            return None
        at = self.consumed
        texts = {rank.history.text(at) for rank in self.ranks if rank.history is not None}
        self._world.checker.saved(self, at, texts)
        return texts.pop()

    def fail(self, rank: Rank, error: TokenloomError) -> None:
        """A rank ends with an error, and with it the launch."""
        self._world.checker.failed(self, rank, error)
        if self.failed is None:
            self.failed = error.name
            self._world.launch_failed(self, error)

    def kill(self) -> None:
        self.given_up = True
        for rank in self.ranks:
            rank.kill()


class Rank(Process):
    """One trainer process."""

    def __init__(self, world: World, launch: Launch, number: int, nonce: str = "") -> None:
        super().__init__(f"{launch.attempt}/{number}")
        self._world = world
        self.launch = launch
        self.number = number
        self.nonce = nonce or f"nonce-{launch.number}-{number}"
        self.address = 0
        self.joined: Accepted | None = None
        self.history: History | None = None
        self.received = self.consumed = self.committed_through = 0
        self.steps = 0
        self.end: EndOfData | None = None
        #: It has all data, and has left the training loop.
        self.finished = False
        self._tries = self._streams = 0
        self._base: Base | None = None
        self._buffer: deque[Point] = deque()
        self._stream: Stream | None = None
        self._error: TokenloomError | None = None
        self._give_up_at = math.inf
        self._heard_at = self._reported_at = 0.0
        self._reported = 0
        self._received = self._consumed = Point(0, 0, 0, "", Base(0, b""))
        self.server_epoch = 0
        self._take_due = self._report_due = False
        #: It has closed its side, after all that it used is committed.
        self.said_all = False
        credit_micro_steps = (
            world.rng.randint(1, 6) if world.plan.few_credits else 4 * world.plan.group_micro_steps
        )
        self.credit_micro_steps = max(credit_micro_steps, launch.accumulate)

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            if self._stream is not None:
                self._stream.cut()

    # Joining

    def join_call(self) -> JoinCall:
        launch = self.launch
        return JoinCall(
            rank=self.number,
            world_size=launch.world_size,
            batch_size=0,
            batch_sizes=launch.sizes,
            accumulate=launch.accumulate,
            attempt=launch.attempt,
            nonce=self.nonce,
            resume=launch.resume,
            state=launch.text.encode(),
            process=self.nonce,
            takeover=launch.takeover,
        )

    def join(self) -> None:
        self._tries += 1
        call_join(self._world, self, self._next_server(), self._tries)

    def _next_server(self) -> Server | None:
        self.address += 1
        return self._world.server_at(self.address)

    def answered(self, number: int, answer: Accepted | TokenloomError) -> None:
        """The Join was answered, or broke."""
        if number != self._tries or self.joined is not None:
            return
        if isinstance(answer, TokenloomError):
            if answer.retry_for_s is not None:
                self._give_up_at = min(self._give_up_at, self._world.now + answer.retry_for_s)
            busy = answer.retry_for_s is not None and self._world.now >= self._give_up_at
            self._world.note(self.name, "not joined", answer.name, str(answer))
            if answer.grpc_status == "UNAVAILABLE" and not busy:
                self._world.soon(1.0, self, self.join)
            else:
                self.launch.fail(self, answer)
            return
        self.joined = answer
        start = answer.start
        self._world.checker.joined(self, answer)
        self.received = self.consumed = start.sample_index
        self._received = self._consumed = start
        self.server_epoch = answer.server_epoch
        self._base = start.base
        self.history = History(answer.template, start, self.launch.loaded)
        self._world.note(self.name, "joined", answer.opening.generation, start.sample_index)
        self._connect()

    # The stream

    def _connect(self) -> None:
        server = self._next_server()
        self._heard_at = self._world.now
        if server is None or not server.reachable:
            self._stream = None
            self._reconnect()
            return
        assert self.joined is not None
        self._stream = Stream(self._world, self, server)
        self._streams += 1
        self._world.streams.append(self._stream)
        self._stream.up(
            server.open_stream, self.joined.uid, self.joined.opening.generation, self.nonce,
            self._received, self.committed_through, self.server_epoch, self._consumed, self.credit_micro_steps,
            self._streams,
        )  # fmt: skip
        self._reported, self._reported_at = self.consumed, self._world.now
        self._world.at(SIGN_OF_LIFE_S, self, self._tick, self._stream)

    def _reconnect(self) -> None:
        self._world.soon(1.0, self, self._connect)

    def lost_stream(self, stream: Stream, error: TokenloomError) -> None:
        """The connection broke, or fell silent."""
        if stream is self._stream:
            self._stream = None
            self._after_break()

    def _after_break(self) -> None:
        if not self.said_all or self.committed_through < self.consumed:
            self.said_all = False
            self._reconnect()

    def _tick(self, stream: Stream) -> None:
        """Every now and then: whether the server is silent, and a sign of life for it."""
        if stream is not self._stream:
            return
        if self._world.now - self._heard_at > SILENCE_S:
            self._world.note(self.name, "silence")
            stream.cancel()
            self.lost_stream(stream, Unavailable("silence"))
            return
        if self._world.now - self._reported_at >= SIGN_OF_LIFE_S:
            self._send_report()
        self._world.at(SIGN_OF_LIFE_S, self, self._tick, stream)

    def ended_by_server(self, stream: Stream, error: TokenloomError | None) -> None:
        """The server ended the stream, with a status."""
        if stream is not self._stream:
            return
        self._stream = None
        if error is None or error.grpc_status == "UNAVAILABLE":
            self._after_break()
            return
        self._world.note(self.name, "stream ended", error.name, str(error))
        if isinstance(error, Fenced):
            self._buffer.clear()
        self._error = error
        self.take_soon()

    def receive(
        self,
        stream: Stream,
        message: Batches | EndOfData | Heartbeat,
        committed_through: int,
        server_epoch: int,
    ) -> None:
        if stream is not self._stream:
            return
        self.server_epoch = max(self.server_epoch, server_epoch)
        self._heard_at = self._world.now
        self.committed_through = max(self.committed_through, committed_through)
        if isinstance(message, Batches):
            if message.base is not None:
                self._base = message.base
            self._world.checker.received(self, message)
            assert self._base is not None
            for step in message.steps:
                self._buffer.append(_point(step, self._base))
            self._received = self._buffer[-1]
            self.received = self._received.sample_index
            self._world.checker.buffered(self, len(self._buffer))
        elif isinstance(message, EndOfData):
            self._world.checker.ended(self, message)
            self.end = message
        self.take_soon()
        self._say_all()

    # The training loop

    def take_soon(self) -> None:
        if not self._take_due and (self._buffer or self.end is not None or self._error is not None):
            self._take_due = True
            self._world.soon(STEP_S, self, self._take)

    def _take(self) -> None:
        """``next()``: the next step, the end of the data, or the error that the stream met."""
        self._take_due = False
        if self.finished or self.history is None:
            return
        if self._buffer:
            if not self.launch.may_take(self) or not self._has_step():
                return
            point = self._buffer.popleft()
            self.history.append(point)
            self._consumed = point
            self.consumed = point.sample_index
            self.steps += 1
            self._report_soon()
            self.take_soon()
            self.launch.wake_behind(self)
        elif self._error is not None:
            self.launch.fail(self, self._error)
            self.kill()
        elif self.end is not None:
            self.finished = True
            self._world.note(self.name, "finished", self.consumed)
            self._world.finished(self.launch)
            self._report_soon()

    def _has_step(self) -> bool:
        """The first of an optimiser step is only given out once all of it is there, or is not to come."""
        if self.steps % self.launch.accumulate or self.end is not None or self._error is not None:
            return True
        return len(self._buffer) >= self.launch.accumulate

    def _report_soon(self) -> None:
        if not self._report_due:
            self._report_due = True
            self._world.soon(REPORT_S, self, self._report)

    def _report(self) -> None:
        self._report_due = False
        if self._stream is not None and self.consumed > self._reported:
            self._send_report()
        self._say_all()

    def _send_report(self) -> None:
        if self._stream is not None:
            self._reported, self._reported_at = self.consumed, self._world.now
            self._stream.up(self._stream.server.progress, self._consumed, self.credit_micro_steps)

    def _say_all(self) -> None:
        """Closes its side once the data are used and committed."""
        done = self.finished and self.committed_through >= self.consumed
        if (
            done
            and not self.said_all
            and self._stream is not None
            and self._reported == self.consumed
        ):
            self.said_all = True
            self._stream.up(self._stream.server.close_stream)


def _point(step: MicroStep, base: Base) -> Point:
    return Point(
        step.end_index, step.total_tokens, step.real_tokens, step.digest, base, step.counts
    )
