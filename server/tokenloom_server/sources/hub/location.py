"""The location of a spec of the Hub: ``ORG/NAME[/CONFIG][@REVISION]:SPLIT``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenloom_server.errors import ConfigError


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
