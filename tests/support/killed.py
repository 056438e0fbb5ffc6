"""A training script that is killed and goes on, against the same one left alone.

The scripts are the examples, as they are. Each takes the run's URL, ``--checkpoint FOLDER`` (saved every few steps,
and gone on from where it is there), ``--record FILE`` (to which rank 0 adds a JSON line for each optimiser step, with
``sample_index``, ``digest``, ``loss`` and ``lr``), ``--batch-size`` (samples per rank and step) and ``--samples`` (of
the whole run, at which it ends).
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from .forks import Forks
from .scripts import Job, launch
from .served import url_of

EXAMPLES = Path(__file__).parents[2] / "examples"
#: So long a script may take to its first steps.
STEPS_DEADLINE_S = 400.0

#: Not what any example might take for granted: its model and its schedule are to follow the run.
FORM = {"sequence_length": 96, "vocab_size": 1000}


@dataclass(frozen=True, slots=True)
class Step:
    """A line of a record."""

    sample_index: int
    digest: str
    loss: float
    lr: float


@contextmanager
def two_runs(folder: Path, **fields: object) -> Iterator[tuple[str, str]]:
    """A server of two runs that give the same samples: the URL of the one to leave alone, and of the one to kill."""
    with same_runs(folder, 2, **fields) as (alone, killed):
        yield alone, killed


@contextmanager
def same_runs(folder: Path, count: int, **fields: object) -> Iterator[list[str]]:
    """A server of so many runs that give the same samples: their URLs.

    The mixture is that of ``examples/compose``, of other samples (``FORM``), with ``fields`` in place of its own.
    """
    found = yaml.safe_load((EXAMPLES / "compose" / "mixture.yaml").read_text(encoding="utf-8"))
    data = folder / "server"
    data.mkdir(parents=True)
    (data / "data").symlink_to((EXAMPLES / "compose" / "data").resolve())
    paths = []
    runs = [f"run-{number}" for number in range(count)]
    for run in runs:
        path = data / f"{run}.yaml"
        path.write_text(yaml.safe_dump(found | FORM | fields | {"run": run}), encoding="utf-8")
        paths.append(path)
    with url_of(data, *paths) as url:
        yield [f"{url}/{run}" for run in runs]


def steps_of(record: Path) -> list[Step]:
    """The lines of a record, half a line at its end left out."""
    if not record.exists():
        return []
    lines = map(json.loads, record.read_text(encoding="utf-8").split("\n")[:-1])
    return [Step(line["sample_index"], line["digest"], line["loss"], line["lr"]) for line in lines]


def kill_and_resume(
    forks: Forks,
    script: Path,
    urls: tuple[str, str],
    folder: Path,
    *,
    world_size: int = 2,
    resumed_world_sizes: Sequence[int] = (2,),
    global_batch_size: int = 8,
    samples: int = 112,
    first_steps: int = 6,
    arguments: Sequence[object] = (),
    environment: Mapping[str, str] | None = None,
    alone: Sequence[Step] | None = None,
    processes_per_rank: int = 1,
) -> list[Step]:
    """Asserts that a script which is killed at a random step and goes on, each time anew on so many ranks, has the
    digests, losses and learning rates of one that was left alone: those of all its steps, the ones that it did twice
    included.

    With another world size the same samples make a step; losses are the same but for the order of a sum.

    World sizes are numbers of processes, of which ``processes_per_rank`` hold a model together.

    Returns the steps of the one that was left alone. Where these are given (``alone``, of the same script with other
    arguments, which are to make no difference), it is not run.
    """

    def start(url: str, name: str, ranks: int) -> tuple[Path, Job]:
        record = folder / f"{name}.jsonl"
        given = [
            "--checkpoint",
            folder / f"{name}-checkpoint",
            "--record",
            record,
            "--samples",
            samples,
        ]
        given += ["--batch-size", global_batch_size // (ranks // processes_per_rank), *arguments]
        job = launch(
            forks,
            script,
            [url, *given],
            world_size=ranks,
            folder=folder / name,
            environment=environment,
        )
        return record, job

    if alone is None:
        record, job = start(urls[0], "alone", world_size)
        job.wait()
        alone = steps_of(record)
    assert len(alone) == samples // global_batch_size, (
        "the script that was left alone did not do all steps"
    )
    assert all(step.lr > 0 for step in alone[:-1]), (
        "its learning rate is 0 before the end: its target is another run's"
    )

    seed = random.SystemRandom().randrange(2**32)
    kill_at = random.Random(seed).randint(
        first_steps, first_steps + 2
    )  # long before the end, however slow we are
    record, job = start(urls[1], "killed", world_size)
    deadline = time.monotonic() + STEPS_DEADLINE_S
    while len(before := steps_of(record)) < kill_at:
        if any(status is not None for status in job.statuses()) or time.monotonic() > deadline:
            job.wait()
            break
        time.sleep(0.002)
    job.kill()
    before = steps_of(record)
    expected = {step.sample_index: step for step in alone}
    told = f"killed behind step {len(before)} (seed {seed}), on {world_size} ranks"
    assert before, f"{told}: it did no step"
    assert len(before) < len(alone), f"{told}: it was not killed midway"
    for step in before:
        assert step == expected[step.sample_index], told

    checkpoint = folder / "killed-checkpoint"
    kept = folder / "kept-checkpoint"
    shutil.copytree(checkpoint, kept)
    for ranks in resumed_world_sizes:
        shutil.rmtree(checkpoint)
        shutil.copytree(kept, checkpoint)
        record.unlink()
        record, job = start(urls[1], "killed", ranks)
        job.wait()
        after = steps_of(record)
        told = f"killed behind step {len(before)} (seed {seed}), on {world_size} ranks; goes on on {ranks}"
        assert after, f"{told}: it did no step"
        assert after[0].sample_index > alone[0].sample_index, (
            f"{told}: it began anew instead of going on"
        )
        assert after[0].sample_index <= before[-1].sample_index + global_batch_size, (
            f"{told}: it left steps out"
        )
        assert [step.sample_index for step in after] == [
            step.sample_index for step in alone if step.sample_index >= after[0].sample_index
        ], f"{told}: its steps are others"
        for step in after:
            same = expected[step.sample_index]
            assert (step.digest, step.lr) == (same.digest, same.lr), (
                f"{told}: at sample {step.sample_index}"
            )
            if ranks == world_size:
                assert step.loss == same.loss, f"{told}: at sample {step.sample_index}"
            else:
                assert abs(step.loss - same.loss) < 1e-4 * abs(same.loss), (
                    f"{told}: at sample {step.sample_index}"
                )
    return list(alone)
