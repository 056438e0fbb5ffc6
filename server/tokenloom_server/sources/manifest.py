"""The manifest: which files a run was begun with, frozen, so that nothing under it changes unseen."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from tokenloom_proto.seal import canonical

from tokenloom_server.config.catalog import SourceSchemes, Spec
from tokenloom_server.errors import SourceChanged, SourceError, StorageError
from tokenloom_server.sources import files
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.scheme import Plugin, scheme_of
from tokenloom_server.storage.file import LocalFile
from tokenloom_server.storage.hub_repository import HubPath, is_hub
from tokenloom_server.storage.remote import REMEDY, Entry
from tokenloom_server.storage.urls import is_remote

_log = logging.getLogger(__name__)

#: Version of the manifest's JSON form.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The shards of one source, in reading order."""

    spec: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of all sources of a run, in source-id order.

    Row counts are not part of it: they follow from the files, and text has to be scanned for them.
    """

    sources: tuple[SourceFiles, ...]
    plugins: dict[str, Plugin] = field(default_factory=dict)
    """By scheme, the packages whose schemes read these files."""
    transforms: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    """By name, the code of the users' functions that make other texts of these files' (``Transform.code``)."""

    def shards(self, spec: str) -> tuple[Shard, ...]:
        """The shards of a source. Raises ``SourceError`` when the manifest does not have it."""
        for source in self.sources:
            if source.spec == spec:
                return source.shards
        known = ", ".join(repr(source.spec) for source in self.sources) or "none"
        raise SourceError(f"the run's manifest has no source {spec!r}; it has {known}")

    def document(self, *, spots: bool = True) -> dict[str, Any]:
        """Plain data, which ``from_document`` reads; ``digest`` hashes its canonical text without ``spots``."""
        sources = [
            {
                "spec": source.spec,
                # Spots only where there are some: as records were written before.
                "shards": [
                    {"path": s.path, "size": s.size, "fingerprint": s.fingerprint}
                    | ({"spots": s.spots} if spots and s.spots else {})
                    for s in source.shards
                ],
            }
            for source in self.sources
        ]
        # Only where there are some, so that the digest of a run without plugins stays.
        plugins = {"plugins": plugins_to_json(self.plugins)} if self.plugins else {}
        transforms = {"transforms": self.transforms} if self.transforms else {}
        return {"format": FORMAT, "sources": sources, **plugins, **transforms}

    @classmethod
    def from_document(cls, document: Any) -> Manifest:
        """Raises ``SourceError`` when that is no manifest or one of another format."""
        try:
            format_number = document["format"]
            if format_number != FORMAT:
                raise SourceError(
                    f"the manifest has format {format_number!r}, but this server reads format {FORMAT}"
                )
            return cls(
                tuple(
                    SourceFiles(
                        str(source["spec"]),
                        tuple(Shard(**shard) for shard in source["shards"]),
                    )
                    for source in document["sources"]
                ),
                plugins_from_json(document.get("plugins", {})),
                document.get("transforms", {}),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"this is not a manifest ({type(error).__name__}: {error})") from None

    @property
    def commits(self) -> Mapping[str, Sequence[str]]:
        """``commits_of`` each source on the Hub, by spec."""
        return {
            source.spec: commits
            for source in self.sources
            if (commits := commits_of(source.shards))
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical text: copied files, which have other times of modification, are the same ones."""
        return hashlib.sha256(canonical(self.document(spots=False)).encode()).hexdigest()


def commits_of(shards: Iterable[Shard]) -> Sequence[str]:
    """Of a dataset on the Hub: each ``ORG/NAME@COMMIT`` that a run reads, whatever is pushed there later. The first is
    where it began, those after it brought more files. None for other sources."""
    paths = (HubPath.parse(shard.path) for shard in shards if is_hub(shard.path))
    return tuple(dict.fromkeys(f"{location.repo}@{location.revision}" for location in paths))


def build(specs: Iterable[Spec], base_dir: Path) -> Manifest:
    """Freezes the files that the specs match now; relative locations are below ``base_dir``.

    Reads 128 KiB of each local file, and at most 256 MiB of all beside that; remote ones are listed. Raises
    ``SourceError`` when a spec matches nothing.
    """
    specs = list(specs)
    finders = {spec.scheme.name: scheme_of(spec).finder() for spec in specs}
    remote = any(spec.is_remote for spec in specs)
    shards = files.in_threads(
        lambda spec: finders[spec.scheme.name](spec, base_dir), specs, remote=remote
    )
    spotted = (files.with_spots(own, base_dir, len(specs)) for own in shards)
    sources = tuple(SourceFiles(str(spec), own) for spec, own in zip(specs, spotted, strict=True))
    return Manifest(sources, plugins_of(specs))


def plugins_of(specs: Iterable[Spec]) -> dict[str, Plugin]:
    """By scheme, the packages that bring the schemes of these specs, but for those of Tokenloom."""
    schemes = {spec.scheme.name: scheme_of(spec) for spec in specs}
    return {
        name: scheme.plugin for name, scheme in sorted(schemes.items()) if scheme.plugin is not None
    }


class Listings:
    """The files that sources match now. Each remote place is listed once, when it is first asked for."""

    def __init__(self, schemes: SourceSchemes) -> None:
        self._schemes = schemes
        self._entries: dict[str, dict[str, Entry]] = {}

    def paths(self, spec: str, base_dir: Path) -> tuple[str, ...]:
        """The files of a source on this machine. Raises ``SourceError`` where there is none."""
        parsed = self._schemes.spec(spec)
        return scheme_of(parsed).paths(parsed, base_dir)

    def entries(self, spec: str) -> dict[str, Entry]:
        """The files that a remote spec matches, by their paths; none where the place is empty or gone."""
        if spec not in self._entries:
            parsed = self._schemes.spec(spec)
            try:
                self._entries[spec] = {
                    entry.path: entry for entry in scheme_of(parsed).entries(parsed)
                }
            except StorageError:
                raise
            except SourceError:
                self._entries[spec] = {}
        return self._entries[spec]


def plugins_to_json(plugins: Mapping[str, Plugin]) -> dict[str, Any]:
    """Plain data, which ``plugins_from_json`` reads."""
    return {name: asdict(plugin) for name, plugin in plugins.items()}


def plugins_from_json(document: Mapping[str, Any]) -> dict[str, Plugin]:
    """Raises ``TypeError`` and ``AttributeError`` for other data."""
    return {name: Plugin(**plugin) for name, plugin in document.items()}


def verify(
    manifest: Manifest, base_dir: Path, schemes: SourceSchemes, listings: Listings | None = None
) -> None:
    """Compares every file of the manifest with the one that is there now; files that it does not name are ignored.

    ``listings``: remote files are compared with these, instead of being asked for one by one.

    Raises ``SourceChanged`` naming the first file that is missing, shortened, grown or changed, and where a scheme
    comes from another package, or another version of it.
    """
    _refuse_other_plugins(manifest, schemes)
    shards = [(source.spec, shard) for source in manifest.sources for shard in source.shards]
    if listings is not None:
        files.in_threads(
            listings.entries,
            [source.spec for source in manifest.sources if _is_listed(source)],
            remote=True,
        )

    def difference(item: tuple[str, Shard]) -> str | None:
        spec, shard = item
        is_listed = is_remote(shard.path) and not is_hub(shard.path)
        listed = (
            listings.entries(spec).get(shard.path) if listings is not None and is_listed else None
        )
        return files.difference(shard, base_dir, listed)

    remote = any(is_remote(shard.path) for _, shard in shards)
    differences = files.in_threads(difference, shards, remote=remote)
    changed = [
        (spec, text)
        for (spec, _), text in zip(shards, differences, strict=True)
        if text is not None
    ]
    if changed:
        spec, text = changed[0]
        more = f" ({len(changed) - 1} more files differ)" if len(changed) > 1 else ""
        raise SourceChanged(f"source {spec!r}: {text}{more}; {REMEDY}")


def verify_spots(manifest: Manifest, base_dir: Path, until: float) -> None:
    """Compares the spot digests of local files with what is there now, no longer than to that time of the monotonic
    clock. Raises ``SourceChanged`` naming the first file that differs."""
    for spec, shard in [
        (source.spec, shard)
        for source in manifest.sources
        for shard in source.shards
        if shard.spots
    ]:
        if monotonic() > until:
            _log.warning(
                "time was up before all files were compared with their spots: %r was not",
                shard.path,
            )
            return
        with suppress(OSError), LocalFile(base_dir / shard.path, shard.path) as file:
            if fault := files.spots_differ(shard, file):
                raise SourceChanged(f"source {spec!r}: {fault}; {REMEDY}")


def _refuse_other_plugins(manifest: Manifest, schemes: SourceSchemes) -> None:
    for name in {source.spec: None for source in manifest.sources}:
        scheme = scheme_of(schemes.spec(name))
        recorded = manifest.plugins.get(scheme.name)
        if scheme.plugin != recorded:
            actual, expected = (
                str(plugin or "Tokenloom itself") for plugin in (scheme.plugin, recorded)
            )
            raise SourceChanged(
                f"source {name!r}: the scheme {scheme.name!r} comes from {actual}, but the run began with {expected}, "
                "and other code may read other rows; install that again, or begin a new run under another name (`run`)"
            )


def appeared(manifest: Manifest, base_dir: Path, listings: Listings) -> tuple[str, ...]:
    """The files that the specs match now and the manifest does not have: a reason to warn, no more."""
    new: list[str] = []
    for source in manifest.sources:
        if any(is_hub(shard.path) for shard in source.shards):
            continue  # the run's commit has no more, and another one is not asked for
        known = {shard.path for shard in source.shards}
        try:
            now = (
                listings.entries(source.spec)
                if _is_listed(source)
                else listings.paths(source.spec, base_dir)
            )
        except SourceError:
            continue  # that files are gone is for `verify` to say
        new += [path for path in now if path not in known]
    return tuple(new)


def _is_listed(source: SourceFiles) -> bool:
    return any(is_remote(shard.path) and not is_hub(shard.path) for shard in source.shards)
