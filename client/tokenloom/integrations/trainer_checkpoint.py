"""Checkpoints of Hugging Face's ``Trainer`` that have the state of their data: one more file in each folder."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("tokenloom")

#: The file of a checkpoint that holds the state of its data.
STATE_FILE = "tokenloom.json"
#: What Trainer writes last into a checkpoint, once every rank has written its part.
TRAINER_STATE_FILE = "trainer_state.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint in a folder that was saved whole, for ``train(resume_from_checkpoint=…)``; None where there
    is none. One that a job was killed in the midst of is left out."""
    folder = Path(output_dir)
    checkpoints = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _FOLDER.fullmatch(path.name)) and path.is_dir()
    ]
    for _, path in sorted(checkpoints, reverse=True):
        try:
            step_of(path)
            return str(path)
        except (OSError, ValueError, KeyError):
            log.warning("%s was not saved to the end and is left out", path)
    return None


def step_of(checkpoint: Path) -> int:
    """Trainer's number of optimiser steps at a checkpoint that was saved whole."""
    return int(
        json.loads((checkpoint / TRAINER_STATE_FILE).read_text(encoding="utf-8"))["global_step"]
    )


def write_state(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Before Trainer writes its own files: as long as its last one is missing, the checkpoint does not count as
    whole."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / TRAINER_STATE_FILE).unlink(missing_ok=True)  # of an earlier attempt
    part = checkpoint / f"{STATE_FILE}.part"
    part.write_text(json.dumps(state), encoding="utf-8")
    part.replace(checkpoint / STATE_FILE)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What ``write_state`` wrote. Raises ``ValueError`` where there is none, or another thing."""
    path = checkpoint / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} is not there: this checkpoint was saved without the state of its data, so where they go on is not "
            f'known. If it is, put it into that file: a dataset\'s state_dict() as JSON, or {{"sample_index": N}}'
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{path} is no JSON ({error}); expected what RemoteDataset.state_dict() gave"
        ) from None
    if not isinstance(state, dict):
        raise ValueError(
            f"{path} holds a {type(state).__name__}; expected what RemoteDataset.state_dict() gave"
        )
    return state
