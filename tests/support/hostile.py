"""What strangers, and slips of the pen, write: texts, mixture files, cards, tokenisers that end in a clear error."""

from __future__ import annotations

#: Names and sentences that a terminal, a log or a page would obey instead of showing.
TEXTS = (
    "\x1b[2J\x1b[31mall is well",  # clears the screen
    "\x1b]0;title\x07",
    "\x9b2J",  # the same in one character of C1
    "wiki\n2026-01-01 INFO a forged line",
    "wiki\rspoofed",
    "tab\there",
    "wiki\x00",
    "wiki\x08\x08\x08\x08code",
    "\x7f",
    "line\u2028separator",
    "paragraph\u2029separator",
    "\u202egpj.exe",  # shown from right to left
    "\u2067isolated\u2069",
    "half a pair \ud83d",
)
#: Texts of many scripts that mean no harm.
PLAIN_TEXTS = ("wiki", "Übergrößen, straße", "ви́ки", "维基百科", "ويكي‌پدیا \u200f", "👩\u200d🔬 science")


def is_shown_as_it_is(text: str, *, lines: bool = False) -> bool:
    """Whether no character of a text commands a terminal; ``lines``: beyond line feeds and tabs."""
    ours = set("\n\t") if lines else set()
    codes = (ord(character) for character in text if character not in ours)
    return not any(
        code < 0x20
        or 0x7F <= code < 0xA0
        or code in (0x2028, 0x2029)
        or 0x202A <= code <= 0x202E
        or 0x2066 <= code <= 0x2069
        or 0xD800 <= code < 0xE000
        for code in codes
    )
