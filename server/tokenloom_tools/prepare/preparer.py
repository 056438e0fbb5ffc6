"""Preparing: a job's shards made by several threads, each once, and the mixture file that serves them."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenloom_proto.threads import pool
from tokenloom_server.errors import ConfigError, SourceError, TokenizerError, reason
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.tokenized_rows import BAD, TokenizedRows
from tokenloom_server.packing.window import RangeReader
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import Content, Rows, Source
from tokenloom_server.storage.file import checksum
from tokenloom_server.tokenizer.files import BYTES_TOKENIZER, FILES, TOKENIZER_FILE, tokenizer_file
from tokenloom_server.workers.transforms import Transform, TransformFailed, rows_named

from tokenloom_tools import short_form
from tokenloom_tools.prepare.folder import Folder
from tokenloom_tools.prepare.job import FIELDS_OF_READING, FIELDS_OF_SERVING, Job, Prepared, Task
from tokenloom_tools.prepare.journal import Journal, Shard
from tokenloom_tools.prepare.shards import COLUMN, ShardFormat, ShardWriter

_log = logging.getLogger(__name__)

MIXTURE = "mixture.yaml"
MANIFEST = "manifest.json"
#: Beside a mixture file, of each of its local files the XXH3-128 of all bytes.
DIGESTS = "digests.json"

#: The fields of a shard that are summed over a source, and over all.
_COUNTS = ("rows", "bad_rows", "filtered_rows", "tokens", "bytes")


@dataclass(frozen=True, slots=True)
class Done:
    """What lies in the folder at the end, and how many of its shards were there before."""

    rows: int
    bad_rows: int
    filtered_rows: int
    tokens: int
    bytes: int
    shards: int
    kept: int
    """Of the shards, how many were there already."""
    mixture: Path | str
    """Its path, or its URL."""


#: Called with rows, their tokens and their bytes in the files that they come from; from any thread.
OnRows = Callable[[int, int, int], None]
#: Makes shards of a job that are not there yet, and adds them to the journal. Raises what ``Maker.make`` does.
MakeAll = Callable[[Job, Sequence[Task], Journal, OnRows], None]


def prepare(
    job: Job, out: Path | str, *, on_done: OnRows, on_kept: OnRows, make_all: MakeAll | None = None
) -> Done:
    """Makes the shards that are not there yet, then the manifest and the mixture file, in a folder or below a URL.
    ``on_done`` is called as rows are written, ``on_kept`` with the counts of each shard that was there. ``make_all``:
    threads of this process, if nothing else is given.

    Raises ``ConfigError``, also where the folder cannot be written, ``SourceError`` and ``TokenizerError``. Whatever
    ends it, the next call goes on after the shards that are whole.
    """
    folder = Folder(out)
    try:
        with Journal.open(
            folder, job, lambda task, shard: on_kept(shard.rows, shard.tokens, task.bytes)
        ) as journal:
            missing = [task for task in job.tasks if task.name not in journal.done]
            if missing:
                (make_all or in_threads)(job, missing, journal, on_done)
            return _finish(job, journal, len(job.tasks) - len(missing))
    except OSError as error:
        # Errors of reading are ``SourceError`` by now: this one is of writing.
        raise cannot_write(error, folder) from None


def in_threads(job: Job, tasks: Sequence[Task], journal: Journal, on_done: OnRows) -> None:
    """Makes shards in threads of this process, as many at once as the job says."""
    stop = threading.Event()
    maker = Maker(job.order, job.form, job.transform)

    def on_rows(*counts: int) -> None:
        if stop.is_set():
            raise CancelledError
        on_done(*counts)

    def make(task: Task) -> None:
        attempt = journal.attempts.named(task.name, 0)
        with journal.folder.created(attempt) as path:
            shard = maker.make(task, path, on_rows)
        journal.add(shard, attempt)

    with pool(job.threads, "prepare") as threads:
        # Large ones first would end sooner, but in order of the files a disk reads them faster.
        work = [threads.submit(make, task) for task in tasks]
        try:
            wait(work, return_when=FIRST_EXCEPTION)
        finally:
            # The others end at their next rows, also where somebody interrupts.
            stop.set()
            for each in work:
                each.cancel()
    for each in work:
        with suppress(CancelledError):
            each.result()


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes shards, which depend on these and on the task alone. Thread-safe."""

    order: PipelineFactory
    form: ShardFormat
    transform: Transform | None

    def make(self, task: Task, path: Path, on_rows: OnRows) -> Shard:
        """Writes a task's shard, and logs the first bad row in it. ``on_rows`` is called as rows are written.

        Raises ``SourceError``, also where rows are missing or too many are bad, and ``TokenizerError``.
        """
        counts, read = np.zeros(2, np.int64), 0
        with closing(ShardWriter(path, self.order.record.dtype, self.form)) as writer:
            for rows_read, rows in self._read(task):
                writer.add(rows.ids, rows.ends)
                before = int(counts[0])
                counts += rows.bad_and_filtered
                if counts[0] > before:
                    self._note_bad_rows(task, rows, before, int(counts[0]))
                read += rows_read
                on_rows(len(rows.ends), len(rows.ids), task.bytes * rows_read // task.rows)
        if left := task.rows - read:
            raise SourceError(
                f"{task.name}: {left} of its {task.rows} rows are missing; the files changed meanwhile"
            )
        bad, filtered = counts.tolist()
        return Shard(
            task.name,
            writer.rows,
            bad,
            filtered,
            writer.tokens,
            path.stat().st_size,
            checksum(path),
        )

    def _read(self, task: Task) -> Iterator[tuple[int, TokenizedRows]]:
        """A task's rows, some at a time: how many are read, and what becomes of them."""
        # Where a record batch ends follows from the pieces, and from nothing else: shards are compared by checksum.
        reader = self.order.readers.open(task.source)
        documents = self.order.documents(task.source, reader, joined=False)
        if self.transform is not None and reader.content is Content.TEXT:
            for ranges in task.ranges:
                yield from _transformed(reader, documents, self.transform, *ranges)
            return
        for part, row, count in task.ranges:
            for rows in documents.read_part(part, row, count):
                yield len(rows.ends), rows

    def _note_bad_rows(self, task: Task, rows: TokenizedRows, before: int, bad: int) -> None:
        """Raises ``SourceError`` where a shard's bad rows are too many."""
        reason = rows.reasons[rows.origin(int(np.argmax(rows.row_status == BAD)))]
        if before == 0:
            _log.warning("%s; bad rows are skipped, and counted", reason)
        most = self.order.max_bad_rows(task.source)
        if most is not None and bad > most:
            raise SourceError(
                f"{reason}; so far {bad} rows of {task.name} are bad, and {_allowed(most)}"
            )


def _transformed(
    reader: Source, documents: Documents, transform: Transform, file: int, row: int, count: int
) -> Iterator[tuple[int, TokenizedRows]]:
    """So many rows of a file from one of them on, some at a time: how many these are, and the texts that a user's
    function made of them, tokenised.

    Rows that are bad or filtered out do not reach the function; they stand as empty ones after the texts of the others.
    Raises ``SourceError`` with file and rows where the function fails, and ``TokenizerError``.
    """
    for rows in RangeReader(reader).read(file, row, row + count):
        passing = np.ones(len(rows.column), np.bool_) if rows.filtered is None else ~rows.filtered
        passing[[bad.position for bad in rows.bad]] = False
        positions = np.flatnonzero(passing)
        texts = arrays.filled(
            arrays.plain(rows.column).take(arrays.from_numbers(positions)).cast(pa.large_string())
        )
        if len(texts):
            try:
                texts = transform.made_of(texts)
            except TransformFailed as error:
                failed = rows_named(
                    *(rows.first_row + positions[[error.begin, error.end - 1]]).tolist()
                )
                raise SourceError(
                    f"{documents.name}: {documents.path(file)}: {failed}: transform {transform.name} failed: {error}; "
                    "mend it, and prepare into another folder"
                ) from None
        made = pa.concat_arrays([texts, pa.nulls(len(passing) - len(positions), texts.type)])
        bad = tuple(
            each._replace(position=len(texts) + number) for number, each in enumerate(rows.bad)
        )
        try:
            yield (
                len(rows.column),
                documents.tokenized(
                    0, file, Rows(rows.first_row, made, bad, np.arange(len(made)) >= len(texts))
                ),
            )
        except TokenizerError as error:
            made_of = f"what {transform.name} made of row {rows.first_row} and those after it, counted from there"
            raise TokenizerError(f"{made_of}: {error}") from None


def _allowed(most: int) -> str:
    return f"max_bad_rows allows {most} in an epoch: repair the files, or allow more"


def cannot_write(error: OSError, folder: Folder) -> ConfigError:
    """What to do about a folder that cannot be written."""
    place = error.filename or folder.place
    return ConfigError(
        f"{place}: cannot be written ({reason(error)}); make room, or give another --out, and call it again"
    )


def _finish(job: Job, journal: Journal, kept: int) -> Done:
    document = job.document()
    described = zip(job.sources, document["sources"], strict=True)
    sources = [_source(job, prepared, fields, journal) for prepared, fields in described]
    totals = {key: sum(int(source[key]) for source in sources) for key in _COUNTS}
    manifest = {
        **document,
        "tokenloom": version("tokenloom"),
        "run": job.config.run,
        "sources": sources,
        **totals,
    }
    folder = journal.folder
    tokenizer = _copy_tokenizer(job, folder)
    digests = {task.name: journal.done[task.name].checksum for task in job.tasks}
    folder.write(MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False).encode() + b"\n")
    folder.write(DIGESTS, json.dumps(digests, indent=1).encode() + b"\n")
    folder.write(MIXTURE, short_form.as_yaml(_mixture(job, folder, tokenizer)).encode())
    mixture = Path(folder.at(MIXTURE)) if folder.is_local else folder.at(MIXTURE)
    return Done(**totals, shards=len(job.tasks), kept=kept, mixture=mixture)


def _source(
    job: Job, prepared: Prepared, fields: dict[str, Any], journal: Journal
) -> dict[str, Any]:
    """A source in the manifest: what its shards are made from, and what they hold."""
    spec = prepared.config.source
    shards = [
        {"path": task.name, **_origin(job, task), **journal.done[task.name].content}
        for task in job.tasks
        if task.source == prepared.source
    ]
    totals = {key: sum(shard[key] for shard in shards) for key in _COUNTS}
    if not totals["tokens"]:
        raise SourceError(
            f"source {spec!r}: no row of it has a token, so it cannot be served; leave it out"
        )
    most = job.order.max_bad_rows(prepared.source)
    if most is not None and totals["bad_rows"] > most:
        raise SourceError(
            f"source {spec!r}: {totals['bad_rows']} rows are bad, and {_allowed(most)}"
        )
    fields = {key: value for key, value in fields.items() if key != "source"}
    return {
        "spec": spec,
        "served_as": _spec(job, prepared, journal.folder),
        **fields,
        **totals,
        "shards": shards,
    }


def _origin(job: Job, task: Task) -> dict[str, Any]:
    first = task.ranges[0]
    if job.order.config.sources[task.source].shuffle == "rows":
        return {"windows": [first.part, task.ranges[-1].part + 1]}
    return {"of": job.order.record.shard_paths[task.source][first.part], "first_row": first.row}


def _spec(job: Job, prepared: Prepared, folder: Folder) -> str:
    # A folder can go elsewhere with its mixture file; of a URL the mixture file is fetched alone.
    place = folder.at(prepared.folder) if not folder.is_local else prepared.folder
    return (
        f"arrow:{place}:{COLUMN}" if job.form == "arrow" else f"parquet:{place}/*.parquet:{COLUMN}"
    )


def _copy_tokenizer(job: Job, folder: Folder) -> str | None:
    """The tokeniser beside the shards, so that the folder can go elsewhere and text still be shown."""
    name = job.config.tokenizer
    if name is None or name == BYTES_TOKENIZER:
        return name
    named = tokenizer_file(name, job.base_dir)
    # A file of another name may stand beside others that are not its own.
    beside = FILES if named.name == TOKENIZER_FILE else ()
    for path in (named, *(named.with_name(file) for file in beside)):
        if path.is_file():
            folder.write(f"tokenizer/{path.name}", path.read_bytes())
    return "tokenizer" if beside else f"tokenizer/{named.name}"


def _mixture(job: Job, folder: Folder, tokenizer: str | None) -> dict[str, Any]:
    """The job's mixture file with the prepared sources in the place of their own."""
    served = {prepared.config.source: prepared for prepared in job.sources}

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if not isinstance(value, dict):
            return value
        fields = {key: plain(each) for key, each in value.items() if key not in ("id", "presence")}
        return child(fields) if "source" in fields else fields

    def child(fields: dict[str, Any]) -> dict[str, Any]:
        prepared = served.get(fields["source"])
        if prepared is None:
            scheme, _, rest = fields["source"].partition(":")
            here = rest.startswith("/") or "://" in rest or scheme == "hf"
            return fields if here else fields | {"source": f"{scheme}:{job.base_dir / rest}"}
        # Under its old name on pages and in logs; begin- and end-of-text ids lie in the shards.
        config = job.order.config
        source = config.sources[prepared.source]
        served_as_before = FIELDS_OF_SERVING | (
            FIELDS_OF_READING if source.shuffle == "none" else set()
        )
        named = {
            "source": _spec(job, prepared, folder),
            "alias": fields.get("alias", fields["source"]),
        }
        fields = {key: value for key, value in fields.items() if key in served_as_before}
        # A document that is rearranged keeps its end-of-text id last, if the source says that there is one.
        ends = {
            "add_bos": False,
            "add_eot": "auto" if fields.get("fim") and config.adds_eot(source) else False,
        }
        return named | {key: value for key, value in fields.items() if key not in named} | ends

    document: dict[str, Any] = plain(job.config.model_dump(exclude_defaults=True))
    if tokenizer is not None:
        document["tokenizer"] = tokenizer
    return document
