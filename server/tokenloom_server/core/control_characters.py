"""Characters that a terminal, a log or a page obeys instead of showing: refused in what people write, escaped in what
people read.

They are the control characters C0, DEL and C1 (Unicode category Cc), the separators of lines and paragraphs, what
embeds, overrides and isolates directions of writing (Unicode Standard Annex 9), and surrogates, which no UTF-8 holds.
"""

from __future__ import annotations

_CODES = (
    *range(0x20),
    *range(0x7F, 0xA0),
    0x2028,
    0x2029,
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
)
_SURROGATES = range(0xD800, 0xE000)
#: Each of them, by its number, as the escape that JSON has for it: so escaped JSON is the same JSON.
ESCAPES = {code: f"\\u{code:04x}" for code in (*_CODES, *_SURROGATES)} | {
    0x09: "\\t",
    0x0A: "\\n",
    0x0D: "\\r",
}
_ESCAPES_IN_LINES = ESCAPES | {0x09: "\t", 0x0A: "\n"}


def escaped(text: str, *, lines: bool = False) -> str:
    """A text as it may be shown; ``lines``: with its own lines and tabs."""
    return text.translate(_ESCAPES_IN_LINES if lines else ESCAPES)


def refuse_control_characters(
    text: str, where: str = "", error: type[Exception] = ValueError
) -> str:
    """The text itself. Raises an ``error`` that begins with ``where`` and names the first character that may not be
    shown as it is."""
    # Of 10^5 paths each character would be looked at; none of these is one that Python calls printable.
    for i, character in enumerate("" if text.isprintable() else text):
        if ord(character) in ESCAPES:
            raise error(
                f"{where}expected UTF-8 text on one line, without control characters, but character {i + 1} of "
                f"'{escaped(text[:200])}' is U+{ord(character):04X}: leave it out"
            )
    return text
