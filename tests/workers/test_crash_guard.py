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
from tokenloom_server.workers.crashes import CrashGuard, EngineDescription

#: Makes both engines die of a text, or while they are loaded, wherever Python starts.
_SITE = """
import os
import sys
from tokenloom_server.tokenizer import engine

def die():
    print(os.environ["LAST_WORDS"], file=sys.stderr, flush=True)
    os.kill(os.getpid(), int(os.environ["DEATH"]))

def deadly(kind):
    encode, init = kind.encode, kind.__init__
    def encoded(self, texts):
        if "deadly" in texts[0].as_py():
            die()
        return encode(self, texts)
    def made(self, *args, **kwargs):
        if "LOADING" in os.environ:
            die()
        init(self, *args, **kwargs)
    kind.encode, kind.__init__ = encoded, made

deadly(engine.GigatokenEngine)
deadly(engine.TokenizersEngine)
"""


def guard_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    death: signal.Signals,
    last_words: str = "",
    loading: bool = False,
) -> CrashGuard:
    (folder / "sitecustomize.py").write_text(_SITE)
    write_tokenizer(folder / "tokenizer.json", ["one two"])
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    )
    monkeypatch.setenv("DEATH", str(int(death)))
    monkeypatch.setenv("LAST_WORDS", last_words)
    if loading:
        monkeypatch.setenv("LOADING", "1")
    definition = find_tokenizer("tokenizer.json", folder)
    engine = TokenizersEngine(definition, "parse")
    record = astuple(EngineRecord(definition.digest, engine.name, engine.version))
    description = EngineDescription("tokenizer.json", str(folder), False, "parse", record)
    return CrashGuard(
        engine, description, None, source_id=0, spec="a", shard_paths=["b"], skip_bad=True
    )


def test_a_crash_of_both_engines_makes_a_bad_row_and_the_others_have_their_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = guard_of(tmp_path, monkeypatch, signal.SIGSEGV)
    encoded, bad = guard.encode(arrays.strings(["one", "deadly", "two"]), 7, 0)
    assert [(row.position, "row 8: a process that encodes" in row.reason) for row in bad] == [
        (1, True)
    ]
    expected = TokenizersEngine(find_tokenizer("tokenizer.json", tmp_path), "parse").encode(
        arrays.strings(["one", "", "two"])
    )
    assert (encoded.values.tolist(), encoded.ends.tolist()) == (
        expected.values.tolist(),
        expected.ends.tolist(),
    )


@pytest.mark.parametrize(
    ("death", "last_words", "loading", "says"),
    [
        (
            signal.SIGKILL,
            "",
            False,
            r"row 8: a tokeniser in a process of its own failed: .* ended with -9",
        ),
        (
            signal.SIGABRT,
            "memory allocation of 64 bytes failed",
            False,
            r"row 8: .* had no memory left",
        ),
        (signal.SIGILL, "", True, r"row 7: a process that loads the tokeniser was ended by SIGILL"),
    ],
    ids=["killed", "no memory", "while it loads"],
)
def test_what_no_document_does_is_an_error_that_names_the_row_and_skips_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    death: signal.Signals,
    last_words: str,
    loading: bool,
    says: str,
) -> None:
    guard = guard_of(tmp_path, monkeypatch, death, last_words, loading)
    with pytest.raises(TokenizerError, match=says):
        guard.encode(arrays.strings(["one", "deadly", "two"]), 7, 0)
