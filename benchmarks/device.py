"""The way of a batch to the GPU: what crosses to it, what that costs, and what of it a training step has to wait for.

    python -m benchmarks.device
    python -m benchmarks.device --steps 300 --compute-ms 2 --json device.json

Needs a GPU, the client's dependencies and `rich`; a replaying server with generated ids runs beside it (`--device cpu`
only shows that it works). Three ways, of which the first two are what trainers write themselves:

``to(device)``   int64 tensors in ordinary memory, each moved by ``tensor.to(device)``.
``pinned``       the same, each copied to pinned memory and moved by ``to(device, non_blocking=True)``.
``device=``      ``RemoteDataset(…, device=…)``: ids as narrow as they travelled, one step ahead, widened on the GPU.

The first table has no server: steps are made from messages in this process. ``GPU µs`` is the time that the trainer's
stream is taken by a batch, measured by events behind a kernel that waits, so that launches do not count. The second has
a trainer whose steps compute for a while and end with a value that the host waits for: ``step`` against that of the
same steps with one batch that stays on the GPU is what the data add.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenloom import LaunchOptions, RemoteDataset
from tokenloom.batch.layout import Layout, StepNumbers
from tokenloom.batch.packed import Message
from tokenloom.batch.tensors import TensorMaker, Transfer

from benchmarks.client_path import CASES, RUN, Case
from benchmarks.results import Result, Row, show

VOCABULARY = 32_000
#: Of the messages that are made here; more of them than a core's cache holds.
MESSAGE_STEPS, MESSAGES = 8, 8
WARM_UP_STEPS = 20
#: Tokens of a document, where there are any.
DOCUMENT_TOKENS = 512
#: For so many cycles a kernel waits before GPU time is measured: longer than any launch of a batch.
WAIT_CYCLES = 5_000_000
LAYOUTS = {
    "8 × 2048, 16 bit": Layout(batch_size=8, sequence_length=2_048, id_type="<u2", shifted=True),
    "8 × 2048, 32 bit": Layout(batch_size=8, sequence_length=2_048, id_type="<u4", shifted=True),
    "8 × 8192, 32 bit": Layout(batch_size=8, sequence_length=8_192, id_type="<u4", shifted=True),
    "8 × 8192, 32 bit, documents": Layout(
        batch_size=8,
        sequence_length=8_192,
        id_type="<u4",
        shifted=True,
        mask_boundaries=True,
        columns=frozenset({"position_ids", "document_ids", "cu_seqlens"}),
    ),
}
WAYS = ("to(device)", "pinned", "device=")

Batch = dict[str, Any]
Move = Callable[[Batch], Batch]


def move_plainly(device: torch.device) -> Move:
    """As most loops do."""
    return lambda batch: {
        name: value.to(device) if _is_tensor(value) else value for name, value in batch.items()
    }


def move_pinned(device: torch.device) -> Move:
    """As careful ones do."""
    pin = device.type == "cuda"

    def move(batch: Batch) -> Batch:
        return {
            name: (value.pin_memory() if pin else value).to(device, non_blocking=True)
            if _is_tensor(value)
            else value
            for name, value in batch.items()
        }

    return move


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def messages_of(layout: Layout) -> list[Message]:
    """Random ids, and documents of much the same length where the layout asks for them."""
    draws = np.random.default_rng(0)
    samples = MESSAGE_STEPS * layout.batch_size
    count = layout.sequence_length // DOCUMENT_TOKENS if layout.document_starts else 0
    found = []
    numbers = StepNumbers(
        begin_indices=[step * layout.batch_size for step in range(MESSAGE_STEPS)],
        end_indices=[(step + 1) * layout.batch_size for step in range(MESSAGE_STEPS)],
        slices=[0] * MESSAGE_STEPS,
        total_tokens=list(range(MESSAGE_STEPS)),
        real_tokens=list(range(MESSAGE_STEPS)),
        tokens=list(range(MESSAGE_STEPS)),
        label_tokens=list(range(MESSAGE_STEPS)),
        source_ids=[0] * samples,
    )
    for _ in range(MESSAGES):
        ids = draws.integers(0, VOCABULARY, samples * layout.width).astype(layout.id_type)
        starts = np.sort(draws.integers(0, layout.sequence_length, (samples, count)), axis=1)
        found.append(
            Message(
                layout,
                numbers,
                ids=ids.tobytes(),
                document_counts=[count] * samples,
                document_starts=starts.ravel().tolist(),
            )
        )
    return found


def batches_of(
    layout: Layout, device: torch.device, way: str
) -> tuple[Callable[[int], Batch], Callable[[], int]]:
    """The batch of a step, counted on for ever; and the bytes that crossed since it was last asked."""
    messages, maker = messages_of(layout), TensorMaker(layout)
    crossed = 0

    def place(step: int) -> tuple[Message, int]:
        message, number = divmod(step % (MESSAGES * MESSAGE_STEPS), MESSAGE_STEPS)
        return messages[message], number

    if way == "device=":
        transfer = Transfer(device, layout)

        def device_batch(step: int) -> Batch:
            batch = transfer.batch(*place(step))
            transfer.send(*place(step + 1))
            return batch

        def bytes_of_transfer() -> int:
            nonlocal crossed
            crossed, before = transfer.copied_bytes, crossed
            return crossed - before

        return device_batch, bytes_of_transfer

    move = move_plainly(device) if way == "to(device)" else move_pinned(device)

    def moved(step: int) -> Batch:
        nonlocal crossed
        batch = maker.batch(*place(step))
        crossed += sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
        return move(batch)

    def bytes_of_tensors() -> int:
        nonlocal crossed
        crossed, before = 0, crossed
        return before

    return moved, bytes_of_tensors


def transfer(layout: Layout, device: torch.device, way: str, steps: int) -> dict[str, float]:
    """What batches cost that only have to get to the device."""
    batch_of, crossed = batches_of(layout, device, way)
    tokens = layout.batch_size * layout.sequence_length
    done = Done(device)
    for step in range(WARM_UP_STEPS):
        batch_of(step)
        done.wait()
    crossed()
    began, cpu = time.perf_counter(), time.process_time()
    for step in range(steps):
        batch_of(WARM_UP_STEPS + step)
        done.wait()
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - began
    figures = {
        "bytes/token": crossed() / steps / tokens,
        "CPU ns/token": cpu_s / steps / tokens * 1e9,
        "CPU µs/step": cpu_s / steps * 1e6,
        "wall µs/step": wall_s / steps * 1e6,
    }
    if device.type == "cuda":
        figures["GPU µs/step"] = statistics.median(
            gpu_s(batch_of, step) * 1e6 for step in range(min(steps, 100))
        )
    return figures


class Done:
    """Waits asleep until the device has done all, so that waiting is no CPU time."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._event is not None:
            self._event.record()
            self._event.synchronize()


def gpu_s(batch_of: Callable[[int], Batch], step: int) -> float:
    """For how long the trainer's stream is taken by a batch; the device was idle before."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    batch_of(step)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@contextmanager
def server(case: str) -> Iterator[str]:
    """The URL of a run that never ends."""
    command = [sys.executable, "-m", "benchmarks.client_path", "--role", "server", "--case", case]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield f"grpc://127.0.0.1:{process.stdout.readline().strip()}/{RUN}"
        finally:
            process.stdin.close()


def check(case: str, device: torch.device, steps: int) -> None:
    """Fast and wrong is not fast: the batches from a server are those of the CPU, and so are the states."""
    with server(case) as url:
        options: dict[str, Any] = {"rank": 0, "world_size": 1}
        with (
            RemoteDataset(
                url, CASES[case].batch_size, launch=LaunchOptions(attempt="a"), **options
            ) as plain,
            RemoteDataset(
                url,
                CASES[case].batch_size,
                launch=LaunchOptions(attempt="b"),
                device=device,
                **options,
            ) as moved,
        ):
            for step, expected, batch in zip(range(steps), plain, moved, strict=False):
                found = dict[str, Any](batch)
                same = all(
                    found[name].device.type == device.type and torch.equal(found[name].cpu(), value)
                    if isinstance(value, torch.Tensor)
                    else found[name] == value
                    for name, value in dict[str, Any](expected).items()
                )
                if not same or moved.state_dict() != plain.state_dict():
                    raise SystemExit(
                        f"{case}: batch or state of step {step} on {device} is not that of the CPU"
                    )


class Work:
    """Matrix products that take so long, and use the batch."""

    def __init__(self, device: torch.device, ms: float) -> None:
        cuda = device.type == "cuda"
        size = 4096 if cuda else 128
        self._matrix = torch.randn(
            size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32
        )
        self._table = torch.randn(VOCABULARY, 8, device=device)
        self._done = Done(device)
        self._repeats = 8
        for _ in range(3):
            self._products()
        self._done.wait()
        began = time.perf_counter()
        self._products()
        self._done.wait()
        self._repeats = max(1, round(8 * ms / 1e3 / (time.perf_counter() - began)))

    def step(self, batch: Batch) -> float:
        """A value that the host waits for, as for the loss in a log."""
        found = (
            torch.nn.functional.embedding(batch["input_ids"], self._table).sum()
            + batch["labels"].sum()
        )
        self._products()
        self._done.wait()
        return float(found.item())

    def _products(self) -> None:
        for _ in range(self._repeats):
            torch.mm(self._matrix, self._matrix)


def overlap(
    case: str, device: torch.device, way: str | None, steps: int, compute_ms: float
) -> dict[str, float]:
    """Steps that compute; ``way`` None: always on the same batch."""
    form: Case = CASES[case]
    work = Work(device, compute_ms)
    with server(case) as url:
        options: dict[str, Any] = {"rank": 0, "world_size": 1, "attempt": "a"}
        asked = device if way == "device=" else None
        with RemoteDataset(url, form.batch_size, device=asked, **options) as dataset:
            batches: Iterator[Any] = iter(dataset)
            move = move_pinned(device) if way == "pinned" else move_plainly(device)
            same = move(dict(next(batches)))
            waited = 0.0
            for step in range(WARM_UP_STEPS + steps):
                if step == WARM_UP_STEPS:
                    began, cpu, waited = time.perf_counter(), time.process_time(), 0.0
                asked_at = time.perf_counter()
                if way is None:
                    batch = same
                else:
                    batch = next(batches)
                    if way != "device=":
                        batch = move(dict(batch))
                waited += time.perf_counter() - asked_at
                work.step(batch)
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return {
        "step ms": wall_s / steps * 1e3,
        "host until the batch is there µs": waited / steps * 1e6,
        "CPU µs/step": cpu_s / steps * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu (default cuda)")
    parser.add_argument("--steps", type=int, default=300, help="of each run (default 300)")
    parser.add_argument(
        "--runs", type=int, default=3, help="of each row; medians are shown (default 3)"
    )
    parser.add_argument(
        "--compute-ms", type=float, default=2.0, help="of a training step (default 2)"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the first table there, and the other beside it",
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"

    crossing = Result.begin("device", f"batches to {named}, no server")
    for name, layout in LAYOUTS.items():
        for way in WAYS:
            row = Row(name=f"{name}: {way}")
            row.runs += [transfer(layout, device, way, options.steps) for _ in range(options.runs)]
            crossing.rows.append(row)
    show(crossing)

    check("batch-8", device, options.steps)
    training = Result.begin(
        "device-steps", f"steps of {options.compute_ms:g} ms on {named}, batches from a server"
    )
    for case in ("batch-8", "batch-8-u32"):
        for chosen in (None, *WAYS):
            row = Row(name=f"{case}: {chosen or 'always the same batch'}")
            row.runs += [
                overlap(case, device, chosen, options.steps, options.compute_ms)
                for _ in range(options.runs)
            ]
            training.rows.append(row)
    show(training)
    if options.json:
        crossing.save(options.json)
        training.save(options.json.with_suffix(f".steps{options.json.suffix}"))


if __name__ == "__main__":
    main()
