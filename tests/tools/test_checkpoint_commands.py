"""The commands that look into a checkpoint: whatever file holds it, nothing of it is run, and faults are named."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.catalog import CATALOG
from support.corpora import CODE, DOCS, PROSE, WIKI, advanced, mixture, order_of, write_corpus
from support.imports import import_into, state_of
from tokenloom_proto.seal import seal, unseal
from tokenloom_server.config import mixture_file as config
from tokenloom_server.errors import ConfigError, SnapshotInvalid
from tokenloom_server.order import snapshot
from tokenloom_server.order.timeline import Timeline
from tokenloom_tools.checkpoint import report
from tokenloom_tools.checkpoint.content import Child, Content, Node, read
from tokenloom_tools.checkpoint.faults import faults
from tokenloom_tools.checkpoint.file import DataState, find
from tokenloom_tools.checkpoint.probabilities import chances
from tokenloom_tools.checkpoint.report import difference
from tokenloom_tools.cli.app import app
from typer.testing import CliRunner

UID = "0123456789abcdef0123456789abcdef"
OLDER = {
    "resume_state": {
        "datasets": [
            {"spec": CODE, "shard": "data/code-1.parquet", "row_offset": 3, "token_offset": 80},
            {"spec": DOCS, "shard": "data/docs.jsonl", "row_offset": 3},
        ]
    }
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two snapshots of one run: three samples after a state boundary, and at one."""
    order = order_of(write_corpus(tmp_path_factory.mktemp("corpus")))
    pipeline = order.pipeline(order.initial())
    found = []
    for boundary, more in ((60, 3), (30, 0)):
        pipeline.advance(boundary)
        base = Timeline(order).encode(pipeline.state())
        pipeline.advance(more)
        state = pipeline.state()
        template = order.record.template(UID, "train", 2)
        text = snapshot.compose(template, base, Timeline(order).encode(state))
        found.append(text)
    return found


@pytest.fixture
def text(texts: list[str]) -> str:
    return texts[0]


def content_of(text: str, folder: Path, **options: Any) -> Content:
    path = folder / "snapshot.json"
    path.write_text(text, encoding="utf-8")
    return read(path, find(path), **options)


def changed(text: str, change: Callable[[dict[str, Any]], Any]) -> str:
    document = unseal(text)
    change(document)
    return seal(document)


# --- Files -------------------------------------------------------------------------------------------------------


def save_plain(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def save_nested_json(path: Path, text: str) -> None:
    path.write_text(json.dumps({"trainer": [{"data": {"tokenloom": text}}]}, indent=1))


def save_torch(path: Path, text: str) -> None:
    torch.save({"model": {"w": torch.zeros(9)}, "loader": {"state": {"tokenloom": text}}}, path)


def save_torch_with_objects(path: Path, text: str) -> None:
    torch.save({"args": argparse.Namespace(lr=1), "tokenloom": text}, path)


def save_old_torch(path: Path, text: str) -> None:
    torch.save({"tokenloom": text, "w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)


@pytest.mark.filterwarnings("ignore")  # torch warns of a save without a process group
def save_distributed(path: Path, text: str) -> None:
    dcp.save(
        {"model": torch.ones(100), "data": {"tokenloom": text}}, checkpoint_id=path, no_dist=True
    )


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    "save",
    [
        save_plain,
        save_nested_json,
        save_torch,
        save_torch_with_objects,
        save_old_torch,
        save_distributed,
    ],
)
def test_a_snapshot_is_found_in_every_kind_of_file(
    save: Callable[[Path, str], None], text: str, tmp_path: Path
) -> None:
    save(tmp_path / "checkpoint", text)
    state = find(tmp_path / "checkpoint")
    assert (state.document, state.damage) == (unseal(text), None)


@pytest.mark.parametrize("document", [OLDER, {"sample_index": 4096}])
def test_an_older_payload_is_found_in_torch_files_and_in_json(
    document: dict[str, Any], tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(3), "steps": [1, {"data": document}]}, tmp_path / "c.pt")
    (tmp_path / "c.json").write_text(json.dumps({"steps": [1, {"data": document}]}))
    for name in ("c.pt", "c.json"):
        found = find(tmp_path / name)
        assert (found.where, found.document) == ("steps.1.data", document)


def test_a_list_of_sources_alone_is_a_state_and_another_list_is_not(
    text: str, tmp_path: Path
) -> None:
    arguments = {"datasets": ["a", "b"], "dataset": {"name": "c4"}}
    (tmp_path / "c.json").write_text(json.dumps([arguments, {"dataset": OLDER["resume_state"]}]))
    assert (
        find(tmp_path / "c.json").document["resume_state"]["datasets"]
        == OLDER["resume_state"]["datasets"]
    )
    (tmp_path / "c.json").write_text(json.dumps([arguments, {"dataset": {"tokenloom": text}}]))
    assert find(tmp_path / "c.json").where == "1.dataset.tokenloom"


def test_a_bare_sample_index_counts_only_where_there_is_nothing_else(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"sample_index": 3, "data": {"tokenloom": text}}))
    assert find(tmp_path / "c.json").where == "data.tokenloom"


def test_several_states_are_distinguished_by_their_place(texts: list[str], tmp_path: Path) -> None:
    torch.save(
        {"a": {"tokenloom": texts[0]}, "b": {"tokenloom": texts[1]}, "c": [texts[0]]},
        tmp_path / "c.pt",
    )
    with pytest.raises(
        SnapshotInvalid,
        match=r"at 'a\.tokenloom' \(sample 63\), 'b\.tokenloom' \(sample 93\); name",
    ):
        find(tmp_path / "c.pt")
    assert find(tmp_path / "c.pt", "b.tokenloom").document == unseal(texts[1])
    with pytest.raises(SnapshotInvalid, match="holds no state of data at 'x'"):
        find(tmp_path / "c.pt", "x")
    # Where torch refuses the file, their places distinguish them.
    torch.save({"a": texts[0], "b": texts[1], "args": argparse.Namespace()}, tmp_path / "c.pt")
    with pytest.raises(
        SnapshotInvalid, match=r"at 'data\.pkl, byte (\d+)' \(sample 63\)"
    ) as caught:
        find(tmp_path / "c.pt")
    place = str(caught.value).split("'")[1]
    assert find(tmp_path / "c.pt", place).document == unseal(texts[0])


class Evil:
    """What a hostile checkpoint would hold."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("new_format", [True, False])
def test_nothing_in_a_file_is_run(text: str, tmp_path: Path, new_format: bool) -> None:
    trap = tmp_path / "trap"
    hostile = {"evil": Evil(str(trap)), "resume_state": OLDER["resume_state"]}
    torch.save(hostile, tmp_path / "c.pt", _use_new_zipfile_serialization=new_format)
    with pytest.raises(
        SnapshotInvalid,
        match=r"does not load it without running code of it \(it holds \w+\.mkdir\)",
    ):
        find(tmp_path / "c.pt")
    torch.save(
        hostile | {"tokenloom": text}, tmp_path / "c.pt", _use_new_zipfile_serialization=new_format
    )
    assert find(tmp_path / "c.pt").document == unseal(text)
    assert not trap.exists()


def test_a_torch_whose_safe_way_is_not_safe_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(OLDER, tmp_path / "c.pt")
    for version, safe in (
        ("2.5.1+cpu", False),
        ("1.13", False),
        ("2.9.1", False),
        ("2.10.0a0", True),
        ("3.0", True),
    ):
        monkeypatch.setattr(torch, "__version__", version)
        refused = pytest.raises(ConfigError, match=f"this is torch {re.escape(version)}, .* 2.10")
        with contextlib.nullcontext() if safe else refused:
            find(tmp_path / "c.pt")


def test_a_large_checkpoint_is_not_read_as_a_whole(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"model": torch.zeros(1), **OLDER}, tmp_path / "c.pt")
    loads: list[dict[str, Any]] = []
    real = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *args, **options: loads.append(options) or real(*args, **options)
    )
    find(tmp_path / "c.pt")
    assert loads == [{"map_location": "cpu", "weights_only": True, "mmap": True}]
    torch.save({"model": torch.zeros(1), "tokenloom": text}, tmp_path / "c.pt")
    find(tmp_path / "c.pt")
    assert len(loads) == 1  # a sealed snapshot needs no torch


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"{", "begins like JSON, but does not parse"),
        (b'{"model": 1}', "holds no state of data; expected what RemoteDataset"),
        (
            b'{"tokenloom": "no JSON"}',
            "at 'tokenloom': a snapshot is a JSON object, but this does not parse",
        ),
        (b"\x80\x02garbage", "does not load it without running code"),
        (b"/annex/objects/x", "no data, but a pointer .*'git annex get'"),
    ],
)
def test_what_holds_no_state_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(SnapshotInvalid, match=said):
        find(tmp_path / "c")
    assert "SnapshotInvalid" in run(tmp_path / "c", status=2)


def test_folders_and_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotInvalid, match=r"cannot be read \(No such file"):
        find(tmp_path / "missing.pt")
    with pytest.raises(
        SnapshotInvalid, match=r"is a folder, but none of torch\.distributed\.checkpoint"
    ):
        find(tmp_path)
    (tmp_path / "__0_1.distcp").symlink_to("nowhere")
    for path in (tmp_path, tmp_path / "__0_1.distcp"):
        with pytest.raises(
            SnapshotInvalid, match=r"__0_1\.distcp is a link to 'nowhere', where no file is"
        ):
            find(path)
    (tmp_path / "__0_1.distcp").unlink()
    (tmp_path / "__0_0.distcp").write_bytes(b"\x80\x02" + b"x" * 100)
    with pytest.raises(SnapshotInvalid, match=r"hold no sealed snapshot.*dcp_to_torch"):
        find(tmp_path)


# --- What is said of it ------------------------------------------------------------------------------------------


def test_the_content_is_that_of_the_snapshot(text: str, tmp_path: Path) -> None:
    content = content_of(text, tmp_path)

    assert (content.run, content.run_uid, content.generation) == ("test", UID, 2)
    assert (content.sample_index, content.counted_at, content.total_tokens) == (63, 60, 504)
    assert content.sequence_length == 8
    assert [source.name for source in content.sources] == ["code", "docs", PROSE, WIKI]
    assert sum(source.share or 0 for source in content.sources) == pytest.approx(1)
    root, rest = content.nodes
    assert (root.policy, rest.policy, rest.name) == ("least_consumed", "weighted", "rest")
    assert [child.name for child in root.children] == ["code", "docs", "rest"]
    assert [child.samples for child in rest.children] == [
        source.samples for source in content.sources[2:]
    ]
    assert faults(content) == []


def nodes(document: dict[str, Any]) -> list[list[list[int]]]:
    found: list[list[list[int]]] = document["resume_state"]["nodes"]
    return found


CURSOR = ("epoch", "shard", "shard_index", "row_offset", "row_token_offset")


def dataset(document: dict[str, Any], i: int) -> dict[str, Any]:
    found: dict[str, Any] = document["resume_state"]["datasets"][i]
    return found


def set_row(node: int, child: int, place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        nodes(document)[node][child][place] = value

    return change


def set_dataset(i: int, field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        if value is None:
            del document["resume_state"]["datasets"][i][field]
        else:
            document["resume_state"]["datasets"][i][field] = value

    return change


def estimate(total: int) -> Callable[[dict[str, Any]], None]:
    """The nested node goes by what is left of its children: this many samples, if their weights were saved."""

    def change(document: dict[str, Any]) -> None:
        document["resume_state"]["mixture"][1]["policy"] = "balance_remaining"
        if total:
            nodes(document)[1] = [[*row, 3, total] for row in nodes(document)[1]]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            estimate(0),
            "resume_state.nodes.1 (rest): the weights in force are missing; they would be made anew from",
        ),
        (
            estimate(4),
            f"resume_state.nodes.1 (rest): {PROSE}: total: found 4 samples, but 5 were given",
        ),
        (
            lambda d: d["resume_state"].update(
                nodes=[[[0] * 4 for _ in node] for node in nodes(d)]
            ),
            "resume_state.nodes: all counters are 0, though 60 samples were taken",
        ),
        (
            lambda d: d["resume_state"].pop("mixture"),
            "resume_state.mixture: is missing: nothing says",
        ),
        (
            lambda d: d["resume_state"].pop("nodes"),
            "resume_state.nodes: missing: without the counters every node",
        ),
        (lambda d: nodes(d).pop(), "resume_state.nodes: 1 nodes, but the mixture has 2"),
        (lambda d: nodes(d).pop(), "resume_state.nodes.1 (rest): counters are missing for txt:"),
        (
            lambda d: nodes(d)[0].pop(),
            "resume_state.nodes.0 (the root): counters are missing for rest",
        ),
        (
            set_row(1, 0, 0, 6),
            "resume_state.nodes.1 (rest): txt:data/prose/*.txt:text: counts 6 samples and 40 tokens,",
        ),
        (
            set_row(0, 2, 1, 8),
            "resume_state.nodes.0 (the root): rest: counts 20 samples and 8 tokens, but it says itse",
        ),
        (set_row(0, 0, 0, 28), "its children have 61 samples, but resume_state.sample_index is 60"),
        (
            set_row(0, 0, 2, 2**60),
            "code: credit: found 1152921504606846976, expected one within ±2^53",
        ),
        (
            set_dataset(1, "token_offset", None),
            "resume_state.datasets.1 (docs): token_offset: missing, which counts as",
        ),
        (
            set_dataset(1, "token_offset", 0),
            "resume_state.datasets.1 (docs): token_offset: found 0, though 13 samples",
        ),
        (
            set_dataset(0, "samples", 28),
            "resume_state.sample_index: found 60, but the sources' samples add up to 61",
        ),
        (
            set_dataset(0, "token_offset", 224),
            "resume_state.total_tokens: found 480, but the sources' tokens add up t",
        ),
        (
            set_dataset(0, "row_offset", -1),
            "resume_state.datasets.0 (code): row_offset: found -1, expected an integer",
        ),
        (lambda d: d.pop("run_uid"), "run_uid: missing"),
        (lambda d: d.pop("counts"), "counts: missing"),
        (lambda d: d.update(order_version=2), "order_version: found 2, expected 3"),
        (
            lambda d: d["resume_state"].update(version=1),
            "resume_state.version: found 1, expected 2",
        ),
        (
            lambda d: [dataset(d, 1).pop(name) for name in CURSOR],
            "resume_state.datasets.1 (docs): nothing says where it stands, though ",
        ),
        (
            lambda d: dataset(d, 1).update(row_token_offset=3, packed_samples=2),
            "resume_state.datasets.1 (docs): row_token_offset: found 3 beside packed_samples, expected one of them",
        ),
        (lambda d: d.pop("resume_state"), "resume_state: is missing, though sample_index is 63"),
        (lambda d: d.update(version=9), "version: found 9, expected 2"),
        (
            lambda d: d.update(sample_index=59),
            "resume_state.sample_index: 60 lies after sample_index 59",
        ),
        (
            lambda d: d["resume_state"]["mixture"][0]["children"][0].__setitem__(1, "a lot"),
            "weight: found 'a lot'",
        ),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(
    change: Callable[[dict[str, Any]], Any], said: str, text: str, tmp_path: Path
) -> None:
    content = content_of(changed(text, change), tmp_path)
    assert any(said in fault for fault in faults(content)), faults(content)
    report.show(content, Console(file=io.StringIO(), width=120))


def test_what_was_forked_skipped_or_left_adds_up(text: str, tmp_path: Path) -> None:
    def fork(document: dict[str, Any]) -> None:
        resume = document["resume_state"]
        resume["origin"] = {"run": "parent", "sample_index": 10, "left_samples": 7}
        resume["sample_index"], document["sample_index"] = 67, 70
        resume["revisions"] = [
            {"sample_index": 40, "content": {}},
            {"sample_index": 69, "content": {}},
        ]
        resume["datasets"][0] |= {"skipped_samples": 3, "skipped_rows": 1, "skipped_tokens": 24}

    content = content_of(changed(text, fork), tmp_path)
    assert faults(content) == []
    out = io.StringIO()
    report.show(content, Console(file=out, width=160))
    for said in (
        "it was forked from run parent at sample 10",
        "a revision of the mixture is in force since sample 40",
        "a revision of the mixture follows at sample 69",
        "3 samples, 24 tokens",
    ):
        assert said in out.getvalue()


def test_a_broken_seal_is_named_and_the_rest_is_shown(text: str, tmp_path: Path) -> None:
    content = content_of(text.replace('"samples":27', '"samples":26'), tmp_path)
    assert any(
        line.startswith("checksum: the snapshot's checksum is 'sha256:") for line in faults(content)
    )
    assert content.sources[0].samples == 26


def test_an_older_payload_says_what_it_lacks(tmp_path: Path) -> None:
    content = content_of(json.dumps(OLDER), tmp_path)
    assert faults(content) == [
        f"resume_state.datasets.1 ({DOCS}): token_offset: missing, which counts as 0",
        "resume_state.nodes: missing: an older loader counts no nodes; an import makes them from the sources",
    ]
    none = copy.deepcopy(OLDER)
    none["resume_state"]["datasets"][1]["share"] = "of another tool"
    del none["resume_state"]["datasets"][0]["token_offset"]
    assert any(
        "every token_offset is 0 or missing" in line
        for line in faults(content_of(json.dumps(none), tmp_path))
    )
    index = content_of('{"sample_index": 12}', tmp_path)
    assert (index.kind, index.sample_index) == ("sample index", 12)
    assert "a restore can only skip" in faults(index)[0]


def test_an_older_payload_under_a_mixture_counts_nodes_as_an_import_would(tmp_path: Path) -> None:
    content = content_of(
        json.dumps(OLDER), tmp_path, mixture=config.parse(mixture(), where="m", catalog=CATALOG)
    )
    assert [child.samples for child in content.nodes[0].children] == [10, 0, 0]
    assert [child.name for child in content.nodes[1].children] == [PROSE, WIKI]


def test_the_clock_of_an_older_checkpoint_is_shown_and_is_no_fault(
    text: str, tmp_path: Path
) -> None:
    def later(document: dict[str, Any]) -> None:
        for part in (document, document["resume_state"]):
            part["total_tokens"] += 99_920
        document["resume_state"]["clock_offset"] = 99_920

    content = content_of(changed(text, later), tmp_path)
    assert (content.sample_index, content.total_tokens, content.sequence_length) == (63, 100_424, 8)
    assert not list(faults(content))
    shown = io.StringIO()
    report.show(content, Console(file=shown, width=120))
    assert (
        "its token clock is an older checkpoint's: +99,920 tokens to those of its samples"
        in shown.getvalue()
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def test_a_mixture_that_goes_round_in_circles_is_shown_once(text: str, tmp_path: Path) -> None:
    def circle(document: dict[str, Any]) -> None:
        for node in document["resume_state"]["mixture"]:
            node["children"] = [[1, "1"], [3, "1"]]

    report.show(content_of(changed(text, circle), tmp_path), Console(file=io.StringIO(), width=120))


VALUES = st.sampled_from(
    [None, True, -1, 0, 2**60, 1.5, "", "x", [], [1], [[]], [[1, "a"]], {}, {"a": 1}, {"1": {}}]
)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_a_snapshot_holds_it_can_be_shown(data: st.DataObject, texts: list[str]) -> None:
    documents = [unseal(text) for text in texts]
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(list(places(documents[0]))))
        within = documents[0]
        for key in path:
            within = within[key]
        within[last] = copy.deepcopy(data.draw(VALUES))
    mixture_file = data.draw(
        st.sampled_from([None, config.parse(mixture(), where="m", catalog=CATALOG)])
    )
    a, b = (read(Path("x"), DataState("", document), mixture_file) for document in documents)
    out = Console(file=io.StringIO(), width=120)
    report.show(a, out)
    report.show_probabilities(report.probabilities(a), out)
    for pair in ((a, b), (b, a)):
        report.show_difference(difference(*pair), *pair, out)
    json.dumps([report.as_json(a), report.probabilities(a)])


# --- Probabilities -----------------------------------------------------------------------------------------------


def node_of(policy: str, children: list[Child]) -> tuple[Content, Node]:
    node = Node(
        id=0, name="the root", policy=policy, interpolate="linear", children=tuple(children)
    )
    return Content(file="", where="", kind="snapshot", total_tokens=500, nodes=(node,)), node


def child(**fields: Any) -> Child:
    usual = {
        "is_node": False,
        "id": 0,
        "name": "a",
        "configured": "1",
        "presence": "live",
        "samples": 0,
        "tokens": 0,
    }
    return Child(
        **{**usual, "credit": 0, "exhausted": False, "weight": None, "total": None, **fields}
    )


def percents(policy: str, *children: Child) -> list[list[str]]:
    content, node = node_of(policy, list(children))
    return [
        [
            f"{value:.2%}" if value is not None else "?"
            for value in (chance.with_counters, chance.without_counters)
        ]
        for chance in chances(content, node)
    ]


def test_soft_sequential_with_and_without_its_counters() -> None:
    found = percents(
        "soft_sequential",
        child(samples=25_261, total=25_317),
        child(samples=121_225, total=12_164_382),
    )
    assert found == [["0.22%", "100.00%"], ["99.78%", "0.00%"]]


def test_balance_remaining_with_and_without_its_counters() -> None:
    found = percents(
        "balance_remaining", child(samples=90, total=100), child(samples=10, total=100)
    )
    assert found == [["10.00%", "50.00%"], ["90.00%", "50.00%"]]


def test_without_totals_nothing_is_guessed() -> None:
    assert percents("soft_sequential", child(samples=1), child(samples=2)) == [
        ["?", "?"],
        ["?", "?"],
    ]


def test_the_other_policies() -> None:
    three, out = child(configured="3"), child(exhausted=True)
    assert percents("weighted", three, child()) == [["75.00%", "75.00%"], ["25.00%", "25.00%"]]
    assert percents("least_consumed", three, child(), out) == [
        ["75.00%", "60.00%"], ["25.00%", "20.00%"], ["0.00%", "20.00%"],
    ]  # fmt: skip
    assert percents("sequential", out, child()) == [["0.00%", "100.00%"], ["100.00%", "0.00%"]]
    assert percents("round_robin", child(), child(presence="paused")) == [
        ["100.00%", "100.00%"],
        ["0.00%", "0.00%"],
    ]
    schedule = child(configured=[[0, "0"], [1000, "2"]]), child(configured="1")
    assert percents("schedule", *schedule) == [["50.00%", "0.00%"], ["50.00%", "100.00%"]]
    assert percents("of a later release", child()) == [["?", "?"]]


def test_weights_in_force_are_those_that_were_saved() -> None:
    content, node = node_of(
        "balance_remaining", [child(samples=9, total=10, weight=3), child(total=10, weight=1)]
    )
    assert [chance.in_force for chance in chances(content, node)] == [0.75, 0.25]


# --- Differences -------------------------------------------------------------------------------------------------


def test_what_lies_between_two_checkpoints(texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    a, b = content_of(texts[0], tmp_path / "a"), content_of(texts[1], tmp_path)
    found = difference(a, b)

    assert found.relation == f"the same, test ({UID}), generation 2"
    assert (found.samples, found.tokens, found.counted) == (30, 240, (60, 93))
    assert sum(source.samples or 0 for source in found.sources) == 33
    for source, was, now in zip(found.sources, a.sources, b.sources, strict=True):
        assert (source.rows, source.tokens) == (now.rows - was.rows, now.tokens - was.tokens)  # type: ignore[operator]
    assert found.mixture == ()
    assert "at different samples" in found.data
    assert difference(b, a).samples == -30
    assert "the same data up to sample 63" in difference(a, a).data


def test_other_runs_other_data_and_a_changed_mixture_are_named(text: str, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["run_uid"], document["digest"] = "f" * 32, "1" * 32
        document["resume_state"]["mixture"][0]["children"][0][1] = "3"
        document["resume_state"]["mixture"][1]["policy"] = "round_robin"
        document["resume_state"]["mixture"][1]["children"][1].append("paused")
        document["resume_state"]["mixture"][0]["children"].append([8, "1"])

    (tmp_path / "a").mkdir()
    found = difference(
        content_of(text, tmp_path / "a"), content_of(changed(text, change), tmp_path)
    )
    assert found.relation.startswith("two runs: test (0123")
    assert found.data == "other data up to sample 63: the digests differ"
    assert list(found.mixture) == [
        "the root: code: weight 2 → 3",
        "the root: source 4 is new",
        "rest: policy weighted → round_robin",
        f"rest: {WIKI}: presence live → paused",
    ]


# --- The command line --------------------------------------------------------------------------------------------


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def test_show_prints_everything(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    save_torch(path, text)
    printed = run(path)
    for said in (
        f"run test, stream train, uid {UID}, generation 2",
        "sample 63, 504 tokens, digest",
        "counters below are those at sample 60",
        "data/code-0.parquet, row 10, token 29",
        "what each source gave up to sample 63",
        "45.00%",
        "the root: least_consumed",
        "├── code: 27 samples, 216 tokens, 45.00% of the node, in force 44.44%, owed -0.33 samples",
        "└── rest: 20 samples, 160 tokens, 33.33% of the node, in force 33.33%; weighted:",
        "nothing is missing, and all counters add up",
    ):
        assert said in printed
    document = json.loads(run(path, "--json"))
    assert document["faults"] == []
    assert sum(given["samples"] for given in document["counts"].values()) == 63
    assert sum(given["real_tokens"] for given in document["counts"].values()) == 504
    assert document["nodes"][1]["children"][0]["probability"] == pytest.approx(0.3)


def test_probabilities_and_a_mixture_file(text: str, tmp_path: Path) -> None:
    bare = tmp_path / "c.json"
    save_plain(bare, changed(text, lambda d: d["resume_state"].pop("mixture")))
    assert "its policy is not known" in run("--probabilities", bare, status=1)
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(mixture()))
    printed = run("--probabilities", bare, "--mixture", tmp_path / "mixture.yaml")
    assert "rest: weighted" in printed
    assert "44.44%" in printed
    found = json.loads(
        run("--probabilities", bare, "--mixture", tmp_path / "mixture.yaml", "--json")
    )
    assert found[1]["children"][1]["without_counters"] == pytest.approx(0.7)


@pytest.mark.parametrize("imported", [False, True])
def test_probabilities_are_those_at_the_sample_index_of_a_young_state_too(
    imported: bool, tmp_path: Path
) -> None:
    document = mixture()
    document["mixture"]["children"][2] |= {
        "policy": "soft_sequential",
        "children": [{"source": PROSE}, {"source": WIKI}],
    }
    order = order_of(write_corpus(tmp_path), document)
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(document))
    first = state_of(import_into(order, OLDER)) if imported else order.initial()
    base = Timeline(order).encode(first)
    for more in (3, 40):
        state = advanced(order, first, more)
        template = order.record.template(UID, "train", 2)
        path = tmp_path / f"{more}.json"
        save_plain(path, snapshot.compose(template, base, Timeline(order).encode(state)))
        assert "of None in all" in run("--probabilities", path)
        printed = json.loads(
            run("--probabilities", path, "--mixture", tmp_path / "mixture.yaml", "--json")
        )
        for node, children in zip(printed, state.nodes, strict=True):
            assert node["counted_at"] == state.sample_index
            assert [child["samples"] for child in node["children"]] == [
                child.samples for child in children
            ]
        prose, wiki = printed[1]["children"]
        left = 1 - state.nodes[1][0].samples / prose["total"]
        assert prose["with_counters"] == pytest.approx(
            left / (left + (1 - left) * (1 - state.nodes[1][1].samples / wiki["total"]))
        )
        assert f"at sample {state.sample_index}" in run(
            "--probabilities", path, "--mixture", tmp_path / "mixture.yaml"
        )
        assert f"stood at sample {first.sample_index}" in run(path).replace("\n", " ")


def test_diff_prints_rows_and_tokens(texts: list[str], tmp_path: Path) -> None:
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / name).write_text(text)
    printed = run(tmp_path / "a", tmp_path / "b")
    for said in (
        "from sample 63 to 93: +30 samples, +240 tokens",
        "+112",
        "the mixture is the same",
    ):
        assert said in printed
    assert json.loads(run(tmp_path / "a", tmp_path / "b", "--json"))["tokens"] == 240
