"""Every command of every page runs as it stands, or its page says why not."""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml
from support.corpora import id_rows, text_rows, write_jsonl, write_parquet
from support.forks import Fork
from support.page_commands import PAGES, ROOT, blocks
from support.ports import free_port
from support.redis_server import RedisServer
from support.server_process import MAIN, Finished, server_forks
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenloom import NumpyDataset

#: Programs of which no command is run here, and why.
NOT_RUN = {
    "docker": "needs a Docker engine",
    "gh": "needs a published release",
    "hf": "downloads a model",
    "kubectl": "needs a Kubernetes cluster",
    "make": "runs tests or measurements of this repository for minutes",
    "pip": "downloads packages; .ci/installs.py installs the wheel in environments of its own",
    "sbatch": "needs a SLURM cluster",
    "sudo": "needs root",
}
#: What a page says of a command that does not end by itself.
ENDLESS = "Ctrl-C ends it"
DEADLINE_S = 240.0
MAIN_ADDRESSES = ("127.0.0.1:50051", "127.0.0.1:8080")
CODE, WEB, DOCS = (
    "parquet:data/code-*.parquet:ids",
    "jsonl:data/web.jsonl:text",
    "jsonl:data/docs.jsonl:text",
)


@dataclass(frozen=True)
class World:
    """What a page assumes: servers of runs that were trained, each by its address, up to a sample."""

    runs: tuple[str, ...] = ("sample",)
    samples: int = 0
    sequence_length: int = 64
    #: Where other servers listen that its commands name; the mixture of the last one differs.
    others: tuple[str, ...] = ()


#: Pages that speak of a server that is up. Before the commands of others nothing runs.
WORLDS = {
    "docs/alerts.md": World(("wiki",), 400),
    "docs/annealing.md": World(("anneal",), 400),
    "docs/checkpoint-files.md": World(("wiki-and-code",), 400),
    "docs/checkpoints.md": World(("demo",), 480),
    "docs/export.md": World(("corpus",), 20_000, 8),
    "docs/forks.md": World(("base", "anneal"), 1600),
    "docs/inspecting.md": World(("demo",), 480),
    "docs/late-deduplication.md": World(("anneal",), 400),
    "docs/losses.md": World(samples=400),
    "docs/operations.md": World(samples=5200),
    "docs/receipts.md": World(("mix",), 400, others=("127.0.0.1:8081", "127.0.0.1:8082")),
    "docs/revisions.md": World(("wiki-and-code",), 400),
    "docs/running.md": World(("wiki",), 400),
    # Their commands make the mixture file.
    "README.md": World(()),
    "docs/mixture-file.md": World(()),
}


class Shell:
    """Runs the commands of a page in a folder of its own, with other addresses and folders than the page's."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.folder, self.redis = folder, redis
        self.addresses: dict[str, str] = {}
        self.servers: dict[str, Fork] = {}
        self.environment = {
            "COLUMNS": "120",
            "NO_COLOR": "1",
            "TOKENLOOM_TOKEN": "t" * 32,
            "TOKENLOOM_READ_TOKEN": "r" * 32,
        }
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment["S"] = f"http://{self.here(MAIN_ADDRESSES[1])}"

    def here(self, text: str) -> str:
        """A command with what stands here for the page's addresses, folders and names."""
        for shown, meant in {
            r"redis://[\w.]+:6379/0": self.redis.url(),
            r"redis-cli (?:-h ledger|(?!-))": f"redis-cli -p {self.redis.port} ",
            r"(?<![\w.])/(srv|backups|local)/": rf"{self.folder}/\1/",
            r"\bDATA\b": "data",
        }.items():
            text = re.sub(shown, meant, text)
        return re.sub(
            r"(?<![\w.@])(?:127\.0\.0\.1|a|b):(?:50|80)\d+\b",
            lambda found: self._address(found[0]),
            text,
        )

    def _address(self, shown: str) -> str:
        return self.addresses.setdefault(shown, f"127.0.0.1:{free_port()}")

    def __call__(self, command: str) -> None:
        text = self.here(command)
        if command.startswith("export "):
            name, _, value = shlex.split(text, comments=True)[1].partition("=")
            self.environment[name] = value
        elif command.startswith("tokenloom serve") and "--settings" not in command:
            self.serve(text)
        else:
            if command.startswith(
                "tokenloom ledger backup TOKENLOOM_LEDGER"
            ):  # of a server whose ledger is in Redis
                self.serve(
                    self.here(
                        "tokenloom serve mixture.yaml --ledger redis://ledger:6379/0 --grpc a:50051"
                    )
                )
            if command.startswith("tokenloom ledger copy"):  # its page says to stop the servers
                self.stop()
                self.redis.client().flushall()
            done = self._run(text)
            # 1: the runs differ, as on the pages. 130: Ctrl-C.
            allowed = (
                (0, 1)
                if command.startswith("tokenloom verify")
                else (0, 130)
                if ENDLESS in command
                else (0,)
            )
            assert done.status in allowed, (
                f"{command}\nas {text}\nhas status {done.status}:\n{done.output}"
            )

    def _run(self, text: str) -> Finished:
        """In a shell; a command of Tokenloom's own that needs none, as a fork, which has done its imports."""
        ledger = {"TOKENLOOM_LEDGER": self.redis.url()} if "TOKENLOOM_LEDGER" in text else {}
        environment = self.environment | ledger
        name, *arguments = shlex.split(text.replace("$S", self.environment["S"]), comments=True)
        if name == "tokenloom" and not {"|", ">", "2>/dev/null"} & {*arguments}:
            output = self.folder / f"output-{len([*self.folder.glob('output-*')])}"
            fork = server_forks().fork(
                MAIN, arguments, output=output, folder=self.folder, environment=environment
            )
            try:
                return Finished(fork.wait(DEADLINE_S), output.read_text())
            finally:
                fork.kill()
        command = ["bash", "-o", "pipefail", "-c", text]
        if ENDLESS in text:
            command = ["timeout", "--preserve-status", "--signal=INT", "1", *command]
        done = subprocess.run(
            command, cwd=self.folder, env=os.environ | environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
        return Finished(done.returncode, done.stdout)

    def serve(self, text: str) -> None:
        """Starts a server in the place of one that had the same address, and waits until it is ready."""
        arguments = shlex.split(text, comments=True)[1:]
        for option, address in zip(("--grpc", "--rest"), MAIN_ADDRESSES, strict=True):
            if option not in arguments:
                arguments += [
                    option,
                    self._address(address) if "--grpc" not in text else "127.0.0.1:0",
                ]
        address = arguments[arguments.index("--grpc") + 1]
        self.stop(address)
        ready, log = self.folder / "ready.json", self.folder / "server.log"
        ready.unlink(missing_ok=True)
        environment = {**self.environment, "TOKENLOOM_SERVE_READY_FILE": str(ready)}
        del environment["TOKENLOOM_TOKEN"], environment["TOKENLOOM_READ_TOKEN"]
        server = server_forks().fork(
            MAIN, arguments, output=log, folder=self.folder, environment=environment
        )
        self.servers[address] = server
        deadline = time.monotonic() + DEADLINE_S
        while not ready.exists():
            assert server.poll() is None and time.monotonic() < deadline, (
                f"{text}\n{log.read_text()}"
            )
            time.sleep(0.02)

    def stop(self, address: str | None = None) -> None:
        for each in [each for each in self.servers if address in (None, each)]:
            server = self.servers.pop(each)
            server.send_signal(signal.SIGINT)
            server.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that pages name, in a folder that each page gets a copy of."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, rows in {"code-0": 500, "code-1": 500, "crawl2-0": 50}.items():
        write_parquet(folder / f"data/{name}.parquet", id_rows(rows, len(name), 200), group=100)
    for number, name in enumerate(("data/web", "data/docs", "web", "docs", "textbooks")):
        write_jsonl(folder / f"{name}.jsonl", text_rows(500, number, 200))
    shutil.copytree(folder / "data", folder / "code", ignore=shutil.ignore_patterns("*.parquet"))
    for name, spec, shard in (
        ("data/takedown-42", CODE, "data/code-0.parquet"),
        ("late", WEB, "data/web.jsonl"),
    ):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(
                [("spec", "shard", "row"), (spec, shard, 490), (spec, shard, 495)]
            )
    tokenizer = Tokenizer(WordLevel({"1": 0, "[UNK]": 1}, "[UNK]"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copytree(ROOT / "examples/compose", folder / "examples/compose")
    for name in ("srv/runs", "mixtures", "backups", "local"):
        (folder / name).mkdir(parents=True)
    (folder / "srv/runs/data").symlink_to("../../data")
    return folder


def mixture(run: str, world: World, weight: float = 2) -> str:
    children = [
        {"source": CODE, "alias": "code", "weight": weight},
        {"source": WEB, "alias": "web"},
        {"source": DOCS},
    ]
    repeated = [{"epochs": float("inf"), **child} for child in children]
    fields = {
        "run": run,
        "tokenizer": "bytes",
        "sequence_length": world.sequence_length,
        "window_micro_steps": 8,
    }
    return yaml.safe_dump(
        {**fields, "mixture": {"policy": "least_consumed", "children": repeated}}, sort_keys=False
    )


def train(address: str, run: str, samples: int, folder: Path) -> None:
    """Trains up to a sample, and leaves checkpoints: one before the end, and one of the end."""
    batch_size = max(8, samples // 50)
    with NumpyDataset(f"grpc://{address}/{run}", batch_size=batch_size) as dataset:
        for step, _ in enumerate(islice(dataset, samples // batch_size), 1):
            if step in (samples // batch_size // 2, samples // batch_size):
                first = not (folder / "good.pt").exists()
                for name in ("good", "checkpoint", "step-1300") if first else ("step-1400",):
                    torch.save({"data": dataset.state_dict()}, folder / f"{name}.pt")


def bring_up(world: World, shell: Shell) -> None:
    """Writes the mixture files; where the page speaks of servers, they serve, and their runs are trained."""
    files = {
        run: f"{run}.yaml" if number else "mixture.yaml" for number, run in enumerate(world.runs)
    }
    for run, file in (
        {"wiki": "wiki.yaml", "code": "code.yaml", "anneal": "anneal.yaml"} | files
    ).items():
        for path in (file, f"mixtures/{file}"):
            (shell.folder / path).write_text(mixture(run, world))
    if not world.samples:
        return
    for number, rest in enumerate((MAIN_ADDRESSES[1], *world.others)):
        names = list(files.values())
        if number:
            names = [f"mixture-{number}.yaml"]
            (shell.folder / names[0]).write_text(mixture(world.runs[0], world, weight=1 + number))
        grpc = shell.here(f"127.0.0.1:5005{number + 1}")
        ledger = "" if not number else f" --ledger sqlite:///{number}.db"
        shell.serve(
            f"tokenloom serve {' '.join(names)} --grpc {grpc} --rest {shell.here(rest)}{ledger}"
        )
        train(grpc, world.runs[0], world.samples // (1 + number), shell.folder)


@pytest.fixture(scope="module")
def redis_of_pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


def commands_to_run(page: str) -> list[str]:
    found = [
        command for block in blocks(PAGES[page]) if not block.mark for command in block.commands
    ]
    return [command for command in found if command.split()[0] not in NOT_RUN]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_to_run(page)])
def test_the_commands_of_a_page_run(
    page: str, corpora: Path, redis_of_pages: RedisServer, tmp_path: Path
) -> None:
    shutil.copytree(corpora, tmp_path / "page", symlinks=True)
    redis_of_pages.client().flushall()
    shell = Shell(tmp_path / "page", redis_of_pages)
    for name, text in re.findall(
        r"^```\w+\n# (\w+\.\w+)\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE
    ):
        (shell.folder / name).write_text(text)
    try:
        bring_up(WORLDS.get(page, World()), shell)
        for command in commands_to_run(page):
            shell(command)
    finally:
        shell.stop()


def test_a_mark_stands_before_a_command_and_names_a_test_that_there_is() -> None:
    for page, content in PAGES.items():
        for block in blocks(content):
            if not block.mark:
                continue
            assert block.commands, (
                f"{page}, line {block.line}: '{block.mark}' stands before no command"
            )
            run_by = block.mark.startswith("run by ")
            for test in re.findall(r"tests/\S+\.py", block.mark):
                text = (ROOT / test).read_text(encoding="utf-8")
                assert not run_by or Path(page).stem in text, f"{test} does not speak of {page}"
