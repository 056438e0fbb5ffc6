"""A training job of two ranks, on this machine or in containers, which writes down what it gets for the recount."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from chaos.corpus import WINDOW_STEPS
from chaos.trainer import RankPlan
from chaos.world import RUN, Launch
from support.waiting import wait_for

from compose.project import ROOT, Project, run

WORLD_SIZE = 2
BATCH_SIZE = 4
#: A machine at a load of ten goes on within this time after a fault, a lease that lapses included, seconds.
LIVENESS_S = 300.0
TRAIN = ("-W", "error", "-c", "from chaos.trainer import main; main()")


class Job:
    """Launched again and again, each time from the newest state that both ranks have written down."""

    def __init__(self, project: Project, folder: Path) -> None:
        self._project, self.folder = project, folder
        self._ranks: list[subprocess.Popen[bytes]] = []
        self.launches: list[Launch] = []

    def launch(self, address: str, settings: Mapping[str, str], network: str = "") -> None:
        """Starts both ranks: processes here, or containers on a network. ``settings``: their environment. They train
        when it returns."""
        states = {0: ""}
        for launch in self.launches:
            states |= launch.states()
        start = max(states)
        attempt = f"{len(self.launches):04d}"
        folder = self.folder / "attempts" / attempt
        folder.mkdir(parents=True)
        plan = {
            "attempt": attempt,
            "world_size": WORLD_SIZE,
            "batch_size": BATCH_SIZE,
            "start": start,
        }
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        launch = Launch(
            folder,
            attempt,
            WORLD_SIZE,
            BATCH_SIZE,
            start,
            [],
            3,
            states[start],
            skips=[],
            changes=0,
        )
        self.launches.append(launch)
        environment = {**settings, "PYTHONPATH": "/tests" if network else str(ROOT / "tests")}
        program = (
            self._in_a_container(folder, environment, network) if network else [sys.executable]
        )
        self._ranks = []
        for rank in range(WORLD_SIZE):
            each = RankPlan(
                folder="/attempt" if network else str(folder),
                url=f"{address}/{RUN}",
                rank=rank,
                world_size=WORLD_SIZE,
                batch_size=BATCH_SIZE,
                attempt=attempt,
                state=states[start],
                resume="",
                prefetch_steps=3,
                pace_s=0.01,
                checkpoint_every=20,
                takeover=False,
            )
            with (folder / f"rank-{rank}.log").open("wb") as log:
                command = [*program, *TRAIN, json.dumps(asdict(each))]
                process = subprocess.Popen(
                    command, env=os.environ | environment, stdout=log, stderr=log
                )
            self._ranks.append(process)
        self.recover()

    def _in_a_container(
        self, folder: Path, environment: Mapping[str, str], network: str
    ) -> list[str]:
        """The Python of the image, whose client this suite's trainer uses there."""
        return [
            *(
                "docker",
                "run",
                "--rm",
                "--network",
                network,
                "--label",
                f"compose-test={self._project.name}",
            ),
            *(
                "--user",
                f"{os.getuid()}:{os.getgid()}",
                *(part for name in environment for part in ("--env", name)),
            ),
            *("--volume", f"{ROOT / 'tests'}:/tests:ro", "--volume", f"{folder}:/attempt"),
            *("--entrypoint", "python", self._project.image),
        ]

    def _ended(self) -> bool:
        return None not in [rank.poll() for rank in self._ranks]

    def recover(self) -> None:
        """Waits until each rank has what was made after now."""
        launch = self.launches[-1]
        steps = max(launch.steps()) + WINDOW_STEPS + 1

        def has() -> bool:
            statuses = [rank.poll() for rank in self._ranks]
            assert statuses == [None] * WORLD_SIZE, f"ranks ended: {statuses}"
            return min(launch.steps()) >= steps and bool(launch.states())

        wait_for(has, f"step {steps} on both ranks", LIVENESS_S)

    def kill(self) -> None:
        """``kill -9`` of both ranks."""
        mine = f"label=compose-test={self._project.name}"
        run("bash", "-c", f"docker ps --quiet --filter {mine} | xargs -r docker kill --signal KILL")
        for rank in self._ranks:
            rank.kill()
        wait_for(self._ended, "the end of both ranks")

    def finish(self) -> int:
        """Ends both ranks in order at one step; the sample index where that is."""
        launch = self.launches[-1]
        index = (launch.begin() or 0) + (max(launch.steps()) + 20) * launch.step
        (launch.folder / "stop.draft").write_text(str(index))
        (launch.folder / "stop.draft").replace(launch.folder / "stop")
        wait_for(self._ended, "the end of both ranks", LIVENESS_S)
        assert [rank.returncode for rank in self._ranks] == [0] * WORLD_SIZE
        return index

    def tell(self) -> str:
        """How the last launch stands, for a failure's message."""
        return "\n".join(
            f"{each.steps()} {each.log(0)[-1500:]} {each.log(1)[-1500:]}"
            for each in self.launches[-1:]
        )
