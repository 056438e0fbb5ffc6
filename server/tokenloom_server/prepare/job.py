"""What is to be prepared: which rows of which file become which shard, decided before any of them is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tokenloom_server.config import NodeConfig, RunConfig, SourceConfig
from tokenloom_server.data_roots import DataRoots
from tokenloom_server.errors import ConfigError
from tokenloom_server.order import Order
from tokenloom_server.sources.base import Content
from tokenloom_server.sources.files import in_threads

#: Version of the files that a folder of prepared shards has beside these.
FORMAT = 1

ShardFormat = Literal["arrow", "parquet"]

#: What decides the tokens of a source's rows; all else of a source decides when and how often they are served.
_FIELDS_OF_ROWS = ("source", "add_bos", "add_eot")


@dataclass(frozen=True, slots=True)
class Task:
    """Rows [row, row + rows) of a file become one shard. ``bytes``: their part of the file, by their number."""

    source: int
    file: int
    row: int
    rows: int
    bytes: int
    name: str
    """The shard's path, relative to the folder."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A source that is prepared: its number in the job's order, and where its shards lie."""

    source: int
    config: SourceConfig
    folder: str
    files: tuple[int, ...]
    """Those that have rows."""


class Job:
    """A mixture file's sources, and how they are cut into shards. Immutable.

    Shards depend on the files, the tokeniser and ``shard_bytes`` alone: not on how many threads make them.
    """

    def __init__(self, config: RunConfig, order: Order, *, form: ShardFormat, shard_bytes: int, ids_too: bool) -> None:
        """``order`` reads each source once, in file order; see ``create``."""
        self.config = config
        self.order = order
        self.form: ShardFormat = form
        self.shard_bytes = shard_bytes
        named = {source.source: source for _, source in config.named_sources()}
        chosen = [i for i, spec in enumerate(order.specs) if ids_too or order.open(i).content is Content.TEXT]
        self.sources: list[Prepared] = []
        self.tasks: list[Task] = []
        for i in chosen:
            source = named[order.specs[i]]
            folder = f"sources/{i:03d}-{_file_name(source)}"
            counts = in_threads(partial(_row_count, order, i), range(len(order.shards[i])))
            self.sources.append(Prepared(i, source, folder, tuple(f for f, rows in enumerate(counts) if rows)))
            self.tasks += self._cut(i, folder, counts)

    @classmethod
    def create(
        cls,
        config: RunConfig,
        base_dir: Path,
        index_dir: Path,
        roots: DataRoots,
        *,
        form: ShardFormat,
        shard_bytes: int,
        ids_too: bool,
        threads: int,
    ) -> Job:
        """Reads headers and indexes, and chooses the tokeniser's engine.

        Raises ``ConfigError`` where there is nothing to prepare, ``SourceError`` and ``TokenizerError``.
        """
        order = Order.create(_reading(config), base_dir, index_dir, roots, engines=threads)
        job = cls(config, order, form=form, shard_bytes=shard_bytes, ids_too=ids_too)
        if not job.sources:
            raise ConfigError(
                f"run {config.run!r}: every source holds ids already, so there is nothing to tokenise; serve it as it "
                "is, or give --ids to write these, too, as shards of the narrowest type"
            )
        return job

    def document(self) -> dict[str, Any]:
        """What decides the shards' content: two jobs with the same document make the same bytes."""
        record = json.loads(self.order.record())
        config = self.order.config
        return {
            "format": FORMAT,
            "shards": {"format": self.form, "bytes": self.shard_bytes, "ids": self.order.dtype.name},
            "tokenizer": record["tokenizer"],
            "special_tokens_in_text": config.special_tokens_in_text,
            "vocab_size": self.order.vocab_size,
            "end_of_text_id": self.order.end_of_text_id,
            "begin_of_text_id": self.order.begin_of_text_id,
            "sources": [self._source_document(prepared, record) for prepared in self.sources],
        }

    def _source_document(self, prepared: Prepared, record: dict[str, Any]) -> dict[str, Any]:
        found = self.order.config.sources[prepared.source]
        fields = next(child for child in record["config"]["mixture"]["children"] if child["source"] == found.source)
        return {
            **{key: value for key, value in fields.items() if key not in ("weight", "epochs")},
            "add_bos": self.order.config.adds_bos(found),
            "add_eot": self.order.config.adds_eot(found),
            "files": [
                {"path": shard.path, "size": shard.size, "fingerprint": shard.fingerprint}
                for shard in self.order.shards[prepared.source]
            ],
        }

    def _cut(self, source: int, folder: str, counts: Sequence[int]) -> Iterator[Task]:
        for file, (shard, rows) in enumerate(zip(self.order.shards[source], counts, strict=True)):
            if not rows:
                continue
            parts = max(1, min(rows, round(shard.size / self.shard_bytes)))
            edges = [rows * part // parts for part in range(parts + 1)]
            for part in range(parts):
                name = f"{folder}/{file:06d}-{part:06d}.{self.form}"
                count = edges[part + 1] - edges[part]
                yield Task(source, file, edges[part], count, shard.size * count // rows, name)


def _row_count(order: Order, source: int, file: int) -> int:
    # A reader is for one thread.
    return order.open(source).row_count(file)


def _reading(config: RunConfig) -> RunConfig:
    """A config under which every source of every phase is read once, from its first row to its last."""
    children = []
    for _, source in config.named_sources():
        fields = {name: getattr(source, name) for name in _FIELDS_OF_ROWS}
        children.append(SourceConfig(**fields))
    mixture = NodeConfig(policy="sequential", children=list(children))
    return RunConfig.model_validate(config.model_copy(update={"mixture": mixture, "phases": []}).model_dump())


def _file_name(source: SourceConfig) -> str:
    """What a source is called among files."""
    name = source.alias or source.spec.location
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[-60:] or "source"
