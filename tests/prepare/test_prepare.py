"""Prepared shards: the same order as of the text, whole or not at all, and made once whatever happens."""

from __future__ import annotations

import gzip
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support import prepared
from support.catalog import CATALOG
from support.corpora import (
    CODE,
    DOCS,
    PROSE,
    flat,
    mixture,
    text_rows,
    write_corpus,
    write_jsonl,
    write_txt,
)
from support.prepared import nothing, shards_of, write_tokenizer
from support.server_process import MAIN, CommandLine, server_forks
from tokenloom_server.config import mixture_file as config
from tokenloom_server.core.state import State
from tokenloom_server.errors import ConfigError, SourceError, TokenloomError
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.sources import lines
from tokenloom_server.storage.file import checksum
from tokenloom_tools.prepare.folder import Folder
from tokenloom_tools.prepare.job import Job
from tokenloom_tools.prepare.journal import Journal
from tokenloom_tools.prepare.preparer import Done, OnRows, prepare
from tokenloom_tools.prepare.shards import ShardFormat, ShardWriter


def job_of(folder: Path, document: dict[str, Any], **options: Any) -> Job:
    return prepared.job_of(folder, document, **{"shard_bytes": 100, **options})


def run(job: Job, out: Path, *, on_done: OnRows = nothing) -> Done:
    return prepare(job, out, on_done=on_done, on_kept=nothing)


def served(path: Path) -> PipelineFactory:
    return builder.create(config.load(path, CATALOG), path.parent, None)


def end_of(order: PipelineFactory) -> State:
    pipeline = order.pipeline(order.initial())
    while pipeline.ended is None:
        pipeline.advance(500)
    return pipeline.state()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus whose files of lines have several blocks each."""
    monkeypatch.setattr(lines, "STRIDE_BYTES", 32)
    return write_corpus(tmp_path / "data folder")


@pytest.mark.parametrize(
    ("form", "ids", "labels"),
    [("arrow", False, "same"), ("arrow", True, "shifted"), ("parquet", True, "same")],
)
def test_what_is_served_is_the_same_to_the_digest(
    folder: Path, tmp_path: Path, form: ShardFormat, ids: bool, labels: str
) -> None:
    document = mixture(labels=labels, add_bos=True)
    document["mixture"]["children"][1]["epochs"] = 2.5
    document["mixture"]["children"][2]["children"][0]["add_eot"] = False
    job = job_of(folder, document, form=form, ids_too=ids)
    done = run(job, tmp_path / "out")
    assert len(job.tasks) > 4, "some file is cut into several shards"
    ours, theirs = end_of(served(done.mixture)), end_of(job_order(folder, document))
    assert ours.sample_index > 100
    assert (ours.sample_index, ours.digest, ours.total_tokens) == (
        theirs.sample_index, theirs.digest, theirs.total_tokens,
    )  # fmt: skip
    assert [source.rows for source in ours.sources] == [source.rows for source in theirs.sources]


def job_order(folder: Path, document: dict[str, Any]) -> PipelineFactory:
    return builder.create(config.parse(document, where="test", catalog=CATALOG), folder, None)


@pytest.mark.parametrize(
    "shuffle",
    [
        {"shuffle": "shards"},
        {"shuffle": "shards", "lanes": 2},
        {"shuffle": "rows", "shuffle_window_rows": 4},
    ],
)
def test_shuffled_rows_are_written_in_the_order_of_the_first_epoch(
    folder: Path, tmp_path: Path, shuffle: dict[str, Any]
) -> None:
    document = mixture()
    for child in (
        document["mixture"]["children"][1],
        document["mixture"]["children"][2]["children"][0],
    ):
        child.update(shuffle, epochs=1)
    for shuffled in (True, False):
        job = job_of(folder, document, shuffled=shuffled)
        done = run(job, tmp_path / f"out-{shuffled}")
        ours, theirs = end_of(served(done.mixture)), end_of(job_order(folder, document))
        # What fills no sample at the end of a lane depends on which rows it has.
        assert shuffled or "lanes" in shuffle or ours.sample_index == theirs.sample_index
        assert (
            (ours.total_tokens, ours.digest) == (theirs.total_tokens, theirs.digest)
        ) is shuffled
        options = yaml.safe_load(done.mixture.read_text())["mixture"]["children"][1]
        assert ("shuffle" in options) is not shuffled
    document["seed"] = 8
    with pytest.raises(ConfigError, match="seed: it was 7, it is 8"):
        run(job_of(folder, document, shuffled=True), tmp_path / "out-True")


def test_what_is_read_of_rows_is_done_with_and_what_is_drawn_each_epoch_is_kept(
    tmp_path: Path,
) -> None:
    texts = text_rows(60, 3, 9)
    rows = [{"title": f"t{i}", "text": text, "score": i % 5} for i, text in enumerate(texts)]
    lines = [
        json.dumps(row) if i % 9 else '{"title": "t", "text": 5, "score": 3}'
        for i, row in enumerate(rows)
    ]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    rules = {"filter": "score >= 2", "template": "{title}: {text}", "on_bad_row": "skip"}
    source = {"source": "jsonl:a.jsonl.gz:text", "epochs": 1.5, "lanes": 2, **rules}
    document = mixture(mixture={"policy": "sequential", "children": [source]})
    job = job_of(tmp_path, document)
    assert len(job.tasks) == 1, "a compressed file is read from its head"
    done = run(job, tmp_path / "out")
    ours, theirs = end_of(served(done.mixture)), end_of(job_order(tmp_path, document))
    assert (ours.sample_index, ours.digest) == (theirs.sample_index, theirs.digest)
    assert ours.sources[0].rows == theirs.sources[0].rows
    (child,) = yaml.safe_load(done.mixture.read_text())["mixture"]["children"]
    assert set(child) == {"source", "alias", "epochs", "lanes", "add_bos", "add_eot"}
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (
        (manifest["bad_rows"], manifest["filtered_rows"])
        == (done.bad_rows, done.filtered_rows)
        == (7, 21)
    )
    child = document["mixture"]["children"][0]
    child["max_bad_rows"] = 6
    with pytest.raises(SourceError, match=r"7 rows are bad, and max_bad_rows allows 6 in an epoch"):
        run(job_of(tmp_path, document), tmp_path / "out")
    with pytest.raises(
        SourceError, match=r"a.jsonl.gz': line \d+: 'text' is a number.*max_bad_rows allows 6"
    ):
        run(job_of(tmp_path, document), tmp_path / "too many")
    del child["max_bad_rows"]
    child["fim"] = {"rate": 1.0, "ids": {"prefix": 1, "middle": 2, "suffix": 3}}
    done = run(job_of(tmp_path, document), tmp_path / "out")
    assert done.kept == done.shards, "what is drawn anew each epoch decides no shard"
    (child,) = yaml.safe_load(done.mixture.read_text())["mixture"]["children"]
    assert child["fim"]["ids"] == {"prefix": 1, "middle": 2, "suffix": 3}
    ours, theirs = end_of(served(done.mixture)), end_of(job_order(tmp_path, document))
    assert ours.total_tokens == theirs.total_tokens, "as many marks, though at other places"


def test_phases_are_served_from_what_was_prepared(folder: Path, tmp_path: Path) -> None:
    document = mixture()
    first = {"policy": "weighted", "children": [{"source": DOCS, "epochs": float("inf")}]}
    document["phases"] = [{"until_tokens": 400, "mixture": first}, {"mixture": document["mixture"]}]
    done = run(job_of(folder, document), tmp_path / "out")
    written = yaml.safe_load(done.mixture.read_text())
    spec = "arrow:sources/001-docs:ids"
    assert written["phases"][0]["mixture"]["children"][0] == {
        "source": spec, "alias": DOCS, "epochs": float("inf"), "add_bos": False, "add_eot": False,
    }  # fmt: skip
    assert served(done.mixture).config.phases[0].until_tokens == 400


def test_the_manifest_says_what_was_made_from_what(folder: Path, tmp_path: Path) -> None:
    job = job_of(folder, mixture())
    done = run(job, tmp_path / "out")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (manifest["run"], manifest["rows"], manifest["tokens"]) == (
        "test",
        done.rows,
        done.tokens,
    )
    assert manifest["shards"]["ids"] == "uint16"
    assert manifest["tokenizer"]["engine"] == "bytes"
    assert [source["spec"] for source in manifest["sources"]] == [DOCS, PROSE]
    for source in manifest["sources"]:
        assert sum(shard["tokens"] for shard in source["shards"]) == source["tokens"]
        for shard in source["shards"]:
            path = tmp_path / "out" / shard["path"]
            assert (path.stat().st_size, checksum(path)) == (shard["bytes"], shard["checksum"])
        assert all(
            (folder / file["path"]).stat().st_size == file["size"] for file in source["files"]
        )


def test_shards_do_not_depend_on_the_number_of_threads(folder: Path, tmp_path: Path) -> None:
    found = []
    for threads in (1, 5):
        out = tmp_path / f"out-{threads}"
        run(job_of(folder, mixture(), threads=threads), out)
        found.append(shards_of(out))
    assert found[0] == found[1]


def test_record_batches_do_not_grow_with_the_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data/docs.jsonl", ["x" * 50_000] * 140)
    run(job_of(tmp_path, flat([DOCS]), shard_bytes=2**30), tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("sources/*/*.arrow")
    file = pa.ipc.open_file(shard)
    rows = [file.get_batch(i).num_rows for i in range(file.num_record_batches)]
    assert sum(rows) == 140
    assert max(rows) * 50_001 < 2.1 * 2**20


def test_whatever_ends_it_the_next_call_goes_on_to_the_same_shards(
    folder: Path, tmp_path: Path
) -> None:
    run(job_of(folder, mixture()), tmp_path / "whole")
    pieces = 0

    def fail_at(number: int) -> OnRows:
        def tell(*_: int) -> None:
            nonlocal pieces
            pieces += 1
            if pieces == number:
                raise ConfigError("stopped by the test")

        return tell

    out = tmp_path / "out"
    stops = 0
    while stops < 50:
        pieces = 0
        try:
            done = run(job_of(folder, mixture(), threads=1), out, on_done=fail_at(2))
            break
        except ConfigError:
            stops += 1
            assert not list(out.glob("sources/*/*.draft"))
            assert not (out / "mixture.yaml").exists()
    assert 0 < stops < 50
    assert done.kept > 0
    assert shards_of(out) == shards_of(tmp_path / "whole")
    assert run(job_of(folder, mixture()), out).kept == done.shards


def test_a_killed_command_goes_on(tmp_path: Path, tokenloom: CommandLine) -> None:
    for number in range(40):
        write_jsonl(tmp_path / f"data/{number:02d}.jsonl", text_rows(300, number, 60))
    document = flat(["jsonl:data/*.jsonl:text"])
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(document))
    arguments = ("prepare", "mixture.yaml", "--out", "out", "--threads", "1")
    killed = 0
    for _ in range(3):
        journal = tmp_path / "out/journal.jsonl"
        before = journal.stat().st_size if journal.exists() else 0
        process = server_forks().fork(MAIN, arguments, output=tmp_path / "log", folder=tmp_path)
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.stat().st_size > before + 500:
                process.kill()
                killed += 1
                break
            time.sleep(0.0005)
        process.wait(240)
    assert killed, "it was never caught at work"
    ended = tokenloom(
        "prepare", tmp_path / "mixture.yaml", "--out", tmp_path / "out", folder=tmp_path
    )
    assert ended.status == 0, ended.output
    assert "were there already" in ended.output
    run(job_of(tmp_path, document, shard_bytes=128_000_000), tmp_path / "whole")
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "whole")
    assert (
        end_of(served(tmp_path / "out/mixture.yaml")).digest
        == end_of(job_order(tmp_path, document)).digest
    )


def test_what_lies_there_is_verified(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    done = run(job_of(folder, mixture()), out)
    whole = shards_of(out)
    first, second, third, *_ = sorted(out.glob("sources/*/*"))
    first.write_bytes(first.read_bytes()[:-40] + bytes(40))
    second.write_bytes(second.read_bytes() + b"x")
    third.unlink()
    (out / "sources/001-docs/.000009.arrow.draft").write_bytes(b"left by a kill")
    with (out / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"name": "sources/001-docs/00')
    again = run(job_of(folder, mixture()), out)
    assert again.kept == done.shards - 3
    assert shards_of(out) == whole
    for fault in ("has checksum xxh3:", "bytes, but it was written with", "cannot be read"):
        assert fault in caplog.text
    assert caplog.text.count("it is made again") == 3
    assert run(job_of(folder, mixture()), out).kept == done.shards


def test_something_else_is_refused_with_the_difference(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(job_of(folder, mixture()), out)
    weights = mixture(run="another", seed=8)
    weights["mixture"]["children"][1]["weight"] = 5
    assert run(job_of(folder, weights), out).kept == len(shards_of(out)), "weights decide no shard"
    assert (
        yaml.safe_load((out / "mixture.yaml").read_text())["mixture"]["children"][1]["weight"] == 5
    )
    for document, options, field in (
        (
            mixture(special_tokens_in_text="parse"),
            {},
            r'special_tokens_in_text: it was "text", it is "parse"',
        ),
        (mixture(vocab_size=70_000), {}, r"vocab_size: it was 258, it is 70000"),
        (mixture(add_bos=True), {}, r"sources.0.add_bos: it was false, it is true"),
        (mixture(), {"form": "parquet"}, r'shards.format: it was "arrow", it is "parquet"'),
        (flat([DOCS]), {}, r"sources: it was 2: .*it is 1: jsonl:data/docs.jsonl:text"),
    ):
        with pytest.raises(ConfigError, match=f"was prepared from something else(.|\n)*{field}"):
            run(job_of(folder, document, **options), out)  # type: ignore[arg-type]
    write_txt(folder / "data/prose/0.txt", ["another text"])
    with pytest.raises(ConfigError, match=r"sources\.1\.files\.0\.(fingerprint|size): it was"):
        run(job_of(folder, mixture()), out)


def test_folders_with_other_things_or_that_cannot_be_written_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/out.*cannot be written \(Not a directory\)"):
        run(job_of(folder, mixture()), tmp_path / "file/out")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(
        ConfigError, match=r"holds thesis.tex already, and nothing that was prepared"
    ):
        run(job_of(folder, mixture()), other)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    out = tmp_path / "out"
    run(job_of(folder, mixture()), out)
    (out / "sources/001-docs/mine.arrow").write_bytes(b"x")
    with pytest.raises(
        ConfigError, match=r"mine.arrow: is no shard of this job, and would be served with them"
    ):
        run(job_of(folder, mixture()), out)
    (out / "sources/001-docs/mine.arrow").unlink()
    (out / "job.json").write_text("{")
    with pytest.raises(ConfigError, match=r"job.json: cannot be read"):
        run(job_of(folder, mixture()), out)


def test_two_at_once_are_refused(folder: Path, tmp_path: Path) -> None:
    job = job_of(folder, mixture())
    with (
        Journal.open(Folder(tmp_path / "out"), job, lambda *_: None),
        pytest.raises(ConfigError, match="another process prepares into it now"),
    ):
        run(job, tmp_path / "out")


ROWS_OF_TENSORS: dict[str, Any] = {
    "run": "rows",
    "batching": {"bucket_by": "kind", "columns": ["latents"]},
    "global_batch_size": 4,
    "mixture": {"policy": "weighted", "children": [{"source": "parquet:none.parquet:*"}]},
}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (flat([CODE]), r"every source holds ids already.*give --ids"),
        (ROWS_OF_TENSORS, "ready tensors, so there is nothing to tokenise"),
    ],
)
def test_nothing_to_prepare_is_refused(folder: Path, document: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        job_of(folder, document)


def test_a_source_with_a_loss_mask_stays_as_it_is(folder: Path, tmp_path: Path) -> None:
    masked = {"ids": [[5, 6, 7]] * 9, "mask": [[0, 1, 1]] * 9}
    pq.write_table(pa.table(masked), folder / "masked.parquet")
    document = flat([DOCS], packing="best_fit")
    document["mixture"]["children"].append(
        {"source": "parquet:masked.parquet:ids", "loss_mask": "mask"}
    )
    done = run(job_of(folder, document, ids_too=True), tmp_path / "out")
    _, child = yaml.safe_load(done.mixture.read_text())["mixture"]["children"]
    assert child == {"source": f"parquet:{folder / 'masked.parquet'}:ids", "loss_mask": "mask"}
    assert end_of(served(done.mixture)).sources[1].rows == 9
    del document["mixture"]["children"][0]
    with pytest.raises(
        ConfigError, match=r"nothing to tokenise.*those with a loss mask are left as they are"
    ):
        job_of(folder, document, ids_too=True)


def test_a_source_without_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    write_txt(folder / "data/empty.txt", ["", ""])
    with pytest.raises(SourceError, match=r"'txt:data/empty.txt:text': no row of it has a token"):
        run(job_of(folder, flat(["txt:data/empty.txt:text", DOCS])), tmp_path / "out")


def test_parquet_shards_have_page_checksums_and_damage_is_noticed(
    folder: Path, tmp_path: Path
) -> None:
    done = run(job_of(folder, mixture(), form="parquet"), tmp_path / "out")
    path = tmp_path / "out/sources/001-docs/000000.parquet"
    offset = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[offset + 40] ^= 1
    path.write_bytes(content)
    with pytest.raises(TokenloomError, match=r"000000\.parquet"):
        end_of(served(done.mixture))


def test_long_rows_and_many_empty_ones_are_cut_into_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np
    from tokenloom_tools.prepare import shards

    monkeypatch.setattr(shards, "BATCH_IDS", 10)
    monkeypatch.setattr(shards, "BATCH_ROWS", 4)
    monkeypatch.setattr(shards, "MAX_ROW_IDS", 25)
    rows = [list(range(length)) for length in (0, 3, 25, 0, 0, 9, 20, 1, 0, 0, 0, 0, 0)]
    with closing(ShardWriter(tmp_path / "a.parquet", np.dtype(np.uint16), "parquet")) as writer:
        for at in range(0, len(rows), 3):
            part = rows[at : at + 3]
            values = np.array([i for row in part for i in row], np.uint32)
            writer.add(values, np.cumsum([len(row) for row in part]))
        with pytest.raises(SourceError, match="a row has 26 tokens"):
            writer.add(np.zeros(26, np.uint32), np.array([26]))
    found = pq.read_table(tmp_path / "a.parquet")
    assert found["ids"].to_pylist() == rows
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups > 4
    assert (writer.rows, writer.tokens) == (13, 58)


def test_the_folder_goes_elsewhere_with_its_tokeniser(tmp_path: Path) -> None:
    texts = text_rows(200, 3, 30)
    (tmp_path / "made").mkdir()
    write_tokenizer(tmp_path / "made/bpe.json", texts)
    write_txt(tmp_path / "a.txt", texts)
    document = flat(["txt:a.txt:text"], tokenizer="made/bpe.json")
    job = job_of(tmp_path, document)
    assert job.document()["tokenizer"]["engine"] in ("gigatoken", "tokenizers")
    expected = end_of(job_order(tmp_path, document))
    done = run(job, tmp_path / "out")
    done.mixture.parent.rename(tmp_path / "moved")
    for path in ("made", "a.txt"):
        (tmp_path / path).rename(tmp_path / f"gone-{path}")
    order = served(tmp_path / "moved/mixture.yaml")
    assert order.record.tokenizer is not None
    assert order.record.tokenizer.vocab_size == 300
    assert end_of(order).digest == expected.digest


def test_the_command_says_what_it_did_and_how_to_serve_it(
    folder: Path, tmp_path: Path, tokenloom: CommandLine
) -> None:
    (folder / "mixture.yaml").write_text(yaml.safe_dump(mixture()))
    out = tmp_path / "out"
    ended = tokenloom("prepare", folder / "mixture.yaml", "--out", out, folder=tmp_path)
    assert ended.status == 0, ended.output
    assert "31 rows, 424 tokens, 0.0 MB in 3 shards" in ended.output
    assert f"serve it: tokenloom serve {out}/mixture.yaml" in ended.output
    assert "100%  31 rows, 424 tokens" in ended.output
    refused = tokenloom(
        "prepare", folder / "mixture.yaml", "--out", out, "--format", "parquet", folder=tmp_path
    )
    assert refused.status == 2
    assert 'shards.format: it was "arrow", it is "parquet"' in refused.output
