"""Model-parallel groups: one process of each joins the run, and hands each batch to its peers.

The processes that hold parts of one replica of a model (tensor-, context- and pipeline-parallel) train on the same
batch. One of them, the leader, is a rank of the run; the others get what it gets by one broadcast a step:

    leader   RemoteDataset.next() → frame: [header | numbers and tensors, one after the other] ─┐
    peers    ◀── broadcast (gloo, CPU) ─────────────────────────────────────────────────────────┘
             tensors over the frame's memory; a History, so that each process can write the state
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tokenloom_proto.batch_schedule import Sizes
from tokenloom_proto.errors import JoinRefused, named
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset, get_worker_info

from tokenloom.batch.layout import IGNORED, Batch
from tokenloom.connection.join import RunFacts, SampleForm, Source
from tokenloom.connection.options import ConnectionOptions
from tokenloom.connection.topology import Topology
from tokenloom.datasets.base import ResumableDataset
from tokenloom.datasets.remote import RemoteDataset
from tokenloom.snapshot import KEY, Base, History, Loaded, Older, Point

# The broadcasts of a model-parallel group: its leader sends, its peers receive, all in the same order.
#
# A frame has the room that the last batch needed. What does not fit, or comes seldom (a layout, the state at a
# boundary, an end, an error), follows in a second broadcast, of which the header says how long it is. Nothing is
# pickled.


# A batch as one block of bytes, which another process reads in place.
#
#     [numbers, int64 each | tensors, each from a multiple of 8 on]
#
# What a block does not say by itself, names, types and shapes, is its layout: the same for most batches.


def frame_layout(batch: Batch) -> dict[str, Any]:
    """How a batch lies in a block, as plain JSON; ``bytes`` is the size of that. Raises ``TypeError`` for a column that
    neither numbers, tensors nor texts are in."""
    layout: dict[str, Any] = {"numbers": [], "tensors": [], "values": {}, "bytes": 0}
    for name, value in batch.items():
        if type(value) is int:
            layout["numbers"].append(name)
            layout["bytes"] += 8
        elif isinstance(value, torch.Tensor):
            layout["tensors"].append(
                [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
            )
            layout["bytes"] += _padded(value.numel() * value.itemsize)
        else:
            layout["values"][name] = value
            for item in value if isinstance(value, list) else [value]:
                if not isinstance(item, str | None):
                    raise TypeError(
                        f"column {name!r} has a {type(item).__name__}, which is not handed on to a model-parallel "
                        "peer: leave it out of batching.columns"
                    )
    return layout


def write_frame(batch: Batch, layout: Mapping[str, Any], block: NDArray[np.uint8]) -> None:
    """Copies a batch into a block of ``layout["bytes"]``."""
    columns = cast("dict[str, Any]", batch)
    offset = 8 * len(layout["numbers"])
    block[:offset].view(np.int64)[:] = [columns[name] for name in layout["numbers"]]
    for name, *_ in layout["tensors"]:
        flat = columns[name].detach().reshape(-1).view(torch.uint8)
        torch.from_numpy(block[offset : offset + len(flat)]).copy_(flat)
        offset += _padded(len(flat))


def read_frame(block: NDArray[np.uint8], layout: Mapping[str, Any]) -> Batch:
    """Tensors over the block's memory. None is a view of another, as autograd sees it."""
    numbers = layout["numbers"]
    offset = 8 * len(numbers)
    batch: dict[str, Any] = dict(zip(numbers, block[:offset].view(np.int64).tolist(), strict=True))
    for name, dtype_name, shape in layout["tensors"]:
        dtype = getattr(torch, dtype_name)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        batch[name] = torch.from_numpy(block[offset : offset + size]).view(dtype).reshape(shape)
        offset += _padded(size)
    return cast("Batch", batch | layout["values"])


def _padded(size: int) -> int:
    return -(-size // 8) * 8


#: What a message is.
MADE, OPENED, BATCH, END, ERROR = range(5)
#: int64 numbers at a frame's begin: the kind, bytes of JSON and of a body that follow, sample index, total tokens, real
#: tokens, and two of the digest.
HEADER = 8


class PeerMessage(NamedTuple):
    kind: int
    place: tuple[int, int, int, str]
    document: dict[str, Any]
    body: NDArray[np.uint8]


class PeerLine:
    """The broadcasts of a group, in the order in which all its processes make them."""

    def __init__(self, peers: Sequence[int], timeout_s: float) -> None:
        """On all processes of a group at the same time; the first of ``peers`` leads. They wait so long at most."""
        if dist.get_rank() not in peers:
            raise ValueError(
                f"this process (global rank {dist.get_rank()}) is none of the peers {list(peers)}"
            )
        self.leader = peers[0]
        self.leads = dist.get_rank() == self.leader
        # Bytes of a body that a frame has room for.
        self._room = 0
        # None where the leader has no peers.
        self._group: dist.ProcessGroup | None = None
        if len(peers) > 1:
            # Of its own, on the CPU, so that its order is nobody else's business. Known to its members only: a job
            # may have thousands of such groups.
            self._group = dist.new_group(
                list(peers),
                timeout=timedelta(seconds=timeout_s),
                backend="gloo",
                use_local_synchronization=True,
            )

    def send_error(self, error: Exception) -> None:
        """Tells the peers what this process raises."""
        self.send(ERROR, {"name": type(error).__name__, "message": str(error)})

    def send(
        self,
        kind: int,
        document: Mapping[str, Any] | None = None,
        point: Point | None = None,
        batch: Batch | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        """Tells the peers, with a batch whose layout they know or find in the document."""
        if self._group is None:
            return
        text = json.dumps(document).encode() if document else b""
        size = layout["bytes"] if layout else 0
        fits = not size or size == self._room
        frame = np.empty(8 * HEADER + self._room, np.uint8)
        numbers = frame[: 8 * HEADER].view(np.int64)
        numbers[:] = 0
        numbers[:3] = kind, len(text), 0 if fits else size
        if point is not None:
            numbers[3:6] = point.sample_index, point.total_tokens, point.real_tokens
            numbers[6:8] = np.frombuffer(bytes.fromhex(point.digest), np.int64)
        rest = np.empty(len(text) + (0 if fits else size), np.uint8)
        rest[: len(text)] = np.frombuffer(text, np.uint8)
        if batch is not None and layout is not None:
            write_frame(batch, layout, frame[8 * HEADER :] if fits else rest[len(text) :])
        self._broadcast(frame)
        if len(rest):
            self._broadcast(rest)
        if not fits:
            self._room = size

    def receive(self, *kinds: int) -> PeerMessage:
        """What the leader tells; raises the error that it tells of."""
        frame = np.empty(8 * HEADER + self._room, np.uint8)
        self._broadcast(frame)
        kind, text_bytes, size, *place = frame[: 8 * HEADER].view(np.int64)[:6].tolist()
        rest = np.empty(text_bytes + size, np.uint8)
        if len(rest):
            self._broadcast(rest)
        document = json.loads(rest[:text_bytes].tobytes()) if text_bytes else {}
        body = frame[8 * HEADER :]
        if size:
            self._room = size
            body = rest[text_bytes:].copy()  # to begin where numbers may
        if kind == ERROR:
            raise self._error(document)
        assert kind in kinds, f"the leader tells {kind} where {kinds} was expected"
        digest = frame[48:64].tobytes().hex()
        return PeerMessage(kind, (place[0], place[1], place[2], digest), document, body)

    def _broadcast(self, data: NDArray[np.uint8]) -> None:
        dist.broadcast(torch.from_numpy(data), src=self.leader, group=self._group)

    def _error(self, document: Mapping[str, str]) -> Exception:
        name, message = document["name"], document["message"]
        error = named(
            name,
            f"{message} (met by global rank {self.leader}, which leads this model-parallel group)",
        )
        return error if type(error).__name__ == name else RuntimeError(str(error))


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
        if options.get("process_group"):
            raise ValueError(
                "process_group is not for a model-parallel group, whose place says which rank it is"
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
