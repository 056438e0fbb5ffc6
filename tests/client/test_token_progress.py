"""Progress by tokens: lines, and a bar on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from typing import Any

import pytest
import torch
from tokenloom import TokenBudget, TokenProgress

BUDGET = TokenBudget(context_length=128, batch_size=4, world_size=2, dataset_samples=1000)


def batch(step: int) -> dict[str, Any]:
    return {"sample_index": 8 * step, "total_tokens": 8 * 128 * step}


def test_a_log_begins_with_the_budget_and_goes_on_with_lines_by_tokens() -> None:
    lines: list[str] = []
    with TokenProgress(BUDGET, write=lines.append, every_s=0) as progress:
        for step in range(1, 61):
            progress.update(batch(step), loss=torch.tensor(2.34561), lr=6e-4, note="warm")

    assert lines[:2] == BUDGET.lines()
    assert lines[2].startswith(
        "Tokens 1.0k, Total 0.8%, Samples 8, Epoch 1, Step 1, Global 1, Loss 2.3456, LR 6.00e-04, Note warm"
    )
    last = re.sub(r", ETA \d+:\d\d$", ", ETA 0:00", lines[-1])
    assert last == (
        "Tokens 61.4k, Total 48.0%, Samples 480, Epoch 1, Step 60, Global 60, Loss 2.3456, LR 6.00e-04, Note warm, "
        "ETA 0:00"
    )


def test_between_two_lines_a_tensor_is_not_read() -> None:
    class Unread:
        def __float__(self) -> float:
            raise AssertionError("a device would have been waited for")

    lines: list[str] = []
    progress = TokenProgress(BUDGET, write=lines.append, every_s=1000)
    progress.update(batch(1), loss=1.0)
    for step in range(2, 50):
        progress.update(batch(step), loss=Unread())
    progress.update(batch(50), loss=3.0)
    progress.close()

    assert [line.split(",")[0] for line in lines] == ["Tokens 1.0k", "Tokens 51.2k"]


def test_the_global_step_goes_on_from_a_checkpoint_whatever_the_batch_size() -> None:
    before = TokenProgress(BUDGET, write=lambda _: None)
    for step in range(1, 11):
        before.update(batch(step))
    lines: list[str] = []
    larger = TokenBudget(context_length=128, batch_size=16, world_size=2, dataset_samples=1000)
    after = TokenProgress(larger, write=lines.append, every_s=0)
    after.load_state_dict(before.state_dict())
    after.update({"sample_index": 112, "total_tokens": 112 * 128})

    assert before.state_dict() == {"global_step": 10}
    assert "Step 1, Global 11" in lines[0]


def test_micro_batches_make_one_step() -> None:
    budget = TokenBudget(
        context_length=128, batch_size=4, world_size=2, accumulate=2, dataset_samples=1000
    )
    lines: list[str] = []
    progress = TokenProgress(budget, write=lines.append, every_s=0)
    for step in range(1, 5):
        progress.update(batch(step), step=step % 2 == 0)

    assert [re.findall(r"Step (\d), Global (\d)", line)[0] for line in lines] == [
        ("0", "1"),
        ("1", "1"),
        ("1", "2"),
        ("2", "2"),
    ]


def test_other_ranks_say_nothing_but_save_the_same_state() -> None:
    said: list[str] = []
    first, second = (
        TokenProgress(BUDGET, rank=rank, write=said.append, every_s=1000) for rank in (0, 1)
    )
    second.start()
    second.update(batch(1))
    second.close()
    assert said == []

    first.update(batch(1))
    assert first.state_dict() == second.state_dict() == {"global_step": 1}


_BAR = """
import sys
from tokenloom import TokenBudget, TokenProgress
budget = TokenBudget(context_length=128, batch_size=4, world_size=2, dataset_samples=1000)
with TokenProgress(budget) as progress:
    for step in range(1, 61):
        progress.update({"sample_index": 8 * step, "total_tokens": 8 * 128 * step}, loss=2.5, lr=6e-4)
"""


def test_on_a_terminal_there_is_a_bar() -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 140))
    process = subprocess.Popen([sys.executable, "-W", "error", "-c", _BAR], stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other side is gone
            break
        shown += piece
    os.close(ours)

    assert process.wait(240) == 0
    text = shown.decode()
    assert text.startswith(BUDGET.lines()[0])
    assert "48%|" in text
    assert "step=60, Loss=2.5000, LR=6.00e-04" in text


def test_a_bar_without_tqdm_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    progress = TokenProgress(BUDGET, bar=True)

    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tokenloom\[progress\]'"):
        progress.update(batch(1))
