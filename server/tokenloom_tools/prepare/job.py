"""What is to be prepared: which rows of which file become which shard, decided before any of them is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.errors import ConfigError
from tokenloom_server.order import builder
from tokenloom_server.sources.base import Content
from tokenloom_server.sources.files import in_threads
from tokenloom_server.workers.transforms import Transform

from tokenloom_tools.prepare.shards import ShardFormat

#: Version of the files that a folder of prepared shards has beside these.
FORMAT = 1

#: Of a source, what decides when and how often its rows are served, and what is drawn anew each epoch; all else decides
#: their tokens, and is done with once these lie in shards.
FIELDS_OF_SERVING = frozenset(
    {
        "id",
        "presence",
        "alias",
        "weight",
        "epochs",
        "max_tokens",
        "on_exhausted",
        "lanes",
        "fim",
        "loss_mask",
        "holdout",
        "seen",
    }
)
#: What decides in which order its rows are read.
FIELDS_OF_READING = frozenset({"shuffle", "shuffle_window_rows"})


class PartRows(NamedTuple):
    """Rows [row, row + rows) of a part of an epoch (see ``packing.reading``): a file, or a window of shuffled rows."""

    part: int
    row: int
    rows: int


@dataclass(frozen=True, slots=True)
class Task:
    """Row ranges that become one shard. ``bytes``: their share of the files, by their rows."""

    source: int
    ranges: tuple[PartRows, ...]
    bytes: int
    name: str
    """The shard's path, relative to the folder."""

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.ranges)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A source that is prepared: its number in the job's order, and where its shards lie."""

    source: int
    config: SourceConfig
    folder: str


class Job:
    """A mixture file's sources, and how they are cut into shards. Immutable.

    Shards depend on the files, the tokeniser and ``shard_bytes`` alone: not on how many threads make them.
    """

    def __init__(
        self,
        config: RunConfig,
        base_dir: Path,
        index_dir: Path,
        roots: DataRoots,
        *,
        form: ShardFormat,
        shard_bytes: int,
        ids_too: bool,
        shuffled: bool,
        threads: int,
        transform: Transform | None = None,
    ) -> None:
        """Reads headers and indexes, and chooses the tokeniser's engine. ``shuffled``: rows are written in the order in
        which their first epoch reads them, not in that of the files. ``transform`` makes the texts of the rows of text.

        Raises ``ConfigError`` where there is nothing to prepare, ``SourceError`` and ``TokenizerError``.
        """
        if config.batching is not None:
            raise ConfigError(
                f"run {config.run!r}: batching serves rows that are ready tensors, so there is nothing to tokenise; "
                "serve it as it is"
            )
        if transform is not None and shuffled:
            raise ConfigError(
                "--transform cannot go with --shuffle: leave that out, and the new mixture file shuffles the shards"
            )
        self.config = config
        self.transform = transform
        self.base_dir = base_dir
        self.form: ShardFormat = form
        self.shard_bytes = shard_bytes
        self.threads = threads
        #: Reads each source once, in the order of its files.
        self.order = builder.create(
            reading_once(config, shuffled=shuffled), base_dir, index_dir, roots, encoders=threads
        )
        named = _by_spec(config, transform)
        self.sources: list[Prepared] = []
        self.tasks: list[Task] = []
        for i, spec in enumerate(self.order.record.specs):
            source = named[spec]
            # Shards have ids alone, so a source with a loss mask beside them stays as it is.
            if not source.has_loss_mask and (
                ids_too or self.order.readers.open(i).content is Content.TEXT
            ):
                folder = f"sources/{i:03d}-{_file_name(source)}"
                self.sources.append(Prepared(i, source, folder))
                for number, (ranges, size) in enumerate(self._cut(i)):
                    self.tasks.append(Task(i, ranges, size, f"{folder}/{number:06d}.{form}"))
        if not self.sources:
            raise ConfigError(
                f"run {config.run!r}: every source holds ids already, or conversations, so there is nothing to "
                "tokenise; serve it as it is, or give --ids to write ids, too, as shards of the narrowest type (those "
                "with a loss mask are left as they are)"
            )

    def document(self) -> dict[str, Any]:
        """What decides the shards' content: two jobs with the same document make the same bytes."""
        record = json.loads(self.order.record.to_json())
        config = self.order.config
        transforms = self.order.record.manifest.transforms
        children = {child["source"]: child for child in record["config"]["mixture"]["children"]}
        return {
            "format": FORMAT,
            "shards": {
                "format": self.form,
                "bytes": self.shard_bytes,
                "ids": self.order.record.dtype.name,
            },
            "tokenizer": record["tokenizer"],
            "transform": dict(self.transform.code) if self.transform is not None else None,
            **({"transforms": transforms} if transforms else {}),
            "special_tokens_in_text": config.special_tokens_in_text,
            "vocab_size": self.order.record.vocab_size,
            "end_of_text_id": self.order.record.end_of_text_id,
            "begin_of_text_id": self.order.record.begin_of_text_id,
            "seed": config.seed if self.shuffled else None,
            "sources": [
                self._described(prepared, children[prepared.config.source])
                for prepared in self.sources
            ],
        }

    @property
    def shuffled(self) -> bool:
        """Whether a source's rows are written in another order than that of its files."""
        return any(source.shuffle != "none" for source in self.order.config.sources)

    def _described(self, prepared: Prepared, fields: dict[str, Any]) -> dict[str, Any]:
        source = self.order.config.sources[prepared.source]
        return {
            **{key: value for key, value in fields.items() if key not in ("weight", "epochs")},
            "add_bos": self.order.config.adds_bos(source),
            "add_eot": self.order.config.adds_eot(source),
            "files": [
                {"path": shard.path, "size": shard.size, "fingerprint": shard.fingerprint}
                for shard in self.order.record.shards[prepared.source]
            ],
        }

    def _cut(self, source: int) -> Iterator[tuple[tuple[PartRows, ...], int]]:
        """The row ranges of each shard, and their bytes."""
        order, shards = self.order, self.order.record.shards[source]
        if order.config.sources[source].shuffle == "rows":
            yield from self._cut_windows(source)
            return
        edges = in_threads(partial(self._edges, source), range(len(shards)))
        for file in order.readers.reading(source, order.readers.open(source)).parts(0):
            rows, size = edges[file][-1], shards[file].size
            for begin, end in pairwise(edges[file]):
                yield (PartRows(file, begin, end - begin),), size * (end - begin) // rows

    def _edges(self, source: int, file: int) -> list[int]:
        """The rows at which a file is cut: where it can be read from without reading what lies before."""
        # A reader is for one thread.
        blocks = self.order.readers.open(source).blocks(file)
        parts = max(1, round(self.order.record.shards[source][file].size / self.shard_bytes))
        wanted = [int(blocks[-1]) * part // parts for part in range(parts + 1)]
        return sorted(set(blocks[np.searchsorted(blocks, wanted)].tolist()))

    def _cut_windows(self, source: int) -> Iterator[tuple[tuple[PartRows, ...], int]]:
        # Reading from the middle of a window needs all of it, so no window is divided.
        order, total = self.order, sum(shard.size for shard in self.order.record.shards[source])
        reading = order.readers.reading(source, order.readers.open(source))
        ranges: list[PartRows] = []
        rows = 0
        for window in reading.parts(0):
            ranges.append(PartRows(window, 0, reading.rows_in(window)))
            rows += ranges[-1].rows
            size = total * rows // reading.rows
            if size >= self.shard_bytes:
                yield tuple(ranges), size
                ranges, rows = [], 0
        if ranges:
            yield tuple(ranges), total * rows // reading.rows


def reading_once(config: RunConfig, *, shuffled: bool = False, **of_sources: Any) -> RunConfig:
    """A config under which every source of every phase is read once, from its first row to its last. ``of_sources``:
    options that each has beside its own."""
    left_out = set(FIELDS_OF_SERVING if shuffled else FIELDS_OF_SERVING | FIELDS_OF_READING)
    children = [
        source.model_dump(exclude=left_out) | of_sources for _, source in config.named_sources()
    ]
    document = config.model_dump(exclude={"phases"}) | {
        "mixture": {"policy": "sequential", "children": children}
    }
    return RunConfig.model_validate(document, context=config.catalog)


def _by_spec(config: RunConfig, transform: Transform | None) -> dict[str, SourceConfig]:
    """The sources that the mixture file names. Raises ``ConfigError`` for one of which some rows were seen, and with
    ``transform`` for one that has another."""
    for path, source in config.named_sources():
        if source.seen is not None:
            raise ConfigError(
                f"{path}.seen: is of the files as they are, and shards have other rows: leave it out to prepare the "
                "source, or serve the source as it is"
            )
        if transform is not None and source.transform is not None:
            raise ConfigError(
                f"{path}.transform: {source.transform!r} cannot go with --transform; leave one of them out"
            )
    return {source.source: source for _, source in config.named_sources()}


def _file_name(source: SourceConfig) -> str:
    """What a source is called among files."""
    name = source.alias or source.spec.location
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[-60:] or "source"
