"""A fault of preparing over a real cluster that takes long to come about: ``pytest -m readers``."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.corpora import flat, write_jsonl
from support.prepared import job_of, nothing, write_tokenizer
from support.ray_cluster import ray_cluster
from support.reader_faults import faulty_readers
from tokenloom_server.cluster.connection import Needs, connect
from tokenloom_server.cluster.preparing import OnRay
from tokenloom_server.errors import TokenizerError
from tokenloom_server.prepare.preparer import prepare

pytestmark = pytest.mark.readers


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
