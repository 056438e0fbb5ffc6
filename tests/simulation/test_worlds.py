"""Hundreds of worlds, each drawn from its seed: nothing is lost, repeated or reordered in any of them.

Where one fails: ``python -m tests.simulation SEED`` tells what happened in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from tests.simulation import events
from tests.simulation.__main__ import app
from tests.simulation.events import WORLDS
from tests.simulation.mutants import MUTANTS
from tests.simulation.scheduler import Violation
from tests.simulation.world import FAULTS, SKIP_FAULTS, World

#: Where a mutant was caught last: looked at first, so that this takes seconds. Any of the worlds will do.
CAUGHT = {
    "ledger_without_fence": (380,),
    "server_without_fence": (25, 34),
    "ledger_without_deduplication": (37, 62),
    "ledger_that_ignores_the_epoch": (1, 15),
    "opening_of_unknown_outcome_forgotten": (44, 134),
    "lease_ignored": (81,),
    "revisions_below_the_horizon": (29, 57),
    "revisions_not_read_when_leading": (37, 44),
    "revisions_not_told_to_the_producer": (40, 92),
    "revisions_named_as_soon_as_they_are_known": (1263, 1328),
    "clock_of_an_older_checkpoint_ignored": (16, 29),
    "clock_forgotten_when_leading": (48, 130),
    "skips_forgotten_when_leading": (29, 98),
    "skips_for_one_launch_alone": (19, 29),
    "states_of_before_a_skip_taken": (761, 2018),
    "claims_answered_unwritten": (80, 176),
    "answers_of_readers_as_they_come": (11, 15),
    "rows_of_readers_again_after_a_cut": (3, 6),
}
#: Any change in what servers call changes all worlds. Where the seeds above are out of date so many are searched, since
#: one world in some hundreds catches the rarest: then write down the new ones.
SEARCHED = 4 * WORLDS


def keep_every_promise(seeds: range, look: Callable[[World], None] = lambda world: None) -> None:
    """What happens in the worlds of a chunk is what happened before."""
    faults, digest = events.run(seeds, look)

    assert not faults, "\n".join([*faults, "replay one: python -m tests.simulation SEED"])
    assert digest == events.written()[seeds.start], (
        "a server or a trainer does something else, or at another time; where it is meant: "
        "python -m tests.simulation --write"
    )


@pytest.mark.parametrize("seeds", events.chunks()[4:], ids=lambda seeds: str(seeds.start))
def test_no_world_breaks_a_promise(seeds: range) -> None:
    keep_every_promise(seeds)


def test_the_command_that_a_failing_world_names_replays_it() -> None:
    found = CliRunner().invoke(app, ["5"])
    assert "seed 5: every promise was kept" in found.output


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(6005016, id="an older checkpoint beyond the end of the data is refused"),
        pytest.param(6007086, id="an older checkpoint beyond a skip is refused"),
        pytest.param(
            6005106, id="a rank is killed after its last step, and the server never hears of that"
        ),
        pytest.param(
            6006951,
            id="a launch's second rank joins after the ledger lost what its first one joined",
        ),
        pytest.param(
            6008875, id="a group is produced again under a revision that replaces one at its sample"
        ),
        pytest.param(6010000, id="the ledger loses a revision that is in force"),
        pytest.param(6014383, id="a rank writes its state before it hears of that"),
        pytest.param(
            9300101,
            id="the ledger loses an opening from an older checkpoint, and its ranks come again",
        ),
        pytest.param(309599, id="a pin is written once more after it was taken back"),
        pytest.param(41005993, id="an opening is worked out from what the ledger loses meanwhile"),
    ],
)
def test_worlds_that_were_met_beyond_the_first(seed: int) -> None:
    World(seed).run()


@pytest.mark.timeout(900)  # where the seeds above are out of date
@pytest.mark.parametrize("name", MUTANTS)
def test_a_product_without_one_of_its_guards_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTANTS[name](monkeypatch)
    for seed in [*CAUGHT.get(name, ()), *range(SEARCHED)]:
        try:
            World(seed).run()
        except Violation:
            return
    pytest.fail(f"{name} survived {SEARCHED} worlds")


@pytest.mark.timeout(900)  # two hundred worlds, also beside nine other processes
def test_no_world_breaks_a_promise_and_they_meet_what_they_are_there_for() -> None:
    seen: Counter[str] = Counter()
    found: set[tuple[str, str]] = set()
    sizes: set[int] = set()

    def look(world: World) -> None:
        sizes.add(world.plan.largest_world)
        clocks = ["clock_offset" in opening.start_state for opening in world.openings]
        leaders = {who.partition(",")[0] for _, who, what, _ in world.log if what == "leads"}
        revised = [details[1] for _, _, what, details in world.log if what == "revised"]
        seen.update(
            schedules=any(
                len(launch.sizes) > 1 and launch.accumulate > 1 for launch in world.launches
            ),
            imports=any(clocks),
            moves=len(set(clocks)) > 1,
            takeovers=len(leaders) > 1,
            skips=sum(what == "skips" for _, _, what, _ in world.log),
            in_force=any(0 < index < world.checker.committed for index in revised),
            asked=sum(readers.requests for readers in world.readers),
            cut=sum(readers.cut for readers in world.readers),
        )
        found.update(
            (what, str(details[0]) if details else "") for _, _, what, details in world.log
        )

    for seeds in events.chunks()[:4]:
        keep_every_promise(seeds, look)
    assert max(sizes) == 64
    least = {
        "takeovers": 3,
        "in_force": 3,
        "schedules": 10,
        "imports": 10,
        "moves": 0,
        "skips": 10,
        "asked": 1000,
    }
    for what, count in (least | {"cut": 200}).items():
        assert seen[what] > count, what
    assert {("fault", kind) for kind in (*FAULTS, *SKIP_FAULTS)} <= found
    for error in ("Fenced", "RunBusy", "AttemptUsed", "LedgerRolledBack"):
        assert ("failed", error) in found, error
    for what in ("late write", "answer lost", "ledger away"):
        assert {(what, call) for call in ("open", "commit")} <= found, what
    assert {("killed before", "open"), ("killed after", "acquire")} <= found
