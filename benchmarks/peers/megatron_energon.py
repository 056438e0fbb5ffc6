"""Megatron-Energon: prepacked blocks in webdataset tars (raw bytes), blended by a MetadatasetV2."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from benchmarks.peers.loop import SEED, SOURCES, WEIGHTS, Job, blocks, main

SHARD_BLOCKS = 2_500


@edataclass
class Tokens(Sample):
    tokens: torch.Tensor


@stateless
def cook(sample: dict[str, Any]) -> Tokens:
    return Tokens(
        **basic_sample_keys(sample),
        tokens=torch.frombuffer(bytearray(sample["tok"]), dtype=torch.int32),
    )


class Encoder(DefaultTaskEncoder):
    cookers = (Cooker(cook),)


def prepare(job: Job, into: Path) -> None:
    for source in SOURCES:
        (into / source).mkdir(parents=True)
        tar: tarfile.TarFile | None = None
        for number, block in enumerate(blocks(job, source)):
            if number % SHARD_BLOCKS == 0:
                if tar is not None:
                    tar.close()
                tar = tarfile.open(into / source / f"shard_{number // SHARD_BLOCKS:04d}.tar", "w")  # noqa: SIM115
            assert tar is not None
            _add(tar, number, block)
        assert tar is not None, f"source {source} has no block"
        tar.close()
        command = [str(Path(sys.executable).with_name("energon")), "prepare", str(into / source)]
        command += [
            "--non-interactive",
            "--split-ratio",
            "1,0,0",
            "--sample-type",
            "CrudeWebdataset",
        ]
        subprocess.run(command, check=True)
    lines = [
        f"      - weight: {weight}\n        path: ./{s}\n"
        for s, weight in zip(SOURCES, WEIGHTS, strict=True)
    ]
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
    (into / "blend.yaml").write_text(head + "".join(lines))


def _add(tar: tarfile.TarFile, number: int, block: Any) -> None:
    data = block.tobytes()
    entry = tarfile.TarInfo(f"{number:08d}.tok")
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def batches(job: Job) -> Iterator[torch.Tensor]:
    logging.disable(logging.WARNING)
    dataset = get_train_dataset(
        str(job.prepared / "blend.yaml"),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=SEED),
        batch_size=job.batch,
        batch_drop_last=True,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=Encoder(),
    )
    for batch in get_savable_loader(
        dataset, watchdog_timeout_seconds=None, gc_collect_every_n_steps=0
    ):
        yield batch.tokens


if __name__ == "__main__":
    main(batches, prepare)
