"""From a run's record and a state to the pipeline that goes on from there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any, TypeVar

from tokenloom_proto.threads import pool

from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import SourceState, State
from tokenloom_server.order.exclusions import with_seen
from tokenloom_server.order.pipeline import Pipeline, Switch, initial_state
from tokenloom_server.order.readers import SourceReaders
from tokenloom_server.order.record import RunRecord
from tokenloom_server.order.resources import Readers, RunResources
from tokenloom_server.packing.base import DocumentPacker, Packer, PackerFactory
from tokenloom_server.packing.best_fit import BestFitPacker, Window
from tokenloom_server.packing.buckets import BucketPacker
from tokenloom_server.packing.concat import ConcatPacker
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.fim import FillInMiddle
from tokenloom_server.packing.lanes import LanesPacker, lane_state
from tokenloom_server.packing.real_tokens import RealTokens
from tokenloom_server.packing.samples import SampleFormat
from tokenloom_server.packing.tokenized_rows import DocumentSpan
from tokenloom_server.packing.unpacked import UnpackedPacker
from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.wrapped import SourceWithLossMask, TimedSource
from tokenloom_server.storage.urls import is_remote
from tokenloom_server.tokenizer.documents import (
    DocumentEncoder,
    Encoder,
    MaskedEncoder,
    ReadyEncoder,
)
from tokenloom_server.tokenizer.engine import TokenizersEngine
from tokenloom_server.workers.chats import RenderedEncoder
from tokenloom_server.workers.crashes import CrashGuard, EngineDescription
from tokenloom_server.workers.threads import (
    OPENING_THREADS,
    LazyPacker,
    Pools,
    ReadAhead,
    block_threads,
)
from tokenloom_server.workers.transforms import TransformEncoder

#: Texts of a source that are encoded together, about, and of all sources: what lies ready in tokens has half of it,
#: twice for each source.
JOINED_BYTES = 1 << 22
ALL_JOINED_BYTES = 1 << 26

#: Ids that all sources together have ready at most, about: each has its part of them, of which samples are made.
ALL_CHUNK_TOKENS = 1 << 28

_Documents = TypeVar("_Documents", bound=Documents)


class PipelineFactory:
    """Makes pipelines, and their parts, from one record. They are independent of each other."""

    def __init__(self, record: RunRecord, resources: RunResources, *, apart: bool = False) -> None:
        self._apart = apart
        self.record = record
        self.resources = resources
        self.readers = SourceReaders(record, resources)
        #: How samples travel.
        self.form = self._sample_format()
        #: Lanes of all sources, each of which is read by itself.
        self._lanes = sum(source.lanes for source in record.config.sources)

    @property
    def config(self) -> RunConfig:
        return self.record.config

    @property
    def name(self) -> str:
        """The run's."""
        return self.record.name

    def with_record(self, record: RunRecord) -> PipelineFactory:
        """A factory for another record of the same run, with the same resources."""
        return type(self)(record, self.resources)

    def initial(self) -> State:
        """The state before sample 0."""
        return initial_state(self.config)

    def pipeline(
        self, state: State, *, ahead: bool = False, switches: Sequence[Switch] = ()
    ) -> Pipeline:
        """A new pipeline that goes on from a state. Opens files only as they are read. ``ahead``: blocks of text
        are made in the background before they are asked for, so that sources are tokenised side by side."""
        return Pipeline(
            self.config,
            self.packers(ahead=ahead),
            state,
            sample_bytes=self.form.sample_bytes,
            real=self.real_tokens(),
            switches=switches,
            size_estimates=self.record.size_estimates,
        )

    def sample_form(self) -> dict[str, Any]:
        """What a model has to fit, as a run's stats and the answer to a Join name it."""
        return {
            "sequence_length": self.config.sequence_length,
            "vocab_size": self.record.vocab_size,
            "pad_id": self.config.pad_id,
            "end_of_text_id": self.record.end_of_text_id,
        }

    def real_tokens(self) -> RealTokens:
        """What counts the tokens and labels of samples."""
        of_rows = self.config.batching is not None
        return RealTokens(self.form, mask_boundaries=self.config.mask_boundaries, of_rows=of_rows)

    def packers(self, *, ahead: bool = False) -> PackerFactory:
        """What makes the packers of one pipeline."""
        if self.config.batching is not None:
            return self._bucket_packer
        has_engine, readers = (
            self.resources.engine(self.record) is not None,
            self.resources.readers if ahead else None,
        )
        remote = [any(is_remote(shard.path) for shard in shards) for shards in self.record.shards]
        # Those of one pipeline, and gone with it.
        pools = None
        if ahead and (has_engine or any(remote)):
            pools = Pools(
                pool(OPENING_THREADS, "open", self.name),
                pool(block_threads(waits=any(remote) or readers is not None), "ahead", self.name),
            )

        def packer(source_id: int, source_state: SourceState) -> Packer:
            if remote[source_id]:
                return LazyPacker(
                    lambda: self._packer(
                        source_id, source_state, self.readers.open(source_id), readers
                    ),
                    pools,
                )
            reader = self.readers.open(source_id)
            packed = self._packer(source_id, source_state, reader, readers)
            # Ids of local files are read so fast that a second thread would only cost memory.
            return (
                ReadAhead(packed, pools.blocks)
                if pools and reader.content is Content.TEXT
                else packed
            )

        return packer

    def spans(self, source_id: int, state: SourceState, count: int) -> Iterator[list[DocumentSpan]]:
        """What each of a source's next ``count`` samples after a state is made of, by reading their rows again."""
        return self._packer(source_id, state, self.readers.open(source_id)).spans(count)

    def check_columns(self, first: int = 0) -> None:
        """Raises ``ConfigError`` or ``TokenizerError`` where nothing says which tokens of a source, of those from
        ``first`` on, count for the loss, though the config asks for it; and where one with ``transform`` has no texts.
        """
        self.readers.check_columns(first)
        for source in self.config.sources[first:]:
            if source.is_rendered:
                self.resources.renderer(self.record, source)

    def apart(self) -> PipelineFactory:
        """A factory with which each text is encoded in a process of its own, which may die of it."""
        return PipelineFactory(self.record, self.resources, apart=True)

    def documents(
        self, source_id: int, reader: Source | None = None, *, joined: bool = True
    ) -> Documents:
        """A source's documents as tokens, just as a pipeline reads them; not ``joined``: a piece of text at a time."""
        return self._documents(source_id, reader or self.readers.open(source_id), joined=joined)

    def all_rows(
        self, kind: type[_Documents], source_id: int, reader: Source, *, joined: bool
    ) -> _Documents:
        """The rows of a source's files as tokens, file by file: none left out or rearranged, any number of them bad."""
        source = self.config.sources[source_id]
        return kind(
            source.source,
            self.readers.kept(source_id, reader),
            self.encoder(source_id, reader),
            math.inf,
            joined_bytes=self._joined_bytes(source) if joined else 0,
            joins_at_once=True,
        )

    def max_bad_rows(self, source_id: int) -> int | None:
        """How many bad rows a source may have for each epoch; None for any number, or where the first is an error."""
        source = self.config.sources[source_id]
        most = source.max_bad_rows if source.max_bad_rows is not None else self.config.max_bad_rows
        return most if self.config.skips_bad_rows(source) else None

    # -------------------------------------------------------------------------------------------------

    def _sample_format(self) -> SampleFormat:
        config = self.config
        if config.batching is None:
            width = config.sequence_length + (config.labels == "shifted")
        else:
            # Rows that are tensors travel as bytes, about so many a row.
            width = max(self.readers.features(i).sample_bytes() for i in range(len(config.sources)))
        return SampleFormat(
            length=config.sequence_length,
            width=width,
            dtype=self.record.dtype,
            lengths=config.packing != "concat" or config.tail == "pad",
            masked=self.record.has_loss_mask,
            padding=config.padding,
            pad_id=config.pad_id,
        )

    def _bucket_packer(self, source_id: int, source_state: SourceState) -> Packer:
        assert self.config.batching is not None
        return BucketPacker(
            self.record.specs[source_id],
            self.readers.features(source_id),
            self.readers.bucket_epochs(source_id),
            source_state,
            source_id=source_id,
            batching=self.config.batching,
        )

    def _packer(
        self, source_id: int, state: SourceState, reader: Source, readers: Readers | None = None
    ) -> DocumentPacker:
        lanes = self.config.sources[source_id].lanes
        if lanes == 1:
            return self._lane(source_id, state, reader, readers)
        packers = [
            self._lane(source_id, lane_state(state, i), reader, readers, (i, lanes))
            for i in range(lanes)
        ]
        return LanesPacker(packers, state)

    def _lane(
        self,
        source_id: int,
        state: SourceState,
        reader: Source,
        readers: Readers | None,
        lane: tuple[int, int] = (0, 1),
    ) -> DocumentPacker:
        config = self.config
        documents = self._documents(
            source_id, reader, state.row_counts.bad_rows, lane, readers=readers
        )
        match config.packing:
            case "concat":
                return ConcatPacker(
                    documents,
                    state,
                    source_id=source_id,
                    form=self.form,
                    pads=config.tail == "pad",
                    label_starts=config.mask_boundaries,
                )
            case "best_fit":
                return BestFitPacker(
                    documents,
                    state,
                    source_id=source_id,
                    form=self.form,
                    window=Window(config.pack_window_rows, config.pack_window_tokens),
                    seed=config.seed,
                    closed_before=self._closed_before(source_id),
                )
            case "none":
                return UnpackedPacker(
                    documents,
                    state,
                    source_id=source_id,
                    form=self.form,
                    splits=config.long_rows == "split",
                )

    def _closed_before(self, source_id: int) -> frozenset[int]:
        source = self.config.sources[source_id]
        if source.shuffle != "none" or source.lanes > 1:
            # In a drawn order nothing is appended (see ``builder.under``).
            return frozenset()
        return self.record.earlier_file_counts.get(source_id, frozenset())

    def _documents(
        self,
        source_id: int,
        reader: Source,
        bad_rows: int = 0,
        lane: tuple[int, int] = (0, 1),
        *,
        joined: bool = True,
        readers: Readers | None = None,
    ) -> Documents:
        source = self.config.sources[source_id]
        ready = None
        if readers is not None:
            ready = readers.source(self.record, self.resources, source_id, reader)
        rows, encoder = (
            (ready, ReadyEncoder()) if ready is not None else self._read_here(source_id, reader)
        )
        excluded = self.record.excluded.of(source.source)
        seen = self.readers.seen(source_id, reader)
        return Documents(
            source.source,
            rows,
            encoder,
            self.config.epochs[source_id],
            excluded,
            self.readers.reading(source_id, reader),
            lane,
            bad_rows=bad_rows,
            max_bad_rows=self.max_bad_rows(source_id),
            fim=self._fim(source),
            may_be_empty=self.record.gives_held_out,
            left_out_first=with_seen(excluded, seen) if seen else None,
            joined_bytes=self._joined_bytes(source) if joined else 0,
            chunk_tokens=ALL_CHUNK_TOKENS // self._lanes,
            announce=ready.announce if ready is not None else None,
        )

    def _read_here(self, source_id: int, reader: Source) -> tuple[Source, Encoder]:
        """A source's rows as this process reads them, and what makes tokens of them."""
        source, io_stats = self.config.sources[source_id], self.resources.io_stats
        timed: Source = TimedSource(reader, io_stats, source.spec)
        encoder = self.encoder(source_id, reader)
        if source.loss_mask is not None:
            mask = TimedSource(
                self.readers.open_mask(source_id, reader, source.loss_mask), io_stats, source.spec
            )
            timed = SourceWithLossMask(timed, mask)
            encoder = MaskedEncoder(
                encoder, source.loss_mask, adds_bos=self.config.adds_bos(source)
            )
        return self.readers.kept(source_id, timed), encoder

    def _joined_bytes(self, source: SourceConfig) -> int:
        """Not where a transform has a limit for each call, nor where `tokenizers` encodes, as it does conversations: it
        takes 35 bytes of memory for each of the text meanwhile, and a call's fixed cost is nothing beside it."""
        engine = self.record.serving_engine
        if (
            source.transform is not None
            or source.is_rendered
            or (engine and engine.engine == TokenizersEngine.name)
        ):
            return 0
        return min(JOINED_BYTES, ALL_JOINED_BYTES // self._lanes)

    def _fim(self, source: SourceConfig) -> FillInMiddle | None:
        if source.fim is None:
            return None
        ids = source.fim.ids
        return FillInMiddle(
            rate=source.fim.rate,
            spm_rate=source.fim.spm_rate,
            prefix_id=ids.prefix,
            middle_id=ids.middle,
            suffix_id=ids.suffix,
            seed=self.config.seed,
            source_id=source.id,
            bos_id=self.record.begin_of_text_id,
            eot_id=self.record.end_of_text_id,
        )

    def encoder(self, source_id: int, reader: Source) -> Encoder:
        """What makes tokens of a source's rows, for a reader of it."""
        encoder, name = self._encoder(source_id, reader), self.config.sources[source_id].transform
        return (
            encoder if name is None else TransformEncoder(self.resources.transform(name), encoder)
        )

    def _encoder(self, source_id: int, reader: Source) -> Encoder:
        record, config = self.record, self.config
        source, engine = config.sources[source_id], self.resources.engine(record)
        encoder = partial(
            DocumentEncoder,
            vocab_size=record.vocab_size,
            bos_id=record.begin_of_text_id if config.adds_bos(source) else None,
            eot_id=record.end_of_text_id if config.adds_eot(source) else None,
            ends_once=config.adds_eot(source) == "auto",
            skip_bad=config.skips_bad_rows(source),
        )
        if source.is_rendered:
            masked = MaskedEncoder(
                encoder(None), source.spec.column, adds_bos=config.adds_bos(source)
            )
            renderer = self.resources.renderer(record, source)
            return RenderedEncoder(renderer, masked, skip_bad=config.skips_bad_rows(source))
        crash_records = None if self._apart else self.resources.crash_records(record)
        is_guarded = self._apart or crash_records is not None
        if (
            engine is None
            or record.serving_engine is None
            or reader.content is not Content.TEXT
            or not is_guarded
        ):
            return encoder(engine)
        assert config.tokenizer is not None
        description = EngineDescription(
            config.tokenizer,
            str(self.resources.base_dir),
            config.has_chats,
            config.special_tokens_in_text,
            astuple(record.serving_engine),
        )
        guard = CrashGuard(
            engine,
            description,
            crash_records,
            source_id=source_id,
            spec=source.source,
            shard_paths=record.shard_paths[source_id],
            skip_bad=config.skips_bad_rows(source),
        )
        return encoder(engine, guard=guard)
