"""What of the documentation is hard to read: the worst passages of each page, the hardest first.

    python -m docsite.readability                      # every page of docs/, ten passages each
    python -m docsite.readability docs/scale.md --most 20

A passage's score is the words of its longest sentence beyond ``LONG``, and twice the words that are neither in the
glossary nor common English. Code and the addresses of links do not count.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token
from wordfreq import zipf_frequency

from docsite.repository import ROOT

#: Words in a sentence that anybody follows.
LONG = 20
#: Zipf's scale: 3.0 is once in a million words of ordinary English.
COMMON = 3.0
GLOSSARY = ROOT / "docs" / "glossary.md"
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.:;!?])\s+")


class Passage(NamedTuple):
    """A paragraph, an entry of a list or a cell of a table."""

    line: int
    words: int
    """Of its longest sentence."""
    rare: tuple[str, ...]
    text: str

    @property
    def score(self) -> int:
        return max(0, self.words - LONG) + 2 * len(self.rare)


def passages(markdown: str) -> Iterator[Passage]:
    """All passages of a page that have prose."""
    line = 1
    for token in MarkdownIt("commonmark", {"html": False}).enable("table").parse(markdown):
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline":
            text = " ".join(_prose(token.children or ()).split())
            sentences = [_WORD.findall(sentence) for sentence in _SENTENCE_END.split(text)]
            rare = dict.fromkeys(
                word.lower() for words in sentences for word in words if not _is_known(word.lower())
            )
            yield Passage(line, max(map(len, sentences)), tuple(rare), text)


def _prose(tokens: Sequence[Token]) -> str:
    """Text without code: a name of it is one word of its sentence, whatever it is."""
    return "".join(
        token.content if token.type == "text" else " it " if token.type == "code_inline" else " "
        for token in tokens
    )


def _is_known(word: str) -> bool:
    forms = (word, word.removesuffix("s"), word.removesuffix("'s"))
    return len(word) < 3 or any(
        form in _glossary() or zipf_frequency(form, "en") >= COMMON for form in forms
    )


@cache
def _glossary() -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(GLOSSARY.read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pages", nargs="*", type=Path, help="Markdown files (default: all of docs/)"
    )
    parser.add_argument("--most", type=int, default=10, help="passages of each page (default 10)")
    options = parser.parse_args()
    for page in options.pages or sorted((ROOT / "docs").rglob("*.md")):
        markdown = page.read_text(encoding="utf-8")
        hard = sorted(
            (each for each in passages(markdown) if each.score), key=lambda each: -each.score
        )
        print(
            f"{page}: {len(_WORD.findall(markdown)):,} words, {sum(each.score for each in hard)} in all"
        )
        for each in hard[: options.most]:
            rare = f"; rare: {', '.join(each.rare)}" if each.rare else ""
            print(
                f"  line {each.line}: {each.score} (a sentence of {each.words} words{rare})\n    {each.text[:160]}"
            )


if __name__ == "__main__":
    main()
