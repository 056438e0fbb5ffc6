"""The past of a run, explained: which documents a sample's tokens are of, and which sample a rank got.

Nothing of this is kept while a run trains. A trace goes forward from the nearest state known, as a peek does and in
turns with the peeks, makes the samples again, and reads their rows once more from the cursors before them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import xxhash

from tokenloom_server.core.hashing import slice_rotation
from tokenloom_server.core.state import (
    DIGEST_MODULUS,
    DIGEST_MULTIPLIER,
    MAX_COUNTER,
    SourceState,
    State,
    digest_hex,
)
from tokenloom_server.errors import BeyondHorizon, ConfigError, LimitExceeded, OrderMismatch
from tokenloom_server.ledger.records import Opening
from tokenloom_server.order.pipeline import BatchPlan, StepGroup
from tokenloom_server.order.record import Order
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.packing.buckets import described
from tokenloom_server.replay.evaluation import Evaluations
from tokenloom_server.replay.peek import Peeks
from tokenloom_server.reports.trace import Status, TracedDocument, TracedRank, TracedSample, TracedStep
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.history import History, covering
from tokenloom_server.run.sizing import steps_of
from tokenloom_server.tokenizer.text import Decode, bytes_decoder, load_decoder

#: Going forward to a sample takes so long at most, seconds; asked again, it goes on where it was.
MAX_FORWARD_S = 240.0
#: One trace tells of so many tokens (with their text: of fewer) and documents, unless it is of one sample: it has to be
#: held, and the thread of all peeks makes it in few turns.
MAX_TOKENS = 2**20
MAX_TEXT_TOKENS = 2**18
MAX_DOCUMENTS = 2**14


class _Segment(NamedTuple):
    """Consecutive samples of one source: the state before them, and which steps of their group they are."""

    source: int
    state: SourceState
    steps: Sequence[int]


class Traces:
    """Traces of one run. Thread-safe."""

    def __init__(self, coordinator: RunCoordinator, history: History, peeks: Peeks, evaluations: Evaluations) -> None:
        self._evaluations = evaluations
        self._coordinator = coordinator
        self._history = history
        self._peeks = peeks
        self._decoder_lock = threading.Lock()
        self._decoder: Decode | None = None

    def sample(self, index: int, generation: int | None, text: bool) -> TracedSample:
        """One sample, as a generation had it (None: the present one).

        Raises ``BeyondHorizon`` for a sample that was not produced, ``NotFound`` for an unknown generation,
        ``TooManyPeeks``, ``LimitExceeded``, and what reading the data raises.
        """
        openings, asked = self._generation(generation)
        if asked is openings[-1]:
            self._check_produced(f"sample {index}", index, asked)
        opening = covering(openings, index, generation)
        found, end = self._read(index, 1, generation, text)
        if not found:
            raise BeyondHorizon(f"sample {index} does not exist: the data end at sample {end}")
        return self._placed(found[0], opening, openings)

    def evaluated(self, stream: str, index: int, text: bool) -> TracedSample:
        """One sample that was evaluated on, of a stream beside training.

        Raises ``NotFound`` for a stream that there is not, ``BeyondHorizon`` for a sample of it that nobody asked for
        yet, and what ``sample`` does.
        """
        self._coordinator.require_lead()
        self._evaluations.streams.check(stream)
        kept = self._evaluations.kept(stream)
        if kept is None or index >= kept.made():
            made = kept.made() if kept is not None else 0
            raise BeyondHorizon(
                f"sample {index} of stream {stream!r} of run {self._coordinator.name!r} was not evaluated on since "
                f"this server started, which made {made} of its samples: evaluate on it, then trace"
            )
        with self._peeks.place():
            return self._peeks.turn(partial(self._evaluated, kept.order, kept.state_before(index), index, text))

    def _evaluated(self, order: Order, state: State, index: int, text: bool) -> TracedSample:
        pipeline = order.pipeline(state)
        pipeline.advance(index - state.sample_index)
        group, _ = self._samples(order, pipeline.state(), 1)
        (segment,) = _segments(group)
        (sample,) = self._explained(order, group, segment, text)
        return sample.model_copy(update={"status": "evaluated"})

    def step(self, step: int, rank: int | None, generation: int | None, text: bool) -> TracedStep:
        """A step of a generation (None: the present one), counted from 0: all of it, or what a rank got.

        Raises what ``sample`` does, and ``ConfigError`` for a rank that the generation does not have.
        """
        openings, opening = self._generation(generation)
        plan = steps_of(opening).at_step(step)
        world, size = plan.world_size, plan.batch_size
        if rank is not None and rank >= world:
            raise ConfigError(f"rank is {rank}, but generation {opening.generation} has ranks 0 to {world - 1}")
        begin = plan.index_of(step)
        if opening is openings[-1]:
            self._check_produced(f"step {step}", begin, opening)
        rotation = slice_rotation(self._coordinator.order.config.seed, begin, world)
        begins = {
            each: begin + (each + rotation) % world * size for each in (range(world) if rank is None else (rank,))
        }
        first, count = (begin, plan.step_samples) if rank is None else (begins[rank], size)
        found, end = self._read(first, count, generation, text)
        if end <= begin or (end < first + count and self._coordinator.order.config.last_step == "drop"):
            raise BeyondHorizon(
                f"step {step} of generation {opening.generation} does not exist: it would begin at sample {begin} and "
                f"have {plan.step_samples}, and the data end at sample {end}"
            )
        placed = {sample.sample: self._placed(sample, opening, openings) for sample in found}
        ranks = []
        for each, at in begins.items():
            got = [placed[i] for i in range(at, at + size) if i in placed]
            ranks.append(TracedRank(rank=each, samples=got, padding=size - len(got)))
        return TracedStep(
            generation=opening.generation,
            step=step,
            begin=begin,
            end=begin + plan.step_samples if end >= first + count else end,
            world_size=world,
            batch_size=size,
            rotation=rotation,
            ranks=ranks,
        )

    def _generation(self, generation: int | None) -> tuple[Sequence[Opening], Opening]:
        """All generations, and the one that is asked for."""
        self._coordinator.require_lead()
        openings = self._history.openings()
        if not openings:
            raise BeyondHorizon(f"run {self._coordinator.name!r} has delivered nothing yet: no trainer has joined it")
        asked = covering(openings, MAX_COUNTER, generation)
        assert asked is not None, "no generation begins beyond the last index"
        return openings, asked

    def _check_produced(self, what: str, index: int, opening: Opening) -> None:
        """That the present generation came so far."""
        coordinator = self._coordinator
        view = coordinator.view()
        at = view.commit.sample_index
        if view.generation.number == opening.generation:
            at = max(at, view.generation.produced_index)
        if index >= at:
            raise BeyondHorizon(
                f"{what} of run {coordinator.name!r} was not delivered: it begins at sample {index}, and generation "
                f"{opening.generation}, which began at sample {opening.start_index}, has produced those before {at}; "
                "`tokenloom peek` shows what comes"
            )

    def _placed(self, sample: TracedSample, opening: Opening | None, openings: Sequence[Opening]) -> TracedSample:
        """With the place that its generation gave it; None: that is not known here."""
        status = self._status(sample.sample, opening, openings)
        if opening is None:
            return sample.model_copy(update={"status": status})
        plan = steps_of(opening).at_index(sample.sample)
        steps, at = divmod(sample.sample - plan.start_index, plan.step_samples)
        piece, place = divmod(at, plan.batch_size)
        rotation = slice_rotation(self._coordinator.order.config.seed, sample.sample - at, plan.world_size)
        rank = (piece - rotation) % plan.world_size
        update = {
            "generation": opening.generation,
            "status": status,
            "step": plan.first_step + steps,
            "rank": rank,
            "place": place,
        }
        return sample.model_copy(update=update)

    def _status(self, index: int, opening: Opening | None, openings: Sequence[Opening]) -> Status:
        by_number = {each.generation: each for each in openings}
        each: Opening | None = openings[-1]
        while each is not None and index < each.start_index:
            # What a generation jumped over lies right before its start.
            if index >= each.start_index - each.skipped:
                return "skipped"
            each = by_number.get(each.parent)
        if each is not opening:
            return "rewound"
        return "committed" if index < self._coordinator.committed_through else "produced"

    # --- making samples again ------------------------------------------------------------------------

    def _read(self, first: int, count: int, generation: int | None, text: bool) -> tuple[list[TracedSample], int]:
        """Samples of the order from ``first`` on, without their places, and behind which index: fewer, and where the
        data end, or have another length, perhaps before ``first``."""
        peeks, deadline = self._peeks, time.monotonic() + MAX_FORWARD_S
        with peeks.place():
            nearest = peeks.nearest(first, generation)
            timeline = nearest.timeline
            length = timeline.at(first).config.sequence_length
            most = MAX_TEXT_TOKENS if text else MAX_TOKENS
            if count > 1 and count * length > most:
                raise LimitExceeded(
                    f"{count} samples have {count * length} tokens, and one trace tells of {most} at most"
                    f"{' with their text' if text else ''}: ask for one rank of the step, or for a sample"
                )
            line = nearest.generation
            pick = timeline.at(first).config.pick_samples
            lead = first % pick
            state = peeks.advance(nearest.state, first - lead, lambda: time.monotonic() > deadline, timeline, line)
            found: dict[int, TracedSample] = {}
            if state.sample_index == first - lead:
                peeks.remember(line, state, timeline)
            documents = 0
            # A revision, or a phase, makes what comes behind it from other rows.
            for begin, end in _parts(timeline, first - lead, first + count):
                if state.sample_index < begin:
                    break
                group, state = peeks.turn(partial(self._samples, timeline, state, end - begin, pick))
                order = timeline.at(begin)
                explained = self._explained if order.config.batching is None else self._explained_rows
                for segment in _segments(group):
                    # Reading the rows of one source again takes no longer than making the samples.
                    for sample in peeks.turn(partial(explained, order, group, segment, text)):
                        found[sample.sample] = sample
                        documents += len(sample.documents)
                    if count > 1 and documents > MAX_DOCUMENTS:
                        raise LimitExceeded(
                            f"{count} samples have more than {MAX_DOCUMENTS} documents, and one trace tells of no "
                            "more: ask for one rank of the step, or for a sample"
                        )
        wanted = [found[index] for index in sorted(found) if first <= index < first + count]
        return wanted, min(state.sample_index, first + count)

    # On the thread of all peeks:

    def _samples(self, timeline: Timeline | Order, state: State, count: int, pick: int = 1) -> tuple[StepGroup, State]:
        """The next samples, as many as there are, each pick a step of a world of one; and the state behind them."""
        pipeline, steps = timeline.pipeline(state), -(-count // pick)
        plan = BatchPlan(start_index=state.sample_index, world_size=1, batch_size=pick, group_steps=steps)
        group = pipeline.begin_group(plan)
        pipeline.fill(group, steps)
        return group, pipeline.state()

    def _explained_rows(self, order: Order, group: StepGroup, segment: _Segment, text: bool) -> list[TracedSample]:
        """The samples of one source that are rows, by the batches that they came in."""
        config, epochs = order.config.sources[segment.source], order.epochs_of(segment.source)
        paths, size = order.shard_paths[segment.source], epochs.size
        epoch, number = segment.state.cursor.epoch, segment.state.cursor.row // size
        samples: list[TracedSample] = []
        for at, step in enumerate(segment.steps):
            while number == epochs.count(epoch):
                epoch, number = epoch + 1, 0
            shards, rows = epochs.rows_of(epoch, number)
            batch = group.batch_of(step)
            digest = group.marks[step - 1].digest if step else group.base.digest
            for place, sample in enumerate(group.ids(0, step, step + 1)):
                hashed = xxhash.xxh3_128_intdigest(sample, segment.source)
                digest = (digest * DIGEST_MULTIPLIER + hashed) % DIGEST_MODULUS
                shard = int(shards[place])
                told = {"bucket": batch.bucket, **described(batch, sample)} if text else None
                samples.append(
                    TracedSample(
                        sample=group.begin + step * size + place,
                        generation=0,
                        status="committed",
                        step=None,
                        rank=None,
                        place=None,
                        source_id=segment.source,
                        source=config.name,
                        spec=config.source,
                        source_sample=segment.state.samples + at * size + place,
                        tokens=1,
                        hash=f"{hashed:032x}",
                        digest=digest_hex(digest),
                        documents=[
                            TracedDocument(
                                position=0,
                                shard=paths[shard],
                                shard_index=shard,
                                row=int(rows[place]),
                                epoch=epoch,
                                begin=0,
                                end=1,
                                row_tokens=1,
                                text=json.dumps(told, ensure_ascii=False) if told is not None else None,
                            )
                        ],
                    )
                )
            number += 1
        return samples

    def _explained(self, order: Order, group: StepGroup, segment: _Segment, text: bool) -> list[TracedSample]:
        """The samples of one source, by reading their rows once more. Raises ``OrderMismatch`` where these have other
        tokens than the samples."""
        config, length = order.config.sources[segment.source], order.config.sequence_length
        decode = self._decode() if text else None
        paths = order.shard_paths[segment.source]
        samples = []
        parts = order.parts(segment.source, segment.state, len(segment.steps))
        for number, step in enumerate(segment.steps):
            own = next(parts, [])
            sample = group.ids(0, step, step + 1)[0]
            ids = order.form.ids(sample)
            again = np.concatenate([part.ids for part in own]) if own else ids[:0]
            index = group.begin + step
            if not np.array_equal(ids, again):
                raise OrderMismatch(
                    f"sample {index} of run {self._coordinator.name!r} has other tokens than its rows of "
                    f"{config.source!r} when they are read again: the data or the tokeniser changed just now"
                )
            documents, position = [], order.form.begin(len(ids))
            for part in own:
                documents.append(
                    TracedDocument(
                        position=position,
                        shard=paths[part.shard],
                        shard_index=part.shard,
                        row=part.row,
                        epoch=part.epoch,
                        begin=part.begin,
                        end=part.end,
                        row_tokens=part.row_tokens,
                        fim=part.middle,
                        text=decode(part.ids.tolist()) if decode is not None else None,
                    )
                )
                position += len(part.ids)
            samples.append(
                TracedSample(
                    sample=index,
                    generation=0,
                    status="committed",
                    step=None,
                    rank=None,
                    place=None,
                    source_id=segment.source,
                    source=config.name,
                    spec=config.source,
                    source_sample=segment.state.samples + number,
                    tokens=length,
                    hash=f"{xxhash.xxh3_128_intdigest(sample, segment.source):032x}",
                    digest=digest_hex(group.marks[step].digest),
                    documents=documents,
                    ids=ids.tolist() if text else None,
                )
            )
        return samples

    def _decode(self) -> Decode | None:
        """Ids to text; None where the run has no tokeniser. Loaded once: a large vocabulary takes a second."""
        definition = self._coordinator.order.tokenizer
        if definition is None:
            return None
        with self._decoder_lock:
            if self._decoder is None:
                self._decoder = bytes_decoder() if definition.is_bytes else load_decoder(definition.content)
            return self._decoder


def _segments(group: StepGroup) -> list[_Segment]:
    """The samples of a group, of one rank and one sample a step, by source."""
    picks = group.source_ids[0, : len(group.marks), 0]
    return [
        _Segment(source, group.base.sources[source], np.flatnonzero(picks == source).tolist())
        for source in np.unique(picks).tolist()
    ]


def _parts(timeline: Timeline, begin: int, end: int) -> list[tuple[int, int]]:
    """A range of samples, cut where another segment of the course begins, and ended where the length changes."""
    found = []
    for segment in timeline.segments:
        if begin < segment.begin < end:
            found.append((begin, segment.begin))
            longer = segment.order.config.sequence_length != timeline.at(begin).config.sequence_length
            begin = segment.begin
            if longer:
                return found
    return [*found, (begin, end)]
