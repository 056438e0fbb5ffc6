"""What a user meets beside batches: the end, lengths, texts, figures, mistakes that are told of."""

from __future__ import annotations

import _thread
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenloom
import tokenloom_proto
import torch
from fake_server import Script, ahead, eventually, serving
from tokenloom import (
    ConnectionOptions,
    EvaluationDataset,
    LaunchOptions,
    PeekDataset,
    RemoteDataset,
)
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

NOBODY = "grpc://127.0.0.1:1/fake"


# --- The end of the data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 4])
def test_at_the_end_of_the_data_iteration_stops_and_the_dataset_says_why(accumulate: int) -> None:
    with (
        serving(Script(end_index=6)) as (_, url, _),
        RemoteDataset(url, 1, accumulate=accumulate) as dataset,
    ):
        assert [batch["sample_index"] for batch in dataset] == [1, 2, 3, 4, 5, 6]
        assert list(DataLoader(dataset, batch_size=None)) == [], "it does not stay the end"
        assert (dataset.end_reason, dataset.total_tokens) == ("all sources are exhausted", 48)


# --- Length and text ----------------------------------------------------------------------------------------------


def test_a_length_that_is_not_known_is_refused_and_samplers_with_it() -> None:
    dataset = RemoteDataset(NOBODY, 1)

    for use in (
        len,
        RandomSampler,
        lambda data: DistributedSampler(data, 2, 0),
        lambda data: len(DataLoader(data)),
    ):
        with pytest.raises(TypeError, match=r"has no len\(\).*No sampler is needed.*max_steps"):
            use(dataset)  # type: ignore[operator]
    assert dataset, "what has no length is not empty"
    with pytest.raises(ValueError, match="unspecified shuffle option"):
        DataLoader(dataset, batch_size=None, shuffle=True)


def test_its_text_says_where_it_stands() -> None:
    with serving(Script(end_index=5)) as (_, url, _):
        with RemoteDataset(
            url, 2, connection=ConnectionOptions(token="0123456789abcdef")
        ) as dataset:
            assert (
                repr(dataset)
                == f"<RemoteDataset '{url}', rank 0 of 1, batch_size=2: not joined yet>"
            )
            batches = iter(dataset)
            next(batches)
            assert repr(dataset).endswith(": generation 3 at sample index 2, 16 tokens>")
            state = dataset.state_dict()
            list(batches)
            ended = "generation 3 at sample index 4, 32 tokens, at the end of the data: all sources are exhausted"
            assert repr(dataset).endswith(f": {ended}>")
            assert "0123456789abcdef" not in repr(dataset)
        with RemoteDataset(url, rank=1, world_size=4, launch=LaunchOptions(attempt="a")) as dataset:
            dataset.load_state_dict(state)
            assert ", rank 1 of 4: not joined yet, to go on at sample index 2>" in repr(dataset)
        assert repr(dataset).endswith(": closed before it joined>")
    held_out = EvaluationDataset(NOBODY, 2)
    expected = f"<EvaluationDataset '{NOBODY}', stream='validation', rank 0 of 1, batch_size=2:"
    expected += " so far unknown micro-steps>"
    assert repr(held_out) == expected
    assert repr(PeekDataset(NOBODY, at=7)) == f"<PeekDataset '{NOBODY}': not joined yet>"


# --- Figures ------------------------------------------------------------------------------------------------------


def test_metrics_are_what_the_rank_has_received_and_waited_for() -> None:
    broken: list[int] = []

    def breaks(stream: int, begin: int) -> str | None:
        if begin == 4 and not broken:
            broken.append(begin)
            return ""  # the server went away
        return None

    script = Script(end_index=12, on_message=breaks)
    with serving(script) as (_, url, _), RemoteDataset(url, 2, connection=ahead(3)) as dataset:
        before = dataset.metrics()
        assert set(before.values()) == {0}
        batches = iter(dataset)
        for _ in range(4):
            next(batches)
        assert eventually(
            lambda: dataset._connection is not None and len(dataset._connection.buffer._steps) == 2
        )
        found = dataset.metrics()
        assert found.keys() == before.keys()
        assert {name: found[name] for name in found if not name.startswith("wait")} == {
            "queue_micro_steps": 2,
            "queue_capacity_micro_steps": 3,
            "micro_steps": 4,
            "tokens": 64,
            "sample_index": 8,
            "total_tokens": 64,
            "uncommitted_samples": found["uncommitted_samples"],
            "reconnects": 1,
        }
        assert 0 <= found["uncommitted_samples"] <= 8
        # The break took a while (at least half of the first delay), in one of four waits.
        assert found["wait_ms_max"] >= 50
        assert found["wait_ms_max"] / 4 <= found["wait_ms_mean"] <= found["wait_ms_max"]
        next(batches)  # it was there
        assert [dataset.metrics()[f"wait_ms_{name}"] for name in ("last", "mean", "max")] == [
            0,
            0,
            0,
        ]


def test_the_servers_figures_are_a_call_away_before_and_after_the_join(server: str) -> None:
    with RemoteDataset(
        f"{server}/same", 3, resume="fresh", launch=LaunchOptions(takeover=True)
    ) as dataset:
        before = dataset.stats()
        assert (before["run"], before["sequence_length"]) == ("same", 24)
        for _, batch in zip(range(4), dataset, strict=False):
            assert batch["total_tokens"] == batch["sample_index"] * 24
        assert eventually(lambda: dataset.stats()["sample_index"] == 12)
        after = dataset.stats()
        assert after["generation"] == dataset.generation
        assert (after["total_tokens"], after["world_size"], after["batch_size"]) == (
            dataset.total_tokens,
            1,
            3,
        )


# --- Mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [{}, {"batch_size": 8}, {"batch_size": 8, "drop_last": True}], ids=str
)
def test_a_data_loader_that_would_stack_batches_is_refused_before_it_joins(
    arguments: dict[str, int],
) -> None:
    loader: DataLoader[object] = DataLoader(RemoteDataset(NOBODY, 1), **arguments)  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match=r"whole batches already.*dataset\.dataloader\(\)"):
        iter(loader)


def test_a_data_loader_may_do_with_batches_what_it_is_told() -> None:
    with serving(Script(end_index=8)) as (_, url, _), RemoteDataset(url, 1) as dataset:
        pairs = DataLoader(
            dataset, batch_size=2, collate_fn=lambda batches: [b["sample_index"] for b in batches]
        )
        assert [next(iter(pairs)), next(iter(pairs))] == [[1, 2], [3, 4]]
        own = DataLoader(dataset, batch_size=None, collate_fn=lambda batch: batch["sample_index"])
        assert next(iter(own)) == 5


def test_the_loader_of_a_dataset_gives_its_batches_and_leaves_the_rest_as_it_was() -> None:
    with serving(Script(end_index=8)) as (_, url, _), RemoteDataset(url, 1) as dataset:
        drawn = torch.get_rng_state()
        loader = dataset.dataloader()
        seen = [batch["sample_index"] for _, batch in zip(range(3), loader, strict=False)]
        assert (seen, dataset.sample_index) == ([1, 2, 3], 3)
        assert [type(batch["input_ids"]) for batch in loader] == [torch.Tensor] * 5
        assert torch.equal(torch.get_rng_state(), drawn)
        assert (loader.pin_memory, loader.num_workers) == (torch.cuda.is_available(), 0)
        generator = torch.Generator()
        own = dataset.dataloader(
            collate_fn=lambda batch: batch["sample_index"], pin_memory=False, generator=generator
        )
        assert (list(own), own.pin_memory, own.generator) == ([], False, generator)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 8}, "batch_size=8: the server makes batches and their order"),
        ({"sampler": [1]}, r"sampler=\[1\]: the server makes batches and their order"),
        (
            {"num_workers": 2},
            r"num_workers=2: a worker would have the state.*StatefulLoader\(dataset, num_workers=1\)",
        ),
    ],
    ids=["batch_size", "sampler", "workers"],
)
def test_a_loader_that_would_be_wrong_is_refused_when_it_is_made(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        RemoteDataset(NOBODY, 1).dataloader(**options)


# --- Notebooks ----------------------------------------------------------------------------------------------------


def test_a_cell_that_is_run_again_takes_over_from_itself(server: str) -> None:
    def cell() -> RemoteDataset:
        dataset = RemoteDataset(f"{server}/shifted", 2, resume="fresh")
        assert [batch["sample_index"] for _, batch in zip(range(3), dataset, strict=False)] == [
            2,
            4,
            6,
        ]
        return dataset

    kept = [cell(), cell(), cell()]
    assert kept[2].generation == kept[0].generation + 2
    for dataset in kept:
        dataset.close()


def interrupted(seconds: float) -> threading.Timer:
    """As Ctrl-C, after a while; also where it is ignored, as in what a shell has put into the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, _thread.interrupt_main)
    timer.start()
    return timer


@pytest.mark.parametrize("accumulate", [1, 2])
def test_next_goes_on_after_it_was_interrupted(accumulate: int) -> None:
    resumes = threading.Event()

    def holds(_: int, begin: int) -> str | None:
        if begin >= 2:
            resumes.wait(240)
        return None

    script = Script(end_index=6, on_message=holds)
    with serving(script) as (_, url, _), RemoteDataset(url, 1, accumulate=accumulate) as dataset:
        batches = iter(dataset)
        seen = [next(batches)["sample_index"] for _ in range(2)]
        with pytest.raises(KeyboardInterrupt):
            interrupted(0.2)
            next(batches)
        assert dataset.sample_index == 2
        resumes.set()
        seen += [batch["sample_index"] for batch in dataset]
    assert seen == [1, 2, 3, 4, 5, 6]


def test_a_join_that_was_interrupted_can_be_made_again(server: str) -> None:
    with RemoteDataset(
        f"{server}/same",
        1,
        resume="fresh",
        rank=1,
        world_size=2,
        launch=LaunchOptions(attempt="interrupted"),
    ) as second:
        # It waits for rank 0, so its Join is at the server.
        with pytest.raises(KeyboardInterrupt):
            interrupted(0.5)
            iter(second)
        found: list[int] = []

        def first() -> None:
            given = {
                "rank": 0,
                "world_size": 2,
                "launch": LaunchOptions(attempt="interrupted", takeover=True),
                "resume": "fresh",
            }
            with RemoteDataset(f"{server}/same", 1, **given) as dataset:  # type: ignore[arg-type]
                found.extend(
                    batch["sample_index"] for _, batch in zip(range(2), dataset, strict=False)
                )
                time.sleep(0.2)

        thread = threading.Thread(target=first)
        thread.start()
        batches = iter(second)
        assert [next(batches)["sample_index"] for _ in range(2)] == [2, 4]
        thread.join(120)
        assert found == [2, 4]


# --- Types --------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from tokenloom import Batch, NumpyDataset, RemoteDataset

def train(dataset: RemoteDataset, model: torch.nn.Module) -> int:
    seen = 0
    for batch in dataset:
        logits: torch.Tensor = model(batch["input_ids"])
        loss = logits.sum() / batch["global_label_tokens"]
        loss.backward()  # type: ignore[no-untyped-call]
        seen += batch["global_tokens"]
        reveal_type(batch["labels"])
    saved: dict[str, str] = dataset.state_dict()
    dataset.load_state_dict(saved)
    figures: dict[str, float] = dataset.metrics()
    print(len(figures), dataset.stats()["run"])
    return seen

def first(dataset: RemoteDataset) -> Batch:
    return next(iter(dataset))

with RemoteDataset("grpc://127.0.0.1:1/run", 4, accumulate=2) as dataset:
    first(dataset)["no_such_column"]
RemoteDataset("grpc://127.0.0.1:1/run", accumulate="never")
reveal_type(next(iter(NumpyDataset("grpc://127.0.0.1:1/run", 4)))["cu_seqlens"])
"""


def test_a_users_script_is_checked_strictly_against_the_packages_types(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    # With the project's settings, which are strict, so that its cache serves.
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", str(script)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    lines = [line.partition("train.py:")[2] for line in answer.stdout.splitlines()]
    assert len(lines) == 4, answer.stdout + answer.stderr
    assert 'Revealed type is "torch._tensor.Tensor"' in lines[0]
    assert 'TypedDict "Batch" has no key "no_such_column"' in lines[1]
    assert 'incompatible type "str"; expected "int"' in lines[2]
    assert "numpy.ndarray[" in lines[3]
    for package in (tokenloom, tokenloom_proto):
        assert Path(str(package.__file__)).with_name("py.typed").is_file(), (
            "checkers ignore its types"
        )
