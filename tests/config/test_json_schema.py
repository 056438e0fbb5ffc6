"""The JSON Schema says of a mixture file what the models say, as far as names, types and bounds go."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from support.catalog import CATALOG
from support.mixing import node
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.mixture_file import mixture_schema
from tokenloom_server.errors import ConfigError
from tokenloom_tools.cli.init import schema_text

ROOT = Path(__file__).parents[2]
SCHEMA = mixture_schema(CATALOG)
VALIDATOR = Draft202012Validator(SCHEMA)
#: Texts that stand alone in no field, and a thing of each type.
WRONG: tuple[Any, ...] = ({"no": "such"}, [None], [["a"]], True, -1, 1.5, "no such", 2**80)
#: What is wrong with a value by itself, as pydantic calls it.
BY_ITSELF = re.compile(
    r"valid |Input should be|unknown key|at least|at most|expected text of|^expected one of"
)
MIXTURE: dict[str, Any] = {
    "run": "a",
    "tokenizer": "bytes",
    "sequence_length": 8,
    "mixture": {
        "policy": "least_consumed",
        "children": [
            {"source": "jsonl:a.jsonl:text", "weight": 0.5},
            {"policy": "weighted", "children": [{"source": "txt:b.txt:text"}]},
        ],
    },
}


def valid(document: object) -> bool:
    return bool(VALIDATOR.is_valid(document))


def test_it_is_a_schema_and_the_command_prints_it() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(schema_text()) == SCHEMA
    assert "Tokens per sample" in SCHEMA["properties"]["sequence_length"]["description"]


def test_every_mixture_file_of_docs_and_examples_validates() -> None:
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    shown = [
        text
        for page in pages
        for text in re.findall(r"^```yaml\n(run:.*?)^```", page.read_text(), re.S | re.M)
    ]
    files = [path.read_text() for path in ROOT.glob("examples/*/mixture.yaml")]
    assert len(shown) > 3
    assert len(files) > 1
    for text in (*shown, *files):
        document = yaml.safe_load(text)
        assert [error.message for error in VALIDATOR.iter_errors(document)] == [], text


def of_one(**source: Any) -> dict[str, Any]:
    return {"mixture": node("schedule", {"source": "jsonl:b:text", **source})}


@pytest.mark.parametrize(
    "fields",
    [
        {"streams": {"validation": None}},
        {"max_bad_rows": "1e9"},
        of_one(weight=[[0, 1], ["2e9", 0.1]]),
        of_one(epochs="inf"),
        of_one(epochs=math.inf),
        of_one(filter="score > 0.5"),
    ],
    ids=["empty-stream", "exponent", "points", "inf", ".inf", "one-filter"],
)
def test_what_a_file_may_hold_beside_the_type_of_a_field_validates(fields: dict[str, Any]) -> None:
    assert valid(MIXTURE | fields)


def test_training_may_stand_among_the_streams_and_must_stand_somewhere() -> None:
    without = {name: value for name, value in MIXTURE.items() if name != "mixture"}
    assert valid(without | {"streams": {"train": {"mixture": MIXTURE["mixture"]}}})
    assert not valid(without)
    assert not valid(without | {"streams": {"other": {"mixture": MIXTURE["mixture"]}}})


def fields_of(model: str) -> list[str]:
    return list((SCHEMA["$defs"][model] if model else SCHEMA)["properties"])


@pytest.mark.parametrize("model", ["", "NodeConfig", "SourceConfig", "PhaseConfig"])
def test_every_value_of_a_wrong_type_is_flagged_and_nothing_that_is_valid(model: str) -> None:
    for field in [*fields_of(model), "no_such_field"]:
        for value in WRONG:
            document = copy.deepcopy(MIXTURE)
            root = document["mixture"]
            place = {
                "": document,
                "NodeConfig": root["children"][1],
                "SourceConfig": root["children"][0],
            }.get(model)
            if place is None:
                place = document.setdefault("phases", [{"until_tokens": 100}])[0]
            place[field] = value
            refused = ""
            try:
                config.parse(document, where="", catalog=CATALOG)
            except ConfigError as error:
                refused = str(error)
            if not refused:
                assert valid(document), (field, value)
            elif BY_ITSELF.search(refused):
                assert not valid(document), (field, value, refused)
