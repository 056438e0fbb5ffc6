"""Tokenloom's own client conforms, and the program says which check a client fails that does not."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.checks import CHECKS
from tests.conformance.client import Broken, Refused
from tests.conformance.world import World

ROOT = Path(__file__).resolve().parents[2]


def command(module: str, *arguments: str) -> str:
    return shlex.join([sys.executable, "-m", f"tests.conformance.{module}", *arguments])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("conformance"))
    try:
        yield world
    finally:
        world.close()


def test_tokenlooms_own_client_conforms(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with world.with_client(command("adapter")):
        for function in CHECKS.values():
            function(world)


@pytest.mark.parametrize(
    ("fault", "check", "message"),
    [
        ("LabelsAsInputs", "ids-of-two-bytes", "labels of sample 0: expected"),
        ("StateWithSpaces", "ranks-and-states", "the state before the first batch: expected"),
        ("LosesABatch", "server-restarts", "the sample: expected 6, got 8"),
        ("EndsWhereFenced", "another-launch", "expected the error Fenced"),
        ("WithoutToken", "token", "Unauthenticated"),
        ("Dies", "progress", "the client ended instead of an answer"),
    ],
)
def test_a_client_that_breaks_the_contract_fails_the_check_that_is_about_it(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: str, check: str, message: str
) -> None:
    monkeypatch.chdir(ROOT)
    with (
        world.with_client(command("broken", fault)),
        pytest.raises((Broken, Refused), match=message),
    ):
        CHECKS[check](world)
