"""From a split of a dataset on the Hub to its files at a commit."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import SourceChanged, SourceError, StorageError
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.hub.location import HubLocation
from tokenloom_server.sources.scheme import Scheme
from tokenloom_server.storage.hub import splits
from tokenloom_server.storage.hub.client import HubBusy, HubClient, HubRefused
from tokenloom_server.storage.hub.files import HubPath
from tokenloom_server.storage.hub.repository import Repository, find, open_repository, url_of

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: The Hub's revision with its own conversion of a dataset: CONFIG/SPLIT/*.parquet.
CONVERSION = "refs/convert/parquet"
#: What the names of those files end with.
CONVERTED = ".parquet"

#: Names that an error lists at most.
LISTED = 12


FileSchemes = Mapping[str, Scheme]
"""By the ending of a file's name, the scheme that reads such files."""


def reading_scheme(schemes: FileSchemes, path: str) -> Scheme | None:
    """The scheme that reads a file of a repository, by its name; None for none."""
    return schemes.get(splits.ending_of(path))


def _most_common(schemes: FileSchemes, paths: Iterable[str]) -> Scheme | None:
    """The scheme of most of the files, in doubt that of conversions; None where most cannot be read."""
    counts = Counter(reading_scheme(schemes, path) for path in paths)
    preferred = schemes[CONVERTED]
    return max(counts, key=lambda scheme: (counts[scheme], scheme is preferred, scheme.name if scheme else ""))


@dataclass(frozen=True, slots=True)
class _SplitFiles:
    """A split's files in a repository, all of one scheme; None where no scheme reads them."""

    repository: Repository
    paths: Sequence[str]
    scheme: Scheme | None


class _NotThere(Exception):
    """There is no such config or split; the text says what there is."""


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
                if not isinstance(error, HubRefused | splits.CardError):
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
        location, where = HubLocation.parse(spec.location), f"source {str(spec)!r}"
        try:
            return _shards(self._resolve(location, spec.commit))
        except HubRefused as error:
            raise SourceError(
                f"{where}: the dataset {location.repo!r} {error}{self._instead(location, error)}"
            ) from None
        except HubBusy as error:
            raise StorageError(f"{where}: the dataset {location.repo!r} cannot be looked up now: {error}") from None
        except _NotThere as error:
            raise SourceError(f"{where}: the dataset {location.repo!r} {error}") from None
        except splits.CardError as error:
            raise SourceError(f"{where}: the dataset {location.repo!r} cannot be read, for {error}") from None

    def _resolve(self, location: HubLocation, commit: str | None) -> _SplitFiles:
        repository = self._repository(location.repo, commit or location.revision)
        if location.revision == CONVERSION:
            return self._converted(repository, location)
        if commit is not None and location.revision is None and repository.text("README.md") is None:
            with contextlib.suppress(_NotThere):  # what that run read was what the Hub converted
                return self._converted(repository, location)
        try:
            own: _SplitFiles | _NotThere = self._own(repository, location)
        except (_NotThere, splits.CardError) as error:
            own = _NotThere(str(error))
        if isinstance(own, _SplitFiles) and own.scheme is self._schemes[CONVERTED]:
            return own
        # A given revision is read itself, and never a conversion, which may be of another one.
        converted = self._conversion(location) if commit is None and location.revision is None else None
        if converted is not None:
            why = own if isinstance(own, _NotThere) else f"has no Parquet files of its own for {_named(location)}"
            _log.warning(
                "the dataset %s %s: read is what the Hub converted it to (%s at %s), which may be older; add @main "
                "to the dataset's name to read its own files",
                repository.name, why, CONVERSION, converted.repository.commit,
            )  # fmt: skip
            return converted
        if isinstance(own, _NotThere):
            raise own
        if own.scheme is None:
            first = f"the first is {own.paths[0]!r}, {splits.ending_of(own.paths[0])}"
            raise _NotThere(
                f"has {len(own.paths)} files for {_named(location)} that cannot be read ({first}), and the Hub has no "
                "Parquet conversion of them; expected .parquet, .arrow, .jsonl or .txt (also with .gz or .zst)"
            )
        return own

    def _own(self, repository: Repository, location: HubLocation) -> _SplitFiles:
        """A split in a repository's own files, by its card or their names."""
        configs = self._configs(repository)
        if location.config is None:
            config = next((config for config in configs.values() if config.is_default), None)
            if config is None:
                raise _NotThere(f"has no default config; name one of its configs: {_listed(configs)}")
        elif location.config in configs:
            config = configs[location.config]
        else:
            raise _NotThere(f"has no config {location.config!r}; its configs: {_listed(configs)}")
        look = partial(_find, repository)
        patterns = splits.splits_of(config, look)
        if location.split not in patterns:
            raise _NotThere(_no_split(location, config.name, list(patterns)))
        paths = splits.files_of(patterns[location.split], look)
        if not paths:
            raise _NotThere(
                f"has no file for {_named(location)}, whose patterns are {_listed(patterns[location.split])}; "
                f"its splits: {_listed(patterns)}"
            )
        scheme = _most_common(self._schemes, paths)
        left = [path for path in paths if reading_scheme(self._schemes, path) is not scheme]
        if left and scheme is not None:
            _log.warning(
                "the dataset %s: %d files of %s are not read, since most are %s (the first is %s)",
                repository.name, len(left), _named(location), scheme.name, left[0],
            )  # fmt: skip
            paths = [path for path in paths if reading_scheme(self._schemes, path) is scheme]
        return _SplitFiles(repository, paths, scheme)

    def _converted(self, repository: Repository, location: HubLocation) -> _SplitFiles:
        """A split in the Hub's own conversion: ``CONFIG/SPLIT/0000.parquet`` and so on."""
        files = [file.path for file in repository.below("", deep=True) if file.path.endswith(CONVERTED)]
        folders = {tuple(path.split("/")[:-1]) for path in files}
        configs = sorted({folder[0] for folder in folders if len(folder) == 2})
        name = location.config or (configs[0] if len(configs) == 1 else "default")
        if name not in configs:
            config_text = f"config {name!r}" if location.config else "default config"
            raise _NotThere(f"has no {config_text} in the Hub's conversion; its configs: {_listed(configs)}")
        split_names = sorted(folder[1] for folder in folders if len(folder) == 2 and folder[0] == name)
        if location.split not in split_names:
            partial_split = f"partial-{location.split}"
            if partial_split in split_names:
                raise _NotThere(
                    f"is converted in part only: the split {location.split!r} is there as {partial_split!r}, "
                    "the first gigabytes of it; name that one if it is what you want"
                )
            raise _NotThere(_no_split(location, name, split_names))
        paths = [path for path in files if path.startswith(f"{name}/{location.split}/")]
        return _SplitFiles(repository, paths, self._schemes[CONVERTED])

    def _repository(self, name: str, revision: str | None) -> Repository:
        with self._lock:
            if self._client is None:
                self._client = HubClient()
            client = self._client
        return self._answers_of_hub.once((name, revision), lambda: open_repository(client, name, revision))

    def _configs(self, repository: Repository) -> Mapping[str, splits.Config]:
        return self._answers_of_hub.once(
            (repository.name, repository.commit, "card"),
            lambda: splits.configs_of(repository.text("README.md") or ""),
        )

    def _conversion(self, location: HubLocation) -> _SplitFiles | None:
        """The split in the Hub's conversion; None where there is none, or not all of it."""
        try:
            return self._converted(self._repository(location.repo, CONVERSION), location)
        except (HubRefused, _NotThere) as error:
            _log.debug("no conversion of %s: %s", location, error)
            return None

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
                names = [str(one["name"]) for kind in ("branches", "tags", "converts") for one in refs.get(kind, ())]
                return f" {location.revision!r}; branches and tags: {_listed(names)}"
        except (HubRefused, HubBusy, KeyError, TypeError):
            pass  # the refusal itself is what counts
        return ""


def _shards(split: _SplitFiles) -> tuple[Shard, ...]:
    repository = split.repository
    folders = {path.rpartition("/")[0] for path in split.paths}
    # The folders were listed already, so this sends no request.
    known = {file.path: file for folder in folders for file in repository.below(folder, deep=False)}
    files = [known[path] for path in split.paths]
    missing = [file.path for file in files if not file.fingerprint]
    if missing:
        raise HubRefused(
            "offline",
            f"has {len(files)} files for this split, but HF_HUB_OFFLINE is set and {len(missing)} of them are not "
            f"in the local cache (the first is {missing[0]!r}); while online: hf download {repository.name} "
            f"--repo-type dataset --revision {repository.commit}",
        )
    _log.info("the dataset %s at commit %s: %d files", repository.name, repository.commit, len(files))
    return tuple(
        Shard(url_of(repository.name, repository.commit, file.path), file.size, file.fingerprint) for file in files
    )


def appended(spec: Spec, known: Sequence[Shard], now: Sequence[Shard]) -> tuple[Shard, ...]:
    """The files that a dataset has at a later commit and did not have at the one that is known.

    Raises ``SourceChanged`` where a file of before is gone or another one: then the new ones may hold its rows again.
    """
    before = {HubPath.parse(shard.path).path: shard for shard in known}
    there = {HubPath.parse(shard.path).path: shard for shard in now}
    changed = [path for path, shard in before.items() if path not in there or _other(shard, there[path])]
    if changed:
        raise SourceChanged(
            f"source {str(spec)!r}: {len(changed)} of the {len(before)} files that the run reads are gone or others at "
            f"{HubPath.parse(now[0].path).revision} (the first is {changed[0]!r}), so its other files are no addition; "
            "name the dataset at that commit as a new source, and drop this one"
        )
    return tuple(shard for path, shard in there.items() if path not in before)


def _other(one: Shard, another: Shard) -> bool:
    return (one.size, one.fingerprint) != (another.size, another.fingerprint)


def _find(repository: Repository, pattern: str) -> Sequence[str]:
    if "://" in pattern:
        raise splits.CardError(f"its card names files elsewhere: {pattern!r}; name the dataset that they are of")
    try:
        return [file.path for file in find(repository, pattern)]
    except ValueError as error:
        raise splits.CardError(f"its card has the pattern {pattern!r}, which is none ({error})") from None


def _no_split(location: HubLocation, config: str, there: Sequence[str]) -> str:
    of = f" in its config {config!r}" if config != "default" else ""
    return f"has no split {location.split!r}{of}; its splits: {_listed(there)}"


def _named(location: HubLocation) -> str:
    config = f" of config {location.config!r}" if location.config else ""
    return f"the split {location.split!r}{config}"


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = len(shown) - LISTED
    return (", ".join(map(repr, shown[:LISTED])) or "none") + (f" and {more} more" if more > 0 else "")
