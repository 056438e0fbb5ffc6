"""Which tokens of a text lie in the assistant's part: all that have something of it, whatever the tokeniser is."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenloom_server.tokenizer.definition import find_tokenizer
from tokenloom_server.tokenizer.engine import TokenizersEngine
from transformers import PreTrainedTokenizerFast

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "h", "i", "▁hi", ".", "o", "▁ho", "日", "e"]


def byte_level() -> Tokenizer:
    """Spaces at a token's head are in none of its characters; most characters beyond ASCII have several tokens."""
    return Tokenizer.from_file(
        str(Path(__file__).parents[1] / "golden" / "tokenizer" / "tokenizer.json")
    )


def byte_level_after_a_space() -> Tokenizer:
    """As of RoBERTa: each piece of text begins with a space, which may be a token without a character."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As of Llama 2: a character that the vocabulary lacks is its bytes."""
    names = ["<unk>", *BYTES, *WORDS, "▁h"]
    merges = [("▁", "h"), ("▁h", "i"), ("▁h", "o")]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


def unigram() -> Tokenizer:
    """As of T5 and Gemma: characters that the vocabulary lacks and that stand together are the bytes of all of them."""
    pieces = [
        ("<unk>", 0.0),
        *((name, -9.0) for name in BYTES),
        *((name, -(len(name) ** -1.0)) for name in WORDS),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    """As of BERT: no token has a space, and a word that the vocabulary lacks is one token."""
    names = ["[UNK]", "h", "##i", "hi", "ho", "##o", "日", "e", "."]
    tokenizer = Tokenizer(
        models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


KINDS = (byte_level, byte_level_after_a_space, byte_fallback, unigram, word_piece)


def engine_of(made: Tokenizer, folder: Path) -> TokenizersEngine:
    made.save(str(folder / "tokenizer.json"))
    return TokenizersEngine(find_tokenizer("tokenizer.json", folder), "parse")


def parts(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without its marks, and what lies between each ``«`` and ``»`` of it."""
    texts = marked.replace("»", "«").split("«")
    ends = [sum(map(len, texts[: i + 1])) for i in range(len(texts))]
    return "".join(texts), list(zip(ends[0:-1:2], ends[1::2], strict=True))


#: A text, and those of its tokens that lie between the marks. Releases of transformers before 5.24 have other masks for
#: most of these.
WRITTEN_OUT: list[tuple[Callable[[], Tokenizer], str, str]] = [
    # It ends with a character of several tokens, and begins with one.
    (byte_level, "a «snow 😀» b", "Ġs n o w Ġ ðŁ ĺ Ģ"),
    (byte_level, "«😀»😀«日»«本»", "ðŁ ĺ Ģ æĹ¥ æ ľ ¬"),
    (byte_fallback, "hi «ho 🥊»", "▁ho ▁ <0xF0> <0x9F> <0xA5> <0x8A>"),
    (unigram, "hi «ho 🥊»", "▁ho ▁ <0xF0> <0x9F> <0xA5> <0x8A>"),
    # A block's edge within what one token covers, or what several share.
    (byte_level, "s«n»o", "sno"),
    (byte_level, "ß«\u0301»e", "Ì ģ"),
    (unigram, "hi 🥊«🥊»", "<0xF0> <0x9F> <0xA5> <0x8A> <0xF0> <0x9F> <0xA5> <0x8A>"),
    (word_piece, "ho h«i» ho", "hi"),
    (word_piece, "ho x«🥊»y ho", "[UNK]"),
    (word_piece, "hi« 日é »ho", "日 e"),
    # Tokens without a character, such as a space before another character: they lie where they stand, after the space.
    (byte_level, "a«  日»a", "Ġ Ġ æĹ¥"),
    (byte_level, "a «日 »a", "æĹ¥"),
    (byte_level, "a« »日", ""),
    (byte_level_after_a_space, "<|user|>«日»<|end|>", "æĹ¥"),
    (byte_level_after_a_space, "<|user|>«日本»<|end|>", "Ġ æĹ¥ æ ľ ¬"),
    # Blocks with nothing in them, and none at all.
    (byte_level, "a«»b", ""),
    (byte_level, "s«»no", "sno"),
    (word_piece, "", ""),
    # All of it.
    (byte_fallback, "«hi»", "▁hi"),
]


@pytest.mark.parametrize(("kind", "marked", "expected"), WRITTEN_OUT)
def test_a_token_counts_that_has_something_of_the_block(
    kind: Callable[[], Tokenizer], marked: str, expected: str, tmp_path: Path
) -> None:
    made = kind()
    text, spans = parts(marked)
    encoded, mask = engine_of(made, tmp_path).encode_spans([text], [spans])

    tokens = made.encode(text, add_special_tokens=False).tokens
    assert [made.id_to_token(i) for i in encoded.values] == tokens
    assert " ".join(token for token, inside in zip(tokens, mask, strict=True) if inside) == expected


def drawn(seed: int) -> list[list[str]]:
    """Turns of texts, every second of which is the assistant's."""
    rng = random.Random(seed)
    pieces = (
        "hi",
        " ",
        "ho.",
        "日",
        "本",
        "😀",
        "🥊🥊",
        "e\u0301",
        "ﬁ",
        "\n",
        "  ",
        "x",
        "<|end|>",
        "\u00a0",
        "한",
    )
    return [
        ["".join(rng.choices(pieces, k=rng.randint(0, 5))) for _ in range(rng.randint(2, 7))]
        for _ in range(300)
    ]


def spans_of(turns: list[str]) -> list[tuple[int, int]]:
    ends = [sum(map(len, turns[: i + 1])) for i in range(len(turns))]
    return list(zip(ends[0::2], ends[1::2], strict=False))


@pytest.mark.parametrize("kind", KINDS)
def test_many_texts_at_once_have_the_masks_that_their_tokens_say(
    kind: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    chats, made = drawn(1), kind()
    spans = list(map(spans_of, chats))
    encoded, mask = engine_of(made, tmp_path).encode_spans(list(map("".join, chats)), spans)

    expected = [
        int(any(start < end and stop > begin for begin, end in of_chat))
        for turns, of_chat in zip(chats, spans, strict=True)
        for start, stop in made.encode("".join(turns), add_special_tokens=False).offsets
    ]
    assert mask.tolist() == expected and len(encoded.values) == len(expected)
    assert 0 < sum(expected) < len(expected)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="its masks lose tokens"
)
# transformers takes tokens to begin in the order of the text, which those of a character after such a space do not.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not byte_level_after_a_space])
def test_the_masks_are_those_of_transformers(kind: Callable[[], Tokenizer], tmp_path: Path) -> None:
    made = kind()
    theirs = PreTrainedTokenizerFast(tokenizer_object=made)
    theirs.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    chats = [chat for chat in drawn(2) if not any(turn != turn.strip("\n") for turn in chat)]
    encoded, mask = engine_of(made, tmp_path).encode_spans(
        list(map("".join, chats)), list(map(spans_of, chats))
    )

    at = 0
    for turns, end in zip(chats, encoded.ends.tolist(), strict=True):
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)
        ]
        found = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        assert (encoded.values[at:end].tolist(), mask[at:end].tolist()) == (
            found["input_ids"],
            found["assistant_masks"],
        ), turns
        at = end
