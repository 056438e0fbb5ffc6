"""What a worker makes, and first compares: attempts that meet or come late, and nodes that have something else."""

from __future__ import annotations

import json
import os
import platform
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.forks import Fork
from support.prepared import job_of, nothing, shards_of, write_texts
from support.s3_server import BUCKET, s3_storage
from support.server_process import MAIN, server_forks
from support.waiting import wait_for
from tokenloom_server.errors import ConfigError
from tokenloom_server.workers.transforms import Transform
from tokenloom_tools.prepare.cluster import described, make_shard
from tokenloom_tools.prepare.folder import Folder
from tokenloom_tools.prepare.job import Job
from tokenloom_tools.prepare.journal import Journal, Shard
from tokenloom_tools.prepare.preparer import OnRows, prepare

#: The first that asks waits until it may go on.
HELD = """
import pathlib, time

def held(batch):
    here = pathlib.Path(__file__).parent
    try:
        (here / "first").touch(exist_ok=False)
    except FileExistsError:
        return batch
    while not (here / "go").exists():
        time.sleep(0.01)
    return batch
"""
NODE = re.escape(platform.node())


@pytest.fixture(params=["disk", "s3"])
def out(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Folder]:
    monkeypatch.chdir(tmp_path)
    if request.param == "disk":
        yield Folder(tmp_path / "out")
    else:
        with s3_storage():
            yield Folder(f"s3://{BUCKET}/{tmp_path.name}")


def made(job: Job, journal: Journal, number: int = 0) -> dict[str, Any]:
    """The answer to an attempt at a job's first task."""
    task = job.tasks[0]
    text = json.dumps([task.source, task.ranges, task.bytes, task.name])
    answer: dict[str, Any] = json.loads(make_shard(described(job, journal.attempts), text, number))
    return answer


def test_of_attempts_at_one_time_one_is_published_and_one_that_wakes_after_the_end_leaves_nothing(
    out: Folder, tmp_path: Path
) -> None:
    document = write_texts(tmp_path, files=1)
    (tmp_path / "data/large.jsonl").unlink()
    (tmp_path / "gate.py").write_text(HELD)
    answers: list[dict[str, Any]] = []
    with closing(Transform("gate:held")) as transform:
        job = job_of(tmp_path, document, transform)

        def make_all(job: Job, tasks: Any, journal: Journal, on_done: OnRows) -> None:
            late.append(threading.Thread(target=lambda: answers.append(made(job, journal))))
            late[0].start()
            wait_for((tmp_path / "first").exists, "the first attempt")
            answer = made(job, journal, 1)
            assert len(out.entries(".attempts")) >= 2, "each writes under a name of its own"
            journal.add(Shard(**answer["shard"]), journal.attempts.named(tasks[0].name, 1))

        late: list[threading.Thread] = []
        done = prepare(job, out.place, on_done=nothing, on_kept=nothing, make_all=make_all)
        present = out.entries("")
        assert not out.entries(".attempts")
        (tmp_path / "go").touch()
        late[0].join(240)
        prepare(job, tmp_path / "whole", on_done=nothing, on_kept=nothing)
    (answer,) = answers
    assert answer["error"] == "ConfigError"
    assert re.search(
        rf"^{NODE}: .*(was made after its command had ended|cannot be written)", answer["message"]
    )
    assert out.entries("") == present
    assert done.shards == 1
    assert shards_of(out.place) == shards_of(tmp_path / "whole")


@pytest.mark.parametrize("out", ["s3"], indirect=True)
def test_a_command_that_was_killed_goes_on_with_what_is_not_whole(
    out: Folder, tmp_path: Path
) -> None:
    """In a folder: ``tests/prepare/test_prepare.py``."""
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(write_texts(tmp_path, files=2)))
    (tmp_path / "gate.py").write_text(HELD)
    log = tmp_path / "log"

    def begin() -> Fork:
        options = (
            "--out",
            out.place,
            "--shard-mb",
            "1",
            "--threads",
            "2",
            "--transform",
            "gate:held",
        )
        return server_forks().fork(
            MAIN, ("prepare", "mixture.yaml", *options), output=log, folder=tmp_path
        )

    command = begin()
    wait_for(lambda: len(out.entries("journal.jsonl")) == 4, "all shards but one", 120)
    command.kill()
    command.wait(60)
    assert len(out.entries(".attempts")) == 1, "left by a kill"
    (tmp_path / "go").touch()
    assert begin().wait(120) == 0, log.read_text()
    assert "in 5 shards (4 were there already)" in log.read_text()
    assert not out.entries(".attempts")


def test_a_second_command_that_prepares_below_the_same_url_takes_it_over(tmp_path: Path) -> None:
    job = job_of(tmp_path, write_texts(tmp_path, files=1))
    place = "memory://taken/out"

    def make_all(job: Job, tasks: Any, journal: Journal, on_done: OnRows) -> None:
        answer = made(job, journal)
        prepare(job, place, on_done=nothing, on_kept=nothing)
        journal.add(Shard(**answer["shard"]), journal.attempts.named(tasks[0].name, 0))

    with pytest.raises(ConfigError, match="another command prepares into it now"):
        prepare(job, place, on_done=nothing, on_kept=nothing, make_all=make_all)


def test_a_node_that_has_something_else_refuses_with_its_name(out: Folder, tmp_path: Path) -> None:
    job = job_of(tmp_path, write_texts(tmp_path, files=2))
    for path in (tmp_path / "index").glob("*.npy"):
        out.write(f".index/{path.name}", path.read_bytes())
    with Journal.open(out, job, nothing) as journal:
        description = json.loads(described(job, journal.attempts))
        assert json.loads(make_shard(json.dumps(description))) == {"log": []}
        order = json.loads(description["order"])
        for other, said in (
            (
                {"order": json.dumps(order | {"tokenloom": "0.0.1"})},
                "has Tokenloom .*who asks it has 0.0.1: install",
            ),
            (
                {"order": json.dumps(order | {"tokenizer": "other"})},
                "tokenizer 'bytes' has the digest",
            ),
            (
                {"attempts": ".attempts/other"},
                "is not seen here; expected a folder that all nodes have",
            ),
            (
                {"transform": ["gate:held", 1.0, 100, {}]},
                "transform 'gate:held': expected MODULE:FUNCTION",
            ),
        ):
            answer = json.loads(make_shard(json.dumps(description | other)))
            assert re.search(f"^{NODE}: .*{said}", answer["message"]), answer
        os.truncate(tmp_path / "data/0.jsonl", 100)
        answer = made(job, journal)
        assert answer["error"] == "SourceChanged"
        assert re.search(rf"^{NODE}: source .*data/0\.jsonl", answer["message"])
        assert not shards_of(out.place)
