"""From ids back to text, for people: what `tokenloom peek` shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from tokenloom_server.errors import TokenizerError
from tokenloom_server.tokenizer.definition import find_tokenizer
from tokenloom_server.tokenizer.files import BYTES_TOKENIZER

#: Ids to text. Special tokens are shown; what is no whole character becomes U+FFFD.
Decode: TypeAlias = Callable[[Sequence[int]], str]

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
    tokens = {
        token.id: token.content.encode()
        for token in find_tokenizer(BYTES_TOKENIZER, Path()).added_tokens
    }
    tokens |= {byte: bytes((byte,)) for byte in range(_BYTES)}
    return lambda ids: b"".join(tokens.get(i, _REPLACEMENT) for i in ids).decode("utf-8", "replace")
