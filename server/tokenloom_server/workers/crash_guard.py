"""Encodes a source's texts so that a document at which the tokeniser crashes is named, and the run goes on."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from tokenloom_server.errors import ConfigError, TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import BadRow
from tokenloom_server.tokenizer.choose import EngineRecord, load_engine, other_engine
from tokenloom_server.tokenizer.definition import find_tokenizer
from tokenloom_server.tokenizer.engine import Encoded, Engine, SpecialTokensInText, ragged
from tokenloom_server.workers.crash_records import CrashRecords
from tokenloom_server.workers.processes import Transform, TransformFailed

_log = logging.getLogger(__name__)

#: Documents of one block at which the tokeniser may crash: each costs seconds, and so many are no accident.
MAX_CULPRITS = 20
#: For one text. What takes longer is no crash, and ends the run.
SECONDS = 120.0
#: What native code dies of by its own fault. A process that is killed, for want of memory or by us, says nothing of
#: the document at which it was.
CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS})


class EngineDescription(NamedTuple):
    """What another process needs to load a run's engine, or the other one. ``chat``: whether the tokeniser has its chat
    template."""

    tokenizer: str
    base_dir: str
    chat: bool
    special_tokens_in_text: SpecialTokensInText
    record: tuple[str, str, str]
    other: bool = False


class CrashGuard:
    """Encodes texts of one source: notes rows before they are encoded, and encodes those at which the process died
    before in a process of their own, one by one."""

    def __init__(
        self,
        engine: Engine,
        description: EngineDescription,
        crash_records: CrashRecords | None,
        *,
        source_id: int,
        spec: str,
        shard_paths: Sequence[str],
        skip_bad: bool,
    ) -> None:
        """``crash_records``: None where a process has died at these very rows, in whichever process that was.
        ``skip_bad``: a document at which both engines crash is a bad row, not an error."""
        self._engine = engine
        self._description = description
        self._crash_records = crash_records
        self._source_id = source_id
        self._spec = spec
        self._paths = shard_paths
        self._skip_bad = skip_bad

    def encode(
        self, texts: pa.LargeStringArray, first_row: int, shard: int
    ) -> tuple[Encoded, list[BadRow]]:
        """Ids of texts that begin at a shard's row, and those of them at which both engines crash."""
        rows = (self._source_id, shard, first_row, first_row + len(texts))
        records = self._crash_records
        if records is not None and not records.suspected(*rows):
            with records.noting(*rows):
                return self._engine.encode(texts), []
        where, last = f"{self._spec}: {self._paths[shard]}", rows[3] - 1
        _log.warning(
            "%s: rows %d to %d: a process died here before; they are encoded apart",
            where,
            first_row,
            last,
        )
        apart = _Apart(self._description, first_row, where, skip_bad=self._skip_bad)
        with closing(apart.process):
            try:
                for text in texts.to_pylist():
                    apart.encode(text)
            finally:
                if records is not None:
                    records.settle(
                        self._source_id, shard, first_row, apart.next_row, apart.culprits
                    )
        if not apart.culprits:
            _log.info(
                "%s: rows %d to %d: nothing died of any of them; no longer suspected",
                where,
                first_row,
                last,
            )
        return ragged(apart.ids), apart.bad


class _Apart:
    """Consecutive rows that are encoded by a process that may die of each: their ids, those at which both engines
    crash, and all at which the run's own does. ``next_row``: all before it are known."""

    def __init__(
        self, engine: EngineDescription, first_row: int, where: str, *, skip_bad: bool
    ) -> None:
        name = "tokenloom_server.workers.crash_guard:encoded"
        try:
            self.process = Transform(name, seconds=SECONDS, memory_mb=0)
        except ConfigError as error:
            raise _not_started(first_row, 0, error) from None
        #: The engines that its present process has loaded, by whether each is the other one.
        self._loaded: set[bool] = set()
        self.ids: list[list[int]] = []
        self.bad: list[BadRow] = []
        self.culprits: list[int] = []
        self.next_row = first_row
        self._engine = engine
        self._where = where
        self._skip_bad = skip_bad

    def encode(self, text: str) -> None:
        """The next row. Raises ``TokenizerError`` where it has no ids and is no bad row, and for too many culprits."""
        number, (engine, version) = len(self.ids), self._engine.record[1:]
        ids, death = self._try(self._engine, text)
        if death:
            self.culprits.append(self.next_row)
            if len(self.culprits) > MAX_CULPRITS:
                raise TokenizerError(
                    f"rows {', '.join(map(str, self.culprits))}: {engine} {version} crashes at each of them; install "
                    "another version of it, and begin a new run",
                    number,
                )
            fault = f"row {self.next_row}: a process that encodes this document with {engine} {version} {death}"
            ids, other_death = self._try(self._engine._replace(other=True), text)
            if other_death:
                fault = f"{fault}, and one that does so with the other engine {other_death}"
                if not self._skip_bad:
                    self.next_row += 1
                    remedy = (
                        "take the row out of the file, and begin a new run, or set on_bad_row: skip"
                    )
                    raise TokenizerError(f"{fault}; {remedy}", number)
                self.bad.append(BadRow(number, fault))
            else:
                _log.warning("%s: %s; its ids come from the other engine", self._where, fault)
        self.ids.append(ids)
        self.next_row += 1

    def _try(self, engine: EngineDescription, text: str) -> tuple[list[int], str]:
        """The ids, or how the process died of the text. Raises ``TokenizerError`` where it failed otherwise."""
        if engine.other not in self._loaded:
            # What a process dies of while it loads a tokeniser is no fault of the text that is next.
            _, death = self._ask(engine, "")
            if death:
                raise TokenizerError(
                    f"row {self.next_row}: a process that loads the tokeniser {death}, so no row can be encoded apart; "
                    "install another version of its library, and begin a new run",
                    len(self.ids),
                )
            self._loaded.add(engine.other)
        return self._ask(engine, text)

    def _ask(self, engine: EngineDescription, text: str) -> tuple[list[int], str]:
        try:
            (ids,) = self.process.made_of(arrays.strings([json.dumps([text, engine])])).to_pylist()
        except TransformFailed as error:
            if error.signal not in CRASHES:
                raise TokenizerError(
                    f"row {self.next_row}: a tokeniser in a process of its own failed: {error}; where it was killed or "
                    "late, give it memory and time, or take the row out of the file, and begin a new run",
                    len(self.ids),
                ) from None
            self._loaded.clear()
            return [], f"was ended by {signal.Signals(error.signal).name}"
        except ConfigError as error:
            raise _not_started(self.next_row, len(self.ids), error) from None
        return json.loads(ids), ""


def _not_started(row: int, number: int, error: ConfigError) -> TokenizerError:
    return TokenizerError(
        f"row {row}: a process died at it before, and none starts in which it could be encoded apart: {error}",
        number,
    )


def encoded(batch: Any) -> Any:
    """What the worker calls: of each text and ``EngineDescription``, as JSON, the ids as JSON."""
    return arrays.strings([_ids(*json.loads(each)) for each in batch.column(0).to_pylist()])


def _ids(text: str, engine: list[Any]) -> str:
    return json.dumps(_loaded(json.dumps(engine)).encode(arrays.strings([text])).values.tolist())


@lru_cache(maxsize=2)
def _loaded(text: str) -> Engine:
    engine = EngineDescription(*json.loads(text))
    definition = find_tokenizer(engine.tokenizer, Path(engine.base_dir), chat=engine.chat)
    record = EngineRecord(*engine.record)
    if engine.other:
        return other_engine(definition, record, engine.special_tokens_in_text)
    return load_engine(definition, record, engine.special_tokens_in_text, check_one_in=0)
