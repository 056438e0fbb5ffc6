"""The seam for packers: blocks of whole samples, each with the cursor behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenloom_server.state import Cursor, SourceState


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive samples of one source.

    ``ids`` [n, width] in the run's narrow dtype (rows may overlap in memory; read only). ``length``:
    tokens that a sample advances by; the width may be one more. ``cursors`` [n, 5] int64: epoch, shard,
    row, offset and the source's rows counter *behind* each sample. ``hashes``: XXH3-128 of each sample's
    ids, little-endian, seeded with the source id. ``starts`` uint32: the positions, in tokens from the
    block's first, where documents begin; those of sample i are ``starts[bounds[i]:bounds[i + 1]]``.
    ``bounds`` [n + 1] int64.
    """

    ids: npt.NDArray[np.unsignedinteger]
    length: int
    first_sample: int
    cursors: npt.NDArray[np.int64]
    hashes: list[int]
    starts: npt.NDArray[np.uint32]
    bounds: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    def cursor_behind(self, sample: int) -> tuple[Cursor, int]:
        """The cursor and the rows counter behind a sample (its number within the source)."""
        epoch, shard, row, offset, rows = self.cursors[sample - self.first_sample].tolist()
        return Cursor(epoch, shard, row, offset), rows

    def starts_of(self, sample: int) -> npt.NDArray[np.uint32]:
        """Where documents begin in a sample (its number within the source), from the sample's first id."""
        at = sample - self.first_sample
        return self.starts[self.bounds[at] : self.bounds[at + 1]] - np.uint32(at * self.length)


class Packer(Protocol):
    """Turns one source's documents into samples, from a state on. A packer is a pure function of the
    documents and the state; whatever it buffers, it rebuilds from the cursor."""

    def blocks(self) -> Iterator[Block]:
        """Blocks until the source is out."""

    @property
    def dropped_tokens(self) -> int:
        """The tail that filled no sample; valid once ``blocks`` ended."""


#: Builds the packer of a source (by id) that goes on from a state.
PackerFactory = Callable[[int, SourceState], Packer]
