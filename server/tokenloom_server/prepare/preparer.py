"""Preparing: a job's shards made by several threads, each once, and the mixture file that serves them."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tokenloom_server.errors import ConfigError, SourceError
from tokenloom_server.packing.tokenized_rows import BAD, FILTERED, TokenizedRows
from tokenloom_server.prepare.job import FIELDS_OF_READING, FIELDS_OF_SERVING, Job, Prepared, Task
from tokenloom_server.prepare.journal import Journal, Shard
from tokenloom_server.prepare.shards import COLUMN, ShardWriter
from tokenloom_server.sources import short_form
from tokenloom_server.storage.drafts import checksum, write_whole
from tokenloom_server.tokenizer.files import BYTES_TOKENIZER, FILES, TOKENIZER_FILE, tokenizer_file

_log = logging.getLogger(__name__)

MIXTURE = "mixture.yaml"
MANIFEST = "manifest.json"
#: Beside a mixture file, of each of its local files the XXH3-128 of all bytes.
DIGESTS = "digests.json"

#: Called with rows, their tokens and their bytes in the files that they come from; from any thread.
OnRows = Callable[[int, int, int], None]
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
    mixture: Path


def prepare(job: Job, folder: Path, *, on_done: OnRows, on_kept: OnRows) -> Done:
    """Makes the shards that are not there yet, then the manifest and the mixture file. ``on_done`` is called as rows
    are written, ``on_kept`` with the counts of each shard that was there.

    Raises ``ConfigError``, also where the folder cannot be written, ``SourceError`` and ``TokenizerError``. Whatever
    ends it, the next call goes on after the shards that are whole.
    """
    try:
        with Journal.open(folder, job, lambda task, shard: on_kept(shard.rows, shard.tokens, task.bytes)) as journal:
            missing = [task for task in job.tasks if not journal.is_done(task)]
            _make_all(job, missing, journal, on_done)
            return _finish(job, journal, len(job.tasks) - len(missing))
    except OSError as error:
        # Errors of reading are ``SourceError`` by now: this one is of writing.
        raise ConfigError(
            f"{error.filename or folder}: cannot be written ({error.strerror or error}); make room, or give another "
            "--out, and call it again"
        ) from None


def _make_all(job: Job, tasks: Sequence[Task], journal: Journal, on_done: OnRows) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(job.threads, thread_name_prefix="prepare") as pool:
        # Large ones first would end sooner, but in order of the files a disk reads them faster.
        work = [pool.submit(_make, job, task, journal, on_done, stop) for task in tasks]
        try:
            wait(work, return_when=FIRST_EXCEPTION)
        finally:
            # The others end at their next rows, also where somebody interrupts.
            stop.set()
            for each in work:
                each.cancel()
    for each in work:
        if not each.cancelled():
            each.result()


def _make(job: Job, task: Task, journal: Journal, on_done: OnRows, stop: threading.Event) -> None:
    with journal.draft(task) as draft:
        bad = filtered = read = 0
        with ShardWriter(draft, job.order.record.dtype, job.form) as writer:
            for rows_read, rows in job.read(task):
                if stop.is_set():
                    return
                writer.add(rows.ids, rows.ends)
                if rows.row_status is not None:
                    filtered += int(np.count_nonzero(rows.row_status == FILTERED))
                    bad += _bad_rows(job, task, rows, bad)
                read += rows_read
                on_done(len(rows.ends), len(rows.ids), task.bytes * rows_read // task.rows)
        if left := task.rows - read:
            raise SourceError(f"{task.name}: {left} of its {task.rows} rows are missing; the files changed meanwhile")
        size = draft.stat().st_size
        journal.add(Shard(task.name, writer.rows, bad, filtered, writer.tokens, size, checksum(draft)), draft)


def _bad_rows(job: Job, task: Task, rows: TokenizedRows, before: int) -> int:
    """How many of the rows are bad; logs the first one of a shard. Raises ``SourceError`` where they are too many."""
    positions = np.flatnonzero(rows.row_status == BAD)
    if not len(positions):
        return 0
    reason = rows.reasons[rows.origin(int(positions[0]))]
    if before == 0:
        _log.warning("%s; bad rows are skipped, and counted", reason)
    most = job.order.max_bad_rows(task.source)
    if most is not None and before + len(positions) > most:
        raise SourceError(
            f"{reason}; so far {before + len(positions)} rows of {task.name} are bad, and {_allowed(most)}"
        )
    return len(positions)


def _allowed(most: int) -> str:
    return f"max_bad_rows allows {most} in an epoch: repair the files, or allow more"


def _finish(job: Job, journal: Journal, kept: int) -> Done:
    document = job.document()
    described = zip(job.sources, document["sources"], strict=True)
    sources = [_source(job, prepared, fields, journal) for prepared, fields in described]
    totals = {key: sum(int(source[key]) for source in sources) for key in _COUNTS}
    manifest = {**document, "tokenloom": version("tokenloom"), "run": job.config.run, "sources": sources, **totals}
    folder = journal.folder
    tokenizer = _copy_tokenizer(job, folder)
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    digests = {task.name: journal.shard(task).checksum for task in job.tasks}
    write_whole(folder / DIGESTS, json.dumps(digests, indent=1) + "\n")
    write_whole(folder / MIXTURE, short_form.as_yaml(_mixture(job, tokenizer)))
    return Done(**totals, shards=len(job.tasks), kept=kept, mixture=folder / MIXTURE)


def _source(job: Job, prepared: Prepared, fields: dict[str, Any], journal: Journal) -> dict[str, Any]:
    """A source in the manifest: what its shards are made from, and what they hold."""
    spec = prepared.config.source
    shards = [
        {"path": task.name, **_origin(job, task), **journal.shard(task).content}
        for task in job.tasks
        if task.source == prepared.source
    ]
    totals = {key: sum(shard[key] for shard in shards) for key in _COUNTS}
    if not totals["tokens"]:
        raise SourceError(f"source {spec!r}: no row of it has a token, so it cannot be served; leave it out")
    most = job.order.max_bad_rows(prepared.source)
    if most is not None and totals["bad_rows"] > most:
        raise SourceError(f"source {spec!r}: {totals['bad_rows']} rows are bad, and {_allowed(most)}")
    fields = {key: value for key, value in fields.items() if key != "source"}
    return {"spec": spec, "served_as": _spec(job, prepared), **fields, **totals, "shards": shards}


def _origin(job: Job, task: Task) -> dict[str, Any]:
    first = task.ranges[0]
    if job.order.config.sources[task.source].shuffle == "rows":
        return {"windows": [first.part, task.ranges[-1].part + 1]}
    return {"of": job.order.record.shard_paths[task.source][first.part], "first_row": first.row}


def _spec(job: Job, prepared: Prepared) -> str:
    if job.form == "arrow":
        return f"arrow:{prepared.folder}:{COLUMN}"
    return f"parquet:{prepared.folder}/*.parquet:{COLUMN}"


def _copy_tokenizer(job: Job, folder: Path) -> str | None:
    """The tokeniser beside the shards, so that the folder can go elsewhere and text still be shown."""
    name = job.config.tokenizer
    if name is None or name == BYTES_TOKENIZER:
        return name
    named = tokenizer_file(name, job.base_dir)
    # A file of another name may stand beside others that are not its own.
    beside = FILES if named.name == TOKENIZER_FILE else ()
    (folder / "tokenizer").mkdir(exist_ok=True)
    for path in (named, *(named.with_name(file) for file in beside)):
        if path.is_file():
            shutil.copyfile(path, folder / "tokenizer" / path.name)
    return "tokenizer" if beside else f"tokenizer/{named.name}"


def _mixture(job: Job, tokenizer: str | None) -> dict[str, Any]:
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
        served_as_before = FIELDS_OF_SERVING | (FIELDS_OF_READING if source.shuffle == "none" else set())
        named = {"source": _spec(job, prepared), "alias": fields.get("alias", fields["source"])}
        fields = {key: value for key, value in fields.items() if key in served_as_before}
        # A document that is rearranged keeps its end-of-text id last, if the source says that there is one.
        ends = {"add_bos": False, "add_eot": "auto" if fields.get("fim") and config.adds_eot(source) else False}
        return named | {key: value for key, value in fields.items() if key not in named} | ends

    document: dict[str, Any] = plain(job.config.model_dump(exclude_defaults=True))
    if tokenizer is not None:
        document["tokenizer"] = tokenizer
    return document


def input_bytes(job: Job) -> int:
    """Of all rows that are prepared, their part of the files."""
    return int(np.sum([task.bytes for task in job.tasks]))
