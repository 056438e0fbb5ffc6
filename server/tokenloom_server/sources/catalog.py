"""The source schemes that there are. CONTRIBUTING.md shows how to add one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenloom_server.config.catalog import Catalog
from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import ConfigError
from tokenloom_server.sources.arrow.scheme import ArrowScheme
from tokenloom_server.sources.hub.scheme import HubScheme
from tokenloom_server.sources.jsonl.scheme import JsonlScheme
from tokenloom_server.sources.litdata.scheme import LitdataScheme
from tokenloom_server.sources.mds.scheme import MdsScheme
from tokenloom_server.sources.megatron.scheme import MegatronSamplesScheme, MegatronScheme
from tokenloom_server.sources.npy.scheme import NpyScheme
from tokenloom_server.sources.parquet.scheme import ParquetScheme
from tokenloom_server.sources.plugins import load_plugins, why_unknown
from tokenloom_server.sources.scheme import Scheme
from tokenloom_server.sources.txt.scheme import TxtScheme
from tokenloom_server.storage.urls import is_remote, redacted, refuse_unsafe

#: Schemes of single files: repositories of the Hub may hold such files, too.
_FILES = (ParquetScheme(), JsonlScheme(), TxtScheme(), ArrowScheme())
_MEGATRON = (MegatronScheme(), MegatronSamplesScheme())
BUILT_IN: tuple[Scheme, ...] = (
    *_FILES,
    HubScheme(_FILES),
    *_MEGATRON,
    NpyScheme(),
    MdsScheme(),
    LitdataScheme(),
)


class SourceCatalog:
    """Source schemes by name. Implements ``config.catalog.SourceSchemes``."""

    def __init__(self, plugins: Iterable[str] = ()) -> None:
        """``plugins``: the names of schemes from outside the tree that are loaded, too; see ``load_plugins``."""
        self.schemes: dict[str, Scheme] = {scheme.name: scheme for scheme in BUILT_IN}
        if allowed := list(plugins):
            self.schemes |= {scheme.name: scheme for scheme in load_plugins(allowed, self.schemes)}

    @property
    def usages(self) -> str:
        """How specs are written, of every scheme, for messages."""
        return ", ".join(scheme.usage for scheme in self.schemes.values())

    @property
    def endings(self) -> Mapping[str, Scheme]:
        """By the ending of a file's name, the scheme that reads such files where the short form names no scheme."""
        return {ending: scheme for scheme in self.schemes.values() for ending in scheme.all_endings}

    def spec(self, text: str) -> Spec:
        """A parsed spec. Raises ``ConfigError`` for an unknown scheme, and for a text that its scheme refuses."""
        name, colon, rest = text.partition(":")
        source = f"source {redacted(text)!r}"
        scheme = self.schemes.get(name) if colon else None
        if scheme is None:
            reason = why_unknown(name) if colon else None
            raise ConfigError(
                f"{source}: {reason or f'the scheme is {name!r}, expected one of {self.usages}'}"
            )
        try:
            location, column = scheme.parse(rest)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        if is_remote(location):
            refuse_unsafe(source, location)
        return Spec(scheme, location, column)


def sources_of(catalog: Catalog) -> SourceCatalog:
    """The source schemes of a catalog, with all that they can do."""
    assert isinstance(catalog.sources, SourceCatalog), "the catalog was not made of schemes"
    return catalog.sources
