"""``make compose-test``: the image and docker-compose.yml in a real engine, every command of docs/compose.md, and a job
of two ranks that goes on through whatever fails; at the end every sample is recounted.

Bases that cannot be pulled are built as stand-ins (.ci/bases), and the first lines say so. ``--short`` has the sample
and one fault of each kind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import trustme
from chaos.checker import check
from chaos.corpus import write_corpus, write_mixture
from chaos.world import reference
from support.ports import free_port
from support.s3_server import BUCKET, s3_server
from support.waiting import wait_for
from tokenloom import ConnectionOptions, NumpyDataset

from compose.job import LIVENESS_S, RUN, Job
from compose.project import ROOT, ComposeFailed, Project, run

#: Of the first 200 samples of examples/compose, as in .ci/installs.py.
DIGEST = "368423d72acedcf6823aba172c98770f"
#: A server that could not reach the ledger, or was paused, for so long may be replaced: the lease, and what it takes.
BEYOND_LEASE_S = 20.0
#: What the image without the Hub and object stores may be, MB.
SLIM_MB = 450
#: What the server's user may call in the image beside the system's programs.
COMMANDS = {"__pycache__", "python", "python3", "python3.11", "tokenloom"}
UP = ("up", "--detach", "--wait", "--wait-timeout", int(LIVENESS_S))


class Story:
    """One project and one job. Each step's first line is what the progress says of it."""

    def __init__(self, folder: Path, project: Project) -> None:
        self.folder, self.project = folder, project
        self.corpus = write_corpus(folder / "corpus")
        self.mixture = write_mixture(self.corpus / "mixture.yaml", RUN, seed=30)
        self.job = Job(project, folder / "job")

    @property
    def token(self) -> str:
        return self.project.environment["TOKENLOOM_TOKEN"]

    def _address(self) -> str:
        return f"grpc://127.0.0.1:{self.project.grpc_port}"

    def _launch(self) -> None:
        self.job.launch(self._address(), {"TOKENLOOM_TOKEN": self.token})
        self.job.recover()

    def _ready(self) -> None:
        wait_for(lambda: self.project.ask("/readyz", None)[0] == 200, "a ready server", LIVENESS_S)

    # The image, and the sample

    def starts(self) -> str:
        """up --wait builds the image and serves the sample, to a known digest; without the token nobody is let in"""
        self.project.page("Start")
        assert self.project.ask("/v1/runs", None)[0] == 401
        with NumpyDataset(
            f"{self._address()}/sample", 4, rank=0, world_size=1, connection=ConnectionOptions(token=self.token)
        ) as dataset:
            count = len(list(islice(dataset, 50)))
            assert (count, dataset.digest) == (50, DIGEST), (count, dataset.digest)
        return dataset.digest

    def image(self) -> str:
        """the image has neither pip nor other packages' commands and tests; the slim one is small"""
        slim = f"{self.project.image}-slim"
        build = ["docker", "build", "--quiet", "--build-arg", "PACKAGES=image-slim", "--tag", slim, self.project.folder]
        run(*build, environment=self.project.environment)
        code = (
            "import json, os, pathlib as p; print(json.dumps("
            "[n for b in ('/opt/tokenloom/bin', '/usr/local/bin') for n in os.listdir(b)] + "
            "[str(f) for r in ('/opt', '/usr/local') for n in ('pip', 'setuptools', 'tests') "
            "for f in p.Path(r).rglob(n)]))"
        )
        foreign = {*json.loads(self.project.python(code))} - COMMANDS
        assert not foreign, foreign
        base = run("sed", "-n", "s/^FROM \\([^ ]*\\)$/\\1/p", self.project.folder / "Dockerfile").strip()
        sizes = {
            name: int(run("docker", "image", "inspect", "--format", "{{.Size}}", name)) / 1e6
            for name in (self.project.image, slim, base)
        }
        assert sizes[slim] <= SLIM_MB, sizes
        return ", ".join(f"{name} {size:.0f} MB" for name, size in sizes.items())

    def ledger_is_closed(self) -> str:
        """Redis has no network, and another user of the machine may not use its socket"""
        networks = self.project.container("redis")["NetworkSettings"]["Networks"]
        assert [*networks] == ["none"], networks
        ask = "import socket; socket.socket(socket.AF_UNIX).connect('/run/redis/redis.sock')"
        volume = f"--volume={self.project.name}_socket:/run/redis"
        self.project.python(ask, volume, user="10001:10001")
        try:
            self.project.python(ask, volume, user="4711:4711")
        except ComposeFailed as error:
            assert "PermissionError" in str(error), error
            return "PermissionError"
        raise ComposeFailed("user id 4711 reached Redis")

    def mixture_changes(self) -> None:
        """the mixture is changed while it is served, and by its file with a reason"""
        self.project.page("Change the mixture")
        path = self.project.folder / "examples/compose/mixture.yaml"
        path.write_text(
            path.read_text("utf-8").replace("alias: fables", "max_tokens: 400000000\n      alias: fables"), "utf-8"
        )
        said = self.project.page("Change the mixture", 1)
        revisions = self.project.shell("tokenloom mixture show http://127.0.0.1:8080")
        assert "fewer fables" in revisions, f"{said}\n{revisions}"
        self.project.environment.pop("TOKENLOOM_SERVE_REVISE", None)

    def backup(self) -> str:
        """the ledger is backed up, checked and restored"""
        said = self.project.page("Backup")
        self.project.page("Backup", 1)
        return said.strip().splitlines()[-1]

    def upgrade(self) -> str:
        """up after a change of the source serves the new one, and Redis stays as it is"""
        before = [self.project.container(service) for service in ("server", "redis")]
        with (self.project.folder / "server/tokenloom_server/__init__.py").open("a", encoding="utf-8") as module:
            module.write("\n#: Of another release.\nANOTHER = True\n")
        self.project.page("Upgrade")
        after = [self.project.container(service) for service in ("server", "redis")]
        assert after[0]["Image"] != before[0]["Image"]
        assert after[1]["Id"] == before[1]["Id"]
        self.project.compose("exec", "-T", "server", "python", "-c", "from tokenloom_server import ANOTHER")
        return after[0]["Image"][:19]

    def cache(self) -> str:
        """text in an object store is served from the cache"""
        network = f"{self.project.name}_default"
        gateway = run("docker", "network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", network).strip()
        sample = ROOT / "examples/compose"
        text = (sample / "mixture.yaml").read_text("utf-8").replace(":data/", f":s3://{BUCKET}/corpora/data/")
        (self.folder / "remote.yaml").write_text(text.replace("run: sample", "run: remote"), encoding="utf-8")
        before = dict(self.project.environment)
        with s3_server(gateway) as store:
            for path in (sample / "data").iterdir():
                store.put_object(f"corpora/data/{path.name}", path.read_bytes())
            self.project.instead["s3://bucket"] = f"s3://{BUCKET}"
            self.project.environment |= store.environment | {"TOKENLOOM_MIXTURE": str(self.folder / "remote.yaml")}
            self.project.page("A cache of remote objects")
            with NumpyDataset(
                f"{self._address()}/remote", 4, rank=0, world_size=1, connection=ConnectionOptions(token=self.token)
            ) as dataset:
                assert len(list(islice(dataset, 50))) == 50
            kept = self.project.compose("exec", "-T", "server", "find", "/config/.tokenloom-index/cache", "-type", "f")
        self.project.environment = before
        assert kept.strip(), "the cache is empty"
        return f"{len(kept.splitlines())} files in the cache"

    # The job

    def wrong_rights(self) -> str:
        """data that the server's user may not enter are said by one line; with the page's chmod it comes up"""
        self.project.instead |= {"/path/mixture.yaml": str(self.mixture), "/path/data": str(self.corpus / "data")}
        (self.corpus / "data").chmod(0o700)
        settings = {"TOKENLOOM_MIXTURE": str(self.mixture), "TOKENLOOM_DATA": str(self.corpus / "data")}
        self.project.environment |= settings
        try:
            self.project.compose("up", "--detach", "--wait", "--wait-timeout", 60)
        except ComposeFailed:
            log = self.project.compose("logs", "--no-log-prefix", "--tail", "20", "server")
        else:
            raise ComposeFailed("it came up with data that it may not read")
        assert "/config/data" in log, log
        assert "Traceback" not in log, log
        self.project.page("Your own data")
        self._launch()
        return log.strip().splitlines()[-1][:300]

    def own_data(self) -> None:
        """own data are served to a job of two ranks"""
        self.project.instead |= {"/path/mixture.yaml": str(self.mixture), "/path/data": str(self.corpus / "data")}
        self.project.page("Your own data")
        self._launch()

    def restart_server(self) -> None:
        """restart of the server"""
        self.project.compose("restart", "server")

    def kill_server(self) -> None:
        """kill -9 of the server"""
        self.project.kill("server")

    def restart_redis(self) -> None:
        """restart of Redis"""
        self.project.compose("restart", "redis")

    def kill_redis(self) -> None:
        """kill -9 of Redis"""
        self.project.kill("redis")

    def pause_server(self) -> None:
        """the server is paused beyond its lease"""
        self._paused("server")

    def pause_redis(self) -> None:
        """Redis is paused beyond the lease"""
        self._paused("redis")

    def _paused(self, service: str) -> None:
        self.project.compose("pause", service)
        time.sleep(BEYOND_LEASE_S)
        self.project.compose("unpause", service)

    def cut_network(self) -> None:
        """the network between trainers and server is cut"""
        container, network = self.project.container("server")["Id"], f"{self.project.name}_default"
        run("docker", "network", "disconnect", network, container)
        time.sleep(BEYOND_LEASE_S / 4)
        run("docker", "network", "connect", "--alias", "server", network, container)

    def kill_trainers(self) -> None:
        """kill -9 of both trainers, which go on from their checkpoint"""
        self.job.kill()
        self._launch()

    def down_and_up(self) -> None:
        """down and up"""
        self.project.compose("down")
        self.project.compose(*UP)

    def standby(self) -> str:
        """two trainers in containers on a network of their own; a standby takes over from a killed server, and back"""
        self.job.kill()
        ports = [free_port(), free_port()]
        names = ("TOKENLOOM_STANDBY_GRPC_PORT", "TOKENLOOM_STANDBY_REST_PORT")
        self.project.environment |= dict(zip(names, map(str, ports), strict=True))
        self.project.instead["127.0.0.1:8082"] = f"127.0.0.1:{ports[1]}"
        self.project.page("A standby")
        settings = {"TOKENLOOM_TOKEN": self.token, "TOKENLOOM_PLAINTEXT_HOSTS": "server,standby"}
        self.job.launch("grpc://server:50051,standby:50051", settings, f"{self.project.name}_trainers")
        self.job.recover()
        took = []
        for first, second in (("server", "standby"), ("standby", "server")):
            began = time.monotonic()
            self.project.compose("kill", first)
            self.job.recover()
            took.append(f"{second} went on after {time.monotonic() - began:.0f} s")
            assert "leads at server epoch" in self.project.compose("logs", second)
            self.project.compose(*UP)
        self.job.kill()
        return ", ".join(took)

    def elsewhere(self) -> str:
        """trainers that reach this machine by its own address, with TLS"""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            host = str(probe.getsockname()[0])
        ca, tls = trustme.CA(), self.folder / "tls"
        tls.mkdir()
        issued = ca.issue_cert(host)
        issued.cert_chain_pems[0].write_to_path(tls / "cert.pem")
        issued.private_key_pem.write_to_path(tls / "key.pem")
        ca.cert_pem.write_to_path(self.folder / "ca.pem")
        self.project.instead["/path/tls"] = str(tls)
        self.project.page("Trainers on other machines")
        self.project.compose("up", "--detach", "--wait", "--remove-orphans")
        settings = {"TOKENLOOM_TOKEN": self.token, "TOKENLOOM_TLS_CA": str(self.folder / "ca.pem")}
        self.job.launch(f"grpcs://{host}:{self.project.grpc_port}", settings)
        self.job.recover()
        return host

    def recount(self) -> str:
        """the job ends in order; the ledger is checked, and every sample recounted"""
        index = self.job.finish()
        said = self.project.compose(
            *("run", "--rm", "--no-deps", "server", "ledger", "check", "unix:///run/redis/redis.sock")
        )
        for name in ("TOKENLOOM_TOKEN", "TOKENLOOM_TLS_CA"):
            os.environ.pop(name, None)
        reference(self.folder / "job", self.mixture, max(launch.reach() for launch in self.job.launches))
        found = check(self.folder / "job", None)
        found.raise_if_wrong()
        (committed,) = re.findall(rf"{RUN}\b.*?sample ([\d,]+)", said)
        assert int(committed.replace(",", "")) == index, f"{said}: expected sample {index}"
        counts = f"{found.attempts} launches, {found.delivered} samples delivered, {found.distinct} distinct"
        return f"{counts}, all recounted; the ledger is at sample {index}"


SAMPLE = (
    Story.starts,
    Story.image,
    Story.ledger_is_closed,
    Story.mixture_changes,
    Story.backup,
    Story.upgrade,
    Story.cache,
)
#: After each of them training goes on.
FAULTS = (
    *(Story.restart_server, Story.kill_server, Story.restart_redis, Story.kill_redis, Story.kill_trainers),
    *(Story.pause_server, Story.pause_redis, Story.cut_network, Story.down_and_up),
)
LONG = (*SAMPLE, Story.wrong_rights, *FAULTS, Story.standby, Story.elsewhere, Story.recount)
SHORT = (
    *(Story.starts, Story.ledger_is_closed, Story.own_data, Story.kill_server, Story.kill_redis, Story.down_and_up),
    Story.recount,
)


def main() -> int:
    options = argparse.ArgumentParser(prog="make compose-test", description=__doc__)
    options.add_argument("--short", action="store_true", help="a sixth of the steps, for every change")
    chosen = options.parse_args()
    if shutil.which("docker") is None:
        sys.exit("docker is not on the PATH: install an engine and Compose 2.24 or newer")
    began = time.monotonic()
    bases = run(ROOT / ".ci/bases", folder=ROOT)
    print(bases, end="", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="tokenloom-compose-"))
    name = f"tokenloom-test-{secrets.token_hex(3)}"
    project = Project(folder, name, stand_ins="stand-in" in bases)
    story = Story(folder, project)
    failed = False
    try:
        for step in SHORT if chosen.short else LONG:
            step_began = time.monotonic()
            print(f"{step.__doc__} ... ", end="", flush=True)
            result = _call(step, story)
            print(f"ok, {time.monotonic() - step_began:.0f} s{f': {result}' if result else ''}", flush=True)
    except BaseException as error:
        failed = True
        print(f"FAILED\n{error}\n{project.logs()}\n{story.job.tell()}\nfiles: {folder}", flush=True)
        if not isinstance(error, AssertionError):
            raise
    finally:
        story.job.close()
        project.remove()
    if failed:
        return 1
    shutil.rmtree(folder)
    print(f"all of it in {time.monotonic() - began:.0f} s")
    return 0


def _call(step: Callable[[Story], str | None], story: Story) -> str | None:
    result = step(story)
    if step in FAULTS:
        story.job.recover()
    return result


if __name__ == "__main__":
    sys.exit(main())
