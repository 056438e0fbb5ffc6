"""Fill in the middle: some documents are cut in three, and their middle is put at the end.

"Efficient Training of Language Models to Fill in the Middle" (Bavarian et al., 2022), at the level of tokens: a
document is rearranged with a given probability, cut at two places drawn uniformly from all there are, and becomes

    <prefix> prefix <suffix> suffix <middle> middle        (PSM)
    <prefix> <suffix> suffix <middle> prefix middle        (SPM, the paper's second variant, which shares its ids)

A begin-of-text id stays first, an end-of-text id last.

What is drawn for a row depends on the seed, the source, the epoch and the row's place in its file, and on nothing else:
whoever reads the row again, from whichever row on, gets the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.hashing import Purpose, draw, stream
from tokenloom_server.packing.chunks import take_chunks

_Ids = npt.NDArray[np.unsignedinteger[Any]]
_Int64s = npt.NDArray[np.int64]

#: How a row was rearranged, beside 0: not at all.
PSM, SPM = 1, 2
NAMES: dict[int, Literal["psm", "spm"]] = {PSM: "psm", SPM: "spm"}

#: Draws for each row: whether, which way, and the two places.
_DRAWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FillInMiddle:
    """How the documents of one source are rearranged."""

    rate: float
    """The share of the documents with tokens that are rearranged, 0 to 1."""
    spm_rate: float
    """The share of those that come in the order SPM, 0 to 1."""
    prefix_id: int
    middle_id: int
    suffix_id: int
    seed: int
    source_id: int
    bos_id: int | None
    eot_id: int | None

    def rearranged(
        self, ids: _Ids, ends: _Int64s, epoch: int, shards: _Int64s, rows: _Int64s
    ) -> tuple[_Ids, _Int64s, npt.NDArray[np.uint8] | None]:
        """The same rows, rearranged: their ids, their ends, and how each was ([rows] uint8; None: none was).

        ``ids`` [tokens] of rows that end before ``ends`` [rows], begin- and end-of-text ids included; ``shards`` [rows]
        and ``rows`` [rows]: the files, and the rows there.
        """
        begins = np.append(np.int64(0), ends[:-1])
        # Rows without tokens are looked at nowhere.
        filled = np.flatnonzero(ends > begins)
        files, file = np.unique(shards[filled], return_inverse=True)
        keys = [
            draw(self.seed, Purpose.FIM, self.source_id, shard, epoch) for shard in files.tolist()
        ]
        key = np.array(keys, np.uint64)[file]
        counter = rows[filled].astype(np.uint64) * np.uint64(_DRAWS)
        drawn = _below(stream(key, counter), self.rate)
        taken, key, counter = filled[drawn], key[drawn], counter[drawn]
        if not len(taken):
            return ids, ends, None
        first, last = begins[taken], ends[taken]
        if self.bos_id is not None:
            first = first + (ids[first] == self.bos_id)
        if self.eot_id is not None:
            last = last - ((ids[last - 1] == self.eot_id) & (last > first))
        spm = _below(stream(key, counter + np.uint64(1)), self.spm_rate)
        two = [_place(stream(key, counter + np.uint64(k)), last - first) for k in (2, 3)]
        cuts = np.stack((first, first + np.minimum(*two), first + np.maximum(*two), last), axis=1)
        middles = np.zeros(len(ends), np.uint8)
        middles[taken] = np.where(spm, SPM, PSM)
        return self._joined(ids, cuts, spm), ends + 3 * np.cumsum(middles > 0), middles

    def _joined(self, ids: _Ids, cuts: _Int64s, spm: npt.NDArray[np.bool_]) -> _Ids:
        """``cuts`` [n, 4]: where prefix, middle, suffix of each row begin, and where the last ends."""
        # Chunk 4i is what lies before the i-th prefix, and then come that, its middle and its suffix; after the last
        # of these the rest, and the three marks.
        count = len(cuts)
        edges = np.concatenate(([0], cuts.ravel(), len(ids) + np.arange(4)))
        values = np.concatenate(
            (ids, np.array([self.prefix_id, self.middle_id, self.suffix_id], ids.dtype))
        )
        before = 4 * np.arange(count)
        prefix, middle, suffix = before + 1, before + 2, before + 3
        marks = np.broadcast_to(
            np.array([[4 * count + 1], [4 * count + 2], [4 * count + 3]]), (3, count)
        )
        psm_order = (before, marks[0], prefix, marks[2], suffix, marks[1], middle)
        spm_order = (before, marks[0], marks[2], suffix, marks[1], prefix, middle)
        order = np.where(
            spm[:, None], np.stack(spm_order, axis=1), np.stack(psm_order, axis=1)
        ).ravel()
        return take_chunks(values, edges, np.append(order, 4 * count), len(ids) + 3 * count)


def _below(drawn: npt.NDArray[np.uint64], rate: float) -> npt.NDArray[np.bool_]:
    """Which of the draws fall below a rate, exactly: as 53-bit integers."""
    is_below: npt.NDArray[np.bool_] = (drawn >> np.uint64(11)) < np.uint64(
        int(Fraction(rate) * 2**53)
    )
    return is_below


def _place(drawn: npt.NDArray[np.uint64], lengths: _Int64s) -> _Int64s:
    """For each draw, a place among the ``lengths`` + 1 that there are between and around tokens."""
    places = (drawn >> np.uint64(32)) * (lengths + 1).astype(np.uint64) >> np.uint64(32)
    return places.astype(np.int64)
