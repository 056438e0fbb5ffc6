"""``--dataset-mix "wiki/*.parquet:0.9 code:0.1"``: the short form of a flat mixture.

What comes of it is a whole mixture document, as a file would hold it, with everything written out that the short form
leaves to be found. It is validated like any other, and can be printed and gone on with as a file.
"""

from __future__ import annotations

import glob
import math
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from tokenloom_proto.files import resolved
from tokenloom_server.config.batching import ALL_COLUMNS
from tokenloom_server.config.catalog import Spec
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.errors import ConfigError, SourceError, StorageError, reason
from tokenloom_server.sources.catalog import SourceCatalog
from tokenloom_server.sources.files import ending_of
from tokenloom_server.sources.locations import matching_entries
from tokenloom_server.sources.open import columns_of
from tokenloom_server.sources.scheme import Scheme, scheme_of
from tokenloom_server.storage.hub_repository import is_hub
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.urls import is_remote, redacted, refuse_unsafe

#: The option that all this is about; begins every error.
OPTION = "--dataset-mix"
#: A column of one of these names is meant where a file has one of them only.
COLUMNS = ("text", "input_ids", "ids", "tokens")
_ANYWHERE = DataRoots()


@dataclass(frozen=True, slots=True)
class _Item:
    """One item, with everything found."""

    text: str
    spec: Spec
    weight: float | None
    files: tuple[str, ...]


def document(
    mix: str, base_dir: Path, catalog: SourceCatalog, roots: DataRoots = _ANYWHERE, **fields: Any
) -> dict[str, Any]:
    """The mixture document that a short form means. ``fields`` are the run's own, as in a mixture file, and ``policy``
    the root's; what is None is left out. It is not validated yet.

    An item is ``path``, ``path:weight``, ``path@column:weight``, or a spec with or without a weight. A path is a file,
    a pattern or a folder, below ``base_dir`` if relative. Raises ``ConfigError`` naming the item, and ``SourceError``
    for a file that cannot be read.
    """
    try:
        texts = shlex.split(mix)
    except ValueError as error:
        raise ConfigError(
            f"{OPTION} {mix!r}: {error}; quote a path with spaces: \"'my data/*.txt':0.9\""
        ) from None
    if not texts:
        raise ConfigError(
            f'{OPTION}: is empty; expected items such as "wiki/*.parquet:0.9 code.jsonl:0.1"'
        )
    edges = [edge for text in fields.pop("edges", None) or () for edge in text.split(",")]
    batching = {
        "bucket_by": fields.pop("bucket_by", None),
        "edges": [int(e) if e.isdigit() else e for e in edges],
    }
    fields["batching"] = {name: value for name, value in batching.items() if value} or None
    items = [
        _Reader(text, base_dir, catalog, roots, ALL_COLUMNS if fields["batching"] else "").read()
        for text in texts
    ]
    _refuse_alike(items, base_dir)
    policy = fields.pop("policy", None) or "least_consumed"
    children = []
    for item, alias in zip(items, aliases([item.spec for item in items]), strict=True):
        child: dict[str, Any] = {"source": str(item.spec), "alias": alias}
        if item.weight is not None:
            child["weight"] = int(item.weight) if item.weight.is_integer() else item.weight
        children.append(child)
    own_fields = {name: value for name, value in fields.items() if value is not None}
    return {**own_fields, "mixture": {"policy": policy, "children": children}}


def as_yaml(mixture: dict[str, Any]) -> str:
    """The text of a mixture file."""
    text: str = yaml.safe_dump(mixture, sort_keys=False, allow_unicode=True, width=120)
    return text


class _Reader:
    """Reads one item."""

    def __init__(
        self, text: str, base_dir: Path, catalog: SourceCatalog, roots: DataRoots, column: str
    ) -> None:
        """``column``: what is read where the item names none; empty to find it."""
        self._text = text
        self._where = f"{OPTION} item {redacted(text)!r}"
        self._base_dir = base_dir
        self._catalog = catalog
        self._by_ending = {
            end: scheme for end, scheme in catalog.endings.items() if not scheme.by_folder
        }
        self._by_folder = catalog.endings.keys() - self._by_ending.keys()
        self._roots, self._default_column = roots, column
        # By URL: whether an item is one, or ends with a column or a weight, is asked several times.
        self._listed: dict[str, list[str]] = {}

    def read(self) -> _Item:
        try:
            return self._read()
        except OSError as error:
            raise ConfigError(f"{self._where}: cannot be looked at ({reason(error)})") from None

    def _read(self) -> _Item:
        head, weight = self._weight()
        if head.partition(":")[0] in self._catalog.schemes and ":" in head and not is_hub(head):
            return self._item(self._catalog.spec(head), weight)
        path, column = head, ""
        if not self._matches(path):
            path, _, column = head.rpartition("@")
            if not column or "/" in column or ":" in column or not self._matches(path):
                self._refuse_missing(head, weight)
        place = path if is_remote(path) else os.path.expanduser(path)  # noqa: PTH111
        return self._item(self._spec(place, column), weight)

    def _item(self, spec: Spec, weight: float | None) -> _Item:
        self._roots.check_pattern(self._where, self._base_dir, spec.place)
        files = scheme_of(spec).paths(spec, self._base_dir)
        self._roots.check_paths(self._where, self._base_dir, files)
        if not spec.column:
            spec = replace(
                spec, column=self._default_column or self._column(spec, files[0], weight)
            )
        return _Item(self._text, spec, weight, files)

    def _weight(self) -> tuple[str, float | None]:
        """The item without its weight, and the weight if it has one."""
        head, colon, tail = self._text.rpartition(":")
        try:
            weight = float(tail) if colon else None
        except ValueError:
            weight = None
        if weight is None:
            return self._text, None
        if not head or not math.isfinite(weight) or weight <= 0:
            raise ConfigError(
                f"{self._where}: the weight is {tail!r}, expected a number above 0, as in "
                "path:0.9; to leave it out, drop the item"
            )
        return head, weight

    def _matches(self, path: str) -> list[str]:
        """Files and folders that a path or pattern names."""
        if is_remote(path):
            return self._remote(path)
        path = os.path.expanduser(path)  # noqa: PTH111
        self._roots.check_pattern(self._where, self._base_dir, path)
        if path and (self._base_dir / path).exists():
            return [path]
        return sorted(glob.glob(path, root_dir=self._base_dir, recursive=True)) if path else []  # noqa: PTH207

    def _remote(self, url: str) -> list[str]:
        """Files that a URL names, by itself or as a pattern."""
        refuse_unsafe(self._where, url)
        self._roots.check_pattern(self._where, self._base_dir, url)
        if url not in self._listed:
            try:
                self._listed[url] = [entry.path for entry in matching_entries(url, IoStats())]
            except StorageError:
                raise
            except (OSError, SourceError):
                self._listed[url] = []
        return self._listed[url]

    def _refuse_missing(self, head: str, weight: float | None) -> None:
        before, colon, tail = head.rpartition(":")
        if (
            weight is None
            and colon
            and (self._matches(before) or self._matches(before.rpartition("@")[0]))
        ):
            raise ConfigError(
                f"{self._where}: the weight is {tail!r}, expected a number above 0, as in "
                f"{before}:0.9; to leave it out, drop the item"
            )
        raise ConfigError(
            f"{self._where}: {head!r} names no file and no folder below {str(self._base_dir)!r}; an item is "
            "path[@column][:weight], where the path is a file, a pattern or a folder, or a spec: "
            f"{self._catalog.usages}"
        )

    def _spec(self, path: str, column: str) -> Spec:
        """A path as a spec; the column may be missing yet."""
        if is_remote(path):
            return Spec(self._scheme(self._matches(path)), path, column)
        folder = self._base_dir / path
        if not folder.is_dir():
            files = [name for name in self._matches(path) if (self._base_dir / name).is_file()]
            if not files:
                raise ConfigError(
                    f"{self._where}: matches folders only; name each of them, or files in them"
                )
            return Spec(self._scheme(files), path, column)
        path = path.rstrip("/") or "/"
        for scheme in self._catalog.schemes.values():
            try:
                if scheme.is_folder(folder, path):
                    return Spec(scheme, path, column)
            except ConfigError as error:
                raise ConfigError(f"{self._where}: {error}") from None
        for pattern in ("*", "**/*"):
            below = f"{glob.escape(path)}/{pattern}"
            matches = glob.glob(below, root_dir=self._base_dir, recursive=True)  # noqa: PTH207
            names_ = [
                name
                for name in matches
                if ending_of(name) in self._by_ending and (self._base_dir / name).is_file()
            ]
            if names_:
                endings = sorted({ending_of(name) for name in names_})
                if len(endings) > 1:
                    raise ConfigError(
                        f"{self._where}: the folder holds files of several kinds ({', '.join(endings)}); name one: "
                        + ", ".join(f"{path}/{pattern}{ending}" for ending in endings)
                    )
                return Spec(
                    self._by_ending[endings[0]],
                    f"{glob.escape(path)}/{pattern}{endings[0]}",
                    column,
                )
        raise ConfigError(
            f"{self._where}: the folder holds no file that ends with {', '.join(self._by_ending)}, and is none that "
            "`save_to_disk` wrote"
        )

    def _scheme(self, files: Sequence[str]) -> Scheme:
        endings = sorted({ending_of(name) for name in files})
        if endings[0] in self._by_folder and len(endings) == 1:
            raise ConfigError(
                f"{self._where}: files that end with {endings[0]} are read by folder; name the folder that they lie in"
            )
        if len(endings) > 1 and len({self._by_ending.get(ending) for ending in endings}) > 1:
            raise ConfigError(
                f"{self._where}: matches files of several kinds ({', '.join(end or 'none' for end in endings)}); let "
                "the pattern end with one of them"
            )
        if endings[0] not in self._by_ending:
            raise ConfigError(
                f"{self._where}: how {files[0]!r} is to be read does not show; expected a name that ends with "
                f"{', '.join(self._by_ending)}, or a spec: {self._catalog.usages}"
            )
        return self._by_ending[endings[0]]

    def _column(self, spec: Spec, file: str, weight: float | None) -> str:
        columns = columns_of(scheme_of(spec), file, self._base_dir)
        meant = [name for name in COLUMNS if columns.get(name) is not None]
        if len(columns) == 1 and None not in columns.values():
            meant = [*columns]
        if len(meant) == 1:
            return meant[0]
        listed = (
            ", ".join(
                f"{name} ({held.value if held else 'neither'})" for name, held in columns.items()
            )
            or "none"
        )
        suffix = "" if weight is None else f":{weight:g}"
        raise ConfigError(
            f"{self._where}: which column is meant does not show, for {file!r} has "
            f"{' and '.join(meant) if meant else 'none of ' + ', '.join(COLUMNS)}; its columns, with what they hold "
            f"(text or ids): {listed}. Name one: {shlex.quote(f'{spec.location}@COLUMN{suffix}')}, or "
            f"{shlex.quote(f'{spec.scheme.name}:{spec.location}:COLUMN{suffix}')}"
        )


def _refuse_alike(items: Sequence[_Item], base_dir: Path) -> None:
    """Refuses a file that two items read: that is a mistake, and the weights would not add up."""
    owners: dict[Path | str, _Item] = {}
    for item in items:
        for name in item.files:
            file = name if is_remote(name) else resolved(base_dir / name)
            other = owners.setdefault(file, item)
            if other is not item:
                raise ConfigError(
                    f"{OPTION}: {other.text!r} and {item.text!r} both read {name!r}; name each file once, with the sum "
                    "of the weights"
                )


def aliases(specs: Sequence[Spec]) -> list[str]:
    """A short name for each, by the last parts of its location: as many as it takes to tell them apart."""
    parts = [scheme_of(spec).name_parts(spec.location) or [str(spec)] for spec in specs]
    names: list[str] = []
    for own in parts:
        alias = next(
            (
                name
                for depth in range(1, len(own) + 1)
                if [_last(other, depth) for other in parts].count(name := _last(own, depth)) == 1
            ),
            "/".join(own),
        )
        names.append(alias)
    repeated = {alias for alias, times in Counter(names).items() if times > 1}
    return [
        str(spec) if alias in repeated else alias for spec, alias in zip(specs, names, strict=True)
    ]


def _last(names: Sequence[str], depth: int) -> str:
    return "/".join(names[-depth:])
