"""The choice of an engine: made once per run against the reference, recorded, and honoured or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.tokenizer.definition import TokenizerDefinition
from tokenloom_server.tokenizer.engine import (
    BytesEngine,
    Encoded,
    Ends,
    Engine,
    GigatokenEngine,
    Ids,
    SpecialTokensInText,
    TokenizersEngine,
    installed_version,
    ragged,
)
from tokenloom_server.tokenizer.engine_ids import EngineIds, probes

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


#: How much of the sample is encoded with both engines: about half a second for the slower one.
SAMPLE_BYTES = 1 << 20

#: One in this many documents is checked while running: a hundredth of the fast engine's time.
CHECK_ONE_IN = 10_000

#: The engines that read a tokeniser's file, by name.
_ENGINES: Mapping[str, type[GigatokenEngine | TokenizersEngine]] = MappingProxyType(
    {GigatokenEngine.name: GigatokenEngine, TokenizersEngine.name: TokenizersEngine}
)


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What decides a run's ids, as kept in its record and in every snapshot."""

    digest: str
    engine: str
    version: str


class EngineChoice(NamedTuple):
    """The engine of a run, and why; ``ids``: what it gives, None for bytes."""

    record: EngineRecord
    reason: str
    ids: EngineIds | None = None


def choose_engine(
    definition: TokenizerDefinition,
    special_tokens_in_text: SpecialTokensInText,
    sample_rows: Sequence[pa.Array],
    *,
    cpu_clock_s: Callable[[], float],
    needs_offsets: bool = False,
) -> EngineChoice:
    """gigatoken where it equals tokenizers on a sample, else tokenizers.

    ``sample_rows`` are (large_)string columns of real rows; as much as ``SAMPLE_BYTES`` of them is
    read, evenly. Every added token, alone and inside text, is compared as well. ``cpu_clock_s`` gives the
    CPU time of this thread (``time.thread_time``); it is for the cost alone and decides nothing. ``needs_offsets``:
    tokenizers, since a part of some texts counts for the loss.
    """
    if definition.is_bytes:
        record = EngineRecord(definition.digest, BytesEngine.name, BytesEngine.version)
        return EngineChoice(record, "bytes need no tokeniser")
    reference = TokenizersEngine(definition, special_tokens_in_text)
    if needs_offsets or definition.chat_template is not None:
        # Which tokens are of a part of a text takes offsets, which the other engine does not give.
        record = EngineRecord(definition.digest, reference.name, reference.version)
        return EngineChoice(record, "its offsets say which tokens of a row count for the loss")
    rows = _sample(sample_rows)
    # The first rows warm both engines, the second half of the sample is timed.
    parts = [
        part
        for part in (probes(definition), rows[: len(rows) // 2], rows[len(rows) // 2 :])
        if part
    ]
    expected, slow = _timed(
        parts, cpu_clock_s, lambda part: ragged([reference.encode_one(text) for text in part])
    )
    price = f"{slow:,.0f} tokens per CPU-second"
    try:
        engine = GigatokenEngine(definition, special_tokens_in_text)
        actual, fast = _timed(parts, cpu_clock_s, lambda part: engine.encode(arrays.strings(part)))
    except TokenizerError as error:
        return _fall_back(definition, reference, str(error), f"it makes {price}", sample_rows)
    for part, ours, theirs in zip(parts, actual, expected, strict=True):
        difference = first_difference(ours, theirs)
        if difference is not None:
            excerpt = _excerpt(reference, part[difference.row], difference)
            why = f"gigatoken {engine.version} gives other ids for the text {excerpt} {difference.describe()}"
            price = (
                f"it costs {fast / slow:.1f} times the CPU time, at {price}"
                if slow
                else f"it makes {price}"
            )
            return _fall_back(definition, reference, why, price, sample_rows)
    texts, tokens = sum(map(len, parts)), sum(len(result.values) for result in expected)
    reason = f"gigatoken equals tokenizers {reference.version} on {texts} texts ({tokens} tokens)"
    return _choice(definition, engine, reason, sample_rows)


def serving_engine(
    definition: TokenizerDefinition,
    record: EngineRecord,
    ids: EngineIds | None,
    special_tokens_in_text: SpecialTokensInText,
    first_rows: Callable[[EngineIds], Sequence[tuple[str, Sequence[str | None]]]],
) -> EngineChoice:
    """The engine that serves a known run: the recorded one, or, where its version is not installed, another version or
    engine that gives what is recorded. ``first_rows`` reads so many rows of each source as ``ids`` has, and is asked
    only then.

    Raises ``TokenizerError`` where each that is installed gives other ids, with the first text that shows it.
    """
    installed = installed_version(record.engine)
    is_known = record.engine in _ENGINES and record.digest == definition.digest
    if ids is None or not is_known or installed == record.version:
        return EngineChoice(record, "it is the run's", ids)
    rows = first_rows(ids)
    refused = []
    for name in sorted(_ENGINES, key=record.engine.__ne__):
        version = installed_version(name)
        if version == "none":
            continue
        try:
            difference = ids.first_difference(
                _ENGINES[name](definition, special_tokens_in_text), definition, rows
            )
        except TokenizerError as error:
            refused.append(f"{error}")
            continue
        if difference is None:
            same = f"this gives the same ids for {ids.describe()}{_faster(name)}"
            reason = f"the run began with {record.engine} {record.version}; {same}"
            return EngineChoice(EngineRecord(record.digest, name, version), reason, ids)
        refused.append(f"{name} {version} gives other ids for {difference}")
    raise TokenizerError(f"{_other_version(record, installed)} ({'; '.join(refused)})")


def load_engine(
    definition: TokenizerDefinition,
    record: EngineRecord,
    special_tokens_in_text: SpecialTokensInText,
    *,
    check_one_in: int = CHECK_ONE_IN,
) -> Engine:
    """The engine that a run began with. One per thread that encodes.

    ``check_one_in`` is how many documents stand after each one that is checked against the reference (0: none). Raises
    ``TokenizerError`` when the tokeniser's digest, the engine or its installed version is not the recorded one.
    """
    if record.digest != definition.digest:
        raise TokenizerError(
            f"tokenizer {definition.name!r}: its files have the digest {definition.digest}, but the run began with "
            f"{record.digest}; put the old files back, or begin a new run"
        )
    if record.engine == BytesEngine.name and definition.is_bytes:
        _require_version(record, BytesEngine.version)
        return BytesEngine()
    if definition.is_bytes or record.engine not in _ENGINES:
        raise TokenizerError(
            f"tokenizer {definition.name!r}: the run began with the engine {record.engine!r}, which this server "
            "does not have for it; use the server version that the run began with, or begin a new run"
        )
    _require_version(record, installed_version(record.engine))
    reference = TokenizersEngine(definition, special_tokens_in_text)
    if record.engine == TokenizersEngine.name:
        return reference
    engine = GigatokenEngine(definition, special_tokens_in_text)
    return CheckedEngine(engine, reference, one_in=check_one_in) if check_one_in else engine


def other_engine(
    definition: TokenizerDefinition,
    record: EngineRecord,
    special_tokens_in_text: SpecialTokensInText,
) -> Engine:
    """The engine that the run did not begin with, for a document at which its own crashes: on the run's own rows the
    two gave the same ids. Raises ``TokenizerError`` where that one cannot load the tokeniser."""
    other = GigatokenEngine if record.engine == TokenizersEngine.name else TokenizersEngine
    return other(definition, special_tokens_in_text)


def _require_version(record: EngineRecord, found: str) -> None:
    if record.version != found:
        raise TokenizerError(_other_version(record, found))


def _other_version(record: EngineRecord, found: str) -> str:
    return (
        f"the run began with {record.engine} {record.version}, but {found} is installed, which may give other ids; "
        f"install {record.engine}=={record.version}, or begin a new run"
    )


def _timed(
    parts: list[list[str]], cpu_clock_s: Callable[[], float], encode: Callable[[list[str]], Encoded]
) -> tuple[list[Encoded], float]:
    """Each part encoded, and the tokens per second of this thread's CPU time in the last one."""
    results: list[Encoded] = []
    elapsed_s = 0.0
    for part in parts:
        begin_s = cpu_clock_s()
        results.append(encode(part))
        elapsed_s = cpu_clock_s() - begin_s
    return results, len(results[-1].values) / max(elapsed_s, 1e-9)


def _fall_back(
    definition: TokenizerDefinition,
    reference: TokenizersEngine,
    why: str,
    price: str,
    sample_rows: Sequence[pa.Array],
) -> EngineChoice:
    why = "the fast engine, gigatoken, is not installed" if _faster(reference.name) else why
    reason = f"{why}; so tokenizers {reference.version} is used: {price}{_faster(reference.name)}"
    return _choice(definition, reference, reason, sample_rows)


def _choice(
    definition: TokenizerDefinition, engine: Engine, reason: str, sample_rows: Sequence[pa.Array]
) -> EngineChoice:
    ids = EngineIds.of(engine, definition, sample_rows)
    return EngineChoice(EngineRecord(definition.digest, engine.name, engine.version), reason, ids)


def _faster(engine: str) -> str:
    """How to get the faster engine, where it is missing."""
    missing = engine != GigatokenEngine.name and installed_version(GigatokenEngine.name) == "none"
    return "; for the faster one: pip install 'tokenloom[fast]'" if missing else ""


def _excerpt(reference: TokenizersEngine, text: str, difference: Difference) -> str:
    character = reference.character_of(text, difference.position)
    begin, end = max(0, character - 20), character + 20
    return ("…" if begin else "") + repr(text[begin:end]) + ("…" if end < len(text) else "")


def _sample(columns: Sequence[pa.Array]) -> list[str]:
    """Texts from the head of each column, cut at an even share of ``SAMPLE_BYTES``."""
    texts: list[str] = []
    for column in columns:
        left = SAMPLE_BYTES // len(columns)
        for value in column:
            if left <= 0:
                break
            text = (value.as_py() or "")[:left]
            left -= max(1, len(text.encode()))
            texts.append(text)
    return texts
