"""``arrow:DIR:COLUMN``: the Arrow files of a folder that ``save_to_disk`` of `datasets` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenloom_proto.files import read_file

from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import ConfigError, SourceError
from tokenloom_server.sources import files
from tokenloom_server.sources.base import Content, Source, TensorFile
from tokenloom_server.sources.locations import listed_names, matching_files, nearest_folder
from tokenloom_server.sources.scheme import ReadRequest, Scheme
from tokenloom_server.storage import listing, pointers
from tokenloom_server.storage.file import File
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.remote import Entry, open_file

#: What a saved dataset says of its files, and a folder of saved datasets of its splits.
STATE, SPLITS = "state.json", "dataset_dict.json"


class ArrowScheme(Scheme):
    """Files of record batches, whose headers say how many rows there are."""

    name = "arrow"
    usage = "arrow:DIR:COLUMN"
    endings = (".arrow",)
    by_folder = True
    reads_any_row = True
    stores_row_counts = True

    def local_paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        """The files in the order that ``state.json`` gives, or else in that of their names."""
        where, folder = f"source {str(spec)!r}", base_dir / spec.location
        if not folder.is_dir():
            fault = "is a file" if folder.exists() else "does not exist"
            raise SourceError(
                f"{where}: {str(folder)!r} {fault}, expected a folder that `save_to_disk` wrote; "
                f"{nearest_folder(folder)}"
            )
        prefix = spec.location.rstrip("/") or "/"
        if (folder / SPLITS).is_file():
            choices = ", ".join(
                repr(f"arrow:{prefix}/{name}:{spec.column}") for name in _splits(folder)
            )
            raise SourceError(
                f"{where}: {str(folder)!r} holds a dataset for each split; name one of them: {choices or 'none found'}"
            )
        state = folder / STATE
        if fault := pointers.fault_at(state):
            raise SourceError(f"{where}: {str(state)!r} {fault}")
        if state.is_file():
            names = _names_in_state(where, str(state), read_file(state))
        else:
            names = _data_files(matching_files("*.arrow", folder))
        if not names:
            raise SourceError(
                f"{where}: no Arrow file in {str(folder)!r}, expected state.json with data-*.arrow, or *.arrow files "
                f"({listed_names(folder)})"
            )
        return tuple(f"{prefix}/{name}" for name in names)

    def remote_entries(self, spec: Spec, io_stats: IoStats) -> Sequence[Entry]:
        where, folder = f"source {str(spec)!r}", spec.location.rstrip("/")
        listed = {
            entry.path.rpartition("/")[2]: entry for entry in listing.folder(folder, io_stats)
        }
        if SPLITS in listed:
            raise SourceError(
                f"{where}: {folder!r} holds a dataset for each split; name one of its folders"
            )
        names = _data_files(listed)
        if STATE in listed:
            state = f"{folder}/{STATE}"
            with open_file(state, Path(), f"{where}: {state!r}", io_stats) as file:
                files.refuse_pointer(file)
                names = _names_in_state(where, state, bytes(file.read_at(0, file.size)))
        if not names:
            raise SourceError(
                f"{where}: no Arrow file in {folder!r}, expected state.json with data-*.arrow, or *.arrow files"
            )
        missing = [name for name in names if name not in listed]
        if missing:
            raise SourceError(
                f"{where}: {folder!r} has no {missing[0]!r}, which its state.json names; upload it whole"
            )
        return [listed[name] for name in names]

    def is_folder(self, folder: Path, path: str) -> bool:
        if (folder / SPLITS).is_file():
            names = ", ".join(f"{path}/{split}" for split in _splits(folder)) or "none found"
            raise ConfigError(
                f"the folder holds a dataset for each split; name one of them: {names}"
            )
        return (folder / STATE).is_file() or any(folder.glob("*.arrow"))

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.arrow.reader import ArrowSource

        return ArrowSource(request)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        from tokenloom_server.sources.arrow.file import open_arrow
        from tokenloom_server.sources.columns import contents_of

        return contents_of(open_arrow(file).schema)

    def open_tensors(self, file: File) -> TensorFile:
        from tokenloom_server.sources.arrow.file import open_tensors

        return open_tensors(file)


def _splits(folder: Path) -> list[str]:
    return sorted(state.parent.name for state in folder.glob(f"*/{STATE}") if state.is_file())


def _names_in_state(where: str, state: str, text: bytes) -> list[str]:
    try:
        document = json.loads(text)
        names = [str(entry["filename"]) for entry in document["_data_files"]]
        indices: Any = document.get("_indices_files") or document.get("_indices_data_files")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"{where}: {state!r} is not the state.json of a saved dataset ({type(error).__name__}: {error})"
        ) from None
    if indices:
        raise SourceError(
            f"{where}: the dataset has an indices mapping (it was shuffled, sorted or selected), so its files are "
            "not in its order; call flatten_indices() on it and save it again"
        )
    return names


def _data_files(names: Iterable[str]) -> list[str]:
    # cache-*.arrow and tmp* are what `datasets` leaves beside the data: results of map and filter.
    arrow_files = sorted(name for name in names if name.endswith(".arrow"))
    return [name for name in arrow_files if not name.startswith(("cache-", "tmp", "."))]
