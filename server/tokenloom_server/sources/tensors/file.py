"""The protocol of a file whose rows are read as tensors, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class TensorFile(Protocol):
    """An opened file. A part of it is what is decoded at once: a record batch, a row group.

    Its methods may raise what Arrow and the operating system raise, and ``ValueError``.
    """

    @property
    def schema(self) -> Any:
        """A ``pyarrow.Schema``."""

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """[parts + 1]: the row with which each part begins, and the number of rows."""

    @property
    def mapped(self) -> bool:
        """Whether its parts take no memory of their own."""

    @property
    def decoded_bytes(self) -> int:
        """About how many bytes the file has, decoded."""

    def read(self, part: int, names: Sequence[str]) -> list[Any]:
        """Columns of a part, as ``pyarrow.Array``."""
