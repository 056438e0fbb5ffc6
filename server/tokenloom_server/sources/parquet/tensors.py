"""Row groups of Parquet files as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from tokenloom_server.storage.arrow_input import for_arrow
from tokenloom_server.storage.file import File


class ParquetTensors:
    """Implements ``TensorFile``: a part is a row group."""

    mapped = False

    def __init__(self, file: File) -> None:
        self._file = pq.ParquetFile(for_arrow(file), page_checksum_verification=True)
        self.schema = self._file.schema_arrow
        metadata = self._file.metadata
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        self.ends: npt.NDArray[np.int64] = np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64)
        # By whole row groups: Arrow ends the process where the size of a damaged column is asked for.
        self.decoded_bytes = sum(group.total_byte_size for group in groups)

    def read(self, part: int, names: Sequence[str]) -> list[Any]:
        table = self._file.read_row_group(part, columns=list(names), use_threads=False)
        columns = [table.column(name) for name in names]
        return [each.chunk(0) if each.num_chunks == 1 else each.combine_chunks() for each in columns]
