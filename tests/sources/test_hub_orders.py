"""Orders over datasets on the Hub: what is read, what is pinned, where it may lie, and what the cache spares."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import sources
from support.catalog import SOURCES, spec_of
from support.corpora import flat, parsed, text_rows
from support.hub import StandInHub
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.errors import ConfigError, SourceChanged, SourceError
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.revision_content import revise
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.open import open_source
from tokenloom_tools import short_form

SPEC = "hf:org/name:train:text"
ROWS = [text_rows(30, salt, 30) for salt in range(2)]


def parquet(rows: Sequence[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), file, row_group_size=7)
    return file.getvalue()


def jsonl(rows: Sequence[str]) -> bytes:
    return "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()


def create(folder: Path, spec: str = SPEC, roots: Sequence[str] = ()) -> PipelineFactory:
    return builder.create(parsed(flat([spec])), folder, None, DataRoots.of(roots))


def rows_of(spec: str) -> list[str]:
    return every_row(open_source(spec_of(spec), Path()))


def rows_of_order(order: PipelineFactory) -> list[str]:
    return every_row(order.readers.open(0))


def every_row(source: Source) -> list[str]:
    return [
        text for shard in range(len(source.shards)) for text in sources.rows_of(source, shard=shard)
    ]


def test_json_that_is_no_lines_is_named(hub: StandInHub) -> None:
    hub.repo("org/name").commit({"train.json": json.dumps([{"text": "a"}]).encode()})
    with pytest.raises(
        SourceError,
        match=r"hf://datasets/org/name@\w+/train.json.*line 1 is a list, expected a JSON object",
    ):
        rows_of(SPEC)


def test_going_on_in_the_middle_of_a_large_dataset_costs_a_footer_and_a_row_group(
    hub: StandInHub,
) -> None:
    rows = text_rows(400, 7, 800)
    content = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), content, row_group_size=20, compression="none")
    repo = hub.repo("org/name")
    commit = repo.commit(
        {f"data/train-{i:05}-of-00050.parquet": content.getvalue() for i in range(50)}
    )
    source = open_source(spec_of(SPEC), Path())
    hub.forget()

    first = next(source.read(37, 211)).column

    assert first.to_pylist()[0] == rows[211]
    assert len(hub.asked("")) == 1  # where the file lies
    # The footer, and of what is read ahead no more than this file has.
    assert hub.bytes_sent() < repo.size(commit) / 25
    assert {request.path for request in hub.requests if request.place == "hub"} == {
        f"/datasets/org/name/resolve/{commit}/data/train-00037-of-00050.parquet"
    }


def test_reading_goes_on_through_faults(hub: StandInHub) -> None:
    hub.repo("org/name").commit({"train.parquet": parquet(ROWS[0])})
    hub.fail("/resolve/", status=503)
    hub.fail("/blobs/", status=429, headers={"Retry-After": "0"})
    hub.fail("/blobs/", cut=5)
    assert rows_of(SPEC) == ROWS[0]
    assert all(fault.met for fault in hub.faults)


def test_a_run_stays_at_its_commit_and_asks_for_no_other(hub: StandInHub, tmp_path: Path) -> None:
    repo = hub.repo("org/name")
    commit = repo.commit({"train.parquet": parquet(ROWS[0])})
    order = create(tmp_path)
    repo.commit({"train.parquet": parquet(ROWS[1])})
    hub.forget()

    again = builder.load(order.config, tmp_path, None, order.record.to_json())

    assert hub.asked("") == [], "loading a run asks the Hub for nothing"
    assert again.record.to_json() == order.record.to_json() != create(tmp_path).record.to_json()
    assert again.record.manifest.commits == {SPEC: (f"org/name@{commit}",)}
    assert rows_of_order(again) == ROWS[0]


def test_a_run_that_was_recorded_reads_its_files_whatever_the_rules_are_now(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before splits were those of `datasets`, this spec meant the Hub's conversion of JSON lines."""
    repo, converted = hub.repo("org/name"), "hf:org/name@refs/convert/parquet:train:text"
    repo.commit({"train.jsonl": jsonl(ROWS[0])})
    repo.commit({"default/train/0000.parquet": parquet(ROWS[1])}, "refs/convert/parquet")
    record = json.loads(
        json.dumps(create(tmp_path, converted).record.to_json()).replace(converted, SPEC)
    )
    assert rows_of(SPEC) == ROWS[0]

    monkeypatch.setitem(sys.modules, "datasets", None)
    hub.forget()
    again = builder.load(parsed(flat([SPEC])), tmp_path, None, record)

    assert hub.requests == []
    assert rows_of_order(again) == ROWS[1]
    with pytest.raises(
        SourceError, match=r"need `datasets` 4\.0 or later .*pip install 'tokenloom\[hf\]'"
    ):
        rows_of(SPEC)


def test_a_run_begins_again_at_its_commit_without_its_record(
    hub: StandInHub, tmp_path: Path
) -> None:
    """Here of the Hub's conversion, which is a branch of its own."""
    repo, spec = hub.repo("org/name"), "hf:org/name@refs/convert/parquet:train:text"
    repo.commit({"README.md": b"# csv", "train.csv": b"text\na\n"})
    content = {
        f"default/{split}/000{i}.parquet": parquet(ROWS[i])
        for i in range(2)
        for split in ("train", "trains")
    }
    commit = repo.commit(content, "refs/convert/parquet")
    order = create(tmp_path, spec)
    repo.commit({}, "refs/convert/parquet")
    document = flat([spec])
    document["mixture"]["children"][0]["commit"] = commit
    records = [
        json.loads(each.record.to_json())
        for each in (builder.create(parsed(document), tmp_path, None), order)
    ]
    beside = [record.pop("beside") for record in records]
    assert records[0] == records[1]
    assert [*(beside[0].items() - beside[1].items())] == [(f"{spec}: commit", commit)]


def test_another_content_at_the_commit_is_refused_by_name(hub: StandInHub, tmp_path: Path) -> None:
    repo = hub.repo("org/name")
    commit = repo.commit({"train.parquet": parquet(ROWS[0])})
    order = create(tmp_path)
    repo.commits[commit]["train.parquet"] = parquet(ROWS[1])
    with pytest.raises(
        SourceChanged, match=rf"hf://datasets/org/name@{commit}/train.parquet.* expected"
    ):
        rows_of_order(order)
    del repo.commits[commit]
    with pytest.raises(SourceError, match="has no such revision"):
        rows_of_order(order)


# --- revisions ------------------------------------------------------------------------------------------


def test_files_that_a_dataset_got_since_enter_by_a_revision(
    hub: StandInHub, tmp_path: Path
) -> None:
    repo = hub.repo("org/name")
    first = {"data/train-0.parquet": parquet(ROWS[0])}
    repo.commit(
        {"README.md": b"---\nconfigs: [{config_name: default, data_files: 'data/*'}]\n---\n"}
        | first
    )
    timeline = Timeline(create(tmp_path))
    change = MixtureChange(append_files=[SPEC], reason="more")
    with pytest.raises(ConfigError, match="has no file that the run does not read already"):
        revise(timeline, change, 100)

    repo.commit(repo.commits[repo.refs["main"]] | {"data/train-1.parquet": parquet(ROWS[1])})
    content = revise(timeline, change, 100)
    assert [shard[0].rpartition("/")[2] for shard in content["shards"][SPEC]] == [
        "train-0.parquet", "train-1.parquet",
    ]  # fmt: skip

    repo.commit(repo.commits[repo.refs["main"]] | {"data/train-0.parquet": parquet(ROWS[1][:9])})
    with pytest.raises(
        SourceChanged,
        match=r"1 of the 1 files that the run reads are gone or others at \w+ \(the first",
    ):
        revise(timeline, change, 100)


# --- where data may lie ---------------------------------------------------------------------------------


def test_with_data_roots_the_hub_is_read_where_a_root_says_so(
    hub: StandInHub, tmp_path: Path
) -> None:
    for name in ("org/name", "org/name2"):
        hub.repo(name).commit({"train.parquet": parquet(ROWS[0])})
    for roots in (
        [str(tmp_path)],
        ["s3://bucket"],
        ["hf://datasets/other"],
        ["hf://datasets/org/nam"],
    ):
        with pytest.raises(ConfigError, match="'hf://datasets/org/name' lies below no data root"):
            create(tmp_path, SPEC, roots)
    assert hub.requests == [], "it was asked before it was checked"
    for root in ("hf://datasets/org/name", "hf://datasets/org", "hf://datasets"):
        assert create(tmp_path, SPEC, [root]).record.shards[0][0].size
    with pytest.raises(ConfigError, match="lies below no data root"):
        create(tmp_path, "hf:org/name2:train:text", ["hf://datasets/org/name"])


def test_a_pattern_in_a_repository_is_pinned_to_its_commit(hub: StandInHub, tmp_path: Path) -> None:
    repo = hub.repo("org/name")
    commit = repo.commit({f"deep/{i}.parquet": parquet(ROWS[i]) for i in range(2)})
    spec = "parquet:hf://datasets/org/name/deep/*.parquet:text"
    order = create(tmp_path, spec, ["hf://datasets/org/name"])
    repo.commit({})
    assert [shard.path for shard in order.record.shards[0]] == [
        f"hf://datasets/org/name@{commit}/deep/{i}.parquet" for i in range(2)
    ]
    hub.forget()
    assert (
        rows_of_order(builder.load(order.config, tmp_path, None, order.record.to_json()))
        == ROWS[0] + ROWS[1]
    )
    assert hub.asked("^/api/") == []


# --- the short form -------------------------------------------------------------------------------------


def test_the_short_form_takes_specs_of_the_hub(hub: StandInHub, tmp_path: Path) -> None:
    for name in ("org/name", "org/v1.5"):
        hub.repo(name).commit({"train.parquet": parquet(ROWS[0]), "test.parquet": parquet(ROWS[1])})
    found = short_form.document(
        f"{SPEC}:0.9 hf:org/v1.5:test:text:0.1", tmp_path, SOURCES, run="mix"
    )
    assert found["mixture"]["children"] == [
        {"source": SPEC, "alias": "name", "weight": 0.9},
        {"source": "hf:org/v1.5:test:text", "alias": "test", "weight": 0.1},
    ]
    found = short_form.document("hf://datasets/org/name/tr*.parquet", tmp_path, SOURCES, run="mix")
    assert found["mixture"]["children"] == [
        {"source": "parquet:hf://datasets/org/name/tr*.parquet:text", "alias": "tr"}
    ]


# --- the local cache ------------------------------------------------------------------------------------


def test_a_downloaded_dataset_is_served_without_a_network(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    hub.repo("org/name").commit({f"train-{i}.parquet": parquet(ROWS[i]) for i in range(2)})
    online = create(tmp_path)
    huggingface_hub.snapshot_download("org/name", repo_type="dataset")
    hub.forget()
    assert rows_of_order(online) == ROWS[0] + ROWS[1]
    assert hub.requests == [], "the cache has it, also while online"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    offline = create(tmp_path)

    assert offline.record.to_json() == online.record.to_json()
    assert rows_of_order(offline) == ROWS[0] + ROWS[1]
    assert hub.requests == []


def test_without_huggingface_hub_an_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        SourceError, match=r"huggingface_hub 1\.33 or later .*pip install 'tokenloom\[hf\]'"
    ):
        rows_of(SPEC)
