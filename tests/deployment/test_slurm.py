"""The sbatch scripts: what they ask of SLURM is checked, and a training is run, with two tasks in SLURM's place."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
#: Importing torch twice, on two busy cores.
STEPS_DEADLINE_S = 200.0

#: srun: the command once for each task, with the variables that SLURM sets. scontrol: the nodes,
#: and a note of requeues.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
status=0
for ((task = 0; task < SLURM_NTASKS; task++)); do wait -n || status=1; done
exit $status
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) echo 127.0.0.1; echo a-second-node;;
    requeue) echo "$2" >> "$REQUEUED";;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": os.pathsep.join(
            [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "REQUEUED": str(tmp_path / "requeued"),
        "SLURM_JOB_ID": str(os.getpid()),  # the ports of two tests at a time follow from it
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize(
    ("path", "usage", "special"),
    [
        ("examples/slurm/train.sbatch", "MIXTURE.yaml CHECKPOINT", {"gpus-per-node", "signal"}),
        ("deploy/ray/prepare.sbatch", "MIXTURE.yaml --out DIR|URL", set()),
    ],
)
def test_a_script_asks_for_what_slurm_knows_and_says_how_it_is_used(
    path: str, usage: str, special: set[str]
) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")

    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(asked) == text.count("\n#SBATCH"), "a line that SLURM would not read"
    # SLURM reads no line after the first command.
    assert text.rindex("\n#SBATCH") < text.index("\nset -")
    known = {
        "job-name",
        "nodes",
        "ntasks-per-node",
        "cpus-per-task",
        "time",
        "requeue",
        "open-mode",
        "output",
    }
    assert asked.keys() == known | special
    assert asked["open-mode"] == "append", "the log of before a requeue would be lost"
    assert re.fullmatch(r"B:USR1@\d+|", asked.get("signal", ""))
    assert re.fullmatch(r"\d+:\d\d:\d\d", asked["time"])
    done = subprocess.run(["bash", ROOT / path], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"usage: {Path(path).name} {usage}" in done.stderr


@pytest.mark.timeout(600)
def test_a_job_that_is_out_of_time_is_queued_again_and_goes_on(
    environment: dict[str, str], tmp_path: Path
) -> None:
    mixture = tmp_path / "sample" / "mixture.yaml"
    shutil.copytree(ROOT / "examples" / "compose", mixture.parent)
    record, log = tmp_path / "record.jsonl", tmp_path / "log"

    def start(tasks: int, samples: int) -> subprocess.Popen[bytes]:
        command = [
            "bash",
            SCRIPT,
            mixture,
            tmp_path / "checkpoint",
            "--record",
            record,
            "--samples",
            samples,
        ]
        command += ["--batch-size", 8 // tasks]
        with log.open("ab") as output:
            return subprocess.Popen(
                list(map(str, command)),
                cwd=ROOT,
                env=environment | {"SLURM_NTASKS": str(tasks)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def indices() -> list[int]:
        lines = record.read_text(encoding="utf-8").split("\n")[:-1] if record.exists() else []
        return [json.loads(line)["sample_index"] for line in lines]

    job = start(2, 10**6)
    try:
        deadline = time.monotonic() + STEPS_DEADLINE_S
        while len(indices()) < 12:
            assert job.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        requeued = Path(environment["REQUEUED"])
        while not requeued.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert requeued.read_text(encoding="utf-8").split() == [environment["SLURM_JOB_ID"]]
        assert job.poll() is None, "SLURM ends a job that is queued again, and until then it trains"
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()

    before = indices()
    again = start(1, before[-1] + 40)
    try:
        assert again.wait(STEPS_DEADLINE_S) == 0, log.read_text(encoding="utf-8")
    finally:
        if again.poll() is None:
            os.killpg(again.pid, signal.SIGKILL)
            again.wait()
    after = indices()[len(before) :]
    assert before == list(range(8, before[-1] + 8, 8))
    assert 8 < after[0] <= before[-1] + 8, "it goes on at a checkpoint"
    assert after == list(range(after[0], before[-1] + 48, 8))
