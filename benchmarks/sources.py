"""From file to flat ids: CPU time per token of `Source.read` and `DocumentEncoder.encode`, by scheme and stage.

One thread, on data that is made in a temporary folder. The best of several passes is shown: what other
programs take on a shared machine only ever adds. Text is this Python's own library, as bytes: what the
tokeniser's engine costs is not part of it.
"""

from __future__ import annotations

import argparse
import json
import resource
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.catalog import SourceCatalog
from tokenloom_server.sources.open import open_source
from tokenloom_server.tokenizer.documents import DocumentEncoder
from tokenloom_server.tokenizer.engine import BytesEngine

from benchmarks.corpora import END_OF_TEXT, write_megatron

VOCAB_SIZE = 32_000
DOCUMENT_TOKENS = 480
ROW_GROUP_ROWS = 1000


class Case(NamedTuple):
    label: str
    spec: str
    write: Callable[[Path], None]


class Cost(NamedTuple):
    tokens: int
    cpu_ns: float
    faults: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=10_000_000, help="token ids to write (default: %(default)s)"
    )
    parser.add_argument(
        "--passes", type=int, default=5, help="passes over each file (default: %(default)s)"
    )
    options = parser.parse_args()
    table = Table(
        title="ns of CPU per token, one thread",
        caption="faults: page faults per million tokens, read and encode",
    )
    for heading in (
        "source",
        "Mtokens",
        "read",
        "encode",
        "together",
        "faults",
        "open + last row, ms",
    ):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    with tempfile.TemporaryDirectory(prefix="tokenloom-sources-") as folder:
        for case in cases(options.tokens):
            case.write(Path(folder))
            table.add_row(case.label, *measure(case.spec, Path(folder), options.passes))
    Console().print(table)


def measure(spec: str, folder: Path, passes: int) -> tuple[str, ...]:
    source = open_source(SourceCatalog().spec(spec), folder, end_of_text_id=END_OF_TEXT)
    encoder = DocumentEncoder(
        BytesEngine(), vocab_size=VOCAB_SIZE, eot_id=END_OF_TEXT, ends_once=True
    )
    tokens = run(source, encoder).tokens
    read = min(run(source, None).cpu_ns for _ in range(passes)) / tokens
    both = min((run(source, encoder) for _ in range(passes)), key=lambda cost: cost.cpu_ns)
    last = source.row_count(0) - 1
    begin = time.process_time_ns()
    next(open_source(SourceCatalog().spec(spec), folder, end_of_text_id=END_OF_TEXT).read(0, last))
    opened_ms = (time.process_time_ns() - begin) / 1e6
    together = both.cpu_ns / tokens
    figures = (read, together - read, together)
    return (
        f"{tokens / 1e6:.1f}",
        *(f"{ns:.2f}" for ns in figures),
        f"{both.faults / tokens * 1e6:.0f}",
        f"{opened_ms:.1f}",
    )


def run(source: Source, encoder: DocumentEncoder | None) -> Cost:
    faults, begin, tokens = (
        resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        time.process_time_ns(),
        0,
    )
    for rows in source.read(0, 0):
        if encoder is not None:
            tokens += len(encoder.encode(rows.column, rows.first_row).values)
    cpu_ns = time.process_time_ns() - begin
    return Cost(tokens, cpu_ns, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)


def cases(tokens: int) -> list[Case]:
    rng = np.random.default_rng(0)
    count = max(1, tokens // DOCUMENT_TOKENS)
    lengths = np.maximum(4, rng.lognormal(np.log(DOCUMENT_TOKENS) - 0.4, 0.9, count)).astype(
        np.int64
    )
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    values = np.minimum(VOCAB_SIZE - 1, np.exp(rng.uniform(0, np.log(VOCAB_SIZE), lengths.sum())))
    wide = pa.table({"ids": pa.ListArray.from_arrays(offsets, pa.array(values.astype(np.int32)))})
    narrow = pa.table(
        {"ids": pa.ListArray.from_arrays(offsets, pa.array(values.astype(np.uint16)))}
    )
    texts = library_texts(tokens)
    text = pa.table({"text": texts})

    def parquet(
        name: str, table: pa.Table, rows: int = ROW_GROUP_ROWS, **options: object
    ) -> Callable[[Path], None]:
        return lambda folder: pq.write_table(
            table, folder / f"{name}.parquet", row_group_size=rows, **options
        )

    def arrow(
        name: str, new: Callable[..., pa.ipc.RecordBatchStreamWriter]
    ) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            (folder / name).mkdir()
            with (
                pa.OSFile(str(folder / name / "data.arrow"), "wb") as file,
                new(file, narrow.schema) as writer,
            ):
                writer.write_table(narrow, max_chunksize=ROW_GROUP_ROWS)

        return write

    owned = np.insert(values.astype(np.uint16), np.asarray(offsets)[1:], END_OF_TEXT)

    def megatron(folder: Path) -> None:
        write_megatron(folder / "owned", owned, lengths + 1)

    def flat(folder: Path) -> None:
        np.save(folder / "owned.npy", owned)

    def jsonl(folder: Path) -> None:
        (folder / "a.jsonl").write_bytes(
            b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
        )

    def txt(folder: Path) -> None:
        (folder / "a.txt").write_text("\n".join(texts), encoding="utf-8")

    return [
        Case("parquet int32, defaults", "parquet:defaults.parquet:ids", parquet("defaults", wide)),
        Case(
            "parquet int32, zstd",
            "parquet:zstd.parquet:ids",
            parquet("zstd", wide, compression="zstd"),
        ),
        Case(
            "parquet int32, groups of 100",
            "parquet:small.parquet:ids",
            parquet("small", wide, rows=100),
        ),
        Case("parquet uint16, defaults", "parquet:narrow.parquet:ids", parquet("narrow", narrow)),
        Case("arrow uint16, file", "arrow:file:ids", arrow("file", pa.ipc.new_file)),
        Case("arrow uint16, stream", "arrow:stream:ids", arrow("stream", pa.ipc.new_stream)),
        Case("megatron uint16, with ends", "megatron:owned", megatron),
        Case("npy uint16, with ends", "npy:owned.npy", flat),
        Case("parquet text, bytes", "parquet:text.parquet:text", parquet("text", text)),
        Case("jsonl text, bytes", "jsonl:a.jsonl:text", jsonl),
        Case("txt, bytes", "txt:a.txt:text", txt),
    ]


def library_texts(size: int) -> list[str]:
    """Modules of the standard library until they have so many bytes."""
    texts: list[str] = []
    left = size
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if left <= 0:
            break
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        left -= path.stat().st_size
    return texts


if __name__ == "__main__":
    main()
