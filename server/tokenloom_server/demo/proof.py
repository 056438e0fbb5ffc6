"""What must be true of what the ranks received. Pure functions: each returns what it counted, or raises ``Disproved``.

Nothing here asks the server or the client how they did it: the digest, the shares and the learning
rate are computed anew, from the written rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import xxhash

from tokenloom_server.demo.receipts import Receipts, Samples, Step

#: Of StepInfo.digest in dataloader.proto; written out again here, so that a slip in the server would show.
DIGEST_MULTIPLIER = 0x5BD1E995CC9E2D51A3C59AC72E1B6F4D
DIGEST_MODULUS = 2**127 - 1
#: Sample indices that an error names before it says "…".
NAMED = 8
LR_TOLERANCE = 1e-9


class Disproved(Exception):
    """A claim does not hold; the message says where."""


def once_each(samples: Samples, end: int) -> str:
    """Every sample index of [0, end) was received once; none was lost, repeated or invented."""
    ids = samples["sample_id"]
    outside = ids[(ids < 0) | (ids >= end)]
    if len(outside):
        raise Disproved(f"samples outside 0 to {end - 1}: {_some(outside)}")
    counts = np.bincount(ids, minlength=end)
    if (counts == 0).any():
        raise Disproved(f"lost: {_some(np.flatnonzero(counts == 0))}")
    if (counts > 1).any():
        raise Disproved(f"received more than once: {_some(np.flatnonzero(counts > 1))}")
    return f"{end:,} samples"


def in_step(receipts: Receipts, start: int, batch_size: int) -> str:
    """The samples of each step came in that step, one after the other: a rank's view is a slice of the order."""
    rows = receipts.samples["sample_id"]
    if len(rows) < len(receipts.steps) * batch_size:
        raise Disproved(f"{len(receipts.steps)} steps of {batch_size} samples are on record, but {len(rows)} samples")
    begin = start
    for number, step in enumerate(receipts.steps):
        got = rows[number * batch_size : (number + 1) * batch_size]
        inside = begin <= got[0] and got[-1] < step.sample_index and (got[0] - begin) % batch_size == 0
        if not inside or (np.diff(got) != 1).any():
            raise Disproved(f"step {step.step} covers {begin} to {step.sample_index - 1}, but it brought {_some(got)}")
        begin = step.sample_index
    return f"{len(receipts.steps)} steps"


def same_order(samples: Samples, reference: Samples) -> str:
    """Sample by sample, source and ids are those of the uninterrupted run."""
    if len(samples) != len(reference):
        raise Disproved(f"{len(samples)} samples against {len(reference)} of the uninterrupted run")
    _expect_equal(samples, reference)
    return f"{samples['ids'].size:,} token ids"


def come_again(discarded: Samples, samples: Samples) -> str:
    """What was received after the checkpoint and lost with the weights was delivered again, unchanged."""
    if not len(discarded):
        raise Disproved("nothing was received between the checkpoint and the kill, so nothing had to come again")
    where = np.searchsorted(samples["sample_id"], discarded["sample_id"])
    found = where < len(samples)
    found[found] = samples["sample_id"][where[found]] == discarded["sample_id"][found]
    if not found.all():
        raise Disproved(f"not delivered again: {_some(discarded['sample_id'][~found])}")
    _expect_equal(discarded, samples[where])
    return f"{len(discarded)} samples"


def rolling_digests(samples: Samples, id_type: str) -> list[str]:
    """The digest before sample 0, 1, 2, … and after the last, by the rule in dataloader.proto."""
    digest = 0
    digests = [f"{digest:032x}"]
    for ids, source_id in zip(samples["ids"].astype(id_type), samples["source_id"].tolist(), strict=True):
        sample_hash = xxhash.xxh3_128_intdigest(ids.tobytes(), seed=source_id)
        digest = (digest * DIGEST_MULTIPLIER + sample_hash) % DIGEST_MODULUS
        digests.append(f"{digest:032x}")
    return digests


def digests_agree(digests: Sequence[str], steps: Sequence[Step]) -> str:
    """After each step of each rank of each launch, ``dataset.digest`` was the digest of what came before."""
    if not steps:
        raise Disproved("no step is on record")
    for step in steps:
        if step.sample_index >= len(digests):
            raise Disproved(f"step {step.step} ends at sample {step.sample_index}, after the last one received")
        expected = digests[step.sample_index]
        if step.digest != expected:
            raise Disproved(f"at sample {step.sample_index}: reported {step.digest}, recomputed {expected}")
    return f"{len(steps)} steps"


def counters_agree(samples: Samples, counters: Mapping[int, tuple[int, int]], total_tokens: int) -> str:
    """(samples, tokens) per source in the ledger are those that the ranks received."""
    length = samples["ids"].shape[1]
    for source_id, (count, tokens) in counters.items():
        received = int((samples["source_id"] == source_id).sum())
        if (received, received * length) != (count, tokens):
            raise Disproved(
                f"source {source_id}: {received} samples with {received * length} tokens were received, "
                f"but the ledger has {count} with {tokens}"
            )
    unknown = set(samples["source_id"].tolist()) - set(counters)
    if unknown:
        raise Disproved(f"samples of sources that the ledger does not know: {sorted(unknown)}")
    if total_tokens != len(samples) * length:
        raise Disproved(f"{len(samples) * length} tokens were received, but the ledger has {total_tokens}")
    return f"{total_tokens:,} tokens"


def shares_hold(samples: Samples, weights: Mapping[int, float]) -> str:
    """At every sample index, not only at the end, each source is within one sample of its target."""
    total = sum(Fraction(repr(weight)) for weight in weights.values())
    farthest = 0.0
    for source_id, weight in weights.items():
        share = Fraction(repr(weight)) / total
        had = np.cumsum(samples["source_id"] == source_id)
        # In units of 1 / denominator of a sample, all of it integers.
        off = np.abs(had * share.denominator - np.arange(1, len(had) + 1) * share.numerator)
        worst = int(off.argmax())
        if off[worst] > share.denominator:
            raise Disproved(
                f"source {source_id}: {had[worst]} of the first {worst + 1} samples, the target is {float(share):.2%}"
            )
        farthest = max(farthest, float(off[worst]) / share.denominator)
    return f"at most {farthest:.2f} samples off"


def rates_hold(steps: Sequence[Step], *, peak: float, warmup_tokens: int, tokens: int, floor: float) -> str:
    """Each step's learning rate is the schedule's value at its token count, whatever the batch size was."""
    if not steps:
        raise Disproved("no step is on record")
    for step in steps:
        if step.total_tokens < warmup_tokens:
            factor = step.total_tokens / warmup_tokens
        else:
            progress = min(1.0, (step.total_tokens - warmup_tokens) / (tokens - warmup_tokens))
            factor = floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
        if not math.isclose(step.lr, peak * factor, rel_tol=LR_TOLERANCE):
            raise Disproved(f"at {step.total_tokens} tokens: {step.lr:.6e}, the schedule says {peak * factor:.6e}")
    return f"{len(steps)} steps"


def _expect_equal(samples: Samples, others: Samples) -> None:
    for column in ("sample_id", "source_id", "ids"):
        differs = samples[column] != others[column]
        if column == "ids":
            differs = differs.any(axis=1)
        if differs.any():
            raise Disproved(f"another {column.replace('_', ' ')} at {_some(samples['sample_id'][differs])}")


def _some(ids: np.typing.NDArray[np.integer]) -> str:
    named = ", ".join(map(str, ids[:NAMED].tolist()))
    return f"{len(ids)} sample{'s' if len(ids) > 1 else ''} ({named}{', …' if len(ids) > NAMED else ''})"
