"""What readers take off the server: CPU per token of text, in the server's process and in all, by number of readers.

    python -m benchmarks.readers                    # text without, with 1 and with 2 readers; a minute a run
    python -m benchmarks.readers --runs 1 --json /tmp/readers.json

Each measurement is a process of its own, which takes samples as a server's producer does, without ranks. Readers are
those of ``tokenloom serve --readers local:N``: all processes of their Ray cluster count. Ids stand beside.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file
from tokenloom_server.order import builder

from benchmarks.processes import cpu_s, memory_mb
from benchmarks.results import FOLDER, PACKAGES, ROOT, Result, Row, show
from benchmarks.workloads import SEQUENCE_LENGTH, WORKLOADS

#: Tokens before the window, and in it: nearly all that the text has, which is read once.
WARM_UP_TOKENS, TOKENS = 10_000_000, 110_000_000
SAMPLES = 256
#: Workload and readers.
CASES = {
    "narrow ids in Arrow": ("arrow", 0),
    "text, no readers": ("text", 0),
    "text, 1 reader": ("text", 1),
    "text, 2 readers": ("text", 2),
}
COLUMNS = {name: name for name in ("leader ns/token", "all ns/token", "M tokens/s", "all PSS MB")}


def take(workload: str, readers: int) -> dict[str, float]:
    """Takes samples in this process, with so many readers; 0: reads files itself."""
    with tempfile.TemporaryDirectory(prefix="tl", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder
        path = Path(folder) / "text.yaml"
        path.write_text(yaml.safe_dump(WORKLOADS[workload].document()), encoding="utf-8")
        order = builder.create(mixture_file.load(path, open_catalog()), path.parent, None)
        asked = None
        if readers:
            from tokenloom_server.workers.cluster.readers.link import RayReaders, ReaderOptions

            asked = RayReaders(ReaderOptions(local_cpus=readers))
            asked.check(order)
            order.resources.readers = asked
        # As the server does.
        gc.set_threshold(50_000)
        pipeline = order.pipeline(order.initial(), ahead=True)
        for _ in range(WARM_UP_TOKENS // (SAMPLES * SEQUENCE_LENGTH)):
            pipeline.advance(SAMPLES)
        own, everyone, began, tokens = time.process_time(), cpu_s(os.getpid()), time.monotonic(), 0
        while tokens < TOKENS and pipeline.ended is None:
            pipeline.advance(SAMPLES)
            tokens += SAMPLES * SEQUENCE_LENGTH
        seconds = time.monotonic() - began
        own, everyone = time.process_time() - own, cpu_s(os.getpid()) - everyone
        assert pipeline.ended is None, "the text ended within the window"
        found = {"leader ns/token": own / tokens * 1e9, "all ns/token": everyone / tokens * 1e9}
        found |= {"M tokens/s": tokens / seconds / 1e6, "all PSS MB": memory_mb(os.getpid())[0]}
        if asked is not None:
            found["asked again"] = float(asked.counts(order.resources).asked_again.total())
            # Threads that read ahead wait for what nobody brings any more.
            order.resources.io_stats.stop()
            asked.close()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="of each, in turn (default 3)")
    parser.add_argument("--json", type=Path, help=f"where the result goes (default below {FOLDER})")
    parser.add_argument("--take", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.take is not None:
        print(json.dumps(take(options.take[0], int(options.take[1]))))
        return
    result = Result.begin("readers", "samples made, without ranks", (*PACKAGES, "ray"))
    for name, (_, readers) in CASES.items():
        result.rows.append(Row(name=name, at={"readers": readers}))
    for _ in range(options.runs):
        for row in result.rows:
            command = [
                sys.executable,
                "-m",
                "benchmarks.readers",
                "--take",
                *map(str, CASES[row.name]),
            ]
            done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
            row.runs.append(json.loads(done.stdout.splitlines()[-1]))
    show(result, COLUMNS)
    print(f"written to {result.save(options.json)}")


if __name__ == "__main__":
    main()
