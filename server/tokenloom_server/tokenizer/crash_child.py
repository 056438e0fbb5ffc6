"""Encodes texts in a process of its own, one after the other: where that dies, it is known at which text.

``python -m tokenloom_server.tokenizer.crash_child``: a JSON line with the tokeniser, then the texts as an Arrow
stream, come in; for each text its number goes out before it is encoded, and its ids after that.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources.child_process import ChildProcess, end_with_parent
from tokenloom_server.tokenizer.choose import EngineRecord, load_engine, other_engine
from tokenloom_server.tokenizer.definition import find_tokenizer
from tokenloom_server.tokenizer.engine import Engine, Ids, SpecialTokensInText

#: For about a mebibyte of text, which takes a second; and to start, and to load a large vocabulary. What takes
#: longer counts as dead.
DEADLINE_S = 120.0

_BEGUN, _DONE = 1, 2
_FRAME = struct.Struct("<Bq")

Which = Literal["own", "other"]


class Outcome(NamedTuple):
    """``ids`` of the first texts; ``death``: how the process died at the text after these, None where it did not."""

    ids: list[Ids]
    death: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEncoder:
    """Encodes with a run's tokeniser in a child process."""

    tokenizer: str
    base_dir: Path
    record: EngineRecord
    special_tokens_in_text: SpecialTokensInText
    chat: bool
    """Whether the run's tokeniser has its chat template with it."""

    def encode(self, texts: pa.LargeStringArray, which: Which) -> Outcome:
        """Encodes with the run's own engine or with the other one, without a check of one by the other.

        Raises ``TokenizerError`` for what the engine itself refuses.
        """
        header = asdict(self) | {"base_dir": str(self.base_dir), "which": which}
        sink = pa.BufferOutputStream()
        batch = pa.record_batch([texts], names=["text"])
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        sent = json.dumps(header).encode() + b"\n" + sink.getvalue().to_pybytes()
        pipe = subprocess.PIPE
        with ChildProcess("tokenloom_server.tokenizer.crash_child", stdin=pipe, stdout=pipe, stderr=pipe) as child:
            try:
                out, said = child.communicate(sent, DEADLINE_S)
                death = _death(child.returncode)
            except subprocess.TimeoutExpired:
                child.kill()
                out, said = child.communicate()
                death = f"did not end within {DEADLINE_S:g} s"
        ids, begun = _read(out)
        if death is None and len(ids) == len(texts):
            return Outcome(ids, None)
        if death is None or not begun:
            # It ended by itself, or before the first text: that is no text's fault.
            last = said.decode(errors="replace").strip().rpartition("\n")[2]
            reason = last or death or "it gave too few texts"
            raise TokenizerError(f"a tokeniser in a process of its own failed: {reason}")
        return Outcome(ids, death)


def _death(status: int) -> str | None:
    if status >= 0:
        return None
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _read(out: bytes) -> tuple[list[Ids], bool]:
    """The ids that came, and whether a text was begun after the last of them."""
    encoded: list[Ids] = []
    begun, position = False, 0
    while position + _FRAME.size <= len(out):
        kind, count = _FRAME.unpack_from(out, position)
        position += _FRAME.size
        if kind == _BEGUN:
            begun = True
            continue
        if position + 4 * count > len(out):
            break
        encoded.append(np.frombuffer(out, np.uint32, count, position))
        begun, position = False, position + 4 * count
    return encoded, begun


def _serve() -> None:
    import resource

    end_with_parent(sys.argv[-1])
    # It may be about to crash: no image of it is wanted.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, out = sys.stdin.buffer, sys.stdout.fileno()
    request = json.loads(source.readline())
    definition = find_tokenizer(request["tokenizer"], Path(request["base_dir"]), chat=request["chat"])
    record = EngineRecord(**request["record"])
    special = request["special_tokens_in_text"]
    engine: Engine
    if request["which"] == "own":
        engine = load_engine(definition, record, special, check_one_in=0)
    else:
        engine = other_engine(definition, record, special)
    texts = pa.ipc.open_stream(source.read()).read_next_batch().column(0)
    for number in range(len(texts)):
        _write(out, _FRAME.pack(_BEGUN, number))
        ids = np.asarray(engine.encode(texts[number : number + 1]).values, np.uint32)
        _write(out, _FRAME.pack(_DONE, len(ids)) + ids.tobytes())


def _write(out: int, data: bytes) -> None:
    # Past Python's buffers, which die with the process.
    while data:
        data = data[os.write(out, data) :]


if __name__ == "__main__":
    _serve()
