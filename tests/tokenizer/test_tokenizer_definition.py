"""Finding a tokeniser, its vocabulary, and the ids that end and begin a document."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hub import StandInHub
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.errors import ConfigError, TokenizerError
from tokenloom_server.tokenizer.definition import (
    AddedToken,
    TokenizerDefinition,
    begin_of_text_id,
    end_of_text_id,
    find_tokenizer,
    id_dtype,
)
from tokenloom_server.tokenizer.files import tokenizer_file, tokenizer_files

Find = Callable[[str], TokenizerDefinition]


def _with_config(folder: Path, at: Path, config: object) -> TokenizerDefinition:
    shutil.copy(folder / "plain.json", at / "tokenizer.json")
    text = config if isinstance(config, str) else json.dumps(config)
    (at / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return find_tokenizer(".", at)


def test_the_vocabulary_counts_added_tokens(find: Find) -> None:
    definition = find("plain")

    assert definition.vocab_size == 1503
    added = [token.content for token in definition.added_tokens if not token.special]
    assert added == ["<tool>", "@@user@@", "<lazy>"]
    assert definition.vocab_size == max(token.id for token in definition.added_tokens) + 1


def test_a_vocabulary_with_gaps_is_as_large_as_its_greatest_id(
    folder: Path, tmp_path: Path
) -> None:
    document = json.loads((folder / "plain.json").read_text(encoding="utf-8"))
    document["model"]["vocab"]["zzz"] = 70_000
    (tmp_path / "gaps.json").write_text(json.dumps(document), encoding="utf-8")

    assert find_tokenizer("gaps.json", tmp_path).vocab_size == 70_001


def test_bytes_need_no_file(tmp_path: Path) -> None:
    definition = find_tokenizer("bytes", tmp_path / "nowhere")

    assert definition.vocab_size == 258
    assert end_of_text_id(definition, None, needed=True) == 256
    assert begin_of_text_id(definition, None, needed=True) == 257


def test_a_folder_and_an_absolute_path_name_the_same_tokeniser(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(folder / "plain.json", tmp_path / "model" / "tokenizer.json")

    digests = {
        find_tokenizer("model", tmp_path).digest,
        find_tokenizer("model/tokenizer.json", tmp_path).digest,
        find_tokenizer(str(tmp_path / "model"), Path("/")).digest,
        find_tokenizer("plain.json", folder).digest,
    }

    assert len(digests) == 1


def _download(folder: Path, hub: StandInHub, tmp_path: Path, name: str = "org/tiny") -> str:
    """A model's tokeniser on the Hub, as the command that errors name brings it into the cache; its commit."""
    files = {
        "tokenizer.json": (folder / "plain.json").read_bytes(),
        "tokenizer_config.json": b"{}",
        "weights.bin": b"",
    }
    commit = hub.repo(name).commit(files)
    command = ["download", name, "--include", "tokenizer*", "--include", "chat_template*"]
    environment = os.environ | hub.environment(tmp_path / "hf")
    subprocess.run(
        [Path(sys.executable).with_name("hf"), *command],
        env=environment,
        check=True,
        capture_output=True,
    )
    return commit


def test_a_name_on_the_hub_is_read_from_its_cache_at_the_commit_that_was_downloaded(
    folder: Path, tmp_path: Path, hub: StandInHub
) -> None:
    commit, plain = _download(folder, hub, tmp_path), find_tokenizer("plain.json", folder)
    hub.repos["org/tiny"].commit({"tokenizer.json": b"{}"})
    hub.forget()

    for name in ("org/tiny", "org/tiny@main", f"org/tiny@{commit}"):
        assert find_tokenizer(name, tmp_path).digest == plain.digest
    assert tokenizer_file("org/tiny", tmp_path).parent.name == commit
    assert hub.requests == []


def test_a_path_that_exists_is_meant_before_a_name_on_the_hub(
    folder: Path, tmp_path: Path, hub: StandInHub
) -> None:
    _download(folder, hub, tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    shutil.copy(folder / "lower.json", tmp_path / "org" / "tiny" / "tokenizer.json")

    for name, file in (("org/tiny", "lower.json"), ("org/tiny@main", "plain.json")):
        assert find_tokenizer(name, tmp_path).digest == find_tokenizer(file, folder).digest
    here = list(tokenizer_files("org/tiny", tmp_path))
    assert here[:2] == ["org/tiny", "org/tiny/tokenizer.json"]
    there = list(tokenizer_files("org/tiny@main", tmp_path))
    assert there == ["hf://org/tiny"]
    DataRoots.of(["hf://org"]).check_paths("tokenizer", tmp_path, there)
    with pytest.raises(ConfigError, match="'hf://org/tiny' lies below no data root"):
        DataRoots.of([tmp_path]).check_paths("tokenizer", tmp_path, there)


@pytest.mark.parametrize(
    ("name", "download"),
    [
        ("gpt2", "hf download gpt2 --include"),
        ("org/n-1.5@v2", "hf download org/n-1.5 --revision v2 --include"),
    ],
)
def test_a_name_that_is_not_in_the_cache_is_refused_with_the_command_that_brings_it_and_nobody_is_asked(
    tmp_path: Path, hub: StandInHub, monkeypatch: pytest.MonkeyPatch, name: str, download: str
) -> None:
    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("a network connection was tried")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)

    with pytest.raises(
        TokenizerError,
        match=rf"{name} does not exist, and the Hub's cache.*{download} 'tokenizer\*'",
    ):
        find_tokenizer(name, tmp_path)


def test_without_the_library_of_the_hub_a_name_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(
        TokenizerError, match=r"gpt2 does not exist; .* pip install 'tokenloom\[hf\]'"
    ):
        find_tokenizer("gpt2", tmp_path)


@pytest.mark.parametrize("name", ["./gpt2", "/no/such/folder", "a/b/tokenizer.json", "gpt 2"])
def test_what_can_be_no_name_on_the_hub_is_a_path_that_is_missing(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(
        TokenizerError,
        match=r"does not exist; expected a tokenizer\.json, a folder with one, a name on",
    ):
        find_tokenizer(name, tmp_path)


def test_a_folder_without_a_tokenizer_json_lists_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x00")

    with pytest.raises(
        TokenizerError, match=r"has no tokenizer.json \(found: tokenizer.model\); save it as"
    ):
        find_tokenizer(".", tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_what_only_points_to_a_file_of_a_tokeniser_is_refused_with_what_brings_it(
    folder: Path, tmp_path: Path, file: str
) -> None:
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_bytes((folder / "plain.json").read_bytes())
    link = tmp_path / "tok" / file
    for is_link in (True, False):
        link.unlink(missing_ok=True)
        if is_link:
            link.symlink_to(".git/annex/objects/x/y")
        else:
            link.write_text("/annex/objects/y\n")
        for name in ("tok", "tok/tokenizer.json"):
            with pytest.raises(TokenizerError, match=f"{name}': .*{file} is .*'git annex get'"):
                find_tokenizer(name, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[]", "is JSON but has no 'model'"),
        (b'{"version": "1.0"}', "is JSON but has no 'model'"),
        (b'{"version": "1.0", "model": {"type": "Markov"}}', "is not supported by tokenizers"),
        (
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}',
            "has an empty vocabulary",
        ),
    ],
)
def test_a_file_that_is_no_tokeniser_is_refused_by_name(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "tok.json").write_bytes(content)

    with pytest.raises(TokenizerError, match=rf"'tok.json': .*tok.json {message}"):
        find_tokenizer("tok.json", tmp_path)


def test_a_tokeniser_that_encodes_at_random_is_refused(find: Find) -> None:
    with pytest.raises(
        TokenizerError, match=r"model.dropout = 0.1, which encodes at random; set it to null"
    ):
        find("random")


def test_a_vocabulary_wider_than_the_wire_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"4294967297 ids does not fit .* uint32"):
        id_dtype(2**32 + 1)


def test_the_end_of_text_id_is_found_by_its_known_name(find: Find) -> None:
    assert end_of_text_id(find("plain"), None, needed=True) == 0
    assert end_of_text_id(find("sentencepiece"), None, needed=True) == 2
    assert begin_of_text_id(find("sentencepiece"), None, needed=True) == 1


def test_a_configured_id_goes_before_every_name_and_must_exist(find: Find) -> None:
    assert end_of_text_id(find("plain"), 7, needed=True) == 7
    with pytest.raises(
        TokenizerError, match="end_of_text_id: 1503 is not below the vocabulary size 1503"
    ):
        end_of_text_id(find("plain"), 1503, needed=False)


@pytest.mark.parametrize("token", ["<|pad|>", {"content": "<|pad|>", "__type": "AddedToken"}])
def test_the_config_beside_the_tokeniser_names_the_end_and_is_part_of_the_digest(
    folder: Path, tmp_path: Path, token: object
) -> None:
    named = _with_config(folder, tmp_path, {"eos_token": token, "bos_token": None})
    other = _with_config(folder, tmp_path, {"eos_token": "<|endoftext|>"})

    assert end_of_text_id(named, None, needed=True) == 1
    assert end_of_text_id(other, None, needed=True) == 0
    assert named.digest != other.digest


def test_a_named_end_that_the_vocabulary_lacks_is_added_as_transformers_does(
    folder: Path, tmp_path: Path
) -> None:
    definition = _with_config(folder, tmp_path, {"eos_token": "<nope>"})

    assert end_of_text_id(definition, None, needed=True) == definition.vocab_size - 1
    assert definition.vocab_size == find_tokenizer("plain.json", folder).vocab_size + 1


def test_a_broken_config_beside_the_tokeniser_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: cannot be read"):
        _with_config(folder, tmp_path, "{")


def test_a_missing_end_lists_the_special_tokens(find: Find) -> None:
    definition = find("word_piece")

    assert end_of_text_id(definition, None, needed=False) is None
    with pytest.raises(
        TokenizerError,
        match=r"add_eot is on, but .* set end_of_text_id .*'\[UNK\]' = 0, '\[SEP\]' = 1",
    ):
        end_of_text_id(definition, None, needed=True)
    with pytest.raises(TokenizerError, match=r"add_bos is on, but .* set begin_of_text_id"):
        begin_of_text_id(definition, None, needed=True)
    with pytest.raises(TokenizerError, match=r"there is no tokeniser to find it in"):
        end_of_text_id(None, None, needed=True)


def test_two_ends_are_ambiguous_but_an_end_of_turn_or_html_is_not(find: Find) -> None:
    plain = find("plain")
    turn, html, two = (
        replace(plain, added_tokens=(*plain.added_tokens, AddedToken(name, 8, special)))
        for name, special in (("<|im_end|>", True), ("</s>", False), ("</s>", True))
    )

    assert end_of_text_id(turn, None, needed=True) == end_of_text_id(html, None, needed=True) == 0
    with pytest.raises(
        TokenizerError, match=r"has '<\|endoftext\|>' and '</s>', and nothing says which"
    ):
        end_of_text_id(two, None, needed=True)
