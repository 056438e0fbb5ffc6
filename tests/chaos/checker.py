"""Recounts a whole run from the tensors that its trainers got. Knows the corpus, and nothing of Tokenloom.

Given a folder with the attempts' files, the reference's, and what was seen in the ledger; says what is wrong with them.

1. Within an attempt, step k covers the samples [start + k·W·B, start + (k+1)·W·B): each rank has B of them in a row,
   no two ranks the same, all ranks together all of them, as far as the rank that got least is.
2. An attempt begins where its state says. Attempts overlap (what was trained beyond a checkpoint is trained again): a
   sample that came before is the same, to the byte.
3. No sample is missing up to the last. (Where a job goes on at what the ledger has, and not at its own checkpoint, the
   steps are excepted that were in its hands when it was killed: consumed, and not written down.)
4. The samples of each source are its numbered tokens, in order, none lost, repeated or torn.
5. Which source comes when is what an undisturbed run of one rank got. A skip of k samples at sample a leaves out those
   that would have come as a to a + k: every launch from then on has the order without them, and indices without a gap.
6. The rolling digest that the dataset gave for each step is that of the tensors; states of all ranks are equal.
7. Whatever was seen in the ledger: its counters equal the recount up to its index; that index never went back within
   a generation (unless the ledger was made to lose data, and then nobody goes on there), was never beyond what every
   rank had in hand at that time, and in the end is exactly that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.digest import digest_after

from chaos.corpus import SOURCES, NumberedSource
from chaos.records import LENGTH, read_records

#: Faults that are listed; one is enough to fail.
_LISTED = 20


class CheckFailed(AssertionError):
    """What the trainers got, or the ledger says, is not what was promised."""


@dataclass
class Findings:
    """How much was checked, and what is wrong."""

    attempts: int = 0
    #: Samples that came, again and again where they were trained again.
    delivered: int = 0
    #: Samples of the run's one order.
    distinct: int = 0
    tokens: int = 0
    states: int = 0
    observations: int = 0
    wrong: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        self.wrong.append(text)

    def raise_if_wrong(self) -> None:
        if self.wrong:
            more = f"\n… and {len(self.wrong) - _LISTED} more" if len(self.wrong) > _LISTED else ""
            raise CheckFailed("\n".join(self.wrong[:_LISTED]) + more)


class _Order:
    """The samples by their index in the undisturbed run, as far as they are known."""

    def __init__(self, size: int) -> None:
        self.sources = np.full(size, -1, np.int16)
        self.ids = np.zeros((size, LENGTH), np.uint32)

    @property
    def known(self) -> NDArray[np.bool_]:
        return self.sources >= 0


class _Line:
    """The order under skips: which samples of the undisturbed run come when."""

    def __init__(self, expected: _Order, skips: list[list[int]]) -> None:
        self.places = places_under(skips, len(expected.sources))
        self.sources = expected.sources[self.places]
        self.digests = _digests(self.sources, expected.ids[self.places])
        shape = len(SOURCES), len(self.sources) + 1
        #: Before each sample, by source: how many samples were consumed, and how many rows ended in them.
        self.samples, self.rows = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for number, source in enumerate(SOURCES):
            mine = expected.sources == number
            np.cumsum(mine[self.places], out=self.samples[number, 1:])
            ended = np.diff(_rows_within(source, np.cumsum(mine) * LENGTH), prepend=0)
            np.cumsum(ended[self.places], out=self.rows[number, 1:])


def places_under(skips: Sequence[Sequence[int]], size: int) -> NDArray[np.int64]:
    """Where each sample stands in an undisturbed run of ``size`` samples, under skips (sample index, samples) in the
    order in which they were made: each leaves out what would have come at that index."""
    places = np.arange(size)
    for index, samples in skips:
        places = np.delete(places, slice(index, index + samples))
    return places


def skips_by_index(skips: Sequence[Sequence[int]]) -> dict[int, int]:
    """How many samples are left out at each index under skips, in the order in which they were made."""
    places = places_under(skips, sum(map(sum, skips)) + 1)
    left_out = np.diff(places, prepend=-1) - 1
    return {int(index): int(left_out[index]) for index in np.flatnonzero(left_out)}


def _rows_within(source: NumberedSource, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many rows of a source end within so many of its tokens."""
    ends = np.cumsum([length + 1 for length in source.row_lengths()])
    epochs, rest = np.divmod(tokens, int(ends[-1]))
    return np.asarray(epochs * len(ends) + np.searchsorted(ends, rest, side="right"), np.int64)


@dataclass
class _Attempt:
    """One launch: its plan, its ranks' records, and the steps that all of them have."""

    name: str
    plan: dict[str, Any]
    ranks: list[NDArray[np.void]]

    @property
    def step(self) -> int:
        return int(self.plan["world_size"] * self.plan["batch_size"])

    @property
    def complete(self) -> int:
        return min(len(rank) for rank in self.ranks)

    @property
    def clock(self) -> int:
        """The run's total tokens before its sample 0: more than none where an older checkpoint had them."""
        return int(self.plan.get("clock", 0))

    @property
    def skips(self) -> list[list[int]]:
        """(sample index, samples) of all that the run passes over from then on, in the order of their making."""
        return list(self.plan.get("skips", []))

    @property
    def start(self) -> int | None:
        """Where it began; None where nothing came."""
        begins = [int(rank["end"][0]) - self.step for rank in self.ranks if len(rank)]
        return begins[0] if begins else None


def check(folder: Path, final_index: int | None) -> Findings:
    """Checks a whole run. ``final_index``: where the last attempt was told to stop, and did; None if it was cut off."""
    found = Findings()
    attempts = [_read_attempt(path.parent) for path in sorted(folder.glob("attempts/*/plan.json"))]
    reference = _read_attempt(folder / "reference")
    size = max(
        (
            int(rank["end"][-1]) + sum(samples for _, samples in each.skips)
            for each in [*attempts, reference]
            for rank in each.ranks
            if len(rank)
        ),
        default=0,
    )
    expected, order = _Order(size), _Order(size)
    _take_in(reference, np.arange(size), expected, found, counted=False)
    if not expected.known.all():
        found.fault(
            f"the reference lacks {int((~expected.known).sum())} of {size} samples; the check needs them all"
        )
        return found
    lines = _Lines(expected)
    excepted, needed = np.zeros(size, bool), np.zeros(size, bool)
    for number, attempt in enumerate(attempts):
        places = lines.of(attempt.skips).places
        _check_start(attempt, attempts[:number], places, excepted, found)
        _take_in(attempt, places, order, found, counted=True)
        # Beyond that lies only what some ranks had of a step when they were killed, and no later launch came so far.
        if attempt.start is not None:
            needed[places[: attempt.start + attempt.complete * attempt.step]] = True
    lost = needed & ~order.known & ~excepted
    if lost.any():
        found.fault(
            f"lost: {int(lost.sum())} samples never came, the first of them sample {int(lost.argmax())}"
        )
    _compare(order, expected, found)
    _check_numbers(expected, found)
    for attempt in attempts:
        _check_digests(attempt, lines.of(attempt.skips).digests, found)
        _check_states(folder / "attempts" / attempt.name, attempt, found)
    clock = attempts[0].clock if attempts else 0
    _check_snapshots(folder / "snapshots.jsonl", lines, clock, found)
    _check_ledger(folder / "ledger.jsonl", attempts, lines, final_index, found)
    found.attempts, found.distinct = len(attempts), int(order.known.sum())
    found.tokens = found.delivered * LENGTH
    return found


class _Lines:
    """The orders that there were, each made once."""

    def __init__(self, expected: _Order) -> None:
        self._expected = expected
        self._lines: dict[str, _Line] = {}

    def of(self, skips: list[list[int]]) -> _Line:
        name = json.dumps(skips)
        if name not in self._lines:
            self._lines[name] = _Line(self._expected, skips)
        return self._lines[name]


def _read_attempt(folder: Path) -> _Attempt:
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    ranks = [
        read_records(folder / f"rank-{rank}.steps", plan["batch_size"])
        for rank in range(plan["world_size"])
    ]
    return _Attempt(folder.name, plan, ranks)


def _check_start(
    attempt: _Attempt,
    before: list[_Attempt],
    places: NDArray[np.int64],
    excepted: NDArray[np.bool_],
    found: Findings,
) -> None:
    start = attempt.start
    if start is None:
        return
    asked = attempt.plan["start"]
    if asked is not None and start != asked:
        found.fault(f"{attempt.name}: began at sample {start}, but was to begin at {asked}")
    if asked is not None:
        return
    # At what the ledger had: no further than one step beyond what each rank of some launch before had written down.
    reaches = [
        (other.start + other.complete * other.step, other)
        for other in before
        if other.start is not None
    ]
    if not any(start <= reach + other.step for reach, other in reaches) and start:
        found.fault(
            f"{attempt.name}: began at sample {start}, beyond what any launch before it had consumed"
        )
    for reach, other in reaches:
        if reach < start <= reach + other.step:
            excepted[places[reach:start]] = True


def _take_in(
    attempt: _Attempt,
    order_places: NDArray[np.int64],
    order: _Order,
    found: Findings,
    *,
    counted: bool,
) -> None:
    """Checks an attempt in itself and against what is known, and adds it to that."""
    start = attempt.start
    if start is None:
        return
    step, batch_size = attempt.step, int(attempt.plan["batch_size"])
    slices = []
    for rank, records in enumerate(attempt.ranks):
        if not len(records):
            continue
        what = f"{attempt.name}, rank {rank}"
        ends = start + step * np.arange(1, len(records) + 1)
        if not np.array_equal(records["end"], ends):
            at = int((records["end"] != ends).argmax())
            found.fault(
                f"{what}: its step {at} ends at sample {records['end'][at]}, expected {ends[at]}"
            )
            return
        if not np.array_equal(records["tokens"], attempt.clock + ends * LENGTH):
            found.fault(
                f"{what}: its total_tokens are not {attempt.clock}, and {LENGTH} for each sample up to there"
            )
        places = records["samples"] - (ends - step)[:, None]
        firsts = places[:, 0]
        in_a_row = np.array_equal(places, firsts[:, None] + np.arange(batch_size))
        if (
            not in_a_row
            or (firsts % batch_size).any()
            or (firsts < 0).any()
            or (firsts >= step).any()
        ):
            found.fault(f"{what}: its samples are not {batch_size} in a row of their step")
            return
        slices.append((what, records, firsts // batch_size))
    whole = np.array([firsts[: attempt.complete] for _, _, firsts in slices])
    every = np.tile(np.arange(len(whole))[:, None], attempt.complete)
    if attempt.complete and not np.array_equal(np.sort(whole, axis=0), every):
        found.fault(
            f"{attempt.name}: two ranks were given the same samples of a step, or none was given some"
        )
    for what, records, _ in slices:
        indices = order_places[records["samples"].ravel()]
        sources, ids = records["sources"].ravel(), records["ids"].reshape(-1, LENGTH)
        known = order.sources[indices] >= 0
        same = (order.sources[indices] == sources) & (order.ids[indices] == ids).all(axis=1)
        if (known & ~same).any():
            index = int(indices[(known & ~same).argmax()])
            found.fault(
                f"{what}: sample {index} of the undisturbed run is not what it was when it came before"
            )
        order.sources[indices], order.ids[indices] = sources, ids
        if counted:
            found.delivered += len(indices)


def _compare(order: _Order, expected: _Order, found: Findings) -> None:
    differs = order.known & (
        (order.sources != expected.sources) | (order.ids != expected.ids).any(axis=1)
    )
    if differs.any():
        index = int(differs.argmax())
        found.fault(
            f"reordered: {int(differs.sum())} samples are not those of an undisturbed run, the first sample {index}: "
            f"source {order.sources[index]}, ids {order.ids[index].tolist()}; expected source "
            f"{expected.sources[index]}, ids {expected.ids[index].tolist()}"
        )


def _check_numbers(order: _Order, found: Findings) -> None:
    """Each source's samples are its numbered tokens, one after the other, epoch after epoch."""
    for number, source in enumerate(SOURCES):
        got = order.ids[order.sources == number].ravel()
        epoch = source.epoch()
        expected = np.resize(epoch, len(got))
        if not np.array_equal(got, expected):
            at = int((got != expected).argmax())
            found.fault(
                f"source {source.alias}: its token {at} is {got[at]}, expected {expected[at]}"
            )
    if not np.isin(order.sources, range(len(SOURCES))).all():
        found.fault("there are samples of a source that does not exist")


def _digests(sources: NDArray[np.int16], ids: NDArray[np.uint32]) -> list[str]:
    """The rolling digest before each sample, and after the last."""
    value, found = 0, ["0" * 32]
    rows = np.ascontiguousarray(ids.astype("<u4"))
    for source, row in zip(sources.tolist(), rows, strict=True):
        value = digest_after(value, source, row.data)
        found.append(f"{value:032x}")
    return found


def _check_digests(attempt: _Attempt, digests: list[str], found: Findings) -> None:
    for rank, records in enumerate(attempt.ranks):
        for end, digest in zip(records["end"].tolist(), records["digest"].tolist(), strict=True):
            if digests[end] != digest.decode():
                found.fault(
                    f"{attempt.name}, rank {rank}: the digest at sample {end} is not that of the tensors"
                )
                break


def _check_states(folder: Path, attempt: _Attempt, found: Findings) -> None:
    """Every rank's state at a sample index is the same text."""
    texts: dict[int, str] = {}
    for rank in range(attempt.plan["world_size"]):
        for end, state in read_states(folder, rank).items():
            found.states += 1
            if texts.setdefault(end, state) != state:
                found.fault(
                    f"{attempt.name}: rank {rank}'s state at sample {end} is not that of the other ranks"
                )


def read_states(folder: Path, rank: int) -> dict[int, str]:
    """The states that a rank wrote down whole, by sample index."""
    path = folder / f"rank-{rank}.states"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    return {line["end"]: line["state"] for line in lines}


def _check_snapshots(path: Path, lines: _Lines, clock: int, found: Findings) -> None:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        snapshot = json.loads(line)
        index, digests = snapshot["sample_index"], lines.of(snapshot.get("skips", [])).digests
        if index >= len(digests):
            continue
        told, expected = (
            (snapshot["digest"], snapshot["total_tokens"]),
            (digests[index], clock + index * LENGTH),
        )
        if told != expected:
            found.fault(
                f"a snapshot at sample {index} has digest and tokens {told}, expected {expected}"
            )


def _check_ledger(
    path: Path, attempts: list[_Attempt], lines: _Lines, final_index: int | None, found: Findings
) -> None:
    seen = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.exists()
        else []
    )
    by_name = {attempt.plan["attempt"]: attempt for attempt in attempts}
    last = {"generation": 0, "sample_index": 0, "epoch": 0}
    nothing = dict(last)
    generations_seen = 0
    # The generation in which the ledger lost data, and where that left it: nobody may go on there.
    lost: tuple[int, int] | None = None
    for number, each in enumerate(seen):
        if "lost" in each:
            last, lost = nothing, None
            continue
        generation, index = each["generation"], each["sample_index"]
        what = f"the ledger (generation {generation}, sample {index})"
        if generation < last["generation"] or each["epoch"] < last["epoch"]:
            found.fault(
                f"{what}: went back from generation {last['generation']}, epoch {last['epoch']}"
            )
        if generation == last["generation"] and index < last["sample_index"]:
            found.fault(f"{what}: went back from sample {last['sample_index']}")
        if number and "lost" in seen[number - 1] and generation == generations_seen:
            lost = generation, index
        if lost is not None and generation == lost[0] and index != lost[1]:
            found.fault(
                f"{what}: went on from sample {lost[1]}, where the ledger had lost what came behind it"
            )
        generations_seen = max(generations_seen, generation)
        last = each
        attempt = by_name.get(each["attempt"])
        if attempt is None:
            found.fault(f"{what}: attempt {each['attempt']!r} is none that was launched")
            continue
        start = attempt.start if attempt.start is not None else attempt.plan["start"]
        # A rank may have taken one step more than it has written down.
        had = min(
            int(np.searchsorted(rank["at"], each["at"], side="right")) for rank in attempt.ranks
        )
        if start is not None and index > start + (had + 1) * attempt.step:
            held = start + had * attempt.step
            found.fault(
                f"{what}: beyond sample {held}, which is all that every rank of {attempt.name} had by then"
            )
        line = lines.of(attempt.skips)
        if index >= len(line.digests):
            found.fault(f"{what}: no trainer was ever given so many samples")
            continue
        if each["total_tokens"] != attempt.clock + index * LENGTH:
            found.fault(
                f"{what}: {each['total_tokens']} tokens, expected {attempt.clock + index * LENGTH}"
            )
        _check_counters(each, index, line, what, found)
    found.observations = sum("lost" not in each for each in seen)
    if final_index is not None and last["sample_index"] != final_index:
        found.fault(
            f"in the end the ledger is at sample {last['sample_index']}, but all ranks consumed {final_index}"
        )


def _check_counters(
    each: dict[str, Any], index: int, line: _Line, what: str, found: Findings
) -> None:
    if each["digest"] != line.digests[index]:
        found.fault(f"{what}: digest {each['digest']}; recounted {line.digests[index]}")
    for source, count, rows in zip(
        SOURCES, line.samples[:, index].tolist(), line.rows[:, index].tolist(), strict=True
    ):
        recounted = {"samples": count, "rows": rows, "tokens": count * LENGTH}
        if each["counters"].get(source.spec) != recounted:
            found.fault(
                f"{what}: {source.alias} counts {each['counters'].get(source.spec)}; recounted {recounted}"
            )
