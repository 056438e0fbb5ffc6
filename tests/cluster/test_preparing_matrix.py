"""Faults of preparing over real clusters that take long to come about: ``pytest -m readers``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.corpora import flat, write_jsonl
from support.ports import free_port
from support.prepared import job_of, nothing, write_tokenizer
from support.ray_cluster import ray_cluster, ray_folder
from support.reader_faults import faulty_readers
from support.waiting import wait_for
from tokenloom_server.cluster.connection import Needs, connect
from tokenloom_server.cluster.preparing import OnRay
from tokenloom_server.errors import TokenizerError
from tokenloom_server.prepare.preparer import prepare

pytestmark = [pytest.mark.timeout(300), pytest.mark.readers]
CONNECT = """
import sys
from tokenloom_server.cluster.connection import Needs, connect
with connect(sys.argv[1], Needs(), option="--ray"):
    print("connected")
"""


def test_a_document_at_which_workers_die_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"row {row}" for row in range(20)]
    texts[7] += " this one kills"
    write_jsonl(tmp_path / "deadly.jsonl", texts)
    write_tokenizer(tmp_path / "tokenizer.json", texts)
    job = job_of(tmp_path, flat(["jsonl:deadly.jsonl:text"], tokenizer="tokenizer.json"))
    monkeypatch.setenv("FAULTY_NODE", "GigatokenEngine,TokenizersEngine")
    said = r"deadly.jsonl: row 7: a process that encodes .* was ended by SIGSEGV, and one"
    with (
        faulty_readers(tmp_path),
        ray_cluster({}) as cluster,
        connect(cluster.address, Needs(), option="--ray"),
        pytest.raises(TokenizerError, match=said),
    ):
        make_all = OnRay(Needs(), None, nothing)
        prepare(job, tmp_path / "out", on_done=nothing, on_kept=nothing, make_all=make_all)
    assert caplog.text.count("its worker or node was lost") == 2


def test_a_cluster_that_asks_for_a_token_refuses_another_at_once(tmp_path: Path) -> None:
    port, right = free_port(), {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    start = ["ray", "start", "--head", "--block", f"--port={port}", "--num-cpus=1", "--include-dashboard=false"]

    def said(**other: str) -> str:
        command, environment = [sys.executable, "-c", CONNECT, f"127.0.0.1:{port}"], os.environ | right | other
        # Ray itself would try for two minutes.
        return subprocess.run(command, env=environment, stdout=-1, stderr=-2, timeout=60, check=False).stdout.decode()

    with ray_folder(), (tmp_path / "log").open("wb") as log:
        head = subprocess.Popen(start, env=os.environ | right, stdout=log, stderr=log)
        try:
            wait_for(lambda: said().endswith("connected\n"), "the cluster", 90)
            for other in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "b" * 64}):
                assert f"ConfigError: --ray 127.0.0.1:{port}: no connection to Ray there" in said(**other)
        finally:
            head.terminate()
            head.wait(60)
