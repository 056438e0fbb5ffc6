"""Folders of Arrow files: what `datasets` saves, both IPC formats, and how damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.ipc
import pytest
from support.catalog import spec_of
from support.sources import opened, rows_of, write_table
from tokenloom_server.errors import SourceChanged, SourceError
from tokenloom_server.sources.open import open_source
from tokenloom_server.storage.io_stats import IoStats

SPEC = "arrow:saved:input_ids"


@pytest.fixture(autouse=True)
def _no_progress_bars() -> None:
    datasets.disable_progress_bars()


def saved(folder: Path, shards: int = 1) -> list[list[int]]:
    ids = [[i] * (i % 4) for i in range(20)]
    features = datasets.Features(
        {"text": datasets.Value("string"), "input_ids": datasets.Sequence(datasets.Value("uint16"))}
    )
    data = datasets.Dataset.from_dict(
        {"text": [str(i) for i in range(20)], "input_ids": ids}, features=features
    )
    data.save_to_disk(folder, num_shards=shards)
    return ids


def test_a_saved_dataset_is_read_in_the_order_of_its_state_file(tmp_path: Path) -> None:
    ids = saved(tmp_path / "saved", shards=3)
    state = tmp_path / "saved" / "state.json"
    files = json.loads(state.read_text())["_data_files"]
    state.write_text(json.dumps({"_data_files": files[::-1]}))
    source = opened(tmp_path, SPEC)
    assert [s.path for s in source.shards] == [
        f"saved/data-0000{i}-of-00003.arrow" for i in (2, 1, 0)
    ]
    assert [row for shard in (2, 1, 0) for row in rows_of(source, shard=shard)] == ids
    assert sum(source.row_count(i) for i in range(3)) == 20


def test_a_folder_of_splits_lists_them(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"input_ids": [[1]]})
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "saved")
    with pytest.raises(SourceError) as caught:
        opened(tmp_path, SPEC)
    assert "name one of them: 'arrow:saved/test:input_ids', 'arrow:saved/train:input_ids'" in str(
        caught.value
    )
    assert rows_of(opened(tmp_path, "arrow:saved/train/:input_ids")) == [[1]]


def test_a_shuffled_dataset_that_was_saved_with_its_indices_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    path = tmp_path / "saved" / "state.json"
    state = json.loads(path.read_text()) | {"_indices_files": [{"filename": "indices.arrow"}]}
    path.write_text(json.dumps(state))
    with pytest.raises(
        SourceError, match=r"indices mapping .* call flatten_indices\(\) on it and save it again"
    ):
        opened(tmp_path, SPEC)


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"_data_files": [1]}'])
def test_a_damaged_state_file_is_named(tmp_path: Path, state: str) -> None:
    saved(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text(state)
    with pytest.raises(
        SourceError, match=r"state\.json' is not the state\.json of a saved dataset"
    ):
        opened(tmp_path, SPEC)


def test_a_folder_that_is_missing_or_holds_no_arrow_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=r"saved' does not exist, expected a folder that `save_to_disk` wrote"
    ):
        opened(tmp_path, SPEC)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "cache-1.arrow").touch()
    with pytest.raises(SourceError, match=r"no Arrow file in .*\(in it: cache-1\.arrow\)"):
        opened(tmp_path, SPEC)
    with pytest.raises(SourceError, match=r"cache-1\.arrow' is a file, expected a folder"):
        opened(tmp_path, "arrow:saved/cache-1.arrow:text")


@pytest.mark.parametrize("file_format", [False, True])
@pytest.mark.parametrize("row", [0, 7])
def test_ids_are_not_copied(tmp_path: Path, file_format: bool, row: int) -> None:
    saved(tmp_path / "saved")
    if file_format:
        (data,) = (tmp_path / "saved").glob("*.arrow")
        with pa.OSFile(str(data), "rb") as file:
            table = pa.ipc.open_stream(file).read_all()
        write_table(data, table, 5, pa.ipc.new_file)
    before = pa.total_allocated_bytes()
    kept = list(opened(tmp_path, SPEC).read(0, row))
    assert pa.total_allocated_bytes() - before < 64
    assert sum(len(rows.column) for rows in kept) == 20 - row


def test_a_file_that_is_cut_anywhere_never_gives_wrong_rows(tmp_path: Path) -> None:
    path = tmp_path / "saved" / "a.arrow"
    ids = [[i, i] for i in range(12)]
    write_table(path, pa.table({"input_ids": ids}), 4)
    whole = path.read_bytes()
    messages = 0
    for size in range(1, len(whole), 7):
        path.write_bytes(whole[:size])
        try:
            source = opened(tmp_path, SPEC)
            count = source.row_count(0)
            assert count in (4, 8, 12)
            assert rows_of(source) == ids[:count]
        except SourceError as error:
            messages += 1
            assert "'saved/a.arrow' " in str(error)
            assert "truncated or damaged" in str(error) or "has no rows" in str(error)
    assert messages > 20


@pytest.mark.parametrize(
    ("block_rows", "options", "blocks"),
    [
        (b"3", {}, [0, 3, 6, 8, 11]),
        # What is decompressed as a whole is one block.
        (b"3", {"compression": "zstd"}, [0, 8, 11]),
        *(
            (text, {}, [0, 8, 11])
            for text in (b"", b"0", b"-3", b"3.5", b"9" * 400, "\u0663".encode())
        ),
    ],
)
def test_a_file_says_how_many_rows_are_a_block(
    tmp_path: Path, block_rows: bytes, options: dict[str, Any], blocks: list[int]
) -> None:
    table = pa.table({"input_ids": [[i] for i in range(11)]})
    table = table.replace_schema_metadata({b"tokenloom.block_rows": block_rows})
    write_table(tmp_path / "saved" / "a.arrow", table, 8, pa.ipc.new_file, **options)
    source = opened(tmp_path, SPEC)
    assert source.blocks(0).tolist() == blocks
    for row in range(12):
        assert rows_of(source, row) == [[i] for i in range(row, 11)]


def test_a_file_that_is_written_anew_is_not_read_by_its_old_mapping(tmp_path: Path) -> None:
    path = tmp_path / "saved" / "a.arrow"
    write_table(path, pa.table({"input_ids": [[1], [2]]}), 1, pa.ipc.new_file)
    source = open_source(spec_of(SPEC), tmp_path, io_stats=IoStats())
    assert rows_of(source, 1) == [[2]]
    write_table(path, pa.table({"input_ids": [[1], [3]]}), 1, pa.ipc.new_file)
    with pytest.raises(SourceChanged, match=r"'saved/a\.arrow' has other content"):
        rows_of(source, 1)
