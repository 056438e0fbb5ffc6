"""What mixture files are read against: made once by an entry point, and handed down."""

from __future__ import annotations

from tokenloom_server.config.catalog import Catalog
from tokenloom_server.sources.catalog import SourceCatalog


def built_in_catalog() -> Catalog:
    """All that this release knows."""
    return Catalog(SourceCatalog())
