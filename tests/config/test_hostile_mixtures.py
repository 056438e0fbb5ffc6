"""Mixture files of strangers and with slips of the pen: each a clear error, soon, in little memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.catalog import CATALOG
from support.corpora import mixture
from support.hostile import (
    PLAIN_TEXTS,
    TEXTS,
    cards,
    is_shown_as_it_is,
    mixtures,
    outcome_of,
    tokenizers,
)
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.errors import ConfigError


@pytest.mark.parametrize("text", TEXTS)
def test_names_that_a_terminal_would_obey_are_refused_by_field(text: str) -> None:
    for field in ("alias", "source", "tokenizer", "run"):
        document = mixture()
        section = document["mixture"]["children"][0] if field in ("alias", "source") else document
        section[field] = f"txt:{text}:text" if field == "source" else text
        with pytest.raises(ConfigError, match=rf"{field}: ") as caught:
            config.parse(document, where="mixture.yaml", catalog=CATALOG)
        assert is_shown_as_it_is(str(caught.value))


@pytest.mark.parametrize("text", TEXTS)
def test_a_revision_has_an_author_and_a_reason_on_one_line(text: str) -> None:
    for field in ("author", "reason"):
        with pytest.raises(
            ValidationError, match="expected UTF-8 text on one line, without control characters"
        ):
            MixtureChange.model_validate({"reason": "why", field: text})


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_aliases_and_reasons_are_of_every_script(text: str) -> None:
    document = mixture()
    document["mixture"]["children"][0]["alias"] = text
    assert config.parse(document, where="", catalog=CATALOG).sources[0].alias == text
    assert MixtureChange(reason=text, author=text).reason == text


READ_MIXTURE = """from tokenloom_server.catalog import open_catalog
        from tokenloom_server.config import mixture_file
        mixture_file.load(path, open_catalog())"""
READ_TOKENIZER = """from tokenloom_server.tokenizer.definition import find_tokenizer
        find_tokenizer(path.name, path.parent)"""


@pytest.mark.parametrize(
    ("call", "inputs", "begin", "says"),
    [
        (
            READ_MIXTURE,
            mixtures(),
            "/",
            {"bomb: aliases of aliases": "line 6: more than 200,000 values"},
        ),
        (
            "checked_card(path.read_text(), 'README.md')",
            cards(),
            "its README.md",
            {"lists in lists": "nested deeper than 100 levels"},
        ),
        (
            READ_TOKENIZER,
            tokenizers(),
            "tokenizer '",
            {"BPE with the id 4294967295": "expected at most 4194303"},
        ),
    ],
    ids=["mixtures", "cards", "tokenizers"],
)
def test_hostile_files_end_in_a_clear_error_in_little_memory(
    call: str, inputs: dict[str, str], begin: str, says: dict[str, str], tmp_path: Path
) -> None:
    outcome = outcome_of(call, inputs, tmp_path)
    for name, error in outcome.errors.items():
        assert error.startswith(begin) and len(error) < 2500, f"{name}: {error[:1000]}"
        assert is_shown_as_it_is(error, lines=True), name
    assert outcome.peak_mib < 200
    for name, words in says.items():
        assert words in outcome.errors[name]
