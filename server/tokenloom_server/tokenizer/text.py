"""From ids back to text, for people: what `tokenloom peek` shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from tokenloom_server.core.control_characters import ESCAPES
from tokenloom_server.errors import TokenizerError
from tokenloom_server.tokenizer.definition import BYTES_TOKENIZER, find_tokenizer

#: Ids to text. Special tokens are shown; what is no whole character becomes U+FFFD.
Decode: TypeAlias = Callable[[Sequence[int]], str]

#: Text of the web may hold what a terminal takes for commands: each control character as its picture
#: where Unicode has one, else as its escape.
_PICTURES = ESCAPES | {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
_LINES = _PICTURES | {0x09: 0x09, 0x0A: 0x0A}

_BYTES = 256
_REPLACEMENT = "\ufffd".encode()


def load_decoder(tokenizer_json: str) -> Decode:
    """The decoder of a ``tokenizer.json``. Raises ``TokenizerError`` where this machine cannot read it."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:
        raise TokenizerError(
            f"the run's tokenizer.json is not supported by tokenizers {tokenizers.__version__} here ({error}); "
            "install the version that its server has"
        ) from None
    decode: Decode = partial(tokenizer.decode, skip_special_tokens=False)
    return decode


def bytes_decoder() -> Decode:
    """The decoder of the `bytes` tokeniser."""
    tokens = {token.id: token.content.encode() for token in find_tokenizer(BYTES_TOKENIZER, Path()).added_tokens}
    tokens |= {byte: bytes((byte,)) for byte in range(_BYTES)}
    return lambda ids: b"".join(tokens.get(i, _REPLACEMENT) for i in ids).decode("utf-8", "replace")


def on_one_line(text: str) -> str:
    """The text as it may be shown in a terminal, in a line."""
    return text.translate(_PICTURES)


def as_lines(text: str) -> str:
    """The text as it may be shown in a terminal, with its own lines."""
    return text.translate(_LINES)
