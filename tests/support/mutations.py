"""Files that are no longer what was written: seeded mutations of small files, each read in a child process.

``python -m support.mutations FOLDER SEED COUNT FORMAT…``: for each mutation of each format a line with its number goes
out before it is read, and its outcome behind it, so that whoever started the child knows at which it died.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from support.catalog import spec_of

#: A mutation may take so long, seconds; the machine may be busy.
DEADLINE_S = 240
#: Memory that a child may ask for beside what it has when it begins.
MEMORY_BYTES = 2 << 30


class Format(NamedTuple):
    spec: str
    name: str
    write: Callable[[Path], None]
    #: Whether its checksums cover the rows, so that what is read is what was written, or an error. Those of Parquet do
    #: not cover headers and footers: there, one mutation in some thousands gives other rows.
    checked: bool


TEXTS = [f"row {i} " + "zwölf Boxkämpfer 🥊 " * (i % 5) for i in range(60)] + ["", None, "last"]
IDS = [[(i * 7919 + j) % 50_000 for j in range(i % 23)] for i in range(120)]


def _parquet(rows: list[Any], **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        columns = {"other": list(range(len(rows))), "column": rows}
        pq.write_table(pa.table(columns), path, row_group_size=40, **options)

    return write


def _nested(path: Path) -> None:
    column = pa.array([{"text": text, "n": i} for i, text in enumerate(TEXTS)])
    pq.write_table(pa.table({"meta": column}), path, row_group_size=40, write_page_checksum=True)


def _arrow(rows: Any, make: Any, **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        table = pa.table({"other": list(range(len(rows))), "column": rows})
        settings = pa.ipc.IpcWriteOptions(**options)
        with (
            pa.OSFile(str(path), "wb") as file,
            make(file, table.schema, options=settings) as writer,
        ):
            writer.write_table(table, max_chunksize=25)

    return write


def _jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps({"other": 1, "column": row}) + "\n" for row in rows).encode()


def _txt() -> bytes:
    return "".join((text or "") + "\n" for text in TEXTS).encode()


def _bytes(data: Callable[[], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data()) and None


def formats() -> dict[str, Format]:
    checked = {"write_page_checksum": True}
    dictionary = pa.array(TEXTS).dictionary_encode()
    views = pa.array(TEXTS).cast(pa.string_view())
    stream, file = pa.ipc.new_stream, pa.ipc.new_file
    parquet, arrow = ("parquet:a.parquet:column", "a.parquet"), ("arrow:.:column", "a.arrow")
    return {
        "parquet text": Format(*parquet, _parquet(TEXTS, **checked), True),
        "parquet plain text": Format(
            *parquet, _parquet(TEXTS, compression="none", use_dictionary=False), False
        ),
        "parquet ids": Format(*parquet, _parquet(IDS, **checked), True),
        "parquet ids v2": Format(
            *parquet, _parquet(IDS, data_page_version="2.0", compression="zstd", **checked), True
        ),
        "parquet nested": Format("parquet:a.parquet:meta.text", "a.parquet", _nested, True),
        "arrow stream text": Format(*arrow, _arrow(TEXTS, stream), False),
        "arrow stream ids": Format(*arrow, _arrow(IDS, stream, compression="lz4"), False),
        "arrow stream dictionary": Format(*arrow, _arrow(dictionary, stream), False),
        "arrow file text": Format(*arrow, _arrow(TEXTS, file, compression="zstd"), False),
        "arrow file ids": Format(*arrow, _arrow(IDS, file), False),
        "arrow file views": Format(*arrow, _arrow(views, file), False),
        "jsonl text": Format(
            "jsonl:a.jsonl:column", "a.jsonl", _bytes(lambda: _jsonl(TEXTS)), False
        ),
        "jsonl ids": Format("jsonl:a.jsonl:column", "a.jsonl", _bytes(lambda: _jsonl(IDS)), False),
        "txt": Format("txt:a.txt:text", "a.txt", _bytes(_txt), False),
        "jsonl gzip": Format(
            "jsonl:a.jsonl.gz:column",
            "a.jsonl.gz",
            _bytes(lambda: gzip.compress(_jsonl(TEXTS), mtime=0)),
            True,
        ),
        "txt zstd": Format(
            "txt:a.txt.zst:text",
            "a.txt.zst",
            _bytes(lambda: pa.Codec("zstd").compress(_txt(), asbytes=True)),
            False,
        ),
    }


#: Integers that sizes, counts and offsets are not.
_ABSURD = (0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, -(2**63))


def mutated(whole: bytes, draw: random.Random) -> bytes:
    """A mutation of a file."""
    data, at = bytearray(whole), draw.randrange(len(whole))
    # Headers and footers lie at the ends, and are looked at more than the rest.
    if draw.random() < 0.4:
        at = draw.choice(
            (
                draw.randrange(min(64, len(data))),
                len(data) - 1 - draw.randrange(min(700, len(data))),
            )
        )
    length = draw.choice((1, 2, 4, 8, 32, 200))
    match draw.randrange(9):
        case 0:
            data[at] ^= 1 << draw.randrange(8)
        case 1:
            for _ in range(draw.randrange(2, 20)):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case 2:
            size = draw.choice((4, 8))
            at -= at % 4
            data[at : at + size] = (draw.choice(_ABSURD) % 2 ** (8 * size)).to_bytes(size, "little")
        case 3:
            del data[at:]
        case 4:
            del data[at : at + length]
        case 5:
            data[at:at] = draw.randbytes(length)
        case 6:
            data[at:at] = data[draw.randrange(len(data)) :][:length]
        case 7:
            data[at : at + length] = bytes(min(length, len(data) - at))
        case 8:
            data[at : at + length] = draw.randbytes(min(length, len(data) - at))
    return bytes(data)


def _outcome(form: Format, folder: Path, skip: bool, known: list[Any]) -> str:
    """``rows``: those that were written. ``others``: other ones, each of its kind. Else what was raised."""
    from tokenloom_server.config.row_rules import RowRules
    from tokenloom_server.errors import SourceError
    from tokenloom_server.sources.base import Content
    from tokenloom_server.sources.open import open_source

    found: list[Any] = []
    bad = 0
    try:
        source = open_source(spec_of(form.spec), folder, None, None, rules=RowRules(skip_bad=skip))
        for rows in source.read(0, 0):
            bad += len(rows.bad)
            for row in rows.bad:
                assert form.name in row.reason, row.reason
                assert skip
            rows.column.validate(full=True)
            assert rows.column.null_count == 0
            values = rows.column.to_pylist()
            assert all(
                isinstance(value, str if source.content is Content.TEXT else list)
                for value in values
            )
            found += values
    except SourceError as error:
        if form.name not in str(error):
            return f"an error that does not name the file: {error}"
        # What came before it stands.
        return (
            "error"
            if not form.checked or found == known[: len(found)]
            else f"{len(found)} other rows, and {error}"
        )
    return "rows" if found == known and not bad else "others"


def main(folder: Path, seed: int, count: int, names: list[str]) -> None:
    import resource

    from tokenloom_server.sources import parquet_lists

    # So small files are left to Arrow otherwise.
    parquet_lists.MIN_VALUES = 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in names:
        (folder / name).mkdir()
        _mutate(name, folder / name, seed, count)


def _mutate(name: str, folder: Path, seed: int, count: int) -> None:
    import faulthandler
    import resource

    form = formats()[name]
    path = folder / form.name
    form.write(path)
    whole = path.read_bytes()
    known = [row or ([] if "ids" in name else "") for row in (IDS if "ids" in name else TEXTS)]
    first = _outcome(form, folder, False, known)
    assert first == "rows", first
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    for number in range(count):
        print(json.dumps({"of": name, "begins": number}), flush=True)
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
        path.write_bytes(mutated(whole, random.Random(f"{seed} {name} {number}")))
        try:
            outcome = _outcome(form, folder, bool(number % 2), known)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        print(json.dumps({"of": name, "ends": number, "outcome": outcome}), flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
