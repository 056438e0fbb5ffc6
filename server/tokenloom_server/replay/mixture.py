"""The mixture of a run in force, and its revisions, for people."""

from __future__ import annotations

from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.order.mixture_content import as_file, places
from tokenloom_server.replay.receipts import revision_info
from tokenloom_server.reports.receipt import RevisionInfo
from tokenloom_server.reports.stats import MixtureInfo, PhaseInfo
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.revise import RevisionHandler


class Mixture:
    """The mixture of one run."""

    def __init__(self, coordinator: RunCoordinator, revising: RevisionHandler) -> None:
        self._coordinator = coordinator
        self._revising = revising

    def info(self) -> MixtureInfo:
        """The mixture at what is committed, and all that changes it."""
        view = self._coordinator.view()
        timeline, index = view.timeline, view.commit.sample_index
        config = timeline.at(index).config
        return MixtureInfo(
            run=self._coordinator.name,
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
                    sequence_length=segment.config.sequence_length,
                )
                for segment in timeline.segments
                if segment.phase is not None
            ],
            revisions=[revision_info(timeline, revision, index) for revision in timeline.revisions],
            first_revisable=view.first_revisable(self._revising.kept(view)),
        )

    def revise(self, change: MixtureChange) -> RevisionInfo:
        """Changes the mixture from a sample index on; returns once that is durable.

        Raises what ``RevisionHandler.revise`` raises."""
        revision = self._revising.revise(change)
        view = self._coordinator.view()
        info = revision_info(view.timeline, revision, view.commit.sample_index)
        return info.model_copy(update={"eta_s": view.seconds_until(revision.sample_index)})

    def drop(self, number: int) -> list[RevisionInfo]:
        """Takes a revision and all after it back, oldest first. Raises ``BeyondHorizon`` where one may have been
        produced already, ``NotFound``."""
        timeline = self._coordinator.timeline
        return [revision_info(timeline, revision, 0) for revision in self._revising.drop(number)]
