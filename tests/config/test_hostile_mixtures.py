"""Mixture files of strangers and with slips of the pen: each a clear error, soon, in little memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.catalog import CATALOG
from support.corpora import mixture
from support.hostile import PLAIN_TEXTS, TEXTS, is_shown_as_it_is, mixtures, outcome_of
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
        with pytest.raises(ValidationError, match="expected text on one line, without control characters"):
            MixtureChange.model_validate({"reason": "why", field: text})


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_aliases_and_reasons_are_of_every_script(text: str) -> None:
    document = mixture()
    document["mixture"]["children"][0]["alias"] = text
    assert config.parse(document, where="", catalog=CATALOG).sources[0].alias == text
    assert MixtureChange(reason=text, author=text).reason == text


def test_hostile_mixtures_end_in_a_clear_error_in_little_memory(tmp_path: Path) -> None:
    outcome = outcome_of(
        "from tokenloom_server.catalog import open_catalog; from tokenloom_server.config import mixture_file; "
        "mixture_file.load(path, open_catalog())",
        mixtures(),
        tmp_path,
    )
    for name, error in outcome.errors.items():
        assert error.startswith(str(tmp_path)), name
        assert len(error) < 10_000, f"{name}: {error[:1000]}"
        assert is_shown_as_it_is(error, lines=True), name
    assert outcome.peak_mib < 200
    for name, says in {
        "bomb: aliases of aliases": "line 6: more than 200,000 values, with those of each alias",
        "bomb: an alias of what it lies in": "line 1: more than 200,000 values",
        "bomb: a long number": "line 1: a number of 100,000 digits; expected at most 1,000",
        "bomb: lists in lists": "line 1: nested deeper than 100 levels",
        "beyond the bound of bytes": "has more than 16,777,216 bytes; expected a mixture file",
    }.items():
        assert says in outcome.errors[name], outcome.errors[name]
