"""Encodes a source's texts so that a document at which the tokeniser crashes is named, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources.base import BadRow
from tokenloom_server.tokenizer.crash_child import ChildEncoder
from tokenloom_server.tokenizer.crash_records import AllSuspected, CrashRecords
from tokenloom_server.tokenizer.documents import DocumentEncoder, Documents
from tokenloom_server.tokenizer.engine import Encoded, Engine, Ids

_log = logging.getLogger(__name__)

#: Documents of one block at which the tokeniser may crash: each costs seconds, and so many are no accident.
MAX_CULPRITS = 20


class CrashGuardEncoder:
    """Implements ``Encoder`` for one source: notes rows before they are encoded, and encodes those at which the process
    died before in a process of their own."""

    def __init__(
        self,
        encoder: Callable[[Engine | None], DocumentEncoder],
        engine: Engine,
        child: ChildEncoder,
        crash_records: CrashRecords | AllSuspected,
        *,
        source_id: int,
        spec: str,
        shard_paths: Sequence[str],
        skip_bad: bool,
    ) -> None:
        """``encoder`` makes the source's encoder around an engine. ``skip_bad``: a document at which both engines crash
        is a bad row, not an error."""
        self._around = encoder
        self._encoder = encoder(engine)
        self._child = child
        self._crash_records = crash_records
        self._source_id = source_id
        self._spec = spec
        self._paths = shard_paths
        self._skip_bad = skip_bad

    def encode(self, column: pa.Array, first_row: int, shard: int) -> Documents:
        """As ``DocumentEncoder.encode``, of a column that begins at a shard's row."""
        rows = (self._source_id, shard, first_row, first_row + len(column))
        if self._crash_records.suspected(*rows):
            return self._encode_in_child(column, first_row, shard)
        with self._crash_records.noting(*rows):
            return self._encoder.encode(column, first_row)

    def _encode_in_child(self, column: pa.Array, first_row: int, shard: int) -> Documents:
        where, end = f"{self._spec}: {self._paths[shard]}", first_row + len(column)
        _log.warning("%s: rows %d to %d: a process died here before; they are encoded apart", where, first_row, end - 1)
        engine = _ChildEngine(self._child, where, first_row, skip_bad=self._skip_bad)
        try:
            documents = self._around(engine).encode(column, first_row)
        except TokenizerError:
            if engine.culprits:
                end = engine.culprits[-1] + 1
                self._crash_records.settle(self._source_id, shard, first_row, end, engine.culprits)
            raise
        self._crash_records.settle(self._source_id, shard, first_row, end, engine.culprits)
        if not engine.culprits:
            _log.info("%s: rows %d to %d: nothing died of any of them; no longer suspected", where, first_row, end - 1)
        # Both ascend, and none is in both: what has no ids has none outside the vocabulary.
        return documents._replace(bad=tuple(sorted((*documents.bad, *engine.bad))))


class _ChildEngine:
    """Implements ``Engine``: each text in a process that may die of it; what the run's engine dies of, by the other."""

    def __init__(self, child: ChildEncoder, where: str, first_row: int, *, skip_bad: bool) -> None:
        self.name = child.record.engine
        self.version = child.record.version
        self.culprits: list[int] = []
        self.bad: list[BadRow] = []
        self._skip_bad = skip_bad
        self._child = child
        self._where = where
        self._first_row = first_row

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        ids: list[Ids] = []
        while len(ids) < len(texts):
            encoded, death = self._child.encode(texts[len(ids) :], "own")
            ids += encoded
            if death is not None:
                ids.append(self._with_other_engine(texts, len(ids), death))
        ends = np.cumsum(np.array([len(each) for each in ids], np.int64))
        values: np.ndarray[Any, np.dtype[np.uint32]] = np.concatenate(ids) if ids else np.empty(0, np.uint32)
        return Encoded(values, ends)

    def _with_other_engine(self, texts: pa.LargeStringArray, number: int, death: str) -> Ids:
        row = self._first_row + number
        self.culprits.append(row)
        if len(self.culprits) > MAX_CULPRITS:
            raise TokenizerError(
                f"rows {', '.join(map(str, self.culprits))}: {self.name} {self.version} crashes at each of them; "
                "install another version of it, and begin a new run",
                number,
            )
        encoded, other_death = self._child.encode(texts[number : number + 1], "other")
        if other_death is not None:
            reason = (
                f"row {row}: a process that encodes this document with {self.name} {self.version} {death}, and one "
                f"that does so with the other engine {other_death}"
            )
            if not self._skip_bad:
                raise TokenizerError(
                    f"{reason}; take the row out of the file, and begin a new run, or set on_bad_row: skip", number
                )
            self.bad.append(BadRow(number, reason))
            return np.empty(0, np.uint32)
        _log.warning(
            "%s: row %d: a process that encodes this document with %s %s %s; its ids come from the other engine",
            self._where, row, self.name, self.version, death,
        )  # fmt: skip
        return encoded[0]
