"""From ids back to text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenloom_server.errors import TokenizerError
from tokenloom_server.tokenizer.engine import bytes_decoder, load_decoder


def test_bytes_become_text_again_and_special_ids_their_names() -> None:
    decode = bytes_decoder()
    assert decode([257, *"naïve 日本".encode(), 256]) == "<|begin_of_text|>naïve 日本<|endoftext|>"
    # A sample may begin within a character, and another source may have ids that are no bytes.
    assert decode("é".encode()[1:]) == "\ufffd"
    assert decode([97, 300, 98]) == "a\ufffdb"


def test_a_tokenizer_json_shows_its_special_tokens() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    assert load_decoder(tokenizer.to_str())([0, 1, 2]) == "a b <end>"


def test_what_tokenizers_cannot_read_is_refused() -> None:
    with pytest.raises(TokenizerError, match="not supported by tokenizers"):
        load_decoder('{"model": {"type": "Unheard"}}')
