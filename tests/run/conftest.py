"""Runs with a small corpus: groups of few steps, a window of six."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.corpora import mixture, write_corpus
from support.served import Place, Trainer
from tokenloom_server.api.served_run import ServedRun

#: Starts a call on a thread of its own; what that returns gives the call's value, or its error, once it is over.
InThread = Callable[[Callable[[], Any]], Callable[..., Any]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("served"))


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """State boundaries every few steps, as they are with real sample sizes."""
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 4)


@pytest.fixture
def made(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Place]]:
    places: list[Place] = []

    def make(**fields: Any) -> Place:
        places.append(Place(folder, tmp_path, mixture(**({"window_micro_steps": 6} | fields))))
        return places[-1]

    yield make
    for place in places:
        place.stop()


@pytest.fixture
def place(made: Callable[..., Place]) -> Place:
    return made()


@pytest.fixture
def served(place: Place) -> ServedRun:
    return place.serve()


@pytest.fixture
def trainer(served: ServedRun) -> Trainer:
    return Trainer(served)


@pytest.fixture
def in_thread() -> InThread:
    def start(call: Callable[[], Any]) -> Callable[..., Any]:
        outcomes: list[Any] = []

        def run() -> None:
            try:
                outcomes.append(call())
            except Exception as error:
                outcomes.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        # What has to wait would be over by now if it did not.
        thread.join(0.05)
        assert not outcomes

        def outcome(timeout_s: float = 20.0) -> Any:
            thread.join(timeout_s)
            return outcomes[0]

        return outcome

    return start
