"""The source schemes that there are, and those of plugins. CONTRIBUTING.md shows how to add one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata

from tokenloom_server.config.catalog import Catalog, Spec
from tokenloom_server.errors import ConfigError
from tokenloom_server.sources.hub import HubScheme
from tokenloom_server.sources.scheme import Plugin, Scheme
from tokenloom_server.sources.schemes import (
    ArrowScheme,
    JsonlScheme,
    LitdataScheme,
    MdsScheme,
    MegatronSamplesScheme,
    MegatronScheme,
    NpyScheme,
    ParquetScheme,
    TxtScheme,
)
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


# Source schemes from outside the tree: entry points of ``tokenloom.sources``, loaded only where they are allowed.


#: The group of entry points; the name of each is that of its scheme.
GROUP = "tokenloom.sources"
#: What allows plugins, as errors name it.
OPTION = "--allow-plugins"


def installed_plugins() -> Mapping[str, metadata.EntryPoint]:
    """The entry points of all installed packages, by the name of their scheme. None of them is loaded."""
    entries: dict[str, metadata.EntryPoint] = {}
    for entry in metadata.entry_points(group=GROUP):
        other = entries.setdefault(entry.name, entry)
        if other is not entry:
            raise ConfigError(
                f"the source scheme {entry.name!r} comes from {_package(other)} and from {_package(entry)}; uninstall "
                "one of them"
            )
    return entries


def load_plugins(names: Iterable[str], built_in: Iterable[str]) -> list[Scheme]:
    """The schemes of these names, which runs code of the packages that bring them.

    Raises ``ConfigError`` for a name that no package brings, or that is built in, and for a package that does not load.
    """
    installed, taken = installed_plugins(), set(built_in)
    schemes = []
    for name in dict.fromkeys(names):
        if name in taken:
            raise ConfigError(
                f"{OPTION}: {name!r} is a scheme of Tokenloom's own, which needs no plugin; leave it out"
            )
        if name not in installed:
            raise ConfigError(
                f"{OPTION}: no installed package brings the source scheme {name!r}; there is "
                f"{', '.join(sorted(installed)) or 'none'}: install the package that does"
            )
        schemes.append(_loaded(installed[name]))
    return schemes


def _loaded(entry: metadata.EntryPoint) -> Scheme:
    try:
        made = entry.load()
        scheme = made() if isinstance(made, type) else made
    except Exception as error:  # whatever the package's code raises
        raise ConfigError(
            f"{OPTION}: the source scheme {entry.name!r} of {_package(entry)} cannot be loaded "
            f"({type(error).__name__}: {error})"
        ) from error
    if not isinstance(scheme, Scheme) or scheme.name != entry.name:
        raise ConfigError(
            f"{OPTION}: {_package(entry)} brings {entry.value} as the source scheme {entry.name!r}, expected a "
            f"tokenloom_server.sources.scheme.Scheme of that name"
        )
    assert entry.dist is not None, "entry points of installed packages have one"
    scheme.plugin = Plugin(entry.dist.name, entry.dist.version)
    return scheme


def why_unknown(name: str) -> str | None:
    """Why a scheme of an installed package is not in use; None where no package has it."""
    entry = installed_plugins().get(name)
    if entry is None:
        return None
    return (
        f"the scheme {name!r} comes from the package {_package(entry)}, whose code is not run unless you allow it: "
        f"start with {OPTION} {name}"
    )


def _package(entry: metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
