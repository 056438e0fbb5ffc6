"""What the ``index.json`` of LitData says of the chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from tokenloom_server.sources.base import Content
from tokenloom_server.sources.indexed_folder import Index, ListedFile

#: The field of samples that are one value each.
ITEM = "item"
#: Types of ids by how they are written and by their codes; what has one dimension has no header.
ID_TYPES: Mapping[str, Sequence[str]] = {
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

_Count = Annotated[int, Field(ge=0, lt=1 << 32)]


class LitdataChunk(BaseModel):
    """A file; ``dim``: of a stream of ids, how many it has, unless its first sample is empty."""

    filename: str
    chunk_size: _Count
    chunk_bytes: _Count
    dim: _Count | None

    @property
    def sizes(self) -> tuple[int, int]:
        """How many bytes its samples take with what stands before them; older versions wrote how many without."""
        return self.chunk_bytes, self.chunk_bytes + 4 * (self.chunk_size + 2)


class LitdataConfig(BaseModel):
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
    types = ID_TYPES.get(how, ())
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
