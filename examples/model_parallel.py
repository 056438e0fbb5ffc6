"""Tensor, pipeline, context and data parallelism on one DeviceMesh, killed and resumed at will.

    tokenloom serve examples/compose/mixture.yaml
    torchrun --nproc-per-node 8 examples/model_parallel.py grpc://127.0.0.1:50051/sample --tp 2 --pp 2

What Tokenloom needs of a trainer is marked 1 to 4. The model is a stand-in (the next token from the token and its
place: an embedding, then in each pipeline stage a perceptron whose two layers are cut over the tensor-parallel
processes), but what is cut is computed in parts, so a process that got another batch than its peers would change the
loss.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenloom import Batch, TokenLRScheduler
from tokenloom.integrations.mesh import GroupDataset, context_slice, mesh_dataset
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH = 16


class Stage(nn.Module):
    """A pipeline stage: the first embeds, the last predicts; each has a perceptron."""

    def __init__(self, first: bool, last: bool, ids: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ids, WIDTH) if first else None
        self.places = nn.Embedding(length, WIDTH) if first else None
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, ids) if last else None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Features [B, L, 16] to such or, after the last stage, to the sum of the losses."""
        if self.tokens is not None and self.places is not None:
            x = self.tokens(batch["input_ids"]) + self.places(batch["position_ids"])
        x = x + self.perceptron(x)
        if self.head is None:
            return x
        return nn.functional.cross_entropy(
            self.head(x).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )


def main(options: argparse.Namespace) -> None:
    """One process."""
    dist.init_process_group("gloo")
    replicas = dist.get_world_size() // (options.tp * options.pp * options.cp)
    shape = (options.pp, replicas, options.cp, options.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
    pp, cp = mesh["pp"], mesh["cp"]

    # 1. On every process: those of one dp rank get the same batches, and one of them joins the run.
    dataset = mesh_dataset(
        options.url,
        mesh,
        options.batch_size,
        dp="dp",
        resume=options.resume,
        columns=["position_ids"],
    )

    # What lies where in the mesh, whatever the number of replicas.
    part = f"pp{pp.get_local_rank()}-tp{mesh['tp'].get_local_rank()}.pt"
    saved = sorted(path for path in options.checkpoint.glob("[0-9]*") if not path.suffix)
    if saved:
        state = torch.load(saved[-1] / part, weights_only=True)  # safe from torch 2.10 on
        dataset.load_state_dict(state["dataset"])  # 2. on every process
    batches = iter(dataset)  # on every process; from here on the run says what a model has to fit

    torch.manual_seed(pp.get_local_rank())
    ids, length = dataset.vocab_size, dataset.sequence_length
    model = Stage(pp.get_local_rank() == 0, pp.get_local_rank() == pp.size() - 1, ids, length)
    parallelize_module(
        model.perceptron, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    scheduler = TokenLRScheduler(
        optimizer, warmup_tokens=4096, target_tokens=options.samples * length
    )
    data = dist.new_group(mesh.mesh[pp.get_local_rank(), :, :, mesh["tp"].get_local_rank()].flatten().tolist(),
                          use_local_synchronization=True)  # fmt: skip
    if saved:
        load(model, optimizer, state)
        scheduler.load_state_dict(state["scheduler"])

    for step, batch in enumerate(batches, start=1):
        # 3. Where context parallelism cuts sequences: labels and positions with the ids.
        batch = context_slice(
            batch,
            cp.get_local_rank(),
            cp.size(),
            labels=dataset.labels,
            load_balanced=options.load_balanced,
        )
        optimizer.zero_grad()
        loss = forward_backward(model, pp, batch)
        totals = torch.stack([loss.detach(), (batch["labels"] != -100).sum()])
        dist.all_reduce(totals, group=data)
        for parameter in model.parameters():
            assert parameter.grad is not None
            gradient = local(parameter.grad)
            dist.all_reduce(gradient, group=data)
            gradient /= totals[1]
        scheduler.step(batch["total_tokens"])
        optimizer.step()

        record(
            options,
            dist.get_rank() == dist.get_world_size() - 1,
            dataset,
            totals,
            scheduler.get_last_lr()[0],
        )
        if step % options.every == 0:
            save(
                options,
                mesh,
                dataset,
                part,
                model,
                optimizer,
                {"scheduler": scheduler.state_dict()},
            )
        if dataset.sample_index >= options.samples:
            break
    dataset.close()
    dist.destroy_process_group()


def forward_backward(model: Stage, pp: DeviceMesh, batch: Batch) -> Tensor:
    """One batch through all stages and back; the sum of its losses, 0 where they are another stage's."""
    rank, last, group = pp.get_local_rank(), pp.size() - 1, pp.get_group()
    x = torch.zeros(*batch["input_ids"].shape, WIDTH, requires_grad=True)
    if rank:
        dist.recv(x.detach(), group=group, group_src=rank - 1)
    y = model(x, batch)
    if rank == last:
        y.backward()
    else:
        dist.send(y.detach(), group=group, group_dst=rank + 1)
        dist.recv(gradient := torch.empty_like(y), group=group, group_src=rank + 1)
        y.backward(gradient)
    if rank:
        assert x.grad is not None
        dist.send(x.grad, group=group, group_dst=rank - 1)
    return y if rank == last else torch.zeros(())


def local(value: Any) -> Any:
    """This process's part of a tensor that is cut over the tensor-parallel ones."""
    return value.to_local() if hasattr(value, "to_local") else value


def save(
    options: argparse.Namespace,
    mesh: DeviceMesh,
    dataset: GroupDataset,
    part: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> None:
    """One process of each part of the model writes it; the folder gets its name when all are there."""
    folder = options.checkpoint / f"{dataset.sample_index:012}"
    unfinished = folder.with_suffix(".part")
    if mesh["dp"].get_local_rank() == mesh["cp"].get_local_rank() == 0:
        unfinished.mkdir(parents=True, exist_ok=True)
        state["model"] = {name: local(value) for name, value in model.state_dict().items()}
        state["optimizer"] = [
            {name: local(value) for name, value in optimizer.state[parameter].items()}
            for parameter in model.parameters()
        ]
        state["dataset"] = dataset.state_dict()  # 4. without waiting for a peer; equal on all
        torch.save(state, unfinished / part)
    dist.barrier()
    if dist.get_rank() == 0:
        if folder.exists():  # saved before, by a launch that went on from an older one
            shutil.rmtree(folder)
        unfinished.replace(folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Fills in what ``save`` wrote."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            local(value).copy_(state["model"][name])
        for parameter, saved in zip(model.parameters(), state["optimizer"], strict=True):
            like = torch.zeros_like(parameter)
            own = optimizer.state[parameter] = {
                "step": saved["step"],
                "exp_avg": like,
                "exp_avg_sq": like.clone(),
            }
            local(own["exp_avg"]).copy_(saved["exp_avg"])
            local(own["exp_avg_sq"]).copy_(saved["exp_avg_sq"])


def record(
    options: argparse.Namespace, tells: bool, dataset: GroupDataset, totals: Tensor, lr: float
) -> None:
    """What was trained, for people and for ``--record``; by a process of the last stage that is no leader."""
    if not tells:
        return
    loss = (totals[0] / totals[1]).item()
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
    parser.add_argument("--tp", type=int, default=1, help="processes that a layer is cut over")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--cp", type=int, default=1, help="processes that a sequence is cut over")
    parser.add_argument(
        "--load-balanced", action="store_true", help="each gets a part of its begin and of its end"
    )
    parser.add_argument(
        "--batch-size", type=int, default=4, help="samples per data-parallel rank and step"
    )
    parser.add_argument("--samples", type=int, default=800, help="of the whole run, over all ranks")
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
