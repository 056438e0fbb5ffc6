"""Best-fit decreasing: lengths into bins of one capacity.

Longest first, each goes into the bin in which it leaves the least room; one that fits nowhere opens a bin. Of bins with
the same room the one that came to it last is taken. (Ding et al., "Fewer Truncations Improve Language Modeling", ICML
2024, where this packs documents; the bound, 11/9 of the best number of bins, is Johnson's, 1973.)
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def best_fit(lengths: Int64s, capacity: int) -> tuple[Int64s, int]:
    """The bin of each length (from 1 to ``capacity``), numbered as they were opened, and how many bins there are.

    Equal lengths come in their order. Rooms, not bins, are searched: there are never more different ones than bins or
    than ``capacity``, so a step takes a search of a sorted list, whatever the number of bins.
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    full = int(np.searchsorted(-falling, -capacity, side="right"))
    bin_of_falling = list(range(full))
    opened = full
    rooms: list[int] = []  # ascending, each once
    bins: dict[int, list[int]] = {}  # by room
    for length in falling[full:].tolist():
        least = bisect_left(rooms, length)
        if least == len(rooms):
            chosen, room = opened, capacity
            opened += 1
        else:
            room = rooms[least]
            same = bins[room]
            chosen = same.pop()
            if not same:
                del rooms[least], bins[room]
        bin_of_falling.append(chosen)
        room -= length
        if room in bins:
            bins[room].append(chosen)
        elif room:
            insort(rooms, room)
            bins[room] = [chosen]
    bin_of_length = np.empty(len(lengths), np.int64)
    bin_of_length[order] = bin_of_falling
    return bin_of_length, opened
