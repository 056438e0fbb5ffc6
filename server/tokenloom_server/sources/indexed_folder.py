"""What schemes share whose location is a folder with an ``index.json`` that lists its files: ``mds`` and ``litdata``.

The index is a shard, too, the first and without rows, so that a manifest freezes it with the files.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, ValidationError, field_validator

from tokenloom_server.config.base import Described
from tokenloom_server.config.catalog import Spec
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import files
from tokenloom_server.sources.base import Content, Shard, Source
from tokenloom_server.sources.locations import is_named, nearest_folder
from tokenloom_server.sources.scheme import ReadRequest, Scheme
from tokenloom_server.storage import listing
from tokenloom_server.storage.file import File, pointer_fault_at
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.remote import Entry, open_file

INDEX = "index.json"
#: An index is read as a whole; it takes less than a KiB for each file.
MAX_INDEX_BYTES = 1 << 28


class ListedFile(NamedTuple):
    """A file by the index."""

    name: str
    """Below the folder."""
    rows: int
    sizes: Sequence[int] | None
    """How many bytes it may have; None where the index does not say that."""
    entry: Any
    """What else its reader needs of the index."""


class Index(Described):
    """The document in an index: a subclass has its fields."""

    @property
    @abstractmethod
    def listed(self) -> Sequence[Sequence[ListedFile]]:
        """Of each file, the forms in which it may lie; the first that is there is read."""

    @property
    @abstractmethod
    def contents(self) -> Mapping[str, Content | None]:
        """See ``Scheme.columns``."""


class IndexedFolderScheme(Scheme):
    """Folders with an index."""

    by_folder = True
    stores_row_counts = True
    index: ClassVar[type[Index]]

    @abstractmethod
    def open_files(
        self, request: ReadRequest, index: Index, listed: Sequence[ListedFile]
    ) -> Source:
        """As ``open``; ``listed``: what the index says of each file, of the first, which is the index, that it has no
        row."""

    def open(self, request: ReadRequest) -> Source:
        first, *shards = request.shards
        with request.open(first) as file:
            index = self._read_index(file)
        folder = first.path.removesuffix(INDEX)
        forms = {folder + form.name: form for forms in index.listed for form in forms}
        listed = [ListedFile(INDEX, 0, None, None)]
        for shard in shards:
            form = forms.get(shard.path)
            if form is None or (form.sizes is not None and shard.size not in form.sizes):
                expected = f"says {form.sizes[0]}" if form and form.sizes else "does not list it"
                raise SourceError(
                    f"{files.where(request.spec, shard)} has {shard.size} bytes, but {first.path!r} {expected}: one of "
                    "the two is truncated or damaged; write or copy the folder again"
                )
            listed.append(form)
        return self.open_files(request, index, listed)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        return self._read_index(file).contents

    def files_in_order(self, shards: Sequence[Shard]) -> int:
        return len(shards) - 1

    def is_folder(self, folder: Path, path: str) -> bool:
        try:
            with open_file(INDEX, folder) as file:
                return bool(self._read_index(file))
        except (OSError, SourceError):
            return False

    def local_paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        return self._paths(spec, base_dir, IoStats(), lambda path: is_named(base_dir / path))

    def remote_entries(self, spec: Spec, io_stats: IoStats) -> Sequence[Entry]:
        entries = {
            entry.path: entry for entry in listing.find(f"{spec.location.rstrip('/')}/**", io_stats)
        }
        return [entries[path] for path in self._paths(spec, Path(), io_stats, entries.__contains__)]

    def _paths(
        self, spec: Spec, base_dir: Path, io_stats: IoStats, is_there: Callable[[str], bool]
    ) -> tuple[str, ...]:
        """The index, and the files in its order."""
        folder, where = spec.location.rstrip("/"), f"source {str(spec)!r}"
        paths = [f"{folder}/{INDEX}"]
        if not is_there(paths[0]):
            seen = "" if spec.is_remote else f"; {nearest_folder(base_dir / paths[0])}"
            raise SourceError(
                f"{where}: there is no {paths[0]!r}; give the folder that has the {INDEX}{seen}"
            )
        if not spec.is_remote and (fault := pointer_fault_at(base_dir / paths[0])):
            raise SourceError(f"{where}: {paths[0]!r} {fault}")
        with open_file(paths[0], base_dir, f"{where}: {paths[0]!r}", io_stats) as file:
            for forms in self._read_index(file).listed:
                path = next(
                    (path for form in forms if is_there(path := f"{folder}/{form.name}")), None
                )
                if path is None:
                    raise SourceError(
                        f"{file.name} lists {forms[-1].name!r}, which is missing; copy the folder whole"
                    )
                paths.append(path)
        path, times = Counter(paths).most_common(1)[0]
        if times > 1:
            raise SourceError(
                f"{file.name} lists {path!r} {times} times; write it again, with each file once"
            )
        return tuple(paths)

    def _read_index(self, file: File) -> Index:
        files.refuse_pointer(file)
        try:
            if file.size > MAX_INDEX_BYTES:
                raise SourceError(
                    f"{file.name} has {file.size} bytes, expected at most {MAX_INDEX_BYTES} of an index"
                )
            return self.index.model_validate_json(bytes(file.read_at(0, file.size)), strict=True)
        except ValidationError as error:
            fault = error.errors()[0]
            place = (
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}"
            )
            raise SourceError(
                f"{file.name} is no index that {self.name} reads ({place}); write or copy it again"
            ) from None


# What the ``index.json`` of Mosaic streaming says of the shards.


#: Types of ids.
MDS_ID_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
#: Encodings of ids; after bytes, and where ndarray has no type of its own, the type is the spec's.
MDS_IDS = re.compile(rf"(?:bytes|ndarray):({'|'.join(MDS_ID_TYPES)})(?::\d+)?")
#: Compressions by their name in the index, and Arrow's name of them.
MDS_CODECS = {"zstd": "zstd", "gz": "gzip", "bz2": "bz2", "br": "brotli"}

#: Offsets within a shard are of 32 bits.
_Count = Annotated[int, Field(ge=0, lt=1 << 32)]


class FileInfo(Described):
    """One form of a shard."""

    basename: str
    bytes: _Count
    hashes: Mapping[str, str]


class MdsShard(Described):
    """A shard by the index."""

    format: Literal["mds"]
    version: Literal[2]
    samples: _Count
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[_Count | None]
    compression: str | None
    raw_data: FileInfo
    zip_data: FileInfo | None

    @field_validator("compression")
    @classmethod
    def _known(cls, text: str | None) -> str | None:
        if text is not None and text.partition(":")[0] not in MDS_CODECS:
            raise ValueError(
                f"{text!r} is not decompressed here; write it anew with one of {', '.join(MDS_CODECS)}, or none"
            )
        return text

    @property
    def forms(self) -> Iterator[ListedFile]:
        """As it is, and compressed."""
        for form in (self.raw_data, self.zip_data if self.compression else None):
            if form is not None:
                yield ListedFile(form.basename, self.samples, [form.bytes], self)


class MdsIndex(Index):
    """What ``MDSWriter`` writes beside the shards."""

    shards: Annotated[list[MdsShard], Field(min_length=1)]

    @property
    def listed(self) -> Sequence[Sequence[ListedFile]]:
        return [list(shard.forms) for shard in self.shards]

    @property
    def contents(self) -> Mapping[str, Content | None]:
        columns = zip(self.shards[0].column_names, self.shards[0].column_encodings, strict=False)
        return {
            name: Content.TEXT
            if encoding == "str"
            else Content.IDS
            if MDS_IDS.fullmatch(encoding)
            else None
            for name, encoding in columns
        }


# What the ``index.json`` of LitData says of the chunks.


#: The field of samples that are one value each.
ITEM = "item"
#: Types of ids by how they are written and by their codes; what has one dimension has no header.
_LITDATA_TYPES: Mapping[str, Sequence[str]] = {
    "no_header_numpy": ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    "no_header_tensor": (
        *[""] * 11,
        "uint8",
        "int8",
        *["int16"] * 2,
        *["int32"] * 2,
        *["int64"] * 2,
        "",
        "uint16",
    ),
}

#: As which booleans are written; as loss masks they are ids of a byte.
BOOLEANS = ("no_header_tensor:19", "no_header_numpy:13")


class LitdataChunk(Described):
    """A file; ``dim``: of a stream of ids, how many it has, unless its first sample is empty."""

    filename: str
    chunk_size: _Count
    chunk_bytes: _Count
    dim: _Count | None

    @property
    def sizes(self) -> tuple[int, int]:
        """How many bytes its samples take with what stands before them; older versions wrote how many without."""
        return self.chunk_bytes, self.chunk_bytes + 4 * (self.chunk_size + 2)


class LitdataConfig(Described):
    """What all chunks have in common. ``fields``: how the values of a sample are written, by name; in the index, their
    tree beside the list."""

    data_format: list[str]
    fields: Annotated[Sequence[str], Field(alias="data_spec")]
    compression: Annotated[str, Field(pattern=r"^zstd(:\d+)?$")] | None
    compression_level: Literal["batch", "chunk"] | None = None
    encryption: None = None
    item_loader: Literal["PyTreeLoader", "TokensLoader"] = "PyTreeLoader"

    @field_validator("fields", mode="before")
    @classmethod
    def _names(cls, text: Any) -> Sequence[str]:
        try:
            return list(_leaves(json.loads(text)[1], ""))
        except (TypeError, KeyError, IndexError, RecursionError) as error:
            raise ValueError(f"it is no tree of fields ({type(error).__name__}: {error})") from None


def _leaves(tree: Mapping[str, Any], name: str) -> Iterator[str]:
    """The names of a tree's leaves: keys, joined by dots."""
    children = tree["children_spec"]
    if tree["type"] is None:
        yield name or ITEM
    keys = (
        json.loads(tree["context"])
        if str(tree["type"]).lower().endswith("dict")
        else range(len(children))
    )
    for key, child in zip(keys, children, strict=True):
        yield from _leaves(child, f"{name}.{key}" if name else str(key))


def id_type(written: str) -> str:
    """The type of ids that are written so; empty of what holds none."""
    how, _, code = written.partition(":")
    types = _LITDATA_TYPES.get(how, ())
    return types[int(code)] if code.isdecimal() and int(code) < len(types) else ""


class LitdataIndex(Index):
    """What `optimize` writes beside the chunks."""

    chunks: Annotated[list[LitdataChunk], Field(min_length=1)]
    config: LitdataConfig

    @property
    def is_stream(self) -> bool:
        """Whether samples are parts of a stream of ids; older versions do not name the loader."""
        return self.config.item_loader == "TokensLoader" or self.chunks[0].dim is not None

    @property
    def listed(self) -> Sequence[Sequence[ListedFile]]:
        return [list(self._forms(chunk)) for chunk in self.chunks]

    def _forms(self, chunk: LitdataChunk) -> Iterator[ListedFile]:
        """As it is, and compressed as a whole, which has the codec in its name; LitData's reader replaces those."""
        plain = chunk.filename.replace(f".{self.config.compression}.bin", ".bin")
        yield ListedFile(plain, chunk.chunk_size, chunk.sizes, chunk)
        if plain != chunk.filename:
            yield ListedFile(chunk.filename, chunk.chunk_size, None, chunk)

    @property
    def contents(self) -> Mapping[str, Content | None]:
        return {
            name: Content.TEXT if kind == "str" else Content.IDS if id_type(kind) else None
            for name, kind in zip(self.config.fields, self.config.data_format, strict=False)
        }
