"""Samples of Megatron-LM: those that its own ``GPTDataset`` gave, and what is left of them after so many."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.catalog import spec_of
from support.corpora import order_of, parsed
from support.megatron_core import FOLDER, GIVEN, SEQUENCE_LENGTH
from support.sources import opened
from tokenloom_server.errors import SourceError
from tokenloom_server.order import foreign_checkpoint, foreign_payload
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.sources import megatron

DATASETS = ("code", "prose")
SHUFFLED = 3  # the array of the samples' order is the fourth of a source's files


def spec(name: str) -> str:
    return f"megatron-samples:{GIVEN[name]}"


def document(names: tuple[str, ...] = DATASETS, **fields: Any) -> dict[str, Any]:
    """A run whose samples are Megatron's, with the id after each."""
    children = [{"source": spec(name), "alias": name} for name in names]
    ids = {"vocab_size": 256, "end_of_text_id": 0, "sequence_length": SEQUENCE_LENGTH + 1}
    return {
        "run": "moved",
        "mixture": {"policy": "sequential", "children": children},
        **ids,
        **fields,
    }


@pytest.mark.parametrize("chunk", [7, 1 << 8])
@pytest.mark.parametrize("name", DATASETS)
def test_rows_are_the_samples_of_the_library_from_every_one_on(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "CHUNK_SAMPLES", chunk)
    source = opened(FOLDER, spec(name))
    expected = GIVEN["samples"][name]
    assert [source.row_count(shard) for shard in range(len(source.shards))] == [
        0,
        0,
        0,
        len(expected),
        0,
        0,
    ]
    for row in range(0, len(expected) + 1, 3):
        assert [
            ids for rows in source.read(SHUFFLED, row) for ids in rows.column.to_pylist()
        ] == expected[row:]


@pytest.mark.parametrize("consumed", [0, 1, 17, 39, 40])
def test_a_run_goes_on_after_consumed_train_samples_of_a_blend(consumed: int) -> None:
    # As the page says it: how many of each dataset are among them.
    index = np.load(FOLDER / f"{GIVEN['blend']}-dataset_index.npy")[:consumed]
    counts = np.bincount(index, minlength=2).tolist()
    datasets = [
        {"spec": spec(name), "row_offset": count}
        for name, count in zip(DATASETS, counts, strict=True)
    ]
    tokens = consumed * SEQUENCE_LENGTH
    payload = foreign_payload.read(
        json.dumps({"resume_state": {"datasets": datasets, "total_tokens": tokens}})
    )
    assert payload is not None
    timeline = Timeline(order_of(FOLDER, document()))

    state = foreign_checkpoint.resume_point(payload, timeline).base
    assert state.total_tokens == tokens
    for source, name in enumerate(DATASETS):
        rest = [sample for dataset, sample in GIVEN["blended"][consumed:] if dataset == source]
        read = [
            [int(token) for span in sample for token in span.ids]
            for sample in timeline.first.spans(source, state.sources[source], len(rest))
        ]
        assert read == [GIVEN["samples"][name][sample] for sample in rest]


def test_samples_get_no_ids_of_their_own() -> None:
    config = parsed(document(add_bos=True, add_eot=True, begin_of_text_id=1))

    assert [(config.adds_bos(source), config.adds_eot(source)) for source in config.sources] == [
        (False, False)
    ] * 2


@pytest.mark.parametrize(
    ("ending", "content", "reason"),
    [
        ("-description.txt", b"{}", "does not say its dataset_path.*up to '-GPTDataset-train'"),
        ("-description.txt", b'{"dataset_path": "gone"}', "gone.bin.*No such file"),
        ("-shuffle_index.npy", b"\x93NUMPY", "is no array of numpy"),
        (
            "-shuffle_index.npy",
            np.array([0, 59], np.uint32),
            "samples 0 and following are not of the dataset",
        ),
        (
            "-document_index.npy",
            np.full(39, 14, np.int32),
            "samples 0 and following are not of the dataset",
        ),
        (
            "-document_index.npy",
            np.zeros(39, np.int32),
            "a sample ends before it begins|are not of the dataset",
        ),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    tmp_path: Path, ending: str, content: Any, reason: str
) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"{GIVEN['code']}{ending}"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)

    with pytest.raises(SourceError, match=reason):
        [*opened(tmp_path, spec("code")).read(SHUFFLED, 0)]


def test_an_address_is_refused() -> None:
    with pytest.raises(SourceError, match="files of megatron-samples: are mapped"):
        opened(FOLDER, str(spec_of("megatron-samples:s3://bucket/cache")))
