"""Batches of tensors: on the CPU over the memory of numpy arrays, or on another device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tokenloom.batch.arrays import ArrayMaker, Steps
from tokenloom.batch.layout import IGNORED, PADDING, Layout, RawColumn
from tokenloom.batch.packed import Message, Parts
from tokenloom.errors import ProtocolError


class TensorMaker(ArrayMaker):
    """Makes batches of tensors in ordinary memory that is used again."""

    def batch(self, message: Steps, step: int) -> dict[str, Any]:
        """The batch of a micro-step, counted from 0 in the message."""
        return tensors_of(message.batch(step, self._pool))


def tensors_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with each array and column as a tensor. None is a view of another."""
    tensors = dict(batch)
    for name, value in batch.items():
        if isinstance(value, np.ndarray):
            tensors[name] = torch.from_numpy(value)
        elif isinstance(value, RawColumn):
            tensors[name] = _tensor(value)
    return tensors


def _tensor(value: RawColumn) -> torch.Tensor:
    dtype = getattr(torch, value.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(
            f"column {value.name!r} is of dtype {value.dtype!r}, which torch {torch.__version__} does not have: "
            "install a newer torch, or leave the column out of batching.columns"
        )
    if not value.data.size:
        return torch.empty(value.shape, dtype=dtype)
    return torch.from_numpy(value.data).view(dtype).reshape(value.shape)


# Batches made on the trainer's device: what crosses to it is what crossed the network.
#
#     message ── parts ──▶ pinned memory ── copy, on a stream of its own ──▶ device memory ── widened ──▶ batch
#                          one micro-step ahead of the trainer                   on the trainer's stream
#
# A micro-step crosses in one copy: ids as narrow as they travelled, and the few numbers that say where labels do not
# count and where documents begin. Tensors are widened, masked and summed up on the device, and equal those of the CPU
# to the bit. Two sets of memory take turns. Two events for each guard it: none is written on the host before its copy
# is over, nor copied over on the device before the trainer's stream has widened what was there.


#: An array on the host, and its type and shape as a tensor.
_Column: TypeAlias = tuple[NDArray[Any], torch.dtype, tuple[int, ...]]
#: Where each array begins among a step's bytes; no type needs more.
_ALIGNED_BYTES = 16
#: Memory for this much more than a micro-step needs, so that one with some more documents needs no other.
_SPARE = 1.25
#: Signed types of the widths that ids have: torch knows little of unsigned ones beyond bytes.
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def resolve(device: str | torch.device) -> torch.device:
    """The device that was asked for. Raises ``ValueError`` for one that batches cannot be made on here."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f'device must be "cuda", "cuda:1" or "cpu"; got {device!r}: {error}'
        ) from None
    if resolved.type == "cpu":
        return resolved
    if resolved.type != "cuda":
        raise ValueError(
            f'batches are made on "cuda" or "cpu"; got device={str(resolved)!r}: leave device out, and move the '
            "tensors of each batch"
        )
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = (
            f"torch {torch.__version__} was built without CUDA: install a build with it"
            if torch.version.cuda is None and torch.version.hip is None
            else "torch finds no GPU: is there one, with its driver, and does this process see it"
            + (f" (CUDA_VISIBLE_DEVICES={visible!r})?" if visible is not None else "?")
        )
        raise ValueError(f"device={str(resolved)!r} cannot be used: {why}")
    if resolved.index is not None and resolved.index >= torch.cuda.device_count():
        raise ValueError(
            f"device={str(resolved)!r} cannot be used: this process sees {torch.cuda.device_count()} GPUs"
        )
    return resolved


class Transfer:
    """Takes micro-steps to a device: makes the batches of a launch there. For one thread at a time, as ``next()``
    is."""

    def __init__(self, device: torch.device, layout: Layout) -> None:
        """``cuda`` is the current one of this thread."""
        self.copied_bytes = 0
        self._layout = layout
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._memory = [_Memory(), _Memory()]
        self._sent: _Sent | None = None

    def send(self, message: Steps, step: int) -> None:
        """Begins the copy of a step: for the CPU's work only, it waits for nothing of the device's but the copy before
        the last."""
        if self._sent is not None and self._sent.is_of(message, step):
            return
        columns, made_of = _columns(message, step)
        places, size = _places(columns)
        self._memory.reverse()  # the one that was not used last
        memory = self._memory[0]
        if memory.copied is not None:
            memory.copied.synchronize()
        # In inference mode, too, this must be memory that may be written to outside of it.
        with torch.inference_mode(False):
            if len(memory.host) < size:
                self._allocate(memory, int(size * _SPARE))
            for (data, _, _), place in zip(columns.values(), places.values(), strict=True):
                np.copyto(
                    memory.bytes[place.begin : place.end].view(data.dtype).reshape(data.shape), data
                )
            if self._stream is not None:
                with torch.cuda.stream(self._stream):
                    if memory.used is not None:
                        self._stream.wait_event(memory.used)
                    memory.device[:size].copy_(memory.host[:size], non_blocking=True)
                    # One on which the host sleeps, where it is that far ahead.
                    memory.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    memory.copied.record(self._stream)
        self.copied_bytes += size
        self._sent = _Sent(message, step, memory, places, made_of)

    def batch(self, message: Steps, step: int) -> dict[str, Any]:
        """The batch of a micro-step, ready for what the current stream does next."""
        self.send(message, step)
        sent, self._sent = self._sent, None
        assert sent is not None
        memory = sent.memory
        with torch.cuda.device(self.device) if self._stream is not None else nullcontext():
            if memory.copied is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(memory.copied)
            columns = {
                name: memory.device[begin:end].view(dtype).view(shape)
                for name, (begin, end, dtype, shape) in sent.places.items()
            }
            if isinstance(sent.made_of, Parts):
                batch = _batch(self._layout, sent.made_of, columns)
            else:
                batch = sent.made_of | {name: column.clone() for name, column in columns.items()}
            if memory.copied is not None:
                # The next copy waits for this event; and where the memory is given up, for a larger one or at the end,
                # the allocator does.
                memory.used = torch.cuda.Event()  # type: ignore[no-untyped-call]
                memory.used.record(stream)
                memory.device.record_stream(stream)
        return batch

    def _allocate(self, memory: _Memory, size: int) -> None:
        memory.host = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
        memory.bytes = memory.host.numpy()
        if self._stream is None:
            memory.device = memory.host
            return
        with torch.cuda.stream(self._stream):
            memory.device = torch.empty(size, dtype=torch.uint8, device=self.device)
        memory.used = None  # the allocator gives it out on this stream once nothing else uses it


@dataclass(slots=True)
class _Memory:
    """Of one step: on the host, and on the device (the same where that is the CPU)."""

    host: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    bytes: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    device: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    copied: torch.cuda.Event | None = None
    """The copy to the device is over."""
    used: torch.cuda.Event | None = None
    """What was copied has been widened."""


class _Place(NamedTuple):
    """An array among a step's bytes."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Sent(NamedTuple):
    """A micro-step whose copy has begun."""

    message: Steps
    step: int
    memory: _Memory
    places: dict[str, _Place]
    made_of: Parts | dict[str, Any]

    def is_of(self, message: Steps, step: int) -> bool:
        return self.message is message and self.step == step


def _columns(message: Steps, step: int) -> tuple[dict[str, _Column], Parts | dict[str, Any]]:
    """What of a micro-step crosses to the device, and the rest of it."""
    if isinstance(message, Message):
        parts = message.parts(step)
        return {
            name: (own, _SIGNED[own.itemsize], own.shape) for name, own in parts.arrays.items()
        }, parts
    # Rows travel in the types that they have for torch, some of which numpy does not know.
    batch = tensors_of(message.batch(step))
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return {
        name: (tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }, batch


def _places(columns: Mapping[str, _Column]) -> tuple[dict[str, _Place], int]:
    """Where each array lies, one after the other; and the bytes of all."""
    places, end = {}, 0
    for name, (data, dtype, shape) in columns.items():
        begin = -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES
        end = begin + data.nbytes
        places[name] = _Place(begin, end, dtype, shape)
    return places, end


def _batch(layout: Layout, parts: Parts, columns: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """As ``Message.batch``, of columns that are on the device. No tensor is a view of another or of a column."""
    ids, sources = columns["ids"], columns["source_ids"]
    inputs = _widened(ids[:, : layout.sequence_length])
    labels = _widened(ids[:, 1:]) if layout.shifted else inputs.clone()
    device, (size, length) = ids.device, inputs.shape
    begins, ends = columns.get("begins"), columns.get("ends")
    if parts.short and begins is not None and ends is not None:
        target = torch.arange(layout.shifted, length + layout.shifted, device=device)
        labels.masked_fill_(
            (target < (begins + (begins > 0))[:, None]) | (target >= ends[:, None]), IGNORED
        )
    if (bits := columns.get("mask_bits")) is not None:
        counted = (
            bits[:, :, None]
            .bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=device))
            .bitwise_and_(1)
        )
        labels.masked_fill_(
            counted.view(size, -1)[:, layout.shifted : layout.shifted + length] == 0, IGNORED
        )
    if (boundaries := columns.get("boundaries")) is not None:
        labels.view(-1).index_fill_(0, boundaries.to(torch.int64), IGNORED)
    if parts.padded:
        labels.masked_fill_((sources == PADDING)[:, None], IGNORED)
    batch: dict[str, Any] = {
        "input_ids": inputs,
        "labels": labels,
        "source_ids": sources.clone(),
        "sample_ids": columns["sample_ids"].clone(),
        **parts.numbers,
    }
    for name, slope in parts.slopes.items():
        column = torch.full_like(inputs, slope)
        column.view(-1).index_copy_(
            0, columns["document_begins"].to(torch.int64), columns[name].to(torch.int64)
        )
        column.view(-1).cumsum_(0)
        batch[name] = column
    if "cu_seqlens" in layout.columns:
        batch["cu_seqlens"] = columns["cu_seqlens"].clone()
    if "attention_mask" in layout.columns:
        if begins is None or ends is None:
            attended = (sources != PADDING)[:, None]
        else:
            position = torch.arange(length, device=device)
            attended = (position >= begins[:, None]) & (position < ends[:, None])
        batch["attention_mask"] = torch.empty_like(inputs).copy_(attended)
    if "loss_mask" in layout.columns:
        batch["loss_mask"] = (labels != IGNORED).to(torch.int64)
    return batch


def _widened(ids: torch.Tensor) -> torch.Tensor:
    """A new int64 tensor of ids that torch holds as signed."""
    wide = torch.empty(ids.shape, dtype=torch.int64, device=ids.device).copy_(ids)
    if ids.dtype == torch.int16:
        wide.bitwise_and_(0xFFFF)
    elif ids.dtype == torch.int32:
        wide.bitwise_and_(0xFFFFFFFF)
    return wide
