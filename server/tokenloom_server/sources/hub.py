"""``hf:ORG/NAME[/CONFIG][@REVISION]:SPLIT:COLUMN``: a split of a dataset on the Hugging Face Hub, and its files."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenloom_server.config.catalog import Spec
from tokenloom_server.errors import ConfigError, SourceChanged, SourceError, StorageError
from tokenloom_server.sources.base import Content, Shard, Source
from tokenloom_server.sources.hub_layout import ConfigFiles, Conversion, Layout, LayoutError
from tokenloom_server.sources.scheme import Finder, ReadRequest, Scheme
from tokenloom_server.storage.file import File
from tokenloom_server.storage.hub_client import HubBusy, HubClient, HubRefused
from tokenloom_server.storage.hub_repository import HubPath, Repository, open_repository, url_of

# The location of a spec of the Hub: ``ORG/NAME[/CONFIG][@REVISION]:SPLIT``.


@dataclass(frozen=True, slots=True)
class HubLocation:
    """A split of a dataset. An old repository may have a ``NAME`` alone; a config needs the full name."""

    repo: str
    config: str | None
    revision: str | None
    """A branch, a tag, a commit, or a reference such as ``refs/convert/parquet``."""
    split: str

    @classmethod
    def parse(cls, text: str) -> HubLocation:
        """Raises ``ConfigError``, which does not name the source, for a part that is missing or cannot be a name."""
        left, colon, split = text.partition(":")
        if not colon:
            raise ConfigError("the split or the column is missing")
        named, at_sign, revision = left.partition("@")
        parts = named.split("/", 2)
        repo, config = "/".join(parts[:2]), parts[2] if len(parts) > 2 else None
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", repo, re.ASCII):
            raise ConfigError(
                f"the repository is {repo!r}, expected ORG/NAME or ORG/NAME/CONFIG as the Hub has it"
            )
        if config is not None and (not config or re.search(r"[<>|?*/\\]", config)):
            raise ConfigError(
                f"the config is {config!r}, expected a name as the dataset's card has it"
            )
        if at_sign and (not revision or re.search(r"[\s~^?*\[\\]|\.\.", revision)):
            raise ConfigError(
                f"the revision is {revision!r}, expected a branch, a tag or a commit after the '@'"
            )
        if not re.fullmatch(r"\w[\w.-]*", split):
            raise ConfigError(f"the split is {split!r}, expected a whole split such as 'train'")
        return cls(repo, config, revision or None, split)


# From a split of a dataset on the Hub to its files at a commit.


_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: The Hub's revision with its own conversion of a dataset: CONFIG/SPLIT/*.parquet.
CONVERSION = "refs/convert/parquet"

#: Names that an error lists at most.
LISTED = 12

FileSchemes = Mapping[str, Scheme]
"""By the ending of a file's name, the scheme that reads such files."""


def reading_scheme(schemes: FileSchemes, path: str) -> Scheme | None:
    """The scheme that reads a file of a repository, by its name; None for none."""
    return next(
        (scheme for ending, scheme in schemes.items() if path.lower().endswith(ending)), None
    )


@dataclass(frozen=True, slots=True)
class HubSplit:
    """A split of a config."""

    name: str
    shards: tuple[Shard, ...]
    """Its files in reading order, with their sizes in bytes."""
    scheme: Scheme | None
    """What reads them; None where no scheme does."""
    unread: str
    """Why no scheme reads them; empty where one does."""


@dataclass(frozen=True, slots=True)
class HubDataset:
    """What a dataset has at a commit."""

    repo: str
    """Its present name: ``ORG/NAME``."""
    commit: str
    configs: Sequence[str]
    default: str | None
    """The config that is meant where none is named; None where one has to be."""
    config: str | None
    """The config whose splits follow: the one that was asked for, or the default one."""
    splits: Sequence[HubSplit]
    """None without a config."""


class _NotThere(Exception):
    """There is no such config or split, or no scheme reads it; the text says what there is."""


class _AnswerCache:
    """Asks each question once, however many threads need the answer; a refusal is an answer, too."""

    def __init__(self) -> None:
        self._answers: dict[object, Future[Any]] = {}
        self._lock = threading.Lock()

    def once(self, question: object, ask: Callable[[], _T]) -> _T:
        with self._lock:
            is_asked = question in self._answers
            answer = self._answers.setdefault(question, Future())
        if not is_asked:
            try:
                answer.set_result(ask())
            except BaseException as error:
                if not isinstance(error, HubRefused | LayoutError):
                    with self._lock:
                        del self._answers[question]
                answer.set_exception(error)
        outcome: _T = answer.result()
        return outcome


class HubResolver:
    """Resolves specs, and asks for each repository once: sources of one repository have one commit.

    Safe for threads.
    """

    def __init__(self, schemes: FileSchemes) -> None:
        self._schemes = schemes
        self._client: HubClient | None = None
        self._answers_of_hub = _AnswerCache()
        self._lock = threading.Lock()

    def shards(self, spec: Spec) -> tuple[Shard, ...]:
        """The files of a spec's split, in the order in which `datasets` reads them; their paths are
        ``hf://datasets/ORG/NAME@COMMIT/PATH``. Raises ``SourceError``, which says what there is instead."""
        location = HubLocation.parse(spec.location)
        with self._naming(f"source {str(spec)!r}", location):
            try:
                repository, layout = self._layout(location, spec.commit)
                files = _files_of(layout, location)
            except LayoutError as error:
                raise LayoutError(f"{error}{self._converted(location, spec.column)}") from None
            if location.split not in files.splits:
                raise _NotThere(_no_split(location, files))
            split = self._split(repository, files, location.split)
            if split.scheme is None:
                other = self._converted(location, spec.column) or (
                    "; write it as Parquet, with load_dataset(…).to_parquet(…), and name what was written as parquet:"
                )
                raise _NotThere(f"{split.unread}{other}")
            _log.info(
                "the dataset %s at commit %s: %d files of the split %s of its config %s, read as %s",
                repository.name, repository.commit, len(split.shards), split.name, files.name, split.scheme.name,
            )  # fmt: skip
            return split.shards

    def dataset(self, text: str) -> HubDataset:
        """What ``ORG/NAME[/CONFIG][@REVISION]`` has: its configs, and the splits of one. For who asks before there is a
        spec; the columns of a split are those of its first file, as ``sources.open.columns_of`` gives them.

        Raises ``ConfigError`` for a text that is no such name, and ``SourceError`` as ``shards`` does.
        """
        location = HubLocation.parse(f"{text}:train")
        with self._naming(f"'hf:{text}'", location):
            repository, layout = self._layout(location, None)
            config = location.config or layout.default
            splits: list[HubSplit] = []
            if config is not None:
                files = _files_of(layout, location)
                splits = [self._split(repository, files, split) for split in files.splits]
            return HubDataset(
                repository.name, repository.commit, layout.configs, layout.default, config, splits
            )

    @contextmanager
    def _naming(self, where: str, location: HubLocation) -> Iterator[None]:
        """Makes of what is raised the errors that name a source."""
        where = f"{where}: the dataset {location.repo!r}"
        try:
            yield
        except HubRefused as error:
            raise SourceError(f"{where} {error}{self._instead(location, error)}") from None
        except HubBusy as error:
            raise StorageError(f"{where} cannot be looked up now: {error}") from None
        except _NotThere as error:
            raise SourceError(f"{where} {error}") from None
        except LayoutError as error:
            raise SourceError(f"{where} cannot be read, for {error}") from None

    def _layout(
        self, location: HubLocation, commit: str | None
    ) -> tuple[Repository, Layout | Conversion]:
        name, revision = location.repo, commit or location.revision
        with self._lock:
            client = self._client = self._client or HubClient()
        once = self._answers_of_hub.once
        repository = once((name, revision), lambda: open_repository(client, name, revision))
        kind = Conversion if location.revision == CONVERSION else Layout
        return repository, once(
            (repository.name, repository.commit, kind), lambda: kind(repository)
        )

    def _split(self, repository: Repository, files: ConfigFiles, split: str) -> HubSplit:
        """Raises ``HubRefused`` where, offline, the cache lacks one of its files."""
        paths = files.splits[split]
        schemes = {reading_scheme(self._schemes, path) for path in paths}
        scheme = schemes.pop() if len(schemes) == 1 and not files.row_options else None
        unread = ""
        if scheme is None:
            alien = next(
                (path for path in paths if reading_scheme(self._schemes, path) is None), ""
            )
            options = ", ".join(f"{name}: {value!r}" for name, value in files.row_options.items())
            fault = (
                f"with {options} in its card"
                if options
                else f"as {alien!r}"
                if alien
                else "of several kinds"
            )
            unread = (
                f"has {len(paths)} files for the split {split!r} that no scheme reads ({fault}; to `datasets` they are "
                f"{files.format}), expected Parquet, Arrow, JSON lines or text"
            )
        return HubSplit(split, _shards(repository, paths), scheme, unread)

    def _converted(self, location: HubLocation, column: str) -> str:
        """The spec of a split in the Hub's conversion, for a message; empty where it has none."""
        converted = HubLocation(location.repo, location.config, CONVERSION, location.split)
        try:
            _, layout = self._layout(converted, None)
            if location.split not in _files_of(layout, converted).splits:
                return ""
        except (HubRefused, HubBusy, _NotThere) as error:
            _log.debug("no conversion of %s: %s", location, error)
            return ""
        name = f"{location.repo}/{location.config}" if location.config else location.repo
        spec = f"hf:{name}@{CONVERSION}:{location.split}:{column}"
        return f"; the Hub converted it to Parquet, maybe at an earlier commit: {spec!r}"

    def _instead(self, location: HubLocation, error: HubRefused) -> str:
        """The datasets, or branches and tags, that the Hub has instead of a refused one; else empty."""
        client = self._client
        if client is None or client.offline:
            return ""
        try:
            if error.kind == "repo" and "/" in location.repo:
                org = location.repo.partition("/")[0]
                datasets, _ = client.get_json("api/datasets", {"author": org, "limit": str(LISTED)})
                return f"; datasets of {org!r}: {_listed([str(one['id']) for one in datasets])}"
            if error.kind == "revision":
                refs, _ = client.get_json(f"api/datasets/{location.repo}/refs")
                names = [
                    str(one["name"])
                    for kind in ("branches", "tags", "converts")
                    for one in refs.get(kind, ())
                ]
                return f" {location.revision!r}; branches and tags: {_listed(names)}"
        except (HubRefused, HubBusy, KeyError, TypeError):
            pass  # the refusal itself is what counts
        return ""


def _files_of(layout: Layout | Conversion, location: HubLocation) -> ConfigFiles:
    config = location.config or layout.default
    if config is None:
        raise _NotThere(
            f"has no default config; name one of its configs: {_listed(layout.configs)}"
        )
    if config not in layout.configs:
        raise _NotThere(f"has no config {config!r}; its configs: {_listed(layout.configs)}")
    return layout.files(config)


def _shards(repository: Repository, paths: Sequence[str]) -> tuple[Shard, ...]:
    """Raises ``HubRefused`` where, offline, the cache lacks one of the files."""
    # All were listed already, so this sends no request.
    known = {file.path: file for file in repository.below("", deep=True)}
    files = [known[path] for path in paths]
    missing = [file.path for file in files if not file.fingerprint]
    if missing:
        raise HubRefused(
            "offline",
            f"has {len(files)} files for this split, but HF_HUB_OFFLINE is set and {len(missing)} of them are not "
            f"in the local cache (the first is {missing[0]!r}); while online: hf download {repository.name} "
            f"--repo-type dataset --revision {repository.commit}",
        )
    return tuple(
        Shard(url_of(repository.name, repository.commit, file.path), file.size, file.fingerprint)
        for file in files
    )


def appended(spec: Spec, known: Sequence[Shard], now: Sequence[Shard]) -> tuple[Shard, ...]:
    """The files that a dataset has at a later commit and did not have at the one that is known.

    Raises ``SourceChanged`` where a file of before is gone or another one: then the new ones may hold its rows again.
    """
    before = {HubPath.parse(shard.path).path: shard for shard in known}
    there = {HubPath.parse(shard.path).path: shard for shard in now}
    changed = [
        path for path, shard in before.items() if path not in there or _other(shard, there[path])
    ]
    if changed:
        raise SourceChanged(
            f"source {str(spec)!r}: {len(changed)} of the {len(before)} files that the run reads are gone or others at "
            f"{HubPath.parse(now[0].path).revision} (the first is {changed[0]!r}), so its other files are no addition; "
            "name the dataset at that commit as a new source, and drop this one"
        )
    return tuple(shard for path, shard in there.items() if path not in before)


def _other(one: Shard, another: Shard) -> bool:
    return (one.size, one.fingerprint) != (another.size, another.fingerprint)


def _no_split(location: HubLocation, files: ConfigFiles) -> str:
    if f"partial-{location.split}" in files.splits:
        return (
            f"is converted in part only: the split {location.split!r} is there as 'partial-{location.split}', "
            "the first gigabytes of it; name that one if it is what you want"
        )
    of = f" in its config {files.name!r}" if files.name != "default" else ""
    return f"has no split {location.split!r}{of}; its splits: {_listed(files.splits)}"


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = len(shown) - LISTED
    return (", ".join(map(repr, shown[:LISTED])) or "none") + (
        f" and {more} more" if more > 0 else ""
    )


class HubScheme(Scheme):
    """Files of one commit of a dataset's repository, read by the scheme that their names say."""

    name = "hf"
    usage = "hf:ORG/NAME[/CONFIG][@REVISION]:SPLIT:COLUMN"
    reads_any_row = True
    has_commits = True
    has_blank_lines = True

    def __init__(self, file_schemes: Sequence[Scheme]) -> None:
        """``file_schemes``: those that can read a repository's files, the preferred ones first."""
        self._by_ending = {
            ending: scheme for scheme in file_schemes for ending in scheme.all_endings
        }

    def parse(self, text: str) -> tuple[str, str]:
        location, column = super().parse(text)
        try:
            HubLocation.parse(location)
        except ConfigError as error:
            raise ConfigError(f"{error}; a source on the Hub is {self.usage}") from None
        return location, column

    def place(self, location: str) -> str:
        """The repository's URL."""
        return f"hf://datasets/{HubLocation.parse(location).repo}/"

    def name_parts(self, location: str) -> list[str]:
        where = HubLocation.parse(location)
        return [
            part
            for part in (*where.repo.split("/"), where.config, where.split)
            if part and part != "train"
        ]

    def finder(self) -> Finder:
        resolver = HubResolver(self._by_ending)
        return lambda spec, _: resolver.shards(spec)

    def shards(self, spec: Spec, base_dir: Path) -> tuple[Shard, ...]:
        return self.finder()(spec, base_dir)

    def dataset(self, text: str) -> HubDataset:
        """What ``ORG/NAME[/CONFIG][@REVISION]`` has, before there is a spec; see ``HubResolver.dataset``."""
        return HubResolver(self._by_ending).dataset(text)

    def splits(self, text: str) -> Mapping[str, tuple[Shard, ...]]:
        dataset = self.dataset(text)
        if dataset.config is None:
            raise ConfigError(
                f"hf:{text}: has the configs {', '.join(dataset.configs)}; name one, as hf:{text}/CONFIG"
            )
        return {
            f"{text}:{split.name}": split.shards
            for split in dataset.splits
            if split.scheme is not None
        }

    def more_shards(
        self, spec: Spec, known: tuple[Shard, ...], base_dir: Path
    ) -> tuple[Shard, ...]:
        """Raises ``SourceChanged``, too, where the known files are no longer as they were."""
        return appended(spec, known, self.shards(spec, base_dir))

    def paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        return tuple(shard.path for shard in self.shards(spec, base_dir))

    def reader(self, shards: Sequence[Shard]) -> Scheme:
        path = shards[0].path
        scheme = reading_scheme(self._by_ending, path)
        if scheme is None:
            raise SourceError(f"no scheme reads {path!r}")
        return scheme

    def open(self, request: ReadRequest) -> Source:
        return self.reader(request.shards).open(request)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        raise NotImplementedError("a spec of the Hub names its column")
