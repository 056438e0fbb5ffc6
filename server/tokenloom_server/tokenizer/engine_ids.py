"""What a run's engine gives, as the run's record keeps it: another engine that gives the same may serve the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash

from tokenloom_server.sources import arrays
from tokenloom_server.tokenizer.definition import TokenizerDefinition
from tokenloom_server.tokenizer.engine import Engine

#: Texts on which tokenisers have differed before; a sample of real rows may lack them all. Records hold what engines
#: gave for them: more may follow at the end, and none may change.
PROBES = (
    "",
    " ",
    "  leading, trailing  ",
    "tab\tnew\nline\r\nreturn\r\n\r\n  \n \t end",
    "a\u00a0b\u2003c\u3000d\u200be\ufefff\u0085g",
    "I'm you're WE'LL they'd It'S o'clock ''s",
    "0 12 123 1234 12345 1,234.56 3.14e-10 0x1F ½ ² ٣٤ १२",
    "camelCase snake_case SCREAMING_CASE kebab-case CamelHTTPServer",
    "x==y!=z; {[(<>)]} // /* */ #!@$%^&*~`|\\ ... --- ===",
    "naïve café cafe\u0301 A\u030a Å ﬁ İstanbul ı ſ ẞ",
    "日本語のテキスト。中文，测试！한국어 시험 ไทย हिन्दी",
    "שלום עולם مرحبا بالعالم",
    "😀👍🏽👨\u200d👩\u200d👧🇩🇪 ❤\ufe0f",
    "\x00\x01\x1f\x7f\x80",
    "\U0001f9ff\U000e0001\U0010ffff\ue000\ufffd",
    "a" * 300 + " " * 300 + "\n" * 30,
)
#: Each added token, alone and inside text. As the probes, these do not change.
_AROUND_TOKENS = ("{}", "a{}b", "a {} b", "{0}{0}", "\n{}\n", "日{}é")

#: How many characters of all sources' first rows a record has digests of, and of one row; what is tokenised with the
#: slower engine for it takes about 0.1 s.
ROWS_CHARACTERS, ROW_CHARACTERS = 1 << 18, 1 << 12
#: Digests of a source: consecutive rows share one.
_MOST_DIGESTS = 16

_SHOWN_CHARACTERS = 40


class TextGroup(NamedTuple):
    """Texts whose ids have one digest."""

    name: str
    texts: Sequence[str]


class SourceIds(NamedTuple):
    """``digests`` of the first ``rows`` rows of a source that holds text."""

    rows: int
    digests: tuple[str, ...]


class EngineIds(NamedTuple):
    """Digests of ids: of each probe, of each added token's texts, and of the first rows of each source with text."""

    probes: tuple[str, ...]
    added_tokens: tuple[str, ...]
    sources: tuple[SourceIds, ...]

    @classmethod
    def of(
        cls, engine: Engine, definition: TokenizerDefinition, columns: Sequence[Iterable[Any]]
    ) -> Self:
        """What an engine gives now. ``columns`` are the sources' first rows, as Arrow's columns of strings."""
        heads = [_head(column, ROWS_CHARACTERS // len(columns)) for column in columns]
        sources = (SourceIds(len(head), _digests(engine, _row_groups("", head))) for head in heads)
        return cls(
            _digests(engine, _probe_groups()),
            _digests(engine, _added_token_groups(definition)),
            tuple(sources),
        )

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        sources = (SourceIds(rows, tuple(digests)) for rows, digests in document["sources"])
        return cls(tuple(document["probes"]), tuple(document["added_tokens"]), tuple(sources))

    @property
    def digest(self) -> str:
        """One for all of them, XXH3-128 as hex."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self).encode())

    def first_difference(
        self,
        engine: Engine,
        definition: TokenizerDefinition,
        rows: Sequence[tuple[str, Sequence[str | None]]],
    ) -> str | None:
        """The first text, or rows of a source, for which an engine gives other ids; None where all are equal. ``rows``
        are name and first rows of each source, at least as many as are recorded. Raises ``TokenizerError`` where the
        engine fails."""
        checked = [
            (self.probes, _probe_groups()),
            (self.added_tokens, _added_token_groups(definition)),
        ]
        for source, (name, texts) in zip(self.sources, rows, strict=True):
            checked.append(
                (source.digests, _row_groups(name, [_cut(text) for text in texts[: source.rows]]))
            )
        for digests, groups in checked:
            for expected, actual, group in zip(
                digests, _digests(engine, groups), groups, strict=False
            ):
                if actual != expected:
                    return group.name
        return None

    def describe(self) -> str:
        """How many texts these are digests of."""
        tokens = len(self.added_tokens) * len(_AROUND_TOKENS)
        return f"{len(self.probes) + tokens} probes and {sum(source.rows for source in self.sources)} rows"


def probes(definition: TokenizerDefinition) -> list[str]:
    """All texts on which engines are compared, whatever a run's sources hold."""
    groups = [*_probe_groups(), *_added_token_groups(definition)]
    return [text for group in groups for text in group.texts]


def _probe_groups() -> list[TextGroup]:
    return [TextGroup(f"the text {probe[:_SHOWN_CHARACTERS]!r}", (probe,)) for probe in PROBES]


def _added_token_groups(definition: TokenizerDefinition) -> list[TextGroup]:
    return [
        TextGroup(
            f"texts with {token.content!r}",
            [around.format(token.content) for around in _AROUND_TOKENS],
        )
        for token in definition.added_tokens
    ]


def _row_groups(name: str, texts: Sequence[str]) -> list[TextGroup]:
    size = max(1, -(-len(texts) // _MOST_DIGESTS))
    begins = range(0, len(texts), size)
    return [
        TextGroup(
            f"rows {begin} to {min(begin + size, len(texts)) - 1} of {name}",
            texts[begin : begin + size],
        )
        for begin in begins
    ]


def _head(column: Iterable[Any], characters: int) -> list[str]:
    """The first texts, up to so many characters of all."""
    texts: list[str] = []
    for value in column:
        if characters <= 0:
            break
        texts.append(_cut(value.as_py()))
        characters -= max(1, len(texts[-1]))
    return texts


def _cut(text: str | None) -> str:
    return (text or "")[:ROW_CHARACTERS]


def _digests(engine: Engine, groups: Sequence[TextGroup]) -> tuple[str, ...]:
    """Of each group's ids (uint32) and where each text's end (int64), XXH3-64 as hex."""
    encoded = engine.encode(arrays.strings([text for group in groups for text in group.texts]))
    ends = np.append(np.int64(0), encoded.ends).astype("<i8")
    bounds = np.append(
        0, np.cumsum([len(group.texts) for group in groups], dtype=np.int64)
    ).tolist()
    return tuple(
        xxhash.xxh3_64_hexdigest(
            (ends[first : last + 1] - ends[first]).tobytes()
            + encoded.values[ends[first] : ends[last]].astype("<u4").tobytes()
        )
        for first, last in pairwise(bounds)
    )
