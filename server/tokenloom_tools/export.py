"""Exporting: a range of a run's order, written as files that others read. The way out.

Each sample becomes a document. As ``megatron``, the parts of a sample that are of different documents are its
sequences; as ``parquet``, a row has the sample's index, its source, its ids and where documents begin in it.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenloom_server.errors import ConfigError, reason
from tokenloom_server.sources import arrays
from tokenloom_server.sources.megatron import HEADER, MAGIC, TYPES, VERSION
from tokenloom_server.storage.file import checksum, draft_of, publish

from tokenloom_tools.peek import PeekedSample, SampleRange, format_of

ExportFormat = Literal["megatron", "parquet"]
#: Version of the JSON file beside the others.
FORMAT = 1
#: Ids that become one row group.
BATCH_IDS = 1 << 20


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: samples [begin, end) of the run."""

    begin: int
    end: int
    tokens: int
    files: tuple[Path, ...]


def export(
    samples: SampleRange,
    prefix: Path,
    form: ExportFormat,
    on_sample: Callable[[int, int, int], None],
) -> Exported:
    """Writes all samples that ``samples`` gives, and ``PREFIX.json`` that says what they are. ``on_sample`` is called
    after each: with 1, its tokens, and its bytes.

    All files are written under other names and renamed at the end, the ``.json`` last: where it is, all is whole.
    Raises ``ConfigError`` where one is there already, or none may be written, and what ``SampleRange.samples`` does.
    """
    endings = (".bin", ".idx", ".json") if form == "megatron" else (".parquet", ".json")
    paths = {ending: prefix.with_name(prefix.name + ending) for ending in endings}
    for path in paths.values():
        if path.exists():
            raise ConfigError(f"{path}: is there already; give another name, or take it away")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(error, prefix.parent) from None
    drafts = {ending: draft_of(path) for ending, path in paths.items()}
    try:
        document = _write(samples, drafts, form, on_sample)
        document["files"] = [
            {
                "name": paths[ending].name,
                "bytes": drafts[ending].stat().st_size,
                "checksum": checksum(drafts[ending]),
            }
            for ending in endings[:-1]
        ]
        drafts[".json"].write_text(
            json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        for ending, draft in drafts.items():
            publish(draft, paths[ending])
    except OSError as error:
        raise _unwritable(error, prefix) from None
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
    return Exported(samples.begin, document["to"], document["tokens"], tuple(paths.values()))


def _unwritable(error: OSError, path: Path) -> ConfigError:
    return ConfigError(f"{error.filename or path}: cannot be written ({reason(error)})")


def _write(
    samples: SampleRange,
    drafts: Mapping[str, Path],
    form: ExportFormat,
    on_sample: Callable[[int, int, int], None],
) -> dict[str, Any]:
    """Writes the samples, and returns what the JSON file says of them."""
    writer: _Megatron | _Parquet | None = None
    tokens, by_source = 0, Counter[str]()
    last: PeekedSample | None = None
    try:
        for sample in samples.samples():
            if writer is None:
                dtype = format_of(samples.joined).dtype
                if form == "megatron":
                    writer = _Megatron(
                        drafts[".bin"], drafts[".idx"], dtype, samples.joined.vocab_size
                    )
                else:
                    writer = _Parquet(drafts[".parquet"], dtype)
            writer.add(sample)
            by_source[sample.spec] += 1
            tokens += len(sample.ids)
            last = sample
            on_sample(1, len(sample.ids), sample.ids_with_label.nbytes)
    finally:
        if writer is not None:
            writer.finish()
    if last is None:
        raise ConfigError(
            f"there is nothing to export: samples {samples.begin} to {samples.end} are none; give --from and --to"
        )
    return _range(samples, last) | {
        "format": form,
        "tokens": tokens,
        "samples_by_source": dict(sorted(by_source.items())),
    }


#: Of a run's snapshots, what says which run and order an export is of.
_IDENTITY = (
    "run",
    "run_uid",
    "generation",
    "seed",
    "order_version",
    "config_digest",
    "manifest_digest",
    "tokenizer",
)


def _range(samples: SampleRange, last: PeekedSample) -> dict[str, Any]:
    """The run, and the range of its samples."""
    joined, form = samples.joined, format_of(samples.joined)
    record = json.loads(joined.snapshot_template)
    return {
        "tokenloom_export": FORMAT,
        "tokenloom": version("tokenloom"),
        **{key: record[key] for key in _IDENTITY if key in record},
        "from": samples.begin,
        "to": last.index + 1,
        "digest_before": joined.start_digest,
        "digest_after": last.digest,
        "total_tokens_before": joined.start_tokens,
        "total_tokens_after": last.total_tokens,
        "sequence_length": form.length,
        "labels": "shifted" if form.width > form.length else "same",
        "vocab_size": joined.vocab_size,
    }


class _Megatron:
    """``.bin`` and ``.idx``, as ``sources.megatron`` describes them."""

    def __init__(self, data: Path, index: Path, dtype: np.dtype[Any], vocab_size: int) -> None:
        # The format has no code for uint32.
        self._kind = (
            dtype if dtype.itemsize < 4 else np.dtype(np.int32 if vocab_size <= 2**31 else np.int64)
        )
        self._data = data.open("wb")
        self._index = index
        # Numbers as they lie in the index, which comes last: a range may have very many.
        self._lengths = array("i")
        self._edges = array("q", [0])

    def add(self, sample: PeekedSample) -> None:
        self._data.write(
            sample.ids_with_label.astype(self._kind.newbyteorder("<"), copy=False).tobytes()
        )
        edges = sorted({0, *sample.starts, len(sample.ids_with_label)})
        self._lengths.extend(end - begin for begin, end in pairwise(edges))
        self._edges.append(len(self._lengths))

    def finish(self) -> None:
        self._data.close()
        code = next(
            code for code, kind in TYPES.items() if np.dtype(kind) == self._kind.newbyteorder("<")
        )
        lengths = np.array(self._lengths, "<i4")
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self._kind.itemsize
        with self._index.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._edges)))
            for part in (lengths, pointers.astype("<i8"), np.array(self._edges, "<i8")):
                file.write(part.tobytes())


class _Parquet:
    """One file; pages have checksums."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        ids = pa.list_(pa.from_numpy_dtype(dtype))
        starts = pa.list_(pa.uint32())
        self._schema = pa.schema(
            [("sample", pa.int64()), ("source", pa.string()), ("ids", ids), ("starts", starts)]
        )
        self._writer = pq.ParquetWriter(str(path), self._schema, write_page_checksum=True)
        self._samples: list[PeekedSample] = []
        self._ids = 0

    def add(self, sample: PeekedSample) -> None:
        self._samples.append(sample)
        self._ids += len(sample.ids_with_label)
        if self._ids >= BATCH_IDS:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        samples, self._samples, self._ids = self._samples, [], 0
        if not samples:
            return
        columns = [
            pa.array([sample.index for sample in samples], pa.int64()),
            pa.array([sample.spec for sample in samples]),
            _lists([sample.ids_with_label for sample in samples]),
            _lists([np.array(sample.starts, np.uint32) for sample in samples]),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))


def _lists(rows: list[Any]) -> Any:
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate(rows)
    return arrays.lists(
        offsets, arrays.from_numbers(values.astype(values.dtype.newbyteorder("="), copy=False))
    )
