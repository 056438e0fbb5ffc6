"""What schemes share whose location is a folder with an ``index.json`` that lists its files: ``mds`` and ``litdata``.

The index is a shard, too, the first and without rows, so that a manifest freezes it with the files.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ValidationError

from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import files
from tokenloom_server.sources.base import Content, Shard, Source
from tokenloom_server.sources.locations import is_named, nearest_folder
from tokenloom_server.sources.scheme import ReadRequest, Scheme
from tokenloom_server.storage import listing, pointers
from tokenloom_server.storage.file import File
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.remote import Entry, open_file

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
    def open_files(
        self, request: ReadRequest, index: Index, listed: Sequence[ListedFile]
    ) -> Source:
        """As ``open``; ``listed``: what the index says of each file, of the first, which is the index, that it has no
        row."""

    def open(self, request: ReadRequest) -> Source:
        first, *shards = request.shards
        with request.open(first) as file:
            index = self._read_index(file)
        folder = first.path.removesuffix(INDEX)
        forms = {folder + form.name: form for forms in index.listed for form in forms}
        listed = [ListedFile(INDEX, 0, None, None)]
        for shard in shards:
            form = forms.get(shard.path)
            if form is None or (form.sizes is not None and shard.size not in form.sizes):
                expected = f"says {form.sizes[0]}" if form and form.sizes else "does not list it"
                raise SourceError(
                    f"{files.where(request.spec, shard)} has {shard.size} bytes, but {first.path!r} {expected}: one of "
                    "the two is truncated or damaged; write or copy the folder again"
                )
            listed.append(form)
        return self.open_files(request, index, listed)

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
        return self._paths(spec, base_dir, IoStats(), lambda path: is_named(base_dir / path))

    def remote_entries(self, spec: Spec, io_stats: IoStats) -> Sequence[Entry]:
        entries = {
            entry.path: entry for entry in listing.find(f"{spec.location.rstrip('/')}/**", io_stats)
        }
        return [entries[path] for path in self._paths(spec, Path(), io_stats, entries.__contains__)]

    def _paths(
        self, spec: Spec, base_dir: Path, io_stats: IoStats, is_there: Callable[[str], bool]
    ) -> tuple[str, ...]:
        """The index, and the files in its order."""
        folder, where = spec.location.rstrip("/"), f"source {str(spec)!r}"
        paths = [f"{folder}/{INDEX}"]
        if not is_there(paths[0]):
            seen = "" if spec.is_remote else f"; {nearest_folder(base_dir / paths[0])}"
            raise SourceError(
                f"{where}: there is no {paths[0]!r}; give the folder that has the {INDEX}{seen}"
            )
        if not spec.is_remote and (fault := pointers.fault_at(base_dir / paths[0])):
            raise SourceError(f"{where}: {paths[0]!r} {fault}")
        with open_file(paths[0], base_dir, f"{where}: {paths[0]!r}", io_stats) as file:
            for forms in self._read_index(file).listed:
                path = next(
                    (path for form in forms if is_there(path := f"{folder}/{form.name}")), None
                )
                if path is None:
                    raise SourceError(
                        f"{file.name} lists {forms[-1].name!r}, which is missing; copy the folder whole"
                    )
                paths.append(path)
        path, times = Counter(paths).most_common(1)[0]
        if times > 1:
            raise SourceError(
                f"{file.name} lists {path!r} {times} times; write it again, with each file once"
            )
        return tuple(paths)

    def _read_index(self, file: File) -> Index:
        files.refuse_pointer(file)
        try:
            if file.size > MAX_INDEX_BYTES:
                raise SourceError(
                    f"{file.name} has {file.size} bytes, expected at most {MAX_INDEX_BYTES} of an index"
                )
            return self.index.model_validate_json(bytes(file.read_at(0, file.size)), strict=True)
        except ValidationError as error:
            fault = error.errors()[0]
            place = (
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}"
            )
            raise SourceError(
                f"{file.name} is no index that {self.name} reads ({place}); write or copy it again"
            ) from None
