"""The mixture of a run in force, and its revisions, for people."""

from __future__ import annotations

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.order.revision import as_file, places
from tokenloom_server.replay.receipts import revision_info
from tokenloom_server.reports.stats import MixtureInfo, PhaseInfo
from tokenloom_server.run.views import RunView


def mixture_info(run: str, view: RunView) -> MixtureInfo:
    """The mixture at what is committed, and all that changes it."""
    timeline, index = view.timeline, view.commit.sample_index
    config = timeline.at(index).config
    return MixtureInfo(
        run=run,
        sample_index=index,
        sequence_length=config.sequence_length,
        mixture=as_file(config),
        paused=[
            place if isinstance(child, NodeConfig) and child.alias is None else child.name
            for place, child in places(config)
            if child.presence == "paused"
        ],
        dropped=[source.name for source in config.sources if source.presence == "dropped"],
        phases=[
            PhaseInfo(
                number=segment.phase,
                sample_index=segment.begin,
                total_tokens=segment.tokens,
                sequence_length=segment.order.config.sequence_length,
            )
            for segment in timeline.segments
            if segment.phase is not None
        ],
        revisions=[revision_info(timeline, revision, index) for revision in timeline.revisions],
        first_revisable=view.first_revisable,
    )
