"""What the log and people should know of a run's sources: where each stands, and what its first samples and the
tokeniser say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from tokenloom_server.core.state import (
    EpochCursor,
    FileCursor,
    SourceState,
    State,
    WindowCursor,
    row_cursor,
)
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.record import RunRecord
from tokenloom_server.sources.base import Content
from tokenloom_server.tokenizer.definition import own_begin


def position_line(spec: str, source: SourceState, shards: Sequence[str]) -> str:
    """``spec=… sample_row=… shard=… offset=…``: ``sample_row`` counts rows since the source's beginning, ``offset``
    those of the shard, window or epoch that is named beside it. ``shards``: the paths of the source's files."""
    return f"spec={spec} sample_row={source.rows} {_offset(source, shards)}"


def position_lines(record: RunRecord, state: State) -> Iterator[str]:
    """Of each source of a run."""
    return map(position_line, record.specs, state.sources, record.shard_paths)


def _offset(source: SourceState, shards: Sequence[str]) -> str:
    match row_cursor(source.cursor):
        case FileCursor(_, shard, row):
            return f"shard={shards[shard]} offset={row}"
        case WindowCursor(_, window, row):
            return f"window={window} offset={row}"
        case EpochCursor(epoch, rows):
            return f"epoch={epoch} offset={rows}"
    return "offset=0"


#: The samples of a source that are looked at, at most; those of its first block, where that has fewer.
_LOOKED_AT = 256


def label_shares(factory: PipelineFactory) -> dict[int, float]:
    """Of the sources with a loss mask that give samples, by id (0 to 1). Each is looked at once for a run's files."""
    shares = {
        source.id: factory.resources.label_shares.get(
            source.source, partial(_share, factory, source.id)
        )
        for source in factory.config.sources
        if source.has_loss_mask and source.presence != "dropped"
    }
    return {source: share for source, share in shares.items() if share is not None}


def label_notes(factory: PipelineFactory) -> list[tuple[bool, str]]:
    """What people read of it, each with whether it is a warning."""
    return [
        (
            not share,
            f"{factory.config.sources[source].name}: {share:.2%} of the labels in its first samples count"
            + (
                ""
                if share
                else ", so nothing is learned from it: look at its loss mask, or its chat template"
            ),
        )
        for source, share in label_shares(factory).items()
    ]


def begin_notes(factory: PipelineFactory) -> list[tuple[bool, str]]:
    """Where the tokeniser's own post-processor begins a text otherwise than the run does; as ``label_notes``."""
    definition, config = factory.record.tokenizer, factory.config
    begin = [] if definition is None or factory.record.engine is None else own_begin(definition)
    return [
        (
            True,
            f"{source.name}: the tokeniser itself begins a text with {begin}, and the run does not: set add_bos: true, "
            "with begin_of_text_id where that is another, if the model was trained so",
        )
        for source in config.sources
        if begin
        and not source.has_its_ids
        and [factory.record.begin_of_text_id] * config.adds_bos(source) != begin
        and factory.readers.open(source.id).content is Content.TEXT
    ]


def _share(factory: PipelineFactory, source: int) -> float | None:
    state = factory.initial().sources[source]
    block = next(iter(factory.packers()(source, state).blocks()), None)
    if block is None or not block.ids:
        return None
    count = min(len(block.ids), _LOOKED_AT)
    first = state.samples
    boundaries = (
        block.origins.boundaries(first, first + count) if factory.config.mask_boundaries else None
    )
    tokens, (labels,) = factory.real_tokens().of(
        block.ids[:count], 1, np.zeros(count, np.bool_), boundaries
    )
    # The first id of a sample is no label, unless labels are the next ids.
    return labels / max(1, int(tokens.sum()) - (0 if factory.config.labels == "shifted" else count))
