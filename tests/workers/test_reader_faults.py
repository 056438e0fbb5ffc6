"""Readers that die, and readers that cannot be: the order stays; what is wrong is said before anything has begun."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.corpora import flat, order_of
from support.ray_cluster import ray_cluster
from support.reader_faults import DOCUMENT, Faults, faulty_readers, samples, write_texts
from support.waiting import wait_for
from tokenloom import LocalDataset
from tokenloom_server.errors import ConfigError
from tokenloom_server.workers.cluster.connection import Needs
from tokenloom_server.workers.cluster.readers import link
from tokenloom_server.workers.cluster.readers.link import RayReaders, ReaderOptions
from tokenloom_tools.cli.serve import Readers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def faults(folder: Path) -> Iterator[Faults]:
    with faulty_readers(folder) as faults:
        yield faults


@pytest.fixture(scope="module")
def cluster(faults: Faults) -> Iterator[Any]:
    with ray_cluster({"num_cpus": 2}) as started:
        yield started


@pytest.fixture(scope="module")
def readers(cluster: Any) -> Iterator[RayReaders]:
    readers = RayReaders(ReaderOptions(address=cluster.address, late_s=20, timeout_s=60))
    with pytest.MonkeyPatch.context() as patch:
        # Ray takes long to answer on a machine that has much else to do.
        patch.setattr(link, "START_S", 500.0)
        yield readers
    readers.close()


def test_the_order_stays_though_a_worker_dies_and_then_the_process_that_speaks_to_ray(
    folder: Path, faults: Faults, readers: RayReaders, caplog: pytest.LogCaptureFixture
) -> None:
    order = order_of(folder, DOCUMENT)
    readers.check(order)
    expected = samples(order)
    before = readers._process
    caplog.set_level(logging.INFO)
    at = {
        300: faults.signal(signal.SIGKILL),
        len(expected) // 3: lambda: os.kill(before.pid, signal.SIGKILL),
    }
    assert samples(order_of(folder, DOCUMENT), readers, at) == expected
    assert faults.all_happened()
    # All that was asked for may have been there already when the process was killed.
    wait_for(lambda: readers._process is not before and not readers.away, "another process")
    assert "Ray is away: the process that speaks to it ended with status -9" in caplog.text
    wait_for(lambda: "Ray is back" in caplog.text, "Ray")


@pytest.mark.readers
def test_the_process_that_speaks_to_ray_may_end_between_an_answer_and_its_memory(
    folder: Path,
    readers: RayReaders,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected, receive, before = (
        samples(order_of(folder, DOCUMENT)),
        reduction.recv_handle,
        readers._process,
    )

    def ends_first(link: Any) -> int:
        monkeypatch.setattr(reduction, "recv_handle", receive)
        raise EOFError

    monkeypatch.setattr(reduction, "recv_handle", ends_first)
    assert samples(order_of(folder, DOCUMENT), readers) == expected
    assert readers._process is not before
    assert "an answer of the readers cannot be taken" in caplog.text


def test_a_run_without_text_is_refused(folder: Path, readers: RayReaders) -> None:
    pq.write_table(
        pa.table({"kind": ["a", "b"] * 8, "row": range(16)}), folder / "data/rows.parquet"
    )
    ids, tensors = flat(["parquet:data/code-*.parquet:ids"]), flat(["parquet:data/rows.parquet:*"])
    for name in ("tokenizer", "sequence_length"):
        del tensors[name]
    tensors |= {"batching": {"bucket_by": "kind", "columns": ["row"]}, "global_batch_size": 2}
    for document in (ids, tensors):
        with pytest.raises(
            ConfigError,
            match=r"has no source of text .* cheaper to read than to send, so serve it with",
        ):
            readers.check(order_of(folder, document))


def test_what_is_read_no_more_is_described_no_more(folder: Path, readers: RayReaders) -> None:
    for length in (16, 24, 32):
        readers.check(order_of(folder, DOCUMENT | {"sequence_length": length}))
        assert len(readers._described) == 1
    samples(order_of(folder, DOCUMENT), readers)


def test_server_and_child_may_both_have_more_to_say_than_a_socket_holds(
    folder: Path, readers: RayReaders
) -> None:
    long = "x" * 1_000_000

    def say(count: int, sources: list[int]) -> None:
        with readers.changed:  # so that nothing of what the child answers is taken
            for i in range(count):
                readers._send(digest=f"{i}{long}", text="", sources=sources)
            wait_for(lambda: readers._link.poll(), "an answer")
            for i in range(count):
                readers._send(drop=f"{i}{long}")

    saying = threading.Thread(target=say, args=[5, [0]], daemon=True)
    saying.start()
    saying.join(240)
    assert not saying.is_alive()


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (
            {"address": "auto"},
            {"RAY_ADDRESS": "127.0.0.1:9"},
            r"--readers auto: no connection to Ray at \S+:9 .*Start one",
        ),
        (
            {"local_cpus": 2},
            {"FAULTY_NODE": "no ray"},
            r"Ray is not installed here: pip install 'tokenloom\[ray\]'",
        ),
        (
            {"needs": Needs(8)},
            {},
            "found 0 CPUs of nodes that have room for a task .* expected 8 CPUs on one",
        ),
        ({"local_cpus": 3}, {}, r"found 2 CPUs of nodes that have room for a task .* 3"),
        (
            {"local_cpus": 2},
            {},
            "the object store of .* has 100,000,000 bytes; expected 200,000,000",
        ),
    ],
)
def test_readers_that_cannot_be_are_refused(
    cluster: Any,
    options: dict[str, Any],
    environment: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tokenloom_server.workers.cluster.readers.link.STORE_BYTES", 200_000_000)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        RayReaders(ReaderOptions(**{"address": cluster.address} | options))


def test_other_words_and_other_servers_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in ("nonsense", "local:", "local:0", "local:x", "ray://host:1"):
        with pytest.raises(
            ConfigError, match=f"--readers: found '{words}', expected auto, or local:N with N CPUs"
        ):
            Readers(readers=words).options(300)
    monkeypatch.setenv("TOKENLOOM_SERVE_READERS", "local:2")
    (folder / "mixture.yaml").write_text(yaml.safe_dump(DOCUMENT), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"TOKENLOOM_SERVE_READERS is set, .* unset it, or start 'tokenloom serve"
    ):
        LocalDataset(folder / "mixture.yaml", 1)


def test_to_close_ends_a_process_that_begins(
    readers: RayReaders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleeps").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "sleeps").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "sleeps"))
    before = readers._process
    before.kill()
    wait_for(lambda: readers._process is not before, "another process")
    closing = threading.Thread(target=readers.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
