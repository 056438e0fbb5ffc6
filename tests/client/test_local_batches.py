"""What a ``LocalDataset`` gives without a message is what a server sends: every column, state and digest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from support.corpora import CODE, DOCS, WIKI, flat, write_corpus
from support.features import document as latents
from support.features import write_features
from support.served import url_of
from tokenloom import LocalDataset, RemoteDataset
from tokenloom.batch.layout import OPTIONAL_COLUMNS

CHATS = "parquet:chats.parquet:ids"
PADDED = {"tail": "pad", "last_micro_step": "pad", "pad_id": 0}
MASKED = {"packing": "none", "last_micro_step": "pad", "pad_id": 0, "mask_boundaries": False}
MIXTURES: dict[str, dict[str, Any]] = {
    "concat": flat([CODE, DOCS, WIKI], last_micro_step="pad", pad_id=0, mask_boundaries=True),
    "concat-left": flat([CODE, DOCS, WIKI], labels="shifted", padding="left", **PADDED),
    "best-fit": flat(
        [CODE, DOCS, WIKI], packing="best_fit", pack_window_rows=9, last_micro_step="pad", pad_id=0
    ),
    "chats": flat([CHATS], tokenizer=None, vocab_size=200, end_of_text_id=0, **MASKED),
    "chats-wide": flat(
        [CHATS], tokenizer=None, vocab_size=70_000, end_of_text_id=0, labels="shifted", **MASKED
    ),
    "rows": latents(),
}
OF_LAUNCH = ("run_uid", "checksum")
MIXTURES["chats"]["mixture"]["children"][0]["loss_mask"] = "mask"
MIXTURES["chats-wide"]["mixture"]["children"][0]["loss_mask"] = "mask"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_corpus(tmp_path_factory.mktemp("local"))
    write_features(folder)
    rows = [list(range(5, 5 + count)) for count in (3, 1, 9, 4, 14, 2, 8)]
    masks = [[i % 3 > 0 for i in range(len(row))] for row in rows]
    table = {
        "ids": pa.array(rows, pa.list_(pa.int32())),
        "mask": pa.array(masks, pa.list_(pa.bool_())),
    }
    pq.write_table(pa.table(table), folder / "chats.parquet")
    for name, found in MIXTURES.items():
        document = {key: value for key, value in found.items() if value is not None}
        (folder / f"{name}.yaml").write_text(
            yaml.safe_dump(document | {"run": name}), encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[str]:
    with url_of(folder, *(folder / f"{name}.yaml" for name in MIXTURES)) as url:
        yield url


def plain(value: object) -> object:
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", MIXTURES)
def test_every_column_state_and_digest_is_that_of_the_served_run(
    name: str, served: str, folder: Path
) -> None:
    columns = OPTIONAL_COLUMNS if name != "rows" else ()
    size, accumulate = (3, 2) if name != "rows" else (None, 1)

    def seen(
        dataset: LocalDataset | RemoteDataset, state: dict[str, str] | None = None
    ) -> list[Any]:
        if state is not None:
            dataset.load_state_dict(state)
        with dataset:
            return [
                (
                    {key: plain(value) for key, value in batch.items()},
                    dataset.state_dict()["tokenloom"],
                )
                for batch in dataset
            ]

    path = folder / f"{name}.yaml"
    local = seen(LocalDataset(path, size, accumulate=accumulate, columns=columns))
    sent = seen(RemoteDataset(f"{served}/{name}", size, accumulate=accumulate, columns=columns))

    assert len(local) >= 3
    for (ours, state), (theirs, other) in zip(local, sent, strict=True):
        assert ours == theirs
        # But for the launch's own name.
        assert {k: v for k, v in json.loads(state).items() if k not in OF_LAUNCH} == {
            k: v for k, v in json.loads(other).items() if k not in OF_LAUNCH
        }
    # And it goes on where the other stood, at the end of an optimiser step.
    middle = max(2, len(sent) // 4 * 2)
    again = seen(
        LocalDataset(path, size, accumulate=accumulate, columns=columns),
        {"tokenloom": sent[middle - 1][1]},
    )
    assert [batch for batch, _ in again] == [batch for batch, _ in sent[middle:]]
