"""Packing: how many documents are cut, how full samples are, and what it costs, over this Python's own library.

    python -m benchmarks.packing --folder /tmp/packing        # the text is read and tokenised there once

Every file of Python and of documentation below the roots is a document. Ids are read from Parquet, so that the figures
in ns per token are those of packing and not of a tokeniser; ``concat`` is what everything before it costs, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.order import builder
from tokenloom_server.tokenizer.choose import EngineRecord, load_engine
from tokenloom_server.tokenizer.definition import find_tokenizer
from tokenloom_server.tokenizer.documents import DocumentEncoder

from benchmarks.corpora import TextCorpus

LENGTHS = (2_048, 8_192, 32_768)
PACKINGS: dict[str, dict[str, Any]] = {
    "concat": {},
    "best_fit": {"packing": "best_fit"},
    "best_fit, 512 rows": {"packing": "best_fit", "pack_window_rows": 512},
    "none": {"packing": "none"},
}
COLUMNS = (
    "length",
    "packing",
    "documents cut",
    "filled",
    "samples",
    "tokens lost",
    "ns/token",
    "sample 0 after",
)


def prepare(folder: Path, roots: tuple[Path, ...], megabytes: int) -> None:
    """Files of ids below the folder, unless they are there."""
    if (folder / "ids.parquet").exists():
        return
    text = folder / "text"
    TextCorpus(name="packing", megabytes=megabytes, roots=roots, files=(1, 1, 1)).make(text)
    definition = find_tokenizer("text/tokenizer.json", folder)
    record = EngineRecord(
        digest=definition.digest, engine="tokenizers", version=version("tokenizers")
    )
    encoder = DocumentEncoder(
        load_engine(definition, record, "text"), vocab_size=definition.vocab_size
    )
    texts = pa.chunked_array(
        [
            column
            for path in sorted(text.glob("parquet/*/*.parquet"))
            for column in pq.read_table(path)["text"].chunks
        ]
    )
    found = [encoder.encode(chunk) for chunk in texts.chunks]
    lists = [
        pa.ListArray.from_arrays(np.append(0, each.ends).astype(np.int32), each.values)
        for each in found
    ]
    rows = pa.chunked_array(lists).combine_chunks()
    # As a corpus has them: in no order.
    order = np.random.default_rng(0).permutation(len(rows))
    pq.write_table(
        pa.table({"ids": rows.take(pa.array(order))}), folder / "ids.parquet", row_group_size=256
    )


def lengths_of(folder: Path) -> npt.NDArray[np.int64]:
    """Tokens of each document, with its end of text."""
    found: npt.NDArray[np.int64] = (
        pq.read_table(folder / "ids.parquet")["ids"].combine_chunks().value_lengths().to_numpy()
    )
    return found[found > 0].astype(np.int64) + 1


def cut_by_concat(lengths: npt.NDArray[np.int64], length: int) -> int:
    """Documents that an edge of a sample lies in."""
    ends = np.cumsum(lengths)
    return int(((ends - 1) // length != (ends - lengths) // length).sum())


def measure(folder: Path, length: int, packing: dict[str, Any], runs: int) -> dict[str, float]:
    """One pass over the corpus, best of some."""
    document = {
        "run": "packing",
        "vocab_size": 65_536,
        "end_of_text_id": 65_535,
        "sequence_length": length,
        "mixture": {"policy": "sequential", "children": [{"source": "parquet:ids.parquet:ids"}]},
        **packing,
    }
    order = builder.create(
        config.parse(document, where="benchmark", catalog=open_catalog()), folder, None
    )
    seconds, first = [], []
    for _ in range(runs):
        pipeline = order.pipeline(order.initial())
        began = time.process_time()
        pipeline.advance(1)
        first.append(time.process_time() - began)
        pipeline.advance(2**40)
        seconds.append(time.process_time() - began)
    state = pipeline.state()
    counts = state.sources[0].row_counts
    return {
        "samples": state.sample_index,
        "cut": counts.cut_documents,
        "lost": counts.lost_tokens,
        "filled": 1 - counts.padding_tokens / state.total_tokens,
        "ns": min(seconds) * 1e9 / (state.total_tokens - counts.padding_tokens),
        "first_ms": min(first) * 1e3,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packing", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tokenloom-packing"))
    parser.add_argument(
        "--root", type=Path, action="append", help="where to look for text; this Python's library"
    )
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    prepare(
        asked.folder,
        tuple(asked.root or (Path(sys.base_prefix), Path(sys.prefix))),
        asked.megabytes,
    )
    lengths = lengths_of(asked.folder)
    table = Table(*COLUMNS)
    for length in LENGTHS:
        for name, packing in PACKINGS.items():
            found = measure(asked.folder, length, packing, asked.runs)
            cut = cut_by_concat(lengths, length) if name == "concat" else found["cut"]
            table.add_row(
                f"{length:,}",
                name,
                f"{100 * cut / len(lengths):.2f} %",
                f"{100 * found['filled']:.2f} %",
                f"{found['samples']:,.0f}",
                f"{100 * found['lost'] / lengths.sum():.2f} %",
                f"{found['ns']:.2f}",
                f"{found['first_ms']:.0f} ms",
            )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(
        f"{len(lengths):,} documents, {lengths.sum():,} tokens, {np.median(lengths):,.0f} in the median"
    )
    console.print(table)


if __name__ == "__main__":
    main()
