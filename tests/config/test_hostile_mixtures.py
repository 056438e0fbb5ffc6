"""Mixture files of strangers and with slips of the pen: each a clear error, soon, in little memory."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from support.catalog import CATALOG
from support.corpora import mixture
from support.hostile import PLAIN_TEXTS, TEXTS, is_shown_as_it_is
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
