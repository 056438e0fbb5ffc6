"""Files that are edited while nobody looks: ranks end by the file's name, or people are warned."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import yaml
from conftest import StartServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import World
from support.waiting import wait_for
from tokenloom import TokenloomError

ROWS = 40_000


def write(folder: Path) -> Path:
    """Lines of 50 bytes each: 2 MB."""
    draw = random.Random(7)
    path = folder / "edited.txt"
    path.write_text("".join(f"{i:06} {draw.randbytes(21).hex()}\n" for i in range(ROWS)))
    return path


def mixture(folder: Path) -> Path:
    document = {
        "run": "edited", "tokenizer": "bytes", "sequence_length": 100, "window_micro_steps": 8,
        "mixture": {"policy": "weighted", "children": [{"source": "txt:edited.txt:text"}]},
    }  # fmt: skip
    path = folder / "mixture.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def stats_of(server: ServerProcess) -> dict[str, object]:
    return server.get("/v1/runs/edited/stats")


def test_a_file_that_was_edited_within_ends_the_ranks_by_its_name(tmp_path: Path, start_server: StartServer) -> None:
    path = write(tmp_path)
    server = start_server(mixture(tmp_path))
    with World(server.url("edited"), 2, 2) as world:
        world.steps(3)
        state = world.state()
    server.terminate()
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    server.start()
    with World(server.url("edited"), 2, 2, state=state) as world:
        with pytest.raises(TokenloomError, match=r"'edited\.txt' was changed within.*put the file back as it was"):
            for _ in range(2000):
                world.step()
        error = stats_of(server)["error"]
        assert isinstance(error, str)
        assert error.startswith("SourceChanged: source 'txt:edited.txt:text': 'edited.txt' was changed within")
    write(tmp_path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with World(server.url("edited"), 2, 2, state=state) as world:
        world.steps(20)
        assert (stats_of(server)["error"], stats_of(server)["warning"]) == (None, "")


def test_a_file_that_was_only_touched_is_a_warning_in_log_stats_and_page(
    tmp_path: Path, start_server: StartServer, tokenloom: CommandLine
) -> None:
    path = write(tmp_path)
    server = start_server(mixture(tmp_path))
    with World(server.url("edited"), 1, 2) as world:
        world.steps(3)
        state = world.state()
        assert stats_of(server)["warning"] == ""
    server.terminate()
    os.utime(path, ns=(10**18, 10**18))
    server.start()
    with World(server.url("edited"), 1, 2, state=state) as world:
        world.steps(3)
        warning = "'edited.txt' was written or copied since the run began"
        wait_for(lambda: warning in str(stats_of(server)["warning"]), "the warning in stats")
        assert warning in server.log
        assert warning in tokenloom("stats", server.rest_url).output.replace("\n", " ")
