"""The check of the words finds what is hard, where it stands, and nothing in plain text or code."""

from __future__ import annotations

from docsite.readability import LONG, passages

PAGE = f"""# A page

A plain sentence. {" ".join(["word"] * (LONG + 5))}.

| name | meaning |
|---|---|
| `frobnicate --quuxly` | an obstreperous, a perspicacious word |
"""


def test_long_sentences_and_rare_words_are_hard_and_code_is_not() -> None:
    hard = {each.line: each for each in passages(PAGE) if each.score}

    assert sorted(hard) == [3, 7]
    assert (hard[3].words, hard[3].rare, hard[3].score) == (LONG + 5, (), 5)
    assert (hard[7].rare, hard[7].score) == (("obstreperous", "perspicacious"), 4)
