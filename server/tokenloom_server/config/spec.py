"""The spec: the string that names a source, ``scheme:location:column``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenloom_server.errors import ConfigError
from tokenloom_server.storage.urls import is_remote, redacted, refuse_unsafe

SCHEMES = {
    "parquet": "parquet:GLOB:COLUMN",
    "jsonl": "jsonl:GLOB:COLUMN",
    "txt": "txt:GLOB:text",
    "arrow": "arrow:DIR:COLUMN",
    "hf": "hf:ORG/NAME[/CONFIG][@REVISION]:SPLIT:COLUMN",
    "megatron": "megatron:PREFIX",
    "npy": "npy:GLOB",
}

#: The column of sources that have nothing but ids: it need not be named.
IDS = "ids"
#: What the files of ``npy:GLOB:TYPE`` hold, which do not say so themselves.
RAW_TYPES = ("uint16", "uint32", "int32")


@dataclass(frozen=True, slots=True)
class HubLocation:
    """The location of an ``hf:`` spec: ``ORG/NAME[/CONFIG][@REVISION]:SPLIT``.

    A repository of old may go by ``NAME`` alone; then there is no place for a config, which needs the full name.
    """

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
        named, at, revision = left.partition("@")
        parts = named.split("/", 2)
        repo, config = "/".join(parts[:2]), parts[2] if len(parts) > 2 else None
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", repo, re.ASCII):
            raise ConfigError(f"the repository is {repo!r}, expected ORG/NAME or ORG/NAME/CONFIG as the Hub has it")
        if config is not None and (not config or re.search(r"[<>|?*/\\]", config)):
            raise ConfigError(f"the config is {config!r}, expected a name as the dataset's card has it")
        if at and (not revision or re.search(r"[\s~^?*\[\\]|\.\.", revision)):
            raise ConfigError(f"the revision is {revision!r}, expected a branch, a tag or a commit behind the '@'")
        if not re.fullmatch(r"\w[\w.-]*", split):
            raise ConfigError(f"the split is {split!r}, expected a whole split such as 'train'")
        return cls(repo, config, revision or None, split)


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed spec.

    ``location`` may contain colons (a URL, a drive letter, the split of a repository): the scheme ends at the first
    colon and the column begins after the last. Schemes of bare ids name no column: it is ``ids``, or for raw files of
    ``npy:GLOB:TYPE`` their type.
    """

    scheme: str
    location: str
    column: str
    commit: str | None = None
    """On the Hub: where files are resolved, they are those of this commit. No part of the spec's text."""

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Raises ``ConfigError`` when the scheme is unknown or a part is missing."""
        scheme, colon, rest = text.partition(":")
        text = redacted(text)
        if not colon or scheme not in SCHEMES:
            known = ", ".join(SCHEMES.values())
            raise ConfigError(f"source {text!r}: the scheme is {scheme!r}, expected one of {known}")
        if scheme in ("megatron", "npy"):
            return cls._of_ids(scheme, rest)
        location, colon, column = rest.rpartition(":")
        if not colon or not location or not column:
            raise ConfigError(f"source {text!r}: expected {SCHEMES[scheme]}, with no part empty")
        if scheme == "txt" and column != "text":
            raise ConfigError(f"source {text!r}: a txt source has one column, 'text', but {column!r} was asked for")
        if is_remote(location):
            refuse_unsafe(f"source {text!r}", location)
        if scheme == "hf":
            try:
                HubLocation.parse(location)
            except ConfigError as error:
                raise ConfigError(f"source {text!r}: {error}; a source on the Hub is {SCHEMES[scheme]}") from None
        return cls(scheme, location, column)

    @classmethod
    def _of_ids(cls, scheme: str, rest: str) -> Spec:
        location, column = rest, IDS
        known = (IDS, *RAW_TYPES) if scheme == "npy" else (IDS,)
        before, colon, last = rest.rpartition(":")
        if colon and last in known:
            location, column = before, last
        text = redacted(f"{scheme}:{rest}")
        if not location:
            raise ConfigError(f"source {text!r}: expected {SCHEMES[scheme]}, with no part empty")
        if scheme == "megatron" and location.endswith((".bin", ".idx")):
            raise ConfigError(
                f"source {text!r}: expected the prefix that both files share; leave {location[-4:]!r} out"
            )
        if is_remote(location):
            refuse_unsafe(f"source {text!r}", location)
        return cls(scheme, location, column)

    @property
    def hub(self) -> HubLocation:
        """What the location of an ``hf:`` spec names."""
        return HubLocation.parse(self.location)

    @property
    def place(self) -> str:
        """Where the files lie: a path or pattern, or for ``hf:`` the repository's URL."""
        return f"hf://datasets/{self.hub.repo}/" if self.scheme == "hf" else self.location

    def __str__(self) -> str:
        is_implied = self.scheme in ("megatron", "npy") and self.column == IDS
        return f"{self.scheme}:{self.location}" + ("" if is_implied else f":{self.column}")
