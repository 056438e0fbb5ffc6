"""The checker finds what it is there for: each kind of wrong, put by hand into files that are right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.digest import digest_after

from chaos.checker import check, skips_by_index
from chaos.corpus import SOURCES
from chaos.records import LENGTH, record_type

SAMPLES = 240
#: Launches: (world size, batch size, start, steps by rank); the second begins at a checkpoint before the first's end.
LAUNCHES = ((2, 3, 0, (20, 21)), (3, 2, 96, (24, 24, 24)))
#: A third launch passes over these: the samples 60 to 66 of the undisturbed run, then 54 to 56, where it begins again.
SKIPS = [[60, 7], [54, 3]]
SKIPPING = (1, 4, 54, (44,))


def order(skipped: Sequence[int] = ()) -> tuple[NDArray[np.int16], NDArray[np.uint32]]:
    """Sources in turn, each with its numbered tokens."""
    sources = np.arange(SAMPLES) % len(SOURCES)
    ids = np.zeros((SAMPLES, LENGTH), np.uint32)
    for number, source in enumerate(SOURCES):
        mine = sources == number
        ids[mine] = np.resize(source.epoch(), mine.sum() * LENGTH).reshape(-1, LENGTH)
    left = np.setdiff1d(np.arange(SAMPLES), skipped)
    return sources.astype(np.int16)[left], ids[left]


class Files:
    """What a supervisor and its trainers would have written, as arrays that a test can spoil before they are."""

    def __init__(self, skipped: Sequence[int] = ()) -> None:
        sources, ids = order(skipped)
        self.digests = ["0" * 32]
        value = 0
        for source, row in zip(sources.tolist(), ids, strict=True):
            value = digest_after(value, source, row.tobytes())
            self.digests.append(f"{value:032x}")
        self.sources, self.ids = sources, ids
        self.skips: dict[str, list[list[int]]] = {}
        if skipped:
            return
        self.launches = {f"{n:04d}": self.launch(*launch) for n, launch in enumerate(LAUNCHES)}
        self.starts: list[int | None] = [launch[2] for launch in LAUNCHES]
        self.states = {"0000": [{54: "state"}, {54: "state"}]}
        self.seen = [self.look(1, "0000", index) for index in (0, 60, 120)]
        self.seen += [self.look(2, "0001", index) for index in (96, 150, 240)]

    def launch(
        self, world_size: int, batch_size: int, start: int, steps: tuple[int, ...]
    ) -> list[NDArray[np.void]]:
        ranks = []
        for rank, count in enumerate(steps):
            records = np.zeros(count, record_type(batch_size))
            for step, record in enumerate(records):
                begin = start + step * world_size * batch_size
                at = begin + (rank + step) % world_size * batch_size + np.arange(batch_size)
                end = begin + world_size * batch_size
                record["at"] = step
                record["end"], record["tokens"], record["digest"] = (
                    end,
                    end * LENGTH,
                    self.digests[end].encode(),
                )
                record["samples"], record["sources"], record["ids"] = (
                    at,
                    self.sources[at],
                    self.ids[at],
                )
            ranks.append(records)
        return ranks

    def look(self, generation: int, attempt: str, index: int) -> dict[str, Any]:
        """What the ledger shows as soon as it may; a step's time is its number."""
        world_size, batch_size, start, _ = (*LAUNCHES, SKIPPING)[int(attempt)]
        counters = {}
        for number, source in enumerate(SOURCES):
            count = int((self.sources[:index] == number).sum())
            rows = int((self.ids[:index][self.sources[:index] == number] == 0).sum())
            counters[source.spec] = {"samples": count, "rows": rows, "tokens": count * LENGTH}
        return {
            "generation": generation,
            "epoch": 1,
            "attempt": attempt,
            "sample_index": index,
            "at": (index - start) // (world_size * batch_size) - 1,
            "total_tokens": index * LENGTH,
            "digest": self.digests[index],
            "counters": counters,
        }

    def write(self, folder: Path) -> Path:
        reference = self.launch(1, 8, 0, (SAMPLES // 8,))
        launches = {f"attempts/{name}": ranks for name, ranks in self.launches.items()} | {
            "reference": reference
        }
        starts = [*self.starts, 0]
        for (name, ranks), start in zip(launches.items(), starts, strict=True):
            into = folder / name
            into.mkdir(parents=True)
            batch_size = ranks[0]["samples"].shape[1]
            plan = {
                "attempt": into.name,
                "world_size": len(ranks),
                "batch_size": batch_size,
                "start": start,
            }
            (into / "plan.json").write_text(
                json.dumps(plan | {"skips": self.skips.get(into.name, [])})
            )
            for rank, records in enumerate(ranks):
                (into / f"rank-{rank}.steps").write_bytes(records.tobytes())
            for rank, states in enumerate(self.states.get(into.name, [])):
                lines = [
                    json.dumps({"end": end, "state": state}) + "\n" for end, state in states.items()
                ]
                (into / f"rank-{rank}.states").write_text("".join(lines))
        (folder / "ledger.jsonl").write_text("".join(json.dumps(each) + "\n" for each in self.seen))
        return folder


def test_files_that_are_right_pass_and_everything_in_them_is_counted(tmp_path: Path) -> None:
    found = check(Files().write(tmp_path), SAMPLES)
    assert found.wrong == []
    assert (found.attempts, found.distinct, found.observations, found.states) == (2, SAMPLES, 6, 2)
    assert found.delivered == 41 * 3 + 72 * 2


def skipping(skipped: Sequence[int]) -> Files:
    """A third launch is to pass over ``SKIPS``, and the samples ``skipped`` of the undisturbed run do not come."""
    files, after = Files(), Files(skipped)
    files.launches["0002"], files.skips["0002"] = [after.launch(*SKIPPING)[0]], SKIPS
    files.starts.append(SKIPPING[2])
    files.seen += [after.look(3, "0002", index) for index in (54, 70, 230)]
    return files


def test_a_launch_that_passes_over_samples_is_held_to_the_order_without_them(
    tmp_path: Path,
) -> None:
    found = check(skipping([54, 55, 56, *range(60, 67)]).write(tmp_path), 230)
    assert (found.wrong, found.distinct) == ([], SAMPLES)
    assert skips_by_index(SKIPS) == {54: 3, 57: 7}


@pytest.mark.parametrize(
    ("skipped", "message"),
    [
        ([*range(60, 70)], "0002, rank 0: sample 57 of the undisturbed run is not what it was"),
        (
            [54, 55, 56, *range(61, 68)],
            "0002, rank 0: sample 67 of the undisturbed run is not what it was",
        ),
    ],
)
def test_a_launch_that_passes_over_other_samples_is_found(
    skipped: list[int], message: str, tmp_path: Path
) -> None:
    files = skipping(skipped)
    wrong = check(files.write(tmp_path), 230).wrong
    assert re.search(message, "\n".join(wrong)), wrong


def test_a_ledger_that_counts_what_was_skipped_is_found(tmp_path: Path) -> None:
    files = skipping([54, 55, 56, *range(60, 67)])
    files.seen[-1]["counters"][SOURCES[0].spec]["rows"] += 1
    assert any("code counts" in wrong for wrong in check(files.write(tmp_path), 230).wrong)


def test_a_ledger_that_lost_data_may_be_behind_until_the_next_launch(tmp_path: Path) -> None:
    files = Files()
    files.seen[2:3] = [{"lost": True}, files.look(1, "0000", 48)]
    assert check(files.write(tmp_path), SAMPLES).wrong == []


def lose_a_step(files: Files) -> None:
    files.launches["0001"][1] = np.delete(files.launches["0001"][1], 20)


def repeat_a_step(files: Files) -> None:
    files.launches["0001"][1] = np.insert(
        files.launches["0001"][1], 20, files.launches["0001"][1][20]
    )


def give_two_ranks_the_same(files: Files) -> None:
    for name in ("samples", "sources", "ids"):
        files.launches["0000"][0][name][5] = files.launches["0000"][1][name][5]


def swap_two_samples(files: Files) -> None:
    for name in ("sources", "ids"):
        column = files.launches["0001"][2][name]
        column[23, 0], column[23, 1] = column[23, 1].copy(), column[23, 0].copy()


def change_one_token(files: Files) -> None:
    files.launches["0000"][1]["ids"][7, 2, 15] += 1


def begin_beyond_the_checkpoint(files: Files) -> None:
    files.starts[1] = 90


def skip_what_nobody_had(files: Files) -> None:
    files.starts[1] = None
    files.launches["0000"] = [rank[:12] for rank in files.launches["0000"]]
    files.seen = files.seen[3:]


def give_a_wrong_digest(files: Files) -> None:
    files.launches["0001"][0]["digest"][3] = b"f" * 32


def give_ranks_different_states(files: Files) -> None:
    files.states["0000"][1][54] = "another"


def count_what_was_only_sent(files: Files) -> None:
    files.seen[2] = files.look(1, "0000", 132)


def count_what_ranks_got_later(files: Files) -> None:
    files.seen[1]["at"] = 5


def count_a_sample_twice(files: Files) -> None:
    files.seen[4]["counters"][SOURCES[1].spec]["samples"] += 1


def go_back_in_the_ledger(files: Files) -> None:
    files.seen.insert(5, files.look(2, "0001", 144))


def move_the_counters_for_an_older_launch(files: Files) -> None:
    files.seen.append(files.look(1, "0000", 120))


def go_on_in_a_ledger_that_lost_data(files: Files) -> None:
    files.seen[2:3] = [{"lost": True}, files.look(1, "0000", 48), files.look(1, "0000", 54)]


def lose_the_last_commit(files: Files) -> None:
    files.seen.pop()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_a_step, "its step 20 ends at sample"),
        (repeat_a_step, "its step 21 ends at sample"),
        (give_two_ranks_the_same, "two ranks were given the same samples"),
        (swap_two_samples, "reordered: 2 samples"),
        (change_one_token, "not what it was when it came before|reordered: 1 samples"),
        (begin_beyond_the_checkpoint, "began at sample 96, but was to begin at 90"),
        (skip_what_nobody_had, "beyond what any launch before it had consumed"),
        (give_a_wrong_digest, "the digest at sample 120 is not that of the tensors"),
        (give_ranks_different_states, "rank 1's state at sample 54"),
        (count_what_was_only_sent, "beyond sample 120"),
        (count_what_ranks_got_later, "beyond sample 36"),
        (count_a_sample_twice, "docs counts"),
        (go_back_in_the_ledger, "went back from sample 150"),
        (move_the_counters_for_an_older_launch, "went back from generation 2"),
        (go_on_in_a_ledger_that_lost_data, "went on from sample 48"),
        (lose_the_last_commit, "in the end the ledger is at sample 150"),
    ],
)
def test_every_kind_of_wrong_is_found(
    spoil: Callable[[Files], None], message: str, tmp_path: Path
) -> None:
    files = Files()
    spoil(files)
    wrong = check(files.write(tmp_path), SAMPLES).wrong
    assert re.search(message, "\n".join(wrong)), wrong
