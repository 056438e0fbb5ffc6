"""What a run's history takes: bytes written in a day, bytes kept, and CPU of a point, by number of sources.

    python -m benchmarks.history                              # SQLite, 1, 48 and 200 sources
    python -m benchmarks.history --redis redis://127.0.0.1:6379/0

A day of points, one every ten seconds, of a run in which every figure changes; then as many again of a second day.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from tokenloom_server.ledger.base import HistoryEntry, Ledger
from tokenloom_server.ledger.commands import Acquire
from tokenloom_server.ledger.open import open_ledger
from tokenloom_server.reports.stats import ReportStats, RunStats, SourceStats
from tokenloom_server.run.history import EVERY_S, is_kept, point_text
from tokenloom_server.run.recorder import THIN_EVERY

POINTS_A_DAY = round(86_400 / EVERY_S)


def stats_of(number: int, sources: int, draw: random.Random) -> RunStats:
    """A run at its ``number``-th point, at 20 M tokens/s."""
    total = number * 200_000_000
    own = [
        SourceStats.model_construct(
            tokens=round(total * (1 + draw.random()) / sources),
            target_share=draw.random() / sources,
            expected_share=draw.random() / sources,
            loss=1 + draw.random(),
            epoch=draw.random() * 3,
        )
        for _ in range(sources)
    ]
    return RunStats.model_construct(
        generation=1,
        sample_index=total // 2048,
        total_tokens=total,
        world_size=64,
        tokens_per_s=20e6 * draw.random(),
        data_wait_share=draw.random(),
        window_fill=draw.random(),
        count="positions",
        reported=ReportStats.model_construct(
            loss=1 + draw.random(), learning_rate=draw.random() * 1e-3, step=number
        ),
        sources=own,
    )


def measure(ledger: Ledger, uid: str, sources: int) -> str:
    """Records two days; a line of figures."""
    ledger.create_run(uid, "train", uid, "{}")
    epoch, history, draw = (
        ledger.execute(Acquire(uid, "train", "bench", 3600)),
        ledger.history(),
        random.Random(3),
    )
    assert history is not None
    kept: list[HistoryEntry] = []
    written, cpu = 0, 0.0
    for number in range(2 * POINTS_A_DAY):
        stats = stats_of(number, sources, draw)
        begin = time.process_time()
        entry = HistoryEntry("points", number, number * EVERY_S, point_text(stats))
        kept.append(entry._replace(text=""))
        drop = []
        if number % THIN_EVERY == 0:
            drop = [one for one in kept if not is_kept(one.number, number, sources)]
            kept = [one for one in kept if is_kept(one.number, number, sources)]
        assert history.write(uid, "train", epoch, [entry], drop)
        cpu += time.process_time() - begin
        written += len(entry.text)
    size = sum(len(entry.text) for entry in history.read(uid, "train", kept))
    return (
        f"{sources:>4} sources: {written / 2e6:6.1f} MB of points a day, {len(kept):,} kept after two days in "
        f"{size / 1e6:.1f} MB, {1e3 * cpu / 2 / POINTS_A_DAY:.2f} ms of CPU each"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=int, nargs="*", default=[1, 48, 200])
    parser.add_argument("--redis", help="a Redis to write to; its keys stay")
    options = parser.parse_args()
    for sources in options.sources:
        with tempfile.TemporaryDirectory() as folder:
            ledger = open_ledger(options.redis or "sqlite:///ledger.db", Path(folder))
            line = measure(ledger, f"history-{sources}-{time.time():.0f}", sources)
            ledger.close()
            files = sum(path.stat().st_size for path in Path(folder).glob("ledger.history.db*"))
        print(f"{line}, files of {files / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
