"""tf.data over TFRecords (raw int32 bytes, or text), packed by rebatch, two ways.

``local``    in the trainer's process.
``service``  the tf.data service: a dispatcher and a worker in a child process, and this process as its client.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import tensorflow as tf
import torch

from benchmarks.peers.loop import SEED, SOURCES, WEIGHTS, Ids, Job, Tokenizer, documents, main

TEXT_ROWS = 100


def prepare(job: Job, into: Path) -> None:
    into.mkdir(parents=True)
    for source in SOURCES:
        with tf.io.TFRecordWriter(str(into / source)) as writer:
            if job.is_text:
                for file in job.files(source):
                    for text in pq.read_table(file)["text"].to_pylist():
                        writer.write(text.encode())
            else:
                for document in documents(job, source):
                    writer.write(document.tobytes())


def batches(job: Job) -> Iterator[torch.Tensor]:
    tokenizer = Tokenizer(job)

    def encode(texts: Any) -> Ids:
        return tokenizer.flat([text.decode() for text in texts])

    packed = []
    for source in SOURCES:
        records = tf.data.TFRecordDataset(str(job.prepared / source))
        if job.is_text:
            tokens = records.batch(TEXT_ROWS).map(
                lambda texts: tf.ensure_shape(
                    tf.numpy_function(encode, [texts], tf.int32, stateful=False), [None]
                )
            )
        else:
            tokens = records.map(
                lambda raw: tf.concat([tf.io.decode_raw(raw, tf.int32), tf.zeros([1], tf.int32)], 0)
            )
        packed.append(tokens.rebatch(job.block, drop_remainder=True))
    mixed = tf.data.Dataset.sample_from_datasets(
        packed, weights=WEIGHTS, seed=SEED, stop_on_empty_dataset=True
    )
    mixed = mixed.batch(job.batch, drop_remainder=True)
    if job.variant == "service":
        service = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--serve"], stdout=subprocess.PIPE, text=True
        )
        assert service.stdout is not None
        mixed = mixed.apply(
            tf.data.experimental.service.distribute(
                processing_mode=tf.data.experimental.service.ShardingPolicy.OFF,
                service=service.stdout.readline().strip(),
                job_name="benchmark",
            )
        )
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 2
    for batch in mixed.prefetch(4).with_options(options):
        yield torch.from_numpy(np.asarray(batch))


def serve() -> None:
    """A dispatcher and a worker; prints where, and lives as long as who started it."""
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address, port=0))
    print(dispatcher.target, flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    del worker
    os._exit(0)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve()
    else:
        main(batches, prepare)
