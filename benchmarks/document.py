"""Writes the tables of README.md and docs/ from the kept results: no figure is copied by hand.

    python -m benchmarks.document                   # from the newest benchmarks/results/*.json

A table stands between ``<!-- figures: NAME -->`` and ``<!-- end -->``; the text around it is written by people.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from benchmarks.readers import COLUMNS as READERS_COLUMNS
from benchmarks.results import FOLDER, ROOT, Result, newest, number
from benchmarks.throughput import COLUMNS as THROUGHPUT_COLUMNS
from benchmarks.workloads import WORKLOADS

DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "scale.md")
_BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
#: Tokens per second that somebody may want, and what they are about.
WANTED = {1e6: "1 M", 10e6: "10 M", 50e6: "50 M", 100e6: "100 M", 300e6: "300 M"}
#: Of the ids: what gRPC, the steps' records and the source ids add is below 1 %.
BYTES = {"uint16": 2, "uint32": 4}


def table(result: Result, columns: Mapping[str, str]) -> str:
    """Medians as Markdown. ``columns``: heading → figure; those that no row has are left out."""
    medians = [row.median for row in result.rows]
    shown = {
        heading: name
        for heading, name in columns.items()
        if any(name in median for median in medians)
    }
    lines = [f"| | {' | '.join(shown)} |", "|---|" + "---:|" * len(shown)]
    for row, median in zip(result.rows, medians, strict=True):
        cells = [number(median[name]) if name in median else "" for name in shown.values()]
        note = f"; {row.note}" if row.note else ""
        lines.append(f"| {_about(row.name)}{note} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{source(result)}"


def source(result: Result) -> str:
    """Where a result comes from: runs, command, date, commit."""
    runs = sorted({len(row.runs) for row in result.rows if row.runs})
    many = (
        f"{runs[0]} to {runs[-1]} runs"
        if len(runs) > 1
        else f"{runs[0]} run{'s' if runs[0] > 1 else ''}"
    )
    return f"<sub>Medians of {many}; `{result.command}`, {result.date[:10]}, commit {result.commit}.</sub>"


def machine(result: Result) -> str:
    """On what a result was measured."""
    found = result.machine
    named = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"{found['cores']} cores of {found['cpu']}, {found['memory_gb']:.0f} GB, {found['system']}; {named}."


def _about(name: str) -> str:
    return WORKLOADS[name].about if name in WORKLOADS else name


def _machine(folder: Path) -> str:
    return machine(newest("throughput", folder))


#: Without waits, which a trainer has none of where it computes, and with one figure of memory.
_SHOWN = {
    heading: name
    for heading, name in THROUGHPUT_COLUMNS.items()
    if "wait" not in name and "anonymous" not in name
}


def _throughput(folder: Path) -> str:
    return table(newest("throughput", folder), _SHOWN)


def _variants(folder: Path) -> str:
    return table(newest("variants", folder), _SHOWN)


def _realistic(folder: Path) -> str:
    return table(newest("realistic", folder), _SHOWN)


def _large_run(folder: Path) -> str:
    """A line for the README."""
    near, far = (number(row.median["M tokens/CPU-s"]) for row in newest("realistic", folder).rows)
    return f"A [large run](docs/performance.md#what-a-large-run-costs): **{near}**; over http, 20 ms away, {far}."


def _readers(folder: Path) -> str:
    return table(newest("readers", folder), READERS_COLUMNS)


def _ratios(folder: Path) -> str:
    """One short table for the README: ours, and every peer, on ids and on text."""
    ids, text = newest("peers-ids", folder), newest("peers-text", folder)
    speed = "M tokens/CPU-s"
    ours = {
        row.name: number(row.median[speed])
        for row in (*ids.rows, *text.rows)
        if row.name.startswith("tokenloom")
    }
    lines = [
        "| loader | | ids | ours / it | prepared, ours / it | text | ours / it |",
        "|---|---|---:|---:|---:|---:|---:|",
        f"| **tokenloom** | over the network, packs during the run | **{ours['tokenloom, parquet']}**, prepared "
        f"**{ours['tokenloom, arrow']}** | | | **{ours['tokenloom, text']}** | |",
    ]
    peers = {
        row.name: row
        for row in (*ids.rows, *text.rows)
        if not row.name.startswith(("tokenloom", "prototype"))
    }
    of_ids, of_text = ({row.name: row.median for row in result.rows} for result in (ids, text))
    for name, row in peers.items():
        figures = [
            of_ids.get(name, {}).get(key) for key in (speed, "ours / it", "ours, narrow / it")
        ]
        figures += [of_text.get(name, {}).get(key) for key in (speed, "ours / it")]
        cells = ["" if figure is None else number(figure) for figure in figures]
        note = (
            row.note
            if row.note.startswith(("failed", "does not", "not "))
            else row.note.partition(":")[0]
        )
        lines.append(f"| {name} | {note} | {' | '.join(cells)} |")
    here = machine(
        Result(what="", title="", machine=ids.machine, versions=ids.versions | text.versions)
    )
    return "\n".join(lines) + f"\n\n{source(ids)}\n<sub>{here}</sub>"


def _sizing(folder: Path) -> str:
    """Server cores, memory and bytes per second for tokens per second, from the measured ns per token."""
    result = newest("throughput", folder)
    forms = {"parquet": "int32 Parquet", "arrow": "narrow Arrow", "text": "text"}
    medians = {form: result.row(form).median for form in forms}
    headings = [f"server cores, {name}" for name in forms.values()] + [
        f"MB/s, {kind}" for kind in BYTES
    ]
    lines = [f"| tokens/s wanted | {' | '.join(headings)} |", "|---:|" + "---:|" * len(headings)]
    for tokens, name in WANTED.items():
        cells = [
            number(tokens * median["server ns/token"] / 1e9)
            + "*" * (tokens > median["M tokens/s"] * 1e6)
            for median in medians.values()
        ]
        cells += [number(tokens * size / 1e6) for size in BYTES.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    costs = ", ".join(
        f"{forms[form]} {number(median['server ns/token'])}" for form, median in medians.items()
    )
    memory = ", ".join(
        f"{forms[form]} {number(median['server PSS MB'])}" for form, median in medians.items()
    )
    notes = (
        f"From the server's ns per token above: {costs}. Memory of the server at any of these rates, three sources and "
        f"two ranks, MB: {memory}. *: more than one run reached here, where {result.machine['cores']} cores had the "
        "server and its trainers."
    )
    return "\n".join(lines) + f"\n\n<sub>{notes}</sub>"


BLOCKS: dict[str, Callable[[Path], str]] = {
    "machine": _machine,
    "throughput": _throughput,
    "variants": _variants,
    "realistic": _realistic,
    "large-run": _large_run,
    "readers": _readers,
    "sizing": _sizing,
    "ratios": _ratios,
}


def rendered(text: str, folder: Path) -> tuple[str, list[str]]:
    """The text with every block anew, and why some were left as they are."""
    kept: list[str] = []

    def render(found: re.Match[str]) -> str:
        name = found[2]
        if name not in BLOCKS:
            raise KeyError(f"no figures are called {name!r}; there are {', '.join(BLOCKS)}")
        try:
            return f"{found[1]}{BLOCKS[name](folder)}\n{found[3]}"
        except FileNotFoundError as error:
            kept.append(f"{name}: {error}")
            return found[0]

    return _BLOCK.sub(render, text), kept


def blocks_in(texts: Iterable[str]) -> set[str]:
    """The names of the blocks that documents have."""
    return {found[2] for text in texts for found in _BLOCK.finditer(text)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=FOLDER, help=f"folder of results (default {FOLDER})"
    )
    options = parser.parse_args()
    for path in DOCUMENTS:
        text, kept = rendered(path.read_text(encoding="utf-8"), options.results)
        path.write_text(text, encoding="utf-8")
        print(path)
        for reason in kept:
            print(f"  not written: {reason}")


if __name__ == "__main__":
    main()
