"""RemoteDataset over a real gRPC connection: batches, state and life."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import (
    SPECS,
    Script,
    ahead,
    base_at,
    digest_at,
    eventually,
    given_since,
    serving,
    template,
)
from support.trainer import trainer_forks
from tokenloom import (
    ConnectionOptions,
    LaunchOptions,
    NumpyDataset,
    PeekDataset,
    ProtocolError,
    RemoteDataset,
    SnapshotInvalid,
    Source,
    snapshot,
)
from tokenloom.connection import channel
from tokenloom.integrations.stateful import StatefulLoader
from tokenloom_proto.seal import SNAPSHOT_VERSION, seal, unseal
from torch.utils.data import DataLoader

NOBODY = "grpc://127.0.0.1:1/fake"


def expected_state(sample_index: int, base: int) -> dict[str, str]:
    tokens = {"total_tokens": sample_index * 8, "real_tokens": sample_index * 8}
    place = {"sample_index": sample_index, **tokens, "digest": digest_at(sample_index)}
    resume_state = json.loads(base_at(base).resume_state)
    counts = {
        spec: {"samples": samples, "tokens": 8 * samples, "real_tokens": 8 * samples}
        for spec, samples in zip(SPECS, given_since(base, sample_index), strict=True)
        if samples
    }
    document = {
        **template("fake", "train"),
        "resume_state": resume_state,
        **place,
        "counts": counts,
    }
    return {"tokenloom": seal(document)}


def test_a_second_iter_goes_on_after_the_last_batch_yielded() -> None:
    with serving(Script(end_index=10)) as (server, url, _), RemoteDataset(url, 1) as dataset:
        for batch in dataset:
            if batch["sample_index"] == 4:
                break
        rest = [int(batch["sample_ids"]) for batch in dataset]

        assert rest == [4, 5, 6, 7, 8, 9]
        assert list(dataset) == []  # the end stays the end
        assert len(server.joins) == len(server.opens) == 1


@pytest.mark.parametrize("kind", ["dataset", "numpy", "loader", "stateful", "peek"])
def test_a_look_at_one_batch_that_is_lost_for_the_training_is_said_once_and_names_peek(
    caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with serving(Script(end_index=20)) as (_, url, _):
        dataset: Any = {"numpy": NumpyDataset, "peek": PeekDataset}.get(kind, RemoteDataset)(url, 4)
        batches = dataset.dataloader() if kind == "loader" else dataset
        batches = StatefulLoader(dataset) if kind == "stateful" else batches
        with dataset:
            iter(batches)
            next(iter(batches))
            assert next(iter(batches))["sample_index"] == 8
            next(iter(batches))
    said = [record.getMessage() for record in caplog.records if "peek" in record.getMessage()]
    assert len(said) == (kind != "peek")
    assert not said or "began at sample 0, and the next one goes on at sample 4" in said[0]


@pytest.mark.parametrize("way", ["state", "two batches", "end"])
def test_an_iterator_that_was_meant_is_not_taken_for_a_look(
    caplog: pytest.LogCaptureFixture, way: str
) -> None:
    with (
        serving(Script(end_index=1 if way == "end" else 10)) as (_, url, _),
        RemoteDataset(url, 1) as dataset,
    ):
        for _ in dataset:
            if way == "state":
                dataset.state_dict()
            if way == "state" or (way == "two batches" and dataset.sample_index == 2):
                break
        list(dataset)
    assert "peek" not in caplog.text


def test_the_run_is_known_once_it_is_joined() -> None:
    with (
        serving(Script(start_index=12)) as (_, url, _),
        RemoteDataset(url, 2, resume="latest") as dataset,
    ):
        with pytest.raises(RuntimeError, match="call iter"):
            _ = dataset.generation
        iter(dataset)

        assert (dataset.sequence_length, dataset.generation, dataset.start_index) == (8, 3, 12)
        assert dataset.sources == [Source(0, "parquet:a:text", "a"), Source(1, "txt:b:text", "")]
        assert (dataset.sample_index, dataset.total_tokens, dataset.digest) == (
            12,
            96,
            digest_at(12),
        )
        assert dataset.state_dict() == expected_state(12, 12), (
            "before a batch it is that of the resume point"
        )
        next(iter(dataset))
        assert (dataset.sample_index, dataset.total_tokens, dataset.digest) == (
            14,
            112,
            digest_at(14),
        )


# --- State -------------------------------------------------------------------------------------------------------


def test_the_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "HISTORY_STEPS", 3)
    with serving(Script()) as (_, url, _), RemoteDataset(url, 1) as dataset:
        batches = iter(dataset)
        for _ in range(5):
            next(batches)

        assert dataset.state_dict(at=3) == expected_state(3, 2)
        with pytest.raises(ValueError, match="from 3 to 5"):
            dataset.state_dict(at=2)


def test_the_state_works_with_the_server_dead_and_after_close() -> None:
    with serving(Script()) as (_, url, server):
        dataset = RemoteDataset(url, 2)
        next(iter(dataset))
        server.stop(0).wait()
        assert dataset.state_dict() == expected_state(2, 0)
        dataset.close()

    assert dataset.state_dict() == expected_state(2, 0)
    assert dataset.sample_index == 2


def test_before_a_join_the_state_is_the_start_of_the_run() -> None:
    dataset = RemoteDataset(NOBODY, 2)

    assert unseal(dataset.state_dict()["tokenloom"]) == {
        "format": "tokenloom/snapshot",
        "version": SNAPSHOT_VERSION,
        "run": "fake",
        "stream": "train",
        "sample_index": 0,
        "digest": "0" * 32,
        "total_tokens": 0,
    }
    assert (dataset.sample_index, dataset.total_tokens, dataset.digest) == (0, 0, "0" * 32)
    with pytest.raises(ValueError, match="no batch was yielded yet"):
        dataset.state_dict(at=5)


def test_a_loaded_state_travels_with_the_join_and_is_given_back_until_the_first_batch() -> None:
    state = expected_state(7, 4)
    with serving(Script()) as (server, url, _), RemoteDataset(url, 2, resume="latest") as dataset:
        dataset.load_state_dict(state)
        assert server.joins == []
        assert dataset.state_dict() == state
        assert (dataset.sample_index, dataset.total_tokens, dataset.digest) == (7, 56, digest_at(7))
        batches = iter(dataset)
        assert dataset.state_dict() == state
        assert next(batches)["sample_ids"].tolist() == [7, 8]
        assert dataset.state_dict(at=7) == state
        assert dataset.state_dict() == expected_state(9, 7)

        assert server.joins[0].state_json.decode() == state["tokenloom"]
        assert server.joins[0].resume == ""


def test_a_state_is_loaded_before_the_first_iter_or_not_at_all() -> None:
    with serving(Script()) as (_, url, _), RemoteDataset(url, 2) as dataset:
        iter(dataset)
        with pytest.raises(RuntimeError, match=r"before the first iter\(\).*make a new one"):
            dataset.load_state_dict(expected_state(2, 0))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"datasets": []}, r"got the keys \['datasets'\]"),
        ({"tokenloom": 3}, "got a int under 'tokenloom'"),
        ([], "got a list"),
        ({"tokenloom": "{"}, "does not parse"),
        ({"tokenloom": expected_state(7, 4)["tokenloom"].replace("56", "57")}, "checksum"),
        (
            {"tokenloom": seal({"sample_index": "7"})},
            "sample_index='7', total_tokens=None, real_tokens=None, digest",
        ),
    ],
)
def test_a_damaged_or_foreign_state_is_refused_with_what_was_found(
    state: Any, message: str
) -> None:
    with pytest.raises(SnapshotInvalid, match=message) as caught:
        RemoteDataset(NOBODY, 2).load_state_dict(state)

    assert isinstance(caught.value, ValueError)


# --- Arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "ftp://127.0.0.1/run"}, "expected HOST:PORT of its gRPC or REST port"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1; got 0"),
        ({"batch_size": 2.0}, "batch_size must be an integer"),
        ({"batch_size": []}, "batch_size has 0 pairs; expected 1 to 1024"),
        (
            {"batch_size": [4, 8]},
            r"batch_size\[0\] must be a pair of integers \(total_tokens, batch_size\); got 4",
        ),
        ({"batch_size": [(0, 4.0)]}, r"batch_size\[0\] must be a pair of integers"),
        (
            {"batch_size": [(8, 4)]},
            r"batch_size\[0\] begins at 8 total tokens; expected 0: \(0, 4\)",
        ),
        ({"batch_size": [(0, 4), (9, 0)]}, r"batch_size\[1\] has a batch size of 0; expected 1 to"),
        (
            {"batch_size": [(0, 4), (9, 8), (9, 9)]},
            r"batch_size\[2\] begins at 9 total tokens; expected more than 9",
        ),
        (
            {"batch_size": [(0, 4), (2**53, 8)]},
            r"batch_size\[1\] begins at 9007199254740992 .* at most 2\^53 − 1",
        ),
        ({"accumulate": 0}, "accumulate must be an integer of at least 1; got 0"),
        ({"accumulate": None}, "accumulate must be an integer of at least 1; got None"),
        (
            {"columns": ["lengths"]},
            r"columns must be a sequence of 'position_ids', .*'cu_seqlens'; got 'lengths'",
        ),
        ({"columns": "loss_mask"}, r"got the text 'loss_mask': write \('loss_mask',\)"),
        (
            {"accumulate": 4, "connection": ahead(3)},
            "prefetch_steps is 3; expected at least accumulate, 4",
        ),
        ({"resume": ""}, "resume must be"),
        (
            {"rank": 2, "world_size": 2, "launch": LaunchOptions(attempt="a")},
            "rank 2 is not below world_size 2",
        ),
    ],
)
def test_a_wrong_argument_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RemoteDataset(**{"url": NOBODY, "batch_size": 1, **changes})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefetch_steps": 0}, "prefetch_steps must be an integer of at least 1"),
        ({"connect_timeout_s": 0}, "connect_timeout_s must be a number of seconds above 0"),
        ({"reconnect_timeout_s": float("inf")}, "reconnect_timeout_s must be"),
        (
            {"plaintext_hosts": "data0"},
            "plaintext_hosts must be a sequence of host names; got the text 'data0'",
        ),
    ],
)
def test_a_wrong_option_of_the_connection_is_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ConnectionOptions(**fields)


def test_options_of_a_connection_travel_and_show_no_secret() -> None:
    options = ConnectionOptions(token="0123456789abcdef", tls_ca=Path("ca.pem"), prefetch_steps=4)

    assert copy.deepcopy(options) == options
    assert "0123456789abcdef" not in repr(options)
    with pytest.raises(AttributeError):
        options.prefetch_steps = 5  # type: ignore[misc]


def test_the_join_carries_what_the_dataset_was_made_with() -> None:
    with serving(Script()) as (server, url, _):
        with RemoteDataset(
            url, 3, rank=1, world_size=2, launch=LaunchOptions(attempt="a"), resume="fresh"
        ) as dataset:
            iter(dataset)
        join = server.joins[0]

    assert (join.run, join.stream, join.rank, join.world_size) == ("fake", "train", 1, 2)
    assert (join.batch_size, join.attempt, join.resume, join.state_json) == (3, "a", "fresh", b"")
    assert join.nonce


# --- Progress, closing and the end of the process -------------------------------------------------------------------


def test_progress_is_reported_when_a_batch_is_returned_and_prefetch_is_bounded() -> None:
    with (
        serving(Script(group_micro_steps=8)) as (server, url, _),
        RemoteDataset(url, 1, connection=ahead(3)) as dataset,
    ):
        batches = iter(dataset)
        next(batches)
        assert eventually(
            lambda: bool(server.progress) and server.progress[-1].consumed_through == 1
        )
        assert {progress.credit_micro_steps for progress in server.progress} == {3}
        assert dataset._connection is not None
        received = dataset._connection.buffer
        assert eventually(lambda: received.received_through == 4)
        time.sleep(0.2)
        assert received.received_through == 4


def test_progress_is_coalesced() -> None:
    with (
        serving(Script(group_micro_steps=16, end_index=2000)) as (server, url, _),
        RemoteDataset(url, 1) as dataset,
    ):
        began = time.monotonic()
        steps = sum(1 for _ in dataset)
        elapsed = time.monotonic() - began

        assert steps == 2000
        assert eventually(lambda: server.progress[-1].consumed_through == 2000)
        assert len(server.progress) <= elapsed / 0.005 + 2


def test_close_reports_the_last_batch_and_ends_the_stream_and_its_thread() -> None:
    with serving(Script()) as (server, url, _):
        with RemoteDataset(url, 1) as dataset:
            batches = iter(dataset)
            for _ in range(3):
                next(batches)
        assert server.half_closed.wait(60)
        assert server.progress[-1].consumed_through == 3
        assert not [thread for thread in threading.enumerate() if thread.name == "tokenloom-stream"]
        dataset.close()  # again is fine
        for use in (lambda: next(batches), lambda: iter(dataset)):
            with pytest.raises(RuntimeError, match="closed"):
                next(iter(use()))


def test_a_dataset_that_nobody_holds_closes_its_stream() -> None:
    with serving(Script()) as (server, url, _):
        dataset = RemoteDataset(url, 1)
        next(iter(dataset))
        gone = weakref.ref(dataset)
        del dataset
        gc.collect()

        assert gone() is None
        assert server.half_closed.wait(60)


def test_the_end_of_the_process_reports_the_last_batch(tmp_path: Path) -> None:
    trainer, output = tmp_path / "trainer.py", tmp_path / "output.txt"
    trainer.write_text(
        "import os, sys, warnings; from tokenloom import RemoteDataset\n"
        "dataset = RemoteDataset(sys.argv[1], 1); batches = iter(dataset)\n"
        "for _ in range(7): next(batches)\n"
        # Of which gRPC would tell that it does nothing there.
        "warnings.simplefilter('ignore'); child = os.fork()\n"
        "os.waitpid(child, 0) if child else os._exit(0)\n",
        encoding="utf-8",
    )
    with serving(Script()) as (server, url, _):
        status = trainer_forks().fork(trainer, [url], output=output).wait()

        assert (status, output.read_text(encoding="utf-8")) == (0, "")
        assert eventually(lambda: server.progress[-1].consumed_through == 7)


def test_the_end_of_the_data_is_logged_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Script(end_index=4)) as (server, url, _), RemoteDataset(url, 1) as dataset:
        with caplog.at_level(logging.INFO, "tokenloom"):
            assert len(list(dataset)) == 4

        assert "ends: all sources are exhausted" in caplog.text
        # Without a close, once the server says that the ledger has it all.
        assert server.half_closed.wait(60)
        assert server.progress[-1].consumed_through == 4


# --- DataLoader and other processes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """The URL of a fake run in another process, since a fork of this one must not hold its threads."""
    here = Path(__file__).parent
    script = (
        "import sys; from fake_server import *\n"
        "with serving(Script(end_index=8)) as (_, url, _): print(url, flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()


def test_one_worker_reads_the_batches_and_the_trainers_copy_does_not_pretend_to_have_the_state(
    elsewhere: str, tmp_path: Path
) -> None:
    trainer, output = tmp_path / "trainer.py", tmp_path / "output.txt"
    # In a process that has not used gRPC: a fork of one that has may hang.
    trainer.write_text(
        "import sys, pytest; from torch.utils.data import DataLoader; from tokenloom import RemoteDataset\n"
        "dataset = RemoteDataset(sys.argv[1], 2)\n"
        "loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context='fork')\n"
        "assert [batch['sample_ids'].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]\n"
        "with pytest.raises(RuntimeError, match='read in a DataLoader worker'): dataset.state_dict()\n"
        "with pytest.raises(RuntimeError, match='joined the run in another process'): iter(dataset)\n"
        "assert 'joined in process' in repr(dataset)\n",
        encoding="utf-8",
    )

    status = trainer_forks().fork(trainer, [elsewhere], output=output).wait()

    assert (status, output.read_text(encoding="utf-8")) == (0, "")


def test_a_fork_of_a_process_that_has_used_grpc_is_warned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Script(end_index=2)) as (_, url, _):
        for first in (os.getpid(), os.getppid()):
            assert "forked from" not in caplog.text
            channel._note_fork.cache_clear()
            monkeypatch.setattr(channel, "_first_process", partial(int, first))
            for _ in range(2):
                with RemoteDataset(url, 1) as dataset:
                    next(iter(dataset))

    assert caplog.text.count("gRPC was used in the process that this one was forked from") == 1


def test_a_spawned_worker_goes_on_where_the_trainers_copy_stood(elsewhere: str) -> None:
    with RemoteDataset(elsewhere, 2) as dataset:
        assert next(iter(dataset))["sample_ids"].tolist() == [0, 1]
        loader = DataLoader(
            dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"
        )
        assert [batch["sample_ids"].tolist() for batch in loader] == [[2, 3], [4, 5], [6, 7]]
        # Once only: another worker would begin where the first one did.
        with pytest.raises(
            RuntimeError, match=r"read in a DataLoader worker|joined the run in another process"
        ):
            next(iter(loader))
        with pytest.raises(RuntimeError, match="read in a DataLoader worker"):
            dataset.state_dict()


def test_one_of_several_ranks_is_not_handed_to_another_process_once_it_has_joined(
    elsewhere: str,
) -> None:
    with RemoteDataset(
        elsewhere, 2, rank=0, world_size=2, launch=LaunchOptions(attempt="several")
    ) as dataset:
        iter(dataset)
        loader = DataLoader(
            dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"
        )
        with pytest.raises(
            RuntimeError, match="its other ranks would be left where they are: hand it over before"
        ):
            iter(loader)


def test_several_workers_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        num_workers = 2

    monkeypatch.setattr("tokenloom.datasets.tensors.get_worker_info", Worker)

    with pytest.raises(RuntimeError, match=r"num_workers=2.*one slot.*num_workers=0"):
        iter(RemoteDataset(NOBODY, 1))


def test_a_dataset_can_be_copied_before_it_joins_and_not_after() -> None:
    with serving(Script()) as (_, url, _), RemoteDataset(url, 1) as dataset:
        with copy.deepcopy(dataset) as other:
            assert torch.equal(next(iter(other))["sample_ids"], torch.tensor([0]))
        iter(dataset)
        with pytest.raises(RuntimeError, match="cannot be copied"):
            copy.deepcopy(dataset)


def test_after_a_fork_the_child_is_told_that_the_connection_is_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(Script()) as (_, url, _), RemoteDataset(url, 1) as dataset:
        batches = iter(dataset)
        next(batches)
        with monkeypatch.context() as child:
            child.setattr("os.getpid", lambda: 1)
            with pytest.raises(
                RuntimeError, match=r"of which this one is a fork.*before the first iter\(\)"
            ):
                next(batches)
        next(batches)


def test_who_only_looks_takes_no_slot_whatever_the_launcher_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with serving(Script(end_index=12)) as (server, url, _), PeekDataset(url, 2, at="4") as dataset:
        assert (dataset.rank, dataset.world_size) == (0, 1)
        assert len(list(dataset)) == 6
        # Nothing of it is to be committed, so the end of the data ends the stream.
        assert eventually(server.half_closed.is_set)
        (join,), (opened,) = server.joins, server.opens
        assert (join.peek, join.rank, join.world_size, join.attempt, join.resume) == (
            True,
            0,
            1,
            "",
            "4",
        )
        assert (opened.peek, opened.batch_size) == (True, 2)
    assert len(server.opens) == 1, "closing had something to report"


def test_what_is_passed_over_stands_in_the_log_and_the_state_at_the_start_is_the_servers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(Script()) as (_, url, _), RemoteDataset(url, 1) as dataset:
        batches = iter(dataset)
        for _ in range(3):
            next(batches)
        state = dataset.state_dict()
    line = "at sample 3, 7 samples of the order are passed over"
    with serving(Script(skips=[line])) as (_, url, _), RemoteDataset(url, 1) as dataset:
        dataset.load_state_dict(state)
        assert dataset.state_dict() == state
        with caplog.at_level(logging.WARNING, "tokenloom"):
            batches = iter(dataset)
        assert f"run fake: {line}" in caplog.text
        assert (dataset.start_index, dataset.sample_index, dataset.total_tokens) == (3, 3, 24)
        assert dataset.state_dict() == expected_state(3, 3)
        assert next(batches)["sample_ids"].tolist() == [3]


def test_a_server_that_begins_elsewhere_is_refused() -> None:
    with serving(Script()) as (_, url, _), RemoteDataset(url, 1) as dataset:
        next(iter(dataset))
        state = dataset.state_dict()
    with serving(Script(begins_late=7)) as (_, url, _), RemoteDataset(url, 1) as dataset:
        dataset.load_state_dict(state)
        with pytest.raises(
            ProtocolError, match=r"stands at sample index 1 .* the server starts at 8"
        ):
            iter(dataset)
