"""Real tokenisers, trained here on the text that every Python installation carries."""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenloom_server.tokenizer.choose import EngineChoice, choose_engine
from tokenloom_server.tokenizer.definition import TokenizerDefinition, find_tokenizer

SPECIAL = ["<|endoftext|>", "<|pad|>"]
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "calendar", "typing")
    return [(folder / f"{name}.py").read_text(encoding="utf-8") for name in names]


@pytest.fixture(scope="session")
def rows(corpus: list[str]) -> pa.Array:
    return pa.array(corpus)


def _byte_level(
    corpus: list[str],
    pre_tokenizer: Any,
    normalizer: Any = None,
    added: tuple[AddedToken, ...] = (),
) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer.to_str()


def _sentencepiece(corpus: list[str]) -> str:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=special + pieces, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [
        token for token in document["added_tokens"] if token["content"] in special
    ]
    return json.dumps(document)


def _unigram(corpus: list[str]) -> str:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus[:3], trainer)
    return tokenizer.to_str()


def _word_piece(corpus: list[str]) -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def folder(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one tokenizer file for each kind."""
    byte_level = pre_tokenizers.ByteLevel
    added = (
        AddedToken("<tool>", normalized=False),
        AddedToken("@@user@@", normalized=True),
        AddedToken("<lazy>", lstrip=True, normalized=False),
    )
    split = pre_tokenizers.Split(Regex(CL100K), "isolated")
    whole = byte_level(add_prefix_space=False, use_regex=False)
    plain = _byte_level(corpus, byte_level(add_prefix_space=False), added=added)
    cut = json.loads(plain)
    cut["truncation"] = {
        "direction": "Right",
        "max_length": 5,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    cut["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 1, "pad_type_id": 0, "pad_token": "<|pad|>",
    }  # fmt: skip
    cut["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|pad|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [1], "tokens": ["<|pad|>"]}},
    }
    random = json.loads(plain)
    random["model"]["dropout"] = 0.1
    kinds = {
        "plain": plain,
        "cut": json.dumps(cut),
        "random": json.dumps(random),
        "prefix": _byte_level(corpus, byte_level(add_prefix_space=True)),
        "cl100k": _byte_level(corpus, pre_tokenizers.Sequence([split, whole]), normalizers.NFC()),
        # Without a pre-tokenizer a whole text is one word; lines keep its training short.
        "whole": _byte_level(corpus[0].splitlines(), whole),
        "lower": _byte_level(corpus, byte_level(add_prefix_space=False), normalizers.Lowercase()),
        "sentencepiece": _sentencepiece(corpus),
        "unigram": _unigram(corpus),
        "word_piece": _word_piece(corpus),
    }
    path = tmp_path_factory.mktemp("tokenizers")
    for name, content in kinds.items():
        (path / f"{name}.json").write_text(content, encoding="utf-8")
    return path


@pytest.fixture
def find(folder: Path) -> Callable[[str], TokenizerDefinition]:
    return lambda kind: find_tokenizer(kind if kind == "bytes" else f"{kind}.json", folder)


@pytest.fixture
def choose(rows: pa.Array) -> Callable[..., EngineChoice]:
    def chosen(definition: TokenizerDefinition, mode: Any = "text") -> EngineChoice:
        return choose_engine(definition, mode, [rows.slice(0, 2)], cpu_clock_s=time.thread_time)

    return chosen
