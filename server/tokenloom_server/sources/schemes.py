"""The schemes, but for that of the Hub, each with what its specs say; rows are read by the module of the format's name.

What reads rows is imported when a source is opened: a spec is parsed without it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenloom_proto.files import read_file

from tokenloom_server.config.catalog import Spec
from tokenloom_server.errors import ConfigError, SourceError
from tokenloom_server.sources import files
from tokenloom_server.sources.base import Content, Shard, Source, TensorFile
from tokenloom_server.sources.indexed_folder import (
    ITEM,
    MDS_ID_TYPES,
    Index,
    IndexedFolderScheme,
    ListedFile,
    LitdataIndex,
    MdsIndex,
)
from tokenloom_server.sources.locations import listed_names, matching_files, nearest_folder
from tokenloom_server.sources.scheme import RAW_TYPES, IdScheme, ReadRequest, Scheme
from tokenloom_server.storage import listing
from tokenloom_server.storage.file import File, pointer_fault_at
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.remote import Entry, open_file

# ``parquet:GLOB:COLUMN``: Parquet files.


class ParquetScheme(Scheme):
    """Files of row groups, whose footers say how many rows there are."""

    name = "parquet"
    usage = "parquet:GLOB:COLUMN"
    endings = (".parquet",)
    reads_any_row = True
    stores_row_counts = True

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.parquet import ParquetSource

        return ParquetSource(request)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        import pyarrow.parquet as pq

        from tokenloom_server.sources.columns import contents_of
        from tokenloom_server.storage.arrow_input import for_arrow

        return contents_of(pq.read_schema(for_arrow(file)))

    def open_tensors(self, file: File) -> TensorFile:
        from tokenloom_server.sources.parquet import ParquetTensors

        return ParquetTensors(file)


# ``jsonl:GLOB:COLUMN``: JSON lines, one object per line, whose COLUMN is a string or a list of integers.


class JsonlScheme(Scheme):
    """Files of JSON objects."""

    name = "jsonl"
    usage = "jsonl:GLOB:COLUMN"
    endings = (".jsonl", ".ndjson", ".json")
    may_be_compressed = True
    has_blank_lines = True

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.jsonl import open_jsonl

        return open_jsonl(request)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        from tokenloom_server.sources.jsonl import columns_of

        return columns_of(file, path)


# ``txt:GLOB:text``: plain text, one row per line; ``txt:GLOB:paragraph`` and ``txt:GLOB:file``: larger rows.


TEXT_COLUMN = "text"
#: What a spec may name instead of the column: what a row is, where it is no line.
PARAGRAPH, FILE = "paragraph", "file"


class TxtScheme(Scheme):
    """Files of text, whose lines are the rows, or whose paragraphs are, or each of which is one."""

    name = "txt"
    usage = "txt:GLOB:text"
    has_columns = False
    endings = (".txt",)
    may_be_compressed = True

    def parse(self, text: str) -> tuple[str, str]:
        location, column = super().parse(text)
        if column not in (TEXT_COLUMN, PARAGRAPH, FILE):
            raise ConfigError(
                f"a txt source has one column, {TEXT_COLUMN!r}, but {column!r} was asked for; where a row is no line, "
                f"name {PARAGRAPH!r} or {FILE!r} instead"
            )
        return location, column

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.lines import LinesSource, require_rows
        from tokenloom_server.sources.txt import UnitsSource, decode, file_ends, paragraph_ends

        require_rows(request)
        if request.spec.column == PARAGRAPH:
            return UnitsSource(request, paragraph_ends, "\r\n")
        if request.spec.column == FILE:
            return UnitsSource(request, file_ends, "")
        return LinesSource(request, Content.TEXT, decode)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        return {TEXT_COLUMN: Content.TEXT}


# ``arrow:DIR:COLUMN``: the Arrow files of a folder that ``save_to_disk`` of `datasets` wrote.


#: What a saved dataset says of its files, and a folder of saved datasets of its splits.
STATE, SPLITS = "state.json", "dataset_dict.json"


class ArrowScheme(Scheme):
    """Files of record batches, whose headers say how many rows there are."""

    name = "arrow"
    usage = "arrow:DIR:COLUMN"
    endings = (".arrow",)
    by_folder = True
    reads_any_row = True
    stores_row_counts = True

    def local_paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        """The files in the order that ``state.json`` gives, or else in that of their names."""
        where, folder = f"source {str(spec)!r}", base_dir / spec.location
        if not folder.is_dir():
            fault = "is a file" if folder.exists() else "does not exist"
            raise SourceError(
                f"{where}: {str(folder)!r} {fault}, expected a folder that `save_to_disk` wrote; "
                f"{nearest_folder(folder)}"
            )
        prefix = spec.location.rstrip("/") or "/"
        if (folder / SPLITS).is_file():
            choices = ", ".join(
                repr(f"arrow:{prefix}/{name}:{spec.column}") for name in _splits(folder)
            )
            raise SourceError(
                f"{where}: {str(folder)!r} holds a dataset for each split; name one of them: {choices or 'none found'}"
            )
        state = folder / STATE
        if fault := pointer_fault_at(state):
            raise SourceError(f"{where}: {str(state)!r} {fault}")
        if state.is_file():
            names = _names_in_state(where, str(state), read_file(state))
        else:
            names = _data_files(matching_files("*.arrow", folder))
        if not names:
            raise SourceError(
                f"{where}: no Arrow file in {str(folder)!r}, expected state.json with data-*.arrow, or *.arrow files "
                f"({listed_names(folder)})"
            )
        return tuple(f"{prefix}/{name}" for name in names)

    def remote_entries(self, spec: Spec, io_stats: IoStats) -> Sequence[Entry]:
        where, folder = f"source {str(spec)!r}", spec.location.rstrip("/")
        listed = {
            entry.path.rpartition("/")[2]: entry for entry in listing.folder(folder, io_stats)
        }
        if SPLITS in listed:
            raise SourceError(
                f"{where}: {folder!r} holds a dataset for each split; name one of its folders"
            )
        names = _data_files(listed)
        if STATE in listed:
            state = f"{folder}/{STATE}"
            with open_file(state, Path(), f"{where}: {state!r}", io_stats) as file:
                files.refuse_pointer(file)
                names = _names_in_state(where, state, bytes(file.read_at(0, file.size)))
        if not names:
            raise SourceError(
                f"{where}: no Arrow file in {folder!r}, expected state.json with data-*.arrow, or *.arrow files"
            )
        missing = [name for name in names if name not in listed]
        if missing:
            raise SourceError(
                f"{where}: {folder!r} has no {missing[0]!r}, which its state.json names; upload it whole"
            )
        return [listed[name] for name in names]

    def is_folder(self, folder: Path, path: str) -> bool:
        if (folder / SPLITS).is_file():
            names = ", ".join(f"{path}/{split}" for split in _splits(folder)) or "none found"
            raise ConfigError(
                f"the folder holds a dataset for each split; name one of them: {names}"
            )
        return (folder / STATE).is_file() or any(folder.glob("*.arrow"))

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.arrow import ArrowSource

        return ArrowSource(request)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        from tokenloom_server.sources.arrow import open_arrow
        from tokenloom_server.sources.columns import contents_of

        return contents_of(open_arrow(file).schema)

    def open_tensors(self, file: File) -> TensorFile:
        from tokenloom_server.sources.arrow import open_tensors

        return open_tensors(file)


def _splits(folder: Path) -> list[str]:
    return sorted(state.parent.name for state in folder.glob(f"*/{STATE}") if state.is_file())


def _names_in_state(where: str, state: str, text: bytes) -> list[str]:
    try:
        document = json.loads(text)
        names = [str(entry["filename"]) for entry in document["_data_files"]]
        indices: Any = document.get("_indices_files") or document.get("_indices_data_files")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"{where}: {state!r} is not the state.json of a saved dataset ({type(error).__name__}: {error})"
        ) from None
    if indices:
        raise SourceError(
            f"{where}: the dataset has an indices mapping (it was shuffled, sorted or selected), so its files are "
            "not in its order; call flatten_indices() on it and save it again"
        )
    return names


def _data_files(names: Iterable[str]) -> list[str]:
    # cache-*.arrow and tmp* are what `datasets` leaves beside the data: results of map and filter.
    arrow_files = sorted(name for name in names if name.endswith(".arrow"))
    return [name for name in arrow_files if not name.startswith(("cache-", "tmp", "."))]


# ``npy:GLOB``: flat arrays of ids, in which an end-of-text id ends each document.
#
# Files of numpy and of llm.c say their type themselves; where a file is bare ids, the spec has it: ``npy:GLOB:uint16``.


class NpyScheme(IdScheme):
    """Mapped files of ids; a row is a document with its end-of-text id."""

    name = "npy"
    usage = "npy:GLOB"
    splits_at_end_of_text = True
    endings = (".npy",)
    refuses_urls = "files of npy: are mapped"
    raw_types = RAW_TYPES

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.npy import NpySource

        return NpySource(request)


# ``megatron:PREFIX``: the indexed datasets of Megatron-LM, two files each: ``PREFIX.bin`` and ``PREFIX.idx``.
#
# ``megatron-samples:CACHE``: the samples that Megatron-LM made of one, by the files that its ``GPTDataset`` left in
# ``--data-cache-path``: ``CACHE-description.txt`` and three arrays.


#: Of the ids, and of where each sequence and document begins in them.
MEGATRON_DATA, MEGATRON_INDEX = ".bin", ".idx"
#: Of the samples: what they were made by, the documents in their order, where samples begin in these, their order.
MEGATRON_SAMPLES = (
    "-description.txt",
    "-document_index.npy",
    "-sample_index.npy",
    "-shuffle_index.npy",
)


class MegatronScheme(IdScheme):
    """Mapped files of ids; a row is a document. Both files of a dataset are shards, so that a manifest freezes both."""

    name = "megatron"
    usage = "megatron:PREFIX"
    stores_row_counts = True
    refuses_urls = "files of megatron: are mapped"

    def parse(self, text: str) -> tuple[str, str]:
        location, column = super().parse(text)
        if location.endswith((MEGATRON_DATA, MEGATRON_INDEX)):
            raise ConfigError(
                f"expected the prefix that both files share; leave {location[-4:]!r} out"
            )
        return location, column

    def local_paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        """The two files of each dataset, in the order of their prefixes."""
        prefix, endings = spec.location, (MEGATRON_DATA, MEGATRON_INDEX)
        # Also a prefix that has brackets or stars in it.
        named = [prefix + ending for ending in endings if (base_dir / (prefix + ending)).is_file()]
        there = set(
            named
            or [path for ending in endings for path in matching_files(prefix + ending, base_dir)]
        )
        if not there:
            index = base_dir / (prefix + MEGATRON_INDEX)
            raise SourceError(
                f"source {str(spec)!r}: no file matches {str(index)!r}; {nearest_folder(index)}"
            )
        paths = tuple(
            stem + ending
            for stem in sorted({path[: -len(MEGATRON_INDEX)] for path in there})
            for ending in endings
        )
        for path in paths:
            if path not in there:
                other = path[: -len(MEGATRON_INDEX)] + (
                    MEGATRON_INDEX if path.endswith(MEGATRON_DATA) else MEGATRON_DATA
                )
                raise SourceError(
                    f"source {str(spec)!r}: {path!r} is missing beside {other!r}, and neither is of use alone; copy "
                    "it, or let the prefix match whole datasets only"
                )
        return paths

    def stems(self, names: Collection[str]) -> Mapping[str, tuple[str, str]]:
        prefixes = [
            name.removesuffix(MEGATRON_INDEX) for name in names if name.endswith(MEGATRON_INDEX)
        ]
        return {
            prefix + ending: (prefix, "")
            for prefix in prefixes
            if prefix + MEGATRON_DATA in names
            for ending in (MEGATRON_DATA, MEGATRON_INDEX)
        }

    def files_in_order(self, shards: Sequence[Shard]) -> int:
        return len(shards) // 2

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.megatron import MegatronSource

        return MegatronSource(request)


class MegatronSamplesScheme(IdScheme):
    """Mapped files, of which the last array says how many samples there are; a row is a sample, in the job's order."""

    name = "megatron-samples"
    usage = "megatron-samples:CACHE"
    stores_row_counts = True
    refuses_urls = "files of megatron-samples: are mapped"
    gives_samples = True

    def local_paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        """The cached files, and the two of the dataset that the description names."""
        paths = tuple(spec.location + ending for ending in MEGATRON_SAMPLES)
        try:
            prefix = json.loads(read_file(base_dir / paths[0]))["dataset_path"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SourceError(
                f"source {str(spec)!r}: {paths[0]!r} does not say its dataset_path ({type(error).__name__}: {error}); "
                "name what the cached files of one GPTDataset begin with, up to '-GPTDataset-train'"
            ) from None
        return (*paths, f"{prefix}{MEGATRON_DATA}", f"{prefix}{MEGATRON_INDEX}")

    def files_in_order(self, shards: Sequence[Shard]) -> int:
        return 1

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.megatron import MegatronSamples

        return MegatronSamples(request)


# ``mds:DIR:FIELD``: the shards that Mosaic streaming's ``MDSWriter`` wrote into a folder.
#
# Where a field is of bytes, or of arrays of any type, the spec says of which type its ids are:
# ``mds:DIR:FIELD:uint16``.


class MdsScheme(IndexedFolderScheme):
    """Files of samples, raw or compressed; a row is a sample."""

    name = "mds"
    usage = "mds:DIR:FIELD"
    endings = (".mds",)
    index = MdsIndex

    def parse(self, text: str) -> tuple[str, str]:
        location, column = super().parse(text)
        before, _, field = location.rpartition(":")
        # A colon before a slash is that of a URL.
        if column in MDS_ID_TYPES and before and field and "/" not in field:
            return before, f"{field}:{column}"
        return location, column

    def open_files(
        self, request: ReadRequest, index: Index, listed: Sequence[ListedFile]
    ) -> Source:
        from tokenloom_server.sources.mds import MdsSource

        return MdsSource(request, listed)


# ``litdata:DIR[:FIELD]``: the chunks that LitData's ``optimize`` wrote into a folder.


class LitdataScheme(IndexedFolderScheme):
    """Files of samples; a row is a sample."""

    name = "litdata"
    usage = "litdata:DIR[:FIELD]"
    ends_documents = True
    index = LitdataIndex

    def parse(self, text: str) -> tuple[str, str]:
        """``DIR`` or ``DIR:FIELD``; a colon before a slash is that of a URL."""
        before, _, field = text.rpartition(":")
        return super().parse(text if before and "/" not in field else f"{text}:{ITEM}")

    def write(self, location: str, column: str) -> str:
        return location if column == ITEM else f"{location}:{column}"

    def open_files(
        self, request: ReadRequest, index: Index, listed: Sequence[ListedFile]
    ) -> Source:
        from tokenloom_server.sources.litdata import open_chunks

        assert isinstance(index, LitdataIndex), "the index is this scheme's"
        return open_chunks(request, index, listed)
