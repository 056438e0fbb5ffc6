"""What mixture files are read against: made once by an entry point, and handed down."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tokenloom_server.config.catalog import Catalog
from tokenloom_server.mixing.catalog import policies
from tokenloom_server.sources.catalog import SourceCatalog

#: Where --allow-plugins is not given: names, separated by commas.
ALLOW_PLUGINS = "TOKENLOOM_ALLOW_PLUGINS"


def open_catalog(plugins: Iterable[str] = ()) -> Catalog:
    """All that this release knows, and the source schemes of these names from outside the tree.

    Raises ``ConfigError`` for one that does not load.
    """
    return Catalog(SourceCatalog(plugins), policies())


def allowed_plugins(option: str | None = None) -> list[str]:
    """The names that an operator allows, by the option or else by the environment."""
    text = os.environ.get(ALLOW_PLUGINS, "") if option is None else option
    return [name.strip() for name in text.split(",") if name.strip()]
