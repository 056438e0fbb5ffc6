"""``megatron:PREFIX``: the indexed datasets of Megatron-LM, two files each: ``PREFIX.bin`` and ``PREFIX.idx``.

``megatron-samples:CACHE``: the samples that Megatron-LM made of one, by the files that its ``GPTDataset`` left in
``--data-cache-path``: ``CACHE-description.txt`` and three arrays.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tokenloom_proto.files import read_file

from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import ConfigError, SourceError
from tokenloom_server.sources.base import Shard, Source
from tokenloom_server.sources.id_scheme import IdScheme
from tokenloom_server.sources.locations import matching_files, nearest_folder
from tokenloom_server.sources.scheme import ReadRequest

#: Of the ids, and of where each sequence and document begins in them.
DATA, INDEX = ".bin", ".idx"
#: Of the samples: what they were made by, the documents in their order, where samples begin in these, their order.
CACHED = ("-description.txt", "-document_index.npy", "-sample_index.npy", "-shuffle_index.npy")


class MegatronScheme(IdScheme):
    """Mapped files of ids; a row is a document. Both files of a dataset are shards, so that a manifest freezes both."""

    name = "megatron"
    usage = "megatron:PREFIX"
    stores_row_counts = True
    refuses_urls = "files of megatron: are mapped"

    def parse(self, text: str) -> tuple[str, str]:
        location, column = super().parse(text)
        if location.endswith((DATA, INDEX)):
            raise ConfigError(
                f"expected the prefix that both files share; leave {location[-4:]!r} out"
            )
        return location, column

    def local_paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        """The two files of each dataset, in the order of their prefixes."""
        prefix, endings = spec.location, (DATA, INDEX)
        # Also a prefix that has brackets or stars in it.
        named = [prefix + ending for ending in endings if (base_dir / (prefix + ending)).is_file()]
        there = set(
            named
            or [path for ending in endings for path in matching_files(prefix + ending, base_dir)]
        )
        if not there:
            index = base_dir / (prefix + INDEX)
            raise SourceError(
                f"source {str(spec)!r}: no file matches {str(index)!r}; {nearest_folder(index)}"
            )
        paths = tuple(
            stem + ending
            for stem in sorted({path[: -len(INDEX)] for path in there})
            for ending in endings
        )
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
            prefix + ending: (prefix, "")
            for prefix in prefixes
            if prefix + DATA in names
            for ending in (DATA, INDEX)
        }

    def files_in_order(self, shards: Sequence[Shard]) -> int:
        return len(shards) // 2

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.megatron.reader import MegatronSource

        return MegatronSource(request)


class MegatronSamplesScheme(IdScheme):
    """Mapped files, of which the last array says how many samples there are; a row is a sample, in the job's order."""

    name = "megatron-samples"
    usage = "megatron-samples:CACHE"
    stores_row_counts = True
    refuses_urls = "files of megatron-samples: are mapped"
    gives_samples = True

    def local_paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        """The cached files, and the two of the dataset that the description names."""
        paths = tuple(spec.location + ending for ending in CACHED)
        try:
            prefix = json.loads(read_file(base_dir / paths[0]))["dataset_path"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SourceError(
                f"source {str(spec)!r}: {paths[0]!r} does not say its dataset_path ({type(error).__name__}: {error}); "
                "name what the cached files of one GPTDataset begin with, up to '-GPTDataset-train'"
            ) from None
        return (*paths, f"{prefix}{DATA}", f"{prefix}{INDEX}")

    def files_in_order(self, shards: Sequence[Shard]) -> int:
        return 1

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.megatron.samples import MegatronSamples

        return MegatronSamples(request)
