"""How much a source has, against counting it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import corpora
from support.corpora import advanced
from tokenloom_server.order import size_estimates
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.packing.documents import Documents
from tokenloom_server.sources.lines import LinesSource
from tokenloom_server.tokenizer.documents import Documents as Encoded


def counted(order: PipelineFactory, source_id: int) -> tuple[int, int]:
    """Rows and tokens of one epoch, by reading it whole."""
    reader = order.readers.open(source_id)
    documents = Documents("", reader, order.encoder(source_id, reader), 1)
    pieces = list(documents.read(None))
    return sum(len(piece.ends) for piece in pieces), sum(len(piece.ids) for piece in pieces)


def measured(order: PipelineFactory, source_id: int = 0) -> tuple[int, int]:
    """Rows and tokens of one epoch, as measured."""
    found = size_estimates.measure(order, source_id)
    return found.epoch_rows, found.epoch_tokens


def order_over(folder: Path, *specs: str) -> PipelineFactory:
    return corpora.order_of(folder, corpora.flat(specs))


def long_rows(count: int, salt: int, low: int, high: int) -> list[str]:
    return ["x" * length for length in corpora.numbers(count, salt, low, high)]


def test_a_source_that_is_read_whole_is_counted_exactly(tmp_path: Path) -> None:
    order = corpora.order_of(corpora.write_corpus(tmp_path))
    for source_id in range(len(order.record.specs)):
        assert measured(order, source_id) == counted(order, source_id)


def test_begin_and_end_of_text_ids_are_counted_as_the_packer_puts_them(tmp_path: Path) -> None:
    corpora.write_parquet(tmp_path / "a.parquet", [[1, 2, 3], [], [4, 257], None])
    fields = {"begin_of_text_id": 256, "end_of_text_id": 257}
    spec = "parquet:a.parquet:ids"
    for add_bos, add_eot, tokens in (
        (False, False, 5),
        (False, True, 7),
        (True, True, 9),
        (True, "auto", 8),
    ):
        order = corpora.order_of(
            tmp_path, corpora.flat([spec], add_bos=add_bos, add_eot=add_eot, **fields)
        )
        assert measured(order) == (4, tokens)


def test_small_shards_of_very_different_size_are_all_looked_at(tmp_path: Path) -> None:
    for shard in range(70):
        corpora.write_txt(
            tmp_path / f"{shard:02}.txt", ["x" * (100_000 if shard in (7, 33) else 10)] * 8
        )
    order = order_over(tmp_path, "txt:*.txt:text")
    assert measured(order) == counted(order, 0)


def test_long_rows_are_not_left_out_at_the_end_of_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A place has room for a fraction of these: without the row that crosses its end there would be none, or only
    # the short ones.
    monkeypatch.setattr(size_estimates, "READ_BYTES", 24_000)
    monkeypatch.setattr(size_estimates, "ENCODED_BYTES", 8_000)
    corpora.write_txt(tmp_path / "a.txt", long_rows(4_000, 5, 1, 8_000))
    order = order_over(tmp_path, "txt:a.txt:text")
    _, tokens = counted(order, 0)
    # Eight places of one or two rows each: their mean is right within its own error, and never far below.
    assert size_estimates.measure(order, 0).epoch_tokens == pytest.approx(tokens, rel=0.6)


def test_only_a_part_of_what_tells_the_length_of_rows_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpora.write_txt(tmp_path / "a.txt", long_rows(20_000, 3, 1, 300))
    order = order_over(tmp_path, "txt:a.txt:text")
    rows, tokens = counted(order, 0)
    monkeypatch.setattr(size_estimates, "ENCODED_BYTES", 80_000)
    encoder = order.encoder(0, order.readers.open(0))
    encoded = 0

    class Counting:
        def encode(self, column: Any, first_row: int, shard: int) -> Encoded:
            nonlocal encoded
            found = encoder.encode(column, first_row, shard)
            encoded += len(found.values)
            return found

    monkeypatch.setattr(order, "encoder", lambda *_: Counting())
    found = measured(order)
    assert encoded < 1.2 * 80_000 < tokens / 10
    # All lengths were looked at; only the ids that end a text are estimated.
    assert found == (rows, pytest.approx(tokens, rel=0.002))


def test_the_head_of_a_file_of_lines_is_measured_with_its_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\nthree")
    reader = order_over(tmp_path, "txt:a.txt:text").readers.open(0)
    assert isinstance(reader, LinesSource)
    assert [reader.bytes_of(0, 0, rows) for rows in (1, 2, 3)] == [5, 9, 14]


@pytest.mark.parametrize(
    "packing",
    [
        {"packing": "best_fit", "pack_window_rows": 64},
        {"packing": "none"},
        {"packing": "none", "long_rows": "split"},
    ],
    ids=str,
)
@pytest.mark.parametrize("labels", ["same", "shifted"])
def test_a_source_that_is_read_whole_has_the_tokens_that_its_samples_count(
    tmp_path: Path, packing: dict[str, Any], labels: str
) -> None:
    rows = [
        corpora.numbers(length, i, 0, 250)
        for i, length in enumerate(corpora.numbers(300, 1, 0, 40))
    ]
    corpora.write_parquet(tmp_path / "a.parquet", rows, group=300)
    order = corpora.order_of(
        tmp_path,
        corpora.flat(["parquet:a.parquet:ids"], labels=labels, sequence_length=16) | packing,
    )
    found = size_estimates.measure(order, 0)
    given = advanced(order, order.initial(), 10_000).total_tokens
    # To a thousandth of a row's tokens; where windows of the sample lie otherwise, a few samples differ.
    assert found.epoch_tokens == pytest.approx(
        given, rel=0.04 if packing["packing"] == "best_fit" else 1e-3
    )
