"""Dockerfile and docker-compose.yml: what they say is checked, and what they run is run, without a container."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.ports import free_port
from support.redis_server import RedisServer, compose_version
from support.server_process import CommandLine, server_forks
from support.waiting import wait_for
from tokenloom import ConnectionOptions, LaunchOptions, RemoteDataset
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_tools.cli.options import DATA_ROOTS, MixtureOptions

ROOT = Path(__file__).resolve().parents[2]
STARTS_WITHIN_S = 60.0
#: Where both containers have Redis's socket.
SOCKETS = "/run/redis"

Service = dict[str, Any]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return _read_compose({})


@pytest.fixture(scope="module")
def server(compose: dict[str, Any]) -> Service:
    service: Service = compose["services"]["server"]
    return service


@pytest.fixture(scope="module")
def ledger(compose: dict[str, Any]) -> Service:
    service: Service = compose["services"]["redis"]
    return service


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, in order."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if line and not line.startswith("#")).replace(
        "\\\n", ""
    )
    parts = [line.strip().partition(" ") for line in text.splitlines()]
    return [(name, arguments.strip()) for name, _, arguments in parts]


def _read_compose(environment: dict[str, str]) -> dict[str, Any]:
    """The file with ``${NAME:-default}`` replaced, as Compose does it."""
    lines = (ROOT / "docker-compose.yml").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))

    text = re.sub(
        r"\$\{(\w+):-([^}]*)\}", lambda match: environment.get(match[1]) or match[2], text
    )
    assert "$" not in text
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def _binds(service: Service) -> dict[str, dict[str, Any]]:
    """Bind mounts by their place in the container."""
    return {volume["target"]: volume for volume in service["volumes"] if isinstance(volume, dict)}


def _copy(source: Path, target: Path) -> None:
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)


def _last(instructions: list[tuple[str, str]], name: str) -> str:
    return [arguments for instruction, arguments in instructions if instruction == name][-1]


# --- What the files say ------------------------------------------------------------------------------------------


def test_the_server_gets_the_tokens_and_nobody_else(
    compose: dict[str, Any], server: Service
) -> None:
    # A name without a value is passed on where it is set.
    assert (
        server["environment"].items()
        >= {"TOKENLOOM_TOKEN": None, "TOKENLOOM_READ_TOKEN": None}.items()
    )
    assert not any(
        server["environment"][name]
        for name in server["environment"]
        if name.startswith(("HF_", "AWS_"))
    )
    assert "environment" not in compose["services"]["redis"]
    # Where none is set, one is made and kept in the volume.
    assert "--make-token" in server["command"]
    assert "index:/config/.tokenloom-index" in server["volumes"]


def test_ports_are_published_on_loopback_only_since_there_is_no_tls(
    compose: dict[str, Any],
) -> None:
    ports = {name: service.get("ports", []) for name, service in compose["services"].items()}

    assert ports == {"server": ["127.0.0.1:50051:50051", "127.0.0.1:8080:8080"], "redis": []}


def test_redis_has_a_socket_for_the_servers_group_and_no_network(
    compose: dict[str, Any], server: Service, ledger: Service
) -> None:
    assert ledger["network_mode"] == "none"
    assert not any("networks" in service or "expose" in service for service in (server, ledger))
    assert ("--port", "0") in pairwise(ledger["command"])
    assert ("--unixsocketperm", "770") in pairwise(ledger["command"])
    # The volume is Redis's user's and the server's group's, and lets nobody else in.
    user, group = ledger["user"].split(":")
    assert group == server["user"].split(":")[1]
    options = f"uid={user},gid={group},mode=0750,size=1m"
    assert compose["volumes"]["socket"]["driver_opts"] == {
        "type": "tmpfs",
        "device": "tmpfs",
        "o": options,
    }
    assert "socket:/run/redis" in server["volumes"]


def test_both_services_run_with_as_little_as_they_need(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["user"] not in ("", "root", "0", "0:0")
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] == "unless-stopped"
        assert "stop_grace_period" in service
        assert {"max-size", "max-file"} <= service["logging"]["options"].keys(), (
            "a disk is not filled with logs"
        )
        assert not {"privileged", "cap_add", "devices", "pid", "ipc"} & set(service)


def test_the_ledger_is_kept_in_a_named_volume_and_its_image_has_a_full_version(
    compose: dict[str, Any], ledger: Service
) -> None:
    assert re.fullmatch(
        rf"redis:{re.escape(compose_version())}\.\d+(@sha256:[0-9a-f]{{64}})?", ledger["image"]
    )
    for folder in ("deploy", "examples"):
        for path in (ROOT / folder).rglob("*.yaml"):
            assert {*re.findall(r"image: (redis:\S+)", path.read_text(encoding="utf-8"))} <= {
                ledger["image"]
            }, path
    assert "ledger:/data" in ledger["volumes"]
    assert "ledger" in compose["volumes"]


def test_mixture_and_data_are_mounted_read_only_and_never_made_up(server: Service) -> None:
    binds = _binds(server)

    assert set(binds) == {"/config/mixture.yaml", "/config/data"}
    for bind in binds.values():
        assert bind["read_only"] is True
        assert bind["bind"] == {"create_host_path": False}


@pytest.mark.parametrize("urls", [[], ["s3://b/c", "hf://datasets/org"]], ids=len)
def test_nothing_is_read_outside_of_the_mounted_folder_and_the_urls_that_are_allowed(
    urls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = _read_compose({"TOKENLOOM_URL_ROOTS": ":".join(urls)})["services"]["server"][
        "environment"
    ]
    monkeypatch.setenv(DATA_ROOTS, environment[DATA_ROOTS].replace("/config/data", str(tmp_path)))

    assert MixtureOptions().roots() == DataRoots.of([str(tmp_path), *urls])


def test_mixture_and_data_follow_the_environment() -> None:
    environment = {
        "TOKENLOOM_MIXTURE": "/a/my.yaml",
        "TOKENLOOM_DATA": "/b",
        "TOKENLOOM_GRPC_PORT": "1",
    }

    changed = _read_compose(environment)["services"]["server"]

    assert {target: bind["source"] for target, bind in _binds(changed).items()} == {
        "/config/mixture.yaml": "/a/my.yaml",
        "/config/data": "/b",
    }
    # Under the same number inside, since the server tells its own.
    assert changed["ports"][0] == "127.0.0.1:1:1" and "--grpc=0.0.0.0:1" in changed["command"]


def test_the_image_is_small_and_runs_without_root(
    instructions: list[tuple[str, str]], server: Service
) -> None:
    (base,) = {arguments.split()[0] for name, arguments in instructions if name == "FROM"}
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", base)
    assert _last(instructions, "USER") == server["user"] == "10001:10001"
    assert json.loads(_last(instructions, "ENTRYPOINT")) == ["tokenloom"]
    assert _last(instructions, "STOPSIGNAL") == "SIGTERM"
    assert "PYTHONUNBUFFERED=1" in _last(instructions, "ENV")
    assert "org.opencontainers.image.licenses" in _last(instructions, "LABEL")


def test_the_image_is_built_from_files_that_exist_and_that_docker_is_shown(
    instructions: list[tuple[str, str]],
) -> None:
    shown = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]

    copied = [
        a.split()[:-1] for name, a in instructions if name == "COPY" and not a.startswith("--from")
    ]
    sources = {source for sources in copied for source in sources}

    assert sources == set(shown)
    assert all((ROOT / source).exists() for source in sources)


def test_the_package_builds_from_what_the_image_copies(
    instructions: list[tuple[str, str]], tmp_path: Path
) -> None:
    for sources in [
        a.split() for name, a in instructions if name == "COPY" and not a.startswith("--from")
    ]:
        for source in sources[:-1]:
            target = tmp_path / source
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy(ROOT / source, target)

    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "built"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=240)

    assert len(list((tmp_path / "built").iterdir())) == 1


# --- The ledger's command ----------------------------------------------------------------------------------------


@pytest.fixture
def compose_redis(ledger: Service, tmp_path: Path) -> Iterator[RedisServer]:
    """Redis, started by the Compose file's command; only its place differs."""
    program, *arguments = ledger["command"]
    assert program == "redis-server"
    server = RedisServer(
        tmp_path, [argument.replace(SOCKETS, str(tmp_path)) for argument in arguments]
    ).start()
    yield server
    server.kill()


def test_redis_takes_the_command_and_keeps_what_it_acknowledged_when_it_is_killed(
    compose_redis: RedisServer,
) -> None:
    with compose_redis.client() as client:
        # What is tested here, and by all other tests, is of the version that Compose starts.
        assert client.info("server")["redis_version"].startswith(f"{compose_version()}.")
        # One at a time: a Redis before 7 takes no more.
        found = {}
        for setting in ("appendonly", "appendfsync", "maxmemory-policy", "save"):
            found |= client.config_get(setting)

        client.set("committed", 41)
    assert found == {
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory-policy": "noeviction",
        "save": "",
    }
    compose_redis.kill()
    with compose_redis.start().client() as client:
        assert client.get("committed") == "41"


def test_the_ledgers_health_check_tells_a_living_redis_from_a_dead_one(
    compose_redis: RedisServer, ledger: Service, tmp_path: Path
) -> None:
    kind, command = ledger["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    real = shutil.which("redis-cli") or str(Path(sys.executable).parent / "redis-cli")
    environment = os.environ | {"PATH": f"{Path(real).parent}{os.pathsep}{os.environ['PATH']}"}

    def healthy() -> bool:
        asked = command.replace(SOCKETS, str(tmp_path))
        return (
            subprocess.run(
                ["/bin/sh", "-c", asked], env=environment, capture_output=True, timeout=120
            ).returncode
            == 0
        )

    assert healthy()
    compose_redis.kill()
    assert not healthy()


# --- The server's command, and its health check -----------------------------------------------------------------


def _health_check(
    instructions: list[tuple[str, str]], port: int, config: Path, **environment: str
) -> str:
    """What the image's health check, asked on another port, logs; empty where all is well."""
    program, option, code = json.loads(_last(instructions, "HEALTHCHECK").partition("CMD ")[2])
    assert program == "python"
    assert ":8081'" in code and "'/config/" in code
    command = [
        sys.executable,
        option,
        code.replace(":8081'", f":{port}'").replace("'/config/", f"'{config}/"),
    ]
    checked = subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (checked.returncode != 0) == bool(checked.stderr) and checked.stderr.count("\n") <= 1, (
        checked.stderr
    )
    return checked.stderr


def _place(argument: str, config: Path, sockets: Path, health_port: int) -> str:
    """An argument of the server's command, moved from the containers to this machine."""
    moved = argument.replace("/config/", f"{config}/").replace(SOCKETS, str(sockets))
    return re.sub(
        r"0\.0\.0\.0:\d+$",
        "127.0.0.1:0",
        moved.replace("=127.0.0.1:8081", f"=127.0.0.1:{health_port}"),
    )


def test_the_servers_command_serves_the_sample_says_whether_it_is_ready_and_ends_on_sigterm(
    compose_redis: RedisServer, server: Service, instructions: list[tuple[str, str]], tmp_path: Path
) -> None:
    config, ready = tmp_path / "config", tmp_path / "ready.json"
    config.mkdir()
    for target, bind in _binds(server).items():
        _copy(ROOT / bind["source"], config / Path(target).name)
    (command,) = entry_points(
        group="console_scripts", name=json.loads(_last(instructions, "ENTRYPOINT"))[0]
    )
    port = free_port()
    arguments = [_place(argument, config, tmp_path, port) for argument in server["command"]]
    log = tmp_path / "server.log"

    process = server_forks().fork(
        command.value, [*arguments, f"--ready-file={ready}"], output=log, folder=config
    )
    with compose_redis.client() as client:
        try:
            deadline = time.monotonic() + STARTS_WITHIN_S
            while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            assert ready.exists(), log.read_text(encoding="utf-8")
            addresses = json.loads(ready.read_text(encoding="utf-8"))
            # As docker compose exec runs it.
            shown = CommandLine(tmp_path)("token", folder=config)
            token = shown.output.strip()
            assert (shown.status, len(token)) == (0, 64)
            assert (config / ".tokenloom-index" / "token").stat().st_mode & 0o777 == 0o600
            wait_for(
                lambda: (
                    f'RemoteDataset("grpc://{addresses["grpc"]}/sample"' in log.read_text("utf-8")
                ),
                "the log",
            )
            for line in (
                f"http://{addresses['rest']}/#token={token}\n",
                f"export TOKENLOOM_TOKEN={token}\n",
            ):
                assert log.read_text(encoding="utf-8").count(line) == 1
            nobody = f"http://127.0.0.1:{free_port()}"
            # A proxy of the environment is not asked.
            assert (
                _health_check(
                    instructions, port, config, http_proxy=nobody, HTTP_PROXY=nobody, no_proxy=""
                )
                == ""
            )
            # As docker compose exec runs it, too: the token that lies there is found.
            stats = CommandLine(tmp_path)("stats", addresses["rest"], folder=config)
            assert stats.status == 0 and "sample" in stats.output, stats.output

            dataset = RemoteDataset(
                f"grpc://{addresses['grpc']}/sample",
                batch_size=4,
                rank=0,
                world_size=1,
                launch=LaunchOptions(attempt="compose"),
                connection=ConnectionOptions(token=token),
            )
            with contextlib.closing(dataset):
                batch = next(iter(dataset))
            assert batch["input_ids"].shape == (4, 128)
            assert sorted(set(batch["source_ids"].tolist())) == [0, 1]
            assert client.dbsize() > 0

            compose_redis.kill()
            deadline = time.monotonic() + 2 * STARTS_WITHIN_S
            while not (said := _health_check(instructions, port, config)):
                assert time.monotonic() < deadline, "it is not ready without its ledger"
            assert "run sample: " in said
            compose_redis.start()
            while _health_check(instructions, port, config):
                assert time.monotonic() < deadline, "it is ready with its ledger again"
            process.send_signal(signal.SIGTERM)
            grace_s = int(server["stop_grace_period"].removesuffix("s"))
            assert process.wait(timeout=grace_s) == 0
            assert "Connection refused" in _health_check(instructions, port, config)
        finally:
            process.kill()
