"""A tokeniser's folder gives the ids of ``AutoTokenizer``, whatever stands beside its ``tokenizer.json``."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tokenizer_classes
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.tokenizer.definition import TokenizerDefinition, find_tokenizer
from tokenloom_server.tokenizer.engine import GigatokenEngine, TokenizersEngine
from transformers import AutoTokenizer
from transformers.utils import logging

Files = dict[str, dict[str, Any]]

LETTERS = "▁abcdefghijklmnopqrstuvwxyz0123456789.,<>|_/"
TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<tool>",
    "<mask>",
    "<pad>",
    "[INST]",
    "</s>",
    "hi",
    "<|endoftext|>",
    "<image>",
]
TEXTS = [
    "<|im_start|>user\nhi<|im_end|>\n",
    " hi  <tool> 123 x<mask>y ",
    "plain [INST] hi</s>hi <|endoftext|>great <image>",
    "  Naïve ÉCOLE 日本 cafe\u0301 123456 hi's\t\n\n",
    "<pad><s></s><unk> [MASK] a b <|im_start|> hihi",
]
NAMED = ("bos_token", "eos_token", "cls_token", "pad_token", "mask_token")


def byte_level(pre_tokenizer: Any = None, normalizer: Any = None) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "i"), ("Ġ", "h"), ("Ġh", "i"), ("1", "2"), ("12", "3"), ("Ġ", "Ġ")]
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def byte_fallback(
    normalizer: Any = None, pre_tokenizer: Any = None, unknown: str | None = "<unk>"
) -> Tokenizer:
    merges = [("h", "i"), ("▁", "h"), ("▁h", "i"), ("▁", "▁"), ("1", "2")]
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *LETTERS,
        *map("".join, merges),
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in pieces[:3]]
    )
    return tokenizer


def unigram(*special: str) -> Tokenizer:
    pieces = [(each, 0.0) for each in special] + [
        (each, -3.0 - i / 50) for i, each in enumerate(LETTERS)
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, special.index("<unk>"), False))
    metaspace = pre_tokenizers.Metaspace("▁", "always", split=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    extra = [f"<extra_id_{i}>" for i in range(100)]
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in (*special, *extra)]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hi", "##hi", "plain", *LETTERS[1:]]
    tokenizer = Tokenizer(
        models.WordPiece({each: i for i, each in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    tokenizer.add_special_tokens(pieces[:5])
    return tokenizer


def split_like(class_name: str) -> Any:
    forms = tokenizer_classes.server._table()["classes"][class_name]["forms"]["[null]"]
    pattern = forms["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    parts = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


#: Tokenisers as they are published, and the classes that leave them as they are.
MADE: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "byte_level": (byte_level, "GPT2Tokenizer"),
    "space_before": (
        lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "GPT2TokenizerFast",
    ),
    "neox": (lambda: byte_level(normalizer=normalizers.NFC()), "GPTNeoXTokenizerFast"),
    "qwen": (lambda: byte_level(split_like("Qwen2Tokenizer"), normalizers.NFC()), "Qwen2Tokenizer"),
    "digits": (
        lambda: byte_level(
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
        ),
        "PreTrainedTokenizerFast",
    ),
    "llama": (
        lambda: byte_fallback(
            pre_tokenizer=pre_tokenizers.Metaspace("▁", "first", split=False), unknown=None
        ),
        "LlamaTokenizerFast",
    ),
    "llama_of_old": (
        lambda: byte_fallback(
            normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        ),
        "TokenizersBackend",
    ),
    "gemma": (
        lambda: byte_fallback(
            normalizers.Replace(" ", "▁"),
            pre_tokenizers.Split(" ", "merged_with_previous"),
            "<unk>",
        ),
        "GemmaTokenizerFast",
    ),
    "t5": (lambda: unigram("<pad>", "</s>", "<unk>"), "T5Tokenizer"),
    "xlm_roberta": (lambda: unigram("<s>", "<pad>", "</s>", "<unk>"), "XLMRobertaTokenizerFast"),
    "bert": (word_piece, "BertTokenizerFast"),
}
SPACE_BEFORE = {"space_before": {"add_prefix_space": True}}


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    logging.set_verbosity_error()


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return {name: make().to_str() for name, (make, _) in MADE.items()}


def write(at: Path, tokenizer: str, files: Files) -> Path:
    at.mkdir(exist_ok=True)
    (at / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    for name, content in files.items():
        (at / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return at


def encoded(definition: TokenizerDefinition) -> list[list[int]]:
    ids, ends = TokenizersEngine(definition, "parse").encode(arrays.strings(TEXTS))
    return [ids[begin:end].tolist() for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def same_as_transformers(folder: Path) -> TokenizerDefinition:
    theirs, ours = AutoTokenizer.from_pretrained(folder), find_tokenizer(".", folder)
    assert encoded(ours) == [theirs.encode(text, add_special_tokens=False) for text in TEXTS]
    assert ours.special_tokens == theirs.special_tokens_map
    assert {each.id: each.content for each in ours.added_tokens} == {
        number: str(each) for number, each in theirs.added_tokens_decoder.items()
    }
    return ours


def drawn(tokenizer: Tokenizer, class_name: str, draw: random.Random) -> Files:
    """Files as they may stand beside a tokeniser, some with more in them than any that is published."""

    def token(**more: Any) -> dict[str, Any]:
        flags = {
            flag: draw.random() < 0.2 for flag in ("lstrip", "rstrip", "single_word", "normalized")
        }
        return {"content": draw.choice(TOKENS), **flags, **more}

    def some(most: int) -> list[Any]:
        return [
            draw.choice([draw.choice(TOKENS), token(__type="AddedToken", special=True)])
            for _ in range(most)
        ]

    size = tokenizer.get_vocab_size()
    config: dict[str, Any] = {"tokenizer_class": draw.choice([class_name, class_name, "Unheard"])}
    config |= {key: some(1)[0] for key in NAMED if draw.random() < 0.3}
    kind = draw.random()
    if kind < 0.5:
        saved = {i: each.__getstate__() for i, each in tokenizer.get_added_tokens_decoder().items()}
        new = {
            each["content"]: each for each in (token(special=draw.random() < 0.6) for _ in range(3))
        }
        known = {each["content"] for each in saved.values()}
        saved |= {
            size + i: each for i, each in enumerate(new.values()) if each["content"] not in known
        }
        config["added_tokens_decoder"] = saved
    if draw.random() < 0.4:
        config["additional_special_tokens"] = some(3)
    if draw.random() < 0.3:
        config["extra_special_tokens"] = draw.choice([some(2), {"image_token": "<image>"}, {}])
    files: Files = {"tokenizer_config": config}
    if kind > 0.3:
        files["added_tokens"] = {each: size + i for i, each in enumerate(draw.sample(TOKENS, 2))}
        files["special_tokens_map"] = {
            key: draw.choice([draw.choice(TOKENS), token()]) for key in NAMED[::2]
        }
        files["special_tokens_map"]["additional_special_tokens"] = draw.sample(TOKENS, 2)
    if draw.random() < 0.4:
        files["config"] = {"model_type": draw.choice(["llama", "mistral", "unheard", "phi3"])}
    return files


@pytest.mark.parametrize("name", MADE)
def test_the_ids_of_a_folder_are_those_of_transformers_whatever_stands_in_it(
    name: str, made: dict[str, str], tmp_path: Path
) -> None:
    draw, tokenizer = random.Random(name), Tokenizer.from_str(made[name])
    changed = 0
    for number in range(25):
        files = drawn(tokenizer, MADE[name][1], draw)
        files["tokenizer_config"] |= SPACE_BEFORE.get(name, {})
        folder = write(tmp_path / str(number), made[name], files)
        changed += json.loads(same_as_transformers(folder).content) != json.loads(made[name])
    assert changed > 10


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, {"model_type": "unheard"}])
@pytest.mark.parametrize("name", MADE)
def test_a_folder_that_says_nothing_more_keeps_its_digest(
    name: str, config: dict[str, Any], made: dict[str, str], tmp_path: Path
) -> None:
    class_name = MADE[name][1]
    (tmp_path / "alone.json").write_text(made[name])
    described = tokenizer_classes.server._table()["classes"][class_name.removesuffix("Fast")]
    # Of what the class names, only what the vocabulary has.
    absent = {
        key: None
        for key, token in described.get("tokens", {}).items()
        if f'"content":{json.dumps(token)}' not in made[name] and key != "unk_token"
    }
    named = {"tokenizer_class": class_name, **absent, **SPACE_BEFORE.get(name, {})}
    files = {"tokenizer_config": named, "config": config}

    whole = same_as_transformers(write(tmp_path, made[name], files))

    assert whole.digest == find_tokenizer("alone.json", tmp_path).digest


def test_tokens_that_only_the_config_has_are_one_id_in_each_engine(
    made: dict[str, str], tmp_path: Path
) -> None:
    tokens = {
        str(262 + i): {"content": each, "special": i == 0}
        for i, each in enumerate(("<|im_start|>", "<tool>"))
    }
    folder = write(
        tmp_path / "whole",
        made["byte_level"],
        {"tokenizer_config": {"added_tokens_decoder": tokens}},
    )
    whole = same_as_transformers(folder)
    column = arrays.strings(TEXTS)

    for mode in ("text", "parse"):
        engines = [
            engine(whole, mode).encode(column) for engine in (TokenizersEngine, GigatokenEngine)
        ]
        assert engines[0].values.tolist() == engines[1].values.tolist()
        assert (263 in engines[0].values, 264 in engines[0].values) == (mode == "parse", True)
    assert whole.vocab_size == 265
    assert (
        whole.digest
        != find_tokenizer(".", write(tmp_path / "plain", made["byte_level"], {})).digest
    )


def test_the_end_that_special_tokens_map_names_is_the_end(
    made: dict[str, str], tmp_path: Path
) -> None:
    named = same_as_transformers(
        write(tmp_path / "a", made["bert"], {"special_tokens_map": {"eos_token": "[SEP]"}})
    )
    known = same_as_transformers(
        write(tmp_path / "b", made["t5"], {"special_tokens_map": {"eos_token": "</s>"}})
    )

    assert named.named_ids == {"eos_token": 3}
    assert named.digest != find_tokenizer(".", write(tmp_path / "c", made["bert"], {})).digest
    # It was the end by its name already.
    assert known.digest == find_tokenizer(".", write(tmp_path / "d", made["t5"], {})).digest


def of_class(name: str, **more: Any) -> Files:
    return {"tokenizer_config": {"tokenizer_class": name, **more}}


REFUSED: list[tuple[str, Files, str]] = [
    (
        "llama_of_old",
        of_class("LlamaTokenizer"),
        "'LlamaTokenizer' builds another",
    ),
    ("digits", {"config": {"model_type": "starcoder2"}}, "'GPT2Tokenizer' builds another"),
    (
        "byte_level",
        of_class("GPT2Tokenizer", add_prefix_space=True),
        "'GPT2Tokenizer' builds another",
    ),
    (
        "bert",
        of_class("BertTokenizer", do_lower_case=False),
        "'BertTokenizer'",
    ),
    (
        "gemma",
        of_class("MarianTokenizer"),
        "'MarianTokenizer' does not read",
    ),
    (
        "gemma",
        of_class("XGLMTokenizer"),
        "'XGLMTokenizer' builds another",
    ),
    (
        "byte_level",
        of_class("OwnTokenizer", auto_map={"AutoTokenizer": ["own.Own", None]}),
        r"'OwnTokenizer' is code in the folder \(auto_map\)",
    ),
    (
        "bert",
        {"tokenizer_config": {"split_special_tokens": True}},
        "split_special_tokens: true; remove it",
    ),
    (
        "bert",
        {"tokenizer_config": {"added_tokens_decoder": {"x": 1}}},
        "tokens beside .* are not as transformers",
    ),
    (
        "bert",
        {"tokenizer_config": {"eos_token": ["[SEP]"]}},
        r"eos_token is \['\[SEP\]'\], expected text",
    ),
    (
        "bert",
        {"special_tokens_map": {"additional_special_tokens": [7]}},
        "a further special token is 7, expected text",
    ),
]


@pytest.mark.parametrize(
    ("name", "files", "message"), REFUSED, ids=[message for _, _, message in REFUSED]
)
def test_what_gives_other_ids_than_the_file_is_refused_by_name(
    name: str, files: Files, message: str, made: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError, match=f"'\\.': .*{message}"):
        find_tokenizer(".", write(tmp_path, made[name], files))


MISSHAPEN: list[tuple[str, Any, str]] = [
    (
        "tokenizer_config",
        {"additional_special_tokens": "<|im_start|>"},
        "additional_special_tokens is '<|im_start|>'",
    ),
    (
        "special_tokens_map",
        {"additional_special_tokens": "<tool>"},
        "additional_special_tokens is '<tool>'; expected",
    ),
    (
        "tokenizer_config",
        {"extra_special_tokens": "<tool>"},
        "extra_special_tokens is '<tool>'; expected a list",
    ),
    (
        "special_tokens_map",
        {"extra_special_tokens": 7},
        "extra_special_tokens is 7; expected a list",
    ),
    (
        "tokenizer_config",
        {"added_tokens_decoder": [{"content": "hi"}]},
        r"added_tokens_decoder is \[{.*; expected an",
    ),
    ("added_tokens", ["<tool>"], r"what it holds is \['<tool>'\]; expected an object"),
    ("config", "llama", "what it holds is 'llama'; expected an object"),
]


@pytest.mark.parametrize(
    ("file", "content", "message"), MISSHAPEN, ids=[message for _, _, message in MISSHAPEN]
)
def test_a_file_beside_of_another_shape_is_refused_by_its_field(
    file: str, content: Any, message: str, made: dict[str, str], tmp_path: Path
) -> None:
    folder = write(tmp_path, made["byte_level"], {file: content})
    with pytest.raises(TokenizerError, match=f"{file}\\.json: {message.replace('|', '[|]')}"):
        find_tokenizer(".", folder)


@pytest.mark.parametrize(
    ("name", "legacy"), [("llama", True), ("llama_of_old", False), ("digits", None)]
)
def test_what_its_class_builds_is_taken_once_it_is_saved_and_its_class_is_set(
    name: str, legacy: bool | None, made: dict[str, str], tmp_path: Path
) -> None:
    class_name = "GPT2Tokenizer" if legacy is None else "LlamaTokenizer"
    files = of_class(class_name, legacy=legacy)
    with pytest.raises(TokenizerError, match=r"in another folder, .* and do the same there"):
        find_tokenizer(".", write(tmp_path / "a", made[name], files))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "a")
    theirs.save_pretrained(tmp_path / "b")
    config = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "b" / "tokenizer_config.json").write_text(json.dumps(config))

    ours = same_as_transformers(tmp_path / "b")

    assert encoded(ours) == [theirs.encode(text, add_special_tokens=False) for text in TEXTS]


def test_another_unknown_token_is_no_matter_where_each_byte_has_a_piece(
    made: dict[str, str], tmp_path: Path
) -> None:
    files = of_class("LlamaTokenizer", legacy=False, unk_token="<unk>")
    document = json.loads(made["llama"])
    document["model"] |= {"unk_token": "<unk>", "fuse_unk": False}
    same_as_transformers(write(tmp_path / "a", json.dumps(document), files))

    # With a hole in the vocabulary's bytes, it is.
    document["model"]["vocab"]["hole"] = document["model"]["vocab"].pop("<0xE6>")
    with pytest.raises(TokenizerError, match="'LlamaTokenizer' builds another"):
        find_tokenizer(".", write(tmp_path / "b", json.dumps(document), files))


def test_the_file_is_what_counts_once_its_class_is_set_to_that(
    made: dict[str, str], tmp_path: Path
) -> None:
    files = of_class("PreTrainedTokenizerFast") | {"config": {"model_type": "starcoder2"}}
    same_as_transformers(write(tmp_path, made["digits"], files))


def test_the_table_of_classes_is_what_transformers_makes() -> None:
    written = tokenizer_classes.FILE.read_text(encoding="utf-8")
    assert written == tokenizer_classes.text(), (
        "python -m tests.support.tokenizer_classes writes it anew"
    )
