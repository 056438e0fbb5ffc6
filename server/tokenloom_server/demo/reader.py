"""Reads a run without training: the uninterrupted run that the trainers' samples are compared with."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from tokenloom import RemoteDataset

from tokenloom_server.demo.receipts import ReceiptWriter, Step, make_samples


def read(url: str, batch_size: int, samples: int, receipts: Path) -> None:
    """One rank that takes ``samples`` samples, in steps of ``batch_size``, and writes its receipts."""
    with RemoteDataset(url, batch_size=batch_size) as dataset, ReceiptWriter(receipts, rank=0) as writer:
        for number, batch in enumerate(dataset, start=1):
            step = Step(
                step=number,
                sample_index=dataset.sample_index,
                total_tokens=dataset.total_tokens,
                digest=dataset.digest,
                loss=0.0,
                lr=0.0,
            )
            writer.write(make_samples(batch["sample_ids"], batch["source_ids"], batch["input_ids"]), step)
            if dataset.sample_index >= samples:
                break


def main(arguments: Sequence[str]) -> None:
    """Reads the command line, and then the run."""
    parser = argparse.ArgumentParser(prog="python -m tokenloom_server.demo reader", description=__doc__)
    parser.add_argument("url", help="grpc://host:port/run")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--receipts", type=Path, required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    read(**vars(parser.parse_args(arguments)))
