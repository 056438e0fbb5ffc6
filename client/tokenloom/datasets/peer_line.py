"""The broadcasts of a model-parallel group: its leader sends, its peers receive, all in the same order.

A frame has the room that the last batch needed. What does not fit, or comes seldom (a layout, the state at a boundary,
an end, an error), follows in a second broadcast, of which the header says how long it is. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tokenloom.batch.layout import Batch
from tokenloom.errors import named
from tokenloom.snapshot import Point

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
