"""What the ``index.json`` of Mosaic streaming says of the shards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from tokenloom_server.sources.base import Content
from tokenloom_server.sources.indexed_folder import Index, ListedFile

#: Types of ids.
ID_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
#: Encodings of ids; after bytes, and where ndarray has no type of its own, the type is the spec's.
IDS = re.compile(rf"(?:bytes|ndarray):({'|'.join(ID_TYPES)})(?::\d+)?")
#: Compressions by their name in the index, and Arrow's name of them.
CODECS = {"zstd": "zstd", "gz": "gzip", "bz2": "bz2", "br": "brotli"}

#: Offsets within a shard are of 32 bits.
_Count = Annotated[int, Field(ge=0, lt=1 << 32)]


class FileInfo(BaseModel):
    """One form of a shard."""

    basename: str
    bytes: _Count
    hashes: Mapping[str, str]


class MdsShard(BaseModel):
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
        if text is not None and text.partition(":")[0] not in CODECS:
            raise ValueError(
                f"{text!r} is not decompressed here; write it anew with one of {', '.join(CODECS)}, or none"
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
            if IDS.fullmatch(encoding)
            else None
            for name, encoding in columns
        }
