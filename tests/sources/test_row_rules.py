"""Which rows give tokens, and which: bad rows, filters, templates, fill in the middle, from files to samples.

What each source is to give is worked out here row by row in plain Python.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.corpora import encode_state, flat, mixture, numbers, order_of, parsed, reread
from support.mixing import node
from support.prepared import write_tokenizer
from support.sources import write_table
from tokenizers import Tokenizer
from tokenloom_server.config.order_fields import order_digest
from tokenloom_server.core.state import FileCursor, State
from tokenloom_server.errors import SnapshotInvalid, SourceError, TokenizerError
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.steps import BatchPlan
from tokenloom_server.packing.fim import FillInMiddle
from tokenloom_server.packing.tokenized_rows import BAD
from tokenloom_server.run.fork import _refuse_other_documents
from tokenloom_server.sources import lines
from tokenloom_server.workers.crashes import SuspectRows

EOT = 256  # of the `bytes` tokeniser
LENGTH = 8
BAD_TEXT = b"b\xffd"


class Row(NamedTuple):
    """A row as it is written; ``None`` stands for a row that does not decode."""

    text: str | None
    title: str | None
    score: float | None
    lang: str
    ids: list[int | None]


def made_rows(count: int, salt: int) -> list[Row]:
    draws = iter(numbers(count * 6, salt, 0, 1000))
    rows = []
    for i in range(count):
        kind, length, score, lang, title, _ = (next(draws) for _ in range(6))
        text = None if kind < 120 else f"row {i} " + "x" * (length % 23) if kind < 900 else ""
        ids: list[int | None] = [*numbers(length % 17, i + salt, 0, 256)]
        if text is None:
            ids = [*ids, None] if kind % 2 else [*ids, 300]
        titled, scored = None if title < 200 else f"t{title}", None if score < 150 else score / 1000
        rows.append(Row(text, titled, scored, ("en", "de", "fr")[lang % 3], ids))
    return rows


def columns_of(rows: list[Row]) -> dict[str, Any]:
    text = pa.array(
        [BAD_TEXT if row.text is None else row.text.encode() for row in rows], pa.binary()
    )
    strings = pa.StringArray.from_buffers(len(rows), *text.buffers()[1:])
    return {
        "ids": pa.array([row.ids for row in rows], pa.list_(pa.int32())),
        "meta": pa.StructArray.from_arrays(
            [pa.array([row.lang for row in rows]).dictionary_encode(), strings],
            names=["lang", "text"],
        ),
        "text": strings,
        "title": pa.array([row.title for row in rows], pa.large_string()),
        "score": pa.array([row.score for row in rows], pa.float32()),
    }


def json_lines(rows: Sequence[Row | None]) -> bytes:
    lines = []
    for i, row in enumerate(rows):
        if row is None:
            lines.append(b"" if i % 2 else b" \t")
            continue
        line = json.dumps(row._asdict() | {"meta": {"lang": row.lang, "text": row.text}}).encode()
        if row.text is None:
            # The filter's columns can be read, and the text cannot: a value of a wrong type, or half a character.
            wrong = b'"text": 12' if i % 2 else b'"text": "\\ud800"'
            line = line.replace(b'"text": null', wrong)
        lines.append(line)
    return b"\n".join(lines) + b"\n"


def text_lines(rows: list[Row]) -> bytes:
    return b"".join((BAD_TEXT if row.text is None else row.text.encode()) + b"\n" for row in rows)


#: By the ending of a file: what a spec has before the column.
SPECS = {
    "parquet": "parquet:data/*.parquet:",
    "arrow": "arrow:data:",
    "jsonl": "jsonl:data/*.jsonl:",
    "txt": "txt:data/*.txt:",
}
SHARDS = [made_rows(40, 1), made_rows(33, 2)]


def shards_of(scheme: str) -> Sequence[Sequence[Row | None]]:
    """The rows of each file; None stands for a blank line, which is a row that gives nothing."""
    if scheme != "jsonl":
        return SHARDS
    return [
        [each for i, row in enumerate(rows) for each in (row, *[None] * (i % 4 // 2))]
        for rows in SHARDS
    ]


FIM = {"rate": 0.5, "spm_rate": 0.5, "ids": {"prefix": 257, "middle": 258, "suffix": 259}}


class Case(NamedTuple):
    scheme: str
    column: str
    options: dict[str, Any]


CASES = {
    **{f"{scheme} text": Case(scheme, "text", {}) for scheme in SPECS},
    **{
        f"{scheme} nested text": Case(scheme, "meta.text", {})
        for scheme in ("parquet", "arrow", "jsonl")
    },
    **{f"{scheme} ids": Case(scheme, "ids", {"epochs": 2}) for scheme in ("parquet", "arrow")},
    **{
        f"{scheme} fim": Case(scheme, "text", {"fim": FIM, "epochs": 2})
        for scheme in ("txt", "parquet")
    },
    **{
        f"{scheme} {name}": Case(scheme, "text", options)
        for scheme in ("parquet", "arrow", "jsonl")
        for name, options in {
            "filter": {"filter": ["score >= 0.25", 'meta.lang in ["en", "de"]'], "epochs": 2.5},
            "template": {"template": "{{{title}}} {meta.lang}: {text}!"},
            "all": {
                "filter": "score < 0.8",
                "template": "{title}\n{text}",
                "fim": FIM,
                "epochs": 2,
            },
        }.items()
    },
    "parquet ids filter": Case("parquet", "ids", {"filter": 'meta.lang != "fr"'}),
    "arrow ids filter": Case("arrow", "ids", {"filter": 'meta.lang != "fr"'}),
}


def passes(row: Row, options: dict[str, Any]) -> bool:
    """What the filters above mean."""
    given = options.get("filter", [])
    tests = {
        "score >= 0.25": row.score is not None and row.score >= 0.25,
        "score < 0.8": row.score is not None and row.score < 0.8,
        'meta.lang in ["en", "de"]': row.lang in ("en", "de"),
        'meta.lang != "fr"': row.lang != "fr",
    }
    return all(tests[text] for text in ([given] if isinstance(given, str) else given))


def tokens_of(case: Case, row: Row) -> list[int] | None:
    """A row's tokens without fill in the middle, or None where it is bad."""
    if case.column == "ids":
        return (
            None
            if row.text is None
            else [*[i for i in row.ids if i is not None], EOT]
            if row.ids
            else []
        )
    if row.text is None:
        return None
    template = case.options.get("template")
    if template is None:
        text = row.text
    elif template.startswith("{title}\n"):
        text = f"{row.title or ''}\n{row.text}"
    else:
        text = f"{{{row.title or ''}}} {row.lang}: {row.text}!"
    return [*text.encode(), EOT] if text else []


class Expected(NamedTuple):
    tokens: list[int]
    bad: int
    filtered: int


def expected(case: Case) -> Expected:
    """All that the source is to give, and how many rows are bad or filtered."""
    epochs = case.options.get("epochs", 1)
    shards = shards_of(case.scheme)
    total = sum(map(len, shards))
    fim = None
    if "fim" in case.options:
        ids = {f"{name}_id": value for name, value in FIM["ids"].items()}  # type: ignore[attr-defined]
        fim = FillInMiddle(
            rate=0.5, spm_rate=0.5, seed=7, source_id=0, bos_id=None, eot_id=EOT, **ids
        )
    tokens: list[int] = []
    bad = filtered = 0
    epoch = 0
    while epoch < epochs:
        left = total if epochs - epoch >= 1 else -(-total * (epochs - epoch) // 1)
        for shard, rows in enumerate(shards):
            for number, row in enumerate(rows):
                left -= 1
                if left < 0:
                    break
                if row is None or not passes(row, case.options):
                    filtered += 1
                    continue
                found = tokens_of(case, row)
                if found is None:
                    bad += 1
                    continue
                if fim is not None and found:
                    # Tested by itself in tests/packing/test_fim.py; here, that it is asked for the right row.
                    ends, lies = np.array([len(found)]), (np.array([shard]), np.array([number]))
                    ids, _, _ = fim.rearranged(np.array(found, np.uint16), ends, epoch, *lies)
                    found = ids.tolist()
                tokens += found
        epoch += 1
    return Expected(tokens, bad, filtered)


def write(folder: Path, scheme: str) -> None:
    (folder / "data").mkdir()
    for shard, rows in enumerate(SHARDS):
        path = folder / "data" / f"{shard}.{scheme}"
        if scheme in ("parquet", "arrow"):
            write_table(path, pa.table(columns_of(rows)), 7)
        else:
            path.write_bytes(
                json_lines(shards_of(scheme)[shard]) if scheme == "jsonl" else text_lines(rows)
            )


def order_over(folder: Path, case: Case, **run: Any) -> PipelineFactory:
    source = {"source": SPECS[case.scheme] + case.column} | case.options
    fields = {"vocab_size": 300, "on_bad_row": "skip", "mixture": node("sequential", source)}
    return order_of(folder, mixture(**fields | run))


def samples_from(
    order: PipelineFactory, state: State, count: int = 64
) -> Iterator[tuple[list[int], State]]:
    """Sample by sample, with the state after each, which went through its text; ``count`` are made at once: after a bad
    row a producer makes one, so that good samples before it go out."""
    pipeline = order.pipeline(state)
    while pipeline.ended is None:
        plan = BatchPlan(
            start_index=pipeline.sample_index, world_size=1, batch_size=1, group_micro_steps=count
        )
        group = pipeline.begin_group(plan)
        pipeline.fill(group, count)
        for step, ids in enumerate(group.ids(0, 0, len(group.marks))):
            yield (
                np.frombuffer(ids, order.record.dtype).tolist(),
                reread(order, group.state_after(step)),
            )


def whole_of(order: PipelineFactory) -> list[tuple[list[int], State]]:
    return list(samples_from(order, order.initial()))


def end_of(order: PipelineFactory) -> State:
    """The state at the end, whether its last rows make a sample or not."""
    pipeline = order.pipeline(order.initial())
    while pipeline.ended is None:
        pipeline.advance(1000)
    return pipeline.state()


@pytest.mark.parametrize("name", CASES)
def test_every_row_gives_what_it_should_and_each_sample_index_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "STRIDE_BYTES", 256)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 300)
    case = CASES[name]
    write(tmp_path, case.scheme)
    order = order_over(tmp_path, case)
    known = expected(case)
    whole = whole_of(order)
    assert [token for ids, _ in whole for token in ids] == known.tokens[: len(whole) * LENGTH]
    assert len(known.tokens) - len(whole) * LENGTH < LENGTH
    row_counts = [state.sources[0].row_counts for _, state in whole]
    # Behind the last sample lie fewer rows than make one.
    assert known.bad - 4 <= row_counts[-1].bad_rows <= known.bad
    assert known.filtered - 12 <= row_counts[-1].filtered_rows <= known.filtered
    assert known.bad
    assert bool(known.filtered) == ("filter" in case.options or case.scheme == "jsonl")
    for index in range(0, len(whole), 1 if len(whole) < 120 else 5):
        _, state = whole[index]
        assert list(islice(samples_from(order, state, 12), 12)) == whole[index + 1 : index + 13]


@pytest.mark.parametrize(
    ("name", "shuffle"),
    [("parquet all", "shards"), ("arrow ids filter", "rows"), ("jsonl all", "rows")],
)
def test_a_shuffled_source_gives_the_same_rows(name: str, shuffle: str, tmp_path: Path) -> None:
    case = CASES[name]
    write(tmp_path, case.scheme)

    def rows_of(options: dict[str, Any]) -> dict[tuple[int, int, int], tuple[list[int], int, int]]:
        """By epoch and place: a row's tokens, what became of it, and how it was rearranged."""
        order = order_over(tmp_path, case._replace(options=case.options | options))
        found = {}
        for piece in order.documents(0).read(None):
            begins = [0, *piece.ends.tolist()]
            for at, (begin, end) in enumerate(pairwise(begins)):
                fate = 0 if piece.row_status is None else int(piece.row_status[at])
                middle = 0 if piece.middles is None else int(piece.middles[at])
                found[(piece.epoch, *piece.origin(at))] = (
                    piece.ids[begin:end].tolist(),
                    fate,
                    middle,
                )
                assert (fate == BAD) == (piece.origin(at) in piece.reasons and not end - begin)
        return found

    options = {"shuffle": shuffle} | ({"shuffle_window_rows": 16} if shuffle == "rows" else {})
    known, found = rows_of({}), rows_of(options)
    assert found == known
    # Two files have one other order; it is that of the second epoch, where there is one.
    assert shuffle == "shards" or list(found) != list(known)
    # And from any sample on.
    order = order_over(tmp_path, case._replace(options=case.options | options))
    whole = whole_of(order)
    for index in range(0, len(whole), 7):
        assert (
            list(islice(samples_from(order, whole[index][1], 5), 5)) == whole[index + 1 : index + 6]
        )


TEXT = Case("txt", "text", {})
BREAKING = Case("txt", "text", {"source": "txt:data/a.txt:text"})


def test_a_bad_row_counts_where_a_sample_goes_past_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_bytes(
        b"0123456\n" + BAD_TEXT + b"\n" + BAD_TEXT + b"\n0123456\n" + BAD_TEXT + b"\n"
    )
    order = order_over(tmp_path, TEXT)
    states = [state for _, state in whole_of(order)]
    found = [
        (own.cursor, own.rows, own.row_counts.bad_rows) for (own,) in (s.sources for s in states)
    ]
    assert found == [(FileCursor(0, 0, 1), 1, 0), (FileCursor(0, 0, 4), 4, 2)]
    (entry,) = json.loads(encode_state(order, states[-1]))["datasets"]
    assert entry["bad_rows"] == 2
    assert "filtered_rows" not in entry


BREAKS: dict[str, tuple[str, list[str]]] = {
    "txt": ("txt:data/a.txt:text", ["'data/a.txt': line 5 is not UTF-8", "convert the file"]),
    "jsonl": ("jsonl:data/a.jsonl:text", ["'data/a.jsonl': line 5 is malformed JSON"]),
    "parquet": ("parquet:data/a.parquet:ids", ["'data/a.parquet': row 4 has a null among its ids"]),
    "vocabulary": (
        "parquet:data/v.parquet:ids",
        ["data/v.parquet: row 4: the id 999 is outside the vocabulary"],
    ),
}


def write_breaking(folder: Path) -> None:
    """Rows 2, 4 and 6 of eight are bad, in each file."""
    data = folder / "data"
    data.mkdir()
    good = [b"0123456"] * 8
    (data / "a.txt").write_bytes(
        b"".join((BAD_TEXT if i in (2, 4, 6) else g) + b"\n" for i, g in enumerate(good))
    )
    lines = [b'{"text": "0123456"' + (b"" if i in (2, 4, 6) else b"}") + b"\n" for i in range(8)]
    (data / "a.jsonl").write_bytes(b"".join(lines))
    for name, wrong in (("a", None), ("v", 999)):
        rows = [[1, 2, 3, 4, 5, 6, wrong if i in (2, 4, 6) else 7] for i in range(8)]
        pq.write_table(pa.table({"ids": rows}), data / f"{name}.parquet")


@pytest.mark.parametrize("name", BREAKS)
def test_one_bad_row_too_many_is_an_error_that_names_it_at_the_same_sample_from_everywhere(
    name: str, tmp_path: Path
) -> None:
    spec, parts = BREAKS[name]
    write_breaking(tmp_path)
    options = {"source": spec, "max_bad_rows": 1}
    order = order_over(tmp_path, Case("txt", "text", options), max_bad_rows=7)
    states = [order.initial()]
    with pytest.raises(SourceError) as caught:
        for _, state in samples_from(order, states[0], 1):
            states.append(state)
    # Rows 0, 1 and 3 make a sample each.
    assert len(states) == 4
    for part in [*parts, "bad row number 2", "max_bad_rows allows 1", "repair the file"]:
        assert part in str(caught.value)
    for index, state in enumerate(states):
        found = 0
        with pytest.raises(SourceError) as again:
            for _ in samples_from(order, state, 1):
                found += 1
        assert (index + found, str(again.value)) == (3, str(caught.value))


def test_each_epoch_meets_the_same_bad_rows_and_the_limit_is_for_each(tmp_path: Path) -> None:
    write_breaking(tmp_path)
    case = Case("txt", "text", {"source": "txt:data/a.txt:text", "epochs": 4})
    order = order_over(tmp_path, case, max_bad_rows=3)
    last = whole_of(order)[-1][1]
    assert (last.sample_index, last.sources[0].row_counts.bad_rows) == (20, 12)
    with pytest.raises(
        SourceError, match=r"line 7 is not UTF-8 .* bad row number 3 of .* allows 2 up to epoch 0"
    ):
        whole_of(order_over(tmp_path, case, max_bad_rows=2))


def test_without_skip_the_first_bad_row_is_an_error_after_all_before_it(tmp_path: Path) -> None:
    write_breaking(tmp_path)
    for spec, parts in BREAKS.values():
        case = Case("txt", "text", {"source": spec, "on_bad_row": "fail"})
        order = order_over(tmp_path, case)
        found = 0
        with pytest.raises((SourceError, TokenizerError)) as caught:
            for _ in samples_from(order, order.initial(), 1):
                found += 1
        assert parts[0].replace("line 5", "line 3").replace("row 4", "row 2") in str(caught.value)
        assert found == 2


def test_a_run_that_a_bad_row_has_stopped_goes_on_with_skip(tmp_path: Path) -> None:
    write_breaking(tmp_path)
    failing = order_over(tmp_path, BREAKING, on_bad_row="fail")
    states = [failing.initial()]
    with pytest.raises(SourceError):
        for _, state in samples_from(failing, states[0], 1):
            states.append(state)
    config = order_over(tmp_path, BREAKING).config
    skipping = builder.load(config, tmp_path, None, failing.record.to_json())
    assert order_digest(skipping.config) == order_digest(failing.config)
    assert [ids for ids, _ in samples_from(skipping, states[-1])] == [[*b"0123456", EOT]] * 3


def test_a_blank_line_is_bad_where_the_source_says_so(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_bytes(b'{"text":"0123456"}\n\n{"text":"0123456"}\n')
    case = Case("jsonl", "text", {"on_blank_line": "fail"})
    order = order_over(tmp_path, case, on_bad_row="fail")
    with pytest.raises(SourceError, match=r"line 2 is blank, .* or set on_blank_line: skip"):
        whole_of(order)
    skipping = order_over(tmp_path, case)
    assert end_of(skipping).sources[0].row_counts.bad_rows == 1
    assert order_digest(skipping.config) == order_digest(
        order_over(tmp_path, Case("jsonl", "text", {})).config
    )


def test_skipped_rows_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_breaking(tmp_path)
    order = order_over(tmp_path, BREAKING)
    with caplog.at_level(logging.WARNING):
        whole_of(order)
    messages = [record.getMessage() for record in caplog.records]
    (message,) = messages
    assert "'data/a.txt': line 3 is not UTF-8" in message
    assert "bad rows are skipped, and counted" in message


def test_a_source_of_bad_rows_alone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_bytes(BAD_TEXT + b"\n" + BAD_TEXT + b"\n")
    order = order_over(tmp_path, TEXT)
    with pytest.raises(
        SourceError,
        match=r"no token in any of its rows; .* \(2 of them are bad, and 0 are left out by the filter or blank",
    ):
        whole_of(order)


UNSERVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "has no column 'text'": ({"body": ["a"]}, {}),
    "column 'text' is of type int64": ({"text": [1]}, {}),
    "column 'text' holds ids": ({"text": [[1]]}, {}),
    "column 'lang' is of type int64, which is not compared": (
        {"text": ["a"], "lang": [1]},
        {"filter": ['lang == "x"']},
    ),
    "template: column 'lang' is of type (large_)?list<": (
        {"text": ["a"], "lang": [[1]]},
        {"template": "{lang} {text}"},
    ),
}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_file_that_cannot_be_served_is_refused_where_a_run_begins_and_a_remote_one_where_it_is_opened(
    tmp_path: Path, suffix: str
) -> None:
    remote = fsspec.filesystem("memory")
    for number, (reason, (table, rules)) in enumerate(UNSERVED.items()):
        folder, url = tmp_path / str(number), f"unserved-{number}-{suffix}"
        write_table(folder / f"0.{suffix}", pa.table({"text": ["a"], "lang": ["b"]}))
        write_table(folder / f"1.{suffix}", pa.table({**table, "one": [1]}))
        remote.put(str(folder), url, recursive=True)
        pattern = "" if suffix == "arrow" else "/*.parquet"
        with pytest.raises(SourceError, match=rf"1\.{suffix}': .*{reason}|1\.{suffix}' {reason}"):
            order_over(
                folder, Case(suffix, "text", {"source": f"{suffix}:.{pattern}:text", **rules})
            )
        order = order_over(
            folder,
            Case(suffix, "text", {"source": f"{suffix}:memory://{url}{pattern}:text", **rules}),
        )
        with pytest.raises(SourceError, match=reason):
            whole_of(order)


#: Makes engines crash as native code does, in whatever Python starts from now on.
DEADLY = """
import ctypes
from tokenloom_server.tokenizer import engine

def deadly(kind):
    encode = kind.encode
    def encoded(self, texts):
        if any("this one kills" in text for text in texts.to_pylist()):
            ctypes.string_at(0)
        return encode(self, texts)
    kind.encode = encoded

for kind in (engine.GigatokenEngine, engine.TokenizersEngine):
    deadly(kind)
"""


def test_a_document_at_which_both_engines_crash_is_a_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``tests/e2e/test_crashes.py`` has the server, and the run that fails at it."""
    texts = [f"row {i} of some" for i in range(12)]
    write_tokenizer(tmp_path / "tokenizer.json", texts)
    texts[5] += ", and this one kills"
    (tmp_path / "a.txt").write_text("".join(text + "\n" for text in texts))
    # As two servers that died of these rows leave it.
    (tmp_path / "index").mkdir()
    suspect = SuspectRows(0, 0, 0, len(texts), deaths=2)
    (tmp_path / "index/rows@suspects.json").write_text(json.dumps([asdict(suspect)]))
    document = flat(["txt:a.txt:text"], run="rows", tokenizer="tokenizer.json", on_bad_row="skip")
    order = builder.create(parsed(document), tmp_path, tmp_path / "index")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(DEADLY)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    )
    with closing(order.resources):
        whole = whole_of(order)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    known = [
        token
        for i, text in enumerate(texts)
        if i != 5
        for token in [*tokenizer.encode(text).ids, end]
    ]
    assert [token for ids, _ in whole for token in ids] == known[: len(whole) * LENGTH]
    assert len(known) - len(whole) * LENGTH < LENGTH
    assert whole[-1][1].sources[0].row_counts.bad_rows == 1


def test_a_fork_takes_a_source_over_only_with_the_same_documents(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "score": 1}\n')
    fim = {"rate": 0.5, "ids": {"prefix": 1, "middle": 2, "suffix": 3}}

    def order(run: str, seed: int = 1, **fields: Any) -> PipelineFactory:
        root = node("sequential", {"source": "jsonl:rows.jsonl:text", **fields})
        return order_of(tmp_path, mixture(run=run, seed=seed, mixture=root))

    base = order("base")
    for fields in ({"filter": "score >= 1"}, {"template": "{score} {text}"}, {"fim": fim}):
        (field,) = fields
        _refuse_other_documents(order("base", **fields), order("fork", **fields))
        # It would go on in the midst of a text that the other run never had.
        for ours, theirs in (
            (base, order("fork", **fields)),
            (order("base", **fields), order("fork")),
        ):
            with pytest.raises(
                SnapshotInvalid, match=rf"'jsonl:rows.jsonl:text': {field} is .* in run 'base' and "
            ):
                _refuse_other_documents(ours, theirs)
    _refuse_other_documents(base, order("fork", seed=2))
    with pytest.raises(
        SnapshotInvalid, match="seed is 1 in run 'base' and 2 in 'fork': places within documents"
    ):
        _refuse_other_documents(order("base", fim=fim), order("fork", seed=2, fim=fim))
