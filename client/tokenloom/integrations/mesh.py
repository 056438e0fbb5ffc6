"""Model-parallel groups: one process of each joins the run, and hands each batch to its peers.

The processes that hold parts of one replica of a model (tensor-, context- and pipeline-parallel) train on the same
batch. One of them, the leader, is a rank of the run; the others get what it gets by one broadcast a step:

    leader   RemoteDataset.next() → frame: [header | numbers and tensors, one after the other] ─┐
    peers    ◀── broadcast (gloo, CPU) ─────────────────────────────────────────────────────────┘
             tensors over the frame's memory; a History, so that each process can write the state
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from tokenloom_proto.batch_schedule import Sizes
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset, get_worker_info

from tokenloom.batch.layout import IGNORED, Batch
from tokenloom.connection.join import RunFacts, SampleForm, Source
from tokenloom.connection.options import ConnectionOptions
from tokenloom.connection.topology import Topology
from tokenloom.datasets.base import ResumableDataset
from tokenloom.datasets.peer_line import (
    BATCH,
    END,
    MADE,
    OPENED,
    PeerLine,
    frame_layout,
    read_frame,
)
from tokenloom.datasets.training import RemoteDataset
from tokenloom.errors import JoinRefused
from tokenloom.snapshot import KEY, Base, History, Loaded, Older, Point

#: Peers wait so much longer than their leader may wait for the server, seconds.
MARGIN_S = 60.0
#: A batch's columns with a place for each token.
SEQUENCES = ("input_ids", "labels", "position_ids", "document_ids", "attention_mask", "loss_mask")


def mesh_dataset(
    url: str,
    mesh: DeviceMesh,
    batch_size: int | Sizes | None = None,
    *,
    dp: str | Sequence[str] = "dp",
    **options: Any,
) -> GroupDataset:
    """The dataset of this process of a mesh; to be called on all processes of the mesh, at the same time.

    ``dp`` names the dimensions that are data parallel, in the order in which they count: of HSDP
    ``("replicate", "shard")``. Along all others processes get the same batch. ``batch_size`` is that of a data-parallel
    rank, and ``options`` are those of ``RemoteDataset``.

    Raises ``ValueError`` where the mesh has no such dimension, or is not of all processes.
    """
    names = mesh.mesh_dim_names or ()
    wanted = (dp,) if isinstance(dp, str) else tuple(dp)
    absent = [name for name in wanted if name not in names]
    if absent or not wanted or len(set(wanted)) < len(wanted):
        raise ValueError(f"dp={dp!r} must name dimensions of the mesh, each once; it has {names}")
    if mesh.mesh.numel() != dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.mesh.numel()} processes and the job {dist.get_world_size()}: give the mesh of all of "
            "them, not a part such as mesh['dp'], in which a process does not see the peers that train on its batch"
        )
    place = mesh.get_coordinate()
    assert place is not None, "a mesh of all processes has this one"
    dims = [names.index(name) for name in wanted]
    sizes = [mesh.size(dim) for dim in dims]
    # Row by row, as processes of the mesh are counted.
    rank = int(np.ravel_multi_index([place[dim] for dim in dims], sizes)) if dims else 0
    peers = mesh.mesh[
        tuple(place[dim] if dim in dims else slice(None) for dim in range(len(place)))
    ]
    return GroupDataset(
        url,
        batch_size,
        rank=rank,
        world_size=int(np.prod(sizes)),
        peers=peers.flatten().tolist(),
        **options,
    )


def peers_of(rank: int) -> list[int]:
    """The processes of the job that have the same data-parallel rank as this one; where there is no mesh to ask. To be
    called on all processes, at the same time."""
    group = dist.new_group(backend="gloo")
    ranks = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, torch.tensor([rank]), group=group)
    dist.destroy_process_group(group)
    return [process for process, other in enumerate(ranks) if int(other) == rank]


class GroupDataset(ResumableDataset, IterableDataset[Batch]):
    """A rank's batches on each process of its model-parallel group.

    ``rank`` and ``world_size`` are data parallel; ``peers`` are the group's processes by their global ranks, the same
    on each of them and this one among them: the first leads, and is the one that joins. Other arguments are those of
    ``RemoteDataset``.

    Making it, ``iter()`` and ``next()`` are to be called by all processes of the group, as collectives are. A batch is
    the same on all, with its tensors on the CPU. So is the state: ``state_dict()`` waits for nobody, so any process may
    save. Where the leader's call raises, it raises on each peer, too: an error of Tokenloom's as it is, any other as a
    ``RuntimeError`` that names it.

    To evaluate, each process may have an ``EvaluationDataset`` of its own, with this one's ``rank`` and ``world_size``.
    """

    def __init__(
        self,
        url: str,
        batch_size: int | Sizes | None = None,
        *,
        rank: int,
        world_size: int,
        peers: Sequence[int],
        connection: ConnectionOptions | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        launch = options.get("launch")
        if launch is not None and launch.process_group is not None:
            raise ValueError(
                "launch.process_group is not for a model-parallel group, whose place says which rank it is"
            )
        if options.get("device") is not None:
            raise ValueError(
                "device: batches are handed on to peers on the CPU; move them to the device yourself"
            )
        connection = connection or ConnectionOptions()
        self._topology = Topology(rank, world_size, attempt="")
        timeouts = (
            connection.connect_timeout_s,
            connection.reconnect_timeout_s,
            connection.batch_timeout_s,
        )
        self._line = PeerLine(peers, sum(timeouts) + MARGIN_S)
        self._dataset: RemoteDataset | None = None
        self._batches: Iterator[Batch] | None = None
        self._layout: dict[str, Any] = {}
        #: The last boundary that the peers were sent.
        self._base: Base | None = None
        self._end: Exception | None = None
        self._end_reason: str | None = None
        if self.leads:
            try:
                self._dataset = RemoteDataset(
                    url,
                    batch_size,
                    rank=rank,
                    world_size=world_size,
                    connection=connection,
                    **options,
                )
            except Exception as error:
                self._line.send_error(error)
                raise
            start = self._dataset.state_dict()
            self._line.send(MADE, start)
        else:
            start = self._line.receive(MADE).document
        self._start = Loaded.read(start)

    @property
    def leads(self) -> bool:
        """Whether this process is the one of its group that is a rank of the run."""
        return self._line.leads

    @property
    def end_reason(self) -> str | None:
        """Why the data ended; None while it has not."""
        return self._dataset.end_reason if self._dataset is not None else self._end_reason

    # Batches

    def __iter__(self) -> GroupDataset:
        """Joins the run if that was not done, and goes on after the last batch yielded."""
        if get_worker_info() is not None:
            raise RuntimeError(
                "batches are broadcast among the trainers' processes: use no DataLoader worker"
            )
        if self._history is None and self._end is None:
            try:
                self._open()
            except Exception as error:
                self._end = error
                raise
        elif self._end is None and self._dataset is not None and not self.rank:
            self.history.begin()
        return self

    def __next__(self) -> Batch:
        self._check_not_closed()
        if self._end is not None:
            raise self._end  # was raised once; the peers are not asked again
        history = self.history
        try:
            return self._take(history) if self._batches else self._receive(history)
        except Exception as error:
            self._end = error
            raise

    def _open(self) -> None:
        """Joins, on the leader; the peers hear what it was answered."""
        if self._dataset is None:
            opened = self._line.receive(OPENED).document
            if self._loaded is not None and self._loaded.text != opened["loaded"]:
                raise JoinRefused(
                    f"this process (global rank {dist.get_rank()}) loaded another state than the leader of its "
                    f"model-parallel group (global rank {self._line.leader}): all of them load one checkpoint"
                )
            index, tokens, real, digest, base = opened["start"]
            self._base = _base(base)
            loaded = Loaded.read({KEY: opened["loaded"]}) if opened["own"] else None
            assert not isinstance(loaded, Older)
            self._history = History(
                opened["template"].encode(), Point(index, tokens, real, digest, self._base), loaded
            )
            sources = [Source(*source) for source in opened["facts"]["sources"]]
            form = SampleForm(*opened["facts"]["form"])
            self._facts = RunFacts(**(opened["facts"] | {"form": form, "sources": sources}))
            return
        try:
            self._batches = iter(self._dataset)
        except Exception as error:
            self._line.send_error(error)
            raise
        history, facts = self._dataset.history.copy(), self._dataset.facts
        start = history.last
        opened = {
            "loaded": (self._loaded or self._start).text,
            "own": history.loaded is not None,
            "template": history.template.decode(),
            "start": [*start[:4], _plain(start.base)],
            "facts": facts._asdict()
            | {"sources": [[source.id, source.spec, source.alias] for source in facts.sources]},
        }
        self._line.send(OPENED, opened)
        self._base, self._history, self._facts = start.base, self._dataset.history, facts

    def _take(self, history: History) -> Batch:
        """The leader's next batch, which it sends to its peers."""
        assert self._batches is not None and self._dataset is not None
        try:
            batch = next(self._batches)
            layout = frame_layout(batch)
        except StopIteration:
            self._line.send(END, {"reason": self._dataset.end_reason})
            raise
        except Exception as error:
            self._line.send_error(error)
            raise
        point = history.last
        document: dict[str, Any] = {}
        if layout != self._layout:
            self._layout = document["layout"] = layout
        if point.base is not self._base:
            self._base, document["base"] = point.base, _plain(point.base)
        if point.counts[1] == 1:
            document["counts"] = point.counts[0].hex()
        self._line.send(BATCH, document, point, batch, layout)
        return batch

    def _receive(self, history: History) -> Batch:
        """What the leader sends: its next batch."""
        message = self._line.receive(BATCH, END)
        if message.kind == END:
            self._end_reason = message.document["reason"]
            raise StopIteration
        self._layout = message.document.get("layout", self._layout)
        if "base" in message.document:
            self._base = _base(message.document["base"])
        assert self._base is not None
        batch = read_frame(message.body, self._layout)
        counts, steps = history.last.counts
        if "counts" in message.document:
            counts, steps = bytes.fromhex(message.document["counts"]), 0
        history.append(Point(*message.place, self._base, (counts, steps + 1)))
        return batch

    # State, reports and the end

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps a state for the first ``iter()``; on every process the same."""
        super().load_state_dict(state)
        if self._dataset is not None:
            self._dataset.load_state_dict(state)

    def report(self, losses: Mapping[int, tuple[float, int]], **numbers: Any) -> None:
        """As ``RemoteDataset``'s, for all processes of a group to call, or its leader alone: it is sent once."""
        if self._dataset is not None:
            self._dataset.report(losses, **numbers)

    def close(self) -> None:
        """Ends the leader's stream; waits for no peer. The state stays readable."""
        self._closed = True
        if self._dataset is not None:
            self._dataset.close()


def context_slice(
    batch: Batch, rank: int, size: int, *, labels: str, load_balanced: bool = False
) -> Batch:
    """What of a batch is a context-parallel rank's: [B, L / size] of each column that has a place for each token.

    Contiguous, or ``load_balanced`` as torch's ``context_parallel`` has it: of 2 × ``size`` parts the one at ``rank``
    and the one as far from the end, so that under a causal mask all ranks have as much to do.

    A label belongs to the logits at its place, since the id that it is may lie in another rank's slice. So labels that
    equal the ids (``labels="same"``; ``dataset.labels`` says which they are) are shifted, with −100 at each sample's
    end, and ``loss_mask`` with them. There are always ``position_ids``: the dataset's, which begin anew
    with each document, or else the place in the sample. ``cu_seqlens`` stays that of the whole batch.

    Raises ``ValueError`` where L cannot be cut so.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not one of {size}: ranks count from 0")
    length = batch["input_ids"].shape[1]
    count = 2 * size if load_balanced else size
    if length % count:
        raise ValueError(f"samples of {length} tokens cannot be cut into {count} equal parts")
    whole: dict[str, Any] = dict(batch)
    whole.setdefault("position_ids", torch.arange(length).expand_as(batch["input_ids"]))
    if labels not in ("same", "shifted"):
        raise ValueError(
            f'labels must be "same" or "shifted", as dataset.labels says; got {labels!r}'
        )
    if labels == "same":
        for name, last in (("labels", IGNORED), ("loss_mask", 0)):
            if name in whole:
                whole[name] = torch.nn.functional.pad(whole[name][:, 1:], (0, 1), value=last)
    width = length // count
    parts = [rank, count - 1 - rank] if load_balanced else [rank]
    for name in SEQUENCES:
        if name in whole:
            whole[name] = torch.cat(
                [whole[name][:, part * width : (part + 1) * width] for part in parts], dim=1
            )
    return cast("Batch", whole)


def _plain(base: Base) -> list[Any]:
    """A boundary as JSON has it."""
    return [base.sample_index, base.resume_state.decode()]


def _base(plain: Sequence[Any]) -> Base:
    return Base(plain[0], plain[1].encode())
