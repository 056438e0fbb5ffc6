"""A ledger's file that is deleted or replaced while a server has it open: it counts as one that lost data."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.served import PATIENCE_S, RUN, Place, Trainer, never, part, sequence, until_led
from support.waiting import wait_for
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.api.service import Runs
from tokenloom_server.errors import LedgerRolledBack, NotLeader
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.run.timeouts import Timeouts

#: Renewed every half second.
LEASE_S = 1.5


@pytest.fixture
def place(made: Callable[..., Place]) -> Place:
    place = made()
    place.timeouts = Timeouts(lease_s=LEASE_S, liveness_s=0.0)
    return place


def delete(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()


def until_lost(trainer: Trainer) -> None:
    """A rank asks on until it hears that the ledger lost data, or that another server leads."""
    rank = trainer.ranks[0]

    def is_lost() -> bool:
        try:
            rank.connect(rank.served)
            rank.served.coordinator.sessions.next_for(rank.session, PATIENCE_S, never)
        except LedgerRolledBack:
            return True
        except NotLeader as error:
            return "is served by another" in str(error)
        return False

    wait_for(is_lost, "the loss of the ledger")


def test_from_the_moment_at_which_its_file_is_gone_a_server_sends_nothing_and_the_next_renewal_says_why(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    samples = sequence(served)
    trainer.train(3)
    state = trainer.state()
    delete(place.ledger_path)
    assert not served.coordinator.leads()
    with pytest.raises((NotLeader, LedgerRolledBack), match="deleted"):
        served.coordinator.sessions.next_for(trainer.ranks[0].session, PATIENCE_S, never)
    until_lost(trainer)
    error = served.coordinator.view().error
    assert isinstance(error, LedgerRolledBack)
    assert "deleted, moved or replaced while it was open" in str(error)
    # The server has made a new file there, which the trainer's state makes right.
    again = until_led(lambda: Trainer(served, state=state))
    again.train(4)
    assert again.taken() == part(samples, 12, 28)
    assert served.coordinator.view().error is None
    assert place.committed().sample_index == 28


def test_a_second_server_on_a_new_file_at_the_path_never_leads_beside_the_first(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    samples = sequence(served)
    trainer.train(3)
    state = trainer.state()
    delete(place.ledger_path)
    with closing(SqliteLedger(place.ledger_path)) as ledger:
        second = Runs(ledger, "another", place.timeouts)
        try:
            beside = second.add(place.path, None)
            assert beside.coordinator.leads()
            assert not served.coordinator.leads()
            until_lost(trainer)
            # It asks for the lease in the file that is there now, and stands by.
            until_named = "stands by: .* is served by another"
            wait_for(
                lambda: re.search(until_named, place.runs.not_ready() or "") is not None,
                "the first to stand by",
            )
            again = Trainer(beside, state=state)
            again.train(4)
            assert again.taken() == part(samples, 12, 28)
            assert not served.coordinator.leads()
        finally:
            second.stop()


def test_of_a_servers_runs_each_leaves_off_also_those_that_did_not_find_it(place: Place) -> None:
    place.timeouts = Timeouts(
        lease_s=300.0, liveness_s=0.0
    )  # it looks at its lease when it is told to
    served = place.serve()
    trainer = Trainer(served)
    trainer.train(1)
    delete(place.ledger_path)
    with pytest.raises(LedgerRolledBack):
        place.ledger.run_names()  # another run, or somebody who looks: the file is opened anew
    assert place.ledger.run_names() == []
    assert not served.coordinator.leads()
    served.leadership.step()  # finds that it lost data
    served.leadership.step()  # takes the lease in the new file
    assert served.coordinator.leads()
    until_lost(trainer)
    assert place.ledger.run_names() == [(RUN, "train")]
