"""What a run's canonical order is made of: config, frozen files, tokeniser. From a state to a pipeline.

An ``Order`` is made once, when the run is created, and written into the run's record; a restarted
server makes it again from that record and refuses whatever differs.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from tokenloom_proto.seal import canonical

from tokenloom_server import readahead, snapshot
from tokenloom_server.careful import CarefulEncoder
from tokenloom_server.config import (
    OUTSIDE_THE_ORDER,
    SOURCE_OUTSIDE_THE_ORDER,
    NodeConfig,
    RunConfig,
    SourceConfig,
    weight_text,
)
from tokenloom_server.data_roots import DataRoots
from tokenloom_server.errors import ConfigError, LedgerError, TokenizerError
from tokenloom_server.exclusions import NOTHING_EXCLUDED, Exclusions
from tokenloom_server.extents import Extent, measure
from tokenloom_server.isolated import Isolation
from tokenloom_server.mixing.mixer import node_shapes
from tokenloom_server.packing.base import Packer, PackerFactory
from tokenloom_server.packing.concat import ConcatPacker
from tokenloom_server.packing.documents import Documents, Encoder
from tokenloom_server.packing.fim import FillInMiddle
from tokenloom_server.packing.lanes import LanesPacker, lane_state
from tokenloom_server.packing.reading import FileOrder, Layout, Reading, ShuffledFiles, Windows, shuffled_files
from tokenloom_server.pipeline import Pipeline, Switch, initial_state
from tokenloom_server.readahead import Late, Pools, ReadAhead
from tokenloom_server.rules import RowRules
from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.block_index import blocks
from tokenloom_server.sources.files import in_threads, order_warning
from tokenloom_server.sources.manifest import Listings, Manifest, SourceFiles, appeared, build, verify
from tokenloom_server.sources.open import open_source
from tokenloom_server.sources.watched import Watched
from tokenloom_server.state import ORDER_VERSION, Cursor, SourceState, State
from tokenloom_server.storage.traffic import Traffic
from tokenloom_server.storage.urls import is_remote
from tokenloom_server.suspects import Suspects
from tokenloom_server.tokenizer import (
    DocumentEncoder,
    Encoded,
    Engine,
    EngineRecord,
    TokenizerDefinition,
    begin_of_text_id,
    choose_engine,
    end_of_text_id,
    find_tokenizer,
    id_dtype,
    load_engine,
    tokenizer_files,
)

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
    ) -> None:
        """``engine`` is None where every source holds ids. ``first`` is the order that the run began with, if that is
        another one. ``engines``: how many threads may encode at once, if not as many as read ahead. See ``create``,
        ``load`` and ``under``."""
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
        self.traffic: Traffic = first.traffic if first is not None else Traffic()
        self._engine_lock = threading.Lock()
        self._loaded: Engine | None = None
        self._suspects: Suspects | None = None
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
        )
        self.vocab_size = _vocab_size(config, definition)
        self.dtype = id_dtype(self.vocab_size)
        self.width = config.sequence_length + (config.labels == "shifted")
        #: Bytes of a sample as it travels.
        self.sample_bytes = self.width * self.dtype.itemsize
        adds_bos = any(config.adds_bos(source) for source in config.sources)
        #: Ends each document; None where there is none.
        self.end_of_text_id = _end_of_text_id(config, definition)
        #: Begins each document where the config says so; None where there is none.
        self.begin_of_text_id = begin_of_text_id(definition, config.begin_of_text_id, needed=adds_bos)
        for source in config.sources:
            _check_fim(source, self.vocab_size)
        #: Of the sources from whose rest a policy makes weights, by id: measured once, and part of the record.
        self.extents: Mapping[int, Extent] = {}

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
        listings = Listings()
        verify(manifest, base_dir, listings)
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
        order.extents = {int(source): Extent(*one) for source, one in found.get("extents", {}).items()}
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
        extents: Mapping[int, Extent] = MappingProxyType({}),
    ) -> Order:
        """The order under another config of the same run, with files and rows of its own. ``extents`` that are not
        given are those of before, or measured."""
        known_files = {source.spec: set(source.shards) for source in self.manifest.sources}
        new = Manifest(
            tuple(
                SourceFiles(source.spec, tuple(more))
                for source in manifest.sources
                if (more := [shard for shard in source.shards if shard not in known_files.get(source.spec, ())])
            )
        )
        _check_files(new, self.base_dir, self._roots)
        verify(new, self.base_dir)
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
        for i, source in enumerate(config.sources):
            if self.engine is None and source.source not in self.specs and order.open(i).content is Content.TEXT:
                raise ConfigError(
                    f"{source.source!r} holds text, but run {self.name!r} began with ids alone, so no tokeniser was "
                    "chosen for it: prepare the source's ids, or begin a new run"
                )
        known = {i: extent for i, extent in self.extents.items() if order.shards[i] == self.shards[i]} | dict(extents)
        order.extents = {i: known[i] if i in known else measure(order, i) for i in config.measured_sources}
        return order

    def _measured(self) -> Order:
        self.extents = {source: measure(self, source) for source in self.config.measured_sources}
        return self

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
            if source.shuffle == "none"
        )
        return [text for text in found if text is not None]

    def record(self) -> str:
        """Canonical JSON: what a restarted server, and a snapshot, compare themselves with."""
        record = {
            "format": RECORD_FORMAT,
            "order_version": ORDER_VERSION,
            "config": self.config.order_fields(),
            "tokenizer": self._tokenizer_record(),
            "vocab_size": self.vocab_size,
            "manifest": json.loads(self.manifest.to_json()),
        }
        if self.extents:
            record["extents"] = {str(i): [one.rows, one.tokens_per_1000_rows] for i, one in self.extents.items()}
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
            "config_digest": self.config.digest,
            "manifest_digest": self.manifest.digest,
            "tokenizer": self._tokenizer_record(),
        }

    def initial(self) -> State:
        """The state before sample 0."""
        return initial_state(self.config)

    def encode(self, state: State) -> str:
        """``resume_state``: the canonical JSON of a state of a run without revisions (see ``Course``)."""
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
            width=self.width,
            dtype=self.dtype,
            switches=switches,
            extents=self.extents,
        )

    def packers(self, *, ahead: bool = False) -> PackerFactory:
        """What makes the packers of one pipeline."""
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
                return Late(partial(opened, source_id, source_state), pools)
            reader = self.open(source_id)
            packed = self._packer(source_id, source_state, reader, engine)
            # Ids of local files are read so fast that a second thread would only cost memory.
            return ReadAhead(packed, pools.blocks) if pools and reader.content is Content.TEXT else packed

        def opened(source_id: int, source_state: SourceState) -> Packer:
            return self._packer(source_id, source_state, self.open(source_id), engine)

        return packer

    def _packer(self, source_id: int, state: SourceState, reader: Source, engine: Engine | None) -> Packer:
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
    ) -> Packer:
        return ConcatPacker(
            self._documents(source_id, reader, engine, state.tally.bad_rows, lane),
            state,
            source_id=source_id,
            length=self.config.sequence_length,
            lookahead=self.width - self.config.sequence_length,
        )

    def documents(self, source_id: int) -> Documents:
        """A source's documents as tokens, just as a pipeline reads them."""
        return self._documents(source_id, self.open(source_id), self._load_engine(), 0)

    def _documents(
        self, source_id: int, reader: Source, engine: Engine | None, bad_rows: int, lane: tuple[int, int] = (0, 1)
    ) -> Documents:
        source = self.config.sources[source_id]
        most = source.max_bad_rows if source.max_bad_rows is not None else self.config.max_bad_rows
        return Documents(
            source.source,
            Watched(reader, self.traffic, source.spec),
            self._encoder(source_id, reader, engine),
            self.config.epochs[source_id],
            self.excluded.of(source.source),
            self.reading(source_id, reader),
            lane,
            bad_rows=bad_rows,
            max_bad_rows=most if self.config.skips_bad_rows(source) else None,
            fim=self._fim(source),
        )

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
        # Lanes need to know where each begins; else a file is opened when its turn comes.
        counts = self._layout(source_id, reader).counts(len(self.shards[source_id])) if source.lanes > 1 else None
        if source.shuffle == "none":
            return FileOrder(reader, counts)
        if source.shuffle == "shards":
            return ShuffledFiles(reader, self.config.seed, source_id, counts)
        return Windows(self._layout(source_id, reader), self.config.seed, source_id, source.shuffle_window_rows)

    def stands_in(self, source_id: int, cursor: Cursor) -> tuple[str, int]:
        """What a cursor stands in, a file or a window, and the rows of that. Raises ``SourceError``."""
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
        with self._layout_lock:
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
                layout = Layout.of(blocks(reader, spec, self.base_dir, self.index_dir))
                with self._layout_lock:
                    self._layouts[source_id] = layout
            return layout

    def _shares_layout(self, source_id: int) -> bool:
        """Whether the run began with the source, and the same files of it: source ids stay."""
        first = self._first
        return first is not None and self.shards[source_id : source_id + 1] == first.shards[source_id : source_id + 1]

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
            self.traffic,
            rules=_rules(self.config, source),
            end_of_text_id=self.end_of_text_id,
        )

    def _load_engine(self) -> Engine | None:
        """The run's engine, for all pipelines: loading a large vocabulary takes a second."""
        if self._first is not None:
            return self._first._load_engine()
        if self.engine is None or self.tokenizer is None:
            return None
        with self._engine_lock:
            if self._loaded is None:
                load = partial(load_engine, self.tokenizer, self.engine, self.config.special_tokens_in_text)
                self._loaded = _Engines(load, self._engines)
            return self._loaded

    def _load_suspects(self) -> Suspects | None:
        """The rows that may crash a tokeniser; None where there is none that could, or nowhere to note them."""
        if self._first is not None:
            return self._first._load_suspects()
        if self.engine is None or self.engine.engine == "bytes" or self.index_dir is None:
            return None
        with self._engine_lock:
            if self._suspects is None and not self._notes_nothing:
                try:
                    self._suspects = Suspects(self.index_dir, self.name)
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


class _Engines:
    """Implements ``Engine`` for several threads, with as many engines as are at work at once: each serves one
    caller at a time."""

    def __init__(self, load: Callable[[], Engine], most: int) -> None:
        """Loads the first; raises ``TokenizerError`` where that fails."""
        first = load()
        self.name = first.name
        self.version = first.version
        self._load = load
        self._room = threading.Semaphore(most)
        self._idle = deque([first])

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        with self._room:
            try:
                # The one that was used last: what it knows is in the processor's cache.
                engine = self._idle.pop()
            except IndexError:
                engine = self._load()
            try:
                return engine.encode(texts)
            finally:
                self._idle.append(engine)


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
    needed = any(config.adds_eot(source) for source in config.sources)
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
    return is_remote(source.spec.location) or source.spec.scheme == "hf"


def _first_rows(source: Source) -> pa.Array:
    for shard in range(len(source.shards)):
        for rows in source.read(shard, 0):
            return rows.column
    return pa.array([], pa.large_string())


def differences(config: RunConfig, record: str) -> dict[str, str]:
    """By field, how a mixture file differs from a run's record, both values named."""
    return dict(_differences(json.loads(record)["config"], json.loads(canonical(config.order_fields())), ""))


def refuse(config: RunConfig, different: Mapping[str, str]) -> None:
    """Raises ``ConfigError`` where there are differences."""
    if not different:
        return
    remedy = "put these back, or begin a new run under another name"
    if all(field.startswith("mixture.") for field in different):
        remedy += (
            "; or make them a revision, from the next possible sample on: serve with --revise REASON, or put these "
            "back and use `tokenloom mixture apply` while it trains"
        )
    elif set(different) <= {"sequence_length"}:
        remedy += ", such as one that is forked from this run's checkpoint; `phases` plan such a change"
    raise ConfigError(
        f"the mixture file of run {config.run!r} differs from the run's record:\n  "
        + "\n  ".join(f"{field}: {both}" for field, both in different.items())
        + f"\n{remedy}"
    )


def began_with(config: RunConfig, record: str) -> RunConfig:
    """The config that a run's record is of. What decides no order (paths, names) is the mixture file's: names by spec,
    those of nodes by their place."""
    fields = json.loads(record)["config"]
    outside_by_spec = {
        source.source: {field: getattr(source, field) for field in SOURCE_OUTSIDE_THE_ORDER}
        for source in config.sources
    }

    def named(node: dict[str, Any], file: NodeConfig | None) -> dict[str, Any]:
        children: list[dict[str, Any]] = []
        for i, child in enumerate(node["children"]):
            same_place = file.children[i] if file is not None and i < len(file.children) else None
            if "source" in child:
                children.append(child | outside_by_spec.get(child["source"], {}))
            else:
                children.append(named(child, same_place if isinstance(same_place, NodeConfig) else None))
        return node | {"children": children, "alias": file.alias if file is not None else None}

    # What a record leaves out has its default, not the file's value.
    outside = config.model_dump(include=set(OUTSIDE_THE_ORDER))
    return RunConfig.model_validate({**fields, **outside, "mixture": named(fields["mixture"], config.mixture)})


def _differences(record: Any, file: Any, path: str) -> list[tuple[str, str]]:
    """Each field with another value, and both of them, in the file's own terms."""
    if isinstance(record, dict) and isinstance(file, dict):
        found = []
        for key in sorted(record.keys() | file.keys()):
            at = f"{path}.{key}" if path else key
            default = _default_of(at)
            found += _differences(record.get(key, default), file.get(key, default), at)
        return found
    if isinstance(record, list) and isinstance(file, list) and len(record) == len(file):
        pairs: Sequence[tuple[Any, Any]] = list(zip(record, file, strict=True))
        return [line for i, (old, new) in enumerate(pairs) for line in _differences(old, new, f"{path}.{i}")]
    return [] if record == file else [(path, f"the run began with {_short(record)}, the file has {_short(file)}")]


def _default_of(path: str) -> Any:
    """What a field that the record or the file leaves out stands for: the run's own fields have defaults."""
    field = RunConfig.model_fields.get(path)
    return "(not given)" if field is None or field.default is None else field.default


def _short(value: Any) -> str:
    if isinstance(value, list) and isinstance(value[0], dict):
        # Children, of which one list has more: their names tell which.
        return f"{len(value)}: " + ", ".join(child.get("source", child.get("policy", "?")) for child in value)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "…"
