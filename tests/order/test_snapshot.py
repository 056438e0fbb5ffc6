"""The snapshot: the same text from everybody, and whatever is not what was written is refused by name."""

from __future__ import annotations

import bz2
import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.corpora import (
    CODE,
    advanced,
    decode_state,
    encode_state,
    flat,
    mixture,
    numbers,
    order_of,
    parsed,
)
from support.mixing import node
from tokenloom_proto.seal import SNAPSHOT_FORMAT, SNAPSHOT_VERSION, canonical, seal, unseal
from tokenloom_server.core.state import (
    DIGEST_MODULUS,
    MAX_COUNTER,
    ChildState,
    FileCursor,
    RowCounts,
    Skip,
    SourceState,
    State,
    digest_hex,
    passed_over,
)
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.mixing.mixer import node_shape
from tokenloom_server.order import snapshot, state_document
from tokenloom_server.order.record import RunRecord
from tokenloom_server.order.snapshot import ResumePoint
from tokenloom_server.order.state_document import Shape
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.sources.manifest import Manifest

UID = "0123456789abcdef0123456789abcdef"
BASE, INDEX = 60, 63


class Case:
    """A run in its middle, where a source is exhausted, and the snapshot three samples on."""

    def __init__(self, folder: Path) -> None:
        self.order = order_of(folder)
        pipeline = self.order.pipeline(self.order.initial())
        pipeline.advance(BASE)
        self.base = pipeline.state()
        pipeline.advance(INDEX - BASE)
        self.state = pipeline.state()
        self.template = self.order.record.template(UID, "train", 4)
        self.resume_state = encode_state(self.order, self.base)
        self.text = snapshot.compose(
            self.template, self.resume_state, encode_state(self.order, self.state)
        )

    def parse(self, text: str | bytes) -> ResumePoint:
        record = self.order.record
        return snapshot.parse(
            text, record.template("", "train", 0), lambda *_: record.shape, record.config
        )

    def changed(self, change: Callable[[dict[str, Any]], Any]) -> str:
        """The snapshot with a change, sealed anew."""
        document = unseal(self.text)
        change(document)
        return seal(document)


def packed(text: str) -> str:
    return b64encode(bz2.compress(text.encode())).decode()


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    return Case(folder)


def test_a_snapshot_comes_back_as_it_was_written(case: Case) -> None:
    for text in (case.text, case.text.encode()):
        point = case.parse(text)
        assert point == ResumePoint(
            sample_index=INDEX,
            digest=digest_hex(case.state.digest),
            total_tokens=INDEX * 8,
            base=case.base,
            run_uid=UID,
            generation=4,
            counts={
                spec: {
                    "samples": source.samples,
                    "tokens": source.tokens,
                    "real_tokens": source.tokens,
                }
                for spec, source in zip(case.order.record.specs, case.state.sources, strict=True)
            },
        )


def test_what_was_skipped_comes_back_and_is_only_written_where_there_is_some(case: Case) -> None:
    skipped = passed_over(case.base, case.state)
    text = encode_state(case.order, skipped)
    assert decode_state(case.order, text) == skipped
    place = skipped.sample_index, skipped.total_tokens, skipped.digest
    assert place == (BASE, case.base.total_tokens, case.base.digest)
    assert skipped.skips == (Skip(BASE, INDEX - BASE, 8 * (INDEX - BASE)),)
    assert sum(source.skipped_samples for source in skipped.sources) == INDEX - BASE
    assert sum(source.skipped_tokens for source in skipped.sources) == 8 * (INDEX - BASE)
    for was, now in zip(case.base.sources, skipped.sources, strict=True):
        assert (was.samples, was.rows) == (
            now.samples - now.skipped_samples,
            now.rows - now.skipped_rows,
        )
    assert "skipped" not in case.resume_state
    gave = [
        was.samples < now.samples
        for was, now in zip(case.base.sources, case.state.sources, strict=True)
    ]
    assert ["skipped_samples" in entry for entry in json.loads(text)["datasets"]] == gave
    # Once more, from there on: both ranges are one skip then.
    twice = passed_over(skipped, advanced(case.order, skipped, 5))
    assert sum(source.skipped_samples for source in twice.sources) == INDEX - BASE + 5
    assert twice.skips == (Skip(BASE, INDEX - BASE + 5, 8 * (INDEX - BASE + 5)),)
    assert decode_state(case.order, encode_state(case.order, twice)) == twice


def test_the_text_is_canonical_and_depends_on_no_order_of_keys(case: Case) -> None:
    document = json.loads(case.text)
    assert canonical(document) == case.text
    shuffled = {key: document[key] for key in reversed(document)}
    assert seal(shuffled) == case.text
    template, there = dict(reversed(case.template.items())), encode_state(case.order, case.state)
    assert snapshot.compose(template, case.resume_state, there) == case.text


def test_earlier_tools_find_what_they_read(case: Case) -> None:
    (code, *_) = json.loads(case.text)["resume_state"]["datasets"]
    cursor = case.base.sources[0].cursor
    assert code["spec"] == CODE
    assert code["shard"] == f"data/code-{cursor.shard}.parquet"
    assert code["row_offset"] == cursor.row
    assert code["token_offset"] == case.base.sources[0].tokens


def test_two_hundred_sources_take_at_most_96_kilobytes() -> None:
    specs = tuple(f"parquet:data/corpus-{i:03d}/shards-*.parquet:text" for i in range(200))
    document = flat(list(specs), tokenizer=None, vocab_size=9, end_of_text_id=2)
    for child, weight in zip(
        document["mixture"]["children"], numbers(200, 1, 1, 10**9), strict=True
    ):
        child |= {"weight": weight / 10**6, "alias": f"corpus {weight}", "epochs": 2.5}
    config = parsed(document)
    record = RunRecord(
        config=config, manifest=Manifest(()), tokenizer=None, engine=None, has_loss_mask=False
    )
    shape = Shape(
        specs=specs,
        shards=tuple(
            tuple(f"data/corpus-{i:03d}/shards-{j:05d}.parquet" for j in range(90))
            for i in range(200)
        ),
        nodes={node.id: node_shape(config, node).child_ids for node in config.nodes},
        sample_tokens=8,
        names=(None,) * 200,
        shuffles=("none",) * 200,
        lanes=(1,) * 200,
        mixture=(),
    )
    # As wide as honest counters get: 10^12 samples a source.
    samples = 10**12
    state = State(
        sample_index=200 * samples,
        total_tokens=1600 * samples,
        digest=DIGEST_MODULUS - 1,
        sources=tuple(
            SourceState(FileCursor(1, 89, 10**6, 10**5), samples, 10**11, 8 * samples)
            for _ in specs
        ),
        nodes=(tuple(ChildState(samples, 8 * samples, -(10**6)) for _ in specs),),
    )
    template = record.template(UID, "train", 1000) | {
        "run": "r" * 40,
        "seed": 2**63 - 1,
        "tokenizer": {"digest": "f" * 64, "engine": "gigatoken", "version": "0.10.0"},
    }
    resume_state = state_document.encode_state(state, shape)
    text = snapshot.compose(template, resume_state, resume_state)
    assert len(text.encode()) <= 96 * 1024
    assert snapshot.parse(text, template, lambda *_: shape, config).base == state


def test_where_only_the_state_is_there_each_changed_field_is_named_with_both_values(
    case: Case, folder: Path
) -> None:
    changed = mixture(mask_boundaries=True, on_bad_row="skip")
    timeline = Timeline(order_of(folder, changed))
    template = timeline.first.record.template("", "train", 0)
    point = snapshot.parse(case.text, template, timeline.shape_at, timeline.first.config)
    assert point.changed == (
        "mask_boundaries: was false, the file has true now",
        'on_bad_row: was "fail", the file has "skip" now',
    )

    changed["mixture"]["children"][0]["weight"] = 3
    changed["mixture"]["children"][2]["children"].pop()
    timeline = Timeline(order_of(folder, changed))
    template = timeline.first.record.template("", "train", 0)
    ways = (
        "put these back, or begin a new run .* forked from this checkpoint; or make them a revision"
    )
    for text, said in (
        (
            case.text,
            rf"children\.0\.weight: the run began with \"2\", the file has \"3\"\n.*children\.2.*{ways}",
        ),
        (case.changed(lambda d: d.pop("config")), "the snapshot's config_digest is"),
    ):
        with pytest.raises(SnapshotInvalid, match=f"(?s){said}"):
            snapshot.parse(text, template, timeline.shape_at, timeline.first.config)


def test_how_a_source_is_read_is_never_offered_as_a_revision(case: Case, folder: Path) -> None:
    changed = mixture()
    changed["mixture"]["children"][0] |= {"shuffle": "rows", "weight": 3}
    record = order_of(folder, changed).record
    with pytest.raises(
        SnapshotInvalid, match=r"(?s)children\.0\.shuffle: .*another name"
    ) as refused:
        snapshot.parse(
            case.text, record.template("", "train", 0), lambda *_: record.shape, record.config
        )
    assert "revision" not in str(refused.value)


# --- torn ------------------------------------------------------------------------------------------


def test_every_flipped_bit_and_every_flipped_byte_is_refused(case: Case) -> None:
    whole = case.text.encode()
    for at in range(len(whole)):
        for mask in (1 << at % 8, 0xFF):
            torn = bytearray(whole)
            torn[at] ^= mask
            with pytest.raises(SnapshotInvalid):
                case.parse(bytes(torn))


def test_every_truncation_is_refused(case: Case) -> None:
    whole = case.text.encode()
    for length in range(len(whole)):
        with pytest.raises(SnapshotInvalid):
            case.parse(whole[:length])


@pytest.mark.parametrize("more", ["}", " x", "{}", "\x00"])
def test_more_behind_its_end_is_refused(case: Case, more: str) -> None:
    with pytest.raises(SnapshotInvalid, match="does not parse"):
        case.parse(case.text + more)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "7",
        "[]",
        '"x"',
        "{}",
        "{",
        "NaN",
        "\ufeff{}",
        "\x00",
        "9" * 5000,
        "[" * 100_000,
        '{"a":1,"a":1}',
        '{"a":Infinity}',
        '{"a":"\\ud800"}',
        *('{"a":' * depth + "1" + "}" * depth for depth in (400, 900, 960, 1000)),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_what_is_no_snapshot_at_all_is_refused(case: Case, text: str) -> None:
    for found in (
        text,
        text.encode("utf-8", "surrogatepass"),
        text.encode("utf-16", "surrogatepass"),
    ):
        with pytest.raises(SnapshotInvalid):
            case.parse(found)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_a_text_beyond_the_bound_is_not_even_read(case: Case, extra: int) -> None:
    with pytest.raises(
        SnapshotInvalid, match="expected at most 16777216" if extra else "does not parse"
    ):
        case.parse("[" * 5 + " " * (16 * 2**20 - 5 + extra))


# --- swapped, with a checksum that fits ---------------------------------------------------------------


def within(document: Any, path: str) -> tuple[Any, Any]:
    """What holds the value at a path of keys and positions, and its key there."""
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in parents:
        document = document[part]
    return document, last


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        holder, key = within(document, path)
        holder[key] = value

    return change


DATASET = "resume_state.datasets.0"
SWAPPED = [
    ("format", "other/snapshot", "format is 'other/snapshot', expected 'tokenloom/snapshot'"),
    (
        "version",
        1,
        "format version 1, this release has 2: restore it with the Tokenloom release that wrote it",
    ),
    ("version", 3, "format version 3"),
    (
        "resume_state.version",
        1,
        "resume_state.version: found 1; expected a whole number from 2 to 2",
    ),
    ("version", 0, "format version 0"),
    ("version", "1", "format version '1'"),
    ("version", True, "format version True"),
    ("version", None, "format version None"),
    ("run", "other", "the snapshot's run is 'other', this run's is 'test': load it into that run"),
    ("stream", "eval", "the snapshot's stream is 'eval', this run's is 'train'"),
    ("seed", 8, "the snapshot's seed is 8, this run's is 7: restore the seed"),
    ("seed", 7.0, "seed: "),
    (
        "order_version",
        1,
        "the snapshot's order_version is 1, this run's is 3: restore it with the Tokenloom",
    ),
    ("config_digest", "0" * 64, "restore the mixture file that the run began with"),
    ("config", {}, "config: found {}; expected str"),
    ("config", "e30", "config: "),
    ("config", packed("{}{"), "config: "),
    ("config", packed("[" * 10**5), "; expected JSON, compressed by bzip2, in base 64"),
    ("config", packed('{"config": [1]}'), "config.config: "),
    ("manifest_digest", "0" * 64, "restore the data files that the run began with"),
    ("tokenizer.engine", "other", "restore that tokeniser and engine version"),
    ("tokenizer.version", "0.9", "'version': '0.9'"),
    ("tokenizer.digest", "0" * 64, "the snapshot's tokenizer is"),
    ("tokenizer", {}, "the snapshot's tokenizer is {}"),
    ("generation", -1, "generation: "),
    ("generation", 2**53, "generation: "),
    ("generation", 10**400, "generation: "),
    ("generation", "4", "generation: "),
    ("run_uid", "", "run_uid: "),
    ("run_uid", 7, "run_uid: "),
    ("sample_index", BASE - 1, f"resume_state is at sample {BASE}, beyond sample_index {BASE - 1}"),
    (
        "total_tokens",
        INDEX * 8 + 1,
        f"total_tokens: found 505; expected 504: those of {INDEX} samples",
    ),
    ("digest", f"{DIGEST_MODULUS:032x}", "digest: found"),
    ("digest", "f" * 32, "digest: found"),
    ("digest", "F" * 32, "digest: "),
    ("digest", "0" * 31, "digest: "),
    ("surprise", 1, "surprise: "),
    ("resume_state", [], "resume_state: "),
    ("resume_state.sample_index", BASE + 1, ""),
    (
        "resume_state.total_tokens",
        BASE * 8 + 8,
        "resume_state.total_tokens: found 488; expected 480",
    ),
    ("resume_state.digest", f"{DIGEST_MODULUS:032x}", "resume_state.digest"),
    ("resume_state.surprise", 1, "resume_state.surprise: "),
    ("resume_state.datasets", [], "resume_state.datasets does not list this run's sources"),
    (
        f"{DATASET}.spec",
        "parquet:other:ids",
        "only there: ['parquet:other:ids'], only here: ['parquet:data/code",
    ),
    (
        f"{DATASET}.id",
        1,
        "resume_state.datasets.0.id: found 1; expected 0: as this run writes 'parquet:",
    ),
    (
        f"{DATASET}.shard",
        "data/code-9.parquet",
        ".shard: found 'data/code-9.parquet'; expected 'data/code-0",
    ),
    (
        f"{DATASET}.shard_index",
        1,
        ".shard: found 'data/code-0.parquet'; expected 'data/code-1.parquet'",
    ),
    (f"{DATASET}.shard_index", 2, ".shard_index: found 2; expected a whole number from 0 to 1"),
    (f"{DATASET}.shard_index", MAX_COUNTER, ".shard_index: found"),
    (f"{DATASET}.packed_samples", 3, ".row_token_offset: found 29; expected no such field"),
    ("resume_state.version", 3, "resume_state.version: "),
    (
        f"{DATASET}.samples",
        10**9,
        "resume_state.datasets.0.token_offset: found 216; expected 8000000000",
    ),
    (f"{DATASET}.token_offset", 0, "resume_state.datasets.0.token_offset: found 0; expected 216"),
    (
        f"{DATASET}.skipped_samples",
        10**6,
        f"{DATASET}.skipped_samples: found 1000000; expected at most 27, as a part of samples",
    ),
    (f"{DATASET}.skipped_rows", 1, f"{DATASET}.skipped_rows: found 1; expected None"),
    (
        f"{DATASET}.skipped_tokens",
        8,
        f"{DATASET}.skipped_tokens: found 8; expected None",
    ),
    (f"{DATASET}.exhausted", True, f"{DATASET}.dropped_tokens: found None; expected 0"),
    (f"{DATASET}.exhausted", 1, f"{DATASET}.exhausted: "),
    (f"{DATASET}.extra", 1, f"{DATASET}.extra: "),
    (
        "resume_state.nodes",
        [],
        "resume_state.nodes: found []; expected [3, 2]: so many children each",
    ),
    ("resume_state.nodes", [[], []], "nodes: found [0, 0]; expected [3, 2]"),
    ("resume_state.nodes.1", [], "nodes: found [3, 0]; expected [3, 2]"),
    ("resume_state.nodes.0.0", [1, 8, 0], "resume_state.nodes.0.0"),
    (
        "resume_state.nodes.0.0.2",
        2**53,
        f"nodes.0.0.2: found {2**53}; expected a whole number from {-MAX_COUNTER}",
    ),
    ("resume_state.nodes.0.0.2", -(2**53), "resume_state.nodes.0.0.2: "),
    ("resume_state.nodes.0.0.2", 10**30, "resume_state.nodes.0.0.2: "),
    ("resume_state.nodes.0.0.2", 1.5, "resume_state.nodes.0.0.2: "),
    ("resume_state.nodes.0.0.3", 2, "resume_state.nodes.0.0.3: "),
    ("resume_state.nodes.0.0.3", 1, "resume_state.nodes.0.0"),
    ("resume_state.nodes.0.0.3", False, "resume_state.nodes.0.0.3: "),
    ("resume_state.nodes.1.0.0", 0, "resume_state.nodes."),
    ("resume_state.nodes.1.1.1", 0, "resume_state.nodes.1.1"),
]
COUNTS = [
    "sample_index",
    "total_tokens",
    "resume_state.sample_index",
    "resume_state.total_tokens",
    "resume_state.nodes.0.0.0",
    "resume_state.nodes.0.0.1",
    "resume_state.nodes.1.1.0",
    *(
        f"{DATASET}.{key}"
        for key in (
            *("id", "shard_index", "epoch", "row_offset", "row_token_offset", "samples", "rows"),
            *("token_offset", "dropped_tokens", *RowCounts._fields),
            *("skipped_samples", "skipped_rows", "skipped_tokens"),
        )
    ),
]
SWAPPED += [
    (path, value, f"{path}: ")
    for path in COUNTS
    for value in (-1, 2**53, 10**4000, 1.0, 1e300, True, "1", None, [1])
]


@pytest.mark.parametrize(
    ("path", "value", "says"),
    SWAPPED,
    ids=[f"{path}={str(value)[:20]}" for path, value, _ in SWAPPED],
)
def test_a_swapped_field_is_refused_by_name(case: Case, path: str, value: Any, says: str) -> None:
    with pytest.raises(SnapshotInvalid) as caught:
        case.parse(case.changed(put(path, value)))
    assert says in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "path",
    [
        "format",
        "version",
        "run",
        "stream",
        "sample_index",
        "digest",
        "total_tokens",
        "run_uid",
        "generation",
        "seed",
        "order_version",
        "config_digest",
        "manifest_digest",
        "tokenizer",
        "resume_state",
        "counts",
        "real_tokens",
        "resume_state.version",
        "resume_state.mixture",
        "resume_state.sample_index",
        "resume_state.digest",
        "resume_state.total_tokens",
        "resume_state.datasets",
        "resume_state.nodes",
        "resume_state.datasets.1.shard",
        "resume_state.datasets.1.rows",
    ],
)
def test_a_missing_field_is_refused_by_name(case: Case, path: str) -> None:
    def change(document: dict[str, Any]) -> None:
        holder, key = within(document, path)
        del holder[key]

    with pytest.raises(SnapshotInvalid, match=path):
        case.parse(case.changed(change))


#: The fields that say where a source stands.
PLACE = (
    "epoch",
    "shard",
    "shard_index",
    "row_offset",
    "window",
    "window_row",
    "row_token_offset",
    "packed_samples",
    "epoch_rows",
)
IN_A_FILE: dict[str, Any] = {"epoch": 0, "shard_index": 0, "row_offset": 3, "row_token_offset": 0}
IN_A_WINDOW: dict[str, Any] = {"epoch": 0, "window": 0, "window_row": 3, "row_token_offset": 0}
IN_AN_EPOCH: dict[str, Any] = {"epoch": 0, "epoch_rows": 4}
PLACED = {"epoch": 0, "shard": "data/code-0.parquet", "shard_index": 0, "row_offset": 3}
PLACES: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    (
        {},
        "0",
        IN_A_WINDOW,
        "0: found ('window', 'window_row'); expected ('shard_index', 'row_offset')",
    ),
    (
        {},
        "0",
        IN_AN_EPOCH,
        "0: found ('epoch_rows',); expected ('shard_index', 'row_offset')",
    ),
    ({}, "0", {}, "0: found (); expected ('shard_index', 'row_offset')"),
    ({"shuffle": "rows"}, "0", {}, "0: found (); expected ('window', 'window_row')"),
    (
        {"shuffle": "rows"},
        "0",
        PLACED | {"row_token_offset": 0},
        "0: found ('shard_index', 'row_offset'); expected ('window', ",
    ),
    ({"lanes": 2}, "0.lanes.1", {}, "lanes.1: found (); expected"),
    ({"lanes": 2}, "0.lanes.1", IN_A_WINDOW, "lanes.1: found ('window', 'window_row'); expected"),
    ({"lanes": 2}, "0.lanes.1", IN_AN_EPOCH, "lanes.1.epoch: found 0; expected no such field"),
    ({}, "0", PLACED | {"packed_samples": 3}, "0.packed_samples: found 3; expected None"),
    (
        {"packing": "best_fit"},
        "0",
        PLACED | {"row_token_offset": 2, "packed_samples": 3},
        "0.row_token_offset: found 2; expected no such field",
    ),
    (
        {"packing": "best_fit", "lanes": 2},
        "0.lanes.1",
        IN_A_FILE | {"row_token_offset": 2, "packed_samples": 3},
        "0.lanes.1.row_token_offset: found 2; expected no such field",
    ),
]


@pytest.mark.parametrize(("options", "path", "place", "says"), PLACES)
def test_a_place_where_the_source_cannot_stand_is_refused(
    folder: Path, options: dict[str, Any], path: str, place: dict[str, Any], says: str
) -> None:
    source = {"source": CODE} | options
    run = flat([], packing=source.pop("packing", "concat"), sequence_length=16)
    order = order_of(folder, run | {"mixture": node("weighted", source)})
    document = json.loads(encode_state(order, advanced(order, order.initial(), 7)))
    holder, key = within(document["datasets"], path)
    holder[key] = {name: own for name, own in holder[key].items() if name not in PLACE} | place
    with pytest.raises(SnapshotInvalid) as caught:
        decode_state(order, canonical(document))
    assert says in str(caught.value)


def test_states_of_two_runs_cannot_be_mixed(case: Case) -> None:
    # Samples moved from one source to the next: every sum is right, and no node knows of it.
    def change(document: dict[str, Any]) -> None:
        datasets = document["resume_state"]["datasets"]
        for i, sign in ((0, 1), (1, -1)):
            datasets[i]["samples"] += sign
            datasets[i]["token_offset"] += sign * 8

    with pytest.raises(
        SnapshotInvalid, match=r"resume_state.nodes.0.0: found .* of source 0, as that says itself"
    ):
        case.parse(case.changed(change))


def test_an_inner_node_must_count_what_its_children_count(case: Case) -> None:
    def change(document: dict[str, Any]) -> None:
        nodes = document["resume_state"]["nodes"][0]
        for i, sign in ((1, 1), (2, -1)):
            nodes[i][0] += sign
            nodes[i][1] += sign * 8
        document["resume_state"]["datasets"][1]["samples"] += 1
        document["resume_state"]["datasets"][1]["token_offset"] += 8

    with pytest.raises(
        SnapshotInvalid, match=r"resume_state.nodes.0.2: found .* of node 1, as that says itself"
    ):
        case.parse(case.changed(change))


def test_a_swapped_resume_state_is_refused_where_the_ledger_keeps_it_too(case: Case) -> None:
    damaged = json.loads(case.resume_state)
    damaged["nodes"][0].pop()
    with pytest.raises(SnapshotInvalid, match="children"):
        decode_state(case.order, canonical(damaged))
    for text in ("", "{", "null", case.resume_state[:-1]):
        with pytest.raises(SnapshotInvalid):
            decode_state(case.order, text)


# --- before the first join -------------------------------------------------------------------------


def start_of(run: str = "test", **fields: Any) -> str:
    document = {
        "format": SNAPSHOT_FORMAT,
        "version": SNAPSHOT_VERSION,
        "run": run,
        "stream": "train",
    }
    return seal(document | {"sample_index": 0, "total_tokens": 0, "digest": "0" * 32} | fields)


def test_the_state_of_a_run_that_has_not_begun_is_sample_0(case: Case) -> None:
    point = case.parse(start_of())
    assert (point.sample_index, point.base, point.run_uid, point.generation) == (0, None, None, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"sample_index": 1},
        {"total_tokens": 8},
        {"digest": "0" * 31 + "1"},
        {"run": "other"},
        {"seed": 8},
    ],
)
def test_only_sample_0_needs_no_resume_state(case: Case, fields: dict[str, Any]) -> None:
    with pytest.raises(SnapshotInvalid):
        case.parse(start_of(**fields))
