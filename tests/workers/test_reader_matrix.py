"""Every fault that readers may meet, over real clusters: ``pytest -m readers``, ten minutes on two cores."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from support.corpora import flat, order_of, text_rows, write_jsonl
from support.prepared import write_tokenizer
from support.ray_cluster import STORE_BYTES, ray_cluster
from support.reader_faults import DOCUMENT, TEXT, Faults, faulty_readers, samples, write_texts
from support.server_process import ServerProcess
from support.trainer import World
from tokenloom_server.errors import ConfigError, SourceChanged, SourceError, TokenizerError
from tokenloom_server.workers.cluster.readers.link import RayReaders, ReaderOptions

pytestmark = pytest.mark.readers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_texts(tmp_path)


@pytest.fixture
def faults(folder: Path) -> Iterator[Faults]:
    with faulty_readers(folder) as faults:
        yield faults


@contextmanager
def reading(cluster: Any, **options: Any) -> Iterator[RayReaders]:
    readers = RayReaders(
        ReaderOptions(**{"address": cluster.address, "late_s": 20, "timeout_s": 90} | options)
    )
    try:
        yield readers
    finally:
        readers.close()


def begin_node(cluster: Any, kind: str = "") -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTY_NODE", kind)
        return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)


def test_the_order_stays_whatever_befalls_workers_and_nodes(folder: Path, faults: Faults) -> None:
    expected = samples(order_of(folder, DOCUMENT))
    with ray_cluster({}, {}) as cluster, reading(cluster, late_s=5) as readers:
        for at in (
            {100: faults.signal(signal.SIGKILL, 3)},
            {100: faults.signal(signal.SIGSEGV, 2), 900: faults.signal(signal.SIGABRT)},
            {100: faults.signal(signal.SIGSTOP)},
            {100: lambda: cluster.remove_node(begin_node(cluster), allow_graceful=False)},
            {100: lambda: os.kill(readers._process.pid, signal.SIGKILL)},
        ):
            assert samples(order_of(folder, DOCUMENT), readers, at) == expected
            assert faults.all_happened()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("version", r"has Tokenloom 9\.9\.9, and who asks it has"),
        ("files", r"'data/text-0\.jsonl' is missing \(expected \d+ bytes at '/nowhere"),
        ("tokenloom", "ModuleNotFoundError: import of tokenloom_server halted"),
    ],
)
def test_a_node_that_differs_is_gone_around_or_named_before_anything_has_begun(
    folder: Path, faults: Faults, kind: str, said: str
) -> None:
    expected = samples(order_of(folder, DOCUMENT))
    with ray_cluster({}) as cluster, reading(cluster) as readers:
        readers.check(order_of(folder, DOCUMENT))
        begin_node(cluster, kind)
        assert samples(order_of(folder, DOCUMENT), readers) == expected
        for _ in range(2):
            with pytest.raises(ConfigError, match=rf"--readers: {os.uname().nodename}: .*{said}"):
                readers.check(order_of(folder, DOCUMENT))


@pytest.mark.parametrize(
    "change", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:99])]
)
def test_a_file_that_changed_for_all_ends_the_run_as_without_readers(
    folder: Path, faults: Faults, change: Callable[[Path], object]
) -> None:
    path = folder / "data/text-2.jsonl"
    content, ends = path.read_bytes(), []
    with ray_cluster({}) as cluster, reading(cluster) as readers:
        for who in (None, readers):
            order = order_of(folder, DOCUMENT)
            with pytest.raises(SourceChanged) as ended:
                samples(order, who, {20: lambda: change(path)})
            ends.append(str(ended.value))
            path.write_bytes(content)
    assert ends[0] == ends[1]


def test_kills_for_memory_are_waited_for_and_count_against_no_document(
    folder: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "50")
    monkeypatch.setenv("FAULTY_NODE", "slow")
    monkeypatch.setenv("RAY_task_oom_retries", "0")
    # What is killed may have its CPU for a moment still.
    said = r"for 15 s: asked again: its node had no memory left, .* killed(; no CPU is free for a task of 1 CPU)?; look"
    with (
        ray_cluster({}) as cluster,
        reading(cluster, timeout_s=15) as readers,
        pytest.raises(SourceError, match=said),
    ):
        samples(order_of(folder, DOCUMENT), readers)


@pytest.mark.parametrize("falls_back", [False, True])
def test_a_cluster_that_is_away_is_waited_for_and_no_longer(
    folder: Path, faults: Faults, falls_back: bool
) -> None:
    expected = samples(order_of(folder, DOCUMENT))
    with (
        ray_cluster({}) as cluster,
        reading(cluster, late_s=2, timeout_s=6, falls_back=falls_back) as readers,
    ):
        at = {100: lambda: cluster.head_node.kill_all_processes(check_alive=False)}
        if falls_back:
            assert samples(order_of(folder, DOCUMENT), readers, at) == expected
        else:
            with pytest.raises(
                SourceError, match=r"no reader has given them for 6 s: .*; look at the cluster"
            ):
                samples(order_of(folder, DOCUMENT), readers, at)


def test_a_run_goes_on_with_a_new_cluster_at_the_address_of_one_that_was_killed(
    folder: Path, faults: Faults
) -> None:
    expected = samples(order_of(folder, DOCUMENT))
    with ray_cluster({}) as cluster:
        port = int(cluster.address.rpartition(":")[2])
        options = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}

        def replace() -> None:
            cluster.head_node.kill_all_processes(check_alive=False)
            cluster.remove_node(cluster.head_node, allow_graceful=False)
            cluster.head_node = None
            cluster.add_node(**options, gcs_server_port=port)

        with reading(cluster) as readers:
            assert samples(order_of(folder, DOCUMENT), readers, {100: replace}) == expected


def test_a_document_that_kills_the_tokeniser_is_found_by_its_second_death(
    folder: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(5)
    texts = [
        f"{row} " + " ".join(draw.choices(["the", "quick", "brown", "fox"], k=40))
        for row in range(900)
    ]
    write_tokenizer(folder / "tokenizer.json", texts)
    texts[700] += " this one kills"
    write_jsonl(folder / "deadly.jsonl", texts)
    document = flat(["jsonl:deadly.jsonl:text"], tokenizer="tokenizer.json", sequence_length=16)
    expected = samples(order_of(folder, document))
    monkeypatch.setenv("FAULTY_NODE", "GigatokenEngine")
    with ray_cluster({}) as cluster, reading(cluster) as readers:
        assert samples(order_of(folder, document), readers) == expected
    monkeypatch.setenv("FAULTY_NODE", "GigatokenEngine,TokenizersEngine")
    said = r"row 700: a process that encodes .* was ended by SIGSEGV, and one"
    with (
        ray_cluster({}) as cluster,
        reading(cluster) as readers,
        pytest.raises(TokenizerError, match=said),
    ):
        samples(order_of(folder, document), readers)


def test_a_server_of_two_runs_a_revision_and_a_fork_is_what_it_was_and_leaves_nothing(
    folder: Path, tmp_path: Path
) -> None:
    write_jsonl(folder / "data/more.jsonl", text_rows(60, 9, 60))
    added = {"child": {"source": "jsonl:data/more.jsonl:text"}, "to": "mixture"}
    change = {
        "reason": "why",
        "sample_index": 3000,
        "add": [added],
        "drop": ["parquet:data/code-*.parquet:ids"],
    }
    rows = [
        {"spec": TEXT, "shard": f"data/text-{row % 3}.jsonl", "row": row}
        for row in range(0, 300, 2)
    ]
    (folder / "out.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    change |= {"append_files": [TEXT], "exclude": {"file": "out.jsonl"}}
    found = {}
    for kind, flags in {"plain": (), "readers": ("--readers", "local:2")}.items():
        (folder / "data/text-3.jsonl").unlink(missing_ok=True)
        paths = [folder / f"{kind}-{run}.yaml" for run in ("one", "two", "fork")]
        for path, run in zip(paths, ("one", "two", "fork"), strict=True):
            path.write_text(yaml.safe_dump(DOCUMENT | {"run": run}), encoding="utf-8")
        server = ServerProcess(tmp_path / kind, *paths, options=(), flags=flags).start()
        assert server._process is not None
        pid, begun = (
            server._process.pid,
            psutil.Process(server._process.pid).children(recursive=True),
        )
        assert "_raylet" not in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8"), (
            "the server has imported ray"
        )
        assert not [
            name for each in begun for name in each.environ() if name.startswith("TOKENLOOM_")
        ]
        with World(server.url("one"), 1, 4) as one, World(server.url("two"), 1, 4) as two:
            state = one.steps(10).state()
            for each in psutil.Process(pid).children():
                each.kill()
            write_jsonl(folder / "data/text-3.jsonl", text_rows(50, 4, 60))
            assert server.request("PATCH", "/v1/runs/one/mixture", json=change).status_code == 200
            found[kind] = [world.run().receipt.sequence() for world in (one, two)]
            with World(server.url("fork"), 1, 4, fork_from=state) as fork:
                found[kind].append(fork.run().receipt.sequence(40))
        assert len(begun) > 5 or not flags
        assert psutil.wait_procs(begun, 5)[1] == []
        begun = psutil.Process(pid).children(recursive=True)
        assert server.terminate() == 0
        assert psutil.wait_procs(begun, 5)[1] == []
    assert found["plain"] == found["readers"]
