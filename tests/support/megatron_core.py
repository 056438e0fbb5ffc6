"""Writes ``tests/sources/megatron_samples``: a small dataset of Megatron-LM, the arrays that its own ``GPTDataset``
caches, and the samples that it gives.

In an environment with megatron-core, which needs torch: ``python tests/support/megatron_core.py FOLDER``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

FOLDER = Path(__file__).parents[1] / "sources/megatron_samples"
#: What the library gave: where its caches are, samples by dataset, and of a blend of both its samples in their order.
GIVEN: dict[str, Any] = json.loads((FOLDER / "given.json").read_text()) if FOLDER.exists() else {}
SEQUENCE_LENGTH = 8
#: Several epochs, of which the last is a part and shuffled by itself.
SAMPLES = 40
DOCUMENTS = 14


def main(folder: str) -> None:
    import numpy as np
    import torch
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
    from megatron.core.datasets.utils import Split

    Path(folder).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)

    class Tokenizer:
        unique_identifiers: ClassVar = {"class": "none"}
        vocab_size, eod, pad = 256, 0, 0

    config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=SEQUENCE_LENGTH,
        split="1,0,0",
        path_to_cache="cache",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=Tokenizer(),
    )
    datasets: list[Any] = []
    for name, seed in (("code", 1), ("prose", 2)):
        random, builder = (
            np.random.default_rng(seed),
            IndexedDatasetBuilder(f"{name}.bin", dtype=np.uint16),
        )
        for length in random.integers(1, 24, DOCUMENTS):
            builder.add_item(torch.tensor(random.integers(1, 256, length)))
            builder.end_document()
        builder.finalize(f"{name}.idx")
        sequences = np.arange(DOCUMENTS - 1, dtype=np.int32)
        datasets.append(
            GPTDataset(IndexedDataset(name), name, sequences, SAMPLES, Split.train, config)
        )
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    blend = BlendedDataset(datasets, [0.7, 0.3], SAMPLES, config)
    given = {
        "code": f"cache/{datasets[0].unique_description_hash}-GPTDataset-train",
        "prose": f"cache/{datasets[1].unique_description_hash}-GPTDataset-train",
        "blend": f"cache/{blend.unique_description_hash}-BlendedDataset-train",
        "samples": {
            name: [
                dataset._query_document_sample_shuffle_indices(i)[0].tolist()
                for i in range(len(dataset))
            ]
            for name, dataset in zip(("code", "prose"), datasets, strict=True)
        },
        "blended": np.stack((blend.dataset_index, blend.dataset_sample_index), axis=1).tolist(),
    }
    Path("given.json").write_text(json.dumps(given) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
