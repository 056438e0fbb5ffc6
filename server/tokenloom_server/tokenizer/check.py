"""Two engines compared: their first difference, and the check of one in N documents while a run goes on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.errors import TokenizerError
from tokenloom_server.tokenizer.engine import Encoded, Ends, Engine, Ids, TokenizersEngine, ragged

#: Longer documents are not checked while running: the reference takes about 0.3 s for a mebibyte.
CHECKED_DOCUMENT_BYTES = 1 << 20

_LISTED_IDS = 4

#: 2^64 divided by the golden ratio, made odd.
_MIXER = 0x9E3779B97F4A7C15


class Difference(NamedTuple):
    """The first text whose ids differ, and the first position in it that does."""

    row: int
    position: int
    actual: list[int]
    expected: list[int]

    def describe(self) -> str:
        """The ids on both sides, from the position on."""
        shown = slice(self.position, self.position + _LISTED_IDS)
        return f"at token {self.position} (gigatoken {self.actual[shown]}, tokenizers {self.expected[shown]})"


def first_difference(actual: Encoded, expected: Encoded) -> Difference | None:
    """Compares ids text by text; both have the same number of texts."""
    if np.array_equal(actual.ends, expected.ends) and np.array_equal(
        actual.values, expected.values
    ):
        return None
    for row in range(len(expected.ends)):
        ours, theirs = _row(actual, row), _row(expected, row)
        if ours != theirs:
            same = zip(ours, theirs, strict=False)
            position = next(
                (i for i, (a, b) in enumerate(same) if a != b), min(len(ours), len(theirs))
            )
            return Difference(row, position, ours, theirs)
    raise AssertionError("arrays differ, so a row must")


def _row(encoded: Encoded, row: int) -> list[int]:
    begin = int(encoded.ends[row - 1]) if row else 0
    ids: list[int] = encoded.values[begin : int(encoded.ends[row])].tolist()
    return ids


class CheckedEngine:
    """An engine that encodes one in ``one_in`` documents with the reference as well.

    Which documents these are depends on their content alone, so a replay checks the same ones and a
    difference cannot vanish by starting again.
    """

    def __init__(self, engine: Engine, reference: TokenizersEngine, *, one_in: int) -> None:
        self._engine = engine
        self._reference = reference
        self._one_in = one_in
        self.name = engine.name
        self.version = engine.version

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        """As the engine's; raises ``TokenizerError`` where the reference gives other ids."""
        encoded = self._engine.encode(texts)
        for row in self._due(texts, encoded):
            expected = self._reference.encode_one(texts[row].as_py())
            difference = first_difference(ragged([_row(encoded, row)]), ragged([expected]))
            if difference is not None:
                raise TokenizerError(
                    f"row {row} of this batch: {self.name} {self.version} differs from tokenizers "
                    f"{self._reference.version} {difference.describe()}. Report it to gigatoken, and begin a new run, "
                    "which will choose tokenizers if a sample shows the difference"
                )
        return encoded

    def _due(self, texts: pa.LargeStringArray, encoded: Encoded) -> list[int]:
        begins = np.append(np.int64(0), encoded.ends[:-1])
        filled = np.flatnonzero(encoded.ends > begins)
        rows = filled[sampled(encoded.values, begins[filled], encoded.ends[filled], self._one_in)]
        return [
            row for row in rows.tolist() if texts[row].as_buffer().size <= CHECKED_DOCUMENT_BYTES
        ]


def sampled(values: Ids, begins: Ends, ends: Ends, one_in: int) -> npt.NDArray[np.bool_]:
    """One in ``one_in`` of the documents ``values[begins:ends]`` (none empty), by a hash of length and three ids."""
    key = (ends - begins).view(np.uint64)
    for position in (begins, (begins + ends) // 2, ends - 1):
        # Multiplication by an odd number wraps and mixes upwards.
        key = (key ^ values[position]) * _MIXER
    # The high bits are the ones that all of the input has reached.
    picked: npt.NDArray[np.bool_] = (key >> 32) % one_in == 0
    return picked
