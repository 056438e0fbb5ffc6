"""What GitHub reads otherwise than Python-Markdown, which the site is made with."""

from __future__ import annotations

import re


def as_python_markdown(text: str) -> str:
    """A page as Python-Markdown shows it like GitHub."""
    # A bar within code is escaped in a cell for GitHub; here the backslash would be shown.
    bars = re.sub(
        r"^\|.*", lambda row: _CODE.sub(_without_escapes, row[0]), text, flags=re.MULTILINE
    )
    # A table stands by itself, also after a comment.
    return re.sub(r"(-->)\n(?=\|)", r"\1\n\n", bars)


_CODE = re.compile(r"`[^`]+`")


def _without_escapes(code: re.Match[str]) -> str:
    return code[0].replace(r"\|", "|")
