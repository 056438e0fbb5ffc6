"""Losses by source in training that is distributed, and a mixture that follows them: the examples, as users run
them."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml
from support.forks import Forks
from support.killed import EXAMPLES, FORM, two_runs
from support.scripts import launch
from support.server_process import ServerProcess
from tokenloom import PeekDataset

SCRIPT = EXAMPLES / "source_losses.py"


def lines(record: Path, rank: int) -> list[dict[str, Any]]:
    path = record.with_suffix(f".{rank}")
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_losses_are_the_same_on_every_rank_and_on_any_number_of_ranks(
    torch_forks: Forks, tmp_path: Path
) -> None:
    found = {}
    with two_runs(tmp_path) as urls:
        for ranks, url in zip((1, 2), urls, strict=True):
            folder = tmp_path / f"on-{ranks}"
            arguments = [
                url,
                "--batch-size",
                8 // ranks,
                "--samples",
                160,
                "--record",
                folder / "record",
            ]
            arguments += ["--checkpoint", folder / "checkpoint"]
            launch(torch_forks, SCRIPT, arguments, world_size=ranks, folder=folder).wait()
            found[ranks] = [lines(folder / "record", rank) for rank in range(ranks)]
        assert found[2][0] == found[2][1], "the ranks have other losses"
        (alone,), (first, _) = found[1], found[2]
        assert len(alone) == len(first) == 4

        # What of which source each step had, from the order itself.
        with PeekDataset(urls[0], 8, at="0") as order:
            aliases = {}
            counted: list[dict[str, int]] = [{} for _ in alone]
            for step, batch in zip(range(20), order, strict=False):
                aliases |= {source.id: source.alias for source in order.sources}
                for source in batch["source_ids"].tolist():
                    tokens = counted[step // 5]
                    # The first id is predicted by none.
                    tokens[aliases[source]] = (
                        tokens.get(aliases[source], 0) + FORM["sequence_length"] - 1
                    )
        for one, other, tokens in zip(alone, first, counted, strict=True):
            assert one["digest"] == other["digest"]
            assert one["tokens"] == other["tokens"] == tokens
            assert other["losses"] == pytest.approx(one["losses"], rel=1e-4)
            mean = sum(one["losses"][name] * n for name, n in tokens.items()) / sum(tokens.values())
            assert one["loss"] == pytest.approx(mean)


# Online data mixing


@pytest.fixture(scope="module")
def mixing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("online_mixing", EXAMPLES / "online_mixing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["online_mixing"] = module
    spec.loader.exec_module(module)
    return module


def test_the_bandit_is_the_one_of_the_paper_in_numbers_worked_by_hand(mixing: ModuleType) -> None:
    # √(ln 2 / (2 t)) is 0.588705, 0.416277, 0.339889 for t = 1, 2, 3; the first is above 1/2.
    assert [mixing.exploration(turn, 2) for turn in range(4)] == pytest.approx(
        [0.5, 0.5, 0.416277, 0.339889], abs=1e-6
    )
    assert mixing.exploration(1, 1) == 0.0
    equal = {"a": 0.5, "b": 0.5}
    assert mixing.distribution(equal, {"a": 0.0, "b": 0.0}, 1) == equal

    turn = mixing.Turn(1, {"a": 0.0, "b": 0.0}, equal, equal, 0, 0)
    # 0.9 · 0 + 0.1 · 4 / 0.5, and 0.1 · 2 / 0.5
    rewards = mixing.rewarded(turn, {"a": 4.0, "b": 2.0}, 0.9)
    assert rewards == pytest.approx({"a": 0.8, "b": 0.4})
    # (1 − 2 · 0.416277) · e^0.4 / (e^0.4 + e^0.2) + 0.416277 = 0.167446 · 0.549834 + 0.416277
    shares = mixing.distribution(equal, rewards, 2)
    assert shares == pytest.approx({"a": 0.508344, "b": 0.491656}, abs=2e-6)

    # 0.9 · 0.8 + 0.1 · 3.5 / 0.508344, and 0.9 · 0.4 + 0.1 · 2.5 / 0.491656
    turn = mixing.Turn(2, rewards, equal, shares, 0, 0)
    rewards = mixing.rewarded(turn, {"a": 3.5, "b": 2.5}, 0.9)
    assert rewards == pytest.approx({"a": 1.408509, "b": 0.868484}, abs=1e-5)
    # e^(0.416277 · 1.408509) = 1.797383, e^(0.416277 · 0.868484) = 1.435521; 0.320222 · 0.555966 + 0.339889
    assert mixing.distribution(equal, rewards, 3) == pytest.approx(
        {"a": 0.517921, "b": 0.482079}, abs=1e-5
    )

    assert mixing.rewarded(turn, {"b": 2.5}, 0.9)["a"] == turn.rewards["a"], (
        "a source without a sample keeps its own"
    )
    third = dict.fromkeys("abc", 1 / 3)
    far = mixing.distribution(third, {"a": 1e6, "b": 0.0, "c": 0.0}, 100)
    assert sum(far.values()) == pytest.approx(1.0)
    assert min(far.values()) == pytest.approx(mixing.exploration(100, 3))


def test_the_mixture_follows_the_losses_and_a_resume_has_the_same_mixtures_again(
    torch_forks: Forks, tmp_path: Path
) -> None:
    draw = random.Random(5)
    hard = "\n".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=200)) for _ in range(400))
    (tmp_path / "hard.txt").write_text(hard, encoding="utf-8")
    (tmp_path / "easy.txt").write_text(("a" * 200 + "\n") * 400, encoding="utf-8")
    sources = [
        {"source": f"txt:{name}.txt:text", "alias": name, "epochs": 1e9}
        for name in ("hard", "easy")
    ]
    mixture = tmp_path / "mixed.yaml"
    document = {
        "run": "mixed",
        "seed": 1,
        "tokenizer": "bytes",
        "sequence_length": 32,
        "window_micro_steps": 32,
    }
    document["mixture"] = {"policy": "least_consumed", "children": sources}
    mixture.write_text(yaml.safe_dump(document), encoding="utf-8")
    server = ServerProcess(tmp_path / "server", mixture, flags=("--liveness", 1)).start()
    http = httpx.Client(base_url=f"{server.rest_url}/v1/runs/mixed", trust_env=False, timeout=120)
    arguments = [server.url("mixed"), "--batch-size", 8, "--every", 16, "--lr", 1e-2]
    checkpoint, kept, record = tmp_path / "checkpoint", tmp_path / "kept", tmp_path / "record"
    asked = [
        server.rest_url,
        "--run",
        "mixed",
        "--every",
        "4096",
        "--turns",
        3,
        "--smoothing",
        0.5,
        "--poll",
        0.05,
    ]
    jobs = [
        launch(
            torch_forks,
            EXAMPLES / "online_mixing.py",
            asked,
            world_size=1,
            folder=tmp_path / "mixing",
        )
    ]
    try:
        whole = [
            *arguments,
            "--samples",
            10_000_000,
            "--checkpoint",
            checkpoint,
            "--record",
            record,
        ]
        jobs.append(launch(torch_forks, SCRIPT, whole, world_size=1, folder=tmp_path / "job"))
        mixer, trainer = jobs
        deadline = time.monotonic() + 400
        while mixer.statuses() == [None]:
            assert time.monotonic() < deadline, trainer.output[-2000:]
            assert trainer.statuses() == [None], trainer.output[-2000:]
            # A checkpoint of the time when the second turn was known to nobody.
            if not kept.exists() and (checkpoint / "last.pt").exists():
                shutil.copytree(checkpoint, kept, ignore=shutil.ignore_patterns("*.part"))
            time.sleep(0.02)
        mixer.wait()

        revisions = http.get("/mixture").json()["revisions"]
        assert [revision["author"] for revision in revisions] == ["examples/online_mixing.py"] * 2
        assert "online data mixing, turn 2; losses of turn 1: " in revisions[0]["reason"]
        turn = json.loads((tmp_path / "mixing" / "online_mixing.json").read_text(encoding="utf-8"))
        assert (turn["number"], turn["sample_index"]) == (3, revisions[-1]["sample_index"])
        assert 0.5 < turn["shares"]["hard"] < 1, "what is random keeps its loss, and gets more"
        last = turn["sample_index"]
        while (now := http.get("/stats").json())["sample_index"] < last + 256:
            assert time.monotonic() < deadline, trainer.output[-2000:]
            time.sleep(0.02)
        weights = {
            child["alias"]: child["weight"]
            for child in http.get("/mixture").json()["mixture"]["children"]
        }
        assert weights == pytest.approx(turn["shares"], abs=1e-6)
        assert now["sources"][0]["loss"] > 2 > now["sources"][1]["loss"]
        trainer.kill()
        until = lines(record, 0)

        # The mix followed: in each turn the share of the order is the one that the revision gave.
        with PeekDataset(server.url("mixed"), 256, at=str(last)) as order:
            batch = next(iter(order))
        share = batch["source_ids"].eq(0).double().mean().item()
        assert share == pytest.approx(turn["shares"]["hard"], abs=0.02)

        # From a checkpoint before all of it, every mixture holds again from its own sample on.
        end = until[-1]["sample_index"]
        resumed = [
            *arguments,
            "--samples",
            end,
            "--checkpoint",
            kept,
            "--record",
            tmp_path / "again",
        ]
        launch(torch_forks, SCRIPT, resumed, world_size=1, folder=tmp_path / "again-job").wait()
        again = lines(tmp_path / "again", 0)
        assert again[0]["sample_index"] < revisions[0]["sample_index"]
        assert again == until[-len(again) :]
    finally:
        for job in jobs:
            job.kill()
        http.close()
        server.kill()
