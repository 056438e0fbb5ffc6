"""Characters that a terminal obeys: refused where people write names, escaped where they are read."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest
from support.hostile import PLAIN_TEXTS, TEXTS, is_shown_as_it_is
from tokenloom_server.core.control_characters import ESCAPES, escaped, refuse_control_characters


@pytest.mark.parametrize("text", TEXTS)
def test_a_hostile_text_is_refused_in_words_that_show_it_and_escaped_to_the_same_json(
    text: str,
) -> None:
    with pytest.raises(
        ValueError, match=r"without control characters, but character \d+ of .* is U\+"
    ) as caught:
        refuse_control_characters(text)
    assert is_shown_as_it_is(str(caught.value))
    assert is_shown_as_it_is(escaped(text))
    assert json.loads(f'"{escaped(text)}"') == text
    assert is_shown_as_it_is(escaped(text, lines=True), lines=True)


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_text_of_every_script_stays_as_it_is(text: str) -> None:
    assert refuse_control_characters(text) == text
    assert escaped(text) == text


def test_every_control_character_of_unicode_is_one_of_them() -> None:
    controls = {
        code
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp")
    }
    turns = {
        code
        for code in range(sys.maxunicode + 1)
        if unicodedata.bidirectional(chr(code))
        in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    }
    assert controls | turns | set(range(0xD800, 0xE000)) == set(ESCAPES)


def test_lines_and_tabs_of_a_text_stay_where_it_has_lines() -> None:
    assert escaped("a\tb\nc\x1b", lines=True) == "a\tb\nc\\u001b"
    assert escaped("a\tb\nc\r") == "a\\tb\\nc\\r"
