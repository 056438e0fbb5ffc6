"""What a mixture file may name, of all packages: made once at an entry point, and handed down from there."""

from __future__ import annotations

from tokenloom_server.config.catalog import Catalog
from tokenloom_server.mixing import catalog as mixing


def built_in() -> Catalog:
    """What this release has."""
    return Catalog(policies=mixing.policies())
