"""What all pipelines of one run share: where its files lie, its engine, and what was looked up about its sources.

It outlives phases and revisions, and serves the streams beside training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from tokenloom_server.config.catalog import Spec
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.config.row_rules import PLAIN, RowRules
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.errors import SourceChanged, reason
from tokenloom_server.order.readers_stats import ReadersStats
from tokenloom_server.order.record import RunRecord
from tokenloom_server.packing.buckets import Epochs
from tokenloom_server.packing.reading import Layout, RowRange
from tokenloom_server.packing.samples import Int64s
from tokenloom_server.sources.base import Shard, Source
from tokenloom_server.sources.manifest import Manifest
from tokenloom_server.sources.open import open_source
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.tokenizer.choose import load_engine
from tokenloom_server.tokenizer.engine import Engine
from tokenloom_server.workers.chats import Chats, Completions
from tokenloom_server.workers.crashes import CrashRecords
from tokenloom_server.workers.threads import EnginePool, block_threads
from tokenloom_server.workers.transforms import Transform

_log = logging.getLogger(__name__)

_Value = TypeVar("_Value")


class Cache(Generic[_Value]):
    """Values that are made once each. To make one keeps only those waiting who ask for the same. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}
        self._values: dict[Hashable, _Value] = {}

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            if key not in self._values:
                self._values[key] = make()
            return self._values[key]

    def peek(self, key: Hashable) -> _Value | None:
        """The value, if it was made; waits for nobody."""
        return self._values.get(key)

    def values(self) -> list[_Value]:
        """All that were made."""
        return list(self._values.values())


class Readers(Protocol):
    """Who reads and tokenises the rows of a run's text, if not the server itself?"""

    def source(
        self, record: RunRecord, resources: RunResources, source_id: int, reader: Source
    ) -> ReadySource | None:
        """A source with the rows of ``reader``, as ids; None where that one is to be read by the server itself."""

    def stats(self, resources: RunResources) -> ReadersStats:
        """What they do for a run, which is known by its resources."""


class ReadySource(Source, Protocol):
    """A source of rows that are tokenised already, those that bear no ids among ``Rows.bad`` and ``Rows.filtered``. For
    one thread."""

    def announce(self, ranges: Iterator[RowRange]) -> None:
        """The rows that will be read next, in that order."""


class RunResources:
    """The place of a run's files, and what is loaded or looked up once for all of its pipelines. Thread-safe."""

    def __init__(
        self,
        base_dir: Path,
        index_dir: Path | None,
        roots: DataRoots | None = None,
        *,
        encoders: int = 0,
    ) -> None:
        """``index_dir``: where indexes and rows that crashed a tokeniser are kept; None: nowhere. ``encoders``: how
        many threads may encode at once, if not as many as read ahead."""
        self.base_dir = base_dir
        self.index_dir = index_dir
        self.roots = roots or DataRoots()
        #: Who reads the rows of text; None: the server itself.
        self.readers: Readers | None = None
        #: What a launch has otherwise than one before, though it moves no sample: a line for each field.
        self.changed: tuple[str, ...] = ()
        #: What readers wait for.
        self.io_stats = IoStats()
        #: The blocks of a source, which take every file's footer or index, by spec and files.
        self.layouts: Cache[Layout] = Cache()
        #: The batches of a source of rows that are tensors.
        self.bucket_epochs: Cache[Epochs] = Cache()
        #: The rows that another loader gave, by the file that lists them and the source's files.
        self.seen: Cache[Mapping[int, Int64s]] = Cache()
        #: Which share of a source's labels counts, by spec; None where it gives no samples.
        self.label_shares: Cache[float | None] = Cache()
        # One more than read ahead: for whoever looks at samples or goes forward to a resume point meanwhile.
        self._encoders = encoders or block_threads() + 1
        self._engines: Cache[Engine] = Cache()
        self._renderers: Cache[Chats | Completions] = Cache()
        self._transforms: Cache[Transform] = Cache()
        self._crash_records: Cache[CrashRecords | None] = Cache()

    def open_source(
        self,
        spec: Spec,
        shards: tuple[Shard, ...],
        rules: RowRules = PLAIN,
        end_of_text_id: int | None = None,
    ) -> Source:
        """A new reader of a source. Raises ``SourceError``."""
        return open_source(
            spec,
            self.base_dir,
            shards,
            self.index_dir,
            self.io_stats,
            rules=rules,
            end_of_text_id=end_of_text_id,
        )

    def engine(self, record: RunRecord) -> Engine | None:
        """The run's engine, for all pipelines: loading a large vocabulary takes a second. None where nothing is
        encoded. Raises ``TokenizerError``."""
        if record.serving_engine is None or record.tokenizer is None:
            return None
        load = partial(
            load_engine,
            record.tokenizer,
            record.serving_engine,
            record.config.special_tokens_in_text,
        )
        return self._engines.get(record.serving_engine, lambda: EnginePool(load, self._encoders))

    def renderer(self, record: RunRecord, source: SourceConfig) -> Chats | Completions:
        """What renders and encodes the rows of a source's kind, for all pipelines. Raises ``TokenizerError``."""
        assert record.tokenizer is not None
        make: Callable[[], Chats | Completions] = partial(
            Chats, record.tokenizer, loss_on=source.loss_on, chat_format=source.chat_format
        )
        if not source.is_chat:
            engine = record.serving_engine
            make = partial(
                Completions, record.tokenizer, engine, record.config.special_tokens_in_text
            )
        key = record.tokenizer.digest, source.is_chat, source.loss_on, source.chat_format
        return self._renderers.get(key, make)

    def transform(self, name: str) -> Transform:
        """A user's function, for all pipelines. Raises ``ConfigError`` where it cannot be imported."""
        return self._transforms.get(name, partial(Transform, name, one_each=True))

    def code_of(self, sources: Iterable[SourceConfig]) -> dict[str, dict[str, str | None]]:
        """By name, the code of the users' functions that sources name, as it is now. Raises ``ConfigError``."""
        names = {source.transform for source in sources if source.transform is not None}
        return {name: dict(self.transform(name).code) for name in sorted(names)}

    def with_code(self, manifest: Manifest, sources: Iterable[SourceConfig]) -> Manifest:
        """The manifest with the code of the users' functions that its sources name. Raises ``ConfigError``, and
        ``SourceChanged`` where the manifest has one already, with other code."""
        code = self.code_of(sources)
        for name, now in code.items():
            recorded = manifest.transforms.get(name, now)
            if recorded != now:
                self.transform(name).close()
                raise SourceChanged(
                    f"transform {name!r}: its code is {now}, but the run began with {recorded}, and other code may "
                    "make other texts; put the old code back, or begin a new run"
                )
        return replace(manifest, transforms={**manifest.transforms, **code})

    def crash_records(self, record: RunRecord) -> CrashRecords | None:
        """The rows that may crash a tokeniser; None where there is none that could, or nowhere to note them."""
        if record.engine is None or record.engine.engine == "bytes" or self.index_dir is None:
            return None
        # Rows of other files are other rows, also to whom a document makes crash.
        name = f"{record.name}+{record.stream}" if record.stream else record.name
        return self._crash_records.get(name, partial(_crash_records, self.index_dir, name))

    def close(self) -> None:
        """An orderly end: no row is suspected of it, and no user's function or chat template is at work."""
        for transform in self._transforms.values():
            transform.close()
        for renderer in self._renderers.values():
            renderer.close()
        for records in self._crash_records.values():
            if records is not None:
                records.close()

    def check_files(self, manifest: Manifest) -> None:
        """Checks that every file lies below a data root: a pattern may meet links that lead elsewhere. Raises
        ``ConfigError``."""
        for source in manifest.sources:
            self.roots.check_paths(
                f"source {source.spec!r}", self.base_dir, [shard.path for shard in source.shards]
            )


def _crash_records(folder: Path, name: str) -> CrashRecords | None:
    try:
        return CrashRecords(folder, name)
    except OSError as error:
        _log.warning(
            "%s: %s cannot be written (%s): a document at which the tokeniser crashes will not be found",
            name, folder, reason(error),
        )  # fmt: skip
        return None
