"""A mixture file in place of a server's address: the server inside the job, and the same samples without one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
import yaml
from support.forks import Forks
from support.killed import EXAMPLES, kill_and_resume
from support.served import runs_of, url_of
from support.trainer import World
from support.waiting import wait_for
from tokenloom import (
    ConfigError,
    ConnectionOptions,
    EvaluationDataset,
    LaunchOptions,
    LeaseHeld,
    LocalDataset,
    NotFound,
    RemoteDataset,
    ServerUnavailable,
    SourceError,
    TokenloomError,
    job_server,
)
from tokenloom.datasets.order import OrderDataset
from tokenloom.job_server import machine, reachable_host, require_server
from tokenloom_server.api.grpc import servicer
from torch.utils.data import DataLoader


def sample(folder: Path, **fields: object) -> Path:
    """The sample mixture in a folder of its own, with ``fields`` in place of its own; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(EXAMPLES / "compose" / "data", folder / "data")
    found = yaml.safe_load((EXAMPLES / "compose" / "mixture.yaml").read_text(encoding="utf-8"))
    path = folder / "mixture.yaml"
    path.write_text(yaml.safe_dump(found | fields), encoding="utf-8")
    return path


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return sample(tmp_path / "mixture")


def servers(mixture: Path) -> list[psutil.Process]:
    """The processes that serve the file, of whomever."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(mixture) in process.cmdline() and "serve" in process.cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            pass
    return found


def test_a_job_with_its_server_inside_goes_on_behind_a_kill(
    torch_forks: Forks, tmp_path: Path
) -> None:
    """The kill ends the server, too, and its restart waits for no lease."""
    alone, killed = sample(tmp_path / "a"), sample(tmp_path / "b")

    kill_and_resume(torch_forks, EXAMPLES / "ddp.py", (str(alone), str(killed)), tmp_path)

    wait_for(lambda: not servers(alone) + servers(killed), "the end of the servers")
    (log,) = (killed.parent / ".tokenloom-server").glob("*/mixture.yaml/server.log")
    text = log.read_text(encoding="utf-8")
    addresses = re.findall(r"is ready: gRPC on (\S+),", text)
    assert len(addresses) == 2
    if len(set(addresses)) == 1:  # else the port was taken meanwhile
        assert "waiting up to" not in text, (
            "a restart waited for the lease of the server that was killed with its job"
        )


# --- The same checkpoint in every mode ---------------------------------------------------------------------------


def digests(dataset: OrderDataset, steps: int) -> list[str]:
    batches = iter(dataset)
    found = []
    for _ in range(steps):
        next(batches)
        found.append(dataset.digest)
    return found


def test_one_checkpoint_goes_on_in_every_mode(mixture: Path, tmp_path: Path) -> None:
    with LocalDataset(sample(tmp_path / "alone"), 4) as dataset:
        expected = digests(dataset, 20)

    with LocalDataset(mixture, 4) as dataset:
        assert digests(dataset, 5) == expected[:5]
        state = dataset.state_dict()
    with url_of(tmp_path, mixture) as url, World(f"{url}/sample", 2, 2, state=state) as world:
        world.steps(5)
        assert world.ranks[0].digest == expected[9]
        state = world.state()
    with RemoteDataset(mixture, 4) as dataset:
        dataset.load_state_dict(state)
        assert digests(dataset, 5) == expected[10:15]
        state = dataset.state_dict()
    with LocalDataset(mixture, 2) as dataset:
        dataset.load_state_dict(state)
        assert digests(dataset, 10)[1::2] == expected[15:]


# --- The server's life -------------------------------------------------------------------------------------------


def test_a_server_that_dies_is_started_again_and_the_ranks_go_on(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_server, "SOUND_S", 1000.0)  # however slow this machine is now
    with LocalDataset(sample(tmp_path / "alone"), 4) as dataset:
        expected = digests(dataset, 40)
    with RemoteDataset(mixture, 4, connection=ConnectionOptions(prefetch_steps=2)) as dataset:
        assert digests(dataset, 3) == expected[:3]
        (first,) = servers(mixture)
        first.kill()
        assert digests(dataset, 20) == expected[3:23]
        (second,) = servers(mixture)
        assert second != first
        second.kill()
        assert digests(dataset, 17) == expected[23:]
        # One that dies again and again is not helped by another start.
        servers(mixture)[0].kill()
        with pytest.raises(ServerUnavailable, match="3 times in a row"):
            digests(dataset, 100)
    assert servers(mixture) == []


def test_a_server_that_cannot_be_started_again_ends_the_training_with_its_reason(
    mixture: Path,
) -> None:
    with RemoteDataset(mixture, 4, connection=ConnectionOptions(prefetch_steps=2)) as dataset:
        batches = iter(dataset)
        next(batches)
        (mixture.parent / "data" / "fables.txt").unlink()
        servers(mixture)[0].kill()
        with pytest.raises(SourceError, match=r"fables\.txt"):
            for _ in range(1000):
                next(batches)


def test_a_stream_to_evaluate_on_is_served_beside_training_and_without_a_server(
    tmp_path: Path,
) -> None:
    source = {
        "source": "txt:data/fables.txt:text",
        "alias": "fables",
        "epochs": float("inf"),
        "holdout": 0.3,
    }
    mixture = sample(tmp_path / "mixture", mixture={"policy": "sequential", "children": [source]})

    def validation(data: EvaluationDataset) -> list[list[int]]:
        with data:
            return [batch["input_ids"].flatten().tolist() for batch in data]

    with RemoteDataset(mixture, 4) as dataset:
        before = digests(dataset, 2)
        found = validation(EvaluationDataset(mixture, 2, samples=8))
        assert len(found) == 4
        assert found == validation(dataset.evaluation(batch_size=2, samples=8))
        assert found == validation(LocalDataset(mixture, 4).evaluation(batch_size=2, samples=8))
        assert len(servers(mixture)) == 1
        after = digests(dataset, 2)
        kept = dataset.evaluation(batch_size=2, samples=8)
    assert found == validation(kept), "the server goes with the last of its datasets"
    assert servers(mixture) == []
    with LocalDataset(mixture, 4) as dataset:
        assert digests(dataset, 4) == before + after


def test_a_second_job_of_the_same_file_is_told_who_has_it(mixture: Path) -> None:
    with (
        runs_of(mixture.parent, mixture, ledger="tokenloom.db", holder="node-7:50051"),
        pytest.raises(LeaseHeld, match="node-7:50051"),
    ):
        RemoteDataset(mixture, 4)
    assert servers(mixture) == []


def test_jobs_of_several_files_in_one_folder_may_start_at_once(mixture: Path) -> None:
    """Each hears of its own server."""
    files = {name: mixture.with_name(f"{name}.yaml") for name in ("one", "two")}
    for name, path in files.items():
        found = yaml.safe_load(mixture.read_text(encoding="utf-8"))
        path.write_text(yaml.safe_dump(found | {"run": name}), encoding="utf-8")

    with ThreadPoolExecutor(2) as pool:
        started = pool.map(
            lambda path: job_server.ChildServer(path, "127.0.0.1", 60.0), files.values()
        )
        found = dict(zip(files, started, strict=True))
    try:
        assert {name: server.run for name, server in found.items()} == {"one": "one", "two": "two"}
    finally:
        for server in found.values():
            server.close()


def test_where_the_folder_is_read_only_each_launch_has_the_same_one_among_temporary_files(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For there is the address that the last launch had."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = job_server._folder(mixture)
    assert folder == job_server._folder(mixture)
    assert folder.is_relative_to(tmp_path)
    assert folder != job_server._folder(mixture.with_name("other.yaml"))
    # What somebody else may have put there is not used.
    shutil.rmtree(folder.parent)
    folder.parent.symlink_to(mixture.parent)
    assert job_server._folder(mixture).parent == tmp_path


# --- Several ranks, and what is told to all of them --------------------------------------------------------------


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group, whose store threads may use as ranks do."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def on_two_ranks(mixture: Path, attempt: str, do: Callable[[RemoteDataset], Any]) -> list[Any]:
    """What both ranks have of it, an error included."""

    def rank(number: int) -> Any:
        try:
            with RemoteDataset(
                mixture, 2, rank=number, world_size=2, launch=LaunchOptions(attempt=attempt)
            ) as dataset:
                return do(dataset)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


@pytest.mark.usefixtures("group")
def test_all_ranks_hear_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    wrong = sample(tmp_path / "wrong", sequence_length=-3)
    missing = tmp_path / "nowhere" / "mixture.yaml"

    for path, message in ((wrong, "sequence_length"), (missing, "nowhere")):
        found = on_two_ranks(path, f"attempt-{path}", lambda dataset: None)
        assert [type(error) for error in found] == [ConfigError, ConfigError]
        assert str(found[0]) == str(found[1])
        assert message in str(found[0])
    assert not missing.parent.exists()


@pytest.mark.usefixtures("group")
def test_ranks_on_several_machines_meet_at_the_address_that_is_told(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = next(
        (a.address for found in psutil.net_if_addrs().values() for a in found if is_outer(a)), None
    )
    if own is None:
        pytest.skip("this machine has no address but the loopback's")
    monkeypatch.setattr(job_server, "machine", lambda: str(threading.get_ident()))
    monkeypatch.setenv("TOKENLOOM_HOST", own)

    def train(dataset: RemoteDataset) -> tuple[str, list[str]]:
        return str(dataset._request.address), digests(dataset, 5)

    first, second = on_two_ranks(mixture, "attempt", train)
    assert first == second
    assert first[0].startswith(f"grpc://{own}:")


def is_outer(address: Any) -> bool:
    return address.family == socket.AF_INET and not address.address.startswith("127.")


def test_where_ranks_are_on_several_machines_the_address_is_one_that_others_know() -> None:
    with pytest.raises(TokenloomError, match="TOKENLOOM_HOST"):
        reachable_host({"MASTER_ADDR": "127.0.0.1", "TOKENLOOM_HOST": "203.0.113.7"})
    assert machine() == machine()


def test_several_ranks_without_a_process_group_are_told_to_make_one(mixture: Path) -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        RemoteDataset(mixture, 4, rank=1, world_size=2, launch=LaunchOptions(attempt="mine"))


def test_a_dataset_without_a_server_is_for_one_process_however_that_was_launched(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As torchrun sets them, with or without a process group.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"for one process alone, and this is rank 1 of 2: use RemoteDataset"
    ):
        LocalDataset(mixture, 4)


# --- In this process ---------------------------------------------------------------------------------------------


def test_without_a_server_nothing_is_left_behind(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(mixture.parent / "temporary"))
    (mixture.parent / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    sockets, threads = len(psutil.Process().net_connections()), set(threading.enumerate())

    with LocalDataset(mixture, 4) as dataset:
        batch = next(iter(dataset))
        assert batch["input_ids"].shape == (4, 128)
        assert list((mixture.parent / "temporary").iterdir()) == [], (
            "who is killed now removes nothing"
        )
        assert len(psutil.Process().net_connections()) == sockets
    assert set(threading.enumerate()) <= threads
    assert list((mixture.parent / "temporary").iterdir()) == []
    assert not list(mixture.parent.glob("*.db"))


def test_without_a_server_a_run_can_be_looked_at(mixture: Path) -> None:
    with LocalDataset(mixture, 4) as dataset:
        expected = digests(dataset, 3)
    with LocalDataset(mixture, 4) as dataset, dataset.peek() as look, dataset.peek(at=4) as later:
        assert digests(look, 3) == expected
        assert digests(later, 2) == expected[1:]


def test_without_a_server_errors_have_the_names_that_they_have_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sequence_length"):
        LocalDataset(sample(tmp_path / "a", sequence_length=-3), 4)
    missing = sample(tmp_path / "b")
    (missing.parent / "data" / "fables.txt").unlink()
    with LocalDataset(missing, 4) as dataset, pytest.raises(TokenloomError, match="fables"):
        iter(dataset)
    with (
        LocalDataset(sample(tmp_path / "c"), 4, resume="nothing-of-this-name") as dataset,
        pytest.raises(NotFound, match="nothing-of-this-name"),
    ):
        iter(dataset)


def test_a_dataloaders_worker_has_the_run_where_it_reads(mixture: Path) -> None:
    with LocalDataset(mixture, 4) as dataset:
        expected = [
            batch["sample_ids"].tolist() for batch, _ in zip(dataset, range(3), strict=False)
        ]
    for kind in (LocalDataset, RemoteDataset):
        with kind(mixture, 4) as dataset:
            loader = DataLoader(dataset, batch_size=None, num_workers=1)
            assert [
                batch["sample_ids"].tolist() for batch, _ in zip(loader, range(3), strict=False)
            ] == expected


def test_a_script_that_closes_nothing_ends_without_a_word(mixture: Path) -> None:
    """In the midst of reading ahead: that is what a process that ends does."""
    script = (
        "from tokenloom import LocalDataset\n"
        f"batches = iter(LocalDataset({str(mixture)!r}, batch_size=4))\n"
        "for _ in range(30): next(batches)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=True
    )
    assert found.stderr == ""


def test_what_a_handler_of_signals_raises_is_no_failure_of_the_server(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = servicer.join_training

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return joined(*arguments)

    def handler(*_: object) -> None:
        raise TimeoutError("the user's own")

    monkeypatch.setattr(servicer, "join_training", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with LocalDataset(mixture, 4) as dataset:
            with pytest.raises(TimeoutError, match="the user's own"):
                iter(dataset)
            monkeypatch.undo()
            assert next(iter(dataset))["sample_index"] == 4
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_a_path_cannot_have_beside_it_is_refused(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (LocalDataset, RemoteDataset):
        with pytest.raises(
            ValueError, match="connection has token, which is for the address of a server that runs"
        ):
            kind(mixture, 4, connection=ConnectionOptions(token="0123456789abcdef"))
    with pytest.raises(ValueError, match="give the path of a mixture file"):
        LocalDataset("grpc://127.0.0.1:1/run", 4)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    LocalDataset(mixture, 4).close()  # salloc's shell
    for task in ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}):
        for name, value in task.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            ValueError, match=r"one process alone, and this is rank 0 of 2: use RemoteDataset"
        ):
            LocalDataset(mixture, 4)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tokenloom\[server\]'"):
        require_server(mixture, ["no_such_package"])
