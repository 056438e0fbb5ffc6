"""What was measured, with the machine, versions and date: kept as JSON, shown as tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"
#: Whose versions decide about speed here.
PACKAGES = (
    "grpcio",
    "protobuf",
    "numpy",
    "torch",
    "pyarrow",
    "gigatoken",
    "tokenizers",
    "xxhash",
    "redis",
)

Figures = dict[str, float]


@dataclass(slots=True, kw_only=True)
class Row:
    """One thing that was measured: ``runs`` has its figures, run by run; units are in their names."""

    name: str
    runs: list[Figures] = field(default_factory=list)
    #: What sets it apart from its neighbours, for curves: ranks, sources, shards, …
    at: dict[str, float] = field(default_factory=dict)
    #: Why there are no figures, or what to know of them.
    note: str = ""

    @property
    def median(self) -> Figures:
        """The median of each figure over the runs that have it."""
        names = list(dict.fromkeys(name for run in self.runs for name in run))
        return {
            name: statistics.median(run[name] for run in self.runs if name in run) for name in names
        }

    def spread(self, figure: str) -> float:
        """(greatest − least) / median of a figure over the runs."""
        values = [run[figure] for run in self.runs]
        return (max(values) - min(values)) / statistics.median(values)


@dataclass(slots=True, kw_only=True)
class Result:
    """The rows of one benchmark, and what they depend on."""

    what: str
    title: str
    rows: list[Row] = field(default_factory=list)
    date: str = ""
    commit: str = ""
    command: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def begin(cls, what: str, title: str, packages: Sequence[str] = PACKAGES) -> Result:
        """An empty result of now, here."""
        return cls(
            what=what,
            title=title,
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            commit=_commit(),
            command=shlex.join(
                ["python", "-m", _module(), *(from_root(word) for word in sys.argv[1:])]
            ),
            machine=_machine(),
            versions=dict(_versions(packages)),
        )

    def row(self, name: str) -> Row:
        """Raises ``KeyError`` where there is none of this name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{self.what}: no row {name!r}; there are {[row.name for row in self.rows]}")

    def save(self, path: Path | None = None) -> Path:
        """Writes ``results/<date>-<what>.json``, or ``path``; a result of the same day is replaced."""
        path = path or FOLDER / f"{self.date[:10]}-{self.what}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        document = asdict(self)
        for row, known in zip(document["rows"], self.rows, strict=True):
            row["median"] = known.median
        path.write_text(
            json.dumps(_rounded(document), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        return path

    @classmethod
    def load(cls, path: Path) -> Result:
        """Reads what ``save`` wrote."""
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = [
            Row(**{key: row[key] for key in ("name", "runs", "at", "note")})
            for row in document.pop("rows")
        ]
        return cls(rows=rows, **document)


def newest(what: str, folder: Path = FOLDER) -> Result:
    """The latest kept result of a benchmark. Raises ``FileNotFoundError`` where none was kept."""
    names = [path for path in folder.glob("*.json") if path.stem[11:] == what]
    if not names:
        raise FileNotFoundError(
            f"{folder} holds no result of {what!r}: run `python -m benchmarks {what}`"
        )
    return Result.load(max(names))


def show(result: Result, columns: Mapping[str, str] | None = None) -> None:
    """Prints medians. ``columns``: heading → figure, in order; all figures if not given."""
    # A log has no width of its own.
    console = Console(width=None if sys.stdout.isatty() else 160)
    shown = columns or {name: name for row in result.rows for name in row.median}
    table = Table(title=f"{result.title} (medians)", title_justify="left")
    table.add_column("")
    for heading in shown:
        table.add_column(heading, justify="right")
    table.add_column("runs", justify="right")
    for row in result.rows:
        median = row.median
        cells = [number(median[name]) if name in median else "" for name in shown.values()]
        table.add_row(row.name, *cells, str(len(row.runs)))
        if row.note:
            table.add_row(f"  {row.note}", style="dim")
    console.print(table)


def from_root(word: str) -> str:
    """A word of a command line without the folder that this repository happens to lie in."""
    return word.replace(f"{ROOT}{os.sep}", "")


def number(value: float) -> str:
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def _rounded(value: Any) -> Any:
    """Five significant digits are more than any of this has; they keep the files small."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


def _module() -> str:
    """How the running program was named to ``python -m``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return str(spec.name).removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).stem


def _commit() -> str:
    """The commit that was measured, with a plus sign where files differ from it."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + (
            "+"
            if _git("status", "--porcelain", "--untracked-files=no", "client", "server", "proto")
            else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def _machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.*)", info)
    return {
        "cpu": model[1] if model else platform.processor(),
        "cores": os.cpu_count() or 0,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def _versions(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in packages:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
