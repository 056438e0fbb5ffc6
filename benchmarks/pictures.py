"""Draws the pictures of docs/performance.md and docs/scale.md from the kept results.

    python -m benchmarks.pictures                   # docs/img/*.svg from the newest benchmarks/results/*.json

Needs matplotlib, which is one of the project's development dependencies. Colours and lines are readable on light and
on dark pages: the background is transparent, and nothing is black or white.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks.results import FOLDER, ROOT, Result, Row, newest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES = ROOT / "docs" / "img"
INK = "#7a828e"
GRID = "#7a828e40"
#: Distinct for all eyes and on both grounds (after Okabe and Ito).
COLOURS = ("#0a84c6", "#e08700", "#009e73", "#cc5a9b", "#9a7d0a")
STYLE: Any = {
    # Text stays text: small files, and readable diffs.
    "svg.fonttype": "none",
    # The same picture is the same file.
    "svg.hashsalt": "tokenloom",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 5,
}
#: In this order, in these colours.
FORMS = {
    "parquet": "int32 ids in Parquet",
    "arrow": "narrow ids in Arrow",
    "text": "text",
}  #: Of a network card of 25 Gbit/s, per second.
NIC_BYTES = 25e9 / 8


@contextmanager
def _picture(path: Path, panels: int) -> Iterator[Sequence[Axes]]:
    """Axes side by side; the file is written at the end."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    with mpl.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, panels, figsize=(4.2 * panels, 3.1), squeeze=False)
        yield list(axes[0])
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def _line(axes: Axes, rows: Sequence[Row], over: str, figure: str, label: str, colour: str) -> None:
    rows = [row for row in rows if over in row.at and figure in row.median]
    rows = sorted(rows, key=lambda row: row.at[over])
    sizes = [row.at[over] for row in rows]
    axes.plot(sizes, [row.median[figure] for row in rows], "o-", color=colour, label=label)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    axes.set_xticks([], minor=True)


def _by_form(result: Result) -> Iterator[tuple[str, str, list[Row]]]:
    """(label, colour, rows) of each form that the result has."""
    for (form, label), colour in zip(FORMS.items(), COLOURS, strict=False):
        rows = [row for row in result.rows if row.name.startswith(form)]
        if rows:
            yield label, colour, rows


def _axis(axes: Axes, label: str, title: str, *, log: bool = False) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(label)
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _against_size(result: Result, path: Path, over: str, label: str) -> None:
    """Throughput, memory and start by size."""
    with _picture(path, 3) as (speed, memory, start):
        for name, colour, rows in _by_form(result):
            _line(speed, rows, over, "M tokens/CPU-s", name, colour)
            _line(memory, rows, over, "server anonymous MB", name, colour)
            _line(start, rows, over, "next start s", name, colour)
        _axis(speed, label, "M tokens per CPU-second, both ends")
        _axis(memory, label, "server, anonymous memory, MB")
        _axis(start, label, "start of a known run, s")
        speed.legend()


def shards(path: Path, folder: Path) -> None:
    _against_size(newest("scale-shards", folder), path, "shards", "shards per source")


def sources(path: Path, folder: Path) -> None:
    _against_size(newest("scale-sources", folder), path, "sources", "sources")


def rows(path: Path, folder: Path) -> None:
    _against_size(newest("scale-rows", folder), path, "rows", "rows, millions")


def ranks(path: Path, folder: Path) -> None:
    """The server's throughput, memory and the gap between a rank's messages, by world size."""
    result = newest("many-ranks", folder)
    with _picture(path, 3) as (speed, memory, gap):
        _line(speed, result.rows, "ranks", "M tokens/server CPU-s", "", COLOURS[0])
        _line(memory, result.rows, "ranks", "server PSS MB", "all (PSS)", COLOURS[0])
        _line(memory, result.rows, "ranks", "server anonymous MB", "anonymous", COLOURS[1])
        _line(gap, result.rows, "ranks", "gap p50 ms", "p50", COLOURS[0])
        _line(gap, result.rows, "ranks", "gap p99 ms", "p99", COLOURS[1])
        _axis(speed, "ranks", "M tokens per CPU-second of the server")
        _axis(memory, "ranks", "server memory, MB")
        _axis(gap, "ranks", "between two messages of a rank, ms", log=True)
        memory.legend()
        gap.legend()


def mixer(path: Path, folder: Path) -> None:
    """Nanoseconds per sample by number of sources."""
    result = newest("mixer", folder)
    with _picture(path, 1) as (axes,):
        for number, policy in enumerate(("least_consumed", "weighted")):
            for nested in (0.0, 1.0):
                found = [
                    row
                    for row in result.rows
                    if row.name.startswith(policy) and row.at["nested"] == nested
                ]
                label = f"{policy}, {'nested' if nested else 'flat'}"
                _line(axes, found, "sources", "ns/sample", label, COLOURS[2 * number + int(nested)])
        _axis(axes, "sources", "mixer: ns per sample of 2,048 tokens")
        axes.legend(fontsize=8)


def restore(path: Path, folder: Path) -> None:
    """Restore to first batch by where in the data the state stands."""
    result = newest("latency", folder)
    places = ("begin", "middle", "end")
    with _picture(path, 1) as (axes,):
        for number, data in enumerate(
            dict.fromkeys(_data(row) for row in result.rows if _place(row) in places)
        ):
            found = {_place(row): row.median for row in result.rows if _data(row) == data}
            values = [found[place]["by state ms"] for place in places if place in found]
            axes.plot(
                places[: len(values)],
                values,
                "o-",
                color=COLOURS[number % len(COLOURS)],
                label=data,
            )
        _axis(
            axes, "where the state stands in the data", "Join with a state, to the first batch, ms"
        )
        axes.legend(fontsize=8)


def peers(path: Path, folder: Path) -> None:
    """Tokens per CPU-second of Tokenloom and of the other loaders."""
    with _picture(path, 2) as panels:
        for axes, data in zip(panels, ("ids", "text"), strict=True):
            found = [row for row in newest(f"peers-{data}", folder).rows if row.runs]
            found = [row for row in found if not row.name.startswith("prototype")]
            found.sort(key=lambda row: row.median["M tokens/CPU-s"])
            colours = [COLOURS[0] if row.name.startswith("tokenloom") else INK for row in found]
            bars = axes.barh(
                [row.name for row in found],
                [row.median["M tokens/CPU-s"] for row in found],
                color=colours,
            )
            axes.bar_label(bars, fmt="%.3g", padding=3, color=INK, fontsize=8)
            axes.grid(axis="y", visible=False)
            axes.margins(x=0.15)
            title = {"ids": "ids (W1)", "text": "text (W2)"}[data]
            axes.set_title(f"{title}: M tokens per CPU-second", loc="left", fontsize=10)


def readers(path: Path, folder: Path) -> None:
    """Tokens per second of text by number of readers: measured, and beyond by the CPU that one token took."""
    rows = [row for row in newest("readers", folder).rows if row.name.startswith("text")]
    cost = rows[-1].median
    leader, reader = (
        1e3 / ns for ns in (cost["leader ns/token"], cost["all ns/token"] - cost["leader ns/token"])
    )
    counts = 2 ** np.arange(9)
    with _picture(path, 1) as (axes,):
        for found, colour, label in (
            (rows[:1], COLOURS[1], "measured, no readers"),
            (rows[1:], COLOURS[0], "measured"),
        ):
            cpus = [row.at["readers"] or 1 for row in found]
            axes.plot(
                cpus, [row.median["M tokens/s"] for row in found], "o-", color=colour, label=label
            )
        many = np.geomspace(1, counts[-1], 65)
        axes.plot(many, np.minimum(many * reader, leader), "--", color=COLOURS[0], label="modelled")
        axes.axhline(
            NIC_BYTES / 2 / 1e6, linestyle=":", color=COLOURS[3], label="25 Gbit/s of uint16 ids"
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        _axis(axes, "CPUs of readers", "text: M tokens per second", log=True)
        axes.legend(fontsize=8)


def places(path: Path, ways: Mapping[str, npt.NDArray[np.int64]], points: int) -> None:
    """Where the samples of an order lie in the files, a panel for each way to read them; so many points in each."""
    with _picture(path, len(ways)) as panels:
        for axes, (way, found) in zip(panels, ways.items(), strict=True):
            at = np.linspace(0, len(found) - 1, min(points, len(found))).astype(np.int64)
            # As dots of an image: as lines of text they would be a megabyte.
            axes.plot(at, found[at], ".", markersize=2, color=COLOURS[0], rasterized=True)
            axes.set_title(way, loc="left", fontsize=10)
            axes.set_xlabel("sample")
            axes.set_ylabel("its place in the files")


def _data(row: Row) -> str:
    return (
        row.name.removeprefix("restore: ").partition(", ")[0]
        if row.name.startswith("restore: ")
        else ""
    )


def _place(row: Row) -> str:
    return row.name.rpartition(", ")[2]


PICTURES: dict[str, Callable[[Path, Path], None]] = {
    draw.__name__: draw for draw in (shards, sources, rows, ranks, mixer, restore, peers, readers)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pictures", nargs="*", metavar="PICTURE", help=f"of {', '.join(PICTURES)}; all if not given"
    )
    parser.add_argument(
        "--results", type=Path, default=FOLDER, help=f"folder of results (default {FOLDER})"
    )
    parser.add_argument(
        "--into", type=Path, default=IMAGES, help=f"folder for pictures (default {IMAGES})"
    )
    options: Any = parser.parse_args()
    unknown = set(options.pictures) - set(PICTURES)
    if unknown:
        parser.error(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    for name in options.pictures or PICTURES:
        path = options.into / f"{name}.svg"
        try:
            PICTURES[name](path, options.results)
            print(path)
        except FileNotFoundError as error:
            print(f"{name}: not drawn: {error}")


if __name__ == "__main__":
    main()
