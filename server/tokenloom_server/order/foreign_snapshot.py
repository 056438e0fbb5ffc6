"""A snapshot of another run, for forks and revisions: what it says, whether it fits or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom_server.core.state import PackedCursor, SourceState
from tokenloom_server.order.snapshot import source_state
from tokenloom_server.order.snapshot_document import (
    DatasetInFile,
    KnownDataset,
    ResumeStateDocument,
    SnapshotDocument,
    read_document,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source as a snapshot of whichever run has it: by spec, and its shard by path."""

    spec: str
    shard: str | None
    """None where it stands in no file: of shuffled rows, of batches, and at its beginning."""
    state: SourceState
    shuffle: str = "none"

    @property
    def is_packed(self) -> bool:
        """Whether it stands among rows that are packed together, or a lane of it does."""
        cursors = self.state.cursor, *(lane.cursor for lane in self.state.lanes)
        return any(isinstance(cursor, PackedCursor) for cursor in cursors)


class Foreign(SnapshotDocument):
    """A snapshot as it is, of whichever run that has begun."""

    resume_state: ResumeStateDocument

    @property
    def revisions(self) -> Sequence[tuple[int, Mapping[str, Any]]]:
        """(sample index, content) of the revisions that it carries."""
        return [(revision.sample_index, revision.content) for revision in self.resume_state.revisions or ()]

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """Where its run was forked from."""
        return self.resume_state.origin

    def sources(self) -> tuple[Source, ...]:
        """Where they stand at the sample index of ``resume_state``, which may lie before that of the snapshot."""
        return tuple(
            Source(
                spec=dataset.spec,
                shard=dataset.shard if isinstance(dataset, DatasetInFile) else None,
                state=source_state(dataset),
                shuffle=dataset.shuffle,
            )
            for dataset in self.resume_state.datasets
            if isinstance(dataset, KnownDataset)
        )


def foreign(text: str | bytes) -> Foreign | None:
    """What a snapshot says, whichever run it is of; None where that has not begun. Raises ``SnapshotInvalid``."""
    document = read_document(text)
    return Foreign.model_construct(**dict(document)) if document.resume_state is not None else None
