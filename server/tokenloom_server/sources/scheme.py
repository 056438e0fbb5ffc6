"""A source scheme: all that is particular to the sources whose spec begins with its name.

This is the interface that schemes from outside the tree implement, too: see ``docs/sources/plugins.md``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tokenloom_server.config.catalog import Spec
from tokenloom_server.config.row_rules import PLAIN, RowRules
from tokenloom_server.errors import ConfigError, SourceError, reason
from tokenloom_server.sources import locations
from tokenloom_server.sources.base import Content, Shard, Source, TensorFile
from tokenloom_server.sources.files import (
    CODECS,
    ending_of,
    in_threads,
    open_shard,
    shard_at,
    shards_of,
)
from tokenloom_server.storage.file import File
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.remote import Entry
from tokenloom_server.storage.urls import is_remote, redacted

Finder = Callable[[Spec, Path], tuple[Shard, ...]]
"""Finds the files of a spec, whose relative locations are below the folder, as they are now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """What a source is opened with."""

    spec: Spec
    shards: tuple[Shard, ...]
    """The files to read, as they were when the run began."""
    base_dir: Path
    """Relative paths are below it."""
    index_dir: Path | None = None
    """Where indexes of rows are cached; None: in memory only."""
    io_stats: IoStats = field(default_factory=IoStats)
    """What all readers of a run share of remote storage."""
    rules: RowRules = PLAIN
    """Which rows are read, and what of them."""
    end_of_text_id: int | None = None
    """Where a file holds ids alone, what ends a document."""

    def open(self, shard: Shard) -> File:
        """Opens one of the files. Raises ``SourceChanged`` where it is missing or another one."""
        return open_shard(self.spec, shard, self.base_dir, self.io_stats)


@dataclass(frozen=True, slots=True)
class Plugin:
    """The package that brings a scheme from outside the tree."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


class Scheme(ABC):
    """A source scheme. Its class attributes say what holds for every source of it; it has no state.

    Parsing a spec must stay cheap: import in ``open`` what only reading files needs.
    """

    name: ClassVar[str]
    """What a spec begins with."""
    usage: ClassVar[str]
    """How a spec is written, such as ``txt:GLOB:COLUMN``."""
    has_columns: ClassVar[bool] = True
    """Whether a row has columns beside the one that is read, for ``filter``, ``template`` and ``loss_mask``."""
    ends_documents: ClassVar[bool] = False
    """Whether documents as a rule end with their end-of-text id already."""
    gives_samples: ClassVar[bool] = False
    """Whether rows were cut to samples already, and get no begin- or end-of-text id."""
    splits_at_end_of_text: ClassVar[bool] = False
    """Whether where rows end depends on the run's end-of-text id."""
    reads_any_row: ClassVar[bool] = False
    """Whether ``open_tensors`` reads rows in any order, as ``batching`` does."""
    stores_row_counts: ClassVar[bool] = False
    """Whether a file says itself how many rows it has, so that they need not be counted."""
    has_commits: ClassVar[bool] = False
    """Whether a location has commits, of which a run may name the one that it begins with."""
    endings: ClassVar[tuple[str, ...]] = ()
    """What names of files end with that are read by this scheme where a spec does not name one."""
    may_be_compressed: ClassVar[bool] = False
    """Whether files may end with one of ``CODECS`` beside that, and are decompressed as they are read."""
    has_blank_lines: ClassVar[bool] = False
    """Whether a line may be blank, so that ``on_blank_line`` says what becomes of it."""
    by_folder: ClassVar[bool] = False
    """Whether a location is a folder, and not files."""
    refuses_urls: ClassVar[str] = ""
    """Why the files must lie on a disk of this machine; empty where they need not."""
    plugin: Plugin | None = None
    """The package that the scheme was loaded from; None for those of Tokenloom."""

    # --- The spec ------------------------------------------------------------------------------------------

    def parse(self, text: str) -> tuple[str, str]:
        """Location and column of what follows ``scheme:`` in a spec. Raises ``ConfigError`` without the spec."""
        location, colon, column = text.rpartition(":")
        if not colon or not location or not column:
            raise ConfigError(f"expected {self.usage}, with no part empty")
        return location, column

    def write(self, location: str, column: str) -> str:
        """What ``parse`` reads."""
        return f"{location}:{column}"

    def place(self, location: str) -> str:
        """Where the files lie: a path, a pattern or a URL."""
        return location

    def name_parts(self, location: str) -> list[str]:
        """The parts of a location that tell it from others, without wildcards and endings."""
        path = Path(location.partition("://")[2] or location)
        last = (
            path.name.removesuffix(ending_of(path.name))
            if self.endings and not self.by_folder
            else path.name
        )
        names = [part for part in (*path.parts[:-1], last) if part not in ("/", ".", "..")]
        return [
            name for part in names if (name := re.sub(r"\[[^]]*\]|[*?]", "", part).strip("-_. "))
        ]

    # --- The files -----------------------------------------------------------------------------------------

    @property
    def all_endings(self) -> tuple[str, ...]:
        """``endings``, each also with those of compression."""
        codecs = ("", *(CODECS if self.may_be_compressed else ()))
        return tuple(ending + codec for ending in self.endings for codec in codecs)

    def finder(self) -> Finder:
        """Finds the files of several sources at one moment."""
        return self.shards

    def shards(self, spec: Spec, base_dir: Path) -> tuple[Shard, ...]:
        """The files of a source, as they are now, in reading order. Raises ``SourceError`` where there is none."""
        return self.more_shards(spec, (), base_dir)

    def more_shards(
        self, spec: Spec, known: tuple[Shard, ...], base_dir: Path
    ) -> tuple[Shard, ...]:
        """The files that a source has by now beyond the ``known`` ones. Raises ``SourceError``."""
        known_paths = {shard.path for shard in known}
        if is_remote(spec.location):
            more = [entry for entry in self.entries(spec) if entry.path not in known_paths]
            return tuple(in_threads(lambda entry: shard_at(spec, entry), more, remote=True))
        return shards_of(
            spec, [path for path in self.paths(spec, base_dir) if path not in known_paths], base_dir
        )

    def paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        """The files of a source as the spec names them (relative stays relative), in reading order.

        Raises ``SourceError``, with the pattern as it was resolved and what lies there, when there is none.
        """
        if is_remote(spec.location):
            return tuple(entry.path for entry in self.entries(spec))
        try:
            paths = self.local_paths(spec, base_dir)
        except (OSError, ValueError) as error:
            # A name that no file can have, or a folder that may not be looked into.
            raise SourceError(
                f"source {str(spec)[:200]!r}: its files cannot be looked up ({reason(error)})"
            ) from None
        locations.check_names(spec, paths)
        return paths

    def local_paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        """``paths`` of a location that is no URL: in the order of the path strings, unless a scheme has another."""
        return locations.matching_paths(spec, base_dir)

    def entries(self, spec: Spec) -> tuple[Entry, ...]:
        """The files of a URL in reading order, by one listing, with their sizes and signatures.

        Raises ``SourceError`` when there is none, or the place cannot be listed.
        """
        if self.refuses_urls:
            raise SourceError(
                f"source {str(spec)!r}: {redacted(spec.location)!r} is a URL, but {self.refuses_urls}; copy or mount "
                "them, and give their path"
            )
        return locations.listed_entries(spec, self.remote_entries)

    def remote_entries(self, spec: Spec, io_stats: IoStats) -> Sequence[Entry]:
        """``entries``, for a scheme whose location is no pattern of files to override."""
        return locations.matching_entries(spec.location, io_stats)

    def files_in_order(self, shards: Sequence[Shard]) -> int:
        """How many files are read one after the other: those of one dataset count once."""
        return len(shards)

    def is_folder(self, folder: Path, path: str) -> bool:
        """Whether a folder, which the short form names by ``path``, is one source of this scheme.

        Raises ``ConfigError`` where it is more than one.
        """
        return False

    def stems(self, names: Collection[str]) -> Mapping[str, tuple[str, str]]:
        """Of the names of a folder's files, those that this scheme reads: what tells each from the others, and what
        follows that in a location. None for a scheme that is asked ``is_folder``."""
        endings = () if self.by_folder else self.all_endings
        return {
            name: (name.removesuffix(ending), ending)
            for name in names
            if (ending := ending_of(name)) in endings
        }

    def splits(self, text: str) -> Mapping[str, tuple[Shard, ...]]:
        """Of a data set that has a name and no folder, its files by the location of each split. Raises ``ConfigError``
        where the scheme has no such, and ``SourceError``."""
        raise ConfigError(f"{self.name}:{text}: expected a folder, without a scheme")

    # --- The rows ------------------------------------------------------------------------------------------

    def reader(self, shards: Sequence[Shard]) -> Scheme:
        """The scheme that reads these files: this one, unless it finds files of others."""
        return self

    @abstractmethod
    def open(self, request: ReadRequest) -> Source:
        """Opens a source in seconds, whatever its size. Raises ``SourceError`` naming source and file."""

    @abstractmethod
    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        """The names of a file's columns in their order; None for what is neither text nor lists of integers.

        May raise what Arrow, the operating system and ``json`` raise for a file that is no such file.
        """

    def open_tensors(self, file: File) -> TensorFile:
        """Opens one file for rows in any order, where ``reads_any_row``."""
        raise NotImplementedError(f"{self.name}: reads_any_row is set without open_tensors")


def scheme_of(spec: Spec) -> Scheme:
    """The scheme of a spec, with all that it can do."""
    assert isinstance(spec.scheme, Scheme), (
        f"{spec.scheme.name}: its catalog was not made of schemes"
    )
    return spec.scheme


def order_warning(spec: Spec, shards: Sequence[Shard]) -> str | None:
    """What a caller should log about a source that is not shuffled, whose files are read one after the other."""
    count = scheme_of(spec).files_in_order(shards)
    if count < 2:
        return None
    return (
        f"source {str(spec)!r}: its {count} shards are read in file order; "
        "where documents should be mixed across files, set shuffle: rows (or shards) on the source"
    )


# What schemes share whose files hold nothing but ids: the column need not be named.


#: The column of sources that have nothing but ids.
IDS = "ids"
#: Types of ids in files that do not say it themselves.
RAW_TYPES = ("uint16", "uint32", "int32")


class IdScheme(Scheme):
    """Mapped files of ids, whose one column is ``IDS``."""

    has_columns = False
    ends_documents = True
    raw_types: ClassVar[tuple[str, ...]] = ()
    """Those of ``RAW_TYPES`` that a spec may name instead of the column."""

    def parse(self, text: str) -> tuple[str, str]:
        """``LOCATION`` or ``LOCATION:COLUMN``; a colon before anything else is the location's."""
        location, colon, column = text.rpartition(":")
        if not colon or column not in (IDS, *self.raw_types):
            location, column = text, IDS
        if not location:
            raise ConfigError(f"expected {self.usage}, with no part empty")
        return location, column

    def write(self, location: str, column: str) -> str:
        return location if column == IDS else f"{location}:{column}"

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        return {IDS: Content.IDS}
