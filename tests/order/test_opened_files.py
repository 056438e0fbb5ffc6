"""How often each of many files is opened: when a run begins, when it is served again, and for the first samples."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from support.corpora import advanced, mixture, parsed, write_jsonl, write_parquet
from tokenloom_server.order import builder

_Out = TypeVar("_Out")

FILES = 40
#: The files and folders that were opened or listed, while somebody asks for that.
_seen: list[str] | None = None


def _note(event: str, arguments: tuple[object, ...]) -> None:
    # Python's own open is followed by one of the operating system's, which has no mode.
    if _seen is not None and (
        event == "os.scandir" or (event == "open" and arguments[1] is not None)
    ):
        _seen.append(str(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def _noting() -> None:
    sys.addaudithook(_note)  # which stays for ever


def looks(folder: Path, work: Callable[[], _Out]) -> tuple[_Out, int]:
    """What the work gives, and how often a file or folder below this one was opened meanwhile."""
    global _seen
    _seen = []
    made = work()
    seen, _seen = _seen, None
    return made, sum(path.startswith(str(folder)) for path in seen)


@pytest.mark.parametrize("shuffle", ["none", "shards", "rows"])
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_file_is_opened_once_for_each_thing_that_is_to_be_known_of_it(
    form: str, shuffle: str, tmp_path: Path
) -> None:
    data, is_parquet = tmp_path / "data", form == "parquet"
    for i in range(FILES):
        path = data / str(i % 2) / f"{i:02}.{form}"
        write_parquet(path, [[i] * 9] * 4) if is_parquet else write_jsonl(path, [f"row {i}"] * 4)
    child = {
        "source": f"{form}:data/*/*.{form}:{'ids' if is_parquet else 'text'}",
        "shuffle": shuffle,
        "epochs": 2,
    }
    child |= {"shuffle_window_rows": 4} if shuffle == "rows" else {}
    config = parsed(mixture(mixture={"policy": "sequential", "children": [child]}))
    places = tmp_path, tmp_path / "index"
    few = 10

    first, opened = looks(data, lambda: builder.create(config, *places))
    # A fingerprint of each; of Parquet also its footer, which says what its columns are and where its rows lie.
    assert opened < FILES * (1 + is_parquet) + few
    # That is all that a shuffle of rows has to know. Lines have to be counted.
    state, opened = looks(data, lambda: advanced(first, first.initial(), 1))
    assert opened < FILES * (shuffle == "rows" and not is_parquet) + few

    again, opened = looks(data, lambda: builder.load(config, *places, first.record.to_json()))
    assert FILES <= opened < FILES + few, "each is compared with what it was"
    same, opened = looks(data, lambda: advanced(again, again.initial(), 1))
    assert opened < few
    assert (same, again.record.to_json()) == (state, first.record.to_json())
