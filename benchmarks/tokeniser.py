"""The floor of text: gigatoken alone, by its own API, over the texts of the workload ``text`` in the run's proportions.

One process reads all texts into memory first; only the calls are timed, of 16 MiB each, in one thread. Unseen text
becomes cheaper the more was seen, so a run is read against the same span of tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import corpora
from benchmarks.results import ROOT

CALL_BYTES = 16 << 20

#: Tokens encoded, and CPU-seconds used for them, after each call.
Mark = tuple[int, float]


def measure() -> list[Mark]:
    """One pass over the corpus, by a process of its own."""
    command = [sys.executable, "-m", "benchmarks.tokeniser", str(corpora.folder_of(corpora.W2))]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [(tokens, cpu_s) for tokens, cpu_s in json.loads(done.stdout)]


def tokens_per_cpu_s(marks: list[Mark], first: float, last: float) -> float:
    """Of the tokens from ``first`` to ``last``."""
    tokens, cpu_s = np.array([(0, 0.0), *marks]).T
    last = min(last, tokens[-1])
    began, ended = np.interp((first, last), tokens, cpu_s)
    return float((last - first) / (ended - began))


def calls(folder: Path) -> Iterator[list[bytes]]:
    """Texts of about ``CALL_BYTES``, by the sources' shares."""
    import pyarrow.parquet as pq

    texts = [
        pq.read_table(folder / "parquet" / str(source)).column("text").to_pylist()
        for source in range(len(corpora.WEIGHTS))
    ]
    ends = [np.cumsum([len(text.encode()) for text in some]) for some in texts]
    number, begins = 0, [0] * len(texts)
    while any(begin < len(some) for begin, some in zip(begins, texts, strict=True)):
        number += 1
        until = [
            max(begin, int(np.searchsorted(end, number * CALL_BYTES * weight)))
            for begin, end, weight in zip(begins, ends, corpora.WEIGHTS, strict=True)
        ]
        yield [
            text.encode()
            for some, begin, end in zip(texts, begins, until, strict=True)
            for text in some[begin:end]
        ]
        begins = until


def encode(folder: Path) -> list[Mark]:
    """All calls on this thread."""
    import gigatoken

    backend: Any = gigatoken.Tokenizer.from_json((folder / "tokenizer.json").read_text()).backend
    marks: list[Mark] = []
    tokens, cpu_s = 0, 0.0
    for texts in list(calls(folder)):
        began = time.thread_time()
        ids = backend.encode_batch(texts, parallel=False)
        cpu_s += time.thread_time() - began
        tokens += len(ids.layout.content.data)
        marks.append((tokens, cpu_s))
    return marks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the corpus")
    print(json.dumps(encode(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
