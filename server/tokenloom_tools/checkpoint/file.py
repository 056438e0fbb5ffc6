"""A checkpoint's file: where in it the state of the data lies. Nothing that is read can run code.

A sealed snapshot is known by its first bytes, and its checksum proves it; so it is found in any file that holds it
as plain text, such as a torch checkpoint (whose structure is a pickle) without unpickling, and without torch.
"""

from __future__ import annotations

import json
import mmap
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenloom_proto.files import open_file, read_file
from tokenloom_proto.resume import KEY, older_payload
from tokenloom_proto.seal import CHECKSUM, canonical, unseal
from tokenloom_server.core.numbers import release_of
from tokenloom_server.errors import ConfigError, SnapshotInvalid, reason
from tokenloom_server.order.foreign_payload import is_nested
from tokenloom_server.storage.file import pointer_fault_at

#: The first release of torch whose ``weights_only`` runs nothing that a file says.
SAFE_TORCH = (2, 10)
#: How a sealed text begins: its keys are sorted, and none comes before the checksum.
_SEALED = b'{"checksum":"sha256:'
#: Of a JSON file, and of a torch checkpoint's structure (its tensors lie beside it), bytes.
_MOST_TEXT, _MOST_STRUCTURE = 2**28, 2**30
#: No sealed text is longer, bytes.
_MOST_SEALED = 2**24
#: The files of a checkpoint's folder that are looked into.
_STATE_FILES = (".json", ".pt", ".pth", ".ckpt", ".bin", ".pkl")
#: What a state has that is more than a bare ``sample_index``.
_MORE = {"format", "resume_state", "child_states"}
#: Deeper than any checkpoint's dictionaries.
_MOST_DEPTH = 64


@dataclass(frozen=True, slots=True)
class DataState:
    """A state of the data in a checkpoint: ``where`` in the file it lies, and what is wrong with its seal, if
    anything."""

    where: str
    document: dict[str, Any]
    damage: str | None = None


def find(path: Path, inside: str | None = None) -> DataState:
    """The one state of data that a checkpoint holds; ``inside`` names its place where there are several.

    Raises ``SnapshotInvalid``: what the file is, what was expected, and what to do.
    """
    try:
        states = list(_distinct(_states(path)))
    except OSError as error:
        raise SnapshotInvalid(f"{path}: cannot be read ({reason(error)})") from None
    if inside is not None:
        states = [state for state in states if state.where == inside]
    if len(states) == 1:
        return states[0]
    if states:
        places = ", ".join(
            f"{state.where!r} (sample {state.document.get('sample_index')})" for state in states[:8]
        )
        raise SnapshotInvalid(
            f"{path}: holds {len(states)} different states of data, at {places}; name one: --inside"
        )
    raise SnapshotInvalid(
        f"{path}: holds no state of data{f' at {inside!r}' if inside is not None else ''}; expected what "
        f"RemoteDataset.state_dict() gives (under the key {KEY!r}), a sealed snapshot, or an older data loader's "
        "resume_state or sample_index"
    )


def _states(path: Path) -> Iterator[DataState]:
    if fault := pointer_fault_at(path):
        raise SnapshotInvalid(f"{path} {fault}")
    if path.is_dir():
        yield from _of_folder(path)
        return
    with open_file(path) as file:
        begin = file.read(64).lstrip()
    if zipfile.is_zipfile(path):
        yield from _of_torch(path)
    elif not begin:
        raise SnapshotInvalid(f"{path}: is empty")
    elif begin[:1] in (b"{", b"["):
        yield from _of_text(path)
    else:
        # Torch's older format, one pickle after the other.
        yield from _sealed_in(path) or _unpickled(path, mapped=False)


def _of_text(path: Path) -> Iterator[DataState]:
    text = read_file(path, _MOST_TEXT)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SnapshotInvalid(f"{path}: begins like JSON, but does not parse: {error}") from None
    if isinstance(document, dict) and (CHECKSUM in document or "format" in document):
        yield _of_snapshot("", text.decode())
    else:
        yield from _within(document)


def _of_torch(path: Path) -> Iterator[DataState]:
    with zipfile.ZipFile(path) as archive:
        structures = [
            entry for entry in archive.infolist() if entry.filename.rpartition("/")[2] == "data.pkl"
        ]
        if not structures:
            raise SnapshotInvalid(
                f"{path}: is a zip archive, but none that torch.save wrote (it has no data.pkl)"
            )
        if structures[0].file_size > _MOST_STRUCTURE:
            raise SnapshotInvalid(
                f"{path}: its data.pkl has {structures[0].file_size} bytes, too many to be searched"
            )
        snapshots = list(_sealed(archive.read(structures[0]), "data.pkl"))
    if len(list(_distinct(iter(snapshots)))) == 1:
        yield from snapshots
        return
    try:
        # Several: their places in the dictionaries tell more than bytes do.
        yield from list(_unpickled(path, mapped=True))
    except SnapshotInvalid:
        if not snapshots:
            raise
        yield from snapshots


def _of_folder(path: Path) -> Iterator[DataState]:
    """A checkpoint's folder: of ``torch.distributed.checkpoint``, whose own index is a pickle that only running it
    would read, or with files of any of the other kinds."""
    parts = sorted(path.glob("*.distcp"))
    absent = [f"{part} {fault}" for part in parts if (fault := pointer_fault_at(part))]
    states, refused = (
        [state for part in parts if part.exists() for state in _sealed_in(part)],
        list[str](),
    )
    for file in sorted(entry for entry in path.iterdir() if entry.suffix in _STATE_FILES):
        try:
            states += [
                replace(state, where=f"{file.name}:{state.where}".rstrip(":"))
                for state in _states(file)
            ]
        except SnapshotInvalid as error:
            refused.append(f"; {error}")
    # A bare sample_index counts where there is nothing else, of all files, too.
    yield from [state for state in states if state.document.keys() & _MORE] or states
    if absent and not states:
        raise SnapshotInvalid(absent[0])
    if not states:
        raise SnapshotInvalid(
            f"{path}: its {len(parts)} .distcp files hold no sealed snapshot. What else is in them can only be read by "
            "running the pickles they are made of, which this command does not. If you trust the files, make one of "
            f"them: python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} checkpoint.pt"
            if parts
            else f"{path}: is a folder, but none of torch.distributed.checkpoint (it has no *.distcp), nor has it a "
            f"file ({', '.join(_STATE_FILES)}) with a state of data{''.join(refused[:3])}"
        )


def require_safe_torch(version: str) -> None:
    """Raises ``ConfigError`` where ``weights_only`` of a torch does not keep what a file holds from being run."""
    if release_of(version) < SAFE_TORCH:
        raise ConfigError(
            f"this is torch {version}, in which weights_only=True does not keep a checkpoint from running code "
            "(CVE-2025-32434, CVE-2026-24747): install torch 2.10 or later"
        )


def _unpickled(path: Path, *, mapped: bool) -> Iterator[DataState]:
    """What torch's own reader gives, which builds tensors and plain containers and refuses all else."""
    try:
        import torch
    except ImportError:
        raise SnapshotInvalid(
            f"{path}: holds no sealed snapshot as plain text, and to look further torch is needed, which is not "
            "installed: pip install 'tokenloom[torch]', or run this command where the trainer runs"
        ) from None
    require_safe_torch(torch.__version__)
    try:
        document = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (
        Exception
    ) as error:  # whatever is wrong with the file: torch has no error of its own for it
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"it holds {named[1]}"
            if named
            else f"{type(error).__name__}: {str(error).strip()[:200]}"
        )
        raise SnapshotInvalid(
            f"{path}: torch does not load it without running code of it ({reason}). If you trust the file, load it "
            "yourself and save the state of the data alone as JSON, then show that"
        ) from None
    yield from _within(document)


def _within(document: Any) -> Iterator[DataState]:
    """Every state within nested containers; a bare ``sample_index`` counts where there is nothing else."""
    bare: list[DataState] = []
    has_state = False
    waiting: list[tuple[str, Any, int]] = [("", document, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        below = f"{path}." if path else ""
        if isinstance(value, Mapping):
            text = value.get(KEY)
            if isinstance(text, str):
                has_state = True
                yield _of_snapshot(f"{below}{KEY}", text)
            if isinstance(older_payload(value).get("resume_state"), Mapping) or is_nested(value):
                has_state = True
                yield _of_mapping(path, value)
                continue
            if type(value.get("sample_index")) is int:
                bare.append(DataState(path, older_payload(value)))
            items = [(str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            items = [(str(i), inner) for i, inner in enumerate(value)]
        else:
            continue
        if depth < _MOST_DEPTH:
            waiting += [(below + key, inner, depth + 1) for key, inner in reversed(items)]
    if not has_state:
        yield from bare


def _of_mapping(path: str, value: Mapping[str, Any]) -> DataState:
    if CHECKSUM in value or "format" in value:
        try:
            return _of_snapshot(path, canonical(value))
        except (TypeError, ValueError):
            pass  # not plain JSON, so no snapshot
    return DataState(path, older_payload(value))


def _of_snapshot(where: str, text: str) -> DataState:
    """A text that should be a sealed snapshot, or an older payload where no batch came before it was saved."""
    try:
        return DataState(where, unseal(text))
    except ValueError as error:
        damage = str(error)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise SnapshotInvalid(f"at {where or 'its beginning'!r}: {damage}")
    if CHECKSUM not in document and "format" not in document:
        return DataState(where, document)
    return DataState(
        where, {key: value for key, value in document.items() if key != CHECKSUM}, damage
    )


def _sealed_in(path: Path) -> list[DataState]:
    """The sealed snapshots in a file, which is mapped and not read into memory."""
    if not path.stat().st_size:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return list(_sealed(content, path.name))


def _sealed(content: bytes | mmap.mmap, name: str) -> Iterator[DataState]:
    begin = content.find(_SEALED)
    while begin >= 0:
        # What follows the text may be anything; the decoder stops at the text's end.
        text = bytes(content[begin : begin + _MOST_SEALED]).decode(errors="replace")
        try:
            _, end = json.JSONDecoder().raw_decode(text)
            yield DataState(f"{name}, byte {begin}", unseal(text[:end]))
        except (ValueError, RecursionError):
            pass  # looks like one, but its checksum does not say so
        begin = content.find(_SEALED, begin + 1)


def _distinct(states: Iterator[DataState]) -> Iterator[DataState]:
    """Each state once: ranks and optimisers may each have written the same."""
    seen: set[str] = set()
    for state in states:
        try:
            text = canonical(state.document)
        except (TypeError, ValueError) as error:
            raise SnapshotInvalid(
                f"at {state.where!r}: expected plain JSON values, but {error}"
            ) from None
        if text not in seen:
            seen.add(text)
            yield state
