"""The columns of rows that are tensors: which Arrow types are delivered, and as which dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tokenloom_server.sources import arrays

STRING, BINARY = "string", "binary"

#: What a batch has beside its columns.
RESERVED = frozenset(
    {"source_ids", "sample_ids", "dataset_id", "bucket", "sample_index", "total_tokens"}
)

#: By a type that Arrow does not have, the types that its bits are stored in.
STORED_AS = {
    "bfloat16": ("uint16", "int16"),
    "float8_e4m3fn": ("uint8", "int8"),
    "float8_e5m2": ("uint8", "int8"),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column that travels. ``dtype``: that of its items by its torch name, ``string`` or ``binary``; ``item_bytes``:
    of one item, 0 for the latter two. ``dims``: of each row's value, None where they are the row's own."""

    name: str
    dtype: str
    item_bytes: int
    dims: tuple[int | None, ...]

    @property
    def is_tensor(self) -> bool:
        return self.item_bytes > 0


def item_bytes(dtype: str) -> int:
    """Bytes of an item of a column's dtype; 0 for strings and binary."""
    if dtype in (STRING, BINARY):
        return 0
    if dtype in STORED_AS:
        return 2 if dtype == "bfloat16" else 1
    return np.dtype(dtype).itemsize


def _storage_of(kind: pa.DataType) -> pa.DataType:
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind


def described(kind: pa.DataType) -> tuple[str, tuple[int | None, ...]] | None:
    """dtype and dims of a column's type; None for one that does not travel."""
    dims: list[int | None] = []
    if isinstance(kind, pa.FixedShapeTensorType):
        if kind.permutation not in (None, list(range(len(kind.shape)))):
            return None
        dims, kind = list(kind.shape), kind.value_type
    kind = _storage_of(kind)
    while arrays.is_list(kind):
        dims.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
        kind = _storage_of(kind.value_type)
    if not dims and pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return "bool", tuple(dims)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype()).name, tuple(dims)
    if dims:
        return None
    if arrays.is_text(kind):
        return STRING, ()
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    ) and not pa.types.is_decimal(kind):
        return BINARY, ()
    return None
