"""The floor: the smallest thing that packs, mixes and crosses gRPC. No state, no ledger, no credits, no digest.

    python -m benchmarks.prototype --runs 5         # tokens per CPU-second of this machine, now

Every result of the service is read against it: a figure that falls together with the prototype's is the machine's.
A server process reads the same files as the workloads ``parquet`` and ``arrow``, packs with numpy, draws sources by
weight, and sends 16 batches a message as raw bytes; two client processes widen them to int64 tensors. All of them
run with the allocator settings that make gRPC's large buffers cheap.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import corpora
from benchmarks.processes import Processes, Window
from benchmarks.results import Figures, Result, Row, show
from benchmarks.workloads import BATCH_SIZE, RANKS, SEQUENCE_LENGTH, Form

#: Batches in a message: 512 KiB of uint16.
GROUP = 16
#: Messages that wait for each rank.
QUEUED = 4
WARM_UP_STEPS = 20 * GROUP
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**26),
}

Ids = npt.NDArray[np.uint16]


def columns(folder: Path, form: Form, source: int) -> Iterator[Any]:
    """A source's row groups as Arrow lists of ids, for ever."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    while True:
        for path in sorted((folder / form / str(source)).iterdir()):
            if form == "parquet":
                file = pq.ParquetFile(path)
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, columns=["ids"], use_threads=False)
                    yield table.column(0).combine_chunks()
            else:
                reader = pa.ipc.open_file(pa.memory_map(str(path)))
                for batch in range(reader.num_record_batches):
                    yield reader.get_batch(batch).column(0)


def samples(found: Iterator[Any]) -> Iterator[Ids]:
    """Documents joined, each with an end-of-text id, and cut into samples."""
    carry = np.empty(0, np.uint16)
    for column in found:
        offsets = np.asarray(column.offsets)
        values = np.asarray(column.values)[offsets[0] : offsets[-1]]
        documents = len(offsets) - 1
        joined = np.empty(carry.size + values.size + documents, np.uint16)
        joined[: carry.size] = carry
        fresh = joined[carry.size :]
        ends = offsets[1:] - offsets[0] + np.arange(documents)
        is_id = np.ones(fresh.size, bool)
        is_id[ends] = False
        fresh[is_id] = values
        fresh[ends] = corpora.END_OF_TEXT
        whole = joined.size // SEQUENCE_LENGTH * SEQUENCE_LENGTH
        yield from joined[:whole].reshape(-1, SEQUENCE_LENGTH)
        carry = joined[whole:].copy()


def produce(folder: Path, form: Form, messages: list[queue.Queue[bytes]]) -> None:
    """Fills every rank's queue, for ever."""
    sources = [samples(columns(folder, form, source)) for source in range(len(corpora.WEIGHTS))]
    rng = np.random.default_rng(1)
    while True:
        drawn = iter(
            rng.choice(len(sources), RANKS * BATCH_SIZE * GROUP, p=corpora.WEIGHTS).tolist()
        )
        groups = [np.empty((GROUP, BATCH_SIZE, SEQUENCE_LENGTH), np.uint16) for _ in messages]
        for step in range(GROUP):
            for group in groups:
                for place in range(BATCH_SIZE):
                    group[step, place] = next(sources[next(drawn)])
        for waiting, group in zip(messages, groups, strict=True):
            waiting.put(group.tobytes())


def run_server(form: Form, folder: Path, address_file: Path) -> None:
    """Serves until it is ended; writes its address when it listens."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    import pyarrow as pa

    pa.set_cpu_count(1)
    messages: list[queue.Queue[bytes]] = [queue.Queue(QUEUED) for _ in range(RANKS)]
    threading.Thread(target=produce, args=(folder, form, messages), daemon=True).start()

    def stream(rank: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        while True:
            yield messages[int(rank)].get()

    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_send_message_length", -1)])
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(
        stream, request_deserializer=None, response_serializer=None
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("prototype.Loader", {"Stream": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    draft = address_file.with_suffix(".draft")
    draft.write_text(f"127.0.0.1:{port}")
    draft.rename(address_file)
    server.wait_for_termination()


def run_client(address: str, rank: int, board: Path) -> None:
    """Takes batches as int64 tensors until it is ended."""
    import grpc
    import torch

    torch.set_num_threads(1)
    cells = np.memmap(board, np.int64, "r+").reshape(-1, 3)[rank]
    channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
    call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
        "/prototype.Loader/Stream", request_serializer=None, response_deserializer=None
    )
    for message in call(str(rank).encode()):
        for step in np.frombuffer(message, np.uint16).reshape(GROUP, BATCH_SIZE, SEQUENCE_LENGTH):
            cells[0] += torch.from_numpy(step.astype(np.int64)).numel()
            cells[1] += 1


def figures(window: Window, takers: str = "client") -> Figures:
    """What is kept of a window, of the prototype or of the service; ``takers`` is the role of the other end."""
    memory, anonymous = window.memory_mb["server"]
    return {
        "M tokens/CPU-s": window.tokens_per_cpu_s / 1e6,
        "server ns/token": window.ns_per_token("server"),
        f"{takers} ns/token": window.ns_per_token(takers),
        "M tokens/s": window.tokens / window.seconds / 1e6,
        "server PSS MB": memory,
        "server anonymous MB": anonymous,
    }


def measure(form: Form, seconds: float) -> Figures:
    """One run of the prototype: a new server, new clients, a steady state of so many seconds."""
    folder = corpora.folder_of(corpora.W1)
    python = [sys.executable, "-m", "benchmarks.prototype"]
    with Processes(RANKS) as processes:
        address = processes.folder / "address"
        processes.start("server", [*python, "--serve", form, str(folder), str(address)], ALLOCATOR)
        processes.wait(address.exists, "the prototype's server")
        for rank in range(RANKS):
            client = [
                *python,
                "--client",
                address.read_text(),
                str(rank),
                str(processes.board.path),
            ]
            processes.start("client", client, ALLOCATOR)
        return figures(processes.window(WARM_UP_STEPS, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each form; medians are shown (default 3)"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="steady state per run (default 3)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument(
        "--serve", nargs=3, metavar=("FORM", "FOLDER", "ADDRESS_FILE"), help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--client", nargs=3, metavar=("ADDRESS", "RANK", "BOARD"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.serve:
        form, folder, address_file = options.serve
        run_server(form, Path(folder), Path(address_file))
        return
    if options.client:
        address, rank, board = options.client
        run_client(address, int(rank), Path(board))
        return
    result = Result.begin("prototype", "the bare prototype, 2 ranks")
    forms: tuple[Form, ...] = ("parquet", "arrow")
    for form in forms:
        result.rows.append(
            Row(name=form, runs=[measure(form, options.seconds) for _ in range(options.runs)])
        )
    show(result)
    if options.json:
        result.save(options.json)


if __name__ == "__main__":
    main()
