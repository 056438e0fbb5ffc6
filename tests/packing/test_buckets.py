"""Batches from buckets: one shape each, in an order that is computed, exact from any of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.corpora import reread
from support.features import (
    LATENTS,
    MORE,
    SHAPES,
    document,
    latents,
    order_of,
    write_arrow,
    write_features,
)
from support.mixing import node
from support.timelines import revised
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import ConfigError, JoinRefused, SourceError
from tokenloom_server.mixing.policies import policies
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.order.steps import BatchPlan
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.packing.base import Batch
from tokenloom_server.packing.buckets import Epochs
from tokenloom_server.sources.tensor_buckets import BucketIndex

SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("features")
    write_features(found)
    return found


class Step(NamedTuple):
    source: int
    batch: Batch
    #: In the order of the run, whatever ranks they went to.
    samples: list[bytes]
    after: State


def steps(pipeline: Pipeline, world_size: int = 1, group_micro_steps: int = 3) -> Iterator[Step]:
    while pipeline.ended is None:
        plan = BatchPlan(
            start_index=pipeline.sample_index,
            world_size=world_size,
            batch_size=SIZE // world_size,
            group_micro_steps=group_micro_steps,
        )
        group = pipeline.begin_group(plan)
        pipeline.fill(group, group_micro_steps)
        for step in range(len(group.marks)):
            assert len(set(group.source_ids[:, step].ravel().tolist())) == 1, (
                "a step is of one source"
            )
            ranks = sorted(range(world_size), key=lambda rank: group.slice_of(step, rank))
            samples = [
                bytes(sample) for rank in ranks for sample in group.ids(rank, step, step + 1)
            ]
            yield Step(
                int(group.source_ids[0, step, 0]),
                group.batch_of(step),
                samples,
                group.state_after(step),
            )


def numbers_of(step: Step) -> list[int]:
    """The ``row`` column of each sample."""
    at = sum(feature.bytes for feature in step.batch.features[:-1])
    return [int(np.frombuffer(sample[at : at + 8], "<i8")[0]) for sample in step.samples]


def captions_of(step: Step) -> list[str]:
    at = sum(feature.bytes for feature in step.batch.features)
    aspect = len(step.batch.bucket)
    return [sample[at + aspect :].decode() for sample in step.samples]


def mixture(policy: str, nested: bool, **options: Any) -> dict[str, Any]:
    weights = {"numbers": {"weight": 2}, "points": {"weight": [[0, 1], [40, 3]]}, "nothing": {}}
    first = {"source": LATENTS, "epochs": 2, **weights[policies()[policy].takes], **options}
    if not nested:
        return node(policy, first, {"source": MORE, **options})
    return node("weighted", node(policy, first), {"source": MORE, "weight": 0.5})


def whole_of(order: PipelineFactory) -> list[Step]:
    return list(steps(order.pipeline(order.initial())))


SHUFFLED = ({"shuffle": "rows"}, {"shuffle": "rows", "shuffle_window_rows": 2})
RUNS: dict[str, dict[str, Any]] = {
    **{f"{policy}-False": mixture(policy, False) for policy in policies()},
    **{f"{policy}-True": mixture(policy, True) for policy in ("round_robin", "schedule")},
    **{f"shuffled-{i}": mixture("round_robin", False, **of) for i, of in enumerate(SHUFFLED)},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_rest_from_every_step_on_any_ranks_equals_the_uninterrupted_run(
    folder: Path, name: str
) -> None:
    order = order_of(folder, document(mixture=RUNS[name]))
    whole = whole_of(order)
    assert whole
    for at, step in enumerate(whole):
        assert step.after.sample_index == (at + 1) * SIZE
        assert reread(order, step.after) == step.after
        rest = steps(
            order.pipeline(step.after), world_size=(1, 2, 4)[at % 3], group_micro_steps=1 + at % 4
        )
        # The whole rest now and then, a few steps from everywhere.
        last = at + 4 if at % 7 else len(whole)
        assert list(islice(rest, last - at - 1)) == whole[at + 1 : last]


def test_all_ranks_of_a_step_get_the_bucket_and_its_shape(folder: Path) -> None:
    order = order_of(folder, document())
    buckets = set()
    for step in steps(order.pipeline(order.initial()), world_size=4):
        latent, aspect, caption, row = step.batch.features
        assert latent == ("latent", "float16", SHAPES[step.batch.bucket])
        assert (aspect, caption, row) == (
            ("aspect", "string", ()),
            ("caption", "string", ()),
            ("row", "int64", ()),
        )
        assert len(step.samples) == SIZE
        buckets.add((step.source, step.batch.bucket))
    assert len(buckets) == 6


def test_each_row_comes_at_most_once_an_epoch_with_its_own_values_and_the_remainder_is_lost(
    folder: Path,
) -> None:
    order = order_of(folder, document())
    tables = [
        pa.concat_tables([pq.read_table(folder / "latents" / f"{i}.parquet") for i in range(2)]),
        latents(29, 2000),
    ]
    whole = whole_of(order)
    seen: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    by_caption = [{row["caption"]: row for row in table.to_pylist()} for table in tables]
    given = Counter[int]()
    for step in whole:
        epoch = given[step.source] // (order.readers.bucket_epochs(step.source).batches * SIZE)
        given[step.source] += SIZE
        for sample, caption, number in zip(
            step.samples, captions_of(step), numbers_of(step), strict=True
        ):
            row = by_caption[step.source][caption]
            assert (row["aspect"], row["row"]) == (step.batch.bucket, number)
            assert (
                sample[: step.batch.features[0].bytes]
                == np.array(row["latent"], np.float16).tobytes()
            )
            seen[step.source, epoch].append(caption)
    assert all(len(set(captions)) == len(captions) for captions in seen.values())
    lost = [
        sum(count % SIZE for count in Counter(table.column("aspect").to_pylist()).values())
        for table in tables
    ]
    assert all(
        len(captions) == len(tables[source]) - lost[source]
        for (source, _), captions in seen.items()
    )
    end = whole[-1].after
    assert [source.row_counts.lost_tokens for source in end.sources] == [2 * lost[0], lost[1]]
    assert sorted(seen) == [(0, 0), (0, 1), (1, 0)]
    assert len(end.sources) == 2
    assert seen[0, 0] != seen[0, 1], "each epoch has an order of its own"


def test_shuffled_rows_are_all_of_an_epoch_in_an_order_of_its_own_within_their_windows() -> None:
    counts, size, width = [103, 40, 9], 4, 16
    epochs = Epochs(an_index(counts), size=size, seed=3, source_id=0, epochs=2.0, window_rows=width)
    orders = []
    for epoch in range(2):
        buckets, _ = epochs.drawn(epoch)
        found: defaultdict[int, list[int]] = defaultdict(list)
        for batch in range(epochs.count(epoch)):
            shards, rows = epochs.rows_of(epoch, batch)
            assert not shards.any()
            found[int(buckets[batch])] += rows.tolist()
        for bucket, count in enumerate(counts):
            begin = sum(counts[:bucket])
            rows_here = [row - begin for row in found[bucket]]
            assert len(set(rows_here)) == len(rows_here) == count // size * size
            assert set(rows_here) <= set(range(count))
            # Each window as a whole before the next, and what is left after whole ones last.
            windows = [row // width for row in rows_here]
            changes = [
                window for at, window in enumerate(windows) if not at or windows[at - 1] != window
            ]
            assert len(set(changes)) == len(changes)
            assert changes[-1] == count // width
            assert rows_here != sorted(rows_here)
        orders.append(dict(found))
    assert orders[0] != orders[1]


@pytest.mark.parametrize("name", ["shuffled-0", "shuffled-1"])
def test_shuffled_runs_have_as_many_rows_as_unshuffled_ones_in_another_order(
    folder: Path, name: str
) -> None:
    whole = whole_of(order_of(folder, document(mixture=RUNS[name])))
    assert len(whole) == len(whole_of(order_of(folder, document())))
    rows = [
        number
        for step in whole
        if step.source == 1 and step.batch.bucket == "square"
        for number in numbers_of(step)
    ]
    assert rows != sorted(rows)


def an_index(counts: list[int]) -> BucketIndex:
    begins = np.cumsum([0, *counts], dtype=np.int64)
    return BucketIndex(
        keys=tuple(map(str, range(len(counts)))),
        begins=begins,
        rows=np.arange(begins[-1], dtype=np.uint32),
        shard_ends=np.array([0, begins[-1]], np.int64),
        left_out=0,
    )


def test_over_any_prefix_a_buckets_share_is_that_of_its_batches() -> None:
    counts = [6000, 3000, 1000, 7]
    epochs = Epochs(an_index(counts), size=1, seed=3, source_id=0, epochs=1.0)
    buckets, before = epochs.drawn(0)
    assert sorted(zip(buckets.tolist(), before.tolist(), strict=True)) == [
        (bucket, number) for bucket, count in enumerate(counts) for number in range(count)
    ]
    total = sum(counts)
    for prefix in (100, 1000, 5000, 9000):
        for bucket, count in enumerate(counts):
            drawn = int((buckets[:prefix] == bucket).sum())
            share = count / total
            # Without replacement: hypergeometric, so within five standard deviations.
            deviation = (prefix * share * (1 - share) * (total - prefix) / (total - 1)) ** 0.5
            assert abs(drawn - prefix * share) <= 5 * deviation + 1
    for bucket in range(len(counts)):
        assert before[buckets == bucket].tolist() == list(range(counts[bucket]))


def test_a_fraction_of_an_epoch_gives_that_part_of_its_batches_and_loses_nothing_itself() -> None:
    epochs = Epochs(an_index([10, 5]), size=2, seed=3, source_id=0, epochs=1.5)
    assert [epochs.count(epoch) for epoch in range(3)] == [7, 3, 0]
    assert [epochs.lost_in(epoch) for epoch in range(3)] == [1, 0, 0]


def test_a_source_without_a_full_batch_drops_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    write_arrow(tmp_path / "few", latents(2, 7))
    write_arrow(tmp_path / "long", latents(60, 8))
    children = [{"source": "arrow:few:*"}, {"source": "arrow:long:*"}]
    order = order_of(tmp_path, document(mixture=node("weighted", *children)))
    whole = whole_of(order)
    assert {step.source for step in whole} == {1}
    assert whole[-1].after.sources[0].exhausted


def test_steps_are_whole_batches_and_no_place_lies_within_one(folder: Path) -> None:
    order = order_of(folder, document())
    pipeline = order.pipeline(order.initial())
    group = pipeline.begin_group(
        BatchPlan(start_index=0, world_size=1, batch_size=2, group_micro_steps=1)
    )
    with pytest.raises(JoinRefused, match=r"a micro-step of 2 samples .* global batches of 4"):
        pipeline.fill(group, 1)
    with pytest.raises(ConfigError, match=r"sample 6 lies within a global batch of 4.*such as 4"):
        order.pipeline(order.initial()).advance(6)


def test_limits_and_phases_end_with_a_whole_batch(folder: Path) -> None:
    children = [{"source": LATENTS, "max_tokens": 10}, {"source": MORE}]
    order = order_of(
        folder,
        document(
            mixture=node("round_robin", *children),
            phases=[
                {"until_tokens": 17},
                {"mixture": node("sequential", {"source": MORE, "max_tokens": 27})},
            ],
        ),
    )
    timeline = Timeline(order)
    assert [segment.begin for segment in timeline.segments] == [0, 20]
    assert (timeline.index_at(17), timeline.index_at(20), timeline.index_at(21)) == (20, 20, 24)
    pipeline = timeline.pipeline(timeline.initial())
    found = list(steps(pipeline))
    assert [step.source for step in found[:5]] == [0, 1, 0, 1, 1]
    assert [step.source for step in found[5:]] == [1] * 3
    assert found[-1].after.sources[1].samples == 24


def test_what_was_read_again_from_the_cache_is_the_same(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = order_of(folder, document())
    cached = sorted((folder / "index").glob("buckets-*"))
    assert len(cached) == 2
    again = order_of(folder, document())
    for source in range(2):
        one, other = (
            (index.keys, index.rows.tolist(), index.shard_ends.tolist())
            for index in (each.readers.bucket_epochs(source).index for each in (first, again))
        )
        assert one == other
    data = bytearray(cached[0].read_bytes())
    rows = [first.readers.bucket_epochs(source).index.rows.tobytes() for source in range(2)]
    data[max(data.find(each) for each in rows)] ^= 1
    cached[0].write_bytes(data)
    order_of(folder, document())
    assert "is unusable (its checksum is another one) and is made anew" in caplog.text
    cached[0].write_bytes(data[:11])
    order_of(folder, document())
    assert caplog.text.count("is made anew") == 2


def test_rows_in_an_object_store_come_in_the_same_order(folder: Path, tmp_path: Path) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    for path in [*(folder / "latents").iterdir(), *(folder / "more").iterdir()]:
        store.pipe(f"/buckets/{path.parent.name}/{path.name}", path.read_bytes())
    children = [
        {"source": "parquet:memory://buckets/latents/*.parquet:*", "weight": 2, "epochs": 2},
        {"source": "arrow:memory://buckets/more:*"},
    ]
    order = order_of(tmp_path, document(mixture=node("least_consumed", *children)))
    whole = whole_of(order)
    assert digest_hex(whole[-1].after.digest) == GOLDEN_DIGEST


def test_revisions_bring_and_pause_sources_at_whole_batches_and_leave_the_buckets(
    tmp_path: Path,
) -> None:
    write_features(tmp_path)
    write_arrow(tmp_path / "late", latents(40, 77))
    for policy in ("round_robin", "balance_remaining"):
        children = [
            {"source": LATENTS, "alias": "latents", "epochs": 2},
            {"source": MORE, "alias": "more"},
        ]
        order = order_of(tmp_path, document(mixture=node(policy, *children)))
        timeline = Timeline(order)
        revised_course = revised(
            timeline, 8, add=[{"child": {"source": "arrow:late:*", "alias": "late"}}]
        )
        revised_course = revised(revised_course, 24, set=[{"child": "latents", "paused": True}])
        whole = list(steps(revised_course.pipeline(revised_course.initial()), group_micro_steps=5))
        assert {step.source for step in whole[:2]} <= {0, 1}
        assert 0 not in {step.source for step in whole[6:]}
        sources = Counter(step.source for step in whole)
        assert (sources[1], sources[2]) == (
            order.readers.bucket_epochs(1).batches,
            revised_course.at(24).readers.bucket_epochs(2).batches,
        )
        samples = [sample for step in whole for sample in step.samples]
        for at, step in enumerate(whole):
            again = revised_course.decode(revised_course.encode(step.after))
            rest = list(steps(revised_course.pipeline(again), world_size=2))
            assert [sample for more in rest for sample in more.samples] == samples[
                (at + 1) * SIZE :
            ]
    with pytest.raises(ConfigError, match="sample 10 lies within a global batch of 4"):
        revised(timeline, 10, set=[{"child": "latents", "paused": True}])
    with pytest.raises(ConfigError, match="append_files: this run is made of batches from buckets"):
        revised(timeline, 8, append_files=["latents"])


def by_length(folder: Path, **batching: Any) -> PipelineFactory:
    return order_of(
        folder,
        document(
            batching={"bucket_by": "length(audio)", **batching},
            global_batch_size=4,
            mixture=node("sequential", {"source": "arrow:audio:*"}),
        ),
    )


def write_audio(folder: Path, lengths: list[int], mel_lengths: list[int] | None = None) -> None:
    audio = [[i + j / 8 for j in range(length)] for i, length in enumerate(lengths)]
    mel = [[[k + j for k in range(3)] for j in range(length)] for length in mel_lengths or lengths]
    write_arrow(
        folder / "audio",
        pa.table(
            {
                "audio": pa.array(audio, pa.list_(pa.float32())),
                "mel": pa.array(mel, pa.large_list(pa.list_(pa.int16(), 3))),
                "speaker": pa.array(range(len(lengths)), pa.uint8()),
            }
        ),
    )


def test_lengths_are_buckets_of_their_own_without_edges(tmp_path: Path) -> None:
    write_audio(tmp_path, [3, 5] * 9)
    found = whole_of(by_length(tmp_path))
    assert Counter(step.batch.bucket for step in found) == {"3": 2, "5": 2}
    for step in found:
        length = int(step.batch.bucket)
        assert [feature.shape for feature in step.batch.features] == [(length,), (length, 3), ()]


def test_with_edges_rows_are_padded_to_them_and_say_how_long_they_are(tmp_path: Path) -> None:
    lengths = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 4, 4, 8, 8]
    write_audio(tmp_path, lengths)
    order = by_length(tmp_path, edges=[4, 8], pad=["mel"], columns=["mel", "speaker", "audio"])
    index = order.readers.bucket_epochs(0).index
    assert (index.keys, index.counts.tolist(), index.left_out) == (("4", "8"), [7, 6], 1)
    assert order.readers.bucket_epochs(0).lost_rows == 1 + 3 + 2
    for step in steps(order.pipeline(order.initial())):
        edge = int(step.batch.bucket)
        assert step.batch.features == (
            ("mel", "int16", (edge, 3)),
            ("speaker", "uint8", ()),
            ("audio", "float32", (edge,)),
            ("audio_length", "int64", ()),
        )
        for sample in step.samples:
            mel = np.frombuffer(sample[: edge * 6], "<i2").reshape(edge, 3)
            speaker = sample[edge * 6]
            audio = np.frombuffer(sample[edge * 6 + 1 : edge * 10 + 1], "<f4")
            length = lengths[speaker]
            assert int.from_bytes(sample[-8:], "little") == length
            assert audio.tolist() == [speaker + j / 8 for j in range(length)] + [0] * (
                edge - length
            )
            assert mel.tolist() == [[k + j for k in range(3)] for j in range(length)] + [
                [0] * 3
            ] * (edge - length)


def test_a_row_of_another_shape_or_length_is_named(tmp_path: Path) -> None:
    write_audio(tmp_path, [4, 4, 4, 4], [4, 4, 5, 4])
    order = by_length(tmp_path)
    with pytest.raises(
        SourceError, match=r"row 2: column 'mel' has the shape \[5, 3\], but .*row 0 .*\[4, 3\]"
    ):
        whole_of(order)
    padded = by_length(tmp_path, edges=[8], pad=["mel"])
    with pytest.raises(
        SourceError, match=r"row 2: column 'mel' has the length 5, but column 'audio' has 4"
    ):
        whole_of(padded)
    lone = by_length(tmp_path, edges=[8], columns=["audio", "speaker"])
    assert len(whole_of(lone)) == 1


def of_more(folder: Path, **fields: Any) -> PipelineFactory:
    return order_of(folder, document(mixture=node("sequential", {"source": MORE}), **fields))


def test_what_names_no_bucket_is_refused_with_the_file_and_the_row(tmp_path: Path) -> None:
    write_arrow(tmp_path / "more", pa.table({"aspect": ["a", None], "row": [1, 2]}))
    for bucket_by, says in (
        ("aspect", r"more/data-00000-of-00001.arrow.*row 1 has a null in column 'aspect'"),
        ("shape", r"has no column 'shape', which bucket_by names; its columns are aspect, row"),
        (
            "length(row)",
            r"bucket_by is length\(row\), but that column is of type int64, not a list",
        ),
    ):
        with pytest.raises(SourceError, match=says):
            of_more(tmp_path, batching={"bucket_by": bucket_by})
    write_arrow(tmp_path / "more", pa.table({"aspect": pa.array([0.5]), "row": [1]}))
    with pytest.raises(
        SourceError, match=r"column 'aspect' of type double; expected integers, text, booleans"
    ):
        of_more(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            pa.array([[1, 2], [1, 2], [1, None]], pa.list_(pa.int32())),
            "row 2 has a null in column 'key'",
        ),
        (
            pa.DictionaryArray.from_arrays([0, 0, 1], pa.array(["a", None])),
            "row 2 has a null in column 'key'",
        ),
        (
            pa.DictionaryArray.from_arrays([0, 0, 1], pa.array([1, None])),
            "row 2 has a null in column 'key'",
        ),
        (
            pa.array([1, 2, 2**64 - 1], pa.uint64()),
            "column 'key' names buckets, which are int64, but .*18446744073709551615",
        ),
    ],
    ids=["item of a list", "text of a dictionary", "number of a dictionary", "beyond int64"],
)
def test_a_value_that_is_hidden_in_another_and_names_no_bucket_is_refused_alike(
    tmp_path: Path, values: pa.Array, message: str
) -> None:
    write_arrow(tmp_path / "more", pa.table({"key": values, "row": [0, 1, 2]}))
    with pytest.raises(SourceError, match=rf"more/data-00000-of-00001.arrow.*{message}"):
        of_more(tmp_path, batching={"bucket_by": "key", "columns": ["row"]})


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        (pa.array([10, 9, 10, 9], pa.int16()), ("9", "10")),
        (pa.array(["b", "a", "b", "a"]).dictionary_encode(), ("a", "b")),
        (pa.array([True, False, True, False]), ("false", "true")),
        (
            pa.array([[64, 32], [32, 64], [64, 32], [32, 64]], pa.list_(pa.int32(), 2)),
            ("32x64", "64x32"),
        ),
        (pa.array([[64], [32, 64], [64], [32, 64]], pa.list_(pa.int64())), ("32x64", "64")),
    ],
    ids=["integers", "dictionary", "booleans", "fixed lists", "lists"],
)
def test_values_of_many_types_name_buckets(
    tmp_path: Path, values: pa.Array, keys: tuple[str, ...]
) -> None:
    write_arrow(tmp_path / "more", pa.table({"key": values, "row": [0, 1, 2, 3]}), batch_rows=3)
    order = of_more(
        tmp_path, batching={"bucket_by": "key", "columns": ["row"]}, global_batch_size=2
    )
    index = order.readers.bucket_epochs(0).index
    assert (index.keys, index.counts.tolist()) == (keys, [2, 2])


def test_the_order_is_what_it_was(folder: Path) -> None:
    # Golden: when this changes, ORDER_VERSION has to.
    order = order_of(folder, document())
    whole = whole_of(order)
    assert [step.source for step in whole] == GOLDEN_SOURCES
    assert [step.batch.bucket[0] for step in whole] == list(GOLDEN_BUCKETS)
    assert digest_hex(whole[-1].after.digest) == GOLDEN_DIGEST


GOLDEN_SOURCES = [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, *[0] * 19]
GOLDEN_BUCKETS = "tsttwtwwwsttstwssssssttwswsssstttsws"
GOLDEN_DIGEST = "20a6a74175a9b571dd9d3e5203d62603"
