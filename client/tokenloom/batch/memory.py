"""Memory for the tensors of a batch, used again once nobody holds it any more.

Memory that is new costs more than what is written into it: the kernel clears each page first, and the
caches know none of it. A trainer drops one batch as it takes the next, so two batches' worth goes round.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from tokenloom.batch.layout import Layout

#: Batches whose memory is kept for later ones: that in use, that being made, two for trainers that look ahead.
KEPT_BATCHES = 4


class ArrayPool:
    """Gives out int64 arrays of one shape, uninitialised. Not for several threads at once.

    Whoever takes one holds it by a reference, as a tensor made by ``torch.from_numpy`` does for as long as its
    storage lives, whatever view of it, graph or numpy array that is for. At most ``keep`` are kept for later:
    where all of them are held, a new one takes the oldest one's place, which is then its holder's alone.
    """

    @classmethod
    def of(cls, layout: Layout) -> ArrayPool:
        """The memory for batches of a layout."""
        of_tokens = layout.columns - {"cu_seqlens"}
        return cls((layout.batch_size, layout.sequence_length), KEPT_BATCHES * (2 + len(of_tokens)))

    def __init__(self, shape: tuple[int, ...], keep: int) -> None:
        self._shape = shape
        self._keep = keep
        # The first is never given out: its count of references is that of an array which nobody holds, however
        # this interpreter counts.
        self._arrays: list[NDArray[np.int64]] = [np.empty(0, np.int64)]

    def fit(self, shape: tuple[int, ...]) -> None:
        """From now on arrays have this shape; those of another one are their holders' alone."""
        if shape != self._shape:
            self._shape = shape
            del self._arrays[1:]

    def take(self, count: int) -> list[NDArray[np.int64]]:
        """Arrays that nobody else holds, those first made among them: they are the likeliest to be cached."""
        held = list(map(sys.getrefcount, self._arrays))
        taken, index = [], 0
        for _ in range(count):
            try:
                index = held.index(held[0], index + 1)
            except ValueError:
                taken.append(self._make())
            else:
                taken.append(self._arrays[index])
        return taken

    def _make(self) -> NDArray[np.int64]:
        self._arrays.append(np.empty(self._shape, np.int64))
        if len(self._arrays) > 1 + self._keep:
            del self._arrays[1]
        return self._arrays[-1]
