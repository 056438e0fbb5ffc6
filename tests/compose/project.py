"""A Compose project of its own, on a copy of this tree: what it makes has its name, and goes with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.page_commands import PAGES, ROOT, blocks
from support.ports import free_port

#: A command that has not ended by then never does: an image is built in minutes, also on two busy cores.
COMMAND_S = 1800.0
PAGE = "docs/compose.md"


class ComposeFailed(AssertionError):
    """A command failed, or did what it should not."""


def run(
    *command: object, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> str:
    """A command's output, both streams. Raises ``ComposeFailed`` with it where it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        env=environment,
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=COMMAND_S,
    )
    if done.returncode:
        raise ComposeFailed(
            f"{' '.join(map(str, command))[:500]}: status {done.returncode}\n{done.stdout[-4000:]}"
        )
    return done.stdout


class Project:
    """``environment``: what the commands of a page set holds for all later ones, as in one terminal."""

    def __init__(self, folder: Path, name: str, *, stand_ins: bool) -> None:
        self.name, self.folder = name, folder / "tree"
        self.image = f"tokenloom:{name}"
        self.grpc_port, self.rest_port = free_port(), free_port()
        #: What stands in the page, and here instead.
        self.instead = {
            "127.0.0.1:8080": f"127.0.0.1:{self.rest_port}",
            "tokenloom_": f"{name}_",
            "sudo ": "" if os.getuid() == 0 else "sudo ",
        }
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith("TOKENLOOM_")
        }
        self.environment |= {
            "PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "COMPOSE_PROJECT_NAME": name,
            "BUILDKIT_PROGRESS": "quiet",
            "COMPOSE_ANSI": "never",
            "COLUMNS": "200",
            "TOKENLOOM_GRPC_PORT": str(self.grpc_port),
            "TOKENLOOM_REST_PORT": str(self.rest_port),
        }
        places = ("client", "server", "proto", "requirements", "examples", ":(glob)*")
        listed = run(
            "git", "ls-files", "--cached", "--others", "--exclude-standard", *places, folder=ROOT
        )
        for path in listed.splitlines():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, self.folder / path)
        for path in ("Dockerfile", "docker-compose.yml"):
            text = (
                (self.folder / path)
                .read_text(encoding="utf-8")
                .replace("tokenloom:local", self.image)
            )
            text = text.replace(
                "context: .", f"context: .\n      labels: [compose-test-image={name}]"
            )
            # A stand-in has the name of a base, and not its digest.
            text = re.sub(r"@sha256:\w+", "", text) if stand_ins else text
            (self.folder / path).write_text(text, encoding="utf-8")

    def shell(self, script: str) -> str:
        """Runs lines of a shell; what they export stays."""
        for shown, here in self.instead.items():
            script = script.replace(shown, here)
        left = self.folder.parent / "environment"
        output = run(
            *("bash", "-euo", "pipefail", "-c", f"{script}\nenv -0 > {left}"),
            environment=self.environment,
            folder=self.folder,
        )
        self.environment = dict(
            line.split("=", 1) for line in left.read_text("utf-8").split("\0") if line
        )
        return output

    def page(self, heading: str, number: int = 0) -> str:
        """Runs one of the blocks below a heading of the page, as it stands there."""
        text = PAGES[PAGE]
        begin = text[: text.index(f"\n## {heading}\n")].count("\n") + 1
        below = [
            block
            for block in blocks(text)
            if block.line > begin and block.mark.startswith("run by make")
        ]
        return self.shell("\n".join(below[number].lines))

    def compose(self, *arguments: object) -> str:
        return run(
            "docker", "compose", *arguments, environment=self.environment, folder=self.folder
        )

    def container(self, service: str) -> dict[str, Any]:
        """What Docker says of a service's container."""
        found: list[dict[str, Any]] = json.loads(
            run("docker", "inspect", self.compose("ps", "-aq", service).strip())
        )
        return found[0]

    def python(self, code: str, *options: str, user: str = "0") -> str:
        """Runs Python in a container of the image that has nothing of the project but ``options``."""
        command = [
            "docker",
            "run",
            "--rm",
            "--user",
            user,
            *options,
            "--entrypoint",
            "python",
            self.image,
        ]
        return run(*command, "-c", code)

    def kill(self, service: str) -> None:
        """``kill -9`` from outside: unlike ``docker kill``, Docker takes it for a crash."""
        pid = self.container(service)["State"]["Pid"]
        self.python(f"import os; os.kill({pid}, 9)", "--pid=host")

    def refused(self, command: Callable[[], str]) -> str:
        """What a command says that has to fail."""
        try:
            said = command()
        except ComposeFailed as error:
            return str(error)
        raise AssertionError(f"it did not fail: {said}")

    def logs(self) -> str:
        return self.shell("docker compose logs --tail 40 || true")

    def remove(self) -> None:
        """Networks, volumes, images and containers of this project."""
        mine = f"label=compose-test-image={self.name}"
        files = "COMPOSE_FILE=docker-compose.yml:examples/compose/standby.yaml TOKENLOOM_TOKEN=none"
        self.shell(
            f"{files} docker compose down --volumes --timeout 5 --remove-orphans\n"
            f"docker images --all --quiet --filter {mine} | sort -u | xargs -r docker rmi -f"
        )
