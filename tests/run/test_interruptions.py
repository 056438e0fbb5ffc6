"""Random mixtures, phases, revisions, topologies and interruptions: the run that was interrupted is the one that was
not. The mixer alone has such a test in ``mixing/test_mixer.py``; here files, packers, groups and state texts are real.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.catalog import spec_of
from support.corpora import (
    id_rows,
    mixture,
    parsed,
    random_tree,
    text_rows,
    write_jsonl,
    write_parquet,
    write_txt,
)
from support.timelines import revised
from tokenloom_proto.resume import counts_at
from tokenloom_server.api.grpc.messages import counts_of
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.core.state import State
from tokenloom_server.errors import ConfigError
from tokenloom_server.mixing import mixer
from tokenloom_server.mixing.policies import policies
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.order.size_estimates import measure
from tokenloom_server.order.steps import BatchPlan, StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.sources.manifest import Manifest, SourceFiles, build

#: Sources on disk, in three schemes; the last file of each appears when a run reads the others already.
SOURCES = 60
#: A run is looked at for so many samples.
LONGEST = 150


def _spec(number: int) -> str:
    return (
        f"parquet:data/{number}-*.parquet:ids",
        f"txt:data/{number}-*.txt:text",
        f"jsonl:data/{number}-*.jsonl:text",
    )[number % 3]


@dataclass(frozen=True)
class Corpus:
    folder: Path
    #: All files, the late ones, too.
    manifest: Manifest = field(repr=False)
    first: PipelineFactory = field(repr=False)

    def order(self, document: dict[str, Any]) -> PipelineFactory:
        """The order of a run that began before the late files were there."""
        config = parsed(document)
        named = {source.source for _, source in config.named_sources()}
        early = tuple(
            SourceFiles(one.spec, one.shards[:-1])
            for one in self.manifest.sources
            if one.spec in named
        )
        record = replace(
            self.first.record,
            config=config,
            manifest=Manifest(early),
            has_loss_mask=config.masks_loss,
        )
        factory = self.first.with_record(record)
        estimates = {source: measure(factory, source) for source in config.measured_sources}
        return factory.with_record(replace(record, size_estimates=estimates))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for number in range(SOURCES):
        for file in range(rng.choice([2, 2, 3])):
            path, rows = folder / f"data/{number}-{file}", rng.randint(3, 14)
            if number % 3 == 0:
                write_parquet(
                    path.with_suffix(".parquet"), [[7], *id_rows(rows, 10 * number + file, 40)]
                )
            else:
                write, suffix = (write_txt, ".txt") if number % 3 == 1 else (write_jsonl, ".jsonl")
                write(path.with_suffix(suffix), ["7", *text_rows(rows, 10 * number + file, 14)])
    manifest = build([spec_of(_spec(number)) for number in range(SOURCES)], folder)
    document = mixture(mixture={"policy": "sequential", "children": [{"source": _spec(1)}]})
    return Corpus(folder, manifest, builder.create(parsed(document), folder, None))


# --- what is drawn ---------------------------------------------------------------------------------------


PACKED: tuple[dict[str, Any], ...] = (
    {"packing": "best_fit", "pack_window_rows": 6},
    {"packing": "none", "long_rows": "split"},
)


def _document(rng: random.Random) -> dict[str, Any]:
    """A mixture file: any tree, endless sources where the run has an end, phases."""
    specs = [_spec(number) for number in rng.sample(range(SOURCES), 30)]
    document = mixture(
        seed=rng.randrange(2**63),
        sequence_length=rng.choice([4, 8, 8]),
        labels=rng.choice(["same", "shifted"]),
        last_micro_step=rng.choice(["drop", "pad"]),
        mixture=random_tree(rng, rng.choice([1, 2, 3]), iter(cycle(specs))),
    )
    root = document["mixture"]
    if rng.random() < 0.3:
        root["max_tokens"] = rng.randint(100, 1200)
    for child in _children(root):
        if "source" in child and rng.random() < 0.2:
            child["epochs"] = rng.choice(["inf", 0.4, 1.3, 2])
    if rng.random() < 0.25:
        until, phases = 0, []
        for _ in range(rng.randint(1, 2)):
            until += rng.randint(1, 400)
            phases.append({"until_tokens": until, **_phase(rng, document, specs)})
        document["phases"] = [*phases, _phase(rng, document, specs)]
    elif document["seed"] % 3 == 0:
        document |= PACKED[document["seed"] % len(PACKED)]
    return document


def _phase(rng: random.Random, document: dict[str, Any], specs: list[str]) -> dict[str, Any]:
    phase: dict[str, Any] = {}
    if document["last_micro_step"] == "pad" and rng.random() < 0.5:
        phase["sequence_length"] = rng.choice([4, 6, 8])
    if rng.random() < 0.4:
        phase["mixture"] = random_tree(rng, 2, iter(cycle(rng.sample(specs, len(specs)))))
    return phase


def _children(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for child in node["children"]:
        yield child
        if "children" in child:
            yield from _children(child)


def _change(
    rng: random.Random, timeline: Timeline, index: int, folder: Path
) -> tuple[str, dict[str, Any]]:
    """A change of any kind, which need not make sense for the mixture that is in force."""
    config = timeline.at(index).config
    places = dict(_places(config.mixture, "mixture"))
    name, other = rng.choice(list(places)), rng.choice(list(places))
    nodes = [place for place, is_node in places.items() if is_node]
    specs = [_spec(number) for number in rng.sample(range(SOURCES), 20)]
    paused = [
        child.name for child in (*config.sources, *config.nodes) if child.presence == "paused"
    ]
    kind = "resume" if paused and rng.random() < 0.4 else rng.choice(KINDS)
    match kind:
        case "weight":
            return kind, {"set": [{"child": name, "weight": rng.choice([0.01, 1, 2.5, 40])}]}
        case "policy":
            policy = rng.choice(
                ["least_consumed", "weighted", "round_robin", "sequential", "balance_remaining"]
            )
            return kind, {"set": [{"child": rng.choice(nodes), "policy": policy}]}
        case "pause":
            return kind, {"set": [{"child": child, "paused": True} for child in {name, other}]}
        case "resume":
            return kind, {"set": [{"child": child, "paused": False} for child in paused]}
        case "limits":
            limit = rng.choice(
                [("epochs", 0.5), ("epochs", 1), ("epochs", 3), ("max_tokens", rng.randint(8, 900))]
            )
            return kind, {"set": [dict([("child", name), limit])]}
        case "drop":
            return kind, {"drop": list({name, other})}
        case "add":
            child: dict[str, Any] = {"source": specs[0]}
            if rng.random() < 0.4:
                child = random_tree(rng, 2, iter(cycle(specs)))
            return kind, {"add": [{"child": child, "to": rng.choice(nodes)}]}
        case "bring back":
            gone = [source.source for source in config.sources if source.presence == "dropped"]
            return kind, {
                "add": [{"child": {"source": spec}, "to": rng.choice(nodes)} for spec in gone[:1]]
            }
        case "mixture":
            kept = [source.source for source in config.sources]
            return kind, {
                "mixture": random_tree(
                    rng, 2, iter(cycle(rng.sample(kept + specs, len(kept) + len(specs))))
                )
            }
        case "exclude":
            order, rows = timeline.at(index), []
            for source, shards in zip(config.sources, order.record.shard_paths, strict=True):
                # The first row of a file stays, so that no epoch is without a token.
                rows += [
                    {"spec": source.source, "shard": rng.choice(shards), "row": rng.randint(1, 14)}
                    for _ in range(rng.randint(0, 6))
                ]
            file = f"out-{rng.randrange(2**63)}.jsonl"
            (folder / file).write_text(
                "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
            )
            return kind, {"exclude": {"file": file}}
        case _:
            return kind, {"append_files": [rng.choice(config.sources).name]}


KINDS = (
    *(
        "weight",
        "policy",
        "pause",
        "resume",
        "limits",
        "drop",
        "add",
        "bring back",
        "mixture",
        "exclude",
    ),
    "append files",
)


def _places(node: NodeConfig, at: str) -> Iterator[tuple[str, bool]]:
    yield at, True
    for i, child in enumerate(node.children):
        if isinstance(child, NodeConfig):
            yield from _places(child, f"{at}.children.{i}")
        else:
            yield f"{at}.children.{i}", False


@dataclass
class Drawn:
    """One run."""

    rng: random.Random
    corpus: Corpus
    timeline: Timeline = field(init=False)
    made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        while True:
            try:
                self.timeline = Timeline(self.corpus.order(_document(self.rng)))
                return
            except ConfigError:
                continue  # such as an endless source whose rest a policy goes by

    def revise(self, least: int, count: int) -> None:
        """Some revisions from a sample index on, several at one index among them."""
        index = least
        for _ in range(count):
            index += self.rng.choice([0, 0, 1, 3, 8, 20])
            kind, change = _change(self.rng, self.timeline, index, self.corpus.folder)
            try:
                self.timeline = revised(self.timeline, index, **change)
                self.made.append(kind)
            except ConfigError:
                continue  # what is there already, or gone, or has no weight, cannot be changed so


# --- what it has to be -----------------------------------------------------------------------------------


@dataclass
class Whole:
    """The uninterrupted run, made with all revisions known from the beginning: one sample a step."""

    timeline: Timeline

    def __post_init__(self) -> None:
        pipeline = self.timeline.pipeline(self.timeline.initial())
        plan = BatchPlan(start_index=0, world_size=1, batch_size=1, group_micro_steps=LONGEST)
        self.samples: list[tuple[int, bytes]] = []
        self.points = [(0, 0)]
        while pipeline.sample_index < LONGEST:
            group = pipeline.begin_group(plan)
            pipeline.fill(group, LONGEST - pipeline.sample_index)
            count = len(group.marks)
            sources = group.source_ids[0, :count, 0].tolist()
            self.samples += [
                (source, bytes(ids))
                for source, ids in zip(sources, group.ids(0, 0, count), strict=True)
            ]
            self.points += [(mark.total_tokens, mark.digest) for mark in group.marks]
            if pipeline.ended is not None and "join again" not in pipeline.ended:
                break
            if pipeline.ended is not None:
                pipeline = self.timeline.pipeline(pipeline.state())
        self.end = len(self.samples)

    def states(self, indices: set[int]) -> dict[int, set[str]]:
        """The state texts at some sample indices, from one walk: at the end of the data also the one behind the pick
        that found nothing."""
        found = {}
        pipeline = self.timeline.pipeline(self.timeline.initial())
        for index in sorted(indices):
            while pipeline.sample_index < index:
                before = pipeline.sample_index
                pipeline.advance(index - before)
                if pipeline.ended is not None and pipeline.sample_index < index:
                    assert pipeline.sample_index > before, "the walk ends earlier"
                    pipeline = self.timeline.pipeline(pipeline.state())
            found[index] = {self.timeline.encode(pipeline.state())}
            if index == self.end:
                pipeline.advance(1)
                if pipeline.sample_index == index:
                    found[index].add(self.timeline.encode(pipeline.state()))
        return found


@dataclass
class Broken:
    """The same run in generations, each with a topology of its own, begun anew from a state's text."""

    rng: random.Random
    timeline: Timeline
    whole: Whole
    #: State texts that were met, with the sample index.
    texts: list[tuple[int, str]] = field(default_factory=list)

    def generation(self, text: str) -> str:
        """Goes on from a text for a while; returns the text at which the next one begins."""
        rng, timeline = self.rng, self.timeline
        pipeline = self._under_fewer_revisions(timeline.decode(text))
        plan = BatchPlan(
            start_index=pipeline.sample_index,
            world_size=rng.randint(1, 4),
            batch_size=rng.randint(1, 3),
            group_micro_steps=rng.randint(1, 6),
        )
        groups = []
        for _ in range(rng.randint(1, 3)):
            groups.append(self._group(pipeline, plan))
            if pipeline.ended is not None or pipeline.sample_index >= LONGEST:
                break
        return self._interruption(pipeline, groups)

    def _under_fewer_revisions(self, state: State) -> Pipeline:
        """A pipeline that learns of later revisions only while it is at work, as when they are made."""
        timeline = self.timeline
        known = sum(revision.sample_index <= state.sample_index for revision in timeline.revisions)
        fewer = timeline.with_revisions(
            timeline.revisions[: self.rng.randint(known, len(timeline.revisions))]
        )
        pipeline = fewer.pipeline(state)
        unknown = timeline.revisions[len(fewer.revisions) :]
        if unknown:
            pipeline.advance(self.rng.randrange(unknown[0].sample_index - state.sample_index))
            if pipeline.ended is None:
                pipeline.replace_switches(timeline.switches(pipeline.sample_index))
        return pipeline if pipeline.ended is None else timeline.pipeline(state)

    def _group(self, pipeline: Pipeline, plan: BatchPlan) -> StepGroup:
        rng, group = self.rng, pipeline.begin_group(plan)
        self.texts.append((group.begin, self.timeline.encode(group.base)))
        while len(group.marks) < plan.group_micro_steps and pipeline.ended is None:
            pipeline.fill(group, rng.randint(1, plan.group_micro_steps))
        self._compare(group, pipeline.ended is not None)
        for step in rng.sample(range(len(group.marks)), min(2, len(group.marks))):
            self.texts.append(
                (group.marks[step].sample_index, self.timeline.encode(group.state_after(step)))
            )
        return group

    def _compare(self, group: StepGroup, ended: bool) -> None:
        """Every rank's samples, and the digest behind each step, are the uninterrupted run's."""
        whole, plan, begin = self.whole, group.plan, group.begin
        for step, mark in enumerate(group.marks):
            if mark.sample_index <= whole.end:
                assert (mark.total_tokens, mark.digest) == whole.points[mark.sample_index]
            for rank in range(plan.world_size):
                first = begin + group.slice_of(step, rank) * plan.batch_size
                ids = group.ids(rank, step, step + 1)
                sources = group.source_ids[rank, step].tolist()
                for at, source, own in zip(
                    range(first, first + plan.batch_size), sources, ids, strict=True
                ):
                    if at < min(mark.sample_index, whole.end):
                        assert (source, bytes(own)) == whole.samples[at]
                    elif at >= mark.sample_index:
                        assert source == -1 and not any(own) and ended
            begin = mark.sample_index
            # What a client writes there, with what the wire carries, is what the server counts.
            base, state = (
                json.loads(self.timeline.encode(each))
                for each in (group.base, group.state_after(step))
            )
            first = self.rng.randint(0, step)
            since = (
                counts_of(group, first, self.rng.randint(step + 1, len(group.marks))),
                step - first + 1,
            )
            written = counts_at(base, mark.sample_index, mark.total_tokens, since)
            assert written == counts_at(state, mark.sample_index, mark.total_tokens)
            if mark.sample_index <= whole.end:
                taken = Counter(source for source, _ in whole.samples[: mark.sample_index])
                assert {spec: count["samples"] for spec, count in written.items()} == {
                    state["datasets"][source]["spec"]: samples for source, samples in taken.items()
                }

    def _interruption(self, pipeline: Pipeline, groups: list[StepGroup]) -> str:
        rng, timeline = self.rng, self.timeline
        group = rng.choice(groups)
        steps = len(group.marks)
        if steps and rng.random() < 0.4:
            return timeline.encode(group.state_after(rng.randrange(steps)))
        # Any sample index, from the boundary before it, as a snapshot is resumed.
        forward = timeline.pipeline(timeline.decode(timeline.encode(group.base)))
        forward.advance(rng.randint(0, group.end - group.begin))
        text = timeline.encode(forward.state())
        self.texts.append((forward.sample_index, text))
        return text


def _hold_together(corpus: Corpus, seed: int) -> tuple[Drawn, Whole]:
    """Draws a run and its interruptions, and compares them."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        if rng.random() < 0.3:
            # Runs of this size would see weights made anew once: the rule is the same with any number of samples.
            patch.setattr(mixer, "UPDATE_PICKS", rng.choice([1, 8, 16]))
        drawn = Drawn(rng, corpus)
        drawn.revise(rng.randint(0, 60), rng.choice([0, 3, 4, 5, 6]))
        whole = Whole(drawn.timeline)
        broken = Broken(rng, drawn.timeline, whole)
        text = drawn.timeline.encode(drawn.timeline.initial())
        for _ in range(4):
            text = broken.generation(text)
        expected = whole.states({index for index, _ in broken.texts if index <= whole.end})
    for index, found in broken.texts:
        if index <= whole.end:
            assert found in expected[index]
            assert drawn.timeline.encode(drawn.timeline.decode(found)) == found
        else:
            assert index <= LONGEST + 200
    return drawn, whole


@pytest.mark.timeout(300)
def test_runs_that_were_interrupted_are_those_that_were_not(corpus: Corpus) -> None:
    kinds: set[str] = set()
    met: set[str] = set()
    packings: set[str] = set()
    reached = ended = at_once = 0
    for seed in range(30):
        drawn, whole = _hold_together(corpus, seed)
        kinds |= set(drawn.made)
        packings.add(drawn.timeline.first.config.packing)
        met |= {
            node.policy for each in drawn.timeline.segments for node in each.factory.config.nodes
        }
        reached += any(0 < each.begin < whole.end for each in drawn.timeline.segments)
        ended += whole.end < LONGEST
        begins = [revision.sample_index for revision in drawn.timeline.revisions]
        at_once += len(set(begins)) < len(begins)
    # What it is worth.
    assert kinds == set(KINDS)
    assert met == set(policies())
    assert packings == {"concat", "best_fit", "none"}
    assert min(reached, ended, 30 - ended) > 3 and at_once > 4


@pytest.mark.timeout(900)
@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_any_run_that_was_interrupted_is_the_one_that_was_not(corpus: Corpus, seed: int) -> None:
    _hold_together(corpus, seed)
