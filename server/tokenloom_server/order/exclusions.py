"""Rows that a run leaves out: from some sample on, as take-downs and duplicates that were found late; and of a first
epoch, since another data loader had given them, by the file of flags that the mixture file names."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from tokenloom_proto.files import read_file

from tokenloom_server.config.source import SeenConfig
from tokenloom_server.errors import ConfigError, SourceChanged, reason
from tokenloom_server.packing.samples import Int64s

_Rows = npt.NDArray[np.int64]
_COLUMNS = ("spec", "shard", "row")
#: Of a file of rows.
MAX_BYTES = 2**32


class ExclusionFile(NamedTuple):
    """A file of rows as a revision names it: it has to stay as it is, as the data have to."""

    path: str
    sha256: str
    rows: int


#: By each name that a file of exclusions may use for a source, its spec or its alias: its spec, and its shards' paths.
NamedSources = Mapping[str, tuple[str, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Exclusions:
    """By spec and shard, ascending, the rows that are left out. Immutable."""

    files: tuple[ExclusionFile, ...]
    rows: Mapping[str, Mapping[int, _Rows]]

    def of(self, spec: str) -> Mapping[int, _Rows]:
        """The rows of one source that are left out, by shard."""
        return self.rows.get(spec, {})

    def count(self, spec: str) -> int:
        """Rows of one epoch of a source that are left out."""
        return sum(len(rows) for rows in self.of(spec).values())


NOTHING_EXCLUDED = Exclusions((), {})


def describe(path: str, base_dir: Path) -> ExclusionFile:
    """A file of rows as it is now. Raises ``ConfigError``."""
    try:
        data = read_file(base_dir / path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"exclude.file: {path!r} cannot be read ({reason(error)}); the path is this server's"
        ) from None
    return ExclusionFile(
        path, hashlib.sha256(data).hexdigest(), _table(path, base_dir / path).num_rows
    )


def load(files: Iterable[ExclusionFile], base_dir: Path, sources: NamedSources) -> Exclusions:
    """Reads the rows of all files.

    Raises ``SourceChanged`` for a file that is not what it was, ``ConfigError`` for rows of unknown sources or shards.
    """
    files = tuple(files)
    parts: list[tuple[tuple[str, int], _Rows]] = []
    for file in files:
        now = describe(file.path, base_dir)
        if now != file:
            raise SourceChanged(
                f"{file.path!r} lists the rows that a revision left out, and has another content now: found sha256 "
                f"{now.sha256}, expected {file.sha256}; put the file back as it was"
            )
        parts += _by_shard(file.path, _table(file.path, base_dir / file.path), sources)
    return _merged(files, parts)


def joined(first: Exclusions, second: Exclusions) -> Exclusions:
    """The rows of both."""
    every = (first, second)
    parts = [
        ((spec, i), rows)
        for each in every
        for spec in each.rows
        for i, rows in each.of(spec).items()
    ]
    return _merged(first.files + second.files, parts)


def _merged(
    files: tuple[ExclusionFile, ...], parts: Iterable[tuple[tuple[str, int], _Rows]]
) -> Exclusions:
    by_spec: dict[str, dict[int, _Rows]] = {}
    for (spec, shard), rows in parts:
        shards = by_spec.setdefault(spec, {})
        shards[shard] = np.union1d(shards.get(shard, rows), rows)
    return Exclusions(files, by_spec)


def _table(path: str, local: Path) -> pa.Table:
    # Not at the top: few runs leave rows out, and every start would wait for them.
    import pyarrow.csv
    import pyarrow.json

    try:
        table = (
            pyarrow.csv.read_csv(local) if path.endswith(".csv") else pyarrow.json.read_json(local)
        )
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(
            f"{path!r} cannot be read as {'CSV' if path.endswith('.csv') else 'JSON lines'}: {error}"
        ) from None
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise ConfigError(
            f"{path!r} has the columns {', '.join(table.column_names) or 'none'}; expected {', '.join(_COLUMNS)} "
            "(spec may be an alias), one row a line"
        )
    for name, expected in zip(_COLUMNS, (pa.string(), pa.string(), pa.int64()), strict=True):
        column = table[name]
        if column.null_count or not (
            column.type == expected or (pa.types.is_large_string(column.type))
        ):
            raise ConfigError(
                f"{path!r}: column {name} holds {column.type} (nulls: {column.null_count}), expected {expected}"
            )
    if table.num_rows and pc.min(table["row"]).as_py() < 0:
        raise ConfigError(
            f"{path!r}: column row has {pc.min(table['row']).as_py()}; rows count from 0 within their shard"
        )
    return table


def _by_shard(
    path: str, table: pa.Table, sources: NamedSources
) -> Iterator[tuple[tuple[str, int], _Rows]]:
    groups = table.group_by(["spec", "shard"], use_threads=False).aggregate([("row", "list")])
    columns = (groups["spec"].to_pylist(), groups["shard"].to_pylist(), groups["row_list"])
    for name, shard, rows in zip(*columns, strict=True):
        if name not in sources:
            raise ConfigError(
                f"{path!r}: the mixture has no source {name!r}; it has {', '.join(sorted(sources))}"
            )
        spec, paths = sources[name]
        if shard not in paths:
            raise ConfigError(
                f"{path!r}: source {name!r} has no shard {shard!r}; it has "
                f"{', '.join(paths[:5])}{', …' if len(paths) > 5 else ''}"
            )
        yield (spec, paths.index(shard)), rows.values.to_numpy()


def load_seen(
    seen: SeenConfig, base_dir: Path, row_counts: Sequence[int], file_counts: Collection[int]
) -> Mapping[int, Int64s]:
    """By shard, ascending, the rows that were seen; ``row_counts``: the rows of each shard;
    ``file_counts``: how many of these there were when the flags were made.

    Raises ``SourceChanged`` for a file that is not what it was, ``ConfigError`` for one that holds no flags, or not
    those of so many rows.
    """
    path = base_dir / seen.file
    try:
        digest = hashlib.sha256(read_file(path, MAX_BYTES)).hexdigest()
        flags = np.load(path, allow_pickle=False) if digest == seen.sha256 else None
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(
            f"seen.file: {seen.file!r} cannot be read: {error}; write it with numpy.save"
        ) from None
    if flags is None:
        raise SourceChanged(
            f"seen.file: {seen.file!r} lists the rows that another loader gave, and has another content now: found "
            f"sha256 {digest}, expected {seen.sha256}; put the file back as it was"
        )
    ends = np.cumsum(row_counts)
    shapes = [(ends[count - 1],) for count in file_counts]
    if not isinstance(flags, np.ndarray) or flags.dtype != np.bool_ or flags.shape not in shapes:
        actual = (
            f"{flags.dtype} of shape {flags.shape}"
            if isinstance(flags, np.ndarray)
            else "several arrays"
        )
        raise ConfigError(
            f"seen.file: {seen.file!r} holds {actual}, expected one bool for each of the source's {ends[-1]} rows: it "
            "is of other data, or no file of flags; make it again for these"
        )
    parts = np.split(flags, ends[:-1])
    return {shard: np.flatnonzero(part) for shard, part in enumerate(parts) if part.any()}


def with_seen(excluded: Mapping[int, Int64s], seen: Mapping[int, Int64s]) -> Mapping[int, Int64s]:
    """The rows of both, by shard."""
    shards = excluded.keys() | seen.keys()
    nothing = np.zeros(0, np.int64)
    return {
        shard: np.union1d(excluded.get(shard, nothing), seen.get(shard, nothing))
        for shard in shards
    }
