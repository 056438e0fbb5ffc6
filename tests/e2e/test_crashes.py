"""A document at which the tokeniser crashes takes the server along, twice; then it is found, and got over or named."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Corpus, StartServer
from support.server_process import ServerProcess
from support.trainer import World
from tokenizers import Tokenizer

#: Makes engines crash as native code does, wherever Python starts: in the server, and in what it starts.
_DEADLY = """
import ctypes, os
from tokenloom_server.tokenizer import engine

def deadly(kind):
    encode = kind.encode
    def encoded(self, texts):
        if any("{mark}" in text for text in texts.to_pylist()):
            ctypes.string_at(0)
        return encode(self, texts)
    kind.encode = encoded

for name in os.environ["DEADLY_ENGINES"].split(","):
    deadly(getattr(engine, name))
"""
MARK = "this one kills"
#: Behind the mebibyte that is looked at when the run is created, in the second block of the file.
ROWS, CULPRIT = 2400, 2100


@pytest.fixture
def texts(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A source with a deadly row, and an interpreter that is prone to it."""
    draw = random.Random(5)
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "lazy",
        "dogs",
        "while",
        "tokens",
        "flow",
    ]
    texts = [f"{row} " + " ".join(draw.choices(words, k=110)) for row in range(ROWS)]
    texts[CULPRIT] += MARK
    lines = "\n".join(json.dumps({"body": text}) for text in texts)
    (corpus.folder / "deadly.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        _DEADLY.replace("{mark}", MARK), encoding="utf-8"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    )
    return texts


def start_deadly(corpus: Corpus, start_server: StartServer, run: str) -> ServerProcess:
    mixture = {"policy": "weighted", "children": [{"source": "jsonl:deadly.jsonl:body"}]}
    return start_server(corpus.mixture(run, sequence_length=1024, mixture=mixture), options=())


def outlive_two_deaths(server: ServerProcess) -> None:
    """As a supervisor does that starts it again."""
    for _ in range(2):
        assert server._process is not None
        assert server._process.wait(240) == -signal.SIGSEGV, server.log[-2000:]
        server.kill()
        server.start()


def meanwhile(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_a_document_that_kills_one_engine_is_encoded_by_the_other_and_the_order_stays(
    corpus: Corpus, start_server: StartServer, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEADLY_ENGINES", "GigatokenEngine")
    server = start_deadly(corpus, start_server, "survived")
    with World(server.url("survived"), 1, 8, prefetch_steps=2, reconnect_timeout_s=240) as world:
        world.join()
        supervisor = meanwhile(lambda: outlive_two_deaths(server))
        world.run()
        supervisor.join()
        found = [sample.ids for sample in world.receipt.sequence()]
    tokenizer = Tokenizer.from_file(str(corpus.folder / "tokenizer.json"))
    stream = [token for text in texts for token in [*tokenizer.encode(text).ids, corpus.end_id]]
    expected = [tuple(stream[at : at + 1024]) for at in range(0, len(stream) - 1023, 1024)]
    assert found == expected[: len(found)]
    assert len(expected) - len(found) < 8
    assert "rows " in server.log
    line = next(
        line for line in server.log.splitlines() if "its ids come from the other engine" in line
    )
    for part in (
        "jsonl:deadly.jsonl:body: deadly.jsonl",
        f"row {CULPRIT}:",
        "gigatoken",
        "ended by SIGSEGV",
    ):
        assert part in line
    # An orderly end and another start: the row is known now, and nobody has to die of it again.
    server.terminate()
    server.start()
    with World(server.url("survived"), resume="fresh") as world:
        world.run()
        assert [sample.ids for sample in world.receipt.sequence()] == expected
    index = server.log_path.parent / "index"
    assert [path.name for path in index.glob("survived@*") if path.suffix == ".json"] == [
        "survived@suspects.json"
    ]
