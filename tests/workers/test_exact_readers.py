"""With readers a run is the run without, to the byte: samples, states, ends and errors, from wherever it begins."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from support.catalog import CATALOG
from support.corpora import mixture, numbers, text_rows
from support.drawn_readers import DrawnReaders, drawn_sizes
from support.sources import write_table
from support.timelines import revised, skipping
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.core.state import State
from tokenloom_server.errors import TokenloomError
from tokenloom_server.order import builder, factory
from tokenloom_server.order.steps import BatchPlan
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.packing import window
from tokenloom_server.sources import columns, lines
from tokenloom_server.workers.cluster.description import describe, rebuild

CHAT = (
    "{% for one in messages %}{{ one.role }}{% generation %}{{ one.content + '' }}{% endgeneration %}{% endfor %}"
    "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}"
)
JSONL, PARQUET, ARROW, TXT = (
    "jsonl:a-*.jsonl:text",
    "parquet:p-*.parquet:text",
    "arrow:saved:text",
    "txt:t-*.txt:text",
)
PARAGRAPHS, BAD, CHATS = (
    "txt:t-*.txt:paragraph",
    "jsonl:bad-*.jsonl:text",
    "jsonl:chats.jsonl:messages",
)
BROKEN = "parquet:broken-*.parquet:text"
ROWS = {"shuffle": "rows", "shuffle_window_rows": 7}
FIM = {"fim": {"rate": 0.6, "ids": {"prefix": 258, "middle": 259, "suffix": 260}}}


def rows_of(count: int, salt: int) -> list[dict[str, Any]]:
    """Texts with a title and a score; some are empty, one is long."""
    texts = [*text_rows(count - 1, salt, 9), " ".join(map(str, numbers(150, salt, 0, 100)))]
    return [
        {"text": text, "title": f"t{i % 4}", "score": i % 5 / 4} for i, text in enumerate(texts)
    ]


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    """JSON lines; a text is a line as it is."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number, count in enumerate((17, 0, 26)):
        rows = rows_of(count, number) if count else []
        write_lines(
            folder / f"a-{number}.jsonl",
            [*rows[:3], "", *rows[3:9], "  ", *rows[9:]] if rows else [],
        )
        kinds = pa.schema({"text": pa.string(), "title": pa.string(), "score": pa.float64()})
        table = pa.Table.from_pylist([row | {"text": row["text"] or None} for row in rows], kinds)
        write_table(folder / f"p-{number}.parquet", table, 3)
        (folder / f"t-{number}.txt").write_text("\n\n".join(row["text"] for row in rows))
    write_table(folder / "saved/data.arrow", pa.Table.from_pylist(rows_of(31, 5)), 4)
    write_lines(
        folder / "bad-0.jsonl",
        [*rows_of(12, 7), "{", *rows_of(9, 8), '{"text": 5}', *rows_of(6, 9)],
    )
    write_lines(folder / "bad-1.jsonl", [*rows_of(8, 10), '{"text": "\\ud800"}', *rows_of(5, 11)])
    for number in range(4):
        write_table(
            folder / f"broken-{number}.parquet", pa.Table.from_pylist(rows_of(7, 20 + number)), 3
        )
    # In its rows: what says which there are is looked at before the run begins.
    data = bytearray((folder / "broken-2.parquet").read_bytes())
    data[20:120] = b"\xff" * 100
    (folder / "broken-2.parquet").write_bytes(data)
    said = [
        [{"role": "user", "content": row["text"]}] * (1 + i % 2)
        for i, row in enumerate(rows_of(30, 12))
    ]
    write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in said])
    # The first is a fault of the template's, the second of the line's.
    write_lines(
        folder / "turns.jsonl",
        [
            *({"messages": chat} for chat in said[:11]),
            {"messages": [{"role": "user", "content": "x"}] * 3},
            "{",
        ]
        + [{"messages": chat} for chat in said[11:]],
    )
    np.save(folder / "seen.npy", np.arange(19 + 28) % 3 == 1)
    write_lines(
        folder / "out.jsonl",
        [
            {"spec": JSONL, "shard": f"a-{shard}.jsonl", "row": row}
            for shard, row in ((0, 2), (0, 3), (0, 11), (2, 5))
        ],
    )
    write_lines(folder / "grown-0.jsonl", rows_of(11, 13))
    write_lines(
        folder / "out-of-grown.jsonl",
        [
            {"spec": "jsonl:grown-*.jsonl:text", "shard": f"grown-{row % 2}.jsonl", "row": row}
            for row in (3, 4, 6, 7)
        ],
    )
    (folder / "made.py").write_text(
        "import pyarrow as pa\n"
        "def of(batch):\n"
        "    return pa.array([text[::-1] for text in batch['text'].to_pylist()])\n"
    )
    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet | {"<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (folder / "tokenizer/chat_template.jinja").write_text(CHAT)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Files of several blocks, blocks of several pieces, windows of several portions."""
    monkeypatch.setattr(lines, "STRIDE_BYTES", 300)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 150)
    monkeypatch.setattr(columns, "PIECE_BYTES", 120)
    monkeypatch.setattr(window, "WINDOW_BYTES", 400)
    # Blocks are made when they are asked for: a drawn seed is the same each time.
    monkeypatch.setattr(factory, "ReadAhead", lambda packer, pool: packer)
    monkeypatch.chdir(folder)


class Case(NamedTuple):
    sources: list[dict[str, Any]]
    run: Mapping[str, Any] = MappingProxyType({})
    #: Revisions, by sample index.
    changes: Mapping[int, dict[str, Any]] = MappingProxyType({})
    error: str = ""
    held_out: bool = False


def seen(folder: Path) -> dict[str, str]:
    return {
        "file": "seen.npy",
        "sha256": hashlib.sha256((folder / "seen.npy").read_bytes()).hexdigest(),
    }


SKIP = {"on_bad_row": "skip"}
WITH_CHATS = {"tokenizer": "tokenizer", "packing": "none"}
CASES = {
    "parts of epochs, blank lines": Case([{"source": JSONL, "epochs": 2.4}], {"labels": "shifted"}),
    "without end": Case([{"source": TXT, "epochs": "inf"}, {"source": JSONL, "max_tokens": 90}]),
    "lanes": Case(
        [{"source": JSONL, "epochs": 1.5, "lanes": 3}], {"packing": "none", "long_rows": "split"}
    ),
    "filter, template, best fit": Case(
        [
            {
                "source": PARQUET,
                "filter": "score >= 0.5",
                "template": "{title}: {text}",
                "epochs": 2,
                **ROWS,
            }
        ],
        {"packing": "best_fit", "pack_window_rows": 5},
    ),
    "rows in lanes": Case(
        [{"source": PARQUET, "lanes": 2, "epochs": 2.5, **ROWS}], {"packing": "none"}
    ),
    "rows of lines": Case(
        [{"source": JSONL, "epochs": 2, **ROWS}], {"tail": "pad", "labels": "shifted"}
    ),
    "fim, shuffled files": Case(
        [
            {"source": PARQUET, "shuffle": "shards", "epochs": 3, **FIM},
            {"source": ARROW, **ROWS, **FIM},
        ],
        {"vocab_size": 300},
    ),
    "holdout": Case(
        [
            {"source": JSONL, "holdout": 0.3, **ROWS},
            {"source": PARQUET, "holdout": 0.3, "epochs": 2},
        ]
    ),
    "held out": Case(
        [{"source": JSONL, "holdout": 0.4, **ROWS}, {"source": ARROW, "holdout": 0.4}],
        held_out=True,
    ),
    "seen": Case([{"source": JSONL, "seen": seen, "epochs": 2}], {"packing": "best_fit"}),
    "bad rows": Case([{"source": BAD, "epochs": 3, **ROWS}, {"source": PARAGRAPHS}], SKIP),
    "a bad row too many": Case(
        [{"source": BAD, "max_bad_rows": 2}, {"source": TXT}], SKIP, error="max_bad_rows"
    ),
    "a bad row too many of a window": Case(
        [{"source": BAD, "max_bad_rows": 1, **ROWS}], SKIP, error="max_bad_rows"
    ),
    "a bad row": Case([{"source": BAD}, {"source": TXT}], error="bad-0.jsonl"),
    "a bad row of a window": Case([{"source": BAD, **ROWS}, {"source": TXT}], error="bad-"),
    "a bad row of a lane": Case([{"source": BAD, "lanes": 3}, {"source": TXT}], error="bad-"),
    "a file that is broken": Case([{"source": BROKEN}], error="broken-2"),
    "chats": Case(
        [{"source": CHATS, "template": "chat", "epochs": 2}, {"source": TXT}],
        WITH_CHATS | {"packing": "best_fit"},
    ),
    "bad chats": Case(
        [{"source": "jsonl:turns.jsonl:messages", "template": "chat", **ROWS}], WITH_CHATS | SKIP
    ),
    "a bad chat": Case(
        [{"source": "jsonl:turns.jsonl:messages", "template": "chat"}],
        WITH_CHATS,
        error="row 11: the chat template",
    ),
    "bad chats of one window": Case(
        [{"source": "jsonl:turns.jsonl:messages", "template": "chat", "shuffle": "rows"}],
        WITH_CHATS | {"seed": 24},
        error="row 11: the chat template",
    ),
    "a transform": Case([{"source": JSONL, "transform": "made:of"}]),
    "phases": Case(
        [{"source": JSONL}, {"source": TXT, "epochs": 2}],
        {
            "phases": [
                {"until_tokens": 400},
                {
                    "mixture": {
                        "policy": "weighted",
                        "children": [{"source": PARQUET, "epochs": 2}, {"source": JSONL}],
                    }
                },
            ]
        },
    ),
    "files that are appended": Case(
        [{"source": "jsonl:grown-*.jsonl:text", "epochs": 3}, {"source": TXT}],
        changes={
            9: {"append_files": ["jsonl:grown-*.jsonl:text"]},
            20: {"exclude": {"file": "out-of-grown.jsonl"}},
        },
    ),
    "revisions": Case(
        [{"source": JSONL, "alias": "a", "epochs": 2}, {"source": PARQUET, "alias": "p"}],
        changes={
            9: {"exclude": {"file": "out.jsonl"}},
            20: {
                "add": [{"child": {"source": ARROW, "lanes": 2}}],
                "set": [{"child": "p", "paused": True}],
            },
            40: {"drop": ["a"], "set": [{"child": "p", "paused": False, "weight": 3}]},
            55: {"add": [{"child": {"source": JSONL}}]},
            60: {"skip": 7},
        },
    ),
}


def timeline_of(case: Case, folder: Path) -> Timeline:
    sources = [
        {name: of(folder) if callable(of) else of for name, of in source.items()}
        for source in case.sources
    ]
    document = mixture(
        mixture={"policy": "least_consumed", "children": sources},
        **{"sequence_length": 24, **case.run},
    )
    catalog = open_catalog(transforms=["made:of"]) if "transform" in sources[0] else CATALOG
    order = builder.create(
        config.parse(document, where="mixture.yaml", catalog=catalog), folder, None
    )
    timeline = Timeline(builder.aside(order, order.config) if case.held_out else order)
    for index, change in case.changes.items():
        if "append_files" in change:
            write_lines(folder / "grown-1.jsonl", rows_of(14, 14))
        timeline = (
            skipping(timeline, index, change["skip"])
            if "skip" in change
            else revised(timeline, index, **change)
        )
    return timeline


class Given(NamedTuple):
    """What a pipeline gives from a state on: of each sample its source, ids, and documents' beginnings, and the state
    behind it; and why it ended."""

    end: str | None
    states: list[State]
    samples: list[tuple[int, bytes, list[int]]]


def given(timeline: Timeline, state: State, most: int, *, ahead: bool = False) -> Given:
    pipeline = timeline.pipeline(state, ahead=ahead)
    samples: list[tuple[int, bytes, list[int]]] = []
    states: list[State] = []
    end = None
    while end is None and len(samples) < most:
        plan = BatchPlan(
            start_index=state.sample_index, world_size=1, batch_size=1, group_micro_steps=32
        )
        group = pipeline.begin_group(plan)
        try:
            while pipeline.ended is None and len(group.marks) < min(32, most - len(samples)):
                pipeline.fill(group, 1)
            end = pipeline.ended
        except TokenloomError as error:
            end = f"{error.name}: {error}"
        for step in range(len(group.marks)):
            starts = group.document_starts(0, step, step + 1)[1].tolist()
            samples.append(
                (
                    int(group.source_ids[0, step, 0]),
                    group.ids(0, step, step + 1)[0].tobytes(),
                    starts,
                )
            )
            states.append(group.state_after(step))
    return Given(end, states, samples)


#: Samples of a run that are compared.
MOST, AFTER = 100, 10


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_readers_is_the_run_without(name: str, folder: Path) -> None:
    case = CASES[name]
    timeline = timeline_of(case, folder)
    start = timeline.initial()
    most = 10_000 if case.error else MOST
    expected = given(timeline, start, most)
    assert len(expected.samples) > 8 or case.error
    assert (case.error or "exhausted") in (expected.end or "exhausted")
    states, drawn = [start, *expected.states], random.Random(name)
    resources = timeline.first.resources
    resources.readers = readers = DrawnReaders(name)
    with drawn_sizes(readers.seed):
        assert given(timeline, start, most, ahead=True) == expected
        last = len(states) - (AFTER + 1 if expected.end is None else 0)
        for at in drawn.sample(range(last), 2):
            state = timeline.decode(timeline.encode(states[at]))
            end = expected.end if at + AFTER > len(expected.samples) else None
            rest = Given(end, expected.states[at:][:AFTER], expected.samples[at:][:AFTER])
            assert given(timeline, state, AFTER, ahead=True) == rest
    readers.close()
    assert readers.requests > 0
    for order in {
        id(order := timeline.at(index)): order for index in (0, len(expected.states))
    }.values():
        again = rebuild(describe(order))
        assert describe(again) == describe(order)
        again.resources.close()
    timeline.first.resources.close()
