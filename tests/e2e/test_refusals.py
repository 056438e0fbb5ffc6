"""What a trainer gets wrong, and what a run meets in its files: whom it concerns hears of it, and nothing changes."""

from __future__ import annotations

import json

import pytest
from conftest import LENGTH, Corpus, StartServer
from support.trainer import World
from tokenloom import RemoteDataset, SourceError


def test_a_bad_line_reaches_every_rank_at_one_step_with_file_and_line_and_no_other_run(
    corpus: Corpus, start_server: StartServer
) -> None:
    good = [json.dumps({"text": f"line number {number} of many"}) for number in range(60)]
    (corpus.folder / "broken.jsonl").write_bytes(
        "\n".join(good).encode() + b'\n{"text": "b\xe4d"}\n'
    )
    mixture = {"policy": "weighted", "children": [{"source": "jsonl:broken.jsonl:text"}]}
    server = start_server(
        corpus.mixture("broken", mixture=mixture, tokenizer="bytes"), corpus.mixture("beside")
    )
    with World(server.url("broken"), 2, 3) as world:
        world.join()
        errors, steps = [], []
        for rank in world.ranks:
            count = 0
            with pytest.raises(SourceError) as met:
                for _ in rank:
                    count += 1
            steps.append(count)
            errors.append(str(met.value))
            with pytest.raises(SourceError):  # and again: it is not an end of data
                next(iter(rank))
        short, _, rest = errors[1].partition(" …")
        assert errors[0].startswith(short) and "broken.jsonl" in short
        assert rest == " (every rank gets this; rank 0 says it in full)"
        for part in ("broken.jsonl", "line 61", "UTF-8"):
            assert part in errors[0]
        assert steps[0] == steps[1] > 0
        length = sum(len(json.loads(line)["text"]) + 1 for line in good)
        assert steps[0] * 6 <= length // LENGTH
    assert "Traceback" not in server.log
    with World(server.url("beside")) as world:
        world.steps(3)


def test_what_begins_again_says_so_loudly_and_a_loaded_state_wins(
    corpus: Corpus, start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = start_server(corpus.mixture("again")).url("again")
    warning = "run again: begun again at sample 0 (resume='fresh', no state loaded): what was given before comes again"
    state: dict[str, str] = {}
    # The same two lines in each launch.
    for begin, warnings in ((0, []), (0, [warning]), (16, []), (0, [warning])):
        caplog.clear()
        dataset = RemoteDataset(url, 4, resume="fresh")
        if begin:
            dataset.load_state_dict(state)
        with dataset:
            indices = [batch["sample_index"] for _, batch in zip(range(4), dataset, strict=False)]
            state = dataset.state_dict()
        assert indices == [begin + 4, begin + 8, begin + 12, begin + 16]
        assert [
            record.getMessage() for record in caplog.records if record.levelname == "WARNING"
        ] == warnings
