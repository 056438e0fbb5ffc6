"""A training job of two ranks, on this machine or in containers, which writes down what it gets for the recount."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from chaos.corpus import WINDOW_STEPS
from chaos.trainer import RankPlan, Ranks
from chaos.world import Launch
from support.waiting import wait_for

from compose.project import ROOT, Project, run

WORLD_SIZE = 2
BATCH_SIZE = 4
#: A machine at a load of ten goes on within this time after a fault, a lease that lapses included, seconds.
LIVENESS_S = 300.0
RUN = "compose"


class Job:
    """Launched again and again, each time from the newest state that both ranks have written down."""

    def __init__(self, project: Project, folder: Path) -> None:
        self._project, self.folder = project, folder
        self._ranks: Ranks | None = None
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
        plan = {"attempt": attempt, "world_size": WORLD_SIZE, "batch_size": BATCH_SIZE, "start": start}
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        first = RankPlan(
            folder=str(folder),
            url=f"{address}/{RUN}",
            rank=0,
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
        plans = [replace(first, rank=rank) for rank in range(WORLD_SIZE)]
        names = [] if network else [each.name for each in plans]
        self.launches.append(
            Launch(folder, attempt, WORLD_SIZE, BATCH_SIZE, start, names, 3, states[start], skips=[], changes=0)
        )
        if network:
            for each in plans:
                self._contain(each, folder, settings, network)
        else:
            os.environ.update(settings)
            self._ranks = self._ranks or Ranks()
            for each in plans:
                self._ranks.start(each)
        self.recover()

    def _contain(self, plan: RankPlan, folder: Path, settings: Mapping[str, str], network: str) -> None:
        """A rank in a container of its own, of the image: its client, and this suite's trainer."""
        variables = [part for name in settings for part in ("--env", f"{name}={settings[name]}")]
        run(
            *("docker", "run", "--detach", "--network", network, "--label", f"compose-test={self._project.name}"),
            *("--user", f"{os.getuid()}:{os.getgid()}", *variables, "--env", "PYTHONPATH=/tests"),
            *("--volume", f"{ROOT / 'tests'}:/tests:ro", "--volume", f"{folder}:/attempt"),
            *("--name", f"{self._project.name}-rank-{plan.rank}-{plan.attempt}", "--entrypoint", "python"),
            *(self._project.image, "-c", "from chaos.trainer import main; main()"),
            json.dumps(asdict(plan) | {"folder": "/attempt"}),
        )

    def _statuses(self) -> list[int | None]:
        launch = self.launches[-1]
        if launch.names:
            assert self._ranks is not None
            return [self._ranks.status(name) for name in launch.names]
        statuses: list[int | None] = []
        for rank in range(WORLD_SIZE):
            name = f"{self._project.name}-rank-{rank}-{launch.attempt}"
            running, _, status = run(
                "docker", "inspect", "--format", "{{.State.Running}} {{.State.ExitCode}}", name
            ).partition(" ")
            statuses.append(None if running == "true" else int(status))
        return statuses

    def recover(self) -> None:
        """Waits until each rank has what was made after now."""
        launch = self.launches[-1]
        steps = max(launch.steps()) + WINDOW_STEPS + 1

        def has() -> bool:
            assert self._statuses() == [None] * WORLD_SIZE, f"a rank ended: {self._statuses()}"
            return min(launch.steps()) >= steps and bool(launch.states())

        wait_for(has, f"step {steps} on both ranks", LIVENESS_S)

    def kill(self) -> None:
        """``kill -9`` of both ranks."""
        launch = self.launches[-1]
        for rank in range(WORLD_SIZE):
            if launch.names and self._ranks is not None:
                self._ranks.signal(launch.names[rank], signal.SIGKILL)
            else:
                run("docker", "kill", f"{self._project.name}-rank-{rank}-{launch.attempt}")
        wait_for(lambda: None not in self._statuses(), "the end of both ranks")

    def finish(self) -> int:
        """Ends both ranks in order at one step; the sample index where that is."""
        launch = self.launches[-1]
        index = (launch.begin() or 0) + (max(launch.steps()) + 20) * launch.step
        (launch.folder / "stop.draft").write_text(str(index))
        (launch.folder / "stop.draft").replace(launch.folder / "stop")
        wait_for(lambda: None not in self._statuses(), "the end of both ranks", LIVENESS_S)
        assert self._statuses() == [0] * WORLD_SIZE, self._statuses()
        return index

    def tell(self) -> str:
        """How the last launch stands, for a failure's message."""
        if not self.launches:
            return ""
        logs = [self.launches[-1].log(rank)[-1500:] for rank in range(WORLD_SIZE)]
        return f"launch {self.launches[-1].attempt}, steps {self.launches[-1].steps()}\n" + "\n".join(logs)

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
