"""Which deaths of a process count against the document at which it was: crashes of native code, and no others."""

from __future__ import annotations

import os
import signal
from dataclasses import astuple
from pathlib import Path

import pytest
from support.prepared import write_tokenizer
from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.tokenizer.choose import EngineRecord
from tokenloom_server.tokenizer.definition import find_tokenizer
from tokenloom_server.tokenizer.engine import TokenizersEngine
from tokenloom_server.workers.crash_guard import CrashGuard, EngineDescription

#: Makes both engines die of a text, wherever Python starts.
_SITE = """
import os
from tokenloom_server.tokenizer import engine

def deadly(kind):
    encode = kind.encode
    def encoded(self, texts):
        if "deadly" in texts[0].as_py():
            os.kill(os.getpid(), int(os.environ["DEATH"]))
        return encode(self, texts)
    kind.encode = encoded

deadly(engine.GigatokenEngine)
deadly(engine.TokenizersEngine)
"""


def guard_of(folder: Path, monkeypatch: pytest.MonkeyPatch, death: signal.Signals) -> CrashGuard:
    (folder / "sitecustomize.py").write_text(_SITE)
    write_tokenizer(folder / "tokenizer.json", ["one two"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("DEATH", str(int(death)))
    definition = find_tokenizer("tokenizer.json", folder)
    engine = TokenizersEngine(definition, "parse")
    record = astuple(EngineRecord(definition.digest, engine.name, engine.version))
    description = EngineDescription("tokenizer.json", str(folder), False, "parse", record)
    return CrashGuard(engine, description, None, source_id=0, spec="a", shard_paths=["b"], skip_bad=True)


def test_a_crash_of_both_engines_makes_a_bad_row_and_the_others_have_their_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = guard_of(tmp_path, monkeypatch, signal.SIGSEGV)
    encoded, bad = guard.encode(arrays.strings(["one", "deadly", "two"]), 7, 0)
    assert [(row.position, "row 8: a process that encodes" in row.reason) for row in bad] == [(1, True)]
    expected = TokenizersEngine(find_tokenizer("tokenizer.json", tmp_path), "parse").encode(
        arrays.strings(["one", "", "two"])
    )
    assert (encoded.values.tolist(), encoded.ends.tolist()) == (expected.values.tolist(), expected.ends.tolist())


def test_a_kill_is_an_error_that_names_the_row_and_skips_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = guard_of(tmp_path, monkeypatch, signal.SIGKILL)
    with pytest.raises(TokenizerError, match=r"row 8: a tokeniser in a process of its own failed: .* ended with -9"):
        guard.encode(arrays.strings(["one", "deadly", "two"]), 7, 0)
