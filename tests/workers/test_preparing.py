"""Shards that are tasks of Ray: the bytes of threads, whatever is killed meanwhile, and what is refused before any."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from support.catalog import CATALOG
from support.corpora import flat, write_jsonl
from support.forks import Fork
from support.ports import free_port
from support.prepared import job_of, nothing, shards_of, write_texts
from support.ray_cluster import ray_cluster, ray_folder
from support.s3_server import BUCKET, s3_storage
from support.server_process import MAIN, CommandLine, server_forks
from support.waiting import wait_for
from tokenloom_server.config import mixture_file as config
from tokenloom_server.errors import ConfigError, SourceError, TokenloomError
from tokenloom_server.order import builder
from tokenloom_server.workers.cluster.connection import Needs, connect
from tokenloom_server.workers.transforms import Transform
from tokenloom_tools.prepare.cluster import OnRay
from tokenloom_tools.prepare.preparer import prepare

NEEDS = Needs(cpus=0.5, memory_mb=50)
#: Says whose texts are held until a file is there.
GATE = """
import os, pathlib, time

def gate(batch):
    here = pathlib.Path(__file__).parent
    if str(batch["text"][0]).startswith("held") and not (here / "go").exists():
        (here / f"held-by-{os.getppid()}").touch()
        while not (here / "go").exists():
            time.sleep(0.01)
    return batch
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    head, second = {"ray_client_server_port": free_port()}, {"resources": {"second": 1}}
    with pytest.MonkeyPatch.context() as patch, s3_storage(), ray_cluster(head, second) as cluster:
        patch.setattr("tokenloom_tools.prepare.cluster.LOOK_S", 0.1)
        yield cluster


@contextmanager
def on_ray(address: str, counts: list[int] | None = None) -> Iterator[OnRay]:
    with connect(address, NEEDS, option="--ray"):
        yield OnRay(NEEDS, None, (counts if counts is not None else []).append)


def digest_of(mixture: Path) -> int:
    """The digest of all that a mixture file serves."""
    order = builder.create(config.load(mixture, CATALOG), mixture.parent, None)
    pipeline = order.pipeline(order.initial())
    while pipeline.ended is None:
        pipeline.advance(500)
    return pipeline.state().digest


def test_any_number_of_workers_make_the_bytes_of_threads_in_folders_and_object_stores(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = write_texts(tmp_path)
    job = job_of(tmp_path, document)
    whole = prepare(job, tmp_path / "whole", on_done=nothing, on_kept=nothing)
    assert "data/0.jsonl': line 8: 'text' is a number" in caplog.text
    caplog.clear()
    nodes: list[int] = []
    shards: list[int] = []
    urls = (str(tmp_path / "out"), f"s3://{BUCKET}/out")
    with on_ray(cluster.address, nodes) as make_all:
        for out in urls:
            done = prepare(
                job, out, on_done=lambda n, *_: shards.append(n), on_kept=nothing, make_all=make_all
            )
            assert (done.rows, done.bad_rows, done.tokens, done.shards) == (
                whole.rows,
                1,
                whole.tokens,
                9,
            )
            assert shards_of(out) == shards_of(tmp_path / "whole")
            assert "data/0.jsonl': line 8: 'text' is a number" in caplog.text
            caplog.clear()
        assert (set(nodes), len(shards)) == ({2}, 18)
        document["mixture"]["children"][0]["max_bad_rows"] = 0
        said = []
        for other in (make_all, None):
            with pytest.raises(
                SourceError, match=r"data/0\.jsonl': line 8: 'text' is a number"
            ) as caught:
                out = str(tmp_path / f"bad-{other is None}")
                prepare(
                    job_of(tmp_path, document),
                    out,
                    on_done=nothing,
                    on_kept=nothing,
                    make_all=other,
                )
            said.append((type(caught.value), str(caught.value)))
        assert said[0] == said[1]
    # The second call keeps all, and needs no cluster for it.
    assert [prepare(job, out, on_done=nothing, on_kept=nothing).kept for out in urls] == [9, 9]
    assert not (tmp_path / "out/.attempts").exists()
    remote = shards_and_more(urls[1])
    assert not [name for name in remote if name.startswith(".attempts")]
    (tmp_path / "fetched").mkdir()
    (tmp_path / "fetched/mixture.yaml").write_bytes(remote["mixture.yaml"])
    assert digest_of(tmp_path / "fetched/mixture.yaml") == digest_of(tmp_path / "out/mixture.yaml")


def test_a_client_of_a_cluster_has_the_same_answers(cluster: Any, tmp_path: Path) -> None:
    job = job_of(tmp_path, write_texts(tmp_path, files=1))
    prepare(job, tmp_path / "whole", on_done=nothing, on_kept=nothing)
    port = cluster.head_node._ray_params.ray_client_server_port
    with on_ray(f"ray://127.0.0.1:{port}") as make_all:
        prepare(job, tmp_path / "out", on_done=nothing, on_kept=nothing, make_all=make_all)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "whole")


def shards_and_more(place: str) -> dict[str, bytes]:
    from tokenloom_tools.prepare.folder import Folder

    folder = Folder(place)
    return {name: folder.read(name) or b"" for name in folder.entries("")}


def test_a_path_that_the_driver_alone_sees_is_refused_before_any_work(
    cluster: Any, tmp_path: Path
) -> None:
    document = write_texts(tmp_path, files=1)
    folder = os.open(tmp_path, os.O_DIRECTORY)
    # No other process has a folder at this number.
    os.dup2(folder, 700)
    os.close(folder)
    alone, node = "/dev/fd/700", re.escape(platform.node())
    try:
        with on_ray(cluster.address) as make_all:
            for out, source, said in (
                (
                    f"{alone}/out",
                    "data",
                    f"what the command writes in {alone}/out is not seen here; expected a folder",
                ),
                (f"{tmp_path}/out", f"{alone}/data", f"source .*{alone}/data/0.jsonl"),
            ):
                document["mixture"]["children"][0]["source"] = f"jsonl:{source}/*.jsonl:text"
                with pytest.raises(TokenloomError, match=f"^{node}: {said}"):
                    prepare(
                        job_of(tmp_path, document),
                        out,
                        on_done=nothing,
                        on_kept=nothing,
                        make_all=make_all,
                    )
                assert not shards_of(tmp_path / "out")
                shutil.rmtree(tmp_path / "out")
    finally:
        os.close(700)


def test_the_first_shard_is_asked_for_on_another_node_where_one_has_stopped(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray.util import placement_group, remove_placement_group

    write_jsonl(tmp_path / "x.jsonl", ["held x"])
    (tmp_path / "gate.py").write_text(GATE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tokenloom_tools.prepare.cluster.LATE_S", 1.0)
    needs, stopped = Needs(cpus=0.1), set[psutil.Process]()

    def is_elsewhere() -> bool:
        """Whether the shard is at work on a second node; on the first one its workers have stopped."""
        held = {
            psutil.Process(int(path.name.removeprefix("held-by-")))
            for path in tmp_path.glob("held-by-*")
        }
        if len({worker.ppid() for worker in held}) == 2:
            return True
        for worker in held:
            worker.suspend()
        stopped.update(held)
        return False

    with closing(Transform("gate:gate")) as transform, ThreadPoolExecutor(1) as pool:
        job = job_of(tmp_path, flat(["jsonl:x.jsonl:text"]), transform)
        with connect(cluster.address, needs, option="--ray"):
            # What Ray may place anywhere goes to the first node, which has room for all attempts.
            taken = placement_group([{"CPU": 1, "second": 1}])
            assert taken.wait(30)
            make_all = OnRay(needs, None, nothing)
            done = pool.submit(
                prepare, job, tmp_path / "out", on_done=nothing, on_kept=nothing, make_all=make_all
            )
            try:
                wait_for(
                    lambda: is_elsewhere() or caplog.text.count("asked for again") == 3,
                    "four attempts",
                )
                remove_placement_group(taken)
                wait_for(is_elsewhere, "an attempt on the other node")
                (tmp_path / "go").touch()
                assert done.result(60).shards == 1
            finally:
                (tmp_path / "go").touch()
                for worker in stopped:
                    worker.resume()
        prepare(job, tmp_path / "whole", on_done=nothing, on_kept=nothing)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "whole")


def test_a_node_that_does_not_answer_is_left_out_where_another_one_does(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(tmp_path, write_texts(tmp_path, files=1))
    nodes: list[int] = []
    (second,) = cluster.worker_nodes
    raylet = psutil.Process(second.all_processes["raylet"][0].process.pid)

    def made(out: str, needs: Needs = NEEDS) -> dict[str, bytes]:
        prepare(
            job,
            tmp_path / out,
            on_done=nothing,
            on_kept=nothing,
            make_all=OnRay(needs, None, nodes.append),
        )
        return shards_of(tmp_path / out)

    with connect(cluster.address, NEEDS, option="--ray"):
        whole = made("whole")
        raylet.suspend()
        try:
            monkeypatch.setattr("tokenloom_server.workers.cluster.tasks.CHECK_S", 3.0)
            assert set(nodes) == {2}
            nodes.clear()
            assert made("out") == whole
            assert set(nodes) == {1}
            said = f"{platform.node()}: no answer within 3 s to what is compared before shards"
            assert f"{said}: left out" in caplog.text
            assert "asked for again" not in caplog.text
            with pytest.raises(ConfigError, match=f"^{re.escape(said)}; expected one"):
                made("none", Needs(resources={"second": 1}))
        finally:
            raylet.resume()


def test_killed_workers_nodes_and_drivers_change_no_byte(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = write_texts(tmp_path, files=3)
    for name in ("x", "y"):
        (tmp_path / f"data/{name}.jsonl").write_text(json.dumps({"text": f"held {name}"}))
    (tmp_path / "gate.py").write_text(GATE)
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(document))
    log, journal = tmp_path / "log", tmp_path / "out/journal.jsonl"

    def begin() -> Fork:
        options = (
            "--out",
            "out",
            "--shard-mb",
            "1",
            "--transform",
            "gate:gate",
            "--ray",
            cluster.address,
        )
        return server_forks().fork(
            MAIN, ("prepare", "mixture.yaml", *options), output=log, folder=tmp_path
        )

    def held() -> list[int]:
        return [int(path.name.removeprefix("held-by-")) for path in tmp_path.glob("held-by-*")]

    driver = begin()
    wait_for(
        lambda: len(held()) == 2 and journal.read_bytes().count(b"\n") == 6, "all but two shards"
    )
    os.kill(held()[0], signal.SIGKILL)
    wait_for(lambda: len(held()) == 3, "another worker")
    assert "its worker or node was lost: " in log.read_text()
    driver.kill()
    driver.wait(240)
    assert list((tmp_path / "out/.attempts").iterdir()), "left by a kill"
    for path in tmp_path.glob("held-by-*"):
        path.unlink()

    driver = begin()
    wait_for(lambda: len(held()) == 2, "the other two shards")
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    wait_for(
        lambda: log.read_text().count("its worker or node was lost: ") == 2, "the loss of a node"
    )
    (tmp_path / "go").touch()
    assert driver.wait(240) == 0, log.read_text()
    assert "in 8 shards (6 were there already)" in log.read_text()
    assert not (tmp_path / "out/.attempts").exists()
    monkeypatch.chdir(tmp_path)
    with closing(Transform("gate:gate")) as transform:
        prepare(
            job_of(tmp_path, document, transform),
            tmp_path / "whole",
            on_done=nothing,
            on_kept=nothing,
        )
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "whole")


@pytest.mark.readers
def test_without_memory_on_a_node_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(write_texts(tmp_path, files=1)))
    # All that it has is too much.
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "20")
    command = [
        "-m",
        "tokenloom_tools",
        "prepare",
        "mixture.yaml",
        "--ray",
        "local",
        "--threads",
        "1",
    ]
    with ray_folder():
        ended = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.returncode == 2
    said = "its node had no memory left, and it was killed: say with --ray-memory what it takes"
    assert f"was lost 5 times; the last time: {said}" in ended.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ray-cpus", "2"), "--ray-cpus, --ray-memory and --ray-resource belong to --ray"),
        (
            ("--ray", "local", "--ray-resource", "tpu"),
            "--ray-resource: found 'tpu', expected NAME=AMOUNT",
        ),
        (
            ("--ray", "local", "--ray-resource", "tpu=-1"),
            "--ray-resource: found 'tpu=-1', expected NAME=AMOUNT",
        ),
        (("--ray", "here"), "--ray here: expected auto, local, HOST:PORT or ray://HOST:PORT"),
    ],
)
def test_options_that_say_nothing_are_refused(
    tmp_path: Path, tokenloom: CommandLine, options: tuple[str, ...], said: str
) -> None:
    ended = tokenloom("prepare", tmp_path / "none.yaml", *options, folder=tmp_path)
    assert ended.status == 2
    assert re.search(f"ConfigError: {said}", ended.output)
