"""The index of a source's buckets: which of its rows lie in which bucket, in the order of its files.

Built once from the column that decides, shard by shard in threads, and cached by the files' fingerprints. It takes four
bytes a row (eight from 2^32 rows on), mapped from the cache where there is one.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import xxhash
from tokenloom_proto.seal import canonical
from tokenloom_proto.threads import pool

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.files import reported
from tokenloom_server.sources.tensor_source import FeatureSource
from tokenloom_server.storage.file import replaced

_log = logging.getLogger(__name__)

#: Version of the cached form; a part of the file's name, so that another one is not even opened.
FORMAT = 2
#: Shards that are read at once while an index is built.
THREADS = 8
#: While that lasts, the log says how far it is, seconds apart.
PROGRESS_S = 5.0

_Int64s = npt.NDArray[np.int64]
_Rows = npt.NDArray[np.unsignedinteger]

#: The code of a row that lies in no bucket: it is longer than the last edge.
_LEFT_OUT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketIndex:
    """``keys`` [K]: the buckets' names, in ascending order of what they stand for; ``begins`` [K + 1]: where each one's
    rows begin in ``rows``, which are numbers of the source's rows, bucket by bucket, ascending in each.
    ``shard_ends`` [shards + 1]: with which of the source's rows each shard begins. ``left_out``: rows in no bucket."""

    keys: tuple[str, ...]
    begins: _Int64s
    rows: _Rows
    shard_ends: _Int64s
    left_out: int

    @property
    def row_count(self) -> int:
        """All rows of the source."""
        return int(self.shard_ends[-1])

    @property
    def counts(self) -> _Int64s:
        """[K]: the rows of each bucket."""
        return np.diff(self.begins)

    def batches(self, size: int) -> _Int64s:
        """[K]: the full batches of each bucket."""
        counts: _Int64s = self.counts // size
        return counts

    def take(self, bucket: int, places: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Rows of a bucket, by their places in it [n]: shard and row in shard, [n] each."""
        rows = self.rows[int(self.begins[bucket]) + places].astype(np.int64)
        shards = np.searchsorted(self.shard_ends, rows, "right") - 1
        return shards, rows - self.shard_ends[shards]


class Bucketing(NamedTuple):
    """What names a row's bucket: a column's value, or with ``by_length`` the length of its list; by ``edges``."""

    column: str
    by_length: bool
    edges: tuple[int, ...] = ()


def bucket_index(
    source: FeatureSource, bucketing: Bucketing, index_dir: Path | None, name: str
) -> BucketIndex:
    """The index of a source, from the cache in ``index_dir`` (None: there is none) or made anew; ``name`` is for the
    log. Raises ``SourceError`` naming the file for what cannot be read, or names no bucket."""
    path = (
        None
        if index_dir is None
        else index_dir / f"buckets-{FORMAT}-{_signature(source, bucketing)}.idx"
    )
    if path is not None and path.exists():
        try:
            return _load(path)
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            _log.warning(
                "%s: the bucket index %s is unusable (%s) and is made anew", name, path, error
            )
    built = _build(source, bucketing, name)
    if path is None:
        return built
    try:
        _save(built, path)
        return _load(path)
    except (OSError, ValueError) as error:
        _log.warning(
            "%s: the bucket index cannot be kept in %s (%s); it is made at each start",
            name,
            path,
            error,
        )
        return built


def _signature(source: FeatureSource, bucketing: Bucketing) -> str:
    text = canonical(
        [list(bucketing), [[shard.size, shard.fingerprint] for shard in source.shards]]
    )
    return xxhash.xxh3_128_hexdigest(text.encode())


class _Coded(NamedTuple):
    """A shard's rows: their different keys, and of each row which of them (``_LEFT_OUT`` for none)."""

    keys: list[int] | list[str]
    codes: npt.NDArray[np.int32]


def _build(source: FeatureSource, bucketing: Bucketing, name: str) -> BucketIndex:
    count = len(source.shards)

    def report(done: int) -> None:
        _log.info("%s: bucket index: %d of %d files read", name, done, count)

    coded = reported(partial(_coded, source, bucketing), report, PROGRESS_S)
    with pool(THREADS, "buckets") as threads:
        shards = list(threads.map(coded, range(count)))
    kinds = {type(key) for shard in shards for key in shard.keys}
    if len(kinds) > 1:
        raise SourceError(
            f"{name}: column {bucketing.column!r} holds numbers in some files and text in others"
        )
    keys: list[Any] = sorted({key for shard in shards for key in shard.keys})
    numbers = {key: number for number, key in enumerate(keys)}
    codes = np.concatenate(
        [
            np.array([*(numbers[key] for key in shard.keys), _LEFT_OUT], np.int32)[shard.codes]
            for shard in shards
        ]
    )
    ends = np.cumsum([0, *(len(shard.codes) for shard in shards)], dtype=np.int64)
    if not len(codes):
        raise SourceError(
            f"{name} has no rows; give it files with content, or take it out of the mixture"
        )
    order = np.argsort(codes, kind="stable")
    left_out = int(np.count_nonzero(codes == _LEFT_OUT))
    begins = np.cumsum([0, *np.bincount(codes[codes >= 0], minlength=len(keys))], dtype=np.int64)
    rows: _Rows = order[left_out:].astype(np.uint32 if len(codes) <= 2**32 else np.uint64)
    return BucketIndex(
        keys=tuple(map(str, keys)), begins=begins, rows=rows, shard_ends=ends, left_out=left_out
    )


def _coded(source: FeatureSource, bucketing: Bucketing, shard: int) -> _Coded:
    where = source.where(shard)
    keys: dict[Any, int] = {}
    codes: list[npt.NDArray[np.int32]] = []
    row = 0
    for array in source.bucket_arrays(shard, bucketing.column):
        _check_filled(array, row, bucketing, where)
        row_keys = (
            _lengths(array, bucketing, where)
            if bucketing.by_length
            else _values(array, bucketing.column, where)
        )
        if isinstance(row_keys, pa.Array):
            # Of an item of a list, or a value of a dictionary.
            _check_filled(row_keys, row, bucketing, where)
        row += len(array)
        if bucketing.edges:
            edges = np.array(bucketing.edges)
            places = np.searchsorted(edges, row_keys, "left")
            # Keys stay those of the edges, the one after the last stands for none.
            own = np.append(
                np.array([keys.setdefault(int(edge), len(keys)) for edge in edges], np.int32),
                _LEFT_OUT,
            )
            codes.append(own[places])
            continue
        unique, inverse = _unique(row_keys)
        own = np.array([keys.setdefault(key, len(keys)) for key in unique], np.int32)
        codes.append(own[inverse])
    return _Coded(list(keys), np.concatenate(codes) if codes else np.empty(0, np.int32))


def _check_filled(array: pa.Array, row: int, bucketing: Bucketing, where: str) -> None:
    """Raises ``SourceError`` for a null; ``row``: that of the array's first."""
    if array.null_count:
        first = row + int(arrays.flags(array.is_null()).argmax())
        raise SourceError(
            f"{where}: row {first} has a null in column {bucketing.column!r}, which names its bucket; fill it, or "
            "take such rows out"
        )


def _unique(values: Any) -> tuple[list[Any], npt.NDArray[np.integer]]:
    if isinstance(values, np.ndarray):
        unique, inverse = np.unique(values, return_inverse=True)
        return unique.tolist(), inverse
    encoded = values.dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy(zero_copy_only=False)


def _lengths(array: pa.Array, bucketing: Bucketing, where: str) -> _Int64s:
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    kind = array.type
    if not arrays.is_list(kind):
        raise SourceError(
            f"{where}: bucket_by is length({bucketing.column}), but that column is of type {kind}, not a list; name "
            "the column itself to go by its value"
        )
    return arrays.lengths(array)


def _values(array: pa.Array, column: str, where: str) -> Any:
    """Integers as int64, all else as text."""
    array = arrays.plain(array)
    kind = array.type
    if pa.types.is_integer(kind):
        try:
            integers = array.cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise SourceError(
                f"{where}: column {column!r} names buckets, which are int64, but {error}; store it as text"
            ) from None
        # A null is one of a dictionary's values.
        return integers if integers.null_count else arrays.numbers(integers)
    if pa.types.is_boolean(kind) or arrays.is_text(kind):
        return array.cast(pa.large_string())
    if arrays.is_list(kind) and pa.types.is_integer(kind.value_type):
        # Such as [height, width].
        if pa.types.is_fixed_size_list(kind):
            array = array.cast(pa.list_(kind.value_type))
        return pc.binary_join(array.cast(pa.list_(pa.string())), "x")
    raise SourceError(
        f"{where}: bucket_by names column {column!r} of type {kind}; expected integers, text, booleans or lists of "
        "integers, whose values name buckets"
    )


def _save(index: BucketIndex, path: Path) -> None:
    """As an Arrow file of the rows, whose schema has the rest."""
    header = canonical(
        {
            "keys": list(index.keys),
            "begins": index.begins.tolist(),
            "shard_ends": index.shard_ends.tolist(),
            "left_out": index.left_out,
            "checksum": xxhash.xxh3_128_hexdigest(index.rows.data),
        }
    )
    rows = arrays.from_numbers(index.rows)
    schema = pa.schema([("rows", rows.type)], {"index": header})
    with replaced(path) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch([rows], schema=schema))


def _load(path: Path) -> BucketIndex:
    """Raises what a damaged Arrow file raises, and ``ValueError`` where the checksum differs."""
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    header = json.loads(reader.schema.metadata[b"index"])
    rows: _Rows = arrays.numbers(reader.get_batch(0).column(0))
    if xxhash.xxh3_128_hexdigest(rows.data) != header["checksum"]:
        raise ValueError("its checksum is another one")
    return BucketIndex(
        keys=tuple(header["keys"]),
        begins=np.array(header["begins"], np.int64),
        rows=rows,
        shard_ends=np.array(header["shard_ends"], np.int64),
        left_out=int(header["left_out"]),
    )
