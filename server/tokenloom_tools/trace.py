"""The past of a run, explained: which documents a sample's tokens are of, and which sample a rank got.

Nothing of this is kept while a run trains. A trace goes forward from the nearest state known, in turns with the peeks,
makes the samples again, and reads their rows once more from the cursors before them.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.core import caller
from tokenloom_server.core.hashing import slice_rotation
from tokenloom_server.core.state import (
    DIGEST_MODULUS,
    DIGEST_MULTIPLIER,
    EpochCursor,
    SourceState,
    digest_hex,
)
from tokenloom_server.errors import (
    BeyondHorizon,
    ConfigError,
    LimitExceeded,
    NotFound,
    OrderMismatch,
    ServerStopping,
)
from tokenloom_server.ledger.records import Opening
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.replay import Replay, beyond_the_end
from tokenloom_server.order.steps import StepGroup
from tokenloom_server.packing.buckets import described
from tokenloom_server.packing.samples import Mask
from tokenloom_server.run.past import covering, lineage
from tokenloom_server.run.sizing import batch_plans_of
from tokenloom_server.tokenizer.engine import Decode, bytes_decoder, load_decoder

from tokenloom_tools.reports.documents import (
    Status,
    TracedDocument,
    TracedMicroStep,
    TracedPart,
    TracedRank,
    TracedSample,
)

#: Going forward to a sample takes so long at most, seconds; asked again, it goes on where it was.
MAX_FORWARD_S = 240.0
#: One trace tells of so many tokens (with their text: of fewer) and documents, unless it is of one sample: it has to be
#: held, and the thread of all peeks makes it in few turns.
MAX_TOKENS = 2**20
MAX_TEXT_TOKENS = 2**18
MAX_DOCUMENTS = 2**14


class Traces:
    """Traces of one run. Thread-safe."""

    def __init__(self, run: ServedRun) -> None:
        self._evaluations = run.evaluations
        self._coordinator = run.coordinator
        self._past = run.past
        self._decoder_lock = threading.Lock()
        self._decoder: Decode | None = None

    def sample(self, index: int, generation: int | None, text: bool) -> TracedSample:
        """One sample, as a generation had it (None: the present one).

        Raises ``BeyondHorizon`` for a sample that was not produced, ``NotFound`` for an unknown generation,
        ``TooManyPeeks``, ``LimitExceeded``, and what reading the data raises.
        """
        openings, last = self._openings(generation)
        if last is openings[-1]:
            self._check_produced(f"sample {index}", index, last)
        samples, end = self._read(index, 1, generation, text)
        if not samples:
            raise beyond_the_end(index, end)
        return self._placed(samples[0], covering(openings, index, generation), openings)

    def evaluated(self, stream: str, index: int, text: bool) -> TracedSample:
        """One sample that was evaluated on, of a stream beside training.

        Raises ``NotFound`` for a stream that there is not, ``BeyondHorizon`` for a sample of it that nobody asked for
        yet, and what ``sample`` does.
        """
        self._coordinator.require_lead()
        self._evaluations.streams.check(stream)
        samples = self._evaluations.samples(stream)
        made = samples.made() if samples is not None else 0
        if samples is None or index >= made:
            raise BeyondHorizon(
                f"sample {index} of stream {stream!r} of run {self._coordinator.name!r} was not evaluated on since "
                f"this server started, which made {made} of its samples: evaluate on it, then trace"
            )
        with self._past.admitted():
            replay = Replay(samples.timeline, samples.state_before(index))
            self._past.forward(replay, index)
            (sample,) = self._explained(replay, index, 1, text)
        return sample.model_copy(update={"status": "evaluated"})

    def of_source(self, source: str, number: int | None, text: bool) -> TracedSample:
        """A committed sample of a source, by its alias or spec: its ``number``-th from 0, where what was passed over is
        not counted; None: one at random, each as likely as the others.

        Raises ``NotFound`` for an unknown source, ``BeyondHorizon`` where it has given fewer, and what ``sample`` does.
        """
        openings, _ = self._openings(None)
        view = self._coordinator.view()
        sources = view.timeline.at(view.state.sample_index).config.sources
        source_id = next((each.id for each in sources if source in (each.name, each.source)), None)
        if source_id is None:
            names = ", ".join(repr(each.name) for each in sources)
            raise NotFound(
                f"source: run {self._coordinator.name!r} has no source {source!r}; it has {names}"
            )
        first = min(opening.start_index for opening in lineage(openings))
        with self._past.admitted():
            begins, ends = (
                self._past.nearest(first).state.given(source_id),
                view.state.given(source_id),
            )
            if begins == ends or not begins <= (begins if number is None else number) < ends:
                raise BeyondHorizon(
                    f"number: source {source!r} of run {self._coordinator.name!r} has given {ends} samples that are "
                    f"committed, of which this ledger knows those from number {begins} on; found {number}"
                )
            number = begins + secrets.randbelow(ends - begins) if number is None else number
            index = self._index_of(source_id, number, first, view.state.sample_index)
        return self.sample(index, None, text)

    def _index_of(self, source_id: int, number: int, begin: int, end: int) -> int:
        """The sample index of a source's ``number``-th sample, which lies from ``begin`` on and before ``end``."""
        past, deadline = self._past, time.monotonic() + MAX_FORWARD_S
        nearest = past.nearest(begin)
        while begin + 1 < end:
            middle = (begin + end) // 2
            known = past.nearest(middle)
            if known.state.given(source_id) > number:
                end = known.state.sample_index
            else:
                begin, nearest = middle, known
        timeline, before = nearest.timeline, nearest.state
        replay = Replay(timeline, before)
        while replay.is_before(end) and replay.state().given(source_id) <= number:
            before = replay.state()
            past.remember(nearest.generation, before, timeline)
            if caller.has_gone() or time.monotonic() > deadline:
                raise ServerStopping(
                    f"sample {number} of the source was not reached in {MAX_FORWARD_S:g} s, but sample "
                    f"{before.sample_index} of the run was; ask again for number {number}"
                )
            past.turn(partial(replay.turn, end))
        pick = timeline.at(before.sample_index).config.pick_samples
        steps = -(-(replay.sample_index - before.sample_index) // pick)
        group = past.turn(partial(Replay(timeline, before).samples, pick, steps))
        places = np.flatnonzero(group.source_ids[0, : len(group.marks)] == source_id)
        return group.begin + int(places[number - before.given(source_id)])

    def micro_step(
        self, micro_step: int, rank: int | None, generation: int | None, text: bool
    ) -> TracedMicroStep:
        """A micro-step of a generation (None: the present one), counted from 0: all of it, or what a rank got.

        Raises what ``sample`` does, and ``ConfigError`` for a rank that the generation does not have.
        """
        openings, opening = self._openings(generation)
        plan = batch_plans_of(opening).at_step(micro_step)
        world, size = plan.world_size, plan.batch_size
        if rank is not None and rank >= world:
            raise ConfigError(
                f"rank is {rank}, but generation {opening.generation} has ranks 0 to {world - 1}"
            )
        begin = plan.index_of(micro_step)
        if opening is openings[-1]:
            self._check_produced(f"micro-step {micro_step}", begin, opening)
        rotation = slice_rotation(self._coordinator.order.config.seed, begin, world)
        begins = {
            each: begin + (each + rotation) % world * size
            for each in (range(world) if rank is None else (rank,))
        }
        first, count = (begin, plan.step_samples) if rank is None else (begins[rank], size)
        samples, end = self._read(first, count, generation, text)
        if end <= begin or (
            end < first + count and self._coordinator.order.config.last_micro_step == "drop"
        ):
            raise BeyondHorizon(
                f"micro-step {micro_step} of generation {opening.generation} does not exist: it would begin at sample "
                f"{begin} and have {plan.step_samples}, and the data end at sample {end}"
            )
        placed = {sample.sample: self._placed(sample, opening, openings) for sample in samples}
        ranks = []
        for each, rank_begin in begins.items():
            of_rank = [
                placed[index] for index in range(rank_begin, rank_begin + size) if index in placed
            ]
            ranks.append(TracedRank(rank=each, samples=of_rank, padding=size - len(of_rank)))
        return TracedMicroStep(
            generation=opening.generation,
            micro_step=micro_step,
            begin=begin,
            end=begin + plan.step_samples if end >= first + count else end,
            world_size=world,
            batch_size=size,
            rotation=rotation,
            ranks=ranks,
        )

    def _openings(self, generation: int | None) -> tuple[Sequence[Opening], Opening]:
        """The openings of all generations, and of the given one (None: the present one)."""
        self._coordinator.require_lead()
        openings = self._past.openings()
        if not openings:
            raise BeyondHorizon(
                f"run {self._coordinator.name!r} has delivered nothing yet: no trainer has joined it"
            )
        return openings, next(lineage(openings, generation))

    def _check_produced(self, name: str, index: int, opening: Opening) -> None:
        """That the present generation has produced what begins at a sample index. Raises ``BeyondHorizon``."""
        coordinator = self._coordinator
        view = coordinator.view()
        produced = view.commit.sample_index
        if view.generation.number == opening.generation:
            produced = max(produced, view.generation.produced_index)
        if index >= produced:
            raise BeyondHorizon(
                f"{name} of run {coordinator.name!r} was not delivered: it begins at sample {index}, and generation "
                f"{opening.generation}, which began at sample {opening.start_index}, has produced those before "
                f"{produced}; `tokenloom peek` shows what comes"
            )

    def _placed(
        self, sample: TracedSample, opening: Opening | None, openings: Sequence[Opening]
    ) -> TracedSample:
        """With the place that its generation gave it; None: that is not known here."""
        status = self._status(sample.sample, opening, openings)
        if opening is None:
            return sample.model_copy(update={"status": status})
        plan = batch_plans_of(opening).at_index(sample.sample)
        steps, in_step = divmod(sample.sample - plan.start_index, plan.step_samples)
        slice_number, place = divmod(in_step, plan.batch_size)
        rotation = slice_rotation(
            self._coordinator.order.config.seed, sample.sample - in_step, plan.world_size
        )
        rank = (slice_number - rotation) % plan.world_size
        update = {
            "generation": opening.generation,
            "status": status,
            "micro_step": plan.first_step + steps,
            "rank": rank,
            "place": place,
        }
        return sample.model_copy(update=update)

    def _status(self, index: int, opening: Opening | None, openings: Sequence[Opening]) -> Status:
        if covering(openings, index) is not opening:
            return "rewound"
        return "committed" if index < self._coordinator.committed_through else "produced"

    # --- making samples again ------------------------------------------------------------------------

    def _read(
        self, first: int, count: int, generation: int | None, text: bool
    ) -> tuple[list[TracedSample], int]:
        """Samples of the order from ``first`` on, without their places, and the index after them: there are fewer where
        the data end (perhaps before ``first``), or where samples have another length."""
        past, deadline = self._past, time.monotonic() + MAX_FORWARD_S
        with past.admitted():
            nearest = past.nearest(first, generation)
            config = nearest.timeline.at(first).config
            _check_tokens(count, config.sequence_length, text)
            replay = Replay(nearest.timeline, nearest.state)
            past.forward(
                replay,
                first - first % config.pick_samples,  # of a run of batches whole ones are made
                generation=nearest.generation,
                out_of_time=lambda: time.monotonic() > deadline,
            )
            samples = self._explained(replay, first, count, text)
        return samples, min(replay.sample_index, first + count)

    def _explained(self, replay: Replay, first: int, count: int, text: bool) -> list[TracedSample]:
        """Samples from ``first`` on, as far as a replay gives them, which stands there or shortly before."""
        past, traced, decode = (
            self._past,
            dict[int, TracedSample](),
            self._decode() if text else None,
        )
        for group in past.in_turns(replay.groups(first + count)):
            # Reading the rows of one source again takes no longer than making the samples.
            for samples in past.in_turns(
                explain(replay.timeline.at(group.begin), group, decode, text)
            ):
                traced |= {sample.sample: sample for sample in samples}
                _check_documents(count, traced.values())
        return [traced[index] for index in sorted(traced) if first <= index < first + count]

    def _decode(self) -> Decode | None:
        """Ids to text; None where the run has no tokeniser. Loaded once: a large vocabulary takes a second."""
        definition = self._coordinator.order.record.tokenizer
        if definition is None:
            return None
        with self._decoder_lock:
            if self._decoder is None:
                self._decoder = (
                    bytes_decoder() if definition.is_bytes else load_decoder(definition.content)
                )
            return self._decoder


def _check_tokens(count: int, length: int, text: bool) -> None:
    """That one trace may tell of so many samples of a length. Raises ``LimitExceeded``."""
    most = MAX_TEXT_TOKENS if text else MAX_TOKENS
    if count > 1 and count * length > most:
        raise LimitExceeded(
            f"{count} samples have {count * length} tokens, and one trace tells of {most} at most"
            f"{' with their text' if text else ''}: ask for one rank of the micro-step, or for a sample"
        )


def _check_documents(count: int, traced: Iterable[TracedSample]) -> None:
    """That one trace may tell of the documents of so many samples. Raises ``LimitExceeded``."""
    if count > 1 and sum(len(sample.documents) for sample in traced) > MAX_DOCUMENTS:
        raise LimitExceeded(
            f"{count} samples have more than {MAX_DOCUMENTS} documents, and one trace tells of no more: ask for one "
            "rank of the micro-step, or for a sample"
        )


#: How many ids before a part of a document are decoded with it: more than any character has.
CONTEXT_IDS = 8


class SourceSamples(NamedTuple):
    """The samples of one source in a group of one rank and one pick a step: the state of the source before them, and
    which micro-steps of the group they are."""

    source: int
    state: SourceState
    steps: Sequence[int]


def explain(
    factory: PipelineFactory, group: StepGroup, decode: Decode | None, with_text: bool
) -> Iterator[list[TracedSample]]:
    """The samples of a group, of one rank and one pick a micro-step, source by source, with their documents and without
    their places: those are a generation's.

    ``with_text``: their ids come too, and with ``decode`` the text. Raises ``OrderMismatch`` where the rows have other
    tokens than the samples, and what reading them raises.
    """
    explained = _of_tokens if factory.config.batching is None else _of_rows
    picks = group.source_ids[0, : len(group.marks), 0]
    for source in np.unique(picks).tolist():
        steps = np.flatnonzero(picks == source).tolist()
        samples = SourceSamples(source, group.base.sources[source], steps)
        yield explained(factory, group, samples, decode, with_text)


def _of_tokens(
    factory: PipelineFactory,
    group: StepGroup,
    samples: SourceSamples,
    decode: Decode | None,
    with_text: bool,
) -> list[TracedSample]:
    source, paths = samples.source, factory.record.shard_paths[samples.source]
    explained = []
    spans_by_sample = factory.spans(source, samples.state, len(samples.steps))
    for number, step in enumerate(samples.steps):
        spans = next(spans_by_sample, [])
        travelling = group.ids(0, step, step + 1)[0]
        ids = factory.form.ids(travelling)
        ids_again = np.concatenate([span.ids for span in spans]) if spans else ids[:0]
        if not np.array_equal(ids, ids_again):
            raise OrderMismatch(
                f"sample {group.begin + step} of run {factory.name!r} has other tokens than its rows of "
                f"{factory.record.specs[source]!r} when they are read again: the data or the tokeniser changed just now"
            )
        documents, begin = [], factory.form.begin(len(ids))
        position, labels = begin, _labels(factory, group, step)
        for span in spans:
            counted = labels[position - begin :][: len(span.ids)]
            documents.append(
                TracedDocument.of(
                    span,
                    position=position,
                    shard=paths[span.shard],
                    shard_index=span.shard,
                    fim=span.middle,
                    text=decode(span.ids.tolist()) if decode is not None else None,
                    parts=_parts(span.ids.tolist(), counted, decode)
                    if with_text and not counted.all()
                    else None,
                )
            )
            position += len(span.ids)
        explained.append(
            _traced(
                factory,
                samples,
                number,
                travelling,
                sample=group.begin + step,
                tokens=factory.config.sequence_length,
                digest=digest_hex(group.marks[step].digest),
                documents=documents,
                ids=ids.tolist() if with_text else None,
            )
        )
    return explained


def _labels(factory: PipelineFactory, group: StepGroup, step: int) -> Mask:
    """Which ids of a micro-step's only sample count for the loss, 0 or 1 for each; of its first that is not decided."""
    labels = factory.form.loss_mask(group.ids(0, step, step + 1)[0]).copy()
    if factory.config.mask_boundaries:
        _, starts = group.document_starts(0, step, step + 1)
        positions = starts.astype(np.int64) - factory.form.begin(len(labels))
        labels[positions[(positions > 0) & (positions < len(labels))]] = 0
    return labels


def _parts(ids: list[int], counted: Mask, decode: Decode | None) -> list[TracedPart]:
    """The parts of a document's ids that count for the loss, and that do not."""
    parts = []
    for begin, end in pairwise([0, *(np.flatnonzero(np.diff(counted)) + 1).tolist(), len(ids)]):
        text = None
        if decode is not None:
            # Decoders leave out a first blank, so some of what stands before it is decoded, too, and taken away.
            before = ids[max(0, begin - CONTEXT_IDS) : begin]
            text = decode(before + ids[begin:end])[len(decode(before)) :]
        parts.append(TracedPart(tokens=end - begin, counts=bool(counted[begin]), text=text))
    return parts


def _of_rows(
    factory: PipelineFactory,
    group: StepGroup,
    samples: SourceSamples,
    decode: Decode | None,
    with_text: bool,
) -> list[TracedSample]:
    """Samples that are rows, by the batches that they came in."""
    source, epochs = samples.source, factory.readers.bucket_epochs(samples.source)
    paths, size = factory.record.shard_paths[source], epochs.size
    cursor = (
        samples.state.cursor if isinstance(samples.state.cursor, EpochCursor) else EpochCursor(0, 0)
    )
    epoch, number = cursor.epoch, cursor.rows // size
    explained = []
    for batch_number, step in enumerate(samples.steps):
        while number == epochs.count(epoch):
            epoch, number = epoch + 1, 0
        shards, rows = epochs.rows_of(epoch, number)
        number += 1
        batch = group.batch_of(step)
        digest = group.marks[step - 1].digest if step else group.base.digest
        for place, travelling in enumerate(group.ids(0, step, step + 1)):
            digest = (
                digest * DIGEST_MULTIPLIER + xxhash.xxh3_128_intdigest(travelling, source)
            ) % DIGEST_MODULUS
            row = {"bucket": batch.bucket, **described(batch, travelling)} if with_text else None
            document = TracedDocument(
                position=0,
                shard=paths[int(shards[place])],
                shard_index=int(shards[place]),
                row=int(rows[place]),
                epoch=epoch,
                begin=0,
                end=1,
                row_tokens=1,
                text=json.dumps(row, ensure_ascii=False) if row is not None else None,
            )
            explained.append(
                _traced(
                    factory,
                    samples,
                    batch_number * size + place,
                    travelling,
                    sample=group.begin + step * size + place,
                    tokens=1,
                    digest=digest_hex(digest),
                    documents=[document],
                )
            )
    return explained


def _traced(
    factory: PipelineFactory, samples: SourceSamples, number: int, travelling: Any, **fields: Any
) -> TracedSample:
    """The sample of that number among these, from 0, whose ids travel so."""
    config = factory.config.sources[samples.source]
    return TracedSample(
        generation=0,
        status="committed",
        micro_step=None,
        rank=None,
        place=None,
        source_id=samples.source,
        source=config.name,
        spec=config.source,
        source_sample=samples.state.samples + number,
        hash=f"{xxhash.xxh3_128_intdigest(travelling, samples.source):032x}",
        **fields,
    )
