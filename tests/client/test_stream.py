"""Faults on the way: what is tried again, what is final, and that nothing is lost or repeated."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from fake_server import RUN_UID, Script, ahead, eventually, serving
from tokenloom import (
    AttemptUsed,
    ConnectionOptions,
    Fenced,
    LedgerRolledBack,
    NotFound,
    ProtocolError,
    RemoteDataset,
    ServerUnavailable,
    TokenloomError,
)
from tokenloom.connection import buffer, channel, stream
from tokenloom_proto import dataloader_pb2 as wire


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(channel, "MAX_DELAY_S", 0.2)


def samples(dataset: RemoteDataset, count: int | None = None) -> Iterator[int]:
    for number, batch in enumerate(dataset, 1):
        yield from batch["sample_ids"].tolist()
        if number == count:
            return


@pytest.mark.parametrize("fault", ["", "ServerStopping", "NotLeader", "end"])
def test_a_broken_stream_is_reopened_behind_the_last_step_received(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(
        end_index=12,
        on_message=lambda stream, begin: fault if begin == 4 * stream and begin < 12 else None,
    )
    with (
        serving(script) as (server, url, _),
        RemoteDataset(url, 1, connection=ahead(12)) as dataset,
    ):
        assert list(samples(dataset)) == list(range(12))

        assert len(server.joins) == 1
        assert [open_.received_through for open_ in server.opens] == [0, 4, 8]
        assert {open_.run_uid for open_ in server.opens} == {RUN_UID}
        assert {open_.generation for open_ in server.opens} == {3}
        assert {open_.nonce for open_ in server.opens} == {server.joins[0].nonce}
        first, second, third = (open_.number for open_ in server.opens)
        assert 0 < first < second < third
        assert caplog.text.count("broke, reconnecting") == 2


def test_a_new_stream_tells_what_was_consumed_and_the_highest_commit_seen() -> None:
    script = Script(
        group_micro_steps=1,
        on_message=lambda stream, begin: "" if (stream, begin) == (1, 6) else None,
    )
    with serving(script) as (server, url, _), RemoteDataset(url, 1, connection=ahead(2)) as dataset:
        batches = iter(dataset)
        for expected in range(9):
            assert next(batches)["sample_ids"].tolist() == [expected]
            time.sleep(0.02)  # so that the server reports each commit

        again = server.opens[1]
        assert again.received_through == 6
        assert again.progress.consumed_through in (5, 6)
        assert again.progress.credit_micro_steps == 2
        assert 0 < again.committed_through <= again.progress.consumed_through


def test_a_server_that_is_restarted_on_its_port_is_found_again() -> None:
    with serving(Script()) as (_, url, server):
        dataset = RemoteDataset(url, 1, connection=ahead(2))
        batches = iter(dataset)
        first = next(batches)["sample_ids"].tolist()
        server.stop(0).wait()
    with serving(Script(), port=int(url.rpartition(":")[2].partition("/")[0])) as (again, _, _):
        again.joins.append(_join_of(dataset))
        rest = [next(batches)["sample_ids"].tolist() for _ in range(6)]
        dataset.close()

    assert [first, *rest] == [[index] for index in range(7)]


def _join_of(dataset: RemoteDataset) -> wire.JoinRequest:
    return wire.JoinRequest(run="fake", rank=dataset.rank, world_size=1, batch_size=1)


def test_a_fenced_trainer_gets_none_of_what_was_buffered() -> None:
    fenced = threading.Event()

    def fence(stream: int, begin: int) -> str | None:
        return "Fenced" if begin == 8 and fenced.wait(60) else None

    with (
        serving(Script(on_message=fence)) as (server, url, _),
        RemoteDataset(url, 1, connection=ahead(20)) as dataset,
    ):
        batches = iter(dataset)
        next(batches)
        fenced.set()
        assert dataset._connection is not None
        dataset._connection._thread.join(60)
        for _ in range(2):  # for good, and never taken for an end of the data
            with pytest.raises(Fenced, match="as the script says, at 8"):
                next(batches)
        with pytest.raises(Fenced):
            next(iter(dataset))

        assert len(server.opens) == 1
        assert dataset.sample_index == 1


@pytest.mark.parametrize(
    ("fault", "error"), [("LedgerRolledBack", LedgerRolledBack), ("NotFound", NotFound)]
)
def test_any_other_named_error_comes_after_what_was_buffered_and_is_not_tried_again(
    fault: str, error: type[TokenloomError]
) -> None:
    script = Script(on_message=lambda stream, begin: fault if begin == 4 else None)
    with serving(script) as (server, url, _), RemoteDataset(url, 1, connection=ahead(8)) as dataset:
        got = []
        with pytest.raises(error, match="as the script says, at 4"):
            got += list(samples(dataset, 4))
            next(iter(dataset))

        assert got == [0, 1, 2, 3]
        assert len(server.opens) == 1


def test_a_server_that_skips_data_is_refused() -> None:
    script = Script(on_message=lambda stream, begin: "skip" if begin == 4 else None)
    with serving(script) as (_, url, _), RemoteDataset(url, 1, connection=ahead(8)) as dataset:
        with pytest.raises(ProtocolError, match="came for sample index 5, but 4 is next"):
            list(samples(dataset))

        assert dataset.sample_index == 4


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "SILENCE_S", 2.0)
    monkeypatch.setattr(buffer, "PATIENCE_S", 0.2)
    monkeypatch.setattr(buffer, "TICK_S", 0.1)


@pytest.mark.usefixtures("short_silence")
def test_a_silent_stream_is_taken_for_broken_but_not_one_that_has_heartbeats(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = Script(
        on_message=lambda stream, begin: "silent" if (stream, begin) == (1, 4) else None
    )
    with serving(script) as (server, url, _), RemoteDataset(url, 1, connection=ahead(8)) as dataset:
        assert list(samples(dataset, 8)) == list(range(8))

        assert [open_.received_through for open_ in server.opens[:2]] == [0, 4]
        assert "silent, without even a heartbeat" in caplog.text
    with (
        serving(Script()) as (server, url, _),
        RemoteDataset(url, 1, connection=ahead(2)) as dataset,
    ):
        batches = iter(dataset)
        next(batches)
        time.sleep(2.5)  # the trainer is busy, the buffer full
        next(batches)

        assert len(server.opens) == 1


def test_a_batch_that_does_not_come_is_logged_and_in_the_end_an_error_after_which_the_trainer_may_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(buffer, "PATIENCE_S", 0.2)
    monkeypatch.setattr(buffer, "TICK_S", 0.1)
    script = Script(on_message=lambda number, begin: "silent" if number == 1 else None)
    options = ConnectionOptions(batch_timeout_s=0.5)
    with serving(script) as (_, url, _), RemoteDataset(url, 1, connection=options) as dataset:
        batches = iter(dataset)
        with pytest.raises(
            ServerUnavailable,
            match=r"no batch for 0\.5 s \(batch_timeout_s\); waiting for: the stream",
        ):
            next(batches)
        assert dataset._connection is not None
        dataset._connection.break_stream()

        assert next(batches)["sample_index"] == 1
    assert "no batch for 0 s; waiting for: the stream to open" in caplog.text


def test_the_server_hears_how_long_next_waited_also_while_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffer, "TICK_S", 0.05)
    monkeypatch.setattr(buffer, "SIGN_OF_LIFE_S", 0.1)
    monkeypatch.setattr(stream, "SIGN_OF_LIFE_S", 0.1)
    script = Script(
        on_message=lambda number, begin: "silent" if number == 1 and begin == 4 else None
    )
    with serving(script) as (server, url, _), RemoteDataset(url, 1, connection=ahead(4)) as dataset:
        batches = iter(dataset)
        next(batches)
        assert dataset._connection is not None
        received = dataset._connection.buffer
        assert eventually(lambda: received.received_through == 4)
        first_s = received.waited_s
        for _ in range(3):
            next(batches)
            time.sleep(0.1)
        # Those that were there were not waited for.
        before = received.waited_s
        assert before - first_s < 0.1
        waiting = threading.Thread(target=next, args=(batches,), daemon=True)
        waiting.start()
        assert eventually(lambda: server.progress[-1].waited_s > before + 0.5)
        assert dataset._connection is not None
        dataset._connection.break_stream()
        waiting.join(60)
        waited_s = dataset._connection.buffer.waited_s
        time.sleep(0.2)
        assert dataset._connection.buffer.waited_s == waited_s > before + 0.5


def test_reconnecting_ends_after_its_timeout_with_what_was_buffered_delivered_first() -> None:
    with serving(Script()) as (_, url, server):
        dataset = RemoteDataset(url, 1, connection=ahead(4, reconnect_timeout_s=0.5))
        batches = iter(dataset)
        next(batches)
        assert dataset._connection is not None
        received = dataset._connection.buffer
        assert eventually(lambda: received.received_through >= 5)
        server.stop(0).wait()
    got: list[int] = []
    with pytest.raises(
        ServerUnavailable, match=r"gave no stream for 0\.5 s \(reconnect_timeout_s\)"
    ):
        got.extend(batch["sample_index"] for batch in batches)

    assert got[:3] == [2, 3, 4]
    dataset.close()


def test_a_server_that_takes_every_stream_and_says_nothing_is_given_up_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffer, "SILENCE_S", 0.2)
    monkeypatch.setattr(buffer, "TICK_S", 0.1)
    monkeypatch.setattr(stream, "SOUND_STREAM_S", 0.05)  # less than each of the streams lasts
    with serving(Script(on_message=lambda number, begin: "silent")) as (server, url, _):
        dataset = RemoteDataset(url, 1, connection=ConnectionOptions(reconnect_timeout_s=1.0))
        with pytest.raises(
            ServerUnavailable, match=r"gave no stream for 1 s .*silent, without even a heartbeat"
        ):
            next(iter(dataset))
        dataset.close()

        assert len(server.opens) > 1


def test_a_stream_that_breaks_behind_the_last_step_is_reopened_at_once_for_the_reports() -> None:
    script = Script(end_index=4)
    with serving(script) as (server, url, _), RemoteDataset(url, 1, connection=ahead(8)) as dataset:
        batches = iter(dataset)
        next(batches)
        assert dataset._connection is not None
        received = dataset._connection.buffer
        assert eventually(lambda: received.received_through == 4)
        dataset._connection.break_stream()
        assert eventually(lambda: len(server.opens) == 2)
        assert server.opens[-1].received_through == 4
        assert list(samples(dataset)) == [1, 2, 3]
        dataset._connection._thread.join(60)

        assert not dataset._connection._thread.is_alive()
        assert server.progress[-1].consumed_through == 4


def test_closing_while_the_stream_is_broken_still_delivers_the_last_report() -> None:
    with serving(Script(end_index=4)) as (server, url, _):
        dataset = RemoteDataset(url, 1, connection=ahead(8))
        batches = iter(dataset)
        next(batches)
        assert eventually(
            lambda: (
                dataset._connection is not None and dataset._connection.buffer.received_through == 4
            )
        )
        assert dataset._connection is not None
        dataset._connection.break_stream()
        assert list(samples(dataset)) == [1, 2, 3]
        dataset.close()

        assert (
            max(server.opens[-1].progress.consumed_through, server.progress[-1].consumed_through)
            == 4
        )


# --- Join --------------------------------------------------------------------------------------------------------


def test_a_join_waits_for_a_place_where_all_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Script(), places=1) as (_, url, _), RemoteDataset(url, 1) as first:
        next(iter(first))
        leaves = threading.Timer(0.5, first.close)
        leaves.start()
        with RemoteDataset(url, 1, connection=ConnectionOptions(connect_timeout_s=20)) as second:
            assert list(samples(second, 2)) == [0, 1]
        leaves.join()
    assert "Concurrent RPC limit" in caplog.text


def test_a_join_waits_for_a_server_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving(Script(join_errors=["", "ServerStopping"])) as (server, url, _),
        RemoteDataset(url, 1) as dataset,
    ):
        assert next(samples(dataset)) == 0

        assert len(server.joins) == 3
        assert len({(join.attempt, join.nonce) for join in server.joins}) == 1
        assert "cannot join" in caplog.text


def test_of_several_servers_the_log_has_the_words_of_the_one_that_leads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    standby, leader = Script(join_errors=["NotLeader"] * 9), Script(join_errors=["ServerStopping"])
    with serving(standby) as (_, first, _), serving(leader) as (_, second, _):
        both = first.replace("/fake", f",{second.removeprefix('grpc://')}")
        with RemoteDataset(both, 1) as dataset:
            assert next(samples(dataset)) == 0
    (line,) = [record.message for record in caplog.records if "cannot join" in record.message]
    assert "ServerStopping" in line


@pytest.mark.parametrize("listens", [False, True])
def test_a_server_that_never_comes_or_does_not_answer_is_unavailable_after_the_timeout(
    listens: bool,
) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if listens:
            mute.listen()
        url = f"grpc://127.0.0.1:{mute.getsockname()[1]}/fake"
        with pytest.raises(ServerUnavailable, match=url):
            iter(RemoteDataset(url, 1, connection=ConnectionOptions(connect_timeout_s=0.5)))


def test_a_refused_join_is_raised_at_once_with_the_servers_message() -> None:
    with serving(Script(join_errors=["AttemptUsed"])) as (server, url, _):
        with pytest.raises(AttemptUsed, match="as the script says"):
            iter(RemoteDataset(url, 1))

        assert len(server.joins) == 1


def test_a_proxy_in_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with (
        serving(Script()) as (_, url, _),
        RemoteDataset(url, 1, connection=ConnectionOptions(connect_timeout_s=5)) as dataset,
    ):
        assert next(samples(dataset)) == 0
