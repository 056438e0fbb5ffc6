"""Evaluation: the same samples each time, on any ranks, and without a trace in training."""

from __future__ import annotations

import logging
import math
import re
import runpy
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenloom
import xxhash
import yaml
from support.corpora import (
    CODE,
    DOCS,
    PROSE,
    ROWS,
    WIKI,
    mixture,
    text_rows,
    write_corpus,
    write_jsonl,
    write_txt,
)
from support.mixing import node
from support.served import over_grpc, runs_of
from support.trainer import with_connection
from tokenloom import EvaluationDataset, LaunchOptions, LocalDataset, RemoteDataset
from tokenloom_server.api.auth import Access
from tokenloom_server.api.service import Runs
from tokenloom_server.core.hashing import Purpose, draw
from tokenloom_server.core.state import digest_hex
from tokenloom_server.errors import (
    BeyondHorizon,
    ConfigError,
    LimitExceeded,
    NotFound,
    OrderMismatch,
    SourceChanged,
)
from tokenloom_server.replay.evaluation import Evaluation, EvaluationCall, Slice
from tokenloom_server.run.generation import EndOfData, Waiting
from tokenloom_tools.cli.app import app
from tokenloom_tools.trace import Traces
from typer.testing import CliRunner

SHARE = 0.4
SEED = 7
SOURCES = (CODE, DOCS, PROSE, WIKI)
DOCS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"


class Sample(NamedTuple):
    source: int
    ids: tuple[int, ...]
    labels: tuple[int, ...]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_corpus(tmp_path)


def held_out(share: float = SHARE, **fields: Any) -> dict[str, Any]:
    """The mixture of the tests, whose sources all hold documents out."""
    document = mixture(seed=SEED, **fields)
    for child in document["mixture"]["children"]:
        for source in child.get("children", [child]):
            source["holdout"] = share
    return document


@contextmanager
def serving(
    folder: Path, document: Mapping[str, Any], ledger: str = "ledger.db"
) -> Iterator[tuple[str, Runs]]:
    path = folder / "mixture.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with runs_of(folder, path, ledger=ledger) as runs, over_grpc(runs) as address:
        yield f"grpc://{address}/{document['run']}", runs


def evaluating(
    url: str, batch_size: int, *, stream: str = "validation", **options: Any
) -> EvaluationDataset:
    return EvaluationDataset(
        url, batch_size, stream=stream, **with_connection({"batch_timeout_s": 20.0} | options)
    )


def samples_of(batch: Mapping[str, Any]) -> Iterator[tuple[int, Sample]]:
    """The samples of a batch by their index; padding has none."""
    columns = [batch[name].tolist() for name in ("sample_ids", "source_ids", "input_ids", "labels")]
    for at, source, ids, labels in zip(*columns, strict=True):
        if source < 0:
            assert at == -1
            assert set(labels) == {-100}
        else:
            yield at, Sample(source, tuple(ids), tuple(labels))


def all_of(batches: Iterable[Mapping[str, Any]]) -> list[list[tuple[int, Sample]]]:
    return [list(samples_of(batch)) for batch in batches]


def evaluated(url: str, world_size: int = 1, batch_size: int = 4, **options: Any) -> list[Sample]:
    """What all ranks get, in order: each sample once, and on each rank as many steps."""
    found: dict[int, Sample] = {}
    steps: set[int] = set()
    ends: set[tuple[tuple[int, int, int], ...]] = set()
    for rank in range(world_size):
        with evaluating(url, batch_size, rank=rank, world_size=world_size, **options) as dataset:
            batches = list(dataset)
            assert len(batches) == len(dataset)
            steps.add(len(batches))
            # What is of the whole step is the same on each rank.
            ends.add(
                tuple(
                    (each["sample_index"], each["global_tokens"], each["global_label_tokens"])
                    for each in batches
                )
            )
            for at, sample in (each for batch in batches for each in samples_of(batch)):
                assert at not in found
                found[at] = sample
    assert steps == {math.ceil(len(found) / (world_size * batch_size))}
    assert len(ends) == 1
    assert sorted(found) == list(range(len(found)))
    labels = sum(label != -100 for sample in found.values() for label in sample.labels[1:])
    assert sum(step[2] for step in next(iter(ends))) == labels
    return [found[at] for at in range(len(found))]


def test_two_iterators_of_one_evaluation_at_a_time_are_refused(held: Held) -> None:
    with (
        evaluating(held.url, 4) as dataset,
        pytest.raises(RuntimeError, match=r"another iter.*make two datasets"),
    ):
        list(zip(dataset, dataset, strict=True))


def training_on(url: str, batch_size: Any = 2, attempt: str = "a", **options: Any) -> RemoteDataset:
    """The one rank of a launch."""
    return RemoteDataset(
        url,
        batch_size,
        rank=0,
        world_size=1,
        launch=LaunchOptions(attempt=attempt),
        **with_connection(options),
    )


def trained(
    url: str, steps: int | None = None, attempt: str = "a", **options: Any
) -> list[tuple[int, str]]:
    """One rank trains from where the run stands: where each step ended, and the digest there."""
    with training_on(url, 2, attempt, **options) as dataset:
        return [(dataset.sample_index, dataset.digest) for _ in islice(dataset, steps)]


class Held(NamedTuple):
    url: str
    runs: Runs
    #: What evaluating on it gives.
    whole: list[Sample]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """A served run whose sources all hold documents out, for all that only look at it."""
    with serving(write_corpus(tmp_path_factory.mktemp("held")), held_out()) as (url, runs):
        yield Held(url, runs, evaluated(url))


def test_every_number_of_ranks_and_every_server_gives_the_same_samples(
    held: Held, folder: Path
) -> None:
    assert {sample.source for sample in held.whole} == {0, 1, 2, 3}
    for world_size, batch_size in ((1, 1), (2, 3), (4, 5)):
        assert evaluated(held.url, world_size, batch_size) == held.whole
        assert evaluated(held.url, world_size, batch_size, samples=17) == held.whole[:17]
    alone = {
        name: evaluated(held.url, stream=f"validation/{name}")
        for name in ("code", "docs", PROSE, WIKI)
    }
    assert [{sample.source for sample in of} for of in alone.values()] == [{0}, {1}, {2}, {3}]
    # The same samples of each source, by itself and in the mixture.
    assert [sample for of in alone.values() for sample in of] == sorted(
        held.whole, key=lambda sample: sample.source
    )
    with serving(folder, held_out()) as (url, _):
        assert evaluated(url, 3, 2) == held.whole


def is_held(content: bytes) -> bool:
    found = xxhash.xxh3_64_intdigest(content, draw(SEED, Purpose.HOLDOUT, 0, 0))
    return Fraction(found, 2**64) < Fraction(str(SHARE))


def rows_of(spec: str) -> Iterator[tuple[tuple[int, ...], bool]]:
    """From what the files were written of: each row's tokens, and whether it is held out. Empty rows have none."""
    for row in (row for shard in ROWS[spec] for row in shard if row):
        if isinstance(row, str):
            yield tuple(row.encode()), is_held(row.encode())
        else:
            yield (
                tuple(row),
                is_held(np.array(row, np.uint16 if spec == CODE else np.int32).tobytes()),
            )


def documents(samples: list[Sample], source: int) -> Counter[tuple[int, ...]]:
    """Of a source's samples, the documents, each without the end-of-text id."""
    tokens = [
        token
        for sample in samples
        if sample.source == source
        for token in sample.labels
        if token != -100
    ]
    found: list[list[int]] = [[]]
    for token in tokens:
        if token == 256:
            found.append([])
        else:
            found[-1].append(token)
    assert not found.pop(), "what is behind the last end of text"
    return Counter(map(tuple, found))


@pytest.mark.parametrize(
    "packing",
    [
        {"tail": "pad"},
        {"packing": "best_fit", "sequence_length": 256},
        {"packing": "none", "sequence_length": 256},
    ],
    ids=["concat", "best fit", "unpacked"],
)
def test_training_and_validation_together_are_the_files(
    folder: Path, packing: dict[str, Any]
) -> None:
    with serving(folder, held_out(**packing)) as (url, _):
        held = evaluated(url, 2, 3)
        with training_on(url, 1) as dataset:
            kept = [sample for batch in dataset for _, sample in samples_of(batch)]
    for source, spec in enumerate(SOURCES):
        rows = list(rows_of(spec))
        epochs = 2 if spec == DOCS else 1
        assert documents(held, source) == Counter(row for row, is_out in rows if is_out)
        assert documents(kept, source) == Counter(
            row for row, is_out in rows * epochs if not is_out
        )


def counters(runs: Runs, folder: Path, ledger: str) -> dict[str, Any]:
    """What a run knows of itself that does not follow from the clock."""
    stats = runs.get("test").stats.read().model_dump()
    told = {
        key: stats[key]
        for key in ("generation", "world_size", "sample_index", "digest", "total_tokens", "ended")
    }
    told["sources"] = [(one["samples"], one["rows"], one["tokens"]) for one in stats["sources"]]
    told["ranks"] = [(rank["rank"], rank["position"]) for rank in stats["ranks"]]
    with closing(sqlite3.connect(folder / ledger)) as connection:
        for table in ("runs", "openings", "slots", "snapshots", "revisions"):
            told[table] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        told["committed"] = connection.execute("SELECT sample_index FROM committed").fetchall()
    return told


def test_evaluating_leaves_no_trace_in_training(folder: Path) -> None:
    with serving(folder, held_out()) as (url, runs):
        alone = trained(url)
        undisturbed = counters(runs, folder, "ledger.db")
    found: list[list[Sample]] = []
    with serving(folder, held_out(), "other.db") as (url, runs):
        before = evaluated(url, 2)
        assert counters(runs, folder, "other.db")["generation"] == 0
        with training_on(url) as dataset:
            steps = [(dataset.sample_index, dataset.digest) for _ in islice(dataset, 5)]
            threads = [
                threading.Thread(target=lambda w=w: found.append(evaluated(url, w, 2)))  # type: ignore[misc]
                for w in (1, 3)
            ]
            for thread in threads:
                thread.start()
            steps += [(dataset.sample_index, dataset.digest) for _ in islice(dataset, 5)]
            for thread in threads:
                thread.join()
            # In the midst of training, on the thread that trains.
            found.append(evaluated(url, 1, 3))
            steps += [(dataset.sample_index, dataset.digest) for _ in dataset]
        assert counters(runs, folder, "other.db") == undisturbed
        assert evaluated(url, 4, 1) == before
    assert steps == alone
    assert found == [before] * 3


def test_a_dataset_begins_anew_each_time_and_has_no_state(held: Held) -> None:
    with evaluating(held.url, 2, rank=0, world_size=1, samples=9) as dataset:
        assert len(dataset) == 5
        first = list(islice(dataset, 3))
        assert (dataset.sample_index, dataset.generation, dataset.total_tokens) == (6, 0, 6 * 8)
        assert dataset.real_tokens == first[-1]["real_tokens"] > 0
        again = list(dataset)
        assert all_of(again[:3]) == all_of(first)
        assert len(again) == 5
        assert not hasattr(dataset, "state_dict")
        with training_on(held.url) as training:
            next(iter(training))
            with training.evaluation(samples=9) as same:
                assert all_of(same) == all_of(again)
            with pytest.raises(TypeError, match=r"no len\(\)"):
                len(training)
            assert training


def test_where_there_are_fewer_samples_these_are_evaluated_on(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tokenloom"):
        assert evaluated(held.url, 2, samples=10**6) == held.whole
    assert f"stream validation has {len(held.whole)} samples, not 1000000" in caplog.text


def test_what_cannot_be_evaluated_is_refused_with_what_there_is(held: Held, folder: Path) -> None:
    for stream, says in (
        ("valid", "has no stream 'valid'; it has 'train', 'validation'"),
        ("validation/wiki", f"has no source 'wiki'; it has 'code', 'docs', '{PROSE}', '{WIKI}'"),
    ):
        with pytest.raises(tokenloom.NotFound, match=re.escape(says)):
            evaluated(held.url, stream=stream)
    with pytest.raises(tokenloom.JoinRefused, match="take another batch size"):
        evaluated(held.url, batch_size=2**24)
    none = pytest.raises(
        tokenloom.NotFound, match="has no sample: all of its documents together fill none"
    )
    with serving(folder, held_out(1e-9)) as (url, _), none:
        evaluated(url)
    for options, says in (
        ({"stream": "train"}, "stream='train' is trained on: use RemoteDataset"),
        ({"batch_size": None}, "batch_size is missing"),
        ({"batch_size": [(0, 2)]}, "batch_size must be an integer of at least 1"),
        ({"samples": 0}, "samples must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=says):
            EvaluationDataset(**{"url": url, "batch_size": 2} | options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size is missing"):
        training_on(url, [(0, 2)]).evaluation()


def test_losses_of_a_stream_beside_training_have_the_names_of_its_sources_and_are_not_reported(
    folder: Path,
) -> None:
    with serving(folder, held_out(tail="pad")) as (url, _), evaluating(url, 4) as dataset:
        source_loss = tokenloom.SourceLoss(dataset)
        for batch in dataset:
            source_loss.add(batch["source_ids"].double() + 2, batch)
        with pytest.raises(ValueError, match="EvaluationDataset takes no part in the training"):
            source_loss.log()
        source_loss.add(batch["source_ids"].double() + 2, batch)
        found = source_loss.reduce()
        assert set(found.losses) <= {source.alias for source in dataset.sources}
        assert all(loss == source + 2 for source, (loss, _) in found.by_id.items())


def with_benchmark(**fields: Any) -> dict[str, Any]:
    """A run with a stream that has files of its own, two epochs of them."""
    source = {"source": "jsonl:bench/*.jsonl:text", "alias": "bench", "epochs": 2}
    streams = {"benchmark": {"mixture": node("weighted", source | fields)}}
    return mixture(streams=streams, tail="pad")


def test_a_stream_with_files_of_its_own_stays_what_it_was(folder: Path) -> None:
    rows = text_rows(12, 50, 9)
    write_jsonl(folder / "bench/a.jsonl", rows)
    with serving(folder, mixture(tail="pad")) as (url, _):
        trained(url, 4)
    # A run that trains may get one.
    with serving(folder, with_benchmark()) as (url, _):
        first = evaluated(url, 2, 3, stream="benchmark")
        assert documents(first, 0) == Counter(tuple(row.encode()) for row in rows * 2 if row)
        with pytest.raises(tokenloom.NotFound, match="it has 'train', 'benchmark'"):
            evaluated(url)
        trained(url, 4, attempt="b", resume="latest")
    write_jsonl(folder / "bench/b.jsonl", text_rows(12, 51, 9))
    with serving(folder, with_benchmark()) as (url, _):
        assert evaluated(url, 3, 1, stream="benchmark") == first
    another = pytest.raises(
        ConfigError, match=r"streams.benchmark: its mixture is not the one that it began with"
    )
    with another, serving(folder, with_benchmark(epochs=1)):
        pass
    write_jsonl(folder / "bench/a.jsonl", rows[1:])
    with pytest.raises(SourceChanged, match=r"a\.jsonl"), serving(folder, with_benchmark()):
        pass


def test_sources_of_every_phase_are_validated(folder: Path) -> None:
    later = node("weighted", {"source": WIKI, "holdout": SHARE}, {"source": PROSE})
    earlier = node("sequential", {"source": CODE, "holdout": SHARE}, {"source": DOCS})
    phases = [{"until_tokens": 80}, {"mixture": later}]
    with serving(
        folder, mixture(mixture=earlier, phases=phases, last_micro_step="pad", tail="pad")
    ) as (url, _):
        found = evaluated(url)
        with training_on(url) as training:
            next(iter(training))
            ids = {source.spec: source.id for source in training.sources}
    assert {sample.source for sample in found} == {ids[CODE], ids[WIKI]}
    for spec in (CODE, WIKI):
        held = Counter(row for row, is_out in rows_of(spec) if is_out)
        assert documents(found, ids[spec]) == held


def test_a_fault_is_told_behind_what_is_good_and_tried_again(folder: Path) -> None:
    rows = text_rows(40, 60, 9)
    write_txt(folder / "bench.txt", rows)
    streams = {"bench": {"mixture": node("weighted", {"source": "txt:bench.txt:text"})}}
    content = (folder / "bench.txt").read_bytes()
    half = content.index(b"\n", len(content) // 2) + 1
    (folder / "bench.txt").write_bytes(content[:half] + b"\xff\xfe\n" + content[half:])
    with serving(folder, mixture(streams=streams)) as (url, _):
        good = evaluated(url, samples=4, stream="bench")
        for _ in range(2):
            with pytest.raises(tokenloom.TokenloomError, match=r"bench\.txt"):
                evaluated(url, stream="bench")
            assert evaluated(url, 2, 1, samples=4, stream="bench") == good
        # All that lies before the fault is there, sample by sample.
        assert len(evaluated(url, samples=half // 8 - 1, stream="bench")) == half // 8 - 1


def never() -> bool:
    return False


def steps_of(evaluation: Evaluation) -> Iterator[Slice]:
    while not isinstance(found := evaluation.next(20.0, never), EndOfData):
        assert not isinstance(found, Waiting)
        yield found


def test_a_stream_goes_on_where_it_broke_and_nowhere_else(held: Held) -> None:
    call = EvaluationCall(stream="validation", rank=1, world_size=2, batch_size=3, samples=40)
    served = held.runs.get("test")
    assert served.evaluations.join(call)[1] == 40
    whole = served.evaluations.open(served.coordinator.uid, call, 0, digest_hex(0))
    whole.progress(0, 100)
    (first,) = steps_of(whole)
    assert (first.begin, first.ends[-1]) == (0, 40)
    again = served.evaluations.open(served.coordinator.uid, call, 12, first.digests[1])
    again.progress(12, 2)
    part = again.next(20.0, never)
    assert isinstance(part, Slice)
    assert (part.begin, part.ends) == (12, [18, 24])
    assert part.samples == first.samples[6:12]
    # That was the credit.
    assert again.next(0.05, never) == Waiting("")
    again.progress(18, 2)
    more = again.next(20.0, never)
    assert isinstance(more, Slice)
    assert more.ends == [30]
    with pytest.raises(OrderMismatch, match="sample 12 of stream 'validation' has digest"):
        served.evaluations.open(served.coordinator.uid, call, 12, first.digests[0]).next(
            20.0, never
        )


def test_the_samples_of_a_server_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = EvaluationCall(stream="validation", rank=0, world_size=1, batch_size=1, samples=0)
    with serving(folder, held_out()) as (url, runs):
        served = runs.get("test")
        size = served.coordinator.order.form.sample_bytes
        monkeypatch.setattr("tokenloom_server.replay.evaluation.MAX_KEPT_BYTES", 30 * size)
        with pytest.raises(LimitExceeded, match="ask for fewer"):
            served.evaluations.join(call)
        assert len(evaluated(url, samples=30)) == 30


def test_a_token_for_reading_is_enough(held: Held) -> None:
    with over_grpc(held.runs, Access(control="c" * 32, read="r" * 32)) as address:
        guarded = f"grpc://{address}/test"
        assert evaluated(guarded, 2, token="r" * 32) == held.whole
        with pytest.raises(tokenloom.Unauthenticated):
            evaluated(guarded)
        with pytest.raises(tokenloom.Forbidden):
            trained(guarded, token="r" * 32)


def test_a_run_within_the_process_evaluates_on_the_same(held: Held, folder: Path) -> None:
    (folder / "mixture.yaml").write_text(yaml.safe_dump(held_out()), encoding="utf-8")
    with LocalDataset(folder / "mixture.yaml", 2) as training, training.evaluation() as validation:
        next(iter(training))
        for _ in range(2):
            found = dict(each for batch in validation for each in samples_of(batch))
            assert [found[at] for at in range(len(found))] == held.whole


def test_streams_are_told_of(folder: Path) -> None:
    write_jsonl(folder / "bench/a.jsonl", text_rows(12, 50, 9))
    document = held_out(0.25) | {"streams": with_benchmark()["streams"]}
    with serving(folder, document) as (_, runs):
        assert runs.get("test").stats.read().streams == ["benchmark", "validation"]
    told = CliRunner().invoke(
        app, ["validate", str(folder / "mixture.yaml")], env={"COLUMNS": "200"}
    )
    assert told.exit_code == 0, told.output
    assert "stream to evaluate on: benchmark, of jsonl:bench/*.jsonl:text (1 files)" in told.output
    assert (
        f"stream to evaluate on: validation, of 0.25 of code, 0.25 of docs, 0.25 of {PROSE}"
        in told.output
    )


def test_a_sample_can_be_traced_to_its_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several turns, so that a trace begins at more than one state.
    monkeypatch.setattr("tokenloom_server.replay.evaluation.TURN_TOKENS", 8 * 16)
    with serving(folder, held_out()) as (url, runs):
        traced = runs.get("test").companion(Traces).evaluated
        with pytest.raises(BeyondHorizon, match="was not evaluated on since this server started"):
            traced("validation", 0, False)
        samples = evaluated(url)
        with pytest.raises(BeyondHorizon, match=f"which made {len(samples)} of its samples"):
            traced("validation", len(samples), False)
        with pytest.raises(NotFound, match="no stream 'valid'"):
            traced("valid", 0, False)
        for index, sample in [*enumerate(samples)][::3]:
            found = traced("validation", index, True)
            assert found.status == "evaluated"
            assert (found.sample, found.source_id) == (index, sample.source)
            assert found.ids == list(sample.ids)
            for document in found.documents:
                row = ROWS[SOURCES[sample.source]][document.shard_index][document.row]
                content = row.encode() if isinstance(row, str) else bytes(0)
                tokens = [*(content or row), 256]
                assert (
                    tokens[document.begin : document.end]
                    == found.ids[document.position :][: document.end - document.begin]
                )


def test_the_page_of_docs_runs_as_it_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = re.findall(r"```python\n(.*?)```", DOCS_PAGE.read_text(encoding="utf-8"), re.S)
    assert len(code) == 1
    with serving(folder, held_out(sequence_length=32)) as (url, _):
        (folder / "page.py").write_text(code[0], encoding="utf-8")
        runpy.run_path(str(folder / "page.py"), {"url": url})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    assert all(
        re.fullmatch(r"step \d+  loss \d+\.\d+  validation \d+\.\d+", line) for line in lines
    )
