"""How good a shuffle is: what is left of the files' order in the order of the samples, and what it costs.

    python -m benchmarks.shuffle                    # a minute; writes benchmarks/results/ and docs/img/shuffle.svg
    python -m benchmarks.shuffle --rows 40000       # less

The corpus is made for it: every token of a document is the document's place in file order, so that a sample says itself
where it is from. Lengths are log-normal, and one document in a thousand is as long as two hundred samples; in the
corpus of *short* documents none is longer than a sample. What is *prepared* was written anew by ``tokenloom prepare``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.config.run import RunConfig
from tokenloom_server.order import builder
from tokenloom_tools.prepare.job import Job
from tokenloom_tools.prepare.preparer import prepare

from benchmarks import pictures
from benchmarks.results import FOLDER, Figures, Result, Row, show

ROWS = 400_000
FILES = 8
SEQUENCE_LENGTH = 512
MEAN_TOKENS, SIGMA = 160, 0.9
LONG_EVERY, LONG_TOKENS = 1_000, 200 * SEQUENCE_LENGTH
#: Samples that follow each other: of how many different hundredths of the source are they?
NEAR = 100
#: Points in the picture, for each way.
POINTS = 3_000
COLUMNS = {
    "rank correlation": "rank correlation",
    "spread of neighbours": "spread of neighbours",
    "of one document": "neighbours of one document",
    "longest run": "longest run of one document",
    "hundredths": "hundredths in 100 samples",
    "M tokens/CPU-s": "M tokens per CPU-s",
    "first ms": "first block ms",
}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to read the corpus, and with how many rows in a row group."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    row_group: int = 1_000
    short: bool = False
    prepared: bool = False


WINDOWED = {"shuffle": "rows"}
WAYS = (
    Way("none"),
    Way("shards", {"shuffle": "shards"}),
    Way("rows", WINDOWED),
    Way("rows, windows of 8,192", WINDOWED | {"shuffle_window_rows": 8_192}),
    Way("rows, row groups of 10,000", WINDOWED, 10_000),
    Way("rows, row groups of 50,000", WINDOWED, 50_000),
    Way("lanes: 16", {"lanes": 16}),
    Way("rows, lanes: 16", WINDOWED | {"lanes": 16}),
    Way("rows, lanes: 16, row groups of 50,000", WINDOWED | {"lanes": 16}, 50_000),
    Way("rows, prepared", WINDOWED, prepared=True),
    Way("rows, lanes: 16, prepared", WINDOWED | {"lanes": 16}, prepared=True),
    Way("short, rows", WINDOWED, short=True),
    Way("short, rows, prepared", WINDOWED, short=True, prepared=True),
)
#: Those that the picture shows.
DRAWN = ("none", "shards", "rows", "rows, lanes: 16")


def corpus(folder: Path, rows: int, row_group: int, *, short: bool = False) -> None:
    """``rows`` documents in ``FILES`` files below a folder, which is made."""
    folder.mkdir()
    rng = np.random.default_rng(7)
    lengths = np.maximum(
        rng.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, rows).astype(np.int64), 1
    )
    if short:
        lengths = np.minimum(lengths, SEQUENCE_LENGTH)
    else:
        lengths[LONG_EVERY // 2 :: LONG_EVERY] = LONG_TOKENS
    for file in range(FILES):
        first, behind = file * rows // FILES, (file + 1) * rows // FILES
        own = lengths[first:behind]
        offsets = np.concatenate(([0], np.cumsum(own)))
        ids = np.repeat(np.arange(first, behind, dtype=np.uint32), own)
        column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(ids))
        pq.write_table(
            pa.table({"ids": column}), folder / f"{file}.parquet", row_group_size=row_group
        )


def configured(rows: int, source: str, options: dict[str, Any]) -> RunConfig:
    """A run that reads a corpus once."""
    document = {
        "run": "shuffle", "seed": 7, "vocab_size": rows + 1, "end_of_text_id": rows, "add_eot": False,
        "sequence_length": SEQUENCE_LENGTH,
        "mixture": {"policy": "sequential", "children": [{"source": source, **options}]},
    }  # fmt: skip
    return config.parse(document, where="the benchmark", catalog=open_catalog())


def prepared(folder: Path, rows: int) -> None:
    """Shards of a corpus, in its folder below ``prepared``."""
    parsed = configured(rows, "parquet:*.parquet:ids", {})
    job = Job(
        parsed, folder, folder / "index", DataRoots(),
        form="arrow", shard_bytes=1 << 27, ids_too=True, shuffled=False, threads=2,
    )  # fmt: skip
    prepare(job, folder / "prepared", on_done=lambda *_: None, on_kept=lambda *_: None)


def measured(folder: Path, rows: int, way: Way) -> tuple[Figures, npt.NDArray[np.int64]]:
    """The figures of one epoch, and of each sample the document that it begins with."""
    spec = "parquet:*.parquet:ids"
    if way.prepared:
        if not (folder / "prepared").exists():
            prepared(folder, rows)
        spec = f"arrow:{next(folder.glob('prepared/sources/*')).relative_to(folder)}:ids"
    order = builder.create(configured(rows, spec, way.options), folder, None)
    packer = order.packers()(0, order.initial().sources[0])
    began, cpu = time.perf_counter(), time.process_time()
    first_ms, found = 0.0, []
    for block in packer.blocks():
        first_ms = first_ms or 1000 * (time.perf_counter() - began)
        found += [int.from_bytes(sample[:4], "little") for sample in block.ids]
    cpu = time.process_time() - cpu
    samples = np.array(found)
    count = len(samples)
    # Where each sample would stand if nothing was shuffled: by the document that it begins with.
    place = np.argsort(np.argsort(samples, kind="stable"), kind="stable")
    same = samples[1:] == samples[:-1]
    edges = np.flatnonzero(np.concatenate(([True], ~same, [True])))
    hundredths = place * 100 // count
    near = hundredths[: count // NEAR * NEAR].reshape(-1, NEAR)
    return {
        # Spearman's, of the order of the samples and the order in which they lie in the files.
        "rank correlation": float(np.corrcoef(np.arange(count), place)[0, 1]),
        # How far apart in the files two are that follow each other, where they are not of one document; 1: as far as
        # two that were drawn at random.
        "spread of neighbours": float(np.abs(np.diff(place))[~same].mean() / (count / 3)),
        "neighbours of one document": float(same.mean()),
        "longest run of one document": float(np.diff(edges).max()),
        "hundredths in 100 samples": float(np.mean([len(set(each)) for each in near.tolist()])),
        "M tokens per CPU-s": count * SEQUENCE_LENGTH / cpu / 1e6,
        "first block ms": first_ms,
    }, place


def drawn_at_random(count: int) -> Figures:
    """What the figures are of samples in an order that is drawn at random: what there is to reach."""
    place = np.random.default_rng(1).permutation(count)
    near = (place * 100 // count)[: count // NEAR * NEAR].reshape(-1, NEAR)
    return {
        "rank correlation": float(np.corrcoef(np.arange(count), place)[0, 1]),
        "spread of neighbours": float(np.abs(np.diff(place)).mean() / (count / 3)),
        "hundredths in 100 samples": float(np.mean([len(set(each)) for each in near.tolist()])),
    }


def run(rows: int) -> tuple[list[Row], dict[str, npt.NDArray[np.int64]]]:
    """Every way over the corpus; and what the picture is drawn from."""
    found, drawn = [], {}
    count = 0
    with tempfile.TemporaryDirectory(prefix="tokenloom-shuffle-") as folder:
        for row_group, short in sorted({(way.row_group, way.short) for way in WAYS}):
            corpus(Path(folder) / f"{row_group}-{short}", rows, row_group, short=short)
        for way in WAYS:
            figures, place = measured(Path(folder) / f"{way.row_group}-{way.short}", rows, way)
            found.append(Row(name=way.name, runs=[figures]))
            count = max(count, len(place))
            if way.name in DRAWN:
                drawn[way.name] = place
    found.append(Row(name="drawn at random", runs=[drawn_at_random(count)]))
    return found, drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    result = Result.begin(
        "shuffle",
        f"{arguments.rows} documents in {FILES} files, samples of {SEQUENCE_LENGTH} tokens",
    )
    result.rows, drawn = run(arguments.rows)
    result.save(arguments.folder / f"{result.date[:10]}-shuffle.json")
    show(result, COLUMNS)
    if arguments.folder == FOLDER:
        pictures.places(pictures.IMAGES / "shuffle.svg", drawn, POINTS)


if __name__ == "__main__":
    main()
