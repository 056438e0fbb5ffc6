"""The systemd unit: systemd reads it, it gives the server little, and what it starts serves."""

from __future__ import annotations

import configparser
import json
import shlex
import shutil
import subprocess
from pathlib import Path

import httpx
from support.ports import free_port
from support.server_process import MAIN, server_forks
from support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "systemd" / "tokenloom.service"
STATE = "/var/lib/tokenloom"


def read() -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None, comment_prefixes="#", strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text(encoding="utf-8"))
    return unit


def test_systemd_knows_every_setting_and_finds_little_that_the_service_may_do(
    tmp_path: Path,
) -> None:
    service = read()["Service"]
    assert service["Restart"] == "on-failure"
    for name in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "PrivateDevices"):
        assert service[name] == "yes"
    assert (service["ProtectSystem"], service["CapabilityBoundingSet"]) == ("strict", "")
    if (analyze := shutil.which("systemd-analyze")) is None:
        return
    copy = tmp_path / UNIT.name  # with a program that is there
    copy.write_text(
        UNIT.read_text(encoding="utf-8").replace("/opt/tokenloom/bin/tokenloom", "/bin/true"),
        "utf-8",
    )
    for arguments in (["verify"], ["security", "--offline=yes", "--threshold=20"]):
        done = subprocess.run(
            [analyze, *arguments, copy], capture_output=True, text=True, timeout=240
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def test_what_it_starts_is_ready_and_keeps_its_ledger_where_it_may_write(tmp_path: Path) -> None:
    service, port = read()["Service"], free_port()
    assert service["StateDirectory"] == Path(STATE).name
    shutil.copytree(ROOT / "examples" / "compose", tmp_path / "etc")

    def here(text: str) -> str:
        for there, path in (
            ("/etc/tokenloom", f"{tmp_path}/etc"),
            (STATE, str(tmp_path)),
            ("8081", str(port)),
        ):
            text = text.replace(there, path)
        return text

    name, _, ledger = here(service["Environment"]).partition("=")
    _, *arguments = map(here, shlex.split(service["ExecStart"]))
    process = server_forks().fork(
        MAIN,
        [
            *arguments,
            "--grpc=127.0.0.1:0",
            "--rest=127.0.0.1:0",
            f"--ready-file={tmp_path / 'ready.json'}",
        ],
        output=tmp_path / "log",
        folder=tmp_path,
        environment={name: ledger},
    )
    try:
        wait_for((tmp_path / "ready.json").exists, "a ready server")
        assert json.loads((tmp_path / "ready.json").read_text(encoding="utf-8"))["runs"] == [
            "sample"
        ]
        assert httpx.get(
            f"http://127.0.0.1:{port}/readyz", trust_env=False, timeout=120
        ).json() == {"status": "ready"}
        assert (tmp_path / "tokenloom.db").exists()
    finally:
        process.kill()
