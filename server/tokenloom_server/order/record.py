"""What a run's canonical order is made of: config, frozen files, tokeniser. From a state to a pipeline.

An ``Order`` is made once, when the run is created, and written into the run's record; a restarted
server makes it again from that record and refuses whatever differs.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenloom_proto.seal import canonical

from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.config.differences import differences, refuse
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.order_fields import order_digest, order_fields, weight_text
from tokenloom_server.config.row_rules import RowRules
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import ORDER_VERSION, Cursor, SourceState, State
from tokenloom_server.errors import ConfigError, LedgerError, TokenizerError
from tokenloom_server.mixing.mixer import node_shapes
from tokenloom_server.order import readahead, snapshot
from tokenloom_server.order.exclusions import NOTHING_EXCLUDED, Exclusions
from tokenloom_server.order.pipeline import Pipeline, Switch, initial_state
from tokenloom_server.order.readahead import LazyPacker, Pools, ReadAhead
from tokenloom_server.order.size_estimates import SizeEstimate, measure
from tokenloom_server.packing.base import DocumentPacker, Packer, PackerFactory
from tokenloom_server.packing.best_fit import BestFitPacker, Window, windowed_samples
from tokenloom_server.packing.buckets import BucketPacker, Epochs
from tokenloom_server.packing.concat import ConcatPacker
from tokenloom_server.packing.documents import Documents, Encoder
from tokenloom_server.packing.fim import FillInMiddle
from tokenloom_server.packing.lanes import LanesPacker, lane_state
from tokenloom_server.packing.origins import DocumentSpan
from tokenloom_server.packing.reading import FileOrder, Layout, Reading, ShuffledFiles, Windows, shuffled_files
from tokenloom_server.packing.real_tokens import RealTokens
from tokenloom_server.packing.samples import SampleFormat
from tokenloom_server.packing.unpacked import UnpackedPacker, unpacked_samples
from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.block_index import blocks
from tokenloom_server.sources.files import in_threads
from tokenloom_server.sources.holdout import HoldoutSource
from tokenloom_server.sources.loss_mask import SourceWithLossMask
from tokenloom_server.sources.manifest import Listings, Manifest, SourceFiles, appeared, build, verify
from tokenloom_server.sources.open import open_source
from tokenloom_server.sources.scheme import order_warning
from tokenloom_server.sources.tensors.buckets import Bucketing, bucket_index
from tokenloom_server.sources.tensors.source import FeatureSource
from tokenloom_server.sources.timed import TimedSource
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.urls import is_remote
from tokenloom_server.tokenizer.boundary import begin_of_text_id, end_of_text_id
from tokenloom_server.tokenizer.choose import EngineRecord, choose_engine, load_engine
from tokenloom_server.tokenizer.crash_child import Isolation
from tokenloom_server.tokenizer.crash_guard import CarefulEncoder
from tokenloom_server.tokenizer.crash_records import Suspects
from tokenloom_server.tokenizer.definition import TokenizerDefinition, find_tokenizer, id_dtype, tokenizer_files
from tokenloom_server.tokenizer.documents import DocumentEncoder
from tokenloom_server.tokenizer.engine import Engine
from tokenloom_server.tokenizer.engine_pool import Engines
from tokenloom_server.tokenizer.masked import MaskedEncoder

_log = logging.getLogger(__name__)

RECORD_FORMAT = 1
_ANYWHERE = DataRoots()


class Order:
    """The canonical order of one run. Immutable; pipelines made from it are independent of each other."""

    def __init__(
        self,
        config: RunConfig,
        base_dir: Path,
        index_dir: Path | None,
        manifest: Manifest,
        definition: TokenizerDefinition | None,
        engine: EngineRecord | None,
        *,
        excluded: Exclusions = NOTHING_EXCLUDED,
        first: Order | None = None,
        roots: DataRoots = _ANYWHERE,
        engines: int = 0,
        gives_held: bool = False,
    ) -> None:
        """``engine`` is None where every source holds ids. ``first`` is the order that the run began with, if that is
        another one. ``engines``: how many threads may encode at once, if not as many as read ahead.
        ``gives_held``: of sources that hold rows out, it gives these. See ``create``, ``load`` and ``under``."""
        self._gives_held = gives_held
        # One more than read ahead: for whoever looks at samples or goes forward to a resume point meanwhile.
        self._engines = engines or readahead.threads() + 1
        self.config = config
        self.excluded = excluded
        self._first = first
        self._roots = roots
        self.base_dir = base_dir
        self.index_dir = index_dir
        self.manifest = manifest
        self.engine = engine
        #: None where the mixture file names none: every source holds ids.
        self.tokenizer = definition
        #: What its readers wait for.
        self.io_stats: IoStats = first.io_stats if first is not None else IoStats()
        self._engine_lock = threading.Lock()
        self._loaded: Engine | None = None
        self._suspects: Suspects | None = None
        #: Under which they are kept where the run's own are others.
        self._suspects_name = ""
        self._notes_nothing = False
        self._layout_lock = threading.Lock()
        self._looking_up: dict[int, threading.Lock] = {}
        self._layouts: dict[int, Layout] = {}
        self.name = config.run
        self.specs = tuple(source.source for source in config.sources)
        self.shards = tuple(manifest.shards(spec) for spec in self.specs)
        self.shard_paths = tuple(tuple(shard.path for shard in shards) for shards in self.shards)
        self.shape = snapshot.Shape(
            specs=self.specs,
            shards=self.shard_paths,
            nodes={shape.node_id: shape.child_ids for _, shape in node_shapes(config)},
            sample_tokens=config.sequence_length,
            names=tuple(source.alias for source in config.sources),
            shuffles=tuple(source.shuffle for source in config.sources),
            lanes=tuple(source.lanes for source in config.sources),
            mixture=tuple(_described(node) for node in config.nodes),
            best_fit=config.packing == "best_fit",
        )
        self._buckets_lock = threading.Lock()
        self._epochs: dict[int, Epochs] = {}
        self.vocab_size = _vocab_size(config, definition) if config.batching is None else 0
        self.dtype = id_dtype(self.vocab_size) if config.batching is None else np.dtype(np.uint8)
        if config.batching is None and config.pad_id >= self.vocab_size:
            raise ConfigError(f"pad_id: {config.pad_id} is not below the vocabulary size {self.vocab_size}")
        first_config = first.config if first is not None else config
        if config.masks_loss and not first_config.masks_loss:
            raise ConfigError(
                "loss_mask: the run began without a source that has one, and its samples have no room for it; begin "
                "a new run"
            )
        # Rows that are tensors travel as bytes, about so many a row.
        width = config.sequence_length + (config.labels == "shifted") if config.batching is None else self._row_bytes()
        #: How samples travel.
        self.form = SampleFormat(
            length=config.sequence_length,
            width=width,
            dtype=self.dtype,
            lengths=config.packing != "concat" or config.tail == "pad",
            masked=first_config.masks_loss,
            padding=config.padding,
            pad_id=config.pad_id,
        )
        self.width = self.form.width
        #: Bytes of a sample as it travels.
        self.sample_bytes = self.form.sample_bytes
        #: By source: numbers of files that it had at times before.
        self._ended_before: Mapping[int, frozenset[int]] = {}
        adds_bos = any(config.adds_bos(source) for source in config.sources)
        #: Ends each document; None where there is none.
        self.end_of_text_id = _end_of_text_id(config, definition)
        #: Begins each document where the config says so; None where there is none.
        self.begin_of_text_id = begin_of_text_id(definition, config.begin_of_text_id, needed=adds_bos)
        for source in config.sources:
            _check_fim(source, self.vocab_size)
        #: Of the sources from whose rest a policy makes weights, by id: measured once, and part of the record.
        self.size_estimates: Mapping[int, SizeEstimate] = {}

    @classmethod
    def create(
        cls,
        config: RunConfig,
        base_dir: Path,
        index_dir: Path | None,
        roots: DataRoots = _ANYWHERE,
        *,
        engines: int = 0,
    ) -> Order:
        """The order of a new run: freezes the files, reads the tokeniser, chooses its engine.

        Raises ``SourceError``, ``TokenizerError`` and ``ConfigError``, naming the file or field.
        """
        _check_named(config, base_dir, roots)
        named = [source for _, source in config.named_sources()]
        manifest = build([source.spec for source in named], base_dir)
        _check_files(manifest, base_dir, roots)
        definition = find_tokenizer(config.tokenizer, base_dir) if config.tokenizer is not None else None
        if config.batching is not None:
            return cls(config, base_dir, index_dir, manifest, None, None, roots=roots)._measured()
        eot_id = _end_of_text_id(config, definition)
        opened = in_threads(
            lambda source: open_source(
                source.spec,
                base_dir,
                manifest.shards(source.source),
                index_dir,
                rules=_rules(config, source),
                end_of_text_id=eot_id,
            ),
            named,
            remote=any(map(_is_remote, named)),
        )
        texts = [
            (source, reader) for source, reader in zip(named, opened, strict=True) if reader.content is Content.TEXT
        ]
        if not texts:
            return cls(config, base_dir, index_dir, manifest, definition, None, roots=roots)._measured()
        if definition is None:
            raise ConfigError(
                f"tokenizer: is missing, but {texts[0][0].source!r} holds text; name a tokenizer.json, a folder with "
                "one, or 'bytes'"
            )
        choice = choose_engine(
            definition,
            config.special_tokens_in_text,
            in_threads(
                lambda text: _first_rows(text[1]), texts, remote=any(map(_is_remote, (one for one, _ in texts)))
            ),
            cpu_clock_s=time.thread_time,
        )
        level = logging.INFO if choice.engine != "tokenizers" else logging.WARNING
        _log.log(level, "%s: tokeniser engine %s %s: %s", config.run, choice.engine, choice.version, choice.reason)
        order = cls(config, base_dir, index_dir, manifest, definition, choice.record, roots=roots, engines=engines)
        return order._measured()

    @classmethod
    def load(
        cls, config: RunConfig, base_dir: Path, index_dir: Path | None, record: str, roots: DataRoots = _ANYWHERE
    ) -> Order:
        """The order of a run that the ledger has.

        Raises ``ConfigError`` naming each field of the mixture file that differs from the record, with
        both values; ``SourceChanged``; ``TokenizerError``; ``LedgerError`` for a record of another version.
        """
        found = json.loads(record)
        for field, ours in (("format", RECORD_FORMAT), ("order_version", ORDER_VERSION)):
            if found.get(field) != ours:
                raise LedgerError(
                    f"run {config.run!r}: its record has {field} {found.get(field)!r}, this server honours {ours!r}: "
                    "serve it with the Tokenloom release that began it"
                )
        refuse(config, differences(config, record))
        _check_named(config, base_dir, roots)
        manifest = Manifest.from_json(canonical(found["manifest"]))
        _check_files(manifest, base_dir, roots)
        listings = Listings(config.catalog.sources)
        verify(manifest, base_dir, config.catalog.sources, listings)
        for path in appeared(manifest, base_dir, listings):
            _log.warning("%s: %s appeared after the run began and is not read", config.run, path)
        definition = find_tokenizer(config.tokenizer, base_dir) if config.tokenizer is not None else None
        recorded = found["tokenizer"]
        engine = None if recorded["engine"] == "none" else EngineRecord(**recorded)
        if engine is not None and definition is None:
            raise ConfigError("tokenizer: is missing, but the run's record has one; put it back")
        order = cls(config, base_dir, index_dir, manifest, definition, engine, roots=roots)
        if order.vocab_size != found["vocab_size"]:
            raise TokenizerError(
                f"the vocabulary has {order.vocab_size} ids, the run began with {found['vocab_size']}; "
                "put the tokeniser or vocab_size back, or begin a new run"
            )
        order.size_estimates = {int(source): SizeEstimate(*one) for source, one in found.get("extents", {}).items()}
        if engine is not None:
            order._load_engine()
        elif order._tokenizer_record() != recorded:
            raise TokenizerError(
                f"tokenizer {config.tokenizer!r}: its digest is {order._tokenizer_record()['digest'] or 'none'}, but "
                f"the run began with {recorded['digest'] or 'none'}; put the old files back, or begin a new run"
            )
        return order

    def under(
        self,
        config: RunConfig,
        manifest: Manifest,
        excluded: Exclusions,
        size_estimates: Mapping[int, SizeEstimate] = MappingProxyType({}),
    ) -> Order:
        """The order under another config of the same run, with files and rows of its own. ``size_estimates`` that are
        not given are those of before, or measured."""
        _refuse_moved_parts(self.config, config)
        known_files = {source.spec: set(source.shards) for source in self.manifest.sources}
        new = Manifest(
            tuple(
                SourceFiles(source.spec, tuple(more))
                for source in manifest.sources
                if (more := [shard for shard in source.shards if shard not in known_files.get(source.spec, ())])
            ),
            manifest.plugins,
        )
        _check_files(new, self.base_dir, self._roots)
        verify(new, self.base_dir, config.catalog.sources)
        order = type(self)(
            config,
            self.base_dir,
            self.index_dir,
            manifest,
            self.tokenizer,
            self.engine,
            excluded=excluded,
            first=self._first or self,
            roots=self._roots,
        )
        order._ended_before = {
            i: self._ended_before.get(i, frozenset()) | {len(shards)} for i, shards in enumerate(self.shards)
        }
        for source, before, now in zip(config.sources, self.shards, order.shards, strict=False):
            drawn = source.shuffle != "none" or source.lanes > 1
            if config.packing == "best_fit" and drawn and before != now:
                raise ConfigError(
                    f"append_files: {source.name} is shuffled, or has lanes, and is packed by best fit: files between "
                    "others would make other samples of rows that are under way; add them as a source of their own"
                )
        order._check_masks(len(self.specs))
        for i, source in enumerate(config.sources):
            if (
                config.batching is None
                and self.engine is None
                and source.source not in self.specs
                and order.open(i).content is Content.TEXT
            ):
                raise ConfigError(
                    f"{source.source!r} holds text, but run {self.name!r} began with ids alone, so no tokeniser was "
                    "chosen for it: prepare the source's ids, or begin a new run"
                )
        if config.batching is not None:
            self._hand_on_buckets(order)
        known = {i: extent for i, extent in self.size_estimates.items() if order.shards[i] == self.shards[i]} | dict(
            size_estimates
        )
        order.size_estimates = {i: known[i] if i in known else order.measure(i) for i in config.measured_sources}
        return order

    def aside(self, config: RunConfig, manifest: Manifest | None = None, name: str = "") -> Order:
        """The order of a stream beside training, which shares the run's tokeniser: of what is held out of the run's own
        files, or of a ``manifest`` of others, for which the stream's ``name`` is given.

        Raises ``ConfigError`` and what reading the files raises.
        """
        order = type(self)(
            config,
            self.base_dir,
            self.index_dir,
            manifest or self.manifest,
            self.tokenizer,
            self.engine,
            excluded=NOTHING_EXCLUDED,
            first=self._first or self,
            roots=self._roots,
            gives_held=manifest is None,
        )
        if manifest is None:
            return order
        # Rows of other files are other rows, also to whom a document makes crash.
        order._suspects_name = f"{self.name}+{name}"
        order._check_masks()
        for i, source in enumerate(config.sources):
            if self.engine is None and order.open(i).content is Content.TEXT:
                raise ConfigError(
                    f"streams.{name}: {source.source!r} holds text, but run {self.name!r} trains on ids alone, so no "
                    "tokeniser was chosen for it: prepare the source's ids"
                )
        order.size_estimates = {i: order.measure(i) for i in config.measured_sources}
        return order

    def check_stream(self, name: str, mixture: NodeConfig) -> Manifest:
        """The files of a stream that has a mixture of its own, as they are now. Raises what ``create`` does."""
        sources = RunConfig.sources_of(mixture)
        for source in sources:
            self._roots.check_pattern(f"streams.{name}: {source.source}", self.base_dir, source.spec.place)
        manifest = build([source.spec for source in sources], self.base_dir)
        _check_files(manifest, self.base_dir, self._roots)
        return manifest

    def verify_stream(self, manifest: Manifest) -> None:
        """That a stream's files are what they were. Raises ``SourceChanged``."""
        _check_files(manifest, self.base_dir, self._roots)
        verify(manifest, self.base_dir, self.config.catalog.sources)

    def _measured(self) -> Order:
        self._check_masks()
        if self.config.batching is not None:
            for i in range(len(self.config.sources)):
                self.epochs_of(i)
        self.size_estimates = {source: self.measure(source) for source in self.config.measured_sources}
        return self

    def measure(self, source_id: int) -> SizeEstimate:
        """One epoch of a source. Raises what ``size_estimates.measure`` does."""
        if self.config.batching is None:
            return measure(self, source_id)
        epochs = self.epochs_of(source_id)
        return SizeEstimate(epochs.batches * epochs.size, 1000)

    def check_named(self, config: RunConfig, *paths: str) -> None:
        """That what a changed config names, and these files, lies below a data root, before anything of it is looked
        at. Raises ``ConfigError``."""
        _check_named(config, self.base_dir, self._roots)
        self._roots.check_paths("exclude.file", self.base_dir, paths)

    def warnings(self) -> list[str]:
        """What a user should know about the sources before training."""
        found = (
            order_warning(source.spec, shards)
            for source, shards in zip(self.config.sources, self.shards, strict=True)
            if source.shuffle == "none" and self.config.batching is None
        )
        return [text for text in found if text is not None]

    def record(self) -> str:
        """Canonical JSON: what a restarted server, and a snapshot, compare themselves with."""
        record = {
            "format": RECORD_FORMAT,
            "order_version": ORDER_VERSION,
            "config": order_fields(self.config),
            "tokenizer": self._tokenizer_record(),
            "vocab_size": self.vocab_size,
            "manifest": json.loads(self.manifest.to_json()),
        }
        if self.size_estimates:
            record["extents"] = {str(i): [one.rows, one.tokens_per_1000_rows] for i, one in self.size_estimates.items()}
        return canonical(record)

    def template(self, run_uid: str, stream: str, generation: int) -> dict[str, Any]:
        """What every snapshot of a generation says beside its position and state."""
        return {**self._same_in_every_snapshot, "run_uid": run_uid, "stream": stream, "generation": generation}

    @cached_property
    def _same_in_every_snapshot(self) -> dict[str, Any]:
        # Digests of the whole mixture and of every file's name: not to be made again for each snapshot.
        if self._first is not None:
            return self._first._same_in_every_snapshot
        return {
            "format": snapshot.FORMAT,
            "version": snapshot.VERSION,
            "run": self.name,
            "seed": self.config.seed,
            "order_version": ORDER_VERSION,
            "config_digest": order_digest(self.config),
            "manifest_digest": self.manifest.digest,
            "tokenizer": self._tokenizer_record(),
        }

    def initial(self) -> State:
        """The state before sample 0."""
        return initial_state(self.config)

    def encode(self, state: State) -> str:
        """``resume_state``: the canonical JSON of a state of a run without revisions (see ``Timeline``)."""
        return snapshot.encode_state(state, self.shape)

    def decode(self, resume_state: str) -> State:
        """Reads ``encode`` back. Raises ``SnapshotInvalid``."""
        return snapshot.decode_state(resume_state, lambda _: self.shape)

    def pipeline(self, state: State, *, ahead: bool = False, switches: Sequence[Switch] = ()) -> Pipeline:
        """A new pipeline that goes on from a state. Opens files only as they are read. ``ahead``: blocks of text
        are made in the background before they are asked for, so that sources are tokenised side by side."""
        packers = self.packers(ahead=ahead)
        return Pipeline(
            self.config,
            packers,
            state,
            sample_bytes=self.sample_bytes,
            real=RealTokens(
                self.form,
                mask_boundaries=self.config.mask_boundaries,
                of_rows=self.config.batching is not None,
            ),
            switches=switches,
            size_estimates=self.size_estimates,
        )

    def packers(self, *, ahead: bool = False) -> PackerFactory:
        """What makes the packers of one pipeline."""
        if self.config.batching is not None:
            return self._batches
        engine = self._load_engine()
        remote = [any(is_remote(shard.path) for shard in shards) for shards in self.shards]
        # Those of one pipeline, and gone with it.
        pools = None
        if ahead and (engine is not None or any(remote)):
            pools = Pools(
                ThreadPoolExecutor(readahead.OPENING_THREADS, f"{self.name}-open"),
                ThreadPoolExecutor(readahead.threads(remote=any(remote)), f"{self.name}-ahead"),
            )

        def packer(source_id: int, source_state: SourceState) -> Packer:
            if remote[source_id]:
                return LazyPacker(partial(opened, source_id, source_state), pools)
            reader = self.open(source_id)
            packed = self._packer(source_id, source_state, reader, engine)
            # Ids of local files are read so fast that a second thread would only cost memory.
            return ReadAhead(packed, pools.blocks) if pools and reader.content is Content.TEXT else packed

        def opened(source_id: int, source_state: SourceState) -> Packer:
            return self._packer(source_id, source_state, self.open(source_id), engine)

        return packer

    @property
    def rows_alone(self) -> bool:
        """Whether each row makes samples of its own."""
        return self.config.packing == "none"

    def given(self, lengths: npt.NDArray[np.int64]) -> int:
        """Tokens that the samples of consecutive rows count, of which these are the lengths in tokens."""
        config = self.config
        match config.packing:
            case "concat":
                return int(lengths.sum())
            case "best_fit":
                window = Window(config.pack_window_rows, config.pack_window_tokens)
                return config.sequence_length * windowed_samples(lengths, self.form, window)
            case "none":
                splits = config.long_rows == "split"
                return config.sequence_length * unpacked_samples(lengths, self.form, splits=splits)

    def parts(self, source_id: int, state: SourceState, count: int) -> Iterator[list[DocumentSpan]]:
        """What each of a source's next ``count`` samples behind a state is made of, by reading their rows again."""
        return self._packer(source_id, state, self.open(source_id), self._load_engine()).parts(count)

    def _packer(self, source_id: int, state: SourceState, reader: Source, engine: Engine | None) -> DocumentPacker:
        lanes = self.config.sources[source_id].lanes
        if lanes == 1:
            return self._lane(source_id, state, reader, engine)
        packers = [self._lane(source_id, lane_state(state, i), reader, engine, (i, lanes)) for i in range(lanes)]
        return LanesPacker(packers, state)

    def _lane(
        self,
        source_id: int,
        state: SourceState,
        reader: Source,
        engine: Engine | None,
        lane: tuple[int, int] = (0, 1),
    ) -> DocumentPacker:
        config = self.config
        documents = self._documents(source_id, reader, engine, state.tally.bad_rows, lane)
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
                    # In a drawn order nothing is appended (see ``under``).
                    closed_before=self._ended_before.get(source_id, ())
                    if (config.sources[source_id].shuffle, config.sources[source_id].lanes) == ("none", 1)
                    else (),
                )
            case "none":
                return UnpackedPacker(
                    documents, state, source_id=source_id, form=self.form, splits=config.long_rows == "split"
                )

    def _batches(self, source_id: int, source_state: SourceState) -> Packer:
        assert self.config.batching is not None
        return BucketPacker(
            self.config.sources[source_id].source,
            self.features(source_id),
            self.epochs_of(source_id),
            source_state,
            source_id=source_id,
            padding=self.config.batching,
        )

    def features(self, source_id: int) -> FeatureSource:
        """A new reader of a source's rows, of a run with ``batching``."""
        batching, source = self.config.batching, self.config.sources[source_id]
        assert batching is not None
        return FeatureSource(
            source.spec,
            self.shards[source_id],
            self.base_dir,
            self.io_stats,
            names=batching.columns,
            dtypes=batching.dtypes,
        )

    def epochs_of(self, source_id: int) -> Epochs:
        """The batches of a source, of a run with ``batching``; makes its index of buckets, or takes it from the cache,
        when it is first asked for."""
        batching, source = self.config.batching, self.config.sources[source_id]
        assert batching is not None
        with self._buckets_lock:
            found = self._epochs.get(source_id)
            if found is None:
                reader = self.features(source_id)
                bucketing = Bucketing(
                    batching.bucket_column, batching.length_of is not None, tuple(batching.edges or ())
                )
                index = bucket_index(reader, bucketing, self.index_dir, f"source {source.source!r}")
                found = self._epochs[source_id] = Epochs(
                    index,
                    size=self.config.pick_samples,
                    seed=self.config.seed,
                    source_id=source_id,
                    epochs=self.config.epochs[source_id],
                    window_rows=source.shuffle_window_rows if source.shuffle == "rows" else None,
                )
                _log.info("source %r: %s", source.source, _of_buckets(found))
                for name, why in reader.left_out.items():
                    _log.info("column %r does not travel: %s", name, why)
                if not found.batches:
                    _log.warning(
                        "source %r gives nothing: none of its buckets has the %d rows of a batch; take a smaller "
                        "global_batch_size, or buckets that hold more", source.source, found.size,
                    )  # fmt: skip
            return found

    def told_of_buckets(self, source_id: int) -> str:
        """What a source's buckets give and lose, for people."""
        return _of_buckets(self.epochs_of(source_id))

    def _hand_on_buckets(self, order: Order) -> None:
        """What is known of buckets to another order of the run, which makes those of new sources now."""
        for i, shards in enumerate(order.shards):
            if i < len(self.shards) and shards == self.shards[i] and order.config.epochs[i] == self.config.epochs[i]:
                order._epochs[i] = self.epochs_of(i)
            else:
                order.epochs_of(i)

    def _row_bytes(self) -> int:
        return max(self.features(i).sample_bytes() for i in range(len(self.config.sources)))

    def documents(self, source_id: int) -> Documents:
        """A source's documents as tokens, just as a pipeline reads them."""
        return self._documents(source_id, self.open(source_id), self._load_engine())

    def _documents(
        self, source_id: int, reader: Source, engine: Engine | None, bad_rows: int = 0, lane: tuple[int, int] = (0, 1)
    ) -> Documents:
        source = self.config.sources[source_id]
        timed: Source = TimedSource(reader, self.io_stats, source.spec)
        encoder: Encoder = self._encoder(source_id, reader, engine)
        if source.loss_mask is not None:
            mask = TimedSource(self._open_mask(source_id, reader, source.loss_mask), self.io_stats, source.spec)
            timed = SourceWithLossMask(timed, mask)
            encoder = MaskedEncoder(encoder, source.loss_mask, adds_bos=self.config.adds_bos(source))
        return Documents(
            source.source,
            self.kept(source_id, timed),
            encoder,
            self.config.epochs[source_id],
            self.excluded.of(source.source),
            self.reading(source_id, reader),
            lane,
            bad_rows=bad_rows,
            max_bad_rows=self.max_bad_rows(source_id),
            fim=self._fim(source),
            may_be_empty=self._gives_held,
        )

    def kept(self, source_id: int, reader: Source) -> Source:
        """A reader of a source with the rows of this side of its holdout; the others are there as empty ones."""
        share = self.config.sources[source_id].holdout
        return reader if share is None else HoldoutSource(reader, share, self.config.seed, gives_held=self._gives_held)

    def max_bad_rows(self, source_id: int) -> int | None:
        """How many bad rows a source may have for each epoch; None for any number, or where the first is an error."""
        source = self.config.sources[source_id]
        most = source.max_bad_rows if source.max_bad_rows is not None else self.config.max_bad_rows
        return most if self.config.skips_bad_rows(source) else None

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
            bos_id=self.begin_of_text_id,
            eot_id=self.end_of_text_id,
        )

    def reading(self, source_id: int, reader: Source) -> Reading:
        """In which order a source's rows come, for a reader of it. Raises ``SourceError`` where that takes every file's
        index, and one cannot be read."""
        source = self.config.sources[source_id]
        epochs = self.config.epochs[source_id]
        # Lanes, and parts of an epoch, need to know how many rows there are; else a file is opened when its turn comes.
        is_counted = source.lanes > 1 or not (math.isinf(epochs) or epochs.is_integer())
        counts = self.row_counts(source_id, reader) if is_counted else None
        if source.shuffle == "none":
            return FileOrder(reader, counts)
        if source.shuffle == "shards":
            return ShuffledFiles(reader, self.config.seed, source_id, counts)
        layout = self._layout(source_id, reader)
        # All lanes together hold a window's rows, and none has less than a window of its own.
        rows = max(1, min(source.shuffle_window_rows, int(layout.rows.sum())) // source.lanes)
        return Windows(layout, self.config.seed, source_id, rows)

    def row_counts(self, source_id: int, reader: Source) -> list[int]:
        """Rows of each of a source's files. Raises ``SourceError``."""
        return self._layout(source_id, reader).counts(len(self.shards[source_id]))

    def stands_in(self, source_id: int, cursor: Cursor) -> tuple[str, int]:
        """What a cursor stands in, a file or a window, and the rows of that. Raises ``SourceError``.

        With ``batching`` a cursor counts the rows that its epoch gave, whatever their files.
        """
        if self.config.batching is not None:
            epochs = self.epochs_of(source_id)
            return "an epoch of its batches", epochs.batches * epochs.size
        reading = self.reading(source_id, self.open(source_id))
        if reading.windows is not None:
            return f"window {cursor.shard}", reading.rows_in(cursor.shard)
        return self.shard_paths[source_id][cursor.shard], reading.rows_in(cursor.shard)

    def files_before(self, source_id: int, cursor: Cursor) -> Sequence[int]:
        """Of a source that is read file by file, those that come before the cursor's in its epoch."""
        if self.config.sources[source_id].shuffle == "none":
            return range(cursor.shard)
        order = shuffled_files(len(self.shards[source_id]), self.config.seed, source_id, cursor.epoch)
        return () if cursor == Cursor() else order[: order.index(cursor.shard)]

    def known_rows(self, source_id: int) -> int | None:
        """Rows of an epoch of a source of shuffled rows or of several lanes, once it has been read of."""
        if self._shares_layout(source_id):
            assert self._first is not None
            return self._first.known_rows(source_id)
        # Without the lock: figures must not wait for an index that is made.
        layout = self._layouts.get(source_id)
        return int(layout.rows.sum()) if layout is not None else None

    def _layout(self, source_id: int, reader: Source) -> Layout:
        """Where the blocks of a source are: looked up once, since that takes every file's footer or index."""
        if self._shares_layout(source_id):
            assert self._first is not None
            return self._first._layout(source_id, reader)
        with self._layout_lock:
            # One for each source: to look one up over a network keeps no other one waiting.
            lock = self._looking_up.setdefault(source_id, threading.Lock())
        with lock:
            layout = self._layouts.get(source_id)
            if layout is None:
                spec = self.config.sources[source_id].spec
                with self.io_stats.waiting(f"the index of source {str(spec)!r}", at_once=True):
                    layout = Layout.of(blocks(reader, spec, self.base_dir, self.index_dir))
                with self._layout_lock:
                    self._layouts[source_id] = layout
            return layout

    def _shares_layout(self, source_id: int) -> bool:
        """Whether the run began with the source, and the same files of it: source ids stay."""
        first, its = self._first, slice(source_id, source_id + 1)
        return first is not None and (self.specs[its], self.shards[its]) == (first.specs[its], first.shards[its])

    def encoder(self, source_id: int, reader: Source) -> Encoder:
        """What makes tokens of a source's rows, for a reader of it."""
        return self._encoder(source_id, reader, self._load_engine())

    def _encoder(self, source_id: int, reader: Source, engine: Engine | None) -> Encoder:
        source = self.config.sources[source_id]

        def around(engine: Engine | None) -> DocumentEncoder:
            return DocumentEncoder(
                engine,
                vocab_size=self.vocab_size,
                bos_id=self.begin_of_text_id,
                eot_id=self.end_of_text_id,
                add_bos=self.config.adds_bos(source),
                add_eot=self.config.adds_eot(source),
                skip_bad=self.config.skips_bad_rows(source),
            )

        suspects = self._load_suspects()
        if engine is None or self.engine is None or suspects is None or reader.content is not Content.TEXT:
            return around(engine)
        assert self.config.tokenizer is not None
        isolation = Isolation(
            tokenizer=self.config.tokenizer,
            base_dir=self.base_dir,
            record=self.engine,
            special_tokens_in_text=self.config.special_tokens_in_text,
        )
        return CarefulEncoder(
            around,
            engine,
            isolation,
            suspects,
            source_id=source_id,
            spec=source.source,
            shard_paths=self.shard_paths[source_id],
            skip_bad=self.config.skips_bad_rows(source),
        )

    def close(self) -> None:
        """An orderly end: no row is suspected of it."""
        with self._engine_lock:
            if self._suspects is not None:
                self._suspects.close()

    def open(self, source_id: int) -> Source:
        """A new reader of a source."""
        source = self.config.sources[source_id]
        return open_source(
            source.spec,
            self.base_dir,
            self.shards[source_id],
            self.index_dir,
            self.io_stats,
            rules=_rules(self.config, source),
            end_of_text_id=self.end_of_text_id,
        )

    def _check_masks(self, first: int = 0) -> None:
        """That the columns which hold loss masks do so, of the sources from ``first`` on."""
        for i, source in enumerate(self.config.sources[first:], first):
            if source.loss_mask is not None:
                self._open_mask(i, self.open(i), source.loss_mask)

    def _open_mask(self, source_id: int, reader: Source, column: str) -> Source:
        spec = self.config.sources[source_id].spec
        found = open_source(
            replace(spec, column=column),
            self.base_dir,
            self.shards[source_id],
            self.index_dir,
            self.io_stats,
            rules=RowRules(skip_bad=self.config.skips_bad_rows(self.config.sources[source_id])),
        )
        for what, source in ((spec.column, reader), (column, found)):
            if source.content is not Content.IDS:
                raise ConfigError(
                    f"{str(spec)!r}: {what!r} holds text, but loss_mask is for rows of ids, with a list of 0 and 1 "
                    "beside them: prepare both, or leave loss_mask out"
                )
        return found

    def _load_engine(self) -> Engine | None:
        """The run's engine, for all pipelines: loading a large vocabulary takes a second."""
        if self._first is not None:
            return self._first._load_engine()
        if self.engine is None or self.tokenizer is None:
            return None
        with self._engine_lock:
            if self._loaded is None:
                load = partial(load_engine, self.tokenizer, self.engine, self.config.special_tokens_in_text)
                self._loaded = Engines(load, self._engines)
            return self._loaded

    def _load_suspects(self) -> Suspects | None:
        """The rows that may crash a tokeniser; None where there is none that could, or nowhere to note them."""
        if self._first is not None and not self._suspects_name:
            return self._first._load_suspects()
        if self.engine is None or self.engine.engine == "bytes" or self.index_dir is None:
            return None
        with self._engine_lock:
            if self._suspects is None and not self._notes_nothing:
                try:
                    self._suspects = Suspects(self.index_dir, self._suspects_name or self.name)
                except OSError as error:
                    self._notes_nothing = True
                    _log.warning(
                        "%s: %s cannot be written (%s): a document at which the tokeniser crashes will not be found",
                        self.name, self.index_dir, error.strerror,
                    )  # fmt: skip
            return self._suspects

    def _tokenizer_record(self) -> dict[str, str]:
        if self.engine is None:
            # A tokeniser encodes nothing here, but the end- and begin-of-text ids may be its own.
            digest = self.tokenizer.digest if self.tokenizer is not None else ""
            return {"digest": digest, "engine": "none", "version": ""}
        return {"digest": self.engine.digest, "engine": self.engine.engine, "version": self.engine.version}


def _check_named(config: RunConfig, base_dir: Path, roots: DataRoots) -> None:
    """That whatever the mixture file names lies below a data root; before anything of it is looked at."""
    for path, source in config.named_sources():
        roots.check_pattern(f"{path}.source", base_dir, source.spec.place)
    if config.tokenizer is not None:
        roots.check_paths("tokenizer", base_dir, tokenizer_files(config.tokenizer, base_dir))


def _check_files(manifest: Manifest, base_dir: Path, roots: DataRoots) -> None:
    """That every file of the run lies below a data root: a pattern may meet links that lead elsewhere."""
    for source in manifest.sources:
        roots.check_paths(f"source {source.spec!r}", base_dir, [shard.path for shard in source.shards])


def _of_buckets(epochs: Epochs) -> str:
    index = epochs.index
    told = (
        f"{index.row_count} rows in {len(index.keys)} buckets, {epochs.batches} batches an epoch; "
        f"{epochs.lost_rows} rows of an epoch fill no batch of {epochs.size}"
    )
    return f"{told} ({index.left_out} of them are longer than the last edge)" if index.left_out else told


def _described(node: NodeConfig) -> dict[str, Any]:
    """A node for readers of a snapshot who have no mixture file."""
    alias = {} if node.alias is None else {"alias": node.alias}
    children = [
        [2 * child.id + isinstance(child, NodeConfig), weight_text(child.weight)]
        + ([] if child.presence == "live" else [child.presence])
        for child in node.children
    ]
    interpolate = {} if node.interpolate == "linear" else {"interpolate": node.interpolate}
    return {"id": node.id, "policy": node.policy, **alias, **interpolate, "children": children}


def _refuse_moved_parts(old: RunConfig, new: RunConfig) -> None:
    """A part of an epoch ends within a window of rows, and is what its lanes share: another part would make other
    samples of the window, or give lanes rows that others gave. Raises ``ConfigError``."""
    for source in new.sources[: len(old.sources)]:
        before, now = old.epochs[source.id], new.epochs[source.id]
        if source.presence == "dropped" or not moves_parts(before, now):
            continue
        for applies, why in (
            (new.packing == "best_fit", "with packing: best_fit a window of rows that has begun cannot end elsewhere"),
            (source.lanes > 1, f"its {source.lanes} lanes share the rows of an epoch, and have begun on their parts"),
        ):
            if applies:
                raise ConfigError(
                    f"{source.name}: epochs is {before:g} and would be {now:g}, but {why}: change whole epochs to "
                    "whole ones, or give max_tokens instead"
                )


def moves_parts(before: float, now: float) -> bool:
    """Whether another number of epochs has or had a last one of which only a part is read."""
    return before != now and not all(math.isinf(epochs) or float(epochs).is_integer() for epochs in (before, now))


def _vocab_size(config: RunConfig, definition: TokenizerDefinition | None) -> int:
    if definition is None:
        assert config.vocab_size is not None
        return config.vocab_size
    if config.vocab_size is not None and config.vocab_size < definition.vocab_size:
        raise ConfigError(
            f"vocab_size: {config.vocab_size} is smaller than the tokeniser's {definition.vocab_size} (greatest id + 1)"
        )
    return config.vocab_size or definition.vocab_size


def _end_of_text_id(config: RunConfig, definition: TokenizerDefinition | None) -> int | None:
    needed = config.batching is None and any(config.adds_eot(source) for source in config.sources)
    return end_of_text_id(definition, config.end_of_text_id, needed=needed)


def _rules(config: RunConfig, source: SourceConfig) -> RowRules:
    return replace(source.rules, skip_bad=config.skips_bad_rows(source))


def _check_fim(source: SourceConfig, vocab_size: int) -> None:
    for name, value in (source.fim.ids.model_dump() if source.fim is not None else {}).items():
        if value >= vocab_size:
            raise ConfigError(
                f"{source.name}: fim.ids.{name}: {value} is outside the vocabulary (0 to {vocab_size - 1}); name an id "
                "that the tokeniser has for it, or raise vocab_size"
            )


def _is_remote(source: SourceConfig) -> bool:
    return source.spec.is_remote


def _first_rows(source: Source) -> pa.Array:
    for shard in range(len(source.shards)):
        for rows in source.read(shard, 0):
            return rows.column
    return pa.array([], pa.large_string())
