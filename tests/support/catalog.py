"""The catalog that tests read mixtures against, and specs by it."""

from __future__ import annotations

from pathlib import Path

from tokenloom_server.catalog import open_catalog
from tokenloom_server.config.catalog import Spec
from tokenloom_server.sources.catalog import sources_of
from tokenloom_server.sources.hub import HubResolver
from tokenloom_server.sources.scheme import scheme_of

CATALOG = open_catalog()
SOURCES = sources_of(CATALOG)


def spec_of(text: str) -> Spec:
    """A parsed spec."""
    return SOURCES.spec(text)


def paths_of(spec: Spec, base_dir: Path) -> tuple[str, ...]:
    """The files of a source, as they are now."""
    return scheme_of(spec).paths(spec, base_dir)


def hub_resolver() -> HubResolver:
    """One that knows the schemes of files."""
    return HubResolver(SOURCES.endings)
