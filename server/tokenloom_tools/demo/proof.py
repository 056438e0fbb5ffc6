"""What was received and counted, and the claims that it has to bear out.

Nothing here asks the server or the client how they did it: the digest, the shares and the learning rate are computed
anew, from the written rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np
import xxhash
from tokenloom_server.config.run import RunConfig
from tokenloom_server.reports.stats import RunStats

from tokenloom_tools.demo import receipts
from tokenloom_tools.demo.plan import LEARNING_RATE, LR_FLOOR, Plan
from tokenloom_tools.demo.receipts import Receipts, Samples, Step

#: Of MicroStep.digest in dataloader.proto; written out again here, so that a slip in the server would show.
DIGEST_MULTIPLIER = 0x5BD1E995CC9E2D51A3C59AC72E1B6F4D
DIGEST_MODULUS = 2**127 - 1
#: Sample indices that an error names before it says "…".
NAMED = 8
LR_TOLERANCE = 1e-9


class Disproved(Exception):
    """A claim does not hold; the message says where."""


Claim = tuple[str, Callable[[], str]]


def wire_type(vocab_size: int) -> str:
    """The narrowest little-endian type that holds every id: what the digest is computed over."""
    return "<u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4"


def rolling_digests(samples: Samples, id_type: str) -> list[str]:
    """The digest before sample 0, 1, 2, … and after the last, by the rule in dataloader.proto."""
    digest = 0
    digests = [f"{digest:032x}"]
    for ids, source_id in zip(
        samples["ids"].astype(id_type), samples["source_id"].tolist(), strict=True
    ):
        sample_hash = xxhash.xxh3_128_intdigest(ids.tobytes(), seed=source_id)
        digest = (digest * DIGEST_MULTIPLIER + sample_hash) % DIGEST_MODULUS
        digests.append(f"{digest:032x}")
    return digests


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
        return rolling_digests(self.path, wire_type(self.vocab_size))

    @property
    def training(self) -> list[Step]:
        return [step for rank in (*self.first, *self.second) for step in rank.steps]

    def claims(self) -> Iterator[Claim]:
        """Each with its check."""
        yield "each sample went into the final weights exactly once", self.nothing_lost_or_repeated
        yield "each rank got its slices in the order of its steps", self.in_order
        yield "source and ids of each equal the uninterrupted run's", self.same_as_uninterrupted
        yield "what the killed ranks had beyond the checkpoint came again", self.come_again
        yield "a digest recomputed from the ids is the ranks' at every step", self.digests_agree
        yield "both runs and the ledger end at one digest", self.one_digest
        yield "the ledger's counters equal a recount per source", self.counters_agree
        yield "shares in tokens are on target at every sample", self.shares_hold
        yield "the learning rate follows the tokens at either batch size", self.rates_hold

    def nothing_lost_or_repeated(self) -> str:
        """Every sample index of the run was received once; none was lost, repeated or invented."""
        ids, end = self.path["sample_id"], self.plan.end_index
        outside = ids[(ids < 0) | (ids >= end)]
        if len(outside):
            raise Disproved(f"samples outside 0 to {end - 1}: {_some(outside)}")
        counts = np.bincount(ids, minlength=end)
        if (counts == 0).any():
            raise Disproved(f"lost: {_some(np.flatnonzero(counts == 0))}")
        if (counts > 1).any():
            raise Disproved(f"received more than once: {_some(np.flatnonzero(counts > 1))}")
        return f"{end:,} samples"

    def in_order(self) -> str:
        plan = self.plan
        for rank in self.first:
            _in_step(rank, 0, plan.first.batch_size)
        for rank in self.second:
            _in_step(rank, plan.checkpoint_index, plan.second.batch_size)
        _in_step(self.reference, 0, plan.reader_batch_size)
        return f"{len(self.first) + len(self.second) + 1} streams"

    def same_as_uninterrupted(self) -> str:
        """Sample by sample, source and ids are those of the uninterrupted run."""
        samples, reference = self.path, receipts.join([self.reference.samples])
        if len(samples) != len(reference):
            raise Disproved(
                f"{len(samples)} samples against {len(reference)} of the uninterrupted run"
            )
        _expect_equal(samples, reference)
        return f"{samples['ids'].size:,} token ids"

    def come_again(self) -> str:
        """What was received after the checkpoint and lost with the weights was delivered again, unchanged."""
        discarded, samples = self.discarded, self.path
        if not len(discarded):
            raise Disproved(
                "nothing was received between the checkpoint and the kill, so nothing had to come again"
            )
        where = np.searchsorted(samples["sample_id"], discarded["sample_id"])
        again = where < len(samples)
        again[again] = samples["sample_id"][where[again]] == discarded["sample_id"][again]
        if not again.all():
            raise Disproved(f"not delivered again: {_some(discarded['sample_id'][~again])}")
        _expect_equal(discarded, samples[where])
        return f"{len(discarded)} samples"

    def digests_agree(self) -> str:
        """After each step of each rank of each launch, ``dataset.digest`` was the digest of what came before."""
        steps = [*self.training, *self.reference.steps]
        for step in steps:
            if step.sample_index >= len(self.digests):
                raise Disproved(
                    f"step {step.step} ends at sample {step.sample_index}, after the last one received"
                )
            expected = self.digests[step.sample_index]
            if step.digest != expected:
                raise Disproved(
                    f"at sample {step.sample_index}: reported {step.digest}, recomputed {expected}"
                )
        return f"{len(steps)} steps"

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
        """Samples and tokens per source in the ledger are those that the ranks received."""
        samples = self.path
        length = samples["ids"].shape[1]
        for source in self.stats.sources:
            received = int((samples["source_id"] == source.id).sum())
            if (received, received * length) != (source.samples, source.tokens):
                raise Disproved(
                    f"source {source.id}: {received} samples with {received * length} tokens were received, "
                    f"but the ledger has {source.samples} with {source.tokens}"
                )
        unknown = set(samples["source_id"].tolist()) - {source.id for source in self.stats.sources}
        if unknown:
            raise Disproved(f"samples of sources that the ledger does not know: {sorted(unknown)}")
        total = self.stats.total_tokens
        if total != len(samples) * length:
            raise Disproved(
                f"{len(samples) * length} tokens were received, but the ledger has {total}"
            )
        return f"{total:,} tokens"

    def shares_hold(self) -> str:
        """At every sample index, not only at the end, each source is within one sample of its target."""
        exhausted = [source.alias for source in self.stats.sources if source.exhausted]
        if exhausted:
            return f"not checked, because {', '.join(exhausted)} ran out"
        weights = [Fraction(repr(source.weight)) for source in self.config.sources]
        farthest = 0.0
        for source_id, weight in enumerate(weights):
            share = weight / sum(weights)
            counts = np.cumsum(self.path["source_id"] == source_id)
            # In units of 1 / denominator of a sample, all of it integers.
            off = np.abs(
                counts * share.denominator - np.arange(1, len(counts) + 1) * share.numerator
            )
            worst = int(off.argmax())
            if off[worst] > share.denominator:
                raise Disproved(
                    f"source {source_id}: {counts[worst]} of the first {worst + 1} samples, the target is "
                    f"{float(share):.2%}"
                )
            farthest = max(farthest, float(off[worst]) / share.denominator)
        return f"at most {farthest:.2f} samples off"

    def rates_hold(self) -> str:
        """Each step's learning rate is the schedule's value at its token count, whatever the batch size was."""
        plan = self.plan
        for step in self.training:
            if step.total_tokens < plan.warmup_tokens:
                factor = step.total_tokens / plan.warmup_tokens
            else:
                progress = min(
                    1.0,
                    (step.total_tokens - plan.warmup_tokens) / (plan.tokens - plan.warmup_tokens),
                )
                factor = LR_FLOOR + (1 - LR_FLOOR) * (1 + math.cos(math.pi * progress)) / 2
            expected = LEARNING_RATE * factor
            if not math.isclose(step.lr, expected, rel_tol=LR_TOLERANCE):
                raise Disproved(
                    f"at {step.total_tokens} tokens: {step.lr:.6e}, the schedule says {expected:.6e}"
                )
        return f"{len(self.training)} steps"


def _in_step(rank: Receipts, start: int, batch_size: int) -> None:
    """The samples of each step came in that step, one after the other: a rank's view is a slice of the order."""
    rows = rank.samples["sample_id"]
    if len(rows) < len(rank.steps) * batch_size:
        raise Disproved(
            f"{len(rank.steps)} steps of {batch_size} samples are on record, but {len(rows)} samples"
        )
    begin = start
    for number, step in enumerate(rank.steps):
        slice_ids = rows[number * batch_size : (number + 1) * batch_size]
        inside = (
            begin <= slice_ids[0]
            and slice_ids[-1] < step.sample_index
            and (slice_ids[0] - begin) % batch_size == 0
        )
        if not inside or (np.diff(slice_ids) != 1).any():
            raise Disproved(
                f"step {step.step} covers {begin} to {step.sample_index - 1}, but it brought {_some(slice_ids)}"
            )
        begin = step.sample_index


def _expect_equal(samples: Samples, others: Samples) -> None:
    for column in ("sample_id", "source_id", "ids"):
        differs = samples[column] != others[column]
        if column == "ids":
            differs = differs.any(axis=1)
        if differs.any():
            raise Disproved(
                f"another {column.replace('_', ' ')} at {_some(samples['sample_id'][differs])}"
            )


def _some(ids: np.typing.NDArray[np.integer]) -> str:
    named = ", ".join(map(str, ids[:NAMED].tolist()))
    return f"{len(ids)} sample{'s' if len(ids) > 1 else ''} ({named}{', …' if len(ids) > NAMED else ''})"
