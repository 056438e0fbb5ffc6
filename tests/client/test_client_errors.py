"""Errors that travel by name."""

from __future__ import annotations

import inspect
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenloom
import tokenloom_server.errors
from fake_server import Script, serving
from support.corpora import CODE, WIKI, flat, write_corpus
from support.served import RUN, Place, over_grpc
from tokenloom import ConnectionOptions, LaunchOptions, RemoteDataset
from tokenloom_proto.errors import TokenloomError, named


def test_every_error_that_the_server_can_send_has_a_class_of_its_own() -> None:
    sent = inspect.getmembers(tokenloom_server.errors, inspect.isclass)

    for name, _ in sent:
        error = named(name, "the message")
        assert type(error).__name__ == name
        assert str(error) == "the message"
        assert getattr(tokenloom, name) is type(error)


def test_a_name_of_a_newer_server_is_kept_in_the_message() -> None:
    error = named("NeverHeardOf", "the message")

    assert type(error) is TokenloomError
    assert str(error) == "NeverHeardOf: the message"


def assert_ends_with_its_sentence(error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    assert not any(
        part in text for part in ("_channel.py", "RpcError", "above exception", "another exception")
    ), text
    assert text.splitlines()[-1] == f"{type(error).__module__}.{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "script", [Script(join_errors=["JoinRefused"]), Script(on_message=lambda *_: "SourceError")]
)
def test_an_error_ends_with_its_sentence_and_not_with_a_traceback_of_grpc(script: Script) -> None:
    with serving(script) as (_, url, _), RemoteDataset(url, 1) as dataset:
        with pytest.raises(TokenloomError) as raised:
            next(iter(dataset))
        assert_ends_with_its_sentence(raised.value)


def test_a_question_that_finds_no_server_says_so_and_ends_with_its_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = RemoteDataset(
        "grpc://127.0.0.1:9/run", 1, connection=ConnectionOptions(connect_timeout_s=2.0)
    )
    with pytest.raises(TokenloomError) as raised:
        print(dataset.vocab_size)
    assert_ends_with_its_sentence(raised.value)
    assert "cannot ask grpc://127.0.0.1:9/run yet, trying for " in caplog.text


def test_what_all_ranks_of_a_launch_get_rank_0_says_in_full_and_the_others_shortly(
    tmp_path: Path,
) -> None:
    place = Place(write_corpus(tmp_path), tmp_path, flat([CODE, WIKI], window_micro_steps=40))
    served = place.serve()
    try:
        with over_grpc(place.runs) as address:

            def launch(attempt: str, steps: int) -> list[str]:
                """What each rank's error says."""

                def rank_of(rank: int) -> str:
                    options = {
                        "rank": rank,
                        "world_size": 2,
                        "launch": LaunchOptions(attempt=attempt),
                    }
                    with RemoteDataset(f"grpc://{address}/{RUN}", 2, **options) as dataset:  # type: ignore[arg-type]
                        try:
                            for _ in zip(range(steps), dataset, strict=False):
                                pass
                        except TokenloomError as error:
                            return str(error)
                    return ""

                with ThreadPoolExecutor(2) as threads:
                    return list(threads.map(rank_of, range(2)))

            assert launch("one", 3) == ["", ""]
            # Refused: rank 0 brings no state, and the ledger is beyond 0.
            full, brief = launch("two", 1)
            assert "resume=" in full and len(full) > 200
            assert (
                brief
                == f"{brief.partition(' …')[0]} … (every rank gets this; rank 0 says it in full)"
            )
            assert full.startswith(brief.partition(" …")[0]) and len(brief) < 180
            assert served.coordinator.view().error is None
    finally:
        place.stop()
