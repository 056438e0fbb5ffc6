"""``megatron:PREFIX``: the indexed datasets of Megatron-LM, two files each: ``PREFIX.bin`` and ``PREFIX.idx``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import ConfigError, SourceError
from tokenloom_server.sources.base import Shard, Source
from tokenloom_server.sources.id_scheme import IdScheme
from tokenloom_server.sources.locations import matching_files, nearest_folder
from tokenloom_server.sources.scheme import ReadRequest

#: Of the ids, and of where each sequence and document begins in them.
DATA, INDEX = ".bin", ".idx"


class MegatronScheme(IdScheme):
    """Mapped files of ids; a row is a document. Both files of a dataset are shards, so that a manifest freezes both."""

    name = "megatron"
    usage = "megatron:PREFIX"
    stores_row_counts = True
    refuses_urls = "files of megatron: are mapped"

    def parse(self, text: str) -> tuple[str, str]:
        location, column = super().parse(text)
        if location.endswith((DATA, INDEX)):
            raise ConfigError(f"expected the prefix that both files share; leave {location[-4:]!r} out")
        return location, column

    def local_paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        """The two files of each dataset, in the order of their prefixes."""
        prefix, endings = spec.location, (DATA, INDEX)
        # Also a prefix that has brackets or stars in it.
        named = [prefix + ending for ending in endings if (base_dir / (prefix + ending)).is_file()]
        there = set(named or [path for ending in endings for path in matching_files(prefix + ending, base_dir)])
        if not there:
            index = base_dir / (prefix + INDEX)
            raise SourceError(f"source {str(spec)!r}: no file matches {str(index)!r}; {nearest_folder(index)}")
        paths = tuple(stem + ending for stem in sorted({path[: -len(INDEX)] for path in there}) for ending in endings)
        for path in paths:
            if path not in there:
                other = path[: -len(INDEX)] + (INDEX if path.endswith(DATA) else DATA)
                raise SourceError(
                    f"source {str(spec)!r}: {path!r} is missing beside {other!r}, and neither is of use alone; copy "
                    "it, or let the prefix match whole datasets only"
                )
        return paths

    def stems(self, names: Collection[str]) -> Mapping[str, tuple[str, str]]:
        prefixes = [name.removesuffix(INDEX) for name in names if name.endswith(INDEX)]
        return {
            prefix + ending: (prefix, "") for prefix in prefixes if prefix + DATA in names for ending in (DATA, INDEX)
        }

    def files_in_order(self, shards: Sequence[Shard]) -> int:
        return len(shards) // 2

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.megatron.reader import MegatronSource

        return MegatronSource(request)
