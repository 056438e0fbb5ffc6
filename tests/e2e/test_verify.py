"""`tokenloom verify` against real servers and trainers, on different topologies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import LENGTH, SPECS, Corpus, StartServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import Sample, World, rolling_digest

#: Runs of one order but "seeded".
RUNS = ("wide", "narrow", "seeded", "rewound", "untouched")


@pytest.fixture(scope="module")
def servers(corpus: Corpus, serve: StartServer) -> dict[str, ServerProcess]:
    """Runs that were trained: the server of each."""
    mixtures = {run: corpus.mixture(run, seed=8 if run == "seeded" else 7) for run in RUNS}
    first = serve(*(mixtures[run] for run in ("wide", "rewound", "untouched")))
    second = serve(*(mixtures[run] for run in ("narrow", "seeded")))
    with World(first.url("wide"), 2, 4) as world:
        world.steps(8)
    for run in ("narrow", "seeded"):
        with World(second.url(run), 1, 3) as world:
            world.steps(17)
    with World(first.url("rewound"), 2, 4) as world:
        world.steps(3)
        state = world.state()
        world.steps(4)
    with World(first.url("rewound"), 3, 1, state=state) as world:
        world.steps(9)
    first.kill()
    first.start()  # what is told is that of the ledger
    return dict.fromkeys(("wide", "rewound", "untouched"), first) | dict.fromkeys(
        ("narrow", "seeded"), second
    )


@pytest.fixture
def runs(servers: dict[str, ServerProcess]) -> dict[str, str]:
    """Their REST addresses."""
    return {run: server.rest_url for run, server in servers.items()}


def saved(server: ServerProcess, run: str, index: int, folder: Path) -> Path:
    """A snapshot of a run, as a file."""
    made = server.request("POST", f"/v1/runs/{run}/snapshots", json={"sample_index": index})
    assert made.status_code == 201, made.text
    path = folder / f"{run}-{index}.json"
    path.write_text(
        server.request("GET", f"/v1/runs/{run}/snapshots/{made.json()['id']}").text,
        encoding="utf-8",
    )
    return path


def receipt(server: ServerProcess, run: str, **query: int) -> Any:
    return server.get(f"/v1/runs/{run}/receipt", **query)


def test_a_receipt_at_any_committed_index_is_what_trainers_got(
    servers: dict[str, ServerProcess], sequence: list[Sample], corpus: Corpus
) -> None:
    server = servers["rewound"]
    for index in (0, 1, 7, 24, 31, 33):
        found = receipt(server, "rewound", sample_index=index)
        assert found["digest"] == rolling_digest(sequence[:index])
        assert found["total_tokens"] == index * LENGTH
        counted = {
            spec: tokens // LENGTH for spec, tokens in corpus.tokens(sequence[:index]).items()
        }
        assert found["samples"] == counted
    assert receipt(server, "rewound")["sample_index"] == 51
    beyond = server.request("GET", "/v1/runs/rewound/receipt?sample_index=52")
    assert (beyond.status_code, beyond.json()["error"]) == (416, "BeyondHorizon")


def test_the_same_order_is_proven_on_other_ranks_and_batches(
    runs: dict[str, str], tokenloom: CommandLine
) -> None:
    done = tokenloom("verify", f"{runs['wide']}/wide", f"{runs['narrow']}/narrow")
    assert done.status == 0, done.output
    assert (
        f"the same through sample index 51 ({51 * LENGTH:,} tokens), which is all of B"
        in done.output
    )
    assert "not cryptographic" in done.output
    again = tokenloom("verify", f"{runs['wide']}/wide", f"{runs['rewound']}/rewound", "--json")
    assert again.status == 0, again.output
    assert json.loads(again.output)["same_samples"] == 51


def test_snapshots_and_checkpoints_are_compared_with_servers_and_with_each_other(
    servers: dict[str, ServerProcess], runs: dict[str, str], tokenloom: CommandLine, tmp_path: Path
) -> None:
    wide, narrow = (
        saved(servers["wide"], "wide", 40, tmp_path),
        saved(servers["narrow"], "narrow", 40, tmp_path),
    )
    checkpoint = tmp_path / "checkpoint.json"
    checkpoint.write_text(
        json.dumps({"step": 3, "data": {"tokenloom": narrow.read_text()}}), encoding="utf-8"
    )
    for a, b in ((wide, narrow), (wide, checkpoint), (checkpoint, f"{runs['rewound']}/rewound")):
        done = tokenloom("verify", a, b)
        assert done.status == 0, done.output
        assert f"the same through sample index 40 ({40 * LENGTH:,} tokens)" in done.output
    seeded = tokenloom(
        "verify", saved(servers["seeded"], "seeded", 40, tmp_path), f"{runs['wide']}/wide"
    )
    assert seeded.status == 1
    assert "seed: A has 8, B has 7" in seeded.output
    assert "the first sample that differs is one of" in seeded.output
    unknown = tokenloom(
        "verify",
        saved(servers["wide"], "wide", 41, tmp_path),
        saved(servers["narrow"], "narrow", 49, tmp_path),
    )
    assert unknown.status == 2
    assert "no other sample index up to 41 is known to both" in unknown.output


@pytest.mark.parametrize(
    ("a", "b", "fault"),
    [
        (
            "{wide}",
            "{narrow}/narrow",
            "serves 3 runs: rewound, untouched, wide; name one: http://",
        ),
        ("{wide}/wide", "{narrow}/nothing", "NotFound"),
        ("{wide}/wide", "none.json", "cannot be read"),
        ("{wide}/wide", "{ledger}", "SnapshotInvalid"),
        ("{wide}/wide", "grpc://127.0.0.1:1/run", "no answer"),
        ("{wide}/wide", "http://127.0.0.1:1/run", "no answer"),
        ("{wide}/untouched", "{narrow}/narrow", "nothing is proven"),
    ],
)
def test_what_cannot_be_compared_is_told_with_status_2(
    a: str,
    b: str,
    fault: str,
    servers: dict[str, ServerProcess],
    runs: dict[str, str],
    tokenloom: CommandLine,
) -> None:
    ledger = servers["wide"].ledger_file
    done = tokenloom("verify", a.format(**runs, ledger=ledger), b.format(**runs, ledger=ledger))
    assert done.status == 2, done.output
    assert fault in done.output


def test_a_report_says_what_was_read_and_by_which_launches(
    runs: dict[str, str], tokenloom: CommandLine, corpus: Corpus, sequence: list[Sample]
) -> None:
    done = tokenloom("verify", f"{runs['rewound']}/rewound", "--json")
    assert done.status == 0, done.output
    found = json.loads(done.output)
    samples = sequence[:51]
    assert (found["sample_index"], found["total_tokens"], found["seed"]) == (51, 51 * LENGTH, 7)
    assert found["ended"] is None, "the end was produced, perhaps, but not reached"
    assert found["digest"] == rolling_digest(samples)
    for source, spec in zip(found["sources"], SPECS, strict=True):
        assert source["spec"] == spec
        assert source["tokens"] == corpus.tokens(samples)[spec]
        assert source["rows"] == corpus.rows(samples)[spec]
        assert source["share"] == pytest.approx(source["tokens"] / found["total_tokens"])
    assert [source["files"] for source in found["sources"]] == [2, 1, 1, 2]
    launches = [
        (g["world_size"], g["batch_size"], g["start_index"], g["parent"], g["kept"])
        for g in found["generations"]
    ]
    assert launches == [
        (2, 4, 0, 0, {"first": 0, "end": 24}),
        (3, 1, 24, 1, {"first": 24, "end": 51}),
    ]
    assert found["software"]["tokenloom"]
    assert found["tokenizer"]["engine"] in ("gigatoken", "tokenizers")
    card = tokenloom("verify", f"{runs['rewound']}/rewound").output
    assert f"{51 * LENGTH:,} tokens in 51 samples of {LENGTH}" in card
    assert "| 2 |" in card and "3 × 1" in card
    assert f"`{found['digest']}`" in card
