"""Where the tokens came from: any sample that a rank got is told by its documents, by sample, by step and by rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import END, SPECS, Corpus, StartServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import Sample, World, rolling_digest
from tokenizers import Tokenizer

FILES = {
    SPECS[0]: ["code-0.parquet", "code-1.parquet"],
    SPECS[1]: ["prose.txt"],
    SPECS[2]: ["docs.jsonl"],
    SPECS[3]: ["wiki/data-00000-of-00002.arrow", "wiki/data-00001-of-00002.arrow"],
}


def asking(server: ServerProcess, run: str, path: str, **query: object) -> Any:
    return server.get(f"/v1/runs/{run}/{path}", **query)


class Rows:
    """The corpus by file and row, read without us."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        tokenizer = Tokenizer.from_file(str(corpus.folder / "tokenizer.json"))
        tokenizer.encode_special_tokens = True
        self.texts: dict[str, list[str]] = {
            path: pq.read_table(corpus.folder / path).column("text").to_pylist() for path in FILES[SPECS[0]]
        }
        self.texts["prose.txt"] = (corpus.folder / "prose.txt").read_text("utf-8").split("\n")[:-1]
        lines = (corpus.folder / "docs.jsonl").read_text("utf-8").split("\n")
        self.texts["docs.jsonl"] = [json.loads(line)["body"] for line in lines]
        self._ids = {
            path: [[*tokenizer.encode(text).ids, corpus.end_id] if text else [] for text in texts]
            for path, texts in self.texts.items()
        }
        # The stream of ids, cut where its rows end, is the rows of both files.
        ends = corpus.ends[3]
        rows = [list(corpus.streams[3][a:b]) for a, b in zip((0, *ends), ends, strict=False)]
        self._ids |= {FILES[SPECS[3]][0]: rows[:11], FILES[SPECS[3]][1]: rows[11:]}

    def check(self, found: Any, expected: Sample) -> None:
        """That a traced sample's documents, out of the files, are what a rank got."""
        assert found["source_id"] == expected.source
        ids: list[int] = []
        for document in found["documents"]:
            assert document["shard"] == FILES[found["spec"]][document["shard_index"]]
            row = self._ids[document["shard"]][document["row"]]
            assert (document["position"], document["row_tokens"]) == (len(ids), len(row))
            ids += row[document["begin"] : document["end"]]
        assert tuple(ids) == expected.ids


@pytest.fixture(scope="module")
def rows(corpus: Corpus) -> Rows:
    return Rows(corpus)


def by_rank(world: World, step: int) -> list[list[int]]:
    """A step's sample indices by rank, as the ranks got them."""
    batches = world.step()
    assert batches is not None, f"the data ended before step {step}"
    return [batch["sample_ids"].tolist() for batch in batches]


def test_every_sample_and_step_is_told_as_the_ranks_got_it_after_a_restart_and_a_rewind(
    corpus: Corpus, sequence: list[Sample], rows: Rows, start_server: StartServer
) -> None:
    run = "traced"
    server = start_server(corpus.mixture(run, window_micro_steps=4))
    ask = partial(asking, server, run)
    got: dict[int, list[list[list[int]]]] = {1: [], 2: []}
    with World(server.url(run), 3, 2) as world:
        got[1] = [by_rank(world, step) for step in range(11)]
        checkpoint = world.state(30)
    server.kill()
    server.start()
    with World(server.url(run), 2, 2, state=checkpoint) as world:
        got[2] = [by_rank(world, step) for step in range(5)]
    server.kill()
    server.start()

    plans = {1: (0, 3, 2), 2: (30, 2, 2)}
    for generation, steps in got.items():
        start, world_size, batch_size = plans[generation]
        for step, ranks in enumerate(steps):
            found = ask(f"micro-steps/{step}", generation=generation)
            begin = start + step * world_size * batch_size
            assert (found["generation"], found["micro_step"], found["begin"]) == (generation, step, begin)
            assert (found["world_size"], found["batch_size"]) == (world_size, batch_size)
            assert [[each["sample"] for each in rank["samples"]] for rank in found["ranks"]] == ranks
            for rank, told in enumerate(found["ranks"]):
                assert told["rank"] == rank
                if step % 4 == 0:
                    assert ask(f"micro-steps/{step}", generation=generation, rank=rank)["ranks"] == [told]
                for place, sample in enumerate(told["samples"]):
                    index = sample["sample"]
                    rows.check(sample, sequence[index])
                    assert (sample["micro_step"], sample["rank"], sample["place"]) == (step, rank, place)
                    rewound = generation == 1 and index >= 30
                    assert sample["status"] == ("rewound" if rewound else "committed")
                    assert sample["digest"] == rolling_digest(sequence[: index + 1])
                    if place == 0:
                        assert ask(f"samples/{index}", generation=generation) == sample
    # Without a generation: the present line.
    for index in range(50):
        found = ask(f"samples/{index}", text=True)
        assert found["generation"] == (1 if index < 30 else 2)
        assert tuple(found["ids"]) == sequence[index].ids
        rows.check(found, sequence[index])
        text = "".join(document["text"] for document in found["documents"])
        if found["spec"] == SPECS[1] and text.isascii():
            assert text.replace(END, "\n") in "\n".join(rows.texts["prose.txt"] * 2) + "\n"


def test_what_cannot_be_traced_is_refused_with_the_limits(
    corpus: Corpus, start_server: StartServer, tokenloom: CommandLine
) -> None:
    server = start_server(corpus.mixture("one"), corpus.mixture("two"))
    with World(server.url("one")) as world:
        world.steps(5)
    for arguments, said in (
        (("--sample", 99999, "--run", "one"), "BeyondHorizon: "),
        (("--sample", 0, "--run", "two"), "no trainer has joined"),
        (("--sample", 0), "serves 2 runs: one, two; name one by --run"),
        (("--run", "one"), "give one of --sample and --micro-step"),
        (("--sample", 0, "--micro-step", 0, "--run", "one"), "give one of --sample and --micro-step"),
        (("--sample", 0, "--rank", 0, "--run", "one"), "--rank goes with --micro-step"),
        (("--sample", 0, "--generation", 7, "--run", "one"), "NotFound: "),
    ):
        refused = tokenloom("trace", server.rest_url, *arguments)
        assert refused.status == 2
        assert said in refused.output


def test_the_command_shows_documents_steps_and_text(
    corpus: Corpus,
    sequence: list[Sample],
    rows: Rows,
    start_server: StartServer,
    tokenloom: CommandLine,
    tmp_path: Path,
) -> None:
    run = "shown"
    server = start_server(corpus.mixture(run))
    with World(server.url(run), 2, 1) as world:
        world.steps(8)
    told = json.loads(tokenloom("trace", server.rest_url, "--sample", 9, "--json").output)
    rows.check(told, sequence[9])
    shown = tokenloom("trace", server.rest, "--sample", 9).output
    assert (
        f"shown: sample 9 (committed) in generation 1, micro-step {told['micro_step']}: place 0 of rank {told['rank']}"
        in shown
    )
    assert all(part in shown for part in (told["hash"], told["digest"], told["spec"]))
    for document in told["documents"]:
        assert f"{document['begin']} to {document['end'] - 1}" in shown
        assert Path(document["shard"]).name in shown
    text = tokenloom("trace", server.rest_url, "--sample", 9, "--text", "--run", run).output
    with_text = json.loads(tokenloom("trace", server.rest_url, "--sample", 9, "--text", "--json").output)
    assert tuple(with_text["ids"]) == sequence[9].ids
    assert all(document["text"].split()[0] in text for document in with_text["documents"] if document["text"].strip())
    step = tokenloom("trace", server.rest_url, "--micro-step", 3).output
    assert "shown: micro-step 3 of generation 1 (2 ranks × 1): samples 6 to 7" in step
    one = json.loads(tokenloom("trace", server.rest_url, "--micro-step", 3, "--rank", 1, "--json").output)
    assert [rank["rank"] for rank in one["ranks"]] == [1]
    both: Sequence[Any] = json.loads(tokenloom("trace", server.rest_url, "--micro-step", 3, "--json").output)["ranks"]
    assert both[1] == one["ranks"][0]
