"""Runs that come, change and go while their server serves others."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import yaml
from conftest import Corpus, StartServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import Sample, World
from support.waiting import wait_for
from tokenloom_proto.errors import ConfigError, NotFound, TokenloomError
from tokenloom_server.api.run_folder import RunFolder
from tokenloom_server.api.server import ServeOptions, Server
from tokenloom_server.api.service import Runs
from tokenloom_server.config import mixture_file
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_tools.remote import Remote

BROKEN = "run: broken\nsequence_length: nine\n"


def post(server: ServerProcess, path: str, **body: object) -> httpx.Response:
    return server.request("POST", path, json=body)


def broken(server: ServerProcess) -> dict[str, tuple[str, bool]]:
    return {
        each["run"]: (each["error"], each["served"]) for each in server.get("/v1/runs")["broken"]
    }


def test_runs_are_added_reloaded_and_removed_while_another_trains(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, tokenloom: CommandLine
) -> None:
    server = start_server(corpus.mixture("stays"), flags=("--log-format", "json"))
    file = corpus.mixture("comes", window_micro_steps=4)
    with World(server.url("stays"), 2, 1) as stays:
        stays.steps(3)
        added = tokenloom("runs", server.rest, "--add", file)
        assert added.status == 0, added.output
        assert (
            "comes: added" in added.output and "where the server is started with it" in added.output
        )
        stays.steps(3)
        with World(server.url("comes"), 2, 2) as comes:
            comes.steps(4)
            # Nothing changed: a reload does nothing to the ranks.
            unchanged = tokenloom("runs", server.rest, "--reload", "comes")
            assert unchanged.status == 0 and "Nothing is new in the file." in unchanged.output
            assert comes.steps(1).receipt.sequence() == sequence[:20]
            revised(file)
            refused = tokenloom("runs", server.rest, "--reload", "comes")
            assert refused.status == 2
            assert (
                "mixture.children.0.weight" in refused.output
                and "runs --reload RUN --reason" in refused.output
            )
            comes.steps(2)
            reloaded = tokenloom("runs", server.rest, "--reload", "comes", "--reason", "less code")
            assert reloaded.status == 0, reloaded.output
            assert re.search(r"Revision 1 holds from sample \d+ on\.", reloaded.output)
            assert [
                each["reason"] for each in server.get("/v1/runs/comes/mixture")["revisions"]
            ] == ["less code"]
            comes.steps(2)
            state, index = comes.state(), comes.sample_index
            wait_for(
                lambda: server.get("/v1/runs/comes/stats")["sample_index"] == index, "the commit"
            )
            removed = tokenloom("runs", server.rest, "--remove", "comes")
            assert removed.status == 0, removed.output
            with pytest.raises(NotFound, match="was removed from this server; the ledger keeps it"):
                comes.steps(50)
        assert server.get("/v1/runs")["runs"] == ["stays"]
        stays.steps(3)
        assert post(server, "/v1/runs", file=str(file)).status_code == 201
        with World(server.url("comes"), 1, 4, state=state) as again:
            assert again.sample_index == index
            again.steps(2)
            assert again.state() != state
        assert stays.receipt.sequence() == sequence[:18]
    server.terminate()
    lines = [
        json.loads(line)
        for line in server.log.splitlines()
        if not line.startswith("tokenloom is ready")
    ]
    assert {line.get("run") for line in lines} >= {"stays", "comes", None}


def revised(file: Path) -> None:
    document = yaml.safe_load(file.read_text())
    document["mixture"]["children"][0]["weight"] = 1
    file.write_text(yaml.safe_dump(document))


def test_a_folder_is_followed_and_one_broken_file_leaves_the_others_alone(
    corpus: Corpus, start_server: StartServer, tokenloom: CommandLine
) -> None:
    folder = corpus.folder  # relative paths of its files begin there
    for path in folder.glob("*.yaml"):
        path.unlink()
    first = corpus.mixture("first")
    bad = folder / "bad.yaml"
    bad.write_text(BROKEN)
    server = start_server(flags=("--runs-dir", folder))
    assert server.get("/v1/runs")["runs"] == ["first"]
    assert broken(server) == {"bad": ("ConfigError", False)}
    assert "sequence_length" in server.log
    assert 'tokenloom_run_broken{run="bad"} 1.0' in server.request("GET", "/metrics").text
    assert "bad: not served" in tokenloom("runs", server.rest).output
    with (
        pytest.raises(NotFound, match=r"(?s)bad.yaml.*tokenloom runs URL --reload bad"),
        World(server.url("bad")) as none,
    ):
        none.join()
    with World(server.url("first")) as world:
        world.steps(2)
        # One that is written to for a while is taken once it is whole.
        corpus.mixture("second").rename(folder / "bad.yaml")
        wait_for(
            lambda: server.get("/v1/runs")["runs"] == ["first", "second"], "the file to be taken"
        )
        assert broken(server) == {}
        text = corpus.mixture("sent").read_text()
        (folder / "sent.yaml").unlink()
        sent = post(server, "/v1/runs", mixture=text)
        assert sent.status_code == 201, sent.text
        assert (folder / "sent.yaml").read_text() == text
        assert post(server, "/v1/runs", mixture=text).status_code == 422
        assert post(server, "/v1/runs", mixture=BROKEN).status_code == 422
        first.write_text(BROKEN)
        wait_for(
            lambda: broken(server) == {"first": ("ConfigError", True)}, "the file to be refused"
        )
        world.steps(2)
        bad.unlink()
        wait_for(
            lambda: server.get("/v1/runs")["runs"] == ["first", "sent"], "the run to be removed"
        )
        world.steps(2)
    remote = Remote(server.rest, {})
    listed = remote.about()
    assert server.request("DELETE", "/v1/runs/sent", json={}).status_code == 200
    # One of all went after they were listed.
    remote.about = lambda: listed  # type: ignore[method-assign]
    assert [stats.run for stats in remote.stats()] == ["first"]
    with pytest.raises(NotFound):
        Remote(f"{server.rest}/sent", {}).stats()
    assert (folder / "sent.yaml.removed").exists()
    corpus.mixture("first")
    wait_for(lambda: broken(server) == {}, "the file to be right again")
    for said in (f"added, of {bad}", f"removed; the ledger keeps it (before: served, of {bad})"):
        assert f"run second: {said}; by this server" in server.log
    server.terminate()
    server.start()
    assert server.get("/v1/runs")["runs"] == ["first"]


def test_files_that_are_renamed_doubled_or_not_to_be_read_leave_every_run_served(
    corpus: Corpus, tmp_path: Path
) -> None:
    folder = corpus.folder
    for path in folder.glob("*.yaml"):
        path.unlink()
    with closing(SqliteLedger(tmp_path / "ledger.db")) as ledger:
        runs = Runs(ledger)
        follower = RunFolder(runs, folder, None, DataRoots())

        def taken() -> tuple[list[str], list[str]]:
            follower.step()
            follower.step()
            return runs.names(), [problem.origin.where for problem in runs.problems()]

        middle, loop = corpus.mixture("middle"), folder / "loop.yaml"
        loop.symlink_to(loop)
        pipe = folder / "pipe.yaml"
        os.mkfifo(pipe)
        others = [folder / f"a-{name}.yaml" for name in ("bad", "folder", "link", "worse")]
        others[1].mkdir()
        others[2].symlink_to("nothing")
        for path in (others[0], others[3]):
            path.write_text(BROKEN)
        assert taken() == (["middle"], [*map(str, others), str(loop), str(pipe)])
        assert ["Is a directory" in str(each.error) for each in runs.problems()].count(True) == 1
        # All at once, and one that was written to right before that.
        others[3].write_text("run: [")
        follower.step()
        others[1].rmdir()
        for path in (others[0], *others[2:]):
            path.unlink()
        assert taken() == (["middle"], [str(loop), str(pipe)])
        first, last = folder / "first.yaml", folder / "zlast.yaml"
        middle.rename(first)
        assert taken() == (["middle"], [str(loop), str(pipe)])
        shutil.copy(first, last)
        assert taken() == (["middle"], [str(loop), str(last), str(pipe)])
        first.unlink()
        assert taken() == (["middle"], [str(loop), str(pipe)])
        odd = Path(os.fsdecode(os.fsencode(folder) + b"/odd\xff.yaml"))
        last.rename(odd)
        # It goes before the other one, which could be it, comes.
        assert taken() == ([], [str(loop), f"{folder}/odd\\udcff.yaml", str(pipe)])
        assert [problem.run for problem in runs.problems()] == ["loop", "odd\\udcff", "pipe"]
        odd.rename(last)
        assert taken() == (["middle"], [str(loop), str(pipe)])
        away = folder.rename(folder.with_name("away"))
        with pytest.raises(ConfigError, match="cannot be read"):
            follower.step()
        folder.mkdir()
        for _ in range(2):
            with pytest.raises(ConfigError, match="another folder than before, and empty"):
                follower.step()
        folder.rmdir()
        away.rename(folder)
        assert taken() == (["middle"], [str(loop), str(pipe)])
        runs.stop()


@pytest.fixture
def in_process(corpus: Corpus, tmp_path: Path) -> Iterator[Server]:
    server = Server(
        ServeOptions(
            mixtures=[corpus.mixture("stays")],
            grpc="127.0.0.1:0",
            rest="127.0.0.1:0",
            ledger=f"sqlite:///{tmp_path}/ledger.db",
            ready_file=None,
            index_dir=tmp_path / "index",
        )
    )
    yield server
    server.close()


@pytest.mark.parametrize("ranks", [2, 33], ids=["threads-of-ranks", "one-thread"])
def test_a_run_that_is_removed_leaves_no_thread_no_file_and_no_object(
    in_process: Server, corpus: Corpus, tmp_path: Path, ranks: int
) -> None:
    def files() -> set[str]:
        return {
            name
            for fd in Path("/proc/self/fd").iterdir()
            if (name := link(fd)).startswith(str(corpus.folder))
        }

    runs = in_process._runs
    assert runs is not None
    before = files()
    served = weakref.ref(runs.add(corpus.mixture("leaves"), tmp_path / "index"))
    gc.freeze()  # as the command does once it is ready
    options = {"reconnect_timeout_s": 20}
    with World(f"grpc://{in_process.grpc_address}/leaves", ranks, 1, **options) as world:
        world.steps(2)
        threads = {
            thread.name for thread in threading.enumerate() if thread.name.startswith("leaves-")
        }
        assert {"leaves-producer", "leaves-committer", "leaves-lease", "leaves-streams"} < threads
        runs.remove("leaves")
        with pytest.raises(TokenloomError, match="removed"):
            world.steps(100)
    wait_for(
        lambda: (
            not [thread for thread in threading.enumerate() if thread.name.startswith("leaves")]
        ),
        "the threads",
    )
    wait_for(lambda: files() <= before, "the files to be closed")
    wait_for(lambda: served() is None, "the memory to be free")
    gc.unfreeze()


def test_a_path_that_is_no_mixture_file_is_refused_by_its_name_without_waiting(
    in_process: Server, tmp_path: Path
) -> None:
    loop, pipe, large = tmp_path / "loop.yaml", tmp_path / "pipe.yaml", tmp_path / "large.yaml"
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    large.touch()
    os.truncate(large, mixture_file.MAX_BYTES + 1)
    no_file = "it is a pipe or a device, and no file"
    for path, says in {
        str(loop): "levels of symbolic links",
        f"{loop}/within.yaml": "levels of symbolic links",
        str(pipe): no_file,
        "/dev/zero": no_file,
        "/proc/self/pagemap": "",
        str(tmp_path): "directory",
        str(large): "it has 16,777,217 bytes, and at most 16,777,216 are read",
        f"/{'a' * 300}": "name too long",
        "/a\x00b": "control characters",
        "/a\nb": "control characters",
    }.items():
        answer = httpx.post(
            f"{in_process.page_url}v1/runs", json={"file": path}, trust_env=False, timeout=120
        )
        assert answer.status_code == 422, path
        assert says in answer.json()["message"], path
        assert answer.json()["error"] == "ConfigError", path


def link(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""


def test_ranks_that_know_another_server_go_on_there_when_a_run_is_removed(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, redis_url: str
) -> None:
    mixture = corpus.mixture("moves", window_micro_steps=4)
    first = start_server(mixture, ledger=redis_url)
    second = start_server(mixture, ledger=redis_url, flags=("--standby", "--lease", 2))
    with World(f"grpc://{first.grpc},{second.grpc}/moves", 2, 2) as world:
        world.steps(3)
        assert first.request("DELETE", "/v1/runs/moves", json={}).status_code == 200
        assert world.steps(8).receipt.sequence() == sequence[:44]
    assert first.get("/v1/runs")["runs"] == []
