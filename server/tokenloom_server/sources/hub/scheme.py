"""``hf:ORG/NAME[/CONFIG][@REVISION]:SPLIT:COLUMN``: a split of a dataset on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import ConfigError, SourceError
from tokenloom_server.sources.base import Content, Shard, Source
from tokenloom_server.sources.hub.location import HubLocation
from tokenloom_server.sources.hub.resolver import HubDataset, HubResolver, appended, reading_scheme
from tokenloom_server.sources.scheme import Finder, ReadRequest, Scheme
from tokenloom_server.storage.file import File


class HubScheme(Scheme):
    """Files of one commit of a dataset's repository, read by the scheme that their names say."""

    name = "hf"
    usage = "hf:ORG/NAME[/CONFIG][@REVISION]:SPLIT:COLUMN"
    reads_any_row = True
    has_commits = True
    has_blank_lines = True

    def __init__(self, file_schemes: Sequence[Scheme]) -> None:
        """``file_schemes``: those that can read a repository's files, the preferred ones first."""
        self._by_ending = {
            ending: scheme for scheme in file_schemes for ending in scheme.all_endings
        }

    def parse(self, text: str) -> tuple[str, str]:
        location, column = super().parse(text)
        try:
            HubLocation.parse(location)
        except ConfigError as error:
            raise ConfigError(f"{error}; a source on the Hub is {self.usage}") from None
        return location, column

    def place(self, location: str) -> str:
        """The repository's URL."""
        return f"hf://datasets/{HubLocation.parse(location).repo}/"

    def name_parts(self, location: str) -> list[str]:
        where = HubLocation.parse(location)
        return [
            part
            for part in (*where.repo.split("/"), where.config, where.split)
            if part and part != "train"
        ]

    def finder(self) -> Finder:
        resolver = HubResolver(self._by_ending)
        return lambda spec, _: resolver.shards(spec)

    def shards(self, spec: Spec, base_dir: Path) -> tuple[Shard, ...]:
        return self.finder()(spec, base_dir)

    def dataset(self, text: str) -> HubDataset:
        """What ``ORG/NAME[/CONFIG][@REVISION]`` has, before there is a spec; see ``HubResolver.dataset``."""
        return HubResolver(self._by_ending).dataset(text)

    def splits(self, text: str) -> Mapping[str, tuple[Shard, ...]]:
        dataset = self.dataset(text)
        if dataset.config is None:
            raise ConfigError(
                f"hf:{text}: has the configs {', '.join(dataset.configs)}; name one, as hf:{text}/CONFIG"
            )
        return {
            f"{text}:{split.name}": split.shards
            for split in dataset.splits
            if split.scheme is not None
        }

    def more_shards(
        self, spec: Spec, known: tuple[Shard, ...], base_dir: Path
    ) -> tuple[Shard, ...]:
        """Raises ``SourceChanged``, too, where the known files are no longer as they were."""
        return appended(spec, known, self.shards(spec, base_dir))

    def paths(self, spec: Spec, base_dir: Path) -> tuple[str, ...]:
        return tuple(shard.path for shard in self.shards(spec, base_dir))

    def reader(self, shards: Sequence[Shard]) -> Scheme:
        path = shards[0].path
        scheme = reading_scheme(self._by_ending, path)
        if scheme is None:
            raise SourceError(f"no scheme reads {path!r}")
        return scheme

    def open(self, request: ReadRequest) -> Source:
        return self.reader(request.shards).open(request)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        raise NotImplementedError("a spec of the Hub names its column")
