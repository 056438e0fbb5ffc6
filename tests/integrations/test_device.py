"""Batches that are made on the trainer's device equal those of the CPU, to the bit, and so do states.

The path is one for all devices, so what can be run without a GPU is run on the CPU: all but pinned memory, streams and
events.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.messages import step_numbers
from support.served import url_of
from tokenloom import LaunchOptions, PeekDataset, RemoteDataset
from tokenloom.batch.layout import OPTIONAL_COLUMNS, Layout
from tokenloom.batch.packed import Message
from tokenloom.batch.rows import Bucket, Feature, RowsMessage
from tokenloom.batch.tensors import TensorMaker, Transfer, resolve, tensors_of

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
COLUMNS = frozenset(OPTIONAL_COLUMNS)
STEPS, SIZE, LENGTH = 3, 4, 37


def message_of(layout: Layout, seed: int = 0, steps: int = STEPS) -> Message:
    """Steps of random ids, lengths, masks and documents; the last step of three has a sample of padding."""
    draws = np.random.default_rng(seed)
    samples = steps * layout.batch_size
    ids = draws.integers(0, 2 ** (8 * layout.id_bytes), (samples, layout.width), np.uint64).astype(
        layout.id_type
    )
    parts = [ids.view(np.uint8).reshape(samples, -1)]
    lengths = np.full(samples, layout.width)
    if layout.lengths:
        lengths = draws.integers(0, layout.width + 1, samples)
        lengths[::3] = layout.width
        parts.append(lengths.astype("<u4").view(np.uint8).reshape(samples, 4))
    if layout.loss_masks:
        mask_bytes = -(-layout.width // 32) * 4
        parts.append(draws.integers(0, 256, (samples, mask_bytes), np.uint64).astype(np.uint8))
    sources = draws.integers(0, 5, samples).tolist()
    if not layout.lengths:
        sources[-1] = -1
    counts = draws.integers(0, 5, samples) if layout.document_starts else np.zeros(0, int)
    limit = (
        np.minimum(lengths, layout.sequence_length)
        if layout.lengths
        else np.full(samples, layout.sequence_length)
    )
    starts = [
        np.sort(draws.choice(max(1, limit[i]), min(n, max(1, limit[i])), False))
        for i, n in enumerate(counts)
    ]
    return Message(
        layout,
        step_numbers(sources, steps, ranks=2, first=100),
        ids=np.concatenate(parts, axis=1).tobytes(),
        document_counts=[len(each) for each in starts],
        document_starts=[int(start) for each in starts for start in each],
    )


def assert_equal(found: dict[str, Any], expected: dict[str, Any], device: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert found[name] == value, name
            continue
        tensor = found[name]
        assert tensor.device.type == device
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (
            value.dtype,
            value.shape,
            value.stride(),
        ), name
        assert torch.equal(tensor.cpu(), value), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("id_type", ["<u1", "<u2", "<u4"])
def test_batches_of_all_layouts_equal_those_of_the_cpu(device: str, id_type: str) -> None:
    flags = ("shifted", "lengths", "pads_left", "loss_masks", "mask_boundaries")
    compared = 0
    for chosen in itertools.product([False, True], repeat=len(flags)):
        for asked in (frozenset(), COLUMNS):
            options = dict(zip(flags, chosen, strict=True))
            layout = Layout(
                batch_size=SIZE, sequence_length=LENGTH, id_type=id_type, columns=asked, **options
            )
            message, maker = message_of(layout, seed=compared), TensorMaker(layout)
            transfer = Transfer(torch.device(device), layout)
            for step in range(STEPS):
                expected = maker.batch(message, step)
                assert_equal(transfer.batch(message, step), expected, device)
                compared += 1
    assert compared == 2 ** len(flags) * 2 * STEPS


@pytest.mark.parametrize("device", DEVICES)
def test_ids_cross_as_narrow_as_they_travelled(device: str) -> None:
    layout = Layout(batch_size=SIZE, sequence_length=2048, id_type="<u2", shifted=True)
    transfer = Transfer(torch.device(device), layout)
    transfer.batch(message_of(layout), 0)

    beside = 2 * 8 * SIZE + 64  # source and sample ids, and what they are aligned to
    assert SIZE * 2049 * 2 <= transfer.copied_bytes <= SIZE * 2049 * 2 + beside


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_was_sent_ahead_is_not_sent_again_and_may_be_dropped(device: str) -> None:
    layout = Layout(batch_size=SIZE, sequence_length=LENGTH, id_type="<u2", shifted=True)
    message, other, maker = message_of(layout), message_of(layout, seed=1), TensorMaker(layout)
    transfer = Transfer(torch.device(device), layout)

    first = transfer.batch(message, 0)
    transfer.send(message, 1)
    sent = transfer.copied_bytes
    assert_equal(transfer.batch(message, 1), maker.batch(message, 1), device)
    assert transfer.copied_bytes == sent

    transfer.send(message, 2)
    assert_equal(transfer.batch(other, 2), maker.batch(other, 2), device)
    assert_equal(first, maker.batch(message, 0), device)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_are_their_holders_alone(device: str) -> None:
    layout = Layout(
        batch_size=SIZE, sequence_length=LENGTH, id_type="<u4", shifted=False, columns=COLUMNS
    )
    message, transfer = message_of(layout), Transfer(torch.device(device), layout)
    with torch.inference_mode():  # memory that is made here is used outside, too
        transfer.batch(message, 0)
    batch, later = transfer.batch(message, 1), transfer.batch(message, 2)
    for name, tensor in batch.items():
        if isinstance(tensor, torch.Tensor):
            before = tensor._version
            tensor.fill_(7)
            assert tensor._version == before + 1, name
    assert_equal(later, TensorMaker(layout).batch(message, 2), device)
    assert all(bool((t == 7).all()) for t in batch.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_in_batches_cross_as_they_are(device: str) -> None:
    features = tuple(
        Feature(name, dtype, shape)
        for name, dtype, shape in (
            ("image", "uint8", (3, 5)),
            ("latent", "bfloat16", (7,)),
            ("length", "int32", ()),
            ("empty", "float32", (0,)),
            ("caption", "string", ()),
        )
    )
    caption = "ab"
    fixed = sum(feature.bytes for feature in features)
    row = np.arange(fixed, dtype=np.uint8)
    row[-4:] = np.frombuffer(np.uint32(len(caption)).tobytes(), np.uint8)
    data = (row.tobytes() + caption.encode()) * 2 * 2
    message = RowsMessage(
        2,
        step_numbers([0, 0, 1, 1], 2),
        data=data,
        buckets=[Bucket("b", "s", features, None)] * 2,
    )
    transfer = Transfer(
        torch.device(device), Layout(batch_size=2, sequence_length=1, id_type="<u2", shifted=False)
    )
    for step in range(2):
        found, expected = transfer.batch(message, step), tensors_of(message.batch(step))
        assert found["caption"] == [caption] * 2
        assert found["latent"].dtype == torch.bfloat16
        for name in ("image", "latent", "length", "source_ids", "sample_ids"):
            assert found[name].device.type == device
            assert torch.equal(
                found[name].cpu().view(torch.uint8), expected[name].view(torch.uint8)
            ), name
        assert (found["empty"].shape, found["empty"].device.type) == ((2, 0), device)


@needs_gpu
def test_no_memory_is_written_while_the_gpu_still_reads_it() -> None:
    # The GPU is kept behind by kernels that do nothing but wait, and the host goes on: it would overwrite what is not
    # yet copied or widened, if nothing stopped it. Every other step is on a stream of the trainer's own.
    layout = Layout(
        batch_size=8,
        sequence_length=1024,
        id_type="<u2",
        shifted=True,
        mask_boundaries=True,
        columns=frozenset({"position_ids"}),
    )
    steps = 60
    message, maker = message_of(layout, steps=steps), TensorMaker(layout)
    transfer, own = Transfer(torch.device("cuda"), layout), torch.cuda.Stream()
    kept = []
    for step in range(steps):
        with torch.cuda.stream(own if step % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(2_000_000)
            batch = transfer.batch(message, step)
            torch.cuda._sleep(2_000_000)
            kept.append(
                {
                    name: value.clone()
                    for name, value in batch.items()
                    if isinstance(value, torch.Tensor)
                }
            )
            del batch
        if step + 1 < steps:
            transfer.send(message, step + 1)
    torch.cuda.synchronize()
    for step, found in enumerate(kept):
        expected = maker.batch(message, step)
        for name, tensor in found.items():
            assert torch.equal(tensor.cpu(), expected[name]), (step, name)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run of documents that are packed, padded, and no labels for each other."""
    folder = tmp_path_factory.mktemp("device")
    with (folder / "rows.jsonl").open("w") as file:
        for row in range(300):
            file.write(json.dumps({"text": f"row {row} " * (1 + row % 7)}) + "\n")
    mixture = {
        "run": "device",
        "seed": 1,
        "tokenizer": "bytes",
        "sequence_length": 64,
        "packing": "best_fit",
        "pack_window_rows": 16,
        "labels": "shifted",
        "mask_boundaries": True,
        "mixture": {
            "policy": "least_consumed",
            "children": [{"source": "jsonl:rows.jsonl:text", "alias": "rows"}],
        },
    }
    path = folder / "device.yaml"
    path.write_text(yaml.safe_dump(mixture), encoding="utf-8")
    with url_of(folder, path) as url:
        yield f"{url}/device"


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_on_the_device_has_the_batches_and_states_of_one_on_the_cpu(
    url: str, device: str
) -> None:
    with PeekDataset(url, 4, at="fresh", columns=COLUMNS) as dataset:
        expected = [(dict(batch), dataset.state_dict()) for batch in dataset]
    assert len(expected) > 10

    with RemoteDataset(
        url, 4, resume="fresh", launch=LaunchOptions(takeover=True), device=device, columns=COLUMNS
    ) as dataset:
        for (batch, place), found in zip(expected[:6], dataset, strict=False):
            assert_equal(dict(found), batch, device)
            # Though the next batch is on its way, the state is that of this one, and so is what the server is told.
            assert index_of(dataset.state_dict()) == index_of(place) == found["sample_index"]
            assert dataset.sample_index == found["sample_index"]
        state = dataset.state_dict()
    with RemoteDataset(
        url, 4, launch=LaunchOptions(takeover=True), device=device, columns=COLUMNS
    ) as dataset:
        dataset.load_state_dict(state)
        rest = list(dataset)
    assert len(rest) == len(expected) - 6
    for (batch, _), found in zip(expected[6:], rest, strict=True):
        assert_equal(dict(found), batch, device)


def test_what_cannot_be_sent_ahead_costs_no_batch(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PeekDataset(url, 4, at="fresh") as dataset:
        expected = list(dataset)

    send = Transfer.send

    def out_of_memory(self: Transfer, message: Message, step: int) -> None:
        if sys._getframe(1).f_code.co_name != "batch":
            raise MemoryError("no pinned memory")
        send(self, message, step)

    monkeypatch.setattr(Transfer, "send", out_of_memory)
    with PeekDataset(url, 4, at="fresh", device="cpu") as dataset:
        found = list(dataset)
    assert len(found) == len(expected)
    for batch, same in zip(found, expected, strict=True):
        assert_equal(dict(batch), dict(same), "cpu")


def index_of(state: dict[str, str]) -> int:
    found: int = json.loads(state["tokenloom"])["sample_index"]
    return found


def test_a_device_that_cannot_be_used_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ValueError, match=r'batches are made on "cuda" or "cpu"; got device=\'meta\''
    ):
        resolve("meta")
    with pytest.raises(ValueError, match=r'must be "cuda", "cuda:1" or "cpu"; got \'gpu\''):
        resolve("gpu")
    if not GPU:
        with pytest.raises(
            ValueError,
            match=r"device='cuda' cannot be used: torch .* was built without CUDA|no GPU",
        ):
            RemoteDataset("grpc://127.0.0.1:1/run", device="cuda")
    else:
        with pytest.raises(
            ValueError, match=r"'cuda:99' cannot be used: this process sees \d+ GPUs"
        ):
            resolve("cuda:99")
    assert resolve("cpu") == torch.device("cpu")


def test_ranks_and_workers_say_where_batches_can_be_made(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = PeekDataset(url, 4)
    monkeypatch.setattr(dataset, "_device", torch.device("cuda"))
    monkeypatch.setattr(
        "tokenloom.datasets.tensors.get_worker_info", lambda: SimpleNamespace(num_workers=1)
    )
    with pytest.raises(RuntimeError, match="makes batches in the trainer's process"):
        iter(dataset)
