"""Rows that another loader had given: no sample of the first epoch has them, all of the later ones do."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.corpora import CODE, ROWS, mixture, order_of, parsed, write_corpus, write_parquet
from support.timelines import revised
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.core.state import SourceState
from tokenloom_server.errors import ConfigError, SourceChanged
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.size_estimates import measure
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.packing.tokenized_rows import DocumentSpan
from tokenloom_tools.prepare.job import Job

Flags = npt.NDArray[Any]
#: The rows of ``CODE``, file after file; every third was seen, and none of the last ones.
NUMBERS = [(shard, row) for shard, rows in enumerate(ROWS[CODE]) for row in range(len(rows))]
SEEN = np.array([i % 3 == 1 and i < 20 for i in range(len(NUMBERS))])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def listed(folder: Path, flags: Flags, name: str = "seen.npy") -> dict[str, str]:
    """Writes a file of flags; the section that names it."""
    np.save(folder / name, flags)
    return {"file": name, "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()}


def document(
    seen: dict[str, str] | None, run: dict[str, Any] | None = None, **source: Any
) -> dict[str, Any]:
    fields = {"source": CODE, "epochs": 2, **({"seen": seen} if seen else {}), **source}
    return mixture(
        mixture={"policy": "weighted", "children": [fields]}, on_bad_row="skip", **(run or {})
    )


def spans(order: PipelineFactory, state: SourceState | None = None) -> list[list[DocumentSpan]]:
    return list(order.spans(0, state or SourceState(), 10**6))


def read(samples: list[list[DocumentSpan]]) -> Counter[tuple[int, tuple[int, int]]]:
    """The tokens of each epoch and row."""
    tokens: Counter[tuple[int, tuple[int, int]]] = Counter()
    for sample in samples:
        for span in sample:
            tokens[span.epoch, (span.shard, span.row)] += span.end - span.begin
    return tokens


@pytest.mark.parametrize(
    "run",
    [
        {"tail": "pad"},
        {"packing": "best_fit", "pack_window_tokens": 64},
        {"packing": "none", "long_rows": "split"},
    ],
    ids=["concat", "best_fit", "none"],
)
@pytest.mark.parametrize(
    "source",
    [
        {},
        {"shuffle": "shards"},
        {"shuffle": "rows", "shuffle_window_rows": 6},
        {"lanes": 2},
        {"epochs": 1.5},
    ],
    ids=["files", "shards", "rows", "lanes", "part"],
)
def test_a_row_that_was_seen_comes_in_every_epoch_but_the_first(
    folder: Path, run: dict[str, Any], source: dict[str, Any]
) -> None:
    plain = read(spans(order_of(folder, document(None, run, **source))))
    order = order_of(folder, document(listed(folder, SEEN), run, **source))
    samples = spans(order)

    assert read(samples) == {
        (epoch, row): tokens
        for (epoch, row), tokens in plain.items()
        if epoch or not SEEN[NUMBERS.index(row)]
    }
    # From the state after any sample the rest comes.
    pipeline = order.pipeline(order.initial())
    for index in range(0, len(samples), 7):
        pipeline.advance(index - pipeline.state().sample_index)
        assert read(spans(order, pipeline.state().sources[0])) == read(samples[index:])


def test_rows_that_are_left_out_by_a_revision_stay_out_beside_those_that_were_seen(
    folder: Path,
) -> None:
    (folder / "out.csv").write_text("spec,shard,row\n" + f"{CODE},data/code-0.parquet,0\n")
    timeline = Timeline(order_of(folder, document(listed(folder, SEEN))))
    order = revised(timeline, 1, exclude={"file": "out.csv"}).at(1)

    tokens = read(spans(order))
    assert not {(0, (0, 0)), (1, (0, 0)), (0, NUMBERS[1])} & tokens.keys()
    assert (1, NUMBERS[1]) in tokens


def test_files_that_come_later_were_not_seen(folder: Path) -> None:
    write_parquet(folder / "grown/code-0.parquet", ROWS[CODE][0])
    first = SEEN[: len(ROWS[CODE][0])]
    fields = document(
        listed(folder / "grown", first), source="parquet:code-*.parquet:ids", alias="code"
    )
    timeline = Timeline(order_of(folder / "grown", fields))
    write_parquet(folder / "grown/code-1.parquet", ROWS[CODE][1])

    tokens = read(spans(revised(timeline, 1, append_files=["code"]).at(1)))
    whole = read(spans(order_of(folder, document(None))))
    gone = {(0, row) for row, seen in zip(NUMBERS, first, strict=False) if seen}
    assert tokens.keys() == whole.keys() - gone
    # As it is now the source is another one, and a new run would take nothing of its last rows for unseen.
    with pytest.raises(
        ConfigError,
        match=r"holds bool of shape \(14,\), expected one bool for each of the source's 26",
    ):
        order_of(folder / "grown", fields)


def test_what_is_left_is_what_is_measured(folder: Path) -> None:
    whole = measure(order_of(folder, document(None)), 0).epoch_tokens
    left = measure(order_of(folder, document(listed(folder, SEEN))), 0).epoch_tokens
    endless = measure(
        order_of(folder, document(listed(folder, SEEN), epochs="inf")), 0
    ).epoch_tokens

    assert left == pytest.approx(whole * (1 - SEEN.sum() / (2 * len(NUMBERS))), abs=2)
    assert endless == whole


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            np.ones(3, np.bool_),
            r"holds bool of shape \(3,\), expected one bool for each of the source's 26 rows",
        ),
        (np.ones(26, np.int64), "holds int64 of shape"),
        (np.ones((26, 1), np.bool_), r"holds bool of shape \(26, 1\)"),
        (np.array([{}], object), "cannot be read.*numpy.save"),
    ],
)
def test_a_file_that_holds_no_flags_of_the_source_is_refused_at_once(
    folder: Path, flags: Flags, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"seen.file: 'other.npy' .*{reason}"):
        order_of(folder, document(listed(folder, flags, "other.npy")))


def test_a_file_that_is_not_what_it_was_is_refused(folder: Path) -> None:
    seen = listed(folder, SEEN, "changed.npy")
    listed(folder, ~SEEN, "changed.npy")

    with pytest.raises(SourceChanged, match=f"another content now.*expected {seen['sha256']}"):
        order_of(folder, document(seen))


def test_a_file_beyond_the_data_roots_is_refused(folder: Path) -> None:
    seen = listed(folder.parent, SEEN, "outside.npy") | {"file": "../outside.npy"}

    with pytest.raises(
        ConfigError, match=r"children\.0\.seen\.file: '\.\./outside\.npy' lies below no data root"
    ):
        builder.create(parsed(document(seen)), folder, None, DataRoots.of([folder]))


def test_what_cannot_be_beside_it_is_refused(folder: Path) -> None:
    seen = listed(folder, SEEN)

    with pytest.raises(
        ConfigError, match="seen: another loader may have trained on the rows that holdout keeps"
    ):
        parsed(document(seen, holdout=0.1))
    with pytest.raises(
        ConfigError, match=r"seen is .* in this run and not given in the new mixture"
    ):
        revised(Timeline(order_of(folder, document(seen))), 1, mixture=document(None)["mixture"])
    job = {"form": "parquet", "shard_bytes": 1, "ids_too": True, "shuffled": False, "threads": 1}
    with pytest.raises(
        ConfigError, match=r"mixture\.children\.0\.seen: is of the files as they are"
    ):
        Job(parsed(document(seen)), folder, folder, DataRoots(), **job)  # type: ignore[arg-type]
