"""What mixture files are read against: made once by an entry point, and handed down."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from tokenloom_server.config.catalog import Catalog
from tokenloom_server.mixing.policies import policies
from tokenloom_server.sources.catalog import SourceCatalog

#: Where --allow-plugins and --allow-transforms are not given: names, separated by commas.
ALLOW_PLUGINS = "TOKENLOOM_ALLOW_PLUGINS"
ALLOW_TRANSFORMS = "TOKENLOOM_ALLOW_TRANSFORMS"


def open_catalog(plugins: Iterable[str] = (), transforms: Collection[str] = ()) -> Catalog:
    """All that this release knows, the source schemes of these names from outside the tree, and leave to call these
    functions of users.

    Raises ``ConfigError`` for one that does not load.
    """
    return Catalog(SourceCatalog(plugins), policies(), transforms)


def environment_catalog() -> Catalog:
    """What the environment allows, too. Raises ``ConfigError`` for a plugin that does not load."""
    return open_catalog(allowed_names(ALLOW_PLUGINS), allowed_names(ALLOW_TRANSFORMS))


def allowed_names(variable: str, option: str | None = None) -> list[str]:
    """The names that an operator allows, by the option or else by the environment's variable."""
    text = os.environ.get(variable, "") if option is None else option
    return [name.strip() for name in text.split(",") if name.strip()]
