"""What it costs to know a source of many files: their fingerprints when a run is created, and where their blocks begin.

    python -m benchmarks.block_index                # 100, 1,000 and 10,000 Parquet files of five row groups
    python -m benchmarks.block_index --files 10000 --runs 5

The index of blocks is what a shuffle of rows, lanes and fractions of an epoch need; reading from file to file needs
none. The files are links to ten: their content comes from the page cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tokenloom_server.config.catalog import Spec
from tokenloom_server.sources import row_index
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.catalog import SourceCatalog
from tokenloom_server.sources.open import open_source
from tokenloom_server.sources.scheme import scheme_of

from benchmarks import corpora
from benchmarks.results import FOLDER, Result, Row, show

FILES = (100, 1_000, 10_000)
COLUMNS = {
    "fingerprints s": "fingerprints s",
    "index s": "index s",
    "index CPU s": "index CPU s",
    "kept index s": "kept index s",
}


def measure(files: int, runs: int) -> Row:
    """A source of so many files."""
    folder = corpora.folder_of(corpora.shards_corpus(files))
    spec = SourceCatalog().spec(f"parquet:{folder}/parquet/0/*.parquet:ids")
    shards = scheme_of(spec).shards(spec, folder)
    row = Row(name=f"{files:,} files", at={"files": files})
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as kept:
            look_up = partial(_look_up, spec, shards, folder, Path(kept))
            fingerprints, _ = _took(partial(scheme_of(spec).shards, spec, folder))
            index, cpu = _took(look_up)
            again, _ = _took(look_up)
        row.runs.append(
            {
                "fingerprints s": fingerprints,
                "index s": index,
                "index CPU s": cpu,
                "kept index s": again,
            }
        )
    return row


def _look_up(spec: Spec, shards: tuple[Shard, ...], folder: Path, index_dir: Path) -> None:
    blocks = row_index.blocks(open_source(spec, folder, shards), spec, folder, index_dir)
    assert len(blocks) == len(shards)


def _took(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall clock, and of CPU."""
    began, cpu = time.monotonic(), time.process_time()
    work()
    return time.monotonic() - began, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, action="append", help="of a source; may be repeated")
    parser.add_argument("--runs", type=int, default=3, help="of each (default 3)")
    parser.add_argument("--json", type=Path, help=f"where the result goes (default below {FOLDER})")
    options = parser.parse_args()
    result = Result.begin("block-index", "a source of many Parquet files")
    result.rows += [measure(files, options.runs) for files in options.files or FILES]
    show(result, COLUMNS)
    print(
        f"written to {result.save(options.json or FOLDER / f'{result.date[:10]}-block-index.json')}"
    )


if __name__ == "__main__":
    main()
