"""A run that begins where another one stands: branches off one checkpoint, with another mixture if wanted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from tokenloom_proto.seal import canonical

from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import FileCursor, SourceState, State, begun_again
from tokenloom_server.errors import JoinRefused, SnapshotInvalid
from tokenloom_server.mixing.elsewhere import forked
from tokenloom_server.order import foreign_payload, snapshot
from tokenloom_server.order.builder import moves_parts
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.notes import position_line
from tokenloom_server.order.returning import returning
from tokenloom_server.order.segments import Origin
from tokenloom_server.order.snapshot import ForeignSnapshot
from tokenloom_server.order.state_document import all_skips
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.resume_points import ResumePoints
from tokenloom_server.sources.scheme import scheme_of

_log = logging.getLogger(__name__)

#: A field, its value in the other run, and in this one.
_Compared = tuple[str, object, object]
_OR_BEGIN = ", or write the spec in another way to begin it anew"


class ForkHandler:
    """Forks of other runs into one that has not begun. Thread-safe."""

    def __init__(
        self,
        coordinator: RunCoordinator,
        points: ResumePoints,
        parent: Callable[[str], ResumePoints | None],
    ) -> None:
        """``parent`` finds a run that this server serves, by name."""
        self._coordinator = coordinator
        self._points = points
        self._parent = parent

    def fork(self, text: str | bytes) -> str:
        """The snapshot of this run at the place that another run's snapshot names; an older data loader's payload as it
        is.

        Cursors of the sources that both have stay, exactly; the others begin at their first row. Sample index, tokens
        and rolling digest go on. Raises ``SnapshotInvalid`` for what cannot be carried over, ``JoinRefused`` where
        this run has begun.
        """
        if foreign_payload.read(text) is not None:
            # It is of no run, so a run begins there as it does where it is loaded.
            return text if isinstance(text, str) else text.decode()
        coordinator = self._coordinator
        foreign = snapshot.read_foreign(text)
        if foreign is None:
            raise SnapshotInvalid(
                "the state is of a run that has not begun: there is nothing to fork"
            )
        if foreign.run == coordinator.name:
            raise SnapshotInvalid(
                f"the state is of run {foreign.run!r} itself: load it with load_state_dict, or give the fork another "
                "name in its mixture file"
            )
        with coordinator.one_change:
            epoch = coordinator.lease.epoch
            stored = coordinator.ledger.read_run(coordinator.name, coordinator.stream)
            begun = stored is not None and stored.opening is not None
            origin = coordinator.timeline.origin
            if origin is None or not _is_at(origin, foreign):
                if begun:
                    raise JoinRefused(
                        f"run {coordinator.name!r} has begun already, and not from sample {foreign.sample_index} of "
                        f"{foreign.run!r}: a fork is a new run; give it another name in its mixture file"
                    )
                origin = self._origin(text, foreign)
                coordinator.changes.adopt(epoch, coordinator.timeline.with_origin(origin))
            return self._points.snapshots.seal(
                coordinator.timeline.decode(origin.state), 0, origin.state
            )

    def _origin(self, text: str | bytes, foreign: ForeignSnapshot) -> Origin:
        """Where this run begins; its state is that of the other run's sources as far as this run has them."""
        coordinator = self._coordinator
        self._refuse_other_tokens(foreign)
        theirs, same = self._sources(text, foreign)
        parent = self._parent(foreign.run) if same is not None else None
        if same is None:
            self._refuse_other_batches(foreign)
        ours = {source.source for source in coordinator.order.config.sources}
        kept = [source for source in theirs.sources if source["spec"] in ours]
        clock_offset = foreign.state.clock_offset
        skips = dict(
            parent.timeline.skips if parent is not None else all_skips(foreign.resume_state)
        )
        # The other run may have skipped at this sample since the snapshot was taken.
        skips |= {skip.sample_index: skip.samples for skip in theirs.state.skips}
        origin = Origin(
            run=foreign.run,
            uid=foreign.run_uid or "",
            generation=foreign.generation or 0,
            sample_index=foreign.sample_index,
            total_tokens=foreign.total_tokens,
            digest=foreign.digest,
            # Those of the run that theirs was forked from are among them.
            left_samples=foreign.sample_index
            + sum(skip.samples for skip in theirs.state.skips)
            - sum(source["samples"] for source in kept),
            left_tokens=foreign.total_tokens
            + sum(skip.tokens for skip in theirs.state.skips)
            - clock_offset
            - sum(source["token_offset"] for source in kept),
            skips=sorted(skips.items()),
        )
        timeline = coordinator.timeline.with_origin(origin).with_clock(clock_offset)
        state = (
            same
            if same is not None
            else replace(_transplanted(timeline, origin, theirs), skips=theirs.state.skips)
        )
        return replace(origin, state=timeline.encode(state))

    def _refuse_other_tokens(self, foreign: ForeignSnapshot) -> None:
        ours = self._coordinator.template()["tokenizer"]
        theirs = foreign.tokenizer or {}
        if theirs.get("digest") == ours["digest"] and "none" in (
            theirs.get("engine"),
            ours["engine"],
        ):
            return  # in one of them every source holds ids, and so do those that both have
        if theirs != ours:
            raise SnapshotInvalid(
                f"the state's tokenizer is {theirs}, this run's is {ours}: places within documents are "
                "counted in tokens, so a fork needs the same tokeniser and engine"
            )

    def _refuse_other_batches(self, foreign: ForeignSnapshot) -> None:
        """A place among batches from buckets is one only where these are made in the same way."""
        parent, ours = self._parent(foreign.run), self._coordinator.order
        if ours.config.batching is None:
            return
        if parent is None:
            raise SnapshotInvalid(
                f"whether run {foreign.run!r} made its batches as this one does is not known: serve its mixture file "
                "with this server, too (tokenloom serve A.yaml B.yaml)"
            )
        theirs = parent.timeline.at(foreign.sample_index)
        _refuse_difference(
            theirs,
            ours,
            _of_batches(theirs, ours),
            "its batches would be others, and a place among them another one; make them the same",
        )

    def _sources(
        self, text: str | bytes, foreign: ForeignSnapshot
    ) -> tuple[ForeignSnapshot, State | None]:
        """The snapshot, with where the other run's sources stand at its sample index; and its state, where this run has
        the same rules."""
        coordinator = self._coordinator
        ours = coordinator.template()
        fields = (foreign.config_digest, foreign.manifest_digest)
        carries = foreign.origin or not all("skips" in content for _, content in foreign.revisions)
        plain = fields == (ours["config_digest"], ours["manifest_digest"]) and not carries
        same = plain and not coordinator.timeline.revisions
        parent = self._parent(foreign.run)
        if parent is not None:
            state = parent.forward(parent.parse(text))
            theirs = parent.timeline.at(state.sample_index)
            _refuse_other_documents(theirs, coordinator.order)
            return foreign.at(state, theirs.record.shape), state if same else None
        if same:
            point = snapshot.parse(
                text,
                {**ours, "run": foreign.run},
                coordinator.timeline.shape_at,
                coordinator.order.config,
            )
            skipping = coordinator.timeline.skipping(
                all_skips(foreign.resume_state), foreign.sample_index
            )
            state = self._points.forward(point, timeline=skipping)
            return foreign.at(
                state, coordinator.timeline.shape_at(state.sample_index, state.clock_offset)
            ), state
        state_index = foreign.state.sample_index
        if state_index == foreign.sample_index:
            for source in foreign.sources:
                drawn = "shuffle" in source or "lanes" in source
                if (
                    drawn
                    and source["spec"] in coordinator.timeline.at(foreign.sample_index).record.specs
                ):
                    raise SnapshotInvalid(
                        f"source {source['spec']!r} is shuffled in run {foreign.run!r}, so where it stands means "
                        "something under that run's mixture only: serve its mixture file with this server, too "
                        "(tokenloom serve A.yaml B.yaml)"
                    )
            return foreign, None
        raise SnapshotInvalid(
            f"the state tells where the sources of run {foreign.run!r} stood at sample {state_index}, and to go "
            f"forward to sample {foreign.sample_index} takes that run's mixture: serve its mixture file with this "
            "server, too (tokenloom serve A.yaml B.yaml)"
        )


def _refuse_other_documents(theirs: PipelineFactory, ours: PipelineFactory) -> None:
    """Where a document's tokens begin and end has to be the same, or a place within one is another."""
    for known, source in _in_both(theirs, ours):
        if not (known.in_file_order and source.in_file_order):
            says = "it is shuffled, and its rows would come in another order; make them the same"
            _refuse_difference(
                theirs, ours, _of_shuffling(theirs, known, ours, source), says + _OR_BEGIN
            )
        epochs = theirs.config.epochs[known.id], ours.config.epochs[source.id]
        if source.lanes > 1 and moves_parts(*epochs):
            says = f"its {source.lanes} lanes share the rows of an epoch, and have begun on their parts; make them the "
            compared = f"source {source.source!r}: epochs", f"{epochs[0]:.15g}", f"{epochs[1]:.15g}"
            _refuse_difference(theirs, ours, [compared], f"{says}same or both whole{_OR_BEGIN}")
        says = "places within documents would be others; make them the same"
        _refuse_difference(
            theirs, ours, _of_documents(theirs, known, ours, source), says + _OR_BEGIN
        )


def _refuse_difference(
    theirs: PipelineFactory, ours: PipelineFactory, values: Iterable[_Compared], says: str
) -> None:
    """Raises ``SnapshotInvalid`` naming the first value that differs; ``says``: what that would mean, what to do."""
    for field, before, now in values:
        if before != now:
            raise SnapshotInvalid(
                f"{field} is {before} in run {theirs.name!r} and {now} in {ours.name!r}: {says}"
            )


def _in_both(
    theirs: PipelineFactory, ours: PipelineFactory
) -> Iterator[tuple[SourceConfig, SourceConfig]]:
    """The sources that both runs have, each as the one and as the other has it."""
    known = {source.source: source for source in theirs.config.sources}
    return (
        (known[source.source], source) for source in ours.config.sources if source.source in known
    )


def _of_batches(theirs: PipelineFactory, ours: PipelineFactory) -> Iterator[_Compared]:
    """What decides which samples are in a batch from buckets."""
    for field in ("batching", "global_batch_size", "seed"):
        yield field, getattr(theirs.config, field), getattr(ours.config, field)
    for known, source in _in_both(theirs, ours):
        # The buckets of a source's batches are drawn by its number.
        yield f"{source.source!r}: place in the mixture (source id)", known.id, source.id
        yield (
            f"{source.source!r}: files",
            theirs.record.shards[known.id],
            ours.record.shards[source.id],
        )


def _of_documents(
    theirs: PipelineFactory, known: SourceConfig, ours: PipelineFactory, source: SourceConfig
) -> Iterator[_Compared]:
    """What decides which tokens a source's documents have."""
    of_source = f"source {source.source!r}: "
    yield of_source + "add_bos", theirs.config.adds_bos(known), ours.config.adds_bos(source)
    yield of_source + "add_eot", theirs.config.adds_eot(known), ours.config.adds_eot(source)
    for field in (
        "filter",
        "template",
        "chat_tools",
        "chat_format",
        "loss_on",
        "transform",
        "fim",
        "holdout",
        "seen",
    ):
        yield of_source + field, getattr(known, field), getattr(source, field)
    code = [
        factory.record.manifest.transforms.get(source.transform or "") for factory in (theirs, ours)
    ]
    yield of_source + "code of transform", code[0], code[1]
    if source.fim is not None or source.holdout is not None:
        # What the parts of each document are is drawn by these; and by the seed which of them are held out.
        yield of_source + "seed", theirs.config.seed, ours.config.seed
    if source.fim is not None:
        yield of_source + "place in the mixture (source id)", known.id, source.id
    if scheme_of(source.spec).splits_at_end_of_text:
        yield of_source + "end_of_text_id", theirs.record.end_of_text_id, ours.record.end_of_text_id


def _of_shuffling(
    theirs: PipelineFactory, known: SourceConfig, ours: PipelineFactory, source: SourceConfig
) -> Iterator[_Compared]:
    """What draws the order of a shuffled source's rows."""
    of_source = f"source {source.source!r}: "
    for field in ("shuffle", "shuffle_window_rows", "lanes"):
        yield of_source + field, getattr(known, field), getattr(source, field)
    yield of_source + "seed", theirs.config.seed, ours.config.seed
    yield of_source + "place in the mixture (source id)", known.id, source.id
    before_files, files = theirs.record.shards[known.id], ours.record.shards[source.id]
    if source.shuffle == "shards" and source.lanes == 1:
        files = files[: len(before_files)]  # those after them have a turn of their own
    yield (
        of_source + "files",
        [shard.path for shard in before_files[:5]],
        [shard.path for shard in files[:5]],
    )
    fingerprints = (
        {shard.fingerprint for shard in before_files},
        {shard.fingerprint for shard in files},
    )
    yield of_source + "files' fingerprints", *fingerprints


def _is_at(origin: Origin, foreign: ForeignSnapshot) -> bool:
    there = (foreign.run, foreign.run_uid or "", foreign.sample_index, foreign.digest)
    return (origin.run, origin.uid, origin.sample_index, origin.digest) == there


def _transplanted(timeline: Timeline, origin: Origin, foreign: ForeignSnapshot) -> State:
    """The other run's sources as this run has them; those of both that this run lacks are preserved. Raises
    ``SnapshotInvalid`` naming a file that it lacks."""
    factory = timeline.at(origin.sample_index)
    theirs = {
        entry["spec"]: (entry, source)
        for entry, source in zip(foreign.sources, foreign.state.sources, strict=True)
    }
    # Also one of which rows were read, and no sample is of this run.
    left = [
        canonical({**entry, "left_by": origin.run})
        for spec, (entry, source) in theirs.items()
        if spec not in factory.record.specs and source.cursor is not None
    ]
    preserved = [*foreign.state.preserved, *left]
    sources: list[SourceState] = []
    for spec, shards in zip(factory.record.specs, factory.record.shard_paths, strict=True):
        if spec not in theirs:
            sources.append(SourceState())
            continue
        entry, source = theirs[spec]
        shard = entry.get("shard")
        if shard is not None and shard not in shards:
            raise SnapshotInvalid(
                f"source {spec!r} stands in {shard!r}, which is not among this run's files of it "
                f"({', '.join(shards[:5])}{', …' if len(shards) > 5 else ''}): put the file back, or write the spec in "
                "another way to begin it anew"
            )
        is_packed = any("packed_samples" in each for each in (entry, *entry.get("lanes", ())))
        is_drawn = "shuffle" in entry or "lanes" in entry
        if is_packed and is_drawn and factory.config.packing != "best_fit":
            raise SnapshotInvalid(
                f"source {spec!r} is read in a drawn order and packed by best fit, and no other packing can name "
                "where it stands: fork with packing: best_fit, or write the spec in another way to begin it anew"
            )
        if is_packed or factory.config.packing == "best_fit":
            # Rows that are packed together, or a row that has begun, have other samples under these rules.
            source = begun_again(source)
        if isinstance(source.cursor, FileCursor) and shard is not None:
            source = replace(source, cursor=replace(source.cursor, shard=shards.index(shard)))
        # Whether it is out is for this run's own epochs to say: the next pick finds it.
        sources.append(replace(source, exhausted=False, dropped_tokens=0))
    try:
        # Those of later phases are found out now, too, and not when they are in force.
        _, back = returning(preserved, timeline.segments[-1].factory), returning(preserved, factory)
    except SnapshotInvalid as error:
        raise SnapshotInvalid(f"{error}{_OR_BEGIN}") from None
    for one in back:
        preserved.remove(one.entry)
        sources[one.source] = one.carried(SourceState())
        line = position_line(
            factory.record.specs[one.source],
            sources[one.source],
            factory.record.shard_paths[one.source],
        )
        _log.info("resume: %s (preserved by run %r)", line, origin.run)
    return State(
        sample_index=origin.sample_index,
        total_tokens=origin.total_tokens,
        digest=int(origin.digest, 16),
        sources=tuple(sources),
        nodes=forked(factory.config, sources),
        preserved=tuple(preserved),
        clock_offset=timeline.clock_offset,
    )
