"""What schemes share whose location is a folder with an ``index.json`` that lists its files: ``mds`` and ``litdata``.

The index is a shard, too, the first and without rows, so that a manifest freezes it with the files.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ValidationError

from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import files
from tokenloom_server.sources.base import Content, Shard, Source
from tokenloom_server.sources.locations import listed_names, nearest_folder
from tokenloom_server.sources.scheme import ReadRequest, Scheme
from tokenloom_server.storage import listing
from tokenloom_server.storage.file import File
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.open import open_file
from tokenloom_server.storage.remote import Entry

INDEX = "index.json"
#: An index is read as a whole; it takes less than a KiB for each file.
MAX_INDEX_BYTES = 1 << 28


class ListedFile(NamedTuple):
    """A file by the index."""

    name: str
    """Below the folder."""
    rows: int
    sizes: Sequence[int] | None
    """How many bytes it may have; None where the index does not say that."""
    entry: Any
    """What else its reader needs of the index."""


class Index(BaseModel):
    """The document in an index: a subclass has its fields."""

    @property
    @abstractmethod
    def listed(self) -> Sequence[Sequence[ListedFile]]:
        """Of each file, the forms in which it may lie; the first that is there is read."""

    @property
    @abstractmethod
    def contents(self) -> Mapping[str, Content | None]:
        """See ``Scheme.columns``."""


class IndexedFolderScheme(Scheme):
    """Folders with an index."""

    by_folder = True
    stores_row_counts = True
    index: ClassVar[type[Index]]

    @abstractmethod
    def open_files(self, request: ReadRequest, index: Index, listed: Sequence[ListedFile]) -> Source:
        """As ``open``, of the ``listed`` files without their index."""

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.wrapped import SourceBesideIndex

        first, *shards = request.shards
        with request.open(first) as file:
            index = self._read_index(file)
        folder = first.path.removesuffix(INDEX)
        forms = {folder + form.name: form for forms in index.listed for form in forms}
        for shard in shards:
            form, where = forms.get(shard.path), files.where(request.spec, shard)
            if form is None or (form.sizes is not None and shard.size not in form.sizes):
                expected = "does not list it" if form is None else f"says {form.sizes[0] if form.sizes else 0}"
                raise SourceError(
                    f"{where} has {shard.size} bytes, but {first.path!r} {expected}: one of the two is truncated or "
                    "damaged; write or copy the folder again"
                )
        listed = [forms[shard.path] for shard in shards]
        return SourceBesideIndex(self.open_files(replace(request, shards=tuple(shards)), index, listed), first)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        return self._read_index(file).contents

    def files_in_order(self, shards: Sequence[Shard]) -> int:
        return len(shards) - 1

    def is_folder(self, folder: Path, path: str) -> bool:
        try:
            with open_file(INDEX, folder) as file:
                return bool(self._read_index(file))
        except (OSError, SourceError):
            return False

    def local_paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        """The index, and the files in its order."""
        folder = base_dir / spec.location
        if not (folder / INDEX).is_file():
            seen = listed_names(folder) if folder.is_dir() else nearest_folder(folder)
            raise SourceError(
                f"source {str(spec)!r}: {str(folder)!r} has no {INDEX}, expected a folder with one; {seen}"
            )
        return self._paths(spec, base_dir, IoStats(), lambda path: (base_dir / path).is_file())

    def remote_entries(self, spec: Spec, io_stats: IoStats) -> Sequence[Entry]:
        folder = spec.location.rstrip("/")
        entries = {entry.path: entry for entry in listing.find(f"{folder}/**", io_stats)}
        if f"{folder}/{INDEX}" not in entries:
            raise SourceError(f"source {str(spec)!r}: {folder!r} has no {INDEX}, expected a folder with one")
        return [entries[path] for path in self._paths(spec, Path(), io_stats, entries.__contains__)]

    def _paths(self, spec: Spec, base_dir: Path, io_stats: IoStats, is_there: Callable[[str], bool]) -> tuple[str, ...]:
        folder = spec.location.rstrip("/")
        paths = [f"{folder}/{INDEX}"]
        with open_file(paths[0], base_dir, f"source {str(spec)!r}: {paths[0]!r}", io_stats) as file:
            for forms in self._read_index(file).listed:
                path = next((path for form in forms if is_there(path := f"{folder}/{form.name}")), None)
                if path is None:
                    names = " or ".join(repr(form.name) for form in forms)
                    raise SourceError(f"{file.name} lists {names}, which is missing; copy the folder whole")
                paths.append(path)
            if len(paths) == 1:
                raise SourceError(f"{file.name} lists no file; give a folder with samples, or take the source out")
        return tuple(paths)

    def _read_index(self, file: File) -> Index:
        try:
            if file.size > MAX_INDEX_BYTES:
                raise SourceError(f"{file.name} has {file.size} bytes, expected at most {MAX_INDEX_BYTES} of an index")
            return self.index.model_validate_json(bytes(file.read_at(0, file.size)), strict=True)
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            raise SourceError(
                f"{file.name} is no index that {self.name} reads: {place and place + ': '}{fault['msg']}; write or "
                "copy it again"
            ) from None
