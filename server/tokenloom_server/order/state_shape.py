"""What a run's states look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenloom_server.core.state import EpochCursor, FileCursor, WindowCursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a run's states look like: a state that does not fit is refused before anything uses it."""

    specs: tuple[str, ...]
    """The sources' specs, by source id."""
    shards: tuple[tuple[str, ...], ...]
    """Each source's shard paths."""
    nodes: Mapping[int, tuple[int, ...]]
    """By node id, ascending, the children's stable ids: 2 × source id, or 2 × node id + 1."""
    sample_tokens: int
    """Tokens of a sample that begins here."""
    names: tuple[str | None, ...]
    """The sources' aliases."""
    shuffles: tuple[str, ...]
    """The sources' ``shuffle``."""
    lanes: tuple[int, ...]
    """How many lanes the sources have."""
    mixture: tuple[Mapping[str, Any], ...]
    """The nodes as ``resume_state`` describes them."""
    revision: tuple[int, str] | None = None
    """The newest revision in force: its sample index, and the ``canonical_content`` of it."""
    best_fit: bool = False
    """Whether rows are packed together, so that a cursor counts the samples that they have given."""
    in_batches: bool = False
    """Whether the sources give batches of rows."""
    left_samples: int = 0
    """Samples before a fork whose sources the run does not have."""
    total_tokens: Callable[[int], int] | None = None
    """The run's total tokens at a sample index, where they are not those of so many samples of one length."""

    def cursor_kind(self, source: int) -> type[FileCursor] | type[WindowCursor] | type[EpochCursor]:
        """What a cursor of a source is, or the first row of what is packed together."""
        if self.in_batches:
            return EpochCursor
        return WindowCursor if self.shuffles[source] == "rows" else FileCursor

    def tokens_at(self, sample_index: int) -> int:
        """The run's total tokens at a sample index."""
        return (
            self.total_tokens(sample_index)
            if self.total_tokens is not None
            else sample_index * self.sample_tokens
        )


#: The shape that the states of a run have at a sample index, under a ``clock_offset``.
ShapeAt = Callable[[int, int], Shape]
