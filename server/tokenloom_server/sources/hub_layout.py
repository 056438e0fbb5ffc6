"""Which files of a repository make which split: `datasets` itself decides.

It is given a folder with the names of the repository's files, all empty, and the part of the card that speaks of
configs. To `datasets` a folder and a repository have the same rules, so nothing of them stands here; and it needs no
network, so that tokens, retries, the cache and working offline are those of ``storage.hub_client``.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from tokenloom_server.errors import SourceError
from tokenloom_server.storage.hub_client import INSTALL
from tokenloom_server.storage.hub_repository import Repository
from tokenloom_server.storage.yaml_bounds import check_yaml

_log = logging.getLogger(__name__)

#: Files of a repository at most: each is a name on disk while splits are looked up.
MOST_FILES = 100_000

#: What `datasets` takes configs from, each in place of what the one before says; and what old ones have beside it.
_CARDS = ("README.md", ".huggingface.yaml")
_OLD_INFOS = "dataset_infos.json"
_READ_OF_A_CARD = ("configs", "dataset_info")

#: A pattern that is a URL, chained ones, or leads up or to the root.
_ELSEWHERE = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*:|://|::|^[/~\\]|(^|[/\\])\.\.([/\\]|$)")

#: Options of a config that make other rows of the same files, which no scheme does.
_ROW_OPTIONS = (
    "encoding",
    "encoding_errors",
    "field",
    "filters",
    "keep_linebreaks",
    "on_bad_files",
    "sample_by",
)


class LayoutError(Exception):
    """A repository whose splits `datasets` cannot tell, or a card that is not obeyed; the text says why."""


@dataclass(frozen=True, slots=True)
class ConfigFiles:
    """The files of a config."""

    name: str
    format: str
    """What `datasets` reads them as: ``parquet``, ``json``, ``text``, ``arrow``, ``csv``, ``imagefolder``, …"""
    splits: Mapping[str, Sequence[str]]
    """By split, paths below the repository's root in reading order, each once."""
    row_options: Mapping[str, Any]
    """What the card sets of how rows are made of files, and no scheme does."""


class Layout:
    """The configs of a repository at one commit. Safe for threads."""

    def __init__(self, repository: Repository) -> None:
        """Raises ``LayoutError``, ``SourceError`` where `datasets` is missing, and what reading a repository raises."""
        try:
            self._datasets = import_module("datasets")
            folder = Path(tempfile.mkdtemp(prefix="tokenloom-hub-")).resolve()
        except ImportError as error:
            raise SourceError(
                f"sources on the Hub need `datasets` 4.0 or later ({error}); {INSTALL}"
            ) from None
        except OSError as error:
            raise SourceError(
                f"sources on the Hub need a temporary folder ({error}); name one by TMPDIR"
            ) from None
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._lock = threading.Lock()
        self._name = repository.name
        self._cache = str(folder / ".cache")
        # By its own name, since that of a loading script is the repository's.
        self._root = folder / PurePosixPath(repository.name).name
        _write_names(repository, self._root)
        try:
            #: Names, in the card's order; ``default`` alone where it names none.
            self.configs: list[str] = self._datasets.get_dataset_config_names(
                str(self._root), cache_dir=self._cache
            )
        # What a card can say has no end, and neither has what is raised for it.
        except Exception as error:
            raise self._refusal(error) from None

    @cached_property
    def default(self) -> str | None:
        """The config that is meant where none is named; None where the card says of none that it is."""
        name: str | None = self._datasets.get_dataset_default_config_name(
            str(self._root), cache_dir=self._cache
        )
        return name

    def files(self, config: str) -> ConfigFiles:
        """The files of one of ``configs``. Raises ``LayoutError``."""
        try:
            with self._lock:
                builder = self._datasets.load_dataset_builder(
                    str(self._root), config, cache_dir=self._cache
                )
            splits = {
                str(split): self._paths(files) for split, files in builder.config.data_files.items()
            }
        except Exception as error:  # as above
            raise self._refusal(error) from None
        by_default = type(builder.config)()
        set_options = {name: getattr(builder.config, name, None) for name in _ROW_OPTIONS}
        return ConfigFiles(
            config,
            builder.name,
            splits,
            {
                name: value
                for name, value in set_options.items()
                if value != getattr(by_default, name, None)
            },
        )

    def _paths(self, absolute: Sequence[str]) -> list[str]:
        """Below the repository's root. A file that several patterns match, which `datasets` reads as often, is there
        once: no row is repeated within an epoch."""
        paths = list(dict.fromkeys(os.path.relpath(path, self._root) for path in absolute))
        if len(paths) < len(absolute):
            _log.warning(
                "the dataset %s: a split has %d files, which patterns match %d times; each is read once",
                self._name, len(paths), len(absolute),
            )  # fmt: skip
        return paths

    def _refusal(self, error: Exception) -> LayoutError:
        text = " ".join(
            str(error).replace(f"{self._root}/", "").replace(str(self._root), "its root").split()
        )
        reason = text.partition(" with any supported extension")[0][:300]
        if isinstance(error, zipfile.BadZipFile):  # to look into one it would have to be there
            reason = "its files lie in zip archives"
        return LayoutError(
            f"`datasets` finds no splits in it: {reason} ({type(error).__name__}). Files may be named by a pattern, "
            f"too, as in parquet:hf://datasets/{self._name}/FOLDER/*.parquet:COLUMN"
        )


class Conversion:
    """The Hub's own conversion of a dataset, ``CONFIG/SPLIT/0000.parquet`` and so on, as a ``Layout``."""

    def __init__(self, repository: Repository) -> None:
        """Raises what reading a repository raises."""
        self._configs: dict[str, dict[str, list[str]]] = {}
        for file in repository.below("", deep=True):
            config, _, rest = file.path.partition("/")
            split, _, name = rest.partition("/")
            if name.endswith(".parquet"):
                self._configs.setdefault(config, {}).setdefault(split, []).append(file.path)
        self.configs = list(self._configs)
        self.default = (
            self.configs[0]
            if len(self.configs) == 1
            else "default"
            if "default" in self._configs
            else None
        )

    def files(self, config: str) -> ConfigFiles:
        """The files of one of ``configs``."""
        return ConfigFiles(config, "parquet", self._configs[config], {})


def _write_names(repository: Repository, root: Path) -> None:
    """Makes the folder that `datasets` looks at."""
    paths = {file.path for file in repository.below("", deep=True)}
    if len(paths) > MOST_FILES:
        raise LayoutError(
            f"it has {len(paths):,} files, more than the {MOST_FILES:,} among which splits are looked up; name those "
            f"that are meant, as in parquet:hf://datasets/{repository.name}/FOLDER/*.parquet:COLUMN"
        )
    card: dict[str, Any] = {}
    for name in _CARDS:
        card |= checked_card(repository.text(name) or "", name) if name in paths else {}
    # Always there: without a header huggingface_hub logs that it found none.
    texts = {
        _CARDS[
            0
        ]: f"---\n{yaml.dump(card, Dumper=yaml.CSafeDumper, allow_unicode=True, sort_keys=False)}---\n"
    }
    if _OLD_INFOS in paths:
        texts[_OLD_INFOS] = repository.text(_OLD_INFOS) or "{}"
    try:
        for folder in {path.rpartition("/")[0] for path in ("", *paths)}:
            (root / folder).mkdir(parents=True, exist_ok=True)
        for path in sorted(paths.difference(_CARDS, texts)):
            # Fails where a disk takes two names for one.
            (root / path).touch(exist_ok=False)
        for path, text in texts.items():
            (root / path).write_text(text, encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise LayoutError(
            f"the names of its files cannot be written below {str(root)!r}: {error}"
        ) from None


def checked_card(text: str, name: str) -> dict[str, Any]:
    """What a card, or a file of YAML beside it, says of configs, held to bounds before anything is built of it.

    Raises ``LayoutError`` for what is no YAML, and for a pattern that leads out of the repository: `datasets` would
    look there, with all that this server may read.
    """
    header = import_module("huggingface_hub.repocard").REGEX_YAML_BLOCK.search(text)
    source = text if name != _CARDS[0] else header[2] if header else ""
    try:
        check_yaml(source)
        document = yaml.load(source, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise LayoutError(
            f"its {name} has no YAML that is read ({' '.join(str(error).split())})"
        ) from None
    if not isinstance(document, dict):
        return {}
    card = {key: document[key] for key in _READ_OF_A_CARD if key in document}
    for pattern in _texts(card.get("configs")):
        if _ELSEWHERE.search(pattern):
            raise LayoutError(
                f"its {name} names files elsewhere: {pattern!r}; name the dataset that they are of"
            )
    return card


def _texts(configs: Any) -> Iterator[str]:
    """All texts in the ``data_files`` and ``data_dir`` of configs."""
    entries = configs if isinstance(configs, list) else []
    values = [
        entry.get(key)
        for entry in entries
        if isinstance(entry, dict)
        for key in ("data_files", "data_dir")
    ]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
