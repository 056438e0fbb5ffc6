"""``tokenloom mixture``: what a person sees of a run's mixture, and changes of it, from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import SPECS, Corpus, StartServer
from support.catalog import CATALOG
from support.server_process import CommandLine, ServerProcess
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.order_fields import order_digest

RUN = "by-hand"
WHY = ("--reason", "because", "--author", "ada")


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: StartServer) -> ServerProcess:
    """One run, on which nobody trains: a change of its mixture holds from sample 0 on."""
    return serve(corpus.mixture(RUN))


@pytest.fixture(autouse=True)
def _as_it_began(server: ServerProcess, tokenloom: CommandLine) -> Iterator[None]:
    yield
    if shown(server, tokenloom)["revisions"]:
        assert tokenloom("mixture", "undo", server.rest_url, 1).status == 0


def shown(server: ServerProcess, tokenloom: CommandLine) -> dict[str, Any]:
    found = tokenloom("mixture", "show", server.rest_url, "--json")
    assert found.status == 0, found.output
    document: dict[str, Any] = json.loads(found.output)
    return document


def test_the_mixture_in_force_is_shown_as_a_tree_with_all_that_changed_it(
    server: ServerProcess, tokenloom: CommandLine
) -> None:
    for arguments in (
        ("set", server.rest_url, "docs", "weight=0.5"),
        ("set", server.rest_url, "prose", "paused=true"),
        ("drop", server.rest_url, SPECS[3], "--at", "500"),
    ):
        assert tokenloom("mixture", *arguments, *WHY).status == 0
    found = tokenloom("mixture", "show", server.rest_url).output
    assert f"{RUN}: in force at sample 0, sequence length 16" in found
    assert "mixture: least_consumed\n" in found
    assert f"├── code: weight 2, {SPECS[0]}\n" in found
    assert f"├── prose: epochs 2, {SPECS[1]}, paused\n" in found
    assert "└── notes: weighted\n" in found
    assert f"    ├── docs: weight 0.5, {SPECS[2]}\n" in found
    assert f"    └── {SPECS[3]}\n" in found
    assert "docs: weight 0.75 → 0.5" in found
    assert "a new revision can hold from sample 500 on" in found
    assert [
        ("not yet" in line, "because" in line) for line in found.splitlines() if "500 │" in line
    ] == [(True, True)]
    figures = tokenloom("stats", server.rest_url).output
    assert "in force: revision 2; revision 3 from sample 500 on" in figures


def test_a_change_is_told_tried_and_taken_back(
    server: ServerProcess, tokenloom: CommandLine
) -> None:
    change = (
        "mixture",
        "set",
        server.rest_url,
        "code",
        "weight=3",
        "epochs=inf",
        "max_tokens=1.5K",
    )
    told = "  code: weight 2 → 3\n  code: epochs 1 → inf\n  code: max_tokens not given → 1500\n"
    tried = tokenloom(*change, *WHY, "--dry-run")
    assert (tried.status, tried.output) == (
        0,
        f"{RUN}: revision 1 would hold from sample 0 on (0 tokens)\n{told}",
    )
    assert shown(server, tokenloom)["revisions"] == []
    made = tokenloom(*change, *WHY, "--at-tokens", "4K")
    assert made.output == f"{RUN}: revision 1 holds from sample 250 on (4,000 tokens)\n{told}"
    (revision,) = shown(server, tokenloom)["revisions"]
    assert (revision["author"], revision["reason"], revision["sample_index"]) == (
        "ada",
        "because",
        250,
    )
    undone = tokenloom("mixture", "undo", server.rest_url, 1)
    assert (undone.status, undone.output.splitlines()[0]) == (
        0,
        f"{RUN}: revision 1 was taken back; it was to hold from sample 250 on (4,000 tokens)",
    )
    again = tokenloom("mixture", "undo", server.rest_url, 1)
    assert (again.status, "NotFound" in again.output) == (2, True)


def test_every_change_has_a_command(
    corpus: Corpus, server: ServerProcess, tokenloom: CommandLine
) -> None:
    url = server.rest_url
    extra = corpus.folder / "late.txt"
    extra.write_text("some more words\n" * 40, encoding="utf-8")
    (corpus.folder / "gone.csv").write_text(
        f"spec,shard,row\n{SPECS[0]},code-0.parquet,3\n", encoding="utf-8"
    )
    for arguments, change in (
        (("set", url, "notes", "code", "paused=true"), "notes: live → paused"),
        (("set", url, "notes", "code", "paused=false"), "code: paused → live"),
        (
            ("add", url, "txt:late.txt:text", "alias=late", "weight=2", "--to", "notes"),
            "late: new, weight 2",
        ),
        (("drop", url, "prose"), "prose: live → dropped"),
        (("drop", url, "--rows", "gone.csv"), "code: 1 row left out of each epoch"),
        (("set", url, "notes", "policy=schedule"), "notes: policy weighted → schedule"),
        (
            ("set", url, "docs", "weight=[[0, 1], [2e3, 0]]"),
            "docs: weight 0.75 → [(0, 1.0), (2000, 0.0)]",
        ),
        (
            ("set", url, "docs", "alias=text", "on_exhausted=stop"),
            "text: on_exhausted not given → stop",
        ),
        (("set", url, "text", "on_exhausted=null"), "text: on_exhausted stop → not given"),
    ):
        made = tokenloom("mixture", *arguments, *WHY)
        assert made.status == 0, made.output
        assert f"  {change}\n" in made.output
    refused = tokenloom("mixture", "set", url, "code", "--append-files", *WHY)
    assert (refused.status, "has no file that the run does not read already" in refused.output) == (
        2,
        True,
    )
    without = tokenloom("mixture", "set", url, "code", "paused=true")
    assert (without.status, "--reason" in without.output) == (2, True)


def test_a_whole_file_is_applied_once_its_changes_were_agreed_to(
    corpus: Corpus, server: ServerProcess, tokenloom: CommandLine, tmp_path: Path
) -> None:
    text = tokenloom("mixture", "show", server.rest_url, "--yaml").output
    document = yaml.safe_load((corpus.folder / f"{RUN}.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "new.yaml"
    path.write_text(yaml.safe_dump(document | yaml.safe_load(text)), encoding="utf-8")
    assert order_digest(config.load(path, CATALOG)) == order_digest(
        config.load(corpus.folder / f"{RUN}.yaml", CATALOG)
    )
    same = tokenloom("mixture", "apply", server.rest_url, path, *WHY, "--yes")
    assert (same.status, "this changes nothing" in same.output) == (2, True)
    document["mixture"]["children"][0]["weight"] = 5
    del document["mixture"]["children"][1]
    (corpus.folder / "scored.jsonl").write_text(
        '{"title": "a", "text": "b c", "score": 1}\n' * 40, encoding="utf-8"
    )
    rows = {"filter": ["score > 0", 'title in ["a"]'], "template": "{title}\n{text}"}
    document["mixture"]["children"].append(
        {"source": "jsonl:scored.jsonl:text", "alias": "scored", **rows}
    )
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    asked = tokenloom("mixture", "apply", server.rest_url, path, *WHY)
    assert (asked.status, "nobody is here to answer: --yes" in asked.output) == (2, True)
    assert "would hold from sample 0" in asked.output
    assert "prose: live → dropped" in asked.output
    assert shown(server, tokenloom)["revisions"] == []
    applied = tokenloom("mixture", "apply", server.rest_url, path, *WHY, "--yes")
    assert applied.status == 0, applied.output
    assert shown(server, tokenloom)["dropped"] == ["prose"]
    tree = "".join(
        line.strip() for line in tokenloom("mixture", "show", server.rest_url).output.splitlines()
    )
    assert (
        '└── scored: filter "score > 0" "title in ["a"]", template {title}\\n{text}, jsonl:' in tree
    )
    paused = tokenloom("mixture", "set", server.rest_url, "code", "paused=true", *WHY)
    assert paused.status == 0
    text = tokenloom("mixture", "show", server.rest_url, "--yaml").output
    assert text.startswith(
        "# paused, which a file cannot say: code\nmixture:\n  policy: least_consumed\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("set", "code", "weight=heavy"), "weight"),
        (("set", "code", "epochs=nan"), "epochs"),
        (("set", "code", "wieght=2"), "wieght"),
        (("set", "code", "weight=[2"), "ConfigError: weight=[2: expected FIELD=VALUE"),
        (("set", "code", "max_tokens=many"), "max_tokens: 'many' is no number of tokens"),
        (("set", "cdoe", "weight=2"), "ConfigError: http"),
        (
            ("set", "code", "weight=2", "--at-tokens", "many"),
            "--at-tokens: 'many' is no number of tokens",
        ),
        (("set", "code"), "sets nothing of 'code'"),
        (("set", "weight=2"), "sets fields of nothing"),
        (("set", "code", "paused=true", "--reason", ""), "ConfigError: http"),
    ],
)
def test_what_is_wrong_is_told_by_name(
    server: ServerProcess, tokenloom: CommandLine, arguments: tuple[str, ...], message: str
) -> None:
    command, child, *options = arguments
    done = tokenloom("mixture", command, server.rest_url, child, *WHY, *options)
    assert done.status == 2
    assert message in done.output
