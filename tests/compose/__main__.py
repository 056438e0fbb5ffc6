"""``make compose-test``: the image and docker-compose.yml in a real engine, every command of docs/compose.md, and a job
of two ranks that goes on through whatever fails; at the end every sample is recounted.

Bases that cannot be pulled are built as stand-ins (.ci/bases), and the first lines say so. ``--short`` has the kills
alone.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import httpx
import trustme
from chaos.checker import check
from chaos.corpus import write_corpus, write_mixture
from chaos.world import RUN, reference
from support.ports import free_port
from support.s3_server import BUCKET, s3_server
from support.waiting import wait_for
from tokenloom import ConnectionOptions, NumpyDataset

from compose.job import Job
from compose.project import ROOT, ComposeFailed, Project, run

#: Of the first 200 samples of examples/compose, as in .ci/installs.py.
DIGEST = "368423d72acedcf6823aba172c98770f"
#: A server that was paused, or could not reach the ledger, for so long may be replaced: the lease is 15 s.
BEYOND_LEASE_S = 20.0
#: What the image without the Hub and object stores may be, MB.
SLIM_MB = 450
#: What the image may have of these, beside the system's programs.
COMMANDS = {"__pycache__", "python", "python3", "python3.11", "tokenloom"}
LIST_COMMANDS = (
    "import json, os, pathlib; print(json.dumps("
    "[n for b in ('/opt/tokenloom/bin', '/usr/local/bin') for n in os.listdir(b)] + "
    "[str(f) for r in ('/opt', '/usr/local') for n in ('pip', 'setuptools', 'tests') "
    "for f in pathlib.Path(r).rglob(n)]))"
)
CONNECT = "import socket; socket.socket(socket.AF_UNIX).connect('/run/redis/redis.sock')"
CHECK_LEDGER = ("ledger", "check", "unix:///run/redis/redis.sock")
UP = ("up", "--detach", "--wait")


class Story:
    """One project and one job. Each step's first line is what the progress says of it."""

    def __init__(self, folder: Path, project: Project) -> None:
        self.folder, self.project = folder, project
        self.corpus = write_corpus(folder / "corpus")
        self.mixture = write_mixture(self.corpus / "mixture.yaml", RUN, seed=30)
        self.address = f"grpc://127.0.0.1:{project.grpc_port}"
        self.job = Job(project, folder / "job")

    def _token(self) -> dict[str, str]:
        return {"TOKENLOOM_TOKEN": self.project.environment["TOKENLOOM_TOKEN"]}

    def _read(self, name: str) -> str:
        """The digest of the first samples of a run."""
        connection = ConnectionOptions(token=self._token()["TOKENLOOM_TOKEN"])
        with NumpyDataset(
            f"{self.address}/{name}", 4, rank=0, world_size=1, connection=connection
        ) as dataset:
            assert len(list(islice(dataset, 50))) == 50
        return dataset.digest

    def _gateway(self) -> str:
        """This machine's address in the project's network."""
        network = f"{self.project.name}_default"
        return run(
            "docker",
            "network",
            "inspect",
            "--format",
            "{{(index .IPAM.Config 0).Gateway}}",
            network,
        ).strip()

    def starts(self) -> str:
        """up --wait builds the image and serves the sample, to a known digest; without the token nobody is let in"""
        self.project.page("Start")
        assert httpx.get(f"http://127.0.0.1:{self.project.rest_port}/v1/runs").status_code == 401
        digest = self._read("sample")
        assert digest == DIGEST, digest
        return digest

    def image(self) -> str:
        """the image has neither pip nor other packages' commands and tests; the slim one is small"""
        slim = f"{self.project.image}-slim"
        options = (
            "--build-arg",
            "PACKAGES=image-slim",
            "--label",
            f"compose-test-image={self.project.name}",
            "--tag",
            slim,
        )
        run("docker", "build", "--quiet", *options, self.project.folder)
        assert not (foreign := {*json.loads(self.project.python(LIST_COMMANDS))} - COMMANDS), (
            foreign
        )
        sizes = [
            int(run("docker", "image", "inspect", "--format", "{{.Size}}", name)) / 1e6
            for name in (self.project.image, slim)
        ]
        assert sizes[1] <= SLIM_MB, sizes
        return f"{sizes[0]:.0f} MB and {sizes[1]:.0f} MB"

    def ledger_is_closed(self) -> None:
        """Redis has no network, and another user of the machine may not use its socket"""
        assert [*self.project.container("redis")["NetworkSettings"]["Networks"]] == ["none"]
        volume = f"--volume={self.project.name}_socket:/run/redis"
        self.project.python(CONNECT, volume, user="10001:10001")
        said = self.project.refused(lambda: self.project.python(CONNECT, volume, user="4711:4711"))
        assert "PermissionError" in said, said

    def mixture_changes(self) -> None:
        """the mixture is changed while it is served, and by its file with a reason"""
        self.project.page("Change the mixture")
        path = self.project.folder / "examples/compose/mixture.yaml"
        text = path.read_text(encoding="utf-8")
        path.write_text(
            text.replace("alias: fables", "max_tokens: 400000000\n      alias: fables"),
            encoding="utf-8",
        )
        self.project.page("Change the mixture", 1)
        revisions = self.project.shell("tokenloom mixture show http://127.0.0.1:8080")
        assert "fewer-fables" in revisions, revisions

    def backup(self) -> str:
        """the ledger is backed up, checked and restored"""
        said = self.project.page("Backup")
        self.project.page("Backup", 1)
        return said.strip().splitlines()[-1]

    def upgrade(self) -> None:
        """up after a change of the source serves the new one, and Redis stays as it is"""
        before = self.project.container("redis")["Id"]
        with (self.project.folder / "server/tokenloom_server/__init__.py").open(
            "a", encoding="utf-8"
        ) as module:
            module.write("\nANOTHER = True\n")
        self.project.page("Upgrade")
        self.project.compose(
            "exec", "-T", "server", "python", "-c", "from tokenloom_server import ANOTHER"
        )
        assert self.project.container("redis")["Id"] == before

    def cache(self) -> str:
        """text in an object store is served from the cache"""
        sample = ROOT / "examples/compose"
        remote = self.folder / "remote.yaml"
        text = (
            (sample / "mixture.yaml")
            .read_text(encoding="utf-8")
            .replace("run: sample", "run: remote")
        )
        remote.write_text(text.replace(":data/", f":s3://{BUCKET}/corpora/data/"), encoding="utf-8")
        self.project.instead["s3://bucket"] = f"s3://{BUCKET}"
        before = dict(self.project.environment)
        with s3_server(self._gateway()) as store:
            for path in (sample / "data").iterdir():
                store.put_object(f"corpora/data/{path.name}", path.read_bytes())
            self.project.environment |= store.environment | {"TOKENLOOM_MIXTURE": str(remote)}
            self.project.page("A cache of remote objects")
            self._read("remote")
            kept = self.project.compose(
                *("exec", "-T", "server", "find", "/config/.tokenloom-index/cache", "-type", "f")
            ).splitlines()
        self.project.environment = before
        assert kept, "the cache is empty"
        return f"{len(kept)} files in it"

    def wrong_rights(self) -> str:
        """data that the server's user may not enter are said in a line; after the page's chmod a job trains"""
        data = self.corpus / "data"
        data.chmod(0o700)
        self.project.environment |= {
            "TOKENLOOM_MIXTURE": str(self.mixture),
            "TOKENLOOM_DATA": str(data),
        }
        self.project.refused(lambda: self.project.compose(*UP))
        log = self.project.compose("logs", "--no-log-prefix", "server")
        assert "/config/data" in log and "Traceback" not in log, log[-4000:]
        self.own_data()
        return log.strip().splitlines()[-1]

    def own_data(self) -> None:
        """own data are served to a job of two ranks"""
        self.project.instead |= {
            "/path/mixture.yaml": str(self.mixture),
            "/path/data": str(self.corpus / "data"),
        }
        self.project.page("Your own data")
        self.job.launch(self.address, self._token())

    def kill_trainers(self) -> None:
        self.job.kill()
        self.job.launch(self.address, self._token())

    def pause(self, service: str) -> None:
        def paused() -> bool:
            try:
                self.project.compose("pause", service)
            except ComposeFailed as error:
                if "unable to freeze" not in str(
                    error
                ):  # as cgroups of the first version are now and then
                    raise
                return False
            return True

        wait_for(paused, f"the pause of {service}")
        time.sleep(BEYOND_LEASE_S)
        self.project.compose("unpause", service)

    def cut_network(self) -> None:
        container, network = self.project.container("server")["Id"], f"{self.project.name}_default"
        run("docker", "network", "disconnect", network, container)
        time.sleep(BEYOND_LEASE_S / 4)
        run("docker", "network", "connect", "--alias", "server", network, container)

    def standby(self) -> str:
        """two trainers in containers on a network of their own; a standby takes over from a killed server, and back"""
        self.job.kill()
        ports = {
            name: free_port()
            for name in ("TOKENLOOM_STANDBY_GRPC_PORT", "TOKENLOOM_STANDBY_REST_PORT")
        }
        self.project.environment |= {name: str(port) for name, port in ports.items()}
        self.project.instead["127.0.0.1:8082"] = f"127.0.0.1:{ports['TOKENLOOM_STANDBY_REST_PORT']}"
        self.project.page("A standby")
        settings = self._token() | {"TOKENLOOM_PLAINTEXT_HOSTS": "server,standby"}
        address = (
            f"grpc://server:{self.project.grpc_port},standby:{ports['TOKENLOOM_STANDBY_GRPC_PORT']}"
        )
        self.job.launch(address, settings, f"{self.project.name}_trainers")
        took = []
        for first, second in (("server", "standby"), ("standby", "server")):
            began = time.monotonic()
            self.project.compose("kill", first)
            self.job.recover()
            took.append(f"{second} went on after {time.monotonic() - began:.0f} s")
            assert "leads at server epoch" in self.project.compose("logs", second)
            self.project.compose(*UP)
        self.job.kill()
        self.project.page("A standby", 1)
        return ", ".join(took)

    def elsewhere(self) -> None:
        """trainers that reach this machine by an address of its own, with TLS"""
        self.project.compose(*UP)
        ca, tls, host = trustme.CA(), self.folder / "tls", self._gateway()
        tls.mkdir()
        issued = ca.issue_cert(host)
        issued.cert_chain_pems[0].write_to_path(tls / "cert.pem")
        issued.private_key_pem.write_to_path(tls / "key.pem")
        ca.cert_pem.write_to_path(self.folder / "ca.pem")
        self.project.instead["/path/tls"] = str(tls)
        self.project.page("Trainers on other machines")
        settings = self._token() | {"TOKENLOOM_TLS_CA": str(self.folder / "ca.pem")}
        self.job.launch(f"grpcs://{host}:{self.project.grpc_port}", settings)

    def recount(self) -> str:
        """the job ends in order; the ledger is checked, and every sample recounted"""
        index = self.job.finish()
        self.project.shell(
            "docker compose down\nunset COMPOSE_FILE\ndocker compose up --detach --wait"
        )
        self.project.compose("run", "--rm", "--no-deps", "server", *CHECK_LEDGER)
        stats = json.loads(self.project.shell("tokenloom stats http://127.0.0.1:8080 --json"))
        reference(
            self.job.folder, self.mixture, max(launch.reach() for launch in self.job.launches)
        )
        found = check(self.job.folder, None)
        found.raise_if_wrong()
        assert stats["sample_index"] == index, f"{stats}; expected sample {index}"
        counts = f"{found.attempts} launches, {found.delivered:,} samples delivered, {found.distinct:,} distinct"
        return f"{counts}, all recounted; the ledger is at sample {index:,}"


#: After each of them training goes on.
FAULTS: dict[str, Callable[[Story], object]] = {
    "restart of the server": lambda story: story.project.compose("restart", "server"),
    "kill -9 of the server": lambda story: story.project.kill("server"),
    "restart of Redis": lambda story: story.project.compose("restart", "redis"),
    "kill -9 of Redis": lambda story: story.project.kill("redis"),
    "kill -9 of both trainers, which go on from their checkpoint": Story.kill_trainers,
    "the server is paused beyond its lease": lambda story: story.pause("server"),
    "Redis is paused beyond the lease": lambda story: story.pause("redis"),
    "the network between trainers and server is cut": Story.cut_network,
    "down and up": lambda story: (story.project.compose("down"), story.project.compose(*UP)),
}


def steps(story: Story, short: bool) -> list[tuple[str, Callable[[], object]]]:
    """Each with what the progress says of it."""
    sample = [
        story.image,
        story.mixture_changes,
        story.backup,
        story.upgrade,
        story.cache,
        story.wrong_rights,
    ]
    first = [story.starts, story.ledger_is_closed, *([story.own_data] if short else sample)]
    last = [*([] if short else [story.standby, story.elsewhere]), story.recount]
    faults = [
        (name, lambda strike=strike: (strike(story), story.job.recover())[1])
        for name, strike in FAULTS.items()
    ]
    begin, end = [[(str(step.__doc__), step) for step in part] for part in (first, last)]
    return [*begin, *(fault for fault in faults if not short or "kill" in fault[0]), *end]


def main() -> None:
    options = argparse.ArgumentParser(prog="make compose-test", description=__doc__)
    options.add_argument("--short", action="store_true", help="the kills alone, for every change")
    short = options.parse_args().short
    began = time.monotonic()
    bases = run(ROOT / ".ci/bases", folder=ROOT)
    print(bases, end="", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="tokenloom-compose-"))
    project = Project(
        folder, f"tokenloom-test-{secrets.token_hex(3)}", stand_ins="stand-in" in bases
    )
    story = Story(folder, project)
    try:
        for name, step in steps(story, short):
            step_began = time.monotonic()
            print(f"{name} ... ", end="", flush=True)
            result = step()
            print(
                f"ok, {time.monotonic() - step_began:.0f} s{f': {result}' if result else ''}",
                flush=True,
            )
    except BaseException:
        print(f"FAILED\n{project.logs()}\n{story.job.tell()}\nfiles: {folder}", flush=True)
        raise
    finally:
        story.job.kill()
        project.remove()
    shutil.rmtree(folder)
    print(f"all of it in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
