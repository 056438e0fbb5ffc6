"""The demonstration's parts; that its proof catches whatever can go wrong with data; and once the whole of it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from support.catalog import CATALOG
from support.memory_service import run_stats, source_stats
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.order_fields import order_digest
from tokenloom_server.core import state
from tokenloom_tools.demo import corpus, main, plan, processes, proof, receipts
from tokenloom_tools.demo.main import LiveDemo, run_demo
from tokenloom_tools.demo.plan import REFERENCE_RUN, RUN, Launch, Plan
from tokenloom_tools.demo.processes import Child, DemoFailed, Processes, wait_until
from tokenloom_tools.demo.proof import Disproved, Evidence, wire_type
from tokenloom_tools.demo.receipts import Receipts, ReceiptWriter, Samples, Step
from tokenloom_tools.demo.report import Report
from tokenloom_tools.demo.trainer import GPT

# --- The corpora ---------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library: packages, a test folder, a file that is no UTF-8 and one that is no Python."""
    folder = tmp_path / "library"
    for number in range(20):
        path = folder / f"package_{number % 3}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f'"""Module {number}, which says at some length what it is good for."""\n\nVALUE = {number}\n'
        )
    (folder / "test").mkdir()
    (folder / "test" / "test_all.py").write_text("NOT_PART_OF_IT = True\n")
    (folder / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nNAME = 'Zoë'\n".encode("latin-1"))
    (folder / "python2.py").write_text("print 'an old escape \\d'\n")
    (folder / "empty.py").write_text("")
    return folder


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def build(folder: Path, library: Path) -> corpus.Corpus:
    with Progress(disable=True) as progress:
        return corpus.build(folder, progress, library)


def test_a_library_becomes_three_corpora_and_a_tokeniser(tmp_path: Path, library: Path) -> None:
    built = build(tmp_path / "data", library)

    shards = sorted((tmp_path / "data" / corpus.CODE).iterdir())
    code = [text for shard in shards for text in pq.read_table(shard)["text"].to_pylist()]
    docstrings = [json.loads(line)["text"] for line in lines(tmp_path / "data" / corpus.DOCSTRINGS)]
    prose = [line for path in (tmp_path / "data" / corpus.PROSE).iterdir() for line in lines(path)]
    assert len(shards) == 3
    assert sorted(code) == sorted(
        p.read_text() for p in library.rglob("*.py") if p.name.startswith(("mod", "python2"))
    )
    assert len(docstrings) == 20
    assert all(docstring.startswith("Module") for docstring in docstrings)
    assert len(prose) == built.documents["prose"] > 100
    assert all(len(line) >= corpus.SHORTEST_PARAGRAPH for line in prose)
    assert built.documents == {"code": 21, "docstrings": 20, "prose": len(prose)}
    assert 256 < built.vocab_size <= corpus.VOCAB_SIZE


def test_a_library_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DemoFailed, match="no text for the corpus 'code'"):
        build(tmp_path / "data", tmp_path / "nothing")

    assert list(tmp_path.iterdir()) == []


# --- The model -----------------------------------------------------------------------------------------------------


def test_the_model_is_small_begins_clueless_and_learns() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=512, width=32, depth=2, heads=2)
    ids = torch.randint(0, 512, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses = []
    for _ in range(10):
        loss = model(ids, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[0] == pytest.approx(np.log(512), abs=0.1)
    assert losses[-1] < losses[0] - 1
    assert 1e6 < sum(p.numel() for p in GPT(vocab_size=8192).parameters()) < 2e6


# --- The receipts --------------------------------------------------------------------------------------------------

LENGTH = 8


def step(number: int, index: int, digest: str = "0" * 32, lr: float = 0.0) -> Step:
    return Step(
        step=number, sample_index=index, total_tokens=index * LENGTH, digest=digest, loss=1.0, lr=lr
    )


def test_receipts_come_back_as_written_and_a_torn_record_is_left_out(tmp_path: Path) -> None:
    samples = receipts.make_samples(
        [3, 4], [0, 1], np.arange(2 * LENGTH).reshape(2, LENGTH) + 65_530
    )
    with ReceiptWriter(tmp_path, rank=1) as writer:
        writer.write(samples, step(1, 5))
        writer.write(samples, step(2, 7))
    for name in ("rank-1.samples", "rank-1.steps.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-3])

    found = receipts.read(tmp_path, 1, LENGTH)

    assert found.steps == [step(1, 5)]
    assert (found.samples == np.concatenate([samples, samples])[:3]).all()
    assert receipts.read_steps(tmp_path, rank=0) == []


# --- The proof -----------------------------------------------------------------------------------------------------

PLAN = Plan(
    steps=12,
    sequence_length=LENGTH,
    first=Launch(name="first", ranks=2, batch_size=2),
    second=Launch(name="second", ranks=1, batch_size=3),
)
VOCAB_SIZE = 300


def the_order() -> Samples:
    """The one sequence: sources 0 1 0 2 …, which keeps every share, and ids that are all different."""
    count = PLAN.end_index
    generator = np.random.default_rng(0)
    sources = np.resize([0, 1, 0, 2], count)
    return receipts.make_samples(
        np.arange(count), sources, generator.integers(0, VOCAB_SIZE, (count, LENGTH))
    )


def received(order: Samples, launch: Launch, rank: int, begin: int, end: int) -> Receipts:
    """What one rank gets of [begin, end), with slices that change places at every step."""
    digests = proof.rolling_digests(order, wire_type(VOCAB_SIZE))
    steps, parts = [], []
    for number, index in enumerate(range(begin, end, launch.samples_per_step)):
        first = index + (rank + number) % launch.ranks * launch.batch_size
        parts.append(order[first : first + launch.batch_size])
        last = index + launch.samples_per_step
        tokens, warmup = last * LENGTH, PLAN.warmup_tokens
        cosine = (1 + np.cos(np.pi * (tokens - warmup) / (PLAN.tokens - warmup))) / 2
        factor = (
            tokens / warmup if tokens < warmup else plan.LR_FLOOR + (1 - plan.LR_FLOOR) * cosine
        )
        steps.append(step(number + 1, last, digests[last], lr=float(plan.LEARNING_RATE * factor)))
    return Receipts(np.concatenate(parts), steps)


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    """Of a demonstration in which everything is as it should be."""
    order = the_order()
    killed_at = PLAN.kill_step * PLAN.first.samples_per_step
    reader = Launch(name="reference", ranks=1, batch_size=PLAN.reader_batch_size)
    (tmp_path / "mixture.yaml").write_text(PLAN.mixture(RUN))
    counts = np.bincount(order["source_id"]).tolist()
    return Evidence(
        plan=PLAN,
        config=config.load(tmp_path / "mixture.yaml", CATALOG),
        vocab_size=VOCAB_SIZE,
        first=[received(order, PLAN.first, rank, 0, killed_at) for rank in (0, 1)],
        second=[received(order, PLAN.second, 0, PLAN.checkpoint_index, PLAN.end_index)],
        reference=received(order, reader, 0, 0, PLAN.end_index),
        stats=run_stats(
            sample_index=PLAN.end_index,
            total_tokens=PLAN.tokens,
            digest=proof.rolling_digests(order, "<u2")[-1],
            sources=[source_stats(i, samples=n, tokens=n * LENGTH) for i, n in enumerate(counts)],
        ),
    )


def faults(evidence: Evidence) -> dict[str, str]:
    """The checks that fail, by name, with what they say."""
    found = {}
    for _, check in evidence.claims():
        try:
            check()
        except Disproved as fault:
            found[check.__name__] = str(fault)
    return found


def test_the_proof_holds_when_everything_is_right(evidence: Evidence) -> None:
    assert faults(evidence) == {}
    assert len(evidence.discarded) == 4


def without(part: Receipts, row: int) -> Receipts:
    return Receipts(np.delete(part.samples, row), part.steps)


def changed(part: Receipts, row: int, change: Callable[[Samples], None]) -> Receipts:
    samples = part.samples.copy()
    change(samples[row : row + 1])
    return Receipts(samples, part.steps)


def swapped(part: Receipts, row: int, other: int, columns: tuple[str, ...]) -> Receipts:
    samples = part.samples.copy()
    for column in columns:
        samples[column][[row, other]] = samples[column][[other, row]]
    return Receipts(samples, part.steps)


def next_source(samples: Samples) -> None:
    samples["source_id"] = (samples["source_id"] + 1) % 3


def next_id(samples: Samples) -> None:
    samples["ids"][:, 3] = (samples["ids"][:, 3] + 1) % VOCAB_SIZE


def repeat_of_the_one_before(samples: Samples) -> None:
    samples["sample_id"] -= 1


EVERYTHING = ("sample_id", "source_id", "ids")


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (
            lambda part: without(part, 2),
            {"nothing_lost_or_repeated", "in_order", "same_as_uninterrupted"},
        ),
        (
            lambda part: changed(part, 2, repeat_of_the_one_before),
            {"nothing_lost_or_repeated", "in_order", "same_as_uninterrupted"},
        ),
        (lambda part: swapped(part, 1, 2, EVERYTHING), {"in_order"}),
        (
            lambda part: swapped(part, 0, 2, ("ids",)),
            {"same_as_uninterrupted", "digests_agree", "one_digest"},
        ),
        (
            lambda part: changed(part, 1, next_id),
            {"same_as_uninterrupted", "digests_agree", "one_digest"},
        ),
        (
            lambda part: changed(part, 1, next_source),
            {
                "same_as_uninterrupted",
                "digests_agree",
                "one_digest",
                "counters_agree",
                "shares_hold",
            },
        ),
    ],
    ids=["lost", "repeated", "out-of-step", "swapped", "another-id", "another-source"],
)
@pytest.mark.parametrize("launch", ["first", "second"])
def test_a_tampered_sample_is_caught(
    evidence: Evidence, launch: str, tamper: Callable[[Receipts], Receipts], expected: set[str]
) -> None:
    parts = [tamper(getattr(evidence, launch)[0]), *getattr(evidence, launch)[1:]]
    changes: dict[str, Any] = {launch: parts}

    found = faults(dataclasses.replace(evidence, **changes))

    assert expected <= found.keys()


def test_a_sample_that_did_not_come_again_the_same_is_caught(evidence: Evidence) -> None:
    lost = changed(evidence.first[0], -1, lambda samples: None)
    lost.samples["ids"][-1, 0] = (lost.samples["ids"][-1, 0] + 1) % VOCAB_SIZE

    found = faults(dataclasses.replace(evidence, first=[lost, evidence.first[1]]))

    assert set(found) == {"come_again"}


def test_a_kill_without_a_loss_proves_nothing(evidence: Evidence) -> None:
    kept = [
        Receipts(
            part.samples[part.samples["sample_id"] < PLAN.checkpoint_index],
            part.steps[: PLAN.checkpoint_step],
        )
        for part in evidence.first
    ]

    assert set(faults(dataclasses.replace(evidence, first=kept))) == {"come_again"}


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"digest": "0" * 32}, "one_digest"),
        ({"total_tokens": 1}, "counters_agree"),
        ({"sources": []}, "counters_agree"),
    ],
)
def test_a_ledger_that_counts_otherwise_is_caught(
    evidence: Evidence, figures: dict[str, object], expected: str
) -> None:
    stats = evidence.stats.model_copy(update=figures)

    assert set(faults(dataclasses.replace(evidence, stats=stats))) == {expected}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"lr": 1.0}, {"rates_hold"}),
        ({"digest": "f" * 32}, {"digests_agree"}),
        ({"sample_index": 999}, None),
    ],
)
def test_a_step_that_reports_otherwise_is_caught(
    evidence: Evidence, change: dict[str, Any], expected: set[str] | None
) -> None:
    part = evidence.first[1]
    steps = [*part.steps]
    steps[1] = dataclasses.replace(steps[1], **change)

    found = faults(
        dataclasses.replace(evidence, first=[evidence.first[0], Receipts(part.samples, steps)])
    )

    assert set(found) == (expected or {"in_order", "digests_agree"})


def test_shares_are_not_judged_once_a_source_ran_out(evidence: Evidence) -> None:
    sources = [
        source.model_copy(update={"exhausted": source.id == 2}) for source in evidence.stats.sources
    ]
    tampered = dataclasses.replace(
        evidence, stats=evidence.stats.model_copy(update={"sources": sources})
    )

    assert "source-2 ran out" in tampered.shares_hold()


def test_the_digest_is_the_one_of_the_contract() -> None:
    assert (proof.DIGEST_MULTIPLIER, proof.DIGEST_MODULUS) == (
        state.DIGEST_MULTIPLIER,
        state.DIGEST_MODULUS,
    )
    assert [wire_type(size) for size in (256, 257, 65_536, 65_537)] == ["<u1", "<u2", "<u2", "<u4"]


# --- The plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [*range(plan.FEWEST_STEPS, 40), 1000])
def test_every_plan_leaves_room_for_its_events(steps: int) -> None:
    a_plan = Plan(steps=steps)

    assert 0 < a_plan.checkpoint_step < a_plan.kill_step < steps
    assert a_plan.end_index >= steps * a_plan.first.samples_per_step
    assert (a_plan.end_index - a_plan.checkpoint_index) % a_plan.second.samples_per_step == 0
    assert a_plan.end_index % a_plan.reader_batch_size == 0
    assert 0 < a_plan.warmup_tokens < a_plan.checkpoint_index * a_plan.sequence_length


def test_the_two_mixtures_have_one_order(tmp_path: Path) -> None:
    for run in (RUN, REFERENCE_RUN):
        (tmp_path / f"{run}.yaml").write_text(Plan().mixture(run))
    ours, reference = (
        config.load(tmp_path / f"{run}.yaml", CATALOG) for run in (RUN, REFERENCE_RUN)
    )

    assert ours.run != reference.run
    assert order_digest(ours) == order_digest(reference)


# --- Processes -----------------------------------------------------------------------------------------------------

SLEEP = ["-c", "import time; print('sleeping', flush=True); time.sleep(60)"]


def sleeper(children: Processes, folder: Path, command: list[str] = SLEEP) -> Child:
    child = children.start("sleeper", command, folder / "sleeper.log")
    wait_until(lambda: "sleeping" in child.tail(), "the sleeper", 30, [child])
    return child


def test_leaving_the_block_ends_every_process(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Processes() as children:
        child = sleeper(children, tmp_path)
        raise RuntimeError

    assert child.status == -signal.SIGTERM
    with pytest.raises(Disproved, match="sleeper"):
        children.all_ended()


def test_a_process_that_was_killed_on_purpose_has_ended_well(tmp_path: Path) -> None:
    with Processes() as children:
        child = sleeper(children, tmp_path)
        child.kill_on_purpose()

    assert child.status == -signal.SIGKILL
    assert children.all_ended() == "1 processes"


def test_a_process_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.1)
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEP[1]
    with Processes() as children:
        child = sleeper(children, tmp_path, ["-c", stubborn])

    assert child.status == -signal.SIGKILL


def test_waiting_for_a_process_that_fails_shows_its_last_words(tmp_path: Path) -> None:
    with Processes() as children:
        child = children.start(
            "failing", ["-c", "raise SystemExit('no such luck')"], tmp_path / "failing.log"
        )
        with pytest.raises(
            DemoFailed,
            match=r"failing ended with status 1 while waiting for luck\n.*\n.*no such luck",
        ):
            wait_until(lambda: False, "luck", 30, [child])


def test_children_do_not_inherit_what_is_set_for_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "TOKENLOOM_TOKEN"):
        monkeypatch.setenv(name, "7")
    names = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "TOKENLOOM_TOKEN")
    show = f"import os; print({{k: os.environ.get(k) for k in {names}}})"
    with Processes() as children:
        child = children.start("child", ["-c", show], tmp_path / "child.log", RANK="1")
        wait_until(lambda: child.status == 0, "the child", 30, [child])

    assert (
        "{'RANK': '1', 'WORLD_SIZE': None, 'SLURM_PROCID': None, 'TOKENLOOM_TOKEN': None}"
        in child.tail()
    )


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's death"
)
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    start = (
        "import sys, time; from pathlib import Path; from tokenloom_tools.demo.processes import Processes\n"
        f"child = Processes().start('sleeper', {SLEEP!r}, Path(sys.argv[1]))\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", start, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        deadline = time.monotonic() + 120
        while "sleeping" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        parent.kill()

    psutil.wait_procs([child], timeout=120)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_server_that_cannot_start_shows_why(tmp_path: Path) -> None:
    with Processes() as children, pytest.raises(DemoFailed, match=r"no\.yaml"):
        processes.start_server(
            children,
            "server",
            tmp_path / "no.yaml",
            tmp_path / "ledger.db",
            tmp_path / "server.log",
        )


# --- The whole -----------------------------------------------------------------------------------------------------


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    console = quiet()

    assert run_demo(tmp_path, console=console) == 1
    assert "not from a demonstration" in output(console)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    console = quiet()

    assert run_demo(tmp_path / "demo", steps=2, console=console) == 1
    assert f"at least {plan.FEWEST_STEPS}" in output(console)


def test_a_claim_that_does_not_hold_makes_the_status_1(tmp_path: Path) -> None:
    def check() -> str:
        raise Disproved("lost: 1 sample (3)")

    console = quiet()
    report = Report(console)
    report.claim("nothing is lost", check)
    report.claim("the sky is up", lambda: "as ever")

    assert report.verdict([], tmp_path) == 1
    assert "✗ nothing is lost: lost: 1 sample (3)" in output(console)
    assert "✓ the sky is up (as ever)" in output(console)


def little_text(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(
        corpus, "library_folder", lambda: Path(subprocess.__file__).with_name(package)
    )


def test_the_whole_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder whose name needs quoting, with little text and as little training as there can be."""
    little_text(monkeypatch, "unittest")
    console = quiet()
    before = set(psutil.Process(os.getpid()).children(recursive=True))

    assert run_demo(tmp_path / "a demo, 100 %", steps=plan.FEWEST_STEPS, console=console) == 0, (
        output(console)
    )
    assert output(console).count("✓") == 10
    assert set(psutil.Process(os.getpid()).children(recursive=True)) == before
    assert "Nothing lost, nothing repeated, the same order." in output(console)


@pytest.mark.slow
def test_the_live_demonstration_stays_at_its_address_while_it_is_revised_killed_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little_text(monkeypatch, "unittest")
    monkeypatch.setattr(main, "PAUSE_S", 0.0)
    monkeypatch.setattr(main, "FIRST", Launch(name="first", ranks=2, batch_size=1))
    monkeypatch.setattr(main, "SECOND", Launch(name="second", ranks=1, batch_size=2))
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    console = quiet()

    assert run_demo(tmp_path, steps=20, act=LiveDemo, console=console) == 0, output(console)
    shown = output(console)
    (page,) = {line.rpartition("page ")[2] for line in shown.splitlines() if ": gRPC " in line}
    assert opened == [f"{page}#/run/demo/mix"]
    assert "revision 1, from sample 128 on" in shown
    assert "revision 1 is in force since sample 128" in shown
