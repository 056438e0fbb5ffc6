"""What must be true of a world, whatever happens in it. Recounts from the reference; asks the server nothing.

It sees what lies in the ledger's store behind every write, what leaves a server, what a rank gets and uses, and
which errors end a launch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from tokenloom_server.errors import TokenloomError
from tokenloom_server.ledger.records import StoredRevision
from tokenloom_server.run.generation import EndOfData
from tokenloom_server.run.join_call import JoinCall
from tokenloom_server.run.sessions import Session
from tokenloom_tools.ledger import run_faults

from tests.simulation.corpus import Reference, reference, skips_of
from tests.simulation.scheduler import Violation
from tests.simulation.server import RUN, STREAM, Accepted, Batches, Server

if TYPE_CHECKING:
    from tests.simulation.trainer import Launch, Rank
    from tests.simulation.world import World

#: Errors that end a launch rightly where the ledger lost data.
_OF_LOST_DATA = frozenset(
    {"LedgerRolledBack", "NotFound", "OrderMismatch", "Fenced", "AttemptUsed", "LedgerError"}
)


#: A sample index, and the older checkpoint that the order began from, empty for none.
_Place = tuple[int, str]


class Checker:
    """See the module."""

    def __init__(self, world: World, reference: Reference) -> None:
        self._world = world
        #: What the order is under the revisions that the ledger has, and what it was when an attempt ended, by attempt.
        self._reference = reference
        self._former: dict[str, Reference] = {}
        #: How far samples of the present generation were sent, and states of it told.
        self._sent = 0
        #: Revisions that an operator was told are made, and those that somebody asked to drop.
        self._acknowledged: list[StoredRevision] = []
        self._may_be_gone: list[StoredRevision] = []
        #: The store as it was after the last write: generation, committed index, pin.
        self._generation = 0
        self._index = -1
        self._pin: str | None = None
        self._pinned_at = 0.0
        #: Committed indices and pins since the last opening: what the next may have read.
        self._indices: set[_Place] = set()
        self._pins: set[_Place] = set()
        #: By attempt, the greatest index that was ever durable in its generation.
        self._durable: dict[str, int] = {}
        self._attempts: set[str] = set()
        self._greatest_generation = 0
        #: By attempt, by begin of a step: its rotation.
        self._rotations: dict[tuple[str, int], int] = {}
        self.samples = 0

    @property
    def committed(self) -> int:
        """The committed sample index; −1 before the first opening."""
        return self._index

    @property
    def present(self) -> str:
        """The attempt of the present generation; empty before the first."""
        run = self._world.store.runs.get((RUN, STREAM))
        return run.openings[-1].attempt if run is not None and run.openings else ""

    def fail(self, message: str) -> NoReturn:
        self._world.note("checker", "VIOLATION", message)
        raise Violation(message)

    # The ledger

    def look_at_ledger(self, call: str, args: tuple[Any, ...], server: Server) -> None:
        """A write was done, by a server that may be dead by now."""
        run = self._world.store.runs.get((RUN, STREAM))
        if run is None:
            return
        pinned = self._pin
        if run.pin != self._pin:
            self._pin, self._pinned_at = run.pin, self._world.now
            if run.pin is not None:
                self._pins.add(self._place(run.pin))
        if run.generation != self._generation and call == "open":
            self._look_at_skip(pinned, tuple(run.revisions))
        elif tuple(run.revisions) != self._reference.revisions:
            self._look_at_revisions(call, tuple(run.revisions))
        if run.committed is None:
            return
        index = run.committed.sample_index
        if (run.generation, index) == (self._generation, self._index):
            return
        epoch = server.coordinator.lease.epoch if server.coordinator is not None else None
        if epoch != run.epoch and not self._was_sent_before_the_loss(args[0], epoch, run.epoch):
            self.fail(
                f"{server.name} has epoch {epoch}, the ledger {run.epoch}, but its {call} moved the ledger"
            )
        if run.generation != self._generation:
            self._look_at_opening()
        elif index < self._index:
            self.fail(
                f"{call} moved generation {run.generation} back from sample {self._index} to {index}"
            )
        elif call != "commit":
            self.fail(f"{call} moved the counters, from sample {self._index} to {index}")
        else:
            if args[0].generation != run.generation:
                self.fail(
                    f"a commit of generation {args[0].generation} moved generation {run.generation}"
                )
            launch = self._world.launch_of(run.openings[-1].attempt)
            if index > launch.consumed:
                self.fail(
                    f"sample {index} was committed, but not every rank is beyond {launch.consumed}"
                )
        self._generation, self._index = run.generation, index
        self._indices.add((index, self._reference.older))
        self._durable[run.openings[-1].attempt] = index
        reference = self._reference
        if index > len(reference):
            self.fail(f"sample {index} was committed, but the data end at {len(reference)}")
        self._equal(
            f"the counters at sample {index}",
            dict(run.committed.counters),
            reference.counters[index],
        )
        self._equal(f"the digest at sample {index}", run.committed.digest, reference.digests[index])
        self._equal(
            f"the tokens at sample {index}", run.committed.total_tokens, reference.tokens_at(index)
        )
        self._world.note("ledger", call, server.name, run.generation, index)

    def look_at_check(self) -> None:
        """``tokenloom ledger check`` calls sound what servers wrote."""
        if (RUN, STREAM) in self._world.store.runs:
            for fault in run_faults(self._world.ledger, RUN, STREAM):
                self.fail(fault)

    def _was_sent_before_the_loss(self, command: Any, epoch: int | None, stored_epoch: int) -> bool:
        """Whether a write left its server when that had the epoch to which the ledger has gone back since.

        No ledger can refuse it: the store is, to the byte, one in which that write was right, and the write says only
        what its server knew then. The promises are of ledgers that keep what they acknowledged; of this one the server,
        which has a newer epoch, hears as soon as it renews its lease.
        """
        forgotten = self._world.lost and epoch is not None and epoch > stored_epoch
        return forgotten and command.epoch == stored_epoch

    def _look_at_revisions(self, call: str, revisions: tuple[StoredRevision, ...]) -> None:
        """The mixture was revised, or is not any more: what was sent stays as it was."""
        before = self._reference
        now = reference(self._world.plan.mixture, revisions, before.older)
        self._world.note(
            "ledger", call, "revisions", *[(each.number, each.sample_index) for each in revisions]
        )
        if call not in ("revise", "drop_revisions"):
            self.fail(f"{call} changed the revisions")
        run = self._world.store.runs[RUN, STREAM]
        if (
            run.openings
            and run.closed_generation == run.generation
            and self.present not in self._former
        ):
            # Nothing of it was kept behind what is committed and what its ranks reported, or nobody may go on with it.
            self._former[self.present] = before
            self._sent = min(self._sent, revisions[-1].sample_index)
        reach = min(max(self._sent, self._index), len(before))
        if len(now) < reach or now.digests[reach] != before.digests[reach]:
            self.fail(f"{call} changed the order before sample {reach}, which was produced already")
        self._reference = now
        self._look_for_acknowledged()

    def _look_at_skip(self, pin: str | None, revisions: tuple[StoredRevision, ...]) -> None:
        """A generation was opened: with what its pin passes over, and no other change."""
        before = self._reference
        asked = json.loads(pin).get("skips") if pin is not None else None
        new = revisions[len(before.revisions) :]
        if revisions[: len(before.revisions)] != before.revisions:
            self.fail("an opening changed revisions that were there")
        skips = [skips_of(revision) for revision in new]
        self._equal("what an opening passes over", skips, [] if asked is None else [dict(asked)])
        if new:
            self._world.note("ledger", "skips", *(skips[0] or {}).items())
            self._acknowledged += new

    def pinned(
        self, text: str, samples: int, undo: bool, skips: dict[int, int] | None, at_first: Reference
    ) -> None:
        """A restore pinned a state, after which so many samples more are to be passed over; ``at_first``: what the
        order was when it began."""
        before, document = self._reference, json.loads(text)
        index = document["sample_index"]
        if self._world.lost or before is not at_first or before.older != self._place(text)[1]:
            return
        places, passed = (
            before.places,
            index + sum(self._passed(text).values()) - before.places[:index].count(-1),
        )
        if undo:
            state_skips = self._as_revision(self._passed(text))
            line = reference(self._world.plan.mixture, (*before.changes, state_skips), before.older)
            places = [*line.places[:index], *range(passed, passed + len(line))]
        expected = [*places[:index], *places[index + samples :]]
        if skips is None:
            now = before
        else:
            now = reference(
                self._world.plan.mixture,
                (*before.revisions, self._as_revision(skips)),
                before.older,
            )
        both = min(len(expected), len(now))
        self._equal(f"what is passed over at sample {index}", now.places[:both], expected[:both])

    def not_pinned(self, text: str, undo: bool, error: TokenloomError) -> None:
        """A restore to a state was refused: rightly only where it is of another line of the run."""
        if not self._world.lost and not self._is_of_another_line(text):
            self.fail(f"a restore to a state of this run was refused: {error}")

    def _as_revision(self, skips: dict[int, int]) -> StoredRevision:
        content = json.dumps({"skips": [*skips.items()]})
        return StoredRevision(
            number=0, sample_index=0, made_at=0.0, author="", reason="", content=content
        )

    def _passed(self, text: str) -> dict[int, int]:
        """What a state had passed over before its sample index, or at it."""
        document = json.loads(text)
        state = document.get("resume_state") or {"sample_index": 0}
        passed = {index: samples for index, samples, _ in state.get("skips", ())}
        between = range(state["sample_index"], document["sample_index"])
        return passed | {
            index: samples for index, samples in self._skips_in(state).items() if index in between
        }

    def _skips_in(self, resume_state: dict[str, Any]) -> dict[int, int]:
        """All that the line passes over on which a state was made."""
        contents = [entry["content"] for entry in resume_state.get("revisions", ())]
        return dict(next((content["skips"] for content in contents if "skips" in content), ()))

    @property
    def reference(self) -> Reference:
        """What the order is now."""
        return self._reference

    def _look_for_acknowledged(self) -> None:
        for revision in self._acknowledged:
            if revision not in self._reference.revisions and revision not in self._may_be_gone:
                self.fail(
                    f"revision {revision.number} at sample {revision.sample_index} was acknowledged, and is gone"
                )

    def acknowledged(self, revision: StoredRevision) -> None:
        """An operator was told that a revision is made."""
        self._acknowledged.append(revision)
        if not self._world.lost:
            self._look_for_acknowledged()

    def asked_to_drop(self, revisions: Sequence[StoredRevision]) -> None:
        self._may_be_gone += revisions

    def dropped(self, number: int) -> None:
        """An operator was told that a revision and all after it are dropped."""
        if not self._world.lost and len(self._reference.revisions) >= number:
            self.fail(
                f"revision {number} was dropped, but the ledger has {len(self._reference.revisions)}"
            )

    def _reference_of(self, launch: Launch) -> Reference:
        """What the order is for a launch: for one that is over, what it was then."""
        return self._former.get(launch.attempt, self._reference)

    def _look_at_opening(self) -> None:
        run = self._world.store.runs[RUN, STREAM]
        opening = run.openings[-1]
        for former in run.openings[:-1]:
            self._former.setdefault(former.attempt, self._reference)
        self._sent = opening.start_index
        if run.generation <= self._greatest_generation:
            self.fail(f"generation {run.generation} was opened after {self._greatest_generation}")
        if opening.attempt in self._attempts:
            self.fail(f"{opening.attempt} opened a second generation, {run.generation}")
        self._greatest_generation = run.generation
        self._attempts.add(opening.attempt)
        launch, start = self._world.launch_of(opening.attempt), opening.start_index
        begun_from = self._older_of(json.loads(opening.start_state))
        allowed = set(self._pins)
        if launch.older:
            allowed.add((self._line(launch.older).begin, launch.older))
        elif launch.loaded is not None:
            allowed.add(self._place(launch.text))
        elif launch.resume == "latest":
            allowed |= self._indices or {(0, "")}
        elif launch.resume.partition("-")[0].isdigit():
            allowed.add(self._place(self._world.saved[launch.resume]))
        else:
            allowed.add((0, ""))
        if (start, begun_from) not in allowed:
            self.fail(
                f"{opening.attempt} asked for one of {sorted(allowed)}, and starts at {start} {begun_from}"
            )
        self._reference = reference(self._world.plan.mixture, tuple(run.revisions), begun_from)
        size = launch.size_at(start, start, self._reference.tokens_at)
        if (opening.world_size, opening.batch_size) != (launch.world_size, size):
            self.fail(
                f"{opening.attempt} was opened for {opening.world_size} × {opening.batch_size}"
            )
        self._indices, self._pins = set(), set()

    def _line(self, older: str) -> Reference:
        """What the order is that began from an older checkpoint, or from its own beginning."""
        return reference(self._world.plan.mixture, self._reference.revisions, older)

    def _older_of(self, resume_state: dict[str, Any]) -> str:
        """The older checkpoint that the order of a state began from; empty for none."""
        return self._world.older if "clock_offset" in resume_state else ""

    def _place(self, text: str) -> _Place:
        """Where a snapshot stands."""
        document = json.loads(text)
        document = json.loads(document.get("snapshot", text))
        return document["sample_index"], self._older_of(document.get("resume_state") or {})

    def lost_data(self) -> None:
        """The store went back to what it was: from there on is looked."""
        run = self._world.store.runs.get((RUN, STREAM))
        older = (
            self._older_of(json.loads(run.openings[-1].start_state))
            if run is not None and run.openings
            else ""
        )
        now = reference(
            self._world.plan.mixture, tuple(run.revisions) if run is not None else (), older
        )
        if now is not self._reference:
            # Whoever is at work goes on as before until it hears of the loss: by a window at most, since a commit has
            # to be of the order as it is now.
            for attempt in self._attempts:
                self._former.setdefault(attempt, self._reference)
        self._reference = now
        self._acknowledged, self._may_be_gone = [], []
        self._sent = 0
        self._generation = run.generation if run is not None else 0
        self._index = (
            run.committed.sample_index if run is not None and run.committed is not None else -1
        )
        self._pin = run.pin if run is not None else None
        self._indices, self._pins = {(max(self._index, 0), older)}, set()
        if self._pin is not None:
            self._pins.add(self._place(self._pin))
        self._greatest_generation = self._generation
        self._attempts = {opening.attempt for opening in run.openings} if run is not None else set()

    # What leaves a server

    def attached(self, server: Server, rank: Rank, session: Session) -> None:
        self._look_at_fence("a stream began", rank, session)
        former, now = self._former.get(rank.launch.attempt), self._reference
        assert server.coordinator is not None
        has_heard = server.coordinator.timeline.revisions == now.revisions
        if self._world.lost and former is not None and former.older == now.older and has_heard:
            del self._former[
                rank.launch.attempt
            ]  # this server goes on by what the ledger has since the loss

    def sent(self, server: Server, rank: Rank, session: Session, committed_through: int) -> None:
        self._look_at_fence("data were sent", rank, session)
        durable = self._durable.get(rank.launch.attempt, -1)
        if committed_through > durable:
            self.fail(
                f"{rank.name} was told that {committed_through} is committed, but {durable} is"
            )

    def _look_at_fence(self, what: str, rank: Rank, session: Session) -> None:
        run = self._world.store.runs.get((RUN, STREAM))
        if run is None or self._world.lost:
            return
        number = session.active.generation.number
        if number != run.generation:
            self.fail(
                f"{what} for {rank.name}, generation {number}, but {run.generation} was open already"
            )
        if run.openings[-1].attempt != rank.launch.attempt:
            self.fail(f"{what} for {rank.name} in the generation of {run.openings[-1].attempt}")

    def answered(self, server: Server, call: JoinCall, answer: Accepted | TokenloomError) -> None:
        if isinstance(answer, Accepted) and answer.opening.attempt != call.attempt:
            self.fail(f"{call.attempt} was let into the generation of {answer.opening.attempt}")

    def look_at_memory(self, server: Server) -> None:
        """G5: ids are held of a window and a group at most."""
        active = server.coordinator._present.active if server.coordinator is not None else None
        if active is None:
            return
        generation = active.generation
        used = min(generation.acknowledged(), generation.produced)
        for group in generation.groups:
            if group.marks and (len(group.samples) == 0) != (
                group.plan.group_end(group.first_step) <= used
            ):
                self.fail(
                    f"{server.name} holds ids that every rank has used, or let others go: all used {used} steps"
                )
        held = sum(len(group.marks) for group in generation.groups if len(group.samples))
        most = generation.window_micro_steps + max(
            plan.group_micro_steps for plan in generation.batch_plans.plans
        )
        if held > most:
            self.fail(f"{server.name} holds {held} steps; a window and a group are {most}")

    # What a rank gets and uses

    def joined(self, rank: Rank, answer: Accepted) -> None:
        start, loaded = answer.start, rank.launch.loaded
        if loaded is not None and (start.sample_index, start.digest) != (
            loaded.sample_index,
            loaded.digest,
        ):
            self.fail(
                f"{rank.name} loaded sample {loaded.sample_index}, and was started at {start.sample_index}"
            )
        self._look_at_point(
            rank.name,
            start.sample_index,
            start.digest,
            start.total_tokens,
            self._reference_of(rank.launch),
        )
        if answer.opening.attempt != rank.launch.attempt:
            self.fail(f"{rank.name} was let into the generation of {answer.opening.attempt}")

    def received(self, rank: Rank, message: Batches) -> None:
        reference, launch = self._reference_of(rank.launch), rank.launch
        assert rank.joined is not None
        begin = message.begin_index
        for step in message.steps:
            if begin != rank.received and step is message.steps[0]:
                self.fail(f"{rank.name} got sample {begin} where {rank.received} is next")
            size = launch.size_at(begin, rank.joined.opening.start_index, reference.tokens_at)
            if size is None:
                self.fail(f"{rank.name} got a step from {begin} on, where none begins")
            end = begin + launch.world_size * size
            if end > len(reference) and reference.config.last_micro_step == "pad":
                end = len(reference)
            self._equal(f"{rank.name}'s step from {begin} ends at", step.end_index, end)
            self._look_at_point(rank.name, end, step.digest, step.total_tokens, reference)
            if launch.attempt == self.present:
                self._sent = max(self._sent, end)
            rotation = (step.slice - rank.number) % launch.world_size
            known = self._rotations.setdefault((launch.attempt, begin), rotation)
            if rotation != known:
                self.fail(
                    f"{rank.name} got slice {step.slice} at {begin}, but another rank's says rotation {known}"
                )
            first = begin + step.slice * size
            for index, source, ids in zip(
                range(first, end + 10**6), step.source_ids, step.ids, strict=False
            ):
                if index >= end:
                    padded = (
                        source == -1 and not any(ids) and reference.config.last_micro_step == "pad"
                    )
                    if not padded:
                        self.fail(f"{rank.name} got sample {index}, behind the end {end}")
                elif (source, ids) != (
                    reference.samples[index].source,
                    reference.samples[index].ids,
                ):
                    self.fail(f"{rank.name} got another sample than the reference has at {index}")
            self._equal(f"{rank.name}'s samples of a step", len(step.ids), size)
            self.samples += len(step.ids)
            begin = end

    def buffered(self, rank: Rank, steps: int) -> None:
        if steps > rank.credit_micro_steps:
            self.fail(
                f"{rank.name} holds {steps} steps, but gave credits for {rank.credit_micro_steps}"
            )

    def ended(self, rank: Rank, end: EndOfData) -> None:
        """G8: where the data end for every rank alike."""
        joined = rank.joined
        assert joined is not None
        start, total = joined.opening.start_index, len(self._reference_of(rank.launch))
        expected = total
        if self._reference.config.last_micro_step == "drop":
            at = start
            while at <= total:
                expected = at
                at += rank.launch.world_size * (
                    rank.launch.size_at(at, start, self._reference_of(rank.launch).tokens_at) or 0
                )
        self._equal(f"the end of the data for {rank.name}", end.end_index, expected)
        self._equal(f"the samples dropped for {rank.name}", end.dropped_samples, total - expected)
        self._equal(f"what {rank.name} received", rank.received, expected)
        if not end.reason:
            self.fail(f"the data end for {rank.name} without a reason")

    def joined_apart(self, launch: Launch) -> None:
        """Ranks of one launch joined different generations: rightly only where the ledger lost the opening that some of
        them joined, which are fenced once they hear of it."""
        if not self._world.lost:
            self.fail(f"the ranks of {launch.attempt} joined different generations")

    def saved(self, launch: Launch, at: int, texts: set[str]) -> None:
        """All ranks' states at a sample index."""
        if len({self._comparable(text) for text in texts}) != 1:
            self.fail(f"the ranks of {launch.attempt} wrote different states at sample {at}")
        self.look_at_text(next(iter(texts)), at, launch)

    def look_at_snapshot(self, launch: Launch, text: str, at: int) -> None:
        """The server's text is the one that ranks of the generation write there."""
        if json.loads(text)["generation"] != self._generation or self._world.lost:
            return
        for rank in launch.ranks:
            if (
                rank.history is not None
                and rank.joined is not None
                and rank.joined.opening.start_index < at
            ):
                try:
                    own = rank.history.text(at)
                except ValueError:
                    continue  # it did not stop there, or is not there yet
                if rank.joined.opening.generation == self._generation:
                    self._equal(
                        f"the server's snapshot at sample {at}",
                        self._comparable(text),
                        self._comparable(own),
                    )

    def _comparable(self, text: str) -> str:
        """A snapshot without revisions that decide no sample before it and that somebody dropped since, or that the
        ledger lost."""
        document = json.loads(text)
        document.pop("checksum")
        state = document.get("resume_state") or {}
        dropped = {revision.sample_index for revision in self._may_be_gone}
        state["revisions"] = [
            revision
            for revision in state.pop("revisions", ())
            if revision["sample_index"] < document["sample_index"]
            or not (self._world.lost or revision["sample_index"] in dropped)
        ]
        return json.dumps(document, sort_keys=True)

    def look_at_text(self, text: str, at: int, launch: Launch | None = None) -> None:
        found = json.loads(text)
        self._equal("a state's sample index", found["sample_index"], at)
        expected = (
            self._line(self._place(text)[1]) if launch is None else self._reference_of(launch)
        )
        self._look_at_point("a state", at, found["digest"], found["total_tokens"], expected)
        if (
            launch is None
            and not self._is_of_another_line(text)
            and found["generation"] == self._generation
        ):
            self._sent = max(self._sent, at)

    def _look_at_point(
        self, who: str, index: int, digest: str, total_tokens: int, reference: Reference
    ) -> None:
        if index > len(reference):
            self.fail(f"{who} is at sample {index}, but the data end at {len(reference)}")
        self._equal(f"{who}'s digest at sample {index}", digest, reference.digests[index])
        self._equal(f"{who}'s tokens at sample {index}", total_tokens, reference.tokens_at(index))

    def _is_of_another_line(self, text: str) -> bool:
        """Whether a state was made under other revisions than those that hold there now."""
        text = json.loads(text).get("snapshot", text)
        found = json.loads(text)
        resume = found["resume_state"] or {"sample_index": 0}
        at, passed, ours = found["sample_index"], self._passed(text), self._reference.skips
        for index in {*passed, *ours}:
            theirs, here = passed.get(index, 0), ours.get(index, 0)
            if (index < at and theirs != here) or (index == at and theirs > here):
                return True
        changes = [
            entry for entry in resume.get("revisions", []) if "skips" not in entry["content"]
        ]
        known = {entry["sample_index"]: entry for entry in changes}
        newest = max((index for index in known if index <= found["sample_index"]), default=None)
        in_force = known[newest] if newest is not None else None
        return in_force != self._reference.in_force(found["sample_index"])

    # How a launch ends

    def failed(self, launch: Launch, rank: Rank, error: TokenloomError) -> None:
        """Whether a launch may end with an error: a healthy one goes on, whatever dies around it."""
        world, name, text = self._world, error.name, str(error)
        opened = rank.joined.opening.generation if rank.joined is not None else None
        run = world.store.runs.get((RUN, STREAM))
        superseded = opened is not None and self._greatest_generation > opened
        superseded |= opened is not None and run is not None and run.closed_generation == opened
        if opened is None:
            superseded = launch.attempt in self._attempts and self._attempts_behind(launch.attempt)
            if run is not None and self.present == launch.attempt:
                superseded |= (
                    run.closed_generation == run.generation
                )  # while this rank was on its way to it
        if world.lost and name in _OF_LOST_DATA:
            return
        if world.lost and name == "SnapshotInvalid" and "run_uid" in text:
            return  # the ledger came back as it was before it took that run's uid
        if name == "SnapshotInvalid":
            texts = [
                launch.loaded.text if launch.loaded else "",
                world.saved.get(launch.resume, ""),
                self._pin or "",
            ]
            if any(self._is_of_another_line(each) for each in texts if each):
                return
        if name == "SnapshotInvalid" and launch.older and "the data end at" in text:
            return  # revisions left fewer samples than it has behind it
        if (
            name == "SnapshotInvalid"
            and "resume_state" in launch.older
            and "passed over 0: restore to" in text
        ):
            begin = self._line(launch.older).begin
            if any(skip < begin for skip in self._reference.skips):
                return  # it stands beyond a skip that it knows nothing of
        if name == "Fenced" and superseded:
            return
        if name == "AttemptUsed" and superseded:
            return
        if name == "JoinRefused" and "waited" in text:
            return  # rank 0 was dead or stopped
        if name == "JoinRefused" and "pinned" in text:
            return
        if name == "ResumePointNeeded" and not launch.resume and not launch.text:
            return
        if name == "RunBusy" and self._attempts - {launch.attempt}:
            return
        if name == "RankStalled":
            return  # another rank was dead or stopped
        if name == "LedgerError" and "Another opening came first" in text:
            return
        self.fail(f"{rank.name} was ended without need: {name}: {text}")

    def _attempts_behind(self, attempt: str) -> bool:
        run = self._world.store.runs.get((RUN, STREAM))
        return run is not None and run.openings[-1].attempt != attempt

    def completed(self, launch: Launch) -> None:
        ends = {rank.consumed for rank in launch.ranks}
        if len(ends) != 1:
            self.fail(f"the ranks of {launch.attempt} ended at samples {sorted(ends)}")

    def _equal(self, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            self.fail(f"{what}: found {found}, expected {expected}")
