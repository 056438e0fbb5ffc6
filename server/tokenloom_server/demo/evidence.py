"""All that was received and counted, and the claims that it has to bear out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tokenloom_server.config.run import RunConfig
from tokenloom_server.demo import proof, receipts
from tokenloom_server.demo.plan import Plan
from tokenloom_server.demo.proof import Disproved
from tokenloom_server.demo.receipts import Receipts, Samples, Step
from tokenloom_server.reports.stats import RunStats

Claim = tuple[str, Callable[[], str]]


def wire_type(vocab_size: int) -> str:
    """The narrowest little-endian type that holds every id: what the digest is computed over."""
    return "<u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4"


@dataclass(frozen=True)
class Evidence:
    """What the demonstration has in its hands when everything has run."""

    plan: Plan
    config: RunConfig
    vocab_size: int
    first: list[Receipts]
    """Of each rank before the kill."""
    second: list[Receipts]
    """Of each rank after the resume."""
    reference: Receipts
    """Of the uninterrupted run's one reader."""
    stats: RunStats
    """The ledger's counters at the end."""

    @cached_property
    def received(self) -> Samples:
        """By the first launch, in the global order."""
        return receipts.join([rank.samples for rank in self.first])

    @cached_property
    def path(self) -> Samples:
        """What made the model: the first launch up to the checkpoint, then the second."""
        kept = self.received[self.received["sample_id"] < self.plan.checkpoint_index]
        return receipts.join([kept, *(rank.samples for rank in self.second)])

    @cached_property
    def discarded(self) -> Samples:
        """What was received after the checkpoint, and lost with the weights."""
        return self.received[self.received["sample_id"] >= self.plan.checkpoint_index]

    @cached_property
    def digests(self) -> list[str]:
        return proof.rolling_digests(self.path, wire_type(self.vocab_size))

    @property
    def training(self) -> list[Step]:
        return [step for rank in (*self.first, *self.second) for step in rank.steps]

    def claims(self) -> Iterator[Claim]:
        """Each with its check."""
        yield "each sample went into the final weights exactly once", self.nothing_lost_or_repeated
        yield "each rank got its slices in the order of its steps", self.in_order
        yield "source and ids of each equal the uninterrupted run's", self.same_as_uninterrupted
        yield "what the killed ranks had beyond the checkpoint came again", self.come_again
        yield (
            "a digest recomputed from the ids is the ranks' at every step",
            self.digests_agree,
        )
        yield "both runs and the ledger end at one digest", self.one_digest
        yield "the ledger's counters equal a recount per source", self.counters_agree
        yield "shares in tokens are on target at every sample", self.shares_hold
        yield "the learning rate follows the tokens at either batch size", self.rates_hold

    def nothing_lost_or_repeated(self) -> str:
        return proof.once_each(self.path, self.plan.end_index)

    def in_order(self) -> str:
        for rank in self.first:
            proof.in_step(rank, 0, self.plan.first.batch_size)
        for rank in self.second:
            proof.in_step(rank, self.plan.checkpoint_index, self.plan.second.batch_size)
        proof.in_step(self.reference, 0, self.plan.reader_batch_size)
        return f"{len(self.first) + len(self.second) + 1} streams"

    def same_as_uninterrupted(self) -> str:
        return proof.same_order(self.path, receipts.join([self.reference.samples]))

    def come_again(self) -> str:
        return proof.come_again(self.discarded, self.path)

    def digests_agree(self) -> str:
        return proof.digests_agree(self.digests, [*self.training, *self.reference.steps])

    def one_digest(self) -> str:
        ends = {
            "the resumed run": self.second[0].steps[-1].digest,
            "the uninterrupted run": self.reference.steps[-1].digest,
            "the ledger": self.stats.digest,
            "the recount": self.digests[-1],
        }
        for (name, digest), (other, other_digest) in pairwise(ends.items()):
            if digest != other_digest:
                raise Disproved(f"{name} ends at {digest}, {other} at {other_digest}")
        return f"…{self.digests[-1][-12:]}"

    def counters_agree(self) -> str:
        counters = {source.id: (source.samples, source.tokens) for source in self.stats.sources}
        return proof.counters_agree(self.path, counters, self.stats.total_tokens)

    def shares_hold(self) -> str:
        exhausted = [source.alias for source in self.stats.sources if source.exhausted]
        if exhausted:
            return f"not checked, because {', '.join(exhausted)} ran out"
        weights = {}
        for source_id, source in enumerate(self.config.sources):
            assert isinstance(source.weight, float), "the demonstration's mixture has no schedule"
            weights[source_id] = source.weight
        return proof.shares_hold(self.path, weights)

    def rates_hold(self) -> str:
        return proof.rates_hold(
            self.training,
            peak=self.plan.learning_rate,
            warmup_tokens=self.plan.warmup_tokens,
            tokens=self.plan.tokens,
            floor=self.plan.lr_floor,
        )
