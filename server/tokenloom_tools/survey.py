"""What lies in folders, as sources: which files belong together, which scheme reads them, and which none does."""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from posixpath import basename, commonpath, commonprefix, dirname, join

from tokenloom_server.config.catalog import Spec
from tokenloom_server.errors import ConfigError, SourceError, reason
from tokenloom_server.sources.base import Content
from tokenloom_server.sources.catalog import SourceCatalog
from tokenloom_server.sources.files import codec_of, gap_warning, shards_of
from tokenloom_server.sources.locations import is_named
from tokenloom_server.sources.open import columns_of
from tokenloom_server.sources.scheme import Scheme

#: Series of files in one folder that are sources of their own; with more of them the folder is one source.
MAX_SERIES = 16
#: What people and libraries put beside data, under endings that data have, too.
_BESIDE_DATA = re.compile(
    r"(readme|licen[cs]e|requirements|merges|vocab|notice).*\.txt|.*(config|_infos?|_dict|_map|schema)\.json|"
    r"(package|state|index|manifest|tokenizer|vocab|added_tokens|metadata|job|digests)\.json|journal\.jsonl",
    re.IGNORECASE,
)
#: The number of a file among those of a series, and a hash after it: ``-00001-of-00016``, ``_3``.
_NUMBER = re.compile(r"[-_.]?\d+(?:[-_.]of[-_.]\d+)?(?:[-_.][0-9a-f]{8,})?$")
#: The same of folders: ``2026-01``, ``year=2026``, ``part_3``, but not ``c4``.
_FOLDER_NUMBER = re.compile(r"(?:^|[-_.=])\d[-\d]*$")
_EVALUATION = re.compile(r"(?:.*[-_.])?(?:validation|valid|val|dev|test|eval)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Files that can be one source, once its column is chosen."""

    spec: Spec
    """Without a column."""
    files: int
    size: int
    """Bytes of the files."""
    columns: Mapping[str, Content | None]
    """Of the first file that has any."""
    folder: str = ""
    """Name of the folder that it is of, without a number at its end; empty for a series of files."""

    def with_column(self, column: str) -> Candidate:
        return replace(self, spec=replace(self.spec, column=column))


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    scheme: Scheme
    folders: tuple[str, ...]
    """Names of the folders that it lies in, below the one that is looked at."""
    stem: str
    ending: str

    @property
    def series(self) -> tuple[str, str, str]:
        return _NUMBER.sub("", self.stem), self.scheme.name, self.ending

    @property
    def is_to_evaluate_on(self) -> bool:
        return any(map(_EVALUATION.fullmatch, (*self.folders, _NUMBER.sub("", self.stem))))


class Survey:
    """What was found below folders: ``candidates``, ``warnings``, and by path why something is ``left_out``."""

    def __init__(
        self,
        base_dir: Path,
        catalog: SourceCatalog,
        choose: Callable[[Sequence[str], int], str],
        form_of: Callable[[Mapping[str, Content | None]], object],
    ) -> None:
        """Paths are relative to ``base_dir``, or absolute. ``choose``: which of some paths is meant, that may be the
        same data in several forms, as in so many other cases; may raise ``ConfigError``. ``form_of``: what columns are
        read as; the series of a folder that differ in it are sources of their own."""
        self.candidates: list[Candidate] = []
        self.left_out: dict[str, str] = {}
        self.warnings: list[str] = []
        self._base_dir, self._catalog, self._choose = base_dir, catalog, choose
        self._form_of = form_of

    def look_up(self, scheme: Scheme, text: str) -> None:
        """Takes in the splits of a data set by its name. Raises what the scheme's ``splits`` raises."""
        splits = scheme.splits(text)
        to_evaluate = {
            location for location in splits if _EVALUATION.fullmatch(location.rpartition(":")[2])
        }
        for location, shards in splits.items():
            if location in to_evaluate and len(to_evaluate) < len(splits):
                self.left_out[location] = "a split to evaluate on"
                continue
            spec, size = Spec(scheme, location, ""), sum(shard.size for shard in shards)
            columns = columns_of(scheme.reader(shards), shards[0].path, self._base_dir)
            self.candidates.append(Candidate(spec, len(shards), size, columns))

    def look_at(self, place: str) -> None:
        """Takes in all that lies below a folder, or one file.

        Each folder directly below the first one that holds more than one thing is a source, and each series of files in
        that one, for each scheme and ending. Splits to evaluate on are left out, unless there is nothing else. Raises
        ``ConfigError`` where it cannot be looked at, and where files lie so that no pattern tells them apart.
        """
        try:
            if (self._base_dir / place).is_file():
                files = list(self._readable(dirname(place), (), [basename(place)]))
            else:
                files = list(self._walk("" if place == "." else place, ()))
        except OSError as error:
            path = error.filename or place
            raise ConfigError(
                f"{path}: cannot be looked at ({reason(error)}); expected a folder of data"
            ) from None
        files = self._in_one_form(files)
        to_train_on = [file for file in files if not file.is_to_evaluate_on] or files
        if len(to_train_on) < len(files):
            self.left_out |= {
                file.path: "of a split to evaluate on" for file in files if file.is_to_evaluate_on
            }
        depth = len(commonprefix([file.folders for file in to_train_on]))

        def source(file: _File) -> object:
            if file.scheme.by_folder:
                return file.path
            names = [_FOLDER_NUMBER.sub("", name) for name in file.folders[depth : depth + 1]]
            return *names, *file.series[1:]

        for group in _grouped(to_train_on, source):
            folder = next(
                (_FOLDER_NUMBER.sub("", name) for name in group[0].folders[depth : depth + 1]), None
            )
            series = _by_series(group)
            if folder is not None and self._in_several_forms(series):
                folder = None
            for part in series if folder is None else [group]:
                self._add(part, folder)

    def _in_several_forms(self, series: Sequence[Sequence[_File]]) -> bool:
        """Whether the first files of some series are read as different things."""
        forms = set()
        for files in series if 1 < len(series) <= MAX_SERIES else ():
            try:
                columns = columns_of(files[0].scheme, files[0].path, self._base_dir)
            except SourceError:
                continue  # said where it is taken in
            forms.add(self._form_of(columns))
        return len(forms) > 1

    def _in_one_form(self, files: Sequence[_File]) -> list[_File]:
        """Without those that have the name of another file, but for the compression."""
        cases: dict[tuple[str, ...], list[list[_File]]] = defaultdict(list)
        for forms in _grouped(files, lambda file: file.path[: -len(_codec(file)) or None]):
            cases[tuple(map(_codec, forms))].append(forms)
        same: set[_File] = set()
        for groups in cases.values():
            if len(groups[0]) > 1:
                paths = [file.path for file in groups[0]]
                meant = paths.index(self._choose(paths, len(groups) - 1))
                for forms in groups:
                    others = {*forms} - {forms[meant]}
                    self.left_out |= dict.fromkeys(
                        (file.path for file in others), f"the same as {forms[meant].path}"
                    )
                    same |= others
        return [file for file in files if file not in same]

    def _walk(self, folder: str, folders: tuple[str, ...]) -> Iterator[_File]:
        path = self._base_dir / folder
        for scheme in self._catalog.schemes.values():
            try:
                if scheme.is_folder(path, folder or "."):
                    yield _File(folder or ".", scheme, folders[:-1], basename(folder), "")
                    return
            except ConfigError:
                break  # one for each split: these are the folders in it
        names = []
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            if entry.name.startswith("."):
                self.left_out[join(folder, entry.name)] = "hidden"
            elif entry.is_dir():
                yield from self._walk(join(folder, entry.name), (*folders, entry.name))
            elif is_named(Path(entry.path)):
                names.append(entry.name)
            else:
                self.left_out[join(folder, entry.name)] = "no file"
        yield from self._readable(folder, folders, names)

    def _readable(
        self, folder: str, folders: tuple[str, ...], names: Sequence[str]
    ) -> Iterable[_File]:
        """The files of a folder that a scheme reads."""
        data = [name for name in names if not _BESIDE_DATA.fullmatch(name)]
        files = {
            name: _File(join(folder, name), scheme, folders, *parts)
            for scheme in self._catalog.schemes.values()
            for name, parts in scheme.stems(data).items()
        }
        for name in names:
            if name not in files:
                self.left_out[join(folder, name)] = (
                    "not data, by its name" if name not in data else "not a format that is read"
                )
        return files.values()

    def _add(self, group: Sequence[_File], folder: str | None) -> None:
        """A candidate of files of one scheme and ending: all of a folder, or a series. Raises ``ConfigError`` where no
        pattern names these alone."""
        scheme, paths = group[0].scheme, {file.path for file in group}
        for pattern in paths if scheme.by_folder else _patterns(group, folder is not None):
            spec = Spec(scheme, pattern, "")
            matches = scheme.paths(spec, self._base_dir)
            if scheme.by_folder or set(matches) == paths:
                break
        else:
            others = ", ".join(sorted({*matches} - paths)[:3])
            raise ConfigError(
                f"{group[0].path!r} and {len(paths) - 1} more files cannot be named by a pattern, for it matches "
                f"others: {others}; move those away, or name the folders one by one"
            )
        shards = shards_of(spec, matches, self._base_dir)
        sizes = {shard.path: shard.size for shard in shards}
        self.left_out |= {path: "empty" for path, size in sizes.items() if not size}
        if not any(sizes.values()):
            return
        self.warnings += filter(None, [gap_warning(pattern, shards)])
        try:
            # A folder's index, or the first file that has anything.
            columns = columns_of(
                scheme, max(matches, key=lambda path: sizes[path] > 0), self._base_dir
            )
            self.candidates.append(
                Candidate(spec, len(sizes), sum(sizes.values()), columns, folder or "")
            )
        except SourceError as error:
            self.left_out[spec.location] = str(error)


def _codec(file: _File) -> str:
    ending = Path(file.path).suffix
    return ending if codec_of(ending) is not None else ""


def _grouped(files: Iterable[_File], key: Callable[[_File], object]) -> list[list[_File]]:
    groups: dict[object, list[_File]] = defaultdict(list)
    for file in files:
        groups[key(file)].append(file)
    return list(groups.values())


def _by_series(files: Iterable[_File]) -> list[list[_File]]:
    """The files of each series; those of each scheme and ending together where there are too many."""
    series = _grouped(files, lambda file: file.series)
    return series if len(series) <= MAX_SERIES else _grouped(files, lambda file: file.series[1:])


def _patterns(files: Sequence[_File], is_folder: bool) -> list[str]:
    """Locations that may mean these files."""
    stems, ending = sorted({file.stem for file in files}), files[0].ending
    folders = {dirname(file.path) for file in files}
    folder = glob.escape(commonpath(folders))
    if len(folders) > 1:
        return [join(folder, f"**/*{ending}")]
    if len(stems) == 1:
        return [join(*folders, stems[0] + ending)]
    beginning = glob.escape(commonprefix(stems).rstrip("0123456789"))
    return [
        join(folder, f"{name}*{ending}") for name in ("" if is_folder else beginning, beginning)
    ]
