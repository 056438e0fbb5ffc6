"""The mixture file: every fault is named with the path of its field; the digest covers the order and no more."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.catalog import CATALOG
from support.corpora import CODE, DOCS, PROSE, flat, mixture, parsed
from support.mixing import config_of, node
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.node import NodeConfig, walk
from tokenloom_server.config.order_fields import order_digest, order_fields
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.errors import ConfigError
from tokenloom_server.mixing.policies import policies

Change = Callable[[dict[str, Any]], Any]

MINIMAL = """\
run: wiki
tokenizer: bytes
sequence_length: 8
mixture:
  policy: least_consumed
  children:
    - source: "txt:a.txt:text"
    - source: "txt:b.txt:text"
      epochs: .inf
"""


def changed(change: Change) -> dict[str, Any]:
    document = mixture()
    change(document)
    return document


def parent_of(document: Any, path: str) -> tuple[Any, str]:
    """What holds ``mixture.children.0.weight`` and the like, and the last part of the path."""
    *parents, last = path.split(".")
    for part in parents:
        document = document[int(part)] if part.isdigit() else document[part]
    return document, last


def put(path: str, value: Any) -> Change:
    """Sets ``mixture.children.0.weight`` and the like."""

    def change(document: dict[str, Any]) -> None:
        section, field = parent_of(document, path)
        section[field] = value

    return change


def scheduled(points: Any, **node: Any) -> Change:
    """Makes the root a schedule, with points for its first child."""

    def change(document: dict[str, Any]) -> None:
        document["mixture"] |= {"policy": "schedule"} | node
        document["mixture"]["children"][0]["weight"] = points

    return change


def packed(packing: str, *, loss_mask: str | None = None, **fields: Any) -> Change:
    """Another packing, with options of its own."""

    def change(document: dict[str, Any]) -> None:
        document |= {"packing": packing} | fields
        if loss_mask is not None:
            document["mixture"]["children"][0]["loss_mask"] = loss_mask

    return change


POLICIES = tuple(policies())
BAD = [
    ("sequenze_length", 8, "unknown key"),
    ("mixture.children.0.epoch", 2, "unknown key"),
    ("mixture.children.2.children.1.wait", 2, "unknown key"),
    ("mixture.strategy", "weighted", "unknown key"),
    ("mixture.childern", [{"source": "parquet:a:b"}] * 99, "parquet:a:b'}…)"),
    *[
        ("mixture.children.0.weight", zero, "take the child out of the file, or pause it")
        for zero in (0, 0.0)
    ],
    *[("sequence_length", bad, repr(bad)) for bad in (1, 0, -8, 2**25, 8.0, "8", True, None)],
    *[
        (path, bad, "")
        for path, values in {
            "mixture.children.0.weight": (
                *(-1, math.nan, math.inf, -math.inf, True, False, None),
                *("two", "nan", [1], "inf"),
            ),
            "mixture.children.2.weight": (0, -1, math.nan, math.inf, True),
            "mixture.children.1.epochs": (
                *(0, -1, math.nan, -math.inf, True, False, None),
                *("nan", "all"),
            ),
            "seed": (-1, 2**63, 1.0, "7", True),
            "run": ("", ".hidden", "a/b", "a b", "a" * 129, "ü", "a\n", 7, None),
            "mixture.children.0.shuffle_window_rows": (0, 1, 2**25, 1.5, "many", None, True),
            "mixture.children.0.lanes": (0, 65, 1.5, "many", None, True),
            "mixture.children.0.holdout": (0, 1, -0.1, 1.5, "many", True),
            "mixture.children.0.loss_mask": ("",),
            "mixture.children.0.add_bos": ("auto",),
            "pack_window_rows": (0,),
            "pad_id": (-1,),
            "mask_boundaries": (1,),
            "add_eot": ("never",),
            "add_bos": ("auto",),
            "vocab_size": (1, 2**32 + 1),
            "end_of_text_id": (-1,),
            "window_micro_steps": (1,),
        }.items()
        for bad in values
    ],
    ("mixture.children.0.source", "ftp:x:y", "expected one of parquet:GLOB:COLUMN"),
    ("mixture.children.0.source", "parquet", "the scheme is 'parquet'"),
    ("mixture.children.0.source", "parquet:x", "no part empty"),
    ("mixture.children.0.source", "parquet::text", "no part empty"),
    ("mixture.children.0.source", "parquet:x:", "no part empty"),
    ("mixture.children.0.source", "txt:a.txt:body", "'body' was asked for"),
    ("mixture.children.0.source", "hf:org/name:train", "the split or the column is missing"),
    (
        "mixture.children.0.source",
        "hf:org/name:train[:10%]:text",
        "expected a whole split such as 'train'",
    ),
    ("mixture.children.0.source", "hf:org/name@:train:text", "the revision is ''"),
    ("mixture.children.0.source", "hf:org/name@../x:train:text", "the revision is '../x'"),
    ("mixture.children.0.source", "hf:org//x:train:text", "the repository is 'org/'"),
    ("mixture.children.0.source", "hf:org/name/:train:text", "the config is ''"),
    ("mixture.children.0.source", "hf:../name:train:text", "the repository is '../name'"),
    ("mixture.children.0.source", "", "the scheme is ''"),
    ("mixture.children.0.source", 7, "valid string"),
    ("mixture.children.2.children.0.source", CODE, "mixture.children.0"),
    ("mixture.children.1.alias", "code", "mixture.children.0"),
    ("mixture.policy", "fewest", f"{', '.join(map(repr, POLICIES[:-1]))} or {POLICIES[-1]!r}"),
    ("mixture.on_exhausted", "repeat", "'drop' or 'stop'"),
    ("mixture.children", [], "at least 1"),
    ("mixture.children", "a.txt", "valid list"),
    ("mixture.children.2.children", [], "at least 1"),
    ("mixture", [], "valid dictionary"),
    ("tokenizer", None, "expected a tokenizer.json"),
    ("labels", "next", "'same' or 'shifted'"),
    ("packing", "greedy", "'concat', 'best_fit' or 'none'"),
    ("tail", "keep", "'drop' or 'pad'"),
    ("long_rows", "drop", "'truncate' or 'split'"),
    ("padding", "both", "'right' or 'left'"),
    ("long_rows", "split", "it is for packing: none; leave it out"),
    ("pack_window_rows", 16, "it is for packing: best_fit; leave it out"),
    ("pack_window_tokens", 2**13, "it is for packing: best_fit; leave it out"),
    (
        "padding",
        "left",
        "it is for samples that are padded (packing: best_fit or none, or tail: pad); leave it out",
    ),
    ("pad_id", 3, "it is for samples that are padded"),
    (
        "mixture.children.0.loss_mask",
        "mask",
        "mixture.children.0.loss_mask: is for packing: none or best_fit",
    ),
    ("last_micro_step", "keep", "'drop' or 'pad'"),
    ("special_tokens_in_text", "ignore", "'text' or 'parse'"),
    ("mixture.children", [{"source": CODE, "commit": "0" * 40}], "is no dataset on the Hub"),
    (
        "mixture.children",
        [{"source": "hf:a/b:train:text", "commit": "main"}],
        "expected text of ^[0-9a-f]{40}$; found 'main'",
    ),
    ("mixture.children.0.shuffle", "blocks", "'none', 'shards' or 'rows'"),
    ("mixture.children.0.shuffle", True, "'none', 'shards' or 'rows'"),
    (
        "mixture.children",
        [{"source": CODE, "shuffle_window_rows": 100}],
        "found 100, but shuffle is 'none'",
    ),
    (
        "streams",
        {"validation": {}},
        "validation: has no mixture, and no source holds rows out for it",
    ),
    (
        "streams",
        {"a/b": {"mixture": node("weighted", {"source": CODE})}},
        "1 to 64 letters (a to z)",
    ),
    ("streams", {"v": {"mixture": node("weighted")}}, "at least 1"),
]


@pytest.mark.parametrize(
    "policy", [name for name in POLICIES if policies()[name].takes == "nothing"]
)
def test_a_weight_under_a_policy_that_knows_none_is_refused(policy: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"mixture: children.0.weight: found 2, but the policy '{policy}' knows no",
    ):
        parsed(changed(put("mixture.policy", policy)))


@pytest.mark.parametrize(
    ("path", "value", "says"), BAD, ids=[f"{path}={value!r:.24}" for path, value, _ in BAD]
)
def test_a_bad_value_is_refused_with_the_path_of_its_field(
    path: str, value: Any, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(changed(put(path, value)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"mixture.yaml: {path}")
    assert says in lines[0]


FILTER, TEMPLATE, FIM_FIELD = (
    f"mixture.children.0.{field}" for field in ("filter", "template", "fim")
)
BAD_RULES = [
    (FILTER, "score", "'score' is no comparison; expected COLUMN OPERATOR VALUE"),
    (FILTER, ">= 3", "'>= 3' is no comparison"),
    (
        FILTER,
        "score >= ",
        "'' is no value; expected a number, true, false, a text in double quotes",
    ),
    (FILTER, "lang == en", "'en' is no value"),
    (FILTER, "score == null", "null cannot be compared with"),
    (FILTER, "score == NaN", "'NaN' is no value"),
    (FILTER, "score in 3", "found 3 after 'in', expected a list"),
    (FILTER, "score > [3]", "found [3] after '>', expected one value"),
    (FILTER, 'score in [3, "a"]', "expected a list of numbers, or of texts"),
    (FILTER, "score in []", "expected a list of numbers, or of texts, with something in it"),
    (FILTER, "good > true", "true and false have no order; expected == or !="),
    (FILTER, f"n == {2**64}", "beyond 64 bits"),
    (FILTER, "__import__('os').system('true')", "is no comparison"),
    (FILTER, 3, "expected a comparison such as 'score >= 0.5', or a list of them"),
    (FILTER, [], "at least 1"),
    ("mixture.children.2.children.0.filter", "n == 1", "filter: a txt source has no columns"),
    ("mixture.children.2.children.0.template", "{text}", "template: a txt source has no columns"),
    (TEMPLATE, "{title}", "does not name the source's column {ids}"),
    (TEMPLATE, "{ids", "the brace at character 1 of '{ids' begins no {column}; write {{"),
    (TEMPLATE, "{ids{x}}", "begins no {column}"),
    (TEMPLATE, "ids}", "the brace at character 4 of 'ids}' ends no {column}; write }}"),
    (TEMPLATE, "{{ids}}", "names no column"),
    (FIM_FIELD, {"rate": 0.5}, "fim.ids: is missing"),
    (
        FIM_FIELD,
        {"rate": 0.5, "ids": {"prefix": 1, "middle": 2, "suffix": 1}},
        "expected three different ids",
    ),
    (FIM_FIELD, {"rate": 0, "ids": {"prefix": 1, "middle": 2, "suffix": 3}}, "fim.rate"),
    (FIM_FIELD, {"rate": 1.5, "ids": {"prefix": 1, "middle": 2, "suffix": 3}}, "fim.rate"),
    ("mixture.children.0.max_bad_rows", 3, "max_bad_rows: is for on_bad_row: skip"),
    ("mixture.children.0.on_bad_row", "ignore", "found 'ignore'"),
    ("mixture.children.0.on_blank_line", "ignore", "found 'ignore'"),
    (
        "mixture.children.0.on_blank_line",
        "fail",
        "on_blank_line: is for JSON lines; leave it out of a parquet source",
    ),
]


@pytest.mark.parametrize(("path", "value", "says"), BAD_RULES)
def test_a_bad_rule_for_rows_is_refused_with_its_place(path: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        parsed(changed(put(path, value)))
    child, _, field = path.rpartition(".")
    assert str(caught.value).startswith(f"mixture.yaml: {child}")
    assert field in str(caught.value)


@pytest.mark.parametrize(
    "path", ["run", "sequence_length", "mixture", "mixture.policy", "mixture.children.0.source"]
)
def test_a_missing_field_is_named(path: str) -> None:
    document = mixture()
    section, field = parent_of(document, path)
    del section[field]
    with pytest.raises(ConfigError, match=f"^mixture.yaml: {path}: is missing$"):
        parsed(document)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(changed(lambda d: d.update(run="", seed=-1, colour="red")))
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == [
        "run",
        "seed",
        "colour",
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vocab_size": 100}, "tokenizer"),
        ({"end_of_text_id": 5}, "tokenizer"),
        (
            {"vocab_size": 100, "end_of_text_id": 100},
            "end_of_text_id: 100 is not below vocab_size 100",
        ),
        (
            {"vocab_size": 100, "end_of_text_id": 1, "begin_of_text_id": 100},
            "begin_of_text_id: 100 is not below vocab_size 100",
        ),
    ],
)
def test_without_a_tokenizer_vocabulary_and_end_of_text_are_needed_and_must_agree(
    fields: dict[str, Any], says: str
) -> None:
    document = flat([CODE]) | fields
    del document["tokenizer"]
    with pytest.raises(ConfigError, match=f"mixture.yaml: {says}"):
        parsed(document)
    assert (
        parsed(
            document | {"vocab_size": 300, "end_of_text_id": 256, "begin_of_text_id": 257}
        ).tokenizer
        is None
    )


def test_a_mixture_that_contains_itself_is_refused() -> None:
    root = node("weighted")
    root["children"].append(root)
    with pytest.raises(ConfigError, match="cyclic"):
        parsed(mixture(mixture=root))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a mapping with run, mixture, …, found NoneType"),
        ("- 1\n", "found list"),
        ("run: [", "is not YAML"),
        (
            'run: [b in ["c"]]',
            "is not YAML: while parsing a flow sequence\n  at line 1, column 6\n",
        ),
        ("run: \x00", "is not YAML"),
        (MINIMAL + "run: other\n", "the key 'run' stands twice"),
        (
            MINIMAL.replace("epochs: .inf", "weight: 1\n      weight: 2"),
            "the key 'weight' stands twice",
        ),
        (
            MINIMAL.replace(".inf", ".nan"),
            "mixture.children.1.epochs: epochs is a number above 0 or .inf",
        ),
        (MINIMAL.replace("epochs: .inf", "weight: yes"), "mixture.children.1.weight: "),
        (MINIMAL.replace("epochs: .inf", "weight: .inf"), "mixture.children.1.weight: "),
        (MINIMAL.replace("run: wiki", "run: 2024-01-01"), "run: "),
        ("run: !!python/object/apply:os.system [exit]", "is not YAML"),
        ("[" * 5000, "line 1: nested deeper than 100 levels"),
    ],
)
def test_a_file_that_is_no_mixture_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mixture.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(path, CATALOG)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read \(No such file"):
        config.load(tmp_path / "none.yaml", CATALOG)
    (tmp_path / "latin.yaml").write_bytes(b"run: \xe4")
    with pytest.raises(ConfigError, match=r"latin.yaml: is not UTF-8 text .* at byte 5"):
        config.load(tmp_path / "latin.yaml", CATALOG)


def test_a_minimal_file_has_the_documented_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mixture.yaml"
    path.write_text(MINIMAL)
    found = config.load(path, CATALOG)
    values = found.run, found.seed, found.packing, found.labels, found.last_micro_step
    assert values == ("wiki", 0, "concat", "same", "drop")
    assert [source.epochs for source in found.sources] == [1.0, math.inf]
    assert [source.weight for source in found.sources] == [1.0, 1.0]
    assert found.mixture.on_exhausted == "drop"


def test_numbers_that_yaml_reads_as_text_are_numbers_all_the_same(tmp_path: Path) -> None:
    # YAML 1.1 knows no exponent without a point.
    path = tmp_path / "mixture.yaml"
    written = "epochs: inf\n      max_tokens: 1e9\n      weight: [[0, 1e-3], [2.5e8, 1]]"
    path.write_text(MINIMAL.replace("least_consumed", "schedule").replace("epochs: .inf", written))
    source = config.load(path, CATALOG).sources[1]
    assert (source.epochs, source.max_tokens) == (math.inf, 10**9)
    assert source.weight == [(0, 0.001), (250_000_000, 1.0)]


def test_source_ids_are_depth_first() -> None:
    assert [path for path, _ in walk(parsed(mixture()).mixture, "mixture")] == [
        "mixture.children.0",
        "mixture.children.1",
        "mixture.children.2.children.0",
        "mixture.children.2.children.1",
    ]


def test_sources_are_grouped_by_the_node_below_the_root_or_by_what_aliases_begin_with() -> None:
    assert parsed(mixture()).groups == ("code", "docs", "rest", "rest")
    document = flat([f"txt:{name}.txt:text" for name in "abcd"])
    for child, alias in zip(
        document["mixture"]["children"], ("web/a", "web-b", "wiki"), strict=False
    ):
        child["alias"] = alias
    assert parsed(document).groups == ("web", "web", "wiki", "txt:d.txt:text")


def test_a_schedule_without_any_weight_somewhere_is_refused() -> None:
    over = [[0, 1], [100, 0]]
    for later in ([[0, 0], [200, 1]], [[0, 0], [99, 0], [101, 1]], [[100, 0.1]]):
        assert config_of("schedule", over, later).mixture.policy == "schedule"
    with pytest.raises(ConfigError, match="children: at 100 tokens every weight is 0"):
        config_of("schedule", over, [[100, 0], [200, 1]])
    with pytest.raises(ConfigError, match="children: at 100 tokens every weight is 0"):
        config_of("schedule", over, [[0, 0], [200, 1]], interpolate="step")
    with pytest.raises(ConfigError, match="children: at 0 tokens every weight is 0"):
        config_of("schedule", [[0, 0], [100, 1]], [[50, 0], [100, 1]])


@pytest.mark.parametrize("policy", [name for name in POLICIES if policies()[name].estimates])
def test_what_has_no_end_is_refused_where_its_end_decides(policy: str) -> None:
    endless = node("weighted", {}, epochs=math.inf)
    with pytest.raises(
        ConfigError,
        match=rf"children\.1\.children\.0\.epochs: found \.inf, but the policy '{policy}'",
    ):
        config_of(policy, {}, endless)
    config_of(policy, {}, endless | {"max_tokens": 100})
    # A limit above the policy ends it, but tells nothing about what its children have left.
    with pytest.raises(ConfigError):
        config_of(policy, {}, endless, max_tokens=100)


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(item) for item in value] if isinstance(value, list) else value


FIM = {"rate": 0.5, "ids": {"prefix": 1, "middle": 2, "suffix": 3}}


def valid(source: dict[str, Any]) -> dict[str, Any]:
    """Streams of which one has a mixture of its own."""
    return {"valid": {"mixture": node("weighted", source)}}


SAME_ORDER: dict[str, Change] = {
    "where a new source's balance begins": put("new_source_baseline", "zero"),
    "the order of keys": lambda d: d.update(reversed_keys(d)),
    "the run's name": put("run", "another"),
    "an alias": put("mixture.children.0.alias", "another"),
    "a node's alias": put("mixture.children.2.alias", "another"),
    "1 or 1.0": put("mixture.children.1.weight", 1.0),
    "2 or 2.0": put("mixture.children.0.weight", 2.0),
    "epochs as a float": put("mixture.children.1.epochs", 2.0),
    "a number as text": put("mixture.children.1.epochs", "2"),
    "the window": put("window_micro_steps", 9),
    "what becomes of the last step": put("last_micro_step", "pad"),
    "which labels count": put("mask_boundaries", True),
    "the tokeniser's path (its content is digested elsewhere)": put(
        "tokenizer", "./elsewhere/tokenizer.json"
    ),
    "the root's weight, which has no siblings": put("mixture.weight", 3),
    "what becomes of bad rows": lambda d: d.update(on_bad_row="skip", max_bad_rows=3),
    "what becomes of a source's bad rows": put("mixture.children.0.on_bad_row", "skip"),
    "what is evaluated on": put("streams", valid({"source": CODE})),
    "an override that says what the run says": put("mixture.children.0.add_bos", False),
    "an override of the end of text that says what the run says": put(
        "mixture.children.0.add_eot", True
    ),
}
#: Fields of which this server alone writes the value.
SERVERS_OWN = {"id", "presence"}
for prefix, section in (
    ("", RunConfig),
    ("mixture.", NodeConfig),
    ("mixture.children.0.", SourceConfig),
):
    for name, field in section.model_fields.items():
        if not field.is_required() and name not in {
            *parent_of(mixture(), f"{prefix}x")[0],
            *SERVERS_OWN,
        }:
            default = field.get_default(call_default_factory=True)
            SAME_ORDER[f"the default of {prefix}{name} written out"] = put(
                f"{prefix}{name}", default
            )

#: Other values of fields, each of which makes another order.
OTHER_VALUES: list[tuple[str, Any]] = [
    ("seed", 8),
    ("count", "positions"),
    ("sequence_length", 9),
    ("labels", "shifted"),
    ("tail", "pad"),
    ("special_tokens_in_text", "parse"),
    ("vocab_size", 300),
    ("end_of_text_id", 1),
    ("begin_of_text_id", 1),
    ("add_bos", True),
    ("add_eot", False),
    ("add_eot", "auto"),
    ("mixture.policy", "weighted"),
    ("mixture.on_exhausted", "stop"),
    ("mixture.max_tokens", 800),
    ("mixture.epochs", 2),
    ("mixture.children.0.add_bos", True),
    ("mixture.children.0.add_eot", "auto"),
    ("mixture.children.0.filter", "score >= 0.5"),
    ("mixture.children.0.filter", "score > 0.5"),
    ("mixture.children.0.filter", ["score >= 0.5", 'lang == "en"']),
    ("mixture.children.0.fim", FIM),
    ("mixture.children.0.fim", FIM | {"rate": 0.6}),
    ("mixture.children.0.fim", FIM | {"spm_rate": 0.5}),
    ("mixture.children.0.fim", FIM | {"ids": {"prefix": 1, "middle": 3, "suffix": 2}}),
    ("mixture.children.0.holdout", 0.001),
    ("mixture.children.0.holdout", 0.002),
    ("mixture.children.0.weight", 2.5),
    ("mixture.children.0.weight", math.nextafter(2, 3)),
    ("mixture.children.0.on_exhausted", "stop"),
    ("mixture.children.0.on_exhausted", "drop"),  # which its node has, too
    ("mixture.children.0.max_tokens", 800),
    ("mixture.children.0.shuffle", "shards"),
    ("mixture.children.0.shuffle", "rows"),
    ("mixture.children.0.lanes", 2),
    ("mixture.children.0.source", "parquet:data/code-*.parquet:other"),
    ("mixture.children.1.template", "{title} {text}"),
    ("mixture.children.1.template", "{title}  {text}"),
    ("mixture.children.1.epochs", 2.5),
    ("mixture.children.1.epochs", math.inf),
    ("mixture.children.2.weight", 1),
    ("mixture.children.2.children.0.weight", 0.31),
    ("mixture.children.2.max_tokens", 800),
    ("mixture.children.2.epochs", 2),
    ("mixture.children.2.unit", "samples"),
    ("mixture.children.2.on_exhausted", "stop"),
    (
        "phases",
        [{"until_tokens": 1000}, {"mixture": node("weighted", {"source": "txt:a:text"})}],
    ),
]
OTHER_ORDER: dict[str, Change] = {
    **{f"{path} = {value!r}": put(path, value) for path, value in OTHER_VALUES},
    "packing, by best fit": packed("best_fit"),
    "pack_window_rows": packed("best_fit", pack_window_rows=8191),
    "pack_window_tokens": packed("best_fit", pack_window_tokens=8192),
    "no packing": packed("none"),
    "long_rows": packed("none", long_rows="split"),
    "padding": packed("none", padding="left"),
    "pad_id": packed("none", pad_id=1),
    "a loss mask": packed("none", loss_mask="mask"),
    "another loss mask": packed("none", loss_mask="masks"),
    "a source's window": lambda d: d["mixture"]["children"][0].update(
        shuffle="rows", shuffle_window_rows=100
    ),
    "a schedule": scheduled([[0, 1], [1000, 2]]),
    "a schedule's weight in its last digit": scheduled([[0, 1], [1000, math.nextafter(2, 3)]]),
    "a schedule's tokens": scheduled([[0, 1], [1001, 2]]),
    "a schedule in steps": scheduled([[0, 1], [1000, 2]], interpolate="step"),
    "the order of children": lambda d: d["mixture"]["children"].reverse(),
    "a source less": lambda d: d["mixture"]["children"].pop(0),
    "a level less": lambda d: d["mixture"]["children"].extend(
        d["mixture"]["children"].pop()["children"]
    ),
}


@pytest.mark.parametrize("what", SAME_ORDER)
def test_the_digest_does_not_depend_on(what: str) -> None:
    assert order_digest(parsed(changed(SAME_ORDER[what]))) == order_digest(parsed(mixture()))


@pytest.mark.parametrize(
    ("written", "other"),
    [
        ("score >= 0.5", ["score>=0.50"]),
        ("n == 1", ["n ==  1.0"]),
        ('lang in ["en", "de"]', ['lang in["en","de"]']),
        ("a.b not in [1]", ["a.b  not  in  [1.0]"]),
    ],
)
def test_a_filter_is_the_same_however_it_is_written(written: str, other: list[str]) -> None:
    one, two = (
        parsed(changed(put("mixture.children.0.filter", value))) for value in (written, other)
    )
    assert order_digest(one) == order_digest(two)
    assert one.sources[0].filter == [written]


def test_training_may_stand_among_the_streams() -> None:
    document = mixture()
    root = document.pop("mixture")
    root["children"][0]["holdout"] = 0.001
    found = parsed(document | {"streams": {"train": {"mixture": root}, "validation": None}})
    assert found.mixture == parsed(mixture(mixture=root)).mixture
    assert found.stream_names == ("validation",)


def test_a_stream_is_there_wherever_a_source_holds_rows_out() -> None:
    assert parsed(mixture()).stream_names == ()
    assert parsed(changed(put("mixture.children.0.holdout", 0.001))).stream_names == ("validation",)
    document = changed(put("mixture.children.0.holdout", 0.001))
    document |= {"streams": valid({"source": CODE})}
    assert parsed(document).stream_names == ("valid", "validation")


def test_the_digest_depends_on_everything_that_decides_the_order() -> None:
    digests = {what: order_digest(parsed(changed(change))) for what, change in OTHER_ORDER.items()}
    digests["as it is"] = order_digest(parsed(mixture()))
    assert len(set(digests.values())) == len(digests)


def test_a_new_setting_has_to_be_placed_on_one_side_of_the_digest() -> None:
    # Fails when a field is added: decide whether it changes the order, and add it to the tables above.
    outside = {
        "run",
        "tokenizer",
        "window_micro_steps",
        "last_micro_step",
        "new_source_baseline",
        "mask_boundaries",
        "on_bad_row",
        "max_bad_rows",
        "max_row_mib",
        "streams",
    }
    inside = {"mixture", "packing", *BATCHED_ORDER_FIELDS} | {
        what for what in (*OTHER_ORDER, *dict(OTHER_VALUES)) if what in RunConfig.model_fields
    }
    assert set(RunConfig.model_fields) == outside | inside


def test_the_digest_is_what_it_was() -> None:
    # A run's record is compared with this: when it fails, every run of an earlier build would be refused.
    assert order_fields(parsed(mixture())) == {
        "seed": 7,
        "sequence_length": 8,
        "count": "real",
        "mixture": node(
            "least_consumed",
            {"weight": "2", "source": CODE, "epochs": "1"},
            {"weight": "1", "source": DOCS, "epochs": "2"},
            node(
                "weighted",
                {"weight": "0.3", "source": PROSE, "epochs": "1"},
                {"weight": "0.7", "source": "arrow:data/wiki:ids", "epochs": "1"},
                weight="1.5",
                on_exhausted="drop",
            ),
            on_exhausted="drop",
        ),
    }


def test_a_spec_may_contain_colons_in_its_location() -> None:
    found = parsed(flat(["parquet:s3://bucket/a:b/*.parquet:text"])).sources[0].spec
    assert (found.scheme.name, found.location, found.column) == (
        "parquet",
        "s3://bucket/a:b/*.parquet",
        "text",
    )
    assert str(found) == "parquet:s3://bucket/a:b/*.parquet:text"


BATCHED = """
run: latents
seed: 7
batching: {bucket_by: resolution}
global_batch_size: 8
mixture:
  policy: weighted
  children:
    - {source: "parquet:data/*.parquet:*", weight: 0.9}
    - {source: "arrow:data/more:*", weight: 0.1}
"""


def batched(change: Change = lambda _: None) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(BATCHED)
    change(found)
    return found


def test_with_batching_a_sample_is_a_row_of_one_token_and_a_pick_is_a_global_batch() -> None:
    config = parsed(batched())
    assert (config.sequence_length, config.pick_samples, config.pick_tokens) == (1, 8, 8)
    assert (config.batching.bucket_column, config.batching.length_of) == ("resolution", None)
    by_length = parsed(
        batched(put("batching", {"bucket_by": "length(audio)", "edges": [8, 16], "pad": ["mel"]}))
    )
    assert (by_length.batching.bucket_column, by_length.batching.length_of) == ("audio", "audio")
    assert by_length.batching.padded == {"audio", "mel"}
    assert (parsed(mixture()).pick_samples, parsed(mixture()).pick_tokens) == (1, 8)


def test_a_batched_run_read_from_its_record_is_the_same() -> None:
    config = parsed(batched())
    assert RunConfig.model_validate(config.model_dump(), context=CATALOG) == config
    assert order_fields(config) == {
        "seed": 7,
        "batching": {"bucket_by": "resolution"},
        "global_batch_size": 8,
        "mixture": node(
            "weighted",
            {"weight": "0.9", "source": "parquet:data/*.parquet:*", "epochs": "1"},
            {"weight": "0.1", "source": "arrow:data/more:*", "epochs": "1"},
            on_exhausted="drop",
        ),
    }


BATCHED_ORDER: list[tuple[str, Any]] = [
    ("batching", {"bucket_by": "aspect"}),
    ("batching", {"bucket_by": "length(resolution)"}),
    ("batching", {"bucket_by": "length(resolution)", "edges": [4, 8]}),
    ("batching", {"bucket_by": "length(resolution)", "edges": [4, 9]}),
    ("batching", {"bucket_by": "length(resolution)", "edges": [4, 8], "pad": ["mel"]}),
    ("batching.columns", ["latent"]),
    ("batching.columns", ["text", "latent"]),
    ("batching.columns", ["latent", "text"]),
    ("batching.dtypes", {"latent": "bfloat16"}),
    ("global_batch_size", 16),
]
BATCHED_ORDER_FIELDS = {path.partition(".")[0] for path, _ in BATCHED_ORDER}


def test_the_digest_depends_on_how_batches_are_made() -> None:
    digests = {
        f"{path} = {value!r}": order_digest(parsed(batched(put(path, value))))
        for path, value in BATCHED_ORDER
    }
    digests["as it is"] = order_digest(parsed(batched()))
    assert len(set(digests.values())) == len(digests)


def adding(**fields: Any) -> Change:
    return lambda document: document.update(fields)


#: Of what follows one message is the whole refusal, or the first of its lines.
CANNOT_BE: list[tuple[Change, str]] = [
    (packed("best_fit", tail="pad"), "tail: found 'pad', but it is for packing: concat"),
    (
        packed("best_fit", pack_window_tokens=7),
        "pack_window_tokens: 7 do not fill a sample of 8 tokens",
    ),
    (packed("none", vocab_size=300, pad_id=300), "pad_id: 300 is not below vocab_size 300"),
    (
        packed("none", pack_window_rows=7),
        "pack_window_rows: found 7, but it is for packing: best_fit",
    ),
    (scheduled([]), "mixture.children.0.weight: List should have at least 1 item"),
    (
        scheduled([[0, 1], [0, 2]]),
        "mixture.children.0.weight: the point at 0 tokens stands after the one at 0",
    ),
    (
        scheduled([[9, 1], [5, 2]]),
        "mixture.children.0.weight: the point at 5 tokens stands after the one at 9",
    ),
    (scheduled([[0, -1]]), "mixture.children.0.weight.0.1: "),
    (scheduled([[-1, 1]]), "mixture.children.0.weight.0.0: "),
    (scheduled([[0, True]]), "mixture.children.0.weight.0.1: "),
    (scheduled([[0.5, 1]]), "mixture.children.0.weight.0.0: "),
    (scheduled([[0, math.nan]]), "mixture.children.0.weight.0.1: "),
    (scheduled([[0, 1, 2]]), "mixture.children.0.weight.0: "),
    (scheduled([3]), "mixture.children.0.weight.0: "),
    (scheduled([[0, 0], [7, 0]]), "mixture.children.0.weight: every point has the weight 0"),
    (
        put("mixture.children.0.weight", [[0, 1]]),
        "mixture: children.0.weight: found 1 points, but the policy",
    ),
    (put("mixture.weight", [[0, 1]]), "mixture.weight: found points, but the root has no siblings"),
    (
        put("mixture.unit", "samples"),
        "mixture: unit: is for the policy 'weighted', but this is 'least_consumed'",
    ),
    (put("mixture.interpolate", "step"), "mixture: interpolate: is for the policy 'schedule'"),
    (
        put("mixture.children.0.max_tokens", 7),
        "mixture.children.0.max_tokens: 7 is less than one sample of 8",
    ),
    (put("mixture.max_tokens", 7), "mixture.max_tokens: 7 is less than one sample of 8 tokens"),
    (
        put("streams", valid({"source": CODE, "holdout": 0.1})),
        "children.0.holdout: is for the sources that are trained",
    ),
    (
        adding(packing="none", streams=valid({"source": CODE, "loss_mask": "mask"})),
        "loss_mask: no source that is trained on has one",
    ),
    (
        put("streams", {"train": {"mixture": mixture()["mixture"]}}),
        "streams.train: found a mixture at the top already",
    ),
    (
        put("streams", valid({"source": CODE, "epochs": 2, "max_tokens": 4})),
        "streams.valid.mixture.children.0.max_tokens",
    ),
    (
        adding(
            last_micro_step="pad",
            phases=[{"until_tokens": 80}, valid({"source": CODE, "holdout": 0.1})["valid"]],
        ),
        "phases.1.mixture.children.0.holdout: found 0.1, but ",
    ),
    (put("global_batch_size", 8), "global_batch_size: is for batching"),
    (
        put("mixture.children.0.source", "parquet:data/code-*.parquet:*"),
        "source: the column '*' is for batching",
    ),
]
NO_BATCHES: list[tuple[Change, str]] = [
    (lambda d: d.pop("global_batch_size"), "global_batch_size: is missing"),
    (lambda d: d.pop("batching"), "sequence_length: is missing"),
    (put("sequence_length", 8), "sequence_length: does not apply with batching"),
    (put("tokenizer", "bytes"), "tokenizer: does not apply with batching"),
    (put("labels", "shifted"), "labels: does not apply with batching"),
    (put("last_micro_step", "pad"), "last_micro_step: does not apply with batching"),
    (put("mixture.children.0.add_eot", False), "mixture.children.0.add_eot: does not apply"),
    (
        put("mixture.children.0.source", "parquet:a.parquet:b"),
        "mixture.children.0.source: with batching",
    ),
    (
        put("mixture.children.0.source", "jsonl:a.jsonl:*"),
        "mixture.children.0.source: 'jsonl' files",
    ),
    (put("batching.edges", [8]), "batching: edges: are for lengths"),
    (
        put("batching", {"bucket_by": "length(a)", "edges": [8, 8]}),
        "batching: edges: 8 stands after 8; expected them ascending",
    ),
    (put("batching.pad", ["mel"]), "batching: pad: rows are only padded up to edges"),
    (
        put("batching", {"bucket_by": "length(a)", "edges": [8], "columns": ["b"]}),
        "batching: columns: a is padded, but not among those that travel",
    ),
    (put("batching.columns", ["a", "a"]), "batching: columns: a stands there twice"),
    (put("batching.bucket_by", ""), "batching.bucket_by: "),
    (put("batching.dtypes", {"a": "float16"}), "batching.dtypes.a: "),
    (put("mixture.children.0.shuffle", "shards"), "mixture.children.0.shuffle: 'shards' does not"),
    (put("packing", "best_fit"), "packing: does not apply with batching"),
    (put("mixture.children.0.filter", {"a": {"gt": 1}}), "mixture.children.0.filter"),
    (put("mixture.children.0.max_tokens", 7), "is less than one sample of 8 tokens"),
    (put("phases", [{"sequence_length": 8}]), "phases.0.sequence_length: does not apply"),
]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        *((changed(change), says) for change, says in CANNOT_BE),
        *((batched(change), says) for change, says in NO_BATCHES),
    ],
)
def test_what_cannot_be_is_refused(document: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(document)
    assert f"mixture.yaml: {says}" in str(caught.value) or says in str(caught.value).splitlines()[0]


def test_faults_of_a_file_have_line_and_column_and_unknown_keys_a_suggestion(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mixture.yaml"
    text = MINIMAL.replace("run: wiki", "run: my run!\nstreams: {held out: {mixtur: 1}}").replace(
        "length", "lenght"
    )
    path.write_text(
        f"{text}      alais: b\n    - {{source: 'txt:c.txt:text', weight: [[0, x]], zzz: 3}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        config.load(path, CATALOG)
    names = (
        "letters (a to z), digits, dots, underscores and hyphens, with a letter or a digit first"
    )
    assert {line.removeprefix(f"{path}: ") for line in str(caught.value).splitlines()} == {
        f"line 1, column 1: run: expected 1 to 128 {names}; found 'my run!'",
        f"line 2, column 11: streams.held out.[key]: expected 1 to 64 {names}; found 'held out'",
        "line 2, column 22: streams.held out.mixtur: unknown key; did you mean 'mixture'? (found 1)",
        "line 4, column 1: sequence_lenght: unknown key; did you mean 'sequence_length'? (found 8)",
        "line 11, column 7: mixture.children.1.alais: unknown key; did you mean 'alias'? (found 'b')",
        "line 12, column 47: mixture.children.2.weight.0.1: Input should be a valid number, unable to parse string as "
        "a number; found 'x'",
        "line 12, column 52: mixture.children.2.zzz: unknown key; check its spelling against docs/mixture-file.md "
        "(found 3)",
        "sequence_length: is missing",
    }
