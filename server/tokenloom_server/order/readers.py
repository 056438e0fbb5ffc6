"""Opening a run's sources, and the order in which their rows are read."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import xxhash

from tokenloom_server.config.row_rules import RowRules
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import EpochCursor, FileCursor, WindowCursor
from tokenloom_server.errors import ConfigError
from tokenloom_server.order.exclusions import load_seen
from tokenloom_server.order.record import RunRecord
from tokenloom_server.order.resources import RunResources
from tokenloom_server.packing.buckets import Epochs
from tokenloom_server.packing.reading import (
    FileOrder,
    Layout,
    Reading,
    ShuffledFiles,
    Windows,
    shuffled_files,
)
from tokenloom_server.packing.samples import Int64s
from tokenloom_server.sources.base import Content, Shard, Source
from tokenloom_server.sources.files import in_threads
from tokenloom_server.sources.row_index import blocks
from tokenloom_server.sources.scheme import ReadRequest, scheme_of
from tokenloom_server.sources.sharded import ShardedSource
from tokenloom_server.sources.tensor_buckets import Bucketing, bucket_index
from tokenloom_server.sources.tensor_source import FeatureSource
from tokenloom_server.sources.wrapped import HoldoutSource
from tokenloom_server.storage.urls import is_remote

_log = logging.getLogger(__name__)


def row_rules(config: RunConfig, source: SourceConfig) -> RowRules:
    """Which rows of a source are read."""
    return replace(
        source.rules, skip_bad=config.skips_bad_rows(source), most_bytes=config.max_row_mib << 20
    )


class SourceReaders:
    """Makes readers of a record's sources, by source id. Readers are independent of each other."""

    def __init__(self, record: RunRecord, resources: RunResources) -> None:
        self._record = record
        self._resources = resources
        # Those of the run's resources that were asked for here.
        self._layouts: dict[int, Layout] = {}
        #: What their files are known by: to hash 10^5 of them for each question would take a tenth of a second.
        self._file_keys: dict[int, Hashable] = {}

    def open(self, source_id: int) -> Source:
        """A new reader of a source. Raises ``SourceError``."""
        record = self._record
        source = record.config.sources[source_id]
        rules = row_rules(record.config, source)
        return self._resources.open_source(
            source.spec, record.shards[source_id], rules, record.end_of_text_id
        )

    def open_mask(self, source_id: int, reader: Source, column: str) -> Source:
        """A new reader of the loss masks in a column beside the ids that ``reader`` reads. Raises ``ConfigError`` where
        either of the two holds text."""
        config = self._record.config
        source = config.sources[source_id]
        rules = replace(
            row_rules(config, source), filter=(), template=None, as_json=False, is_mask=True
        )
        masks = self._resources.open_source(
            replace(source.spec, column=column), self._record.shards[source_id], rules
        )
        for name, opened in ((source.spec.column, reader), (column, masks)):
            if opened.content is not Content.IDS:
                raise ConfigError(
                    f"{str(source.spec)!r}: {name!r} holds text, but loss_mask is for rows of ids, with a list of 0 "
                    "and 1 beside them: prepare both, or leave loss_mask out"
                )
        return masks

    def check_columns(self, first: int = 0) -> None:
        """Raises ``ConfigError`` where a loss mask column, of the sources from ``first`` on, holds no masks, or the
        column of one with ``transform`` no text."""
        for i, source in enumerate(self._record.config.sources[first:], first):
            if source.loss_mask is not None:
                self.open_mask(i, self.open(i), source.loss_mask)
            if source.transform is not None and self.open(i).content is not Content.TEXT:
                raise ConfigError(
                    f"{source.name}: transform is for texts, but the column holds ids; leave it out"
                )

    def check_files(self, known: Container[Shard] = ()) -> None:
        """Raises ``SourceError`` where a file, but for those that are known, has no columns to be read as the config
        says. A remote one says so when it is opened: nothing waits for each of 10^5 of them."""
        for i, (source, shards) in enumerate(
            zip(self._record.config.sources, self._record.shards, strict=True)
        ):
            local = [
                j for j, each in enumerate(shards) if each not in known and not is_remote(each.path)
            ]
            if not local or self._record.config.batching is not None:
                continue
            readers = [self.open(i)]
            if source.loss_mask is not None:
                readers.append(self.open_mask(i, readers[0], source.loss_mask))
            is_counted = self._is_counted(i) and scheme_of(source.spec).stores_row_counts
            is_counted = is_counted and len(local) == len(shards)
            for reader in readers:
                looks: list[Callable[[int], object]] = (
                    [reader.check] if isinstance(reader, ShardedSource) else []
                )
                if is_counted and reader is readers[0]:
                    looks.append(
                        reader.blocks
                    )  # so that the first samples need not ask each file again
                in_threads(partial(_each, looks), local)
            if is_counted:
                self._layout(i, readers[0])

    def kept(self, source_id: int, reader: Source) -> Source:
        """A reader with the rows of this side of the source's holdout; the others are there as empty ones."""
        config = self._record.config
        share = config.sources[source_id].holdout
        if share is None:
            return reader
        return HoldoutSource(reader, share, config.seed, gives_held=self._record.gives_held_out)

    # --- the order of rows ---------------------------------------------------------------------------

    def reading(self, source_id: int, reader: Source) -> Reading:
        """In which order a source's rows come. Raises ``SourceError`` where that takes every file's index, and one
        cannot be read."""
        config = self._record.config
        source = config.sources[source_id]
        counts = self.row_counts(source_id, reader) if self._is_counted(source_id) else None
        if source.shuffle == "none":
            return FileOrder(reader, counts)
        if source.shuffle == "shards":
            return ShuffledFiles(reader, config.seed, source_id, counts)
        layout = self._layout(source_id, reader)
        # All lanes together hold a window's rows, and none has less than a window of its own.
        rows = max(1, min(source.shuffle_window_rows, int(layout.rows.sum())) // source.lanes)
        return Windows(layout, config.seed, source_id, rows)

    def _is_counted(self, source_id: int) -> bool:
        """Whether rows cannot be read before all are counted: for shuffled rows, lanes, and parts of an epoch. Else a
        file is opened when its turn comes."""
        source, epochs = (
            self._record.config.sources[source_id],
            self._record.config.epochs[source_id],
        )
        return (
            source.shuffle == "rows"
            or source.lanes > 1
            or not (math.isinf(epochs) or epochs.is_integer())
        )

    def seen(self, source_id: int, reader: Source) -> Mapping[int, Int64s]:
        """By shard, the rows that another loader had given before the run began. Raises what ``load_seen`` does."""
        config, base_dir = self._record.config.sources[source_id].seen, self._resources.base_dir
        if config is None:
            return {}
        key = config, self._files(source_id)
        # Of files that were appended since, nothing was seen.
        file_counts = {
            *self._record.earlier_file_counts.get(source_id, ()),
            len(self._record.shards[source_id]),
        }
        return self._resources.seen.get(
            key,
            lambda: load_seen(config, base_dir, self.row_counts(source_id, reader), file_counts),
        )

    def check_seen(self, first: int = 0) -> None:
        """Raises ``ConfigError`` where a file of rows that were seen, of the sources from ``first`` on, is not one."""
        for i, source in enumerate(self._record.config.sources[first:], first):
            if source.seen is not None:
                self.seen(i, self.open(i))

    def row_counts(self, source_id: int, reader: Source) -> list[int]:
        """Rows of each of a source's files. Raises ``SourceError``."""
        return self._layout(source_id, reader).counts(len(self._record.shards[source_id]))

    def known_rows(self, source_id: int) -> int | None:
        """Rows of an epoch of a source of shuffled rows or of several lanes, once it has been read of."""
        # Stats must not wait for an index that is made.
        layout = self._layouts.get(source_id)
        if layout is None:
            layout = self._resources.layouts.peek(self._files(source_id))
        return int(layout.rows.sum()) if layout is not None else None

    def counted_rows(self, source_id: int) -> int | None:
        """Rows of an epoch, also of a source of one file; None where that takes an index of files that are not read."""
        known = self.known_rows(source_id)
        if known is None and len(self._record.shards[source_id]) == 1:
            return self.reading(source_id, self.open(source_id)).rows_in(0)
        return known

    def rows_around(
        self, source_id: int, cursor: FileCursor | WindowCursor | EpochCursor
    ) -> tuple[str, int]:
        """The name of the file, window or epoch in which a cursor counts rows, and how many it has. Raises
        ``SourceError``."""
        if isinstance(cursor, EpochCursor):
            epochs = self.bucket_epochs(source_id)
            return "an epoch of its batches", epochs.batches * epochs.size
        reading = self.reading(source_id, self.open(source_id))
        if isinstance(cursor, WindowCursor):
            return f"window {cursor.window}", reading.rows_in(cursor.window)
        return self._record.shard_paths[source_id][cursor.shard], reading.rows_in(cursor.shard)

    def files_before(self, source_id: int, cursor: FileCursor) -> Sequence[int]:
        """The files that come before the cursor's in its epoch, of a source that is read file by file."""
        config = self._record.config
        if config.sources[source_id].shuffle == "none":
            return range(cursor.shard)
        order = shuffled_files(
            len(self._record.shards[source_id]), config.seed, source_id, cursor.epoch
        )
        return order[: order.index(cursor.shard)]

    def _layout(self, source_id: int, reader: Source) -> Layout:
        """Where the blocks of a source are."""
        spec, resources = self._record.config.sources[source_id].spec, self._resources

        def look_up() -> Layout:
            with resources.io_stats.waiting(f"the index of source {str(spec)!r}", at_once=True):
                return Layout.of(blocks(reader, spec, resources.base_dir, resources.index_dir))

        if source_id not in self._layouts:
            self._layouts[source_id] = resources.layouts.get(self._files(source_id), look_up)
        return self._layouts[source_id]

    def _files(self, source_id: int) -> Hashable:
        if source_id not in self._file_keys:
            names = "\n".join(
                f"{s.path}\n{s.size}\n{s.fingerprint}" for s in self._record.shards[source_id]
            )
            digest = xxhash.xxh3_128_hexdigest(names.encode())
            self._file_keys[source_id] = self._record.specs[source_id], digest
        return self._file_keys[source_id]

    # --- rows that are tensors -----------------------------------------------------------------------

    def features(self, source_id: int) -> FeatureSource:
        """A new reader of a source's rows, of a run with ``batching``."""
        batching, source = self._record.config.batching, self._record.config.sources[source_id]
        assert batching is not None
        request = ReadRequest(
            spec=source.spec,
            shards=self._record.shards[source_id],
            base_dir=self._resources.base_dir,
            io_stats=self._resources.io_stats,
        )
        return FeatureSource(request, names=batching.columns, dtypes=batching.dtypes)

    def make_buckets(self) -> None:
        """Makes the buckets of all sources of a run with ``batching``, so that faults in them show before training."""
        if self._record.config.batching is not None:
            for i in range(len(self._record.config.sources)):
                self.bucket_epochs(i)

    def bucket_epochs(self, source_id: int) -> Epochs:
        """The batches of a source, of a run with ``batching``; makes its index of buckets, or takes it from the files'
        cache, when it is first asked for."""
        epochs = self._record.config.epochs[source_id]
        key = (source_id, epochs, self._files(source_id))
        return self._resources.bucket_epochs.get(
            key, lambda: self._new_bucket_epochs(source_id, epochs)
        )

    def _new_bucket_epochs(self, source_id: int, epochs: float) -> Epochs:
        config = self._record.config
        batching, source = config.batching, config.sources[source_id]
        assert batching is not None
        reader = self.features(source_id)
        bucketing = Bucketing(
            batching.bucket_column, batching.length_of is not None, tuple(batching.edges or ())
        )
        index = bucket_index(
            reader, bucketing, self._resources.index_dir, f"source {source.source!r}"
        )
        made = Epochs(
            index,
            size=config.pick_samples,
            seed=config.seed,
            source_id=source_id,
            epochs=epochs,
            window_rows=source.shuffle_window_rows if source.shuffle == "rows" else None,
        )
        _log.info("source %r: %s", source.source, bucket_summary(made))
        for name, reason in reader.left_out.items():
            _log.info("column %r does not travel: %s", name, reason)
        if not made.batches:
            _log.warning(
                "source %r gives nothing: none of its buckets has the %d rows of a batch; take a smaller "
                "global_batch_size, or buckets that hold more", source.source, made.size,
            )  # fmt: skip
        return made


def _each(looks: Iterable[Callable[[int], object]], shard: int) -> None:
    for look in looks:
        look(shard)


def bucket_summary(epochs: Epochs) -> str:
    """What a source's buckets give and lose, for people."""
    index = epochs.index
    summary = (
        f"{index.row_count} rows in {len(index.keys)} buckets, {epochs.batches} batches an epoch; "
        f"{epochs.lost_rows} rows of an epoch fill no batch of {epochs.size}"
    )
    return (
        f"{summary} ({index.left_out} of them are longer than the last edge)"
        if index.left_out
        else summary
    )
