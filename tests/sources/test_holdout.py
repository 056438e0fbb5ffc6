"""Documents that are kept out of training: each is on one side, whatever reads it, and in whichever order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from support.corpora import (
    CODE,
    id_rows,
    mixture,
    order_of,
    reread,
    text_rows,
    write_corpus,
    write_jsonl,
    write_txt,
)
from support.mixing import node
from support.prepared import job_of
from support.timelines import revised
from test_combinations import PACKINGS, SCHEMES, SHUFFLES, taken
from tokenloom_server.core.hashing import Purpose, draw
from tokenloom_server.errors import ConfigError
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.planning.forecast import Planner
from tokenloom_server.sources.base import Rows
from tokenloom_server.sources.wrapped import HoldoutSource, WrappedSource

SEED = 7
SHARE = 0.3


def of_one(spec: str, share: float | None = SHARE, **fields: Any) -> dict[str, Any]:
    """A mixture file of one source; fields of the run are those that it knows."""
    source = {"source": spec} | ({} if share is None else {"holdout": share})
    return mixture(mixture=node("sequential", source | fields), seed=SEED)


def both(order: PipelineFactory) -> tuple[Counter[bytes], Counter[bytes]]:
    """All samples that are trained on, and all that are held out."""
    out = builder.aside(order, order.config)
    return Counter(taken(order, order.initial())[0]), Counter(taken(out, out.initial())[0])


def is_held(content: bytes, share: float = SHARE, seed: int = SEED) -> bool:
    """Whether a document is held out, by the definition alone."""
    key = draw(seed, Purpose.HOLDOUT, 0, 0)
    return Fraction(xxhash.xxh3_64_intdigest(content, key), 2**64) < Fraction(str(share))


#: Every scheme, and every shuffle of one: what holds out knows of neither.
READ = [(scheme, "in file order") for scheme in SCHEMES] + [
    ("parquet", shuffle) for shuffle in SHUFFLES
][1:]


@pytest.mark.parametrize(("scheme", "shuffle"), READ)
def test_every_document_is_on_one_side_and_none_on_both(
    scheme: str, shuffle: str, tmp_path: Path
) -> None:
    spec = SCHEMES[scheme](tmp_path)
    options = SHUFFLES[shuffle]
    whole = order_of(
        tmp_path, of_one(spec, None, **options) | {"packing": "none", "sequence_length": 128}
    )
    order = order_of(
        tmp_path, of_one(spec, **options) | {"packing": "none", "sequence_length": 128}
    )
    # Of several lanes one may have nothing; evaluation reads in one.
    config = order.config.model_copy(
        update={"mixture": order_of(tmp_path, of_one(spec)).config.mixture}
    )
    out = builder.aside(order, config)
    kept = Counter(taken(order, order.initial())[0])
    held = Counter(taken(out, out.initial())[0])
    assert kept
    assert held
    assert not kept & held
    assert kept + held == Counter(taken(whole, whole.initial())[0])


@pytest.mark.parametrize(
    ("shuffle", "packing"),
    [("in file order", "concat"), ("rows", "unpacked"), ("rows in lanes", "best fit")],
)
def test_a_run_that_holds_out_goes_on_from_every_sample_index(
    shuffle: str, packing: str, tmp_path: Path
) -> None:
    source = {
        "source": SCHEMES["parquet"](tmp_path),
        "holdout": SHARE,
        "epochs": 2.5,
        **SHUFFLES[shuffle],
    }
    root = node("sequential", source)
    order = order_of(tmp_path, mixture(mixture=root, **PACKINGS[packing]))
    samples, states, ended = taken(order, order.initial())
    assert ended == "every source is exhausted"
    for at in range(0, len(samples), 7):
        state = reread(order, states[at])
        assert taken(order, state)[0] == samples[at + 1 :]


class Held(WrappedSource):
    """Rows as they are given."""

    def __init__(self, column: Any) -> None:
        self._rows = Rows(0, column)

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        yield self._rows


def sides(column: Any, share: float = SHARE) -> list[list[Any]]:
    """What each side gives of a column: trained on, held out."""
    columns = []
    for gives_held in (False, True):
        (rows,) = HoldoutSource(Held(column), share, SEED, gives_held=gives_held).read(0, 0)
        assert len(rows.column) == len(column)
        columns.append(rows.column.to_pylist())
    return columns


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize(
    "kind", [pa.list_(pa.uint16()), pa.large_list(pa.int32()), pa.list_(pa.int64())]
)
def test_ids_are_drawn_by_their_bytes(kind: Any, begin: int) -> None:
    rows = id_rows(200, 9, 20)
    kept, held = sides(pa.array(rows, kind).slice(begin))
    width = kind.value_type.to_pandas_dtype()
    for row, trained, out in zip(rows[begin:], kept, held, strict=True):
        expected = ([], row) if is_held(np.array(row, width).tobytes()) else (row, [])
        assert (trained, out) == expected
    assert any(held)


@pytest.mark.parametrize(("share", "count"), [(SHARE, 200), (0.5, 200), (0.001, 20_000)])
@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_text_is_drawn_by_its_bytes(kind: Any, begin: int, share: float, count: int) -> None:
    rows = [f"{i} ä" for i in range(count)]
    is_out = [is_held(row.encode(), share) for row in rows[begin:]]
    kept, held = sides(pa.array(rows, kind).slice(begin), share)
    assert held == [row if out else "" for row, out in zip(rows[begin:], is_out, strict=True)]
    assert kept == ["" if out else row for row, out in zip(rows[begin:], is_out, strict=True)]
    assert any(is_out)


def test_a_mask_stays_beside_its_ids() -> None:
    rows = id_rows(200, 9, 20)
    masks = [[at % 2 for at in range(len(row))] for row in rows]
    ids = pa.array(rows, pa.list_(pa.uint16()))
    column = pa.StructArray.from_arrays(
        [ids, pa.array(masks, pa.list_(pa.uint8()))], ["ids", "mask"]
    )
    for (kept, own), row in zip(zip(*sides(column), strict=True), rows, strict=True):
        assert [] in (kept["ids"], own["ids"])
        assert row in (kept["ids"], own["ids"])
        assert [len(side["ids"]) for side in (kept, own)] == [
            len(side["mask"]) for side in (kept, own)
        ]


def test_another_seed_holds_out_others_and_copies_and_moved_files_are_where_they_were(
    tmp_path: Path,
) -> None:
    rows = text_rows(60, 3, 9)
    write_txt(tmp_path / "a.txt", rows)
    write_jsonl(tmp_path / "b/one.jsonl", rows[:40])
    write_jsonl(tmp_path / "b/two.jsonl", [*rows[40:], *rows])
    lines = {"packing": "none", "sequence_length": 128}
    one = order_of(tmp_path, of_one("txt:a.txt:text") | lines)
    two = order_of(tmp_path, of_one("jsonl:b/*.jsonl:text", shuffle="rows") | lines)
    other = order_of(tmp_path, of_one("txt:a.txt:text") | lines | {"seed": 8})
    assert set(both(one)[1]) == set(both(two)[1])
    assert set(both(one)[0]) == set(both(two)[0])
    assert both(two)[1] == both(one)[1] + both(one)[1]
    assert both(one)[1] != both(other)[1]


def test_rows_that_are_bad_or_filtered_are_counted_once_and_never_evaluated_on(
    tmp_path: Path,
) -> None:
    lines = [f'{{"text": "{text}", "n": {i % 3}}}' for i, text in enumerate(text_rows(60, 3, 9))]
    lines[::10] = ["no JSON"] * 6
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    fields = {"filter": "n > 0", "on_bad_row": "skip"}
    order = order_of(tmp_path, of_one("jsonl:a.jsonl:text", **fields) | {"tail": "pad"})
    whole = order_of(tmp_path, of_one("jsonl:a.jsonl:text", None, **fields) | {"tail": "pad"})
    out = builder.aside(order, order.config)
    ends = [taken(each, each.initial())[1][-1].sources[0] for each in (order, whole, out)]
    assert ends[0].rows == ends[1].rows
    assert ends[0].row_counts[:2] == ends[1].row_counts[:2]
    assert ends[0].row_counts[0] == 6
    assert ends[2].row_counts[:2] == (0, 0)


def test_a_plan_knows_what_is_held_out(tmp_path: Path) -> None:
    order = order_of(write_corpus(tmp_path), of_one(CODE, shuffle="none") | {"tail": "pad"})
    planned = Planner().plan(Timeline(order), order.initial(), None)
    given = len(taken(order, order.initial())[0])
    assert planned.until_tokens == pytest.approx(8 * given, abs=8)
    whole = order_of(tmp_path, of_one(CODE, None) | {"tail": "pad"})
    assert given < len(taken(whole, whole.initial())[0])


def test_what_is_prepared_has_every_document(tmp_path: Path) -> None:
    write_txt(tmp_path / "a.txt", text_rows(20, 3, 9))
    assert job_of(tmp_path, of_one("txt:a.txt:text")).order.config.sources[0].holdout is None


def test_a_revision_cannot_change_what_is_held_out(tmp_path: Path) -> None:
    order = order_of(write_corpus(tmp_path), of_one(CODE))
    changed = of_one(CODE, 0.1)["mixture"]
    with pytest.raises(
        ConfigError, match=r"holdout is 0\.3 in this run and 0\.1 in the new mixture"
    ):
        revised(Timeline(order), 8, mixture=changed)
