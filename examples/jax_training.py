"""JAX with a process for each host, killed and resumed at will, on any number of processes.

    tokenloom serve examples/compose/mixture.yaml
    python examples/jax_training.py grpc://127.0.0.1:50051/sample --checkpoint checkpoint

Several processes, on one machine or on many, are each started with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT``. Needs ``pip install tokenloom jax orbax-checkpoint``, and no torch.

What Tokenloom needs of a trainer is marked 1 to 5; everything else is ordinary JAX.
"""

from __future__ import annotations

import argparse
import json
import os
import uuid
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokenloom import LaunchOptions, NumpyDataset

Params = dict[str, jax.Array]


def main(options: argparse.Namespace) -> None:
    """One process."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))

    # 1. Ranks are JAX's processes. All of a launch share an id that no launch had before.
    attempt = (
        multihost_utils.broadcast_one_to_all(np.frombuffer(uuid.uuid4().bytes, np.uint8))
        .tobytes()
        .hex()
    )
    dataset = NumpyDataset(
        options.url,
        options.batch_size,
        rank=jax.process_index(),
        world_size=jax.process_count(),
        launch=LaunchOptions(attempt=attempt),
        resume=options.resume,
    )
    mesh = Mesh(jax.devices(), ("data",))
    by_sample, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))
    params = jax.tree.map(
        partial(jax.make_array_from_process_local_data, everywhere), init(dataset.vocab_size)
    )

    manager = ocp.CheckpointManager(
        options.checkpoint.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )
    if (last := manager.latest_step()) is not None:
        items = ocp.args.Composite(
            model=ocp.args.StandardRestore(params), data=ocp.args.JsonRestore()
        )
        saved = manager.restore(last, args=items)
        params = saved["model"]
        dataset.load_state_dict(
            saved["data"]
        )  # 2. goes on after the last sample that the weights have seen

    to_global = partial(jax.make_array_from_process_local_data, by_sample)
    batches = (
        dataset if dataset.sample_index < options.samples else []
    )  # one that is done is not trained further
    for step, batch in enumerate(batches, start=1):
        lr = 0.1 * min(1.0, batch["total_tokens"] / 4096)  # 3. in tokens of the whole run
        # 4. This process's samples become a part of the global array.
        ids, labels = to_global(batch["input_ids"]), to_global(batch["labels"])
        params, loss = train_step(params, ids, labels, lr, batch["global_label_tokens"])
        record(options, dataset, float(loss), lr)
        if step % options.every == 0:
            # 5. Beside the weights, by the first process: it is the same on all of them.
            items = ocp.args.Composite(
                model=ocp.args.StandardSave(params), data=ocp.args.JsonSave(dataset.state_dict())
            )
            manager.save(dataset.sample_index, args=items)
        if dataset.sample_index >= options.samples:
            break
    manager.close()
    dataset.close()


def init(ids: int) -> dict[str, np.ndarray]:
    """A model of so many ids, the same on every process."""
    draws = np.random.default_rng(0)
    return {
        name: draws.normal(0, 0.1, shape)
        for name, shape in (("embed", (ids, 32)), ("out", (32, ids)))
    }


def loss_of(
    params: Params, ids: jax.Array, labels: jax.Array, label_tokens: jax.Array
) -> jax.Array:
    """The mean over the labels of a step, which equal the ids (``labels: same``): one is predicted by those before."""
    logits = params["embed"][ids[:, :-1]] @ params["out"]
    labels = labels[:, 1:]
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1
    )[..., 0]
    return -jnp.where(labels == -100, 0.0, chosen).sum() / label_tokens


@jax.jit
def train_step(
    params: Params, ids: jax.Array, labels: jax.Array, lr: float, label_tokens: int
) -> tuple[Params, jax.Array]:
    """One step of gradient descent."""
    loss, gradients = jax.value_and_grad(loss_of)(params, ids, labels, label_tokens)
    return jax.tree.map(lambda value, gradient: value - lr * gradient, params, gradients), loss


def record(options: argparse.Namespace, dataset: NumpyDataset, loss: float, lr: float) -> None:
    """What was trained, for people and for ``--record``."""
    if dataset.rank:
        return
    print(
        f"samples {dataset.sample_index}  tokens {dataset.total_tokens}  loss {loss:.4f}  lr {lr:.2e}",
        flush=True,
    )
    if options.record:
        line = {
            "sample_index": dataset.sample_index,
            "digest": dataset.digest,
            "loss": loss,
            "lr": lr,
        }
        with options.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="grpc://host:port/run")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=4,
        help="samples per process and step: a multiple of its devices",
    )
    parser.add_argument(
        "--samples", type=int, default=800, help="of the whole run, over all processes"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("checkpoint"),
        help="folder to save to and to resume from",
    )
    parser.add_argument(
        "--resume",
        default="fresh",
        help="where it begins without a checkpoint: fresh, latest or a snapshot",
    )
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--record", type=Path, help="file for a JSON line per step")
    main(parser.parse_args())
