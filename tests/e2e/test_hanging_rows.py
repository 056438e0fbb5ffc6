"""Rows at which a tokeniser, a chat template or a user's function never ends: the server does, and leaves nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import yaml
from conftest import StartServer
from support.server_process import ServerProcess
from support.trainer import World
from support.waiting import wait_for
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

#: What makes each of them hang, and sources that have it behind the rows that are looked at when a run is created.
HANGS = {
    "chat": ("for ever", {"source": "jsonl:chat.jsonl:text", "template": "chat"}),
    "transform": (
        "asleep",
        {"source": "jsonl:transform.jsonl:text", "transform": "functions:sleeps"},
    ),
    "tokenizer": ("x" * 3000, {"source": "jsonl:tokenizer.jsonl:text"}),
}
TEMPLATE = """{% generation %}{% for message in messages %}{{ message.content }}{% if 'for ever' in message.content %}
{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}{% endgeneration %}
"""
FUNCTIONS = """
import pathlib, subprocess, time

def sleeps(batch):
    if any("asleep" in text for text in batch["text"].to_pylist()):
        pathlib.Path("asleep").touch()
        subprocess.run(["sleep", "1000"])
    return batch
"""


@pytest.fixture
def mixtures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A run for each of them."""
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex("x+x+y"), "isolated"), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.train_from_iterator(
        ["text"],
        BpeTrainer(
            special_tokens=["<|endoftext|>"],
            initial_alphabet=ByteLevel.alphabet(),
            vocab_size=300,
            show_progress=False,
        ),
    )
    Path("tokenizer").mkdir()
    tokenizer.save("tokenizer/tokenizer.json")
    Path("tokenizer/tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    Path("tokenizer/chat_template.jinja").write_text(TEMPLATE)
    Path("functions.py").write_text(FUNCTIONS)
    for kind, (mark, source) in HANGS.items():
        texts = [f"{row} {'lorem ' * 250}" for row in range(3000)]
        texts[2500] += mark
        rows = [[{"role": "user", "content": text}] if kind == "chat" else text for text in texts]
        Path(f"{kind}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        document = {
            "run": kind,
            "tokenizer": "tokenizer",
            "sequence_length": 2048,
            "packing": "best_fit",
        }
        document |= {"pack_window_tokens": 100_000}
        document["mixture"] = {"policy": "sequential", "children": [source]}
        Path(f"{kind}.yaml").write_text(yaml.safe_dump(document))
    return [tmp_path / f"{kind}.yaml" for kind in HANGS]


def processes() -> Iterator[tuple[int, int, int]]:
    """Those that are alive: id, parent, and clock ticks of CPU time."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                yield int(path.parent.name), int(fields[1]), int(fields[11])


def hang(server: ServerProcess, trainers: ExitStack) -> set[int]:
    """Has all three hang; gives what the server has started, and what that has."""
    Path("asleep").unlink(missing_ok=True)
    for run in HANGS:
        trainers.enter_context(World(server.url(run), 1, 16, resume="fresh")).steps(1)
    wait_for(Path("asleep").exists, "the function")
    children = {pid for pid, parent, _ in processes() if parent == server.pid}
    wait_for(
        lambda: any(pid in children and ticks > 150 for pid, _, ticks in processes()),
        "the template",
    )
    return children | {pid for pid, parent, _ in processes() if parent in children}


@pytest.mark.skipif(sys.platform != "linux", reason="sees processes in /proc")
def test_a_server_ends_while_rows_hang_and_leaves_no_process(
    mixtures: list[Path], start_server: StartServer
) -> None:
    server = start_server(*mixtures, flags=("--allow-transforms", "functions:sleeps"))
    for end in (server.kill, server.terminate):
        with ExitStack() as trainers:
            left = hang(server, trainers)
            assert len(left) >= 3
            assert end() in (None, 0)
        wait_for(
            lambda left=left: left.isdisjoint(pid for pid, *_ in processes()),
            "the end of its processes",
        )
        if end == server.kill:
            server.start()
