"""The jobs that prepare on a cluster: what one asks of KubeRay is checked, and what they run is run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import psutil
import yaml
from support.ports import free_port
from support.prepared import job_of, nothing, shards_of, write_texts
from support.ray_cluster import ray_folder
from tokenloom_tools.prepare.preparer import prepare

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "ray"
SCRIPT, JOB = FOLDER / "prepare.sbatch", FOLDER / "rayjob.yaml"
#: srun: the command once for each task, as SLURM's ends them all when it is ended. scontrol: the nodes.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
trap 'kill $(jobs -p); wait; exit 143' TERM
for task in 0 1; do SLURM_PROCID=$task "$@" & done
wait
"""
SCONTROL = """#!/bin/bash
echo 127.0.0.1; echo a-second-node
"""


def entrypoint() -> list[str]:
    return shlex.split(yaml.safe_load(JOB.read_text())["spec"]["entrypoint"])


def test_the_job_for_kuberay_has_pods_that_kubernetes_takes() -> None:
    document = yaml.safe_load(JOB.read_text())
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayJob")
    spec = document["spec"]
    # KubeRay's own fields, as release 1.2 has them (ray-operator/apis/ray/v1).
    known = {
        "entrypoint",
        "submissionMode",
        "backoffLimit",
        "shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished",
    }
    assert spec.keys() == known | {"rayClusterSpec"}
    cluster = spec["rayClusterSpec"]
    assert cluster.keys() == {"headGroupSpec", "workerGroupSpecs"}
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers.keys() == {"groupName", "replicas", "rayStartParams", "template"}
    for group in (cluster["headGroupSpec"], workers):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        kubernetes_validate.validate(pod, "1.31", strict=True)
        (container,) = group["template"]["spec"]["containers"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {str(Path(entrypoint()[2]).parent)}, (
            "the mixture file is where the command looks for it"
        )


def test_the_script_starts_a_cluster_runs_kuberays_command_on_it_and_ends_it(
    tmp_path: Path,
) -> None:
    document = write_texts(tmp_path, files=2)
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(document))
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    command = entrypoint()
    assert command[:2] == ["tokenloom", "prepare"]
    assert command[3:5] == ["--out", "s3://corpora/prepared"]
    at = command.index("--ray")
    assert command[at : at + 2] == ["--ray", "auto"], "which the script says itself"
    arguments = [
        "mixture.yaml",
        "--out",
        "out",
        *command[5:at],
        *command[at + 2 :],
        "--shard-mb",
        "1",
    ]
    with ray_folder() as folder:
        environment = {
            **os.environ,
            "PATH": os.pathsep.join(
                [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "SLURM_JOB_ID": str((free_port() - 20000) // 2 % 10000),
            "SLURM_JOB_NODELIST": "node-[1-2]",
            "SLURM_CPUS_PER_TASK": "1",
            "RAY_FOLDER": str(folder / "ray"),
        }
        done = subprocess.run(
            ["bash", SCRIPT, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "in 5 shards" in done.stdout
        assert not [
            each
            for each in psutil.process_iter(["cmdline"])
            if str(folder) in str(each.info["cmdline"])
        ]
    prepare(job_of(tmp_path, document), tmp_path / "whole", on_done=nothing, on_kept=nothing)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "whole")
