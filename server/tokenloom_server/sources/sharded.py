"""What sources of files have in common: a spec, shards below a folder, and what their column holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import files
from tokenloom_server.sources.base import Content, Shard
from tokenloom_server.spec import Spec
from tokenloom_server.storage.file import File
from tokenloom_server.storage.traffic import Traffic


class ShardedSource:
    """The part of ``Source`` that does not depend on the format. ``_content`` is the subclass's to set."""

    _content: Content

    def __init__(self, spec: Spec, shards: tuple[Shard, ...], base_dir: Path, traffic: Traffic | None = None) -> None:
        """``traffic`` is shared by all readers of a run, so that it shows what they wait for."""
        self._spec = spec
        self._shards = shards
        self._base_dir = base_dir
        self._traffic = traffic or Traffic()

    @property
    def content(self) -> Content:
        return self._content

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._shards

    def _where(self, shard: Shard) -> str:
        return files.where(self._spec, shard)

    def _open(self, shard: Shard) -> File:
        """Raises ``SourceChanged`` where it is missing or another file."""
        return files.open_shard(self._spec, shard, self._base_dir, self._traffic)

    def _refuse_empty_files(self, kind: str) -> None:
        for shard in self._shards:
            if shard.size == 0:
                raise SourceError(f"{self._where(shard)} is empty (0 bytes), expected {kind}")

    def _refuse_without_rows(self, has_rows: Callable[[int], object]) -> None:
        if not any(has_rows(i) for i in range(len(self._shards))):
            raise SourceError(
                f"source {str(self._spec)!r} has no rows: its {len(self._shards)} files have none (the first is "
                f"{self._shards[0].path!r}); give it files with content, or take it out of the mixture"
            )
