"""A run's receipts and its report, from its ledger, its figures, and by going forward to a sample index."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import NamedTuple

from tokenloom_proto.seal import canonical

from tokenloom_server.errors import BeyondHorizon
from tokenloom_server.figures import Figures
from tokenloom_server.history import History
from tokenloom_server.host import Host
from tokenloom_server.ledger.base import Opening
from tokenloom_server.peeking import Peeks
from tokenloom_server.receipt import GenerationReport, Range, Receipt, RunReport, SourceReport, Tokenizer
from tokenloom_server.state import ORDER_VERSION, SourceState, digest_hex
from tokenloom_server.stats import SourceStats

#: What the samples were made by.
PACKAGES = ("tokenloom", "gigatoken", "tokenizers", "pyarrow", "numpy", "xxhash")


class Unique(NamedTuple):
    """Tokens that were read at least once, and whether they are counted."""

    tokens: int
    exact: bool


class Accounts:
    """What one run has to show for its data. Thread-safe."""

    def __init__(self, host: Host, history: History, peeks: Peeks, figures: Figures) -> None:
        self._host = host
        self._history = history
        self._peeks = peeks
        self._figures = figures

    def receipt(self, sample_index: int | None) -> Receipt:
        """At a sample index, None for the committed one. Raises ``BeyondHorizon`` for what is not committed, or lies
        before what this run's ledger has, and what going forward raises."""
        host = self._host
        with host.lock:
            committed = host.committed or host.commit_of(host.order.initial(), "")
        lineage = lineage_of(self._history.openings())
        oldest = lineage[0].start_index if lineage else 0
        index = committed.sample_index if sample_index is None else sample_index
        if not oldest <= index <= committed.sample_index:
            raise BeyondHorizon(
                f"sample {index} is outside of what run {host.name!r} can prove: its ledger has samples {oldest} to "
                f"{committed.sample_index} (committed)"
            )
        if index == committed.sample_index:
            digest, tokens = committed.digest, committed.total_tokens
            samples = {spec: counters.samples for spec, counters in committed.counters.items()}
        else:
            state = self._peeks.state_at(index)
            digest, tokens = digest_hex(state.digest), state.total_tokens
            samples = {spec: source.samples for spec, source in zip(host.order.specs, state.sources, strict=True)}
        same = host.order.template(host.uid, host.stream, 0)
        return Receipt(
            run=host.name,
            stream=host.stream,
            run_uid=host.uid,
            sample_index=index,
            digest=digest,
            total_tokens=tokens,
            samples=samples,
            skipped=skipped_before(lineage, index),
            oldest_index=oldest,
            committed_index=committed.sample_index,
            seed=same["seed"],
            order_version=ORDER_VERSION,
            sequence_length=host.order.config.sequence_length,
            config_digest=same["config_digest"],
            manifest_digest=same["manifest_digest"],
            tokenizer=Tokenizer(**same["tokenizer"]),
        )

    def report(self) -> RunReport:
        """Of all that is committed. Raises the ledger's errors, and what going forward raises."""
        host, order = self._host, self._host.order
        openings = self._history.openings()
        with host.lock:
            committed, state = host.committed or host.commit_of(order.initial(), ""), host.committed_state
            generation = host.live.generation if host.live is not None else None
            # The end is known as soon as it is produced; here it counts once it is reached.
            over = generation is not None and generation.committed == generation.produced
            ended = generation.end.reason if generation is not None and generation.end is not None and over else None
        if state.sample_index != committed.sample_index:
            # The server was restarted, and has the boundary before it.
            state = self._peeks.state_at(committed.sample_index)
        figures = self._figures.sources(committed, state)
        sources = [self._source(figure, source) for figure, source in zip(figures, state.sources, strict=True)]
        same = order.template(host.uid, host.stream, 0)
        lineage = lineage_of(openings)
        return RunReport(
            run=host.name,
            stream=host.stream,
            run_uid=host.uid,
            made_at=host.wall_clock(),
            sample_index=committed.sample_index,
            total_tokens=committed.total_tokens,
            unique_tokens=sum(source.unique_tokens for source in sources),
            unique_is_exact=all(source.unique_is_exact for source in sources),
            digest=committed.digest,
            ended=ended,
            seed=order.config.seed,
            order_version=ORDER_VERSION,
            sequence_length=order.config.sequence_length,
            packing=order.config.packing,
            labels=order.config.labels,
            vocab_size=order.vocab_size,
            tokenizer=Tokenizer(**same["tokenizer"]),
            config_digest=same["config_digest"],
            manifest_digest=same["manifest_digest"],
            mixture=order.config.order_fields()["mixture"],
            sources=sources,
            generations=_generations(openings, lineage, committed.sample_index),
            skipped=skipped_before(lineage, committed.sample_index),
            software={"python": platform.python_version(), **_versions()},
        )

    def _source(self, figure: SourceStats, state: SourceState) -> SourceReport:
        shards = self._host.order.shards[figure.id]
        found = unique_tokens(figure, state)
        listed = [[shard.path, shard.size, shard.fingerprint] for shard in shards]
        return SourceReport(
            id=figure.id,
            spec=figure.spec,
            alias=figure.alias,
            files=len(shards),
            bytes=sum(shard.size for shard in shards),
            files_digest=hashlib.sha256(canonical(listed).encode()).hexdigest(),
            samples=figure.samples,
            rows=figure.rows,
            tokens=figure.tokens,
            share=figure.actual_share,
            target_share=figure.target_share,
            epochs=figure.epoch,
            unique_tokens=found.tokens,
            unique_is_exact=found.exact,
            dropped_tokens=figure.dropped_tokens,
            exhausted=figure.exhausted,
        )


def unique_tokens(figure: SourceStats, state: SourceState) -> Unique:
    """Of a source's tokens, those of rows that were read at least once.

    A source's tokens are one stream, epoch behind epoch, of which samples take all but the last tail. So one epoch has
    tokens / epochs of it where that many whole epochs were read; else it has at least tokens / (begun epochs), and at
    most tokens / (ended ones).
    """
    taken = figure.tokens + figure.dropped_tokens
    passes = figure.epochs if figure.exhausted and figure.epochs is not None else None
    if passes is not None and passes.is_integer():
        return Unique(min(figure.tokens, taken // int(passes)), True)
    ended = state.cursor.epoch if passes is None else math.floor(passes)
    if not ended:
        return Unique(figure.tokens, True)
    estimate = round(taken / figure.epoch)
    return Unique(min(max(estimate, math.ceil(taken / (ended + 1))), taken // ended), False)


def lineage_of(openings: Sequence[Opening]) -> list[Opening]:
    """The generations that the run's samples are of, oldest first: the present one, the one that it went on from, …,
    without those of which nothing is left."""
    by_number = {opening.generation: opening for opening in openings}
    found: list[Opening] = []
    opening = openings[-1] if openings else None
    while opening is not None:
        if not found or opening.start_index < _branched_at(found[-1]):
            found.append(opening)
        opening = by_number.get(opening.parent)
    return found[::-1]


def skipped_before(lineage: Sequence[Opening], index: int) -> list[Range]:
    """What was jumped over by restores, before a sample index."""
    skips = [Range(first=_branched_at(opening), behind=min(opening.start_index, index)) for opening in lineage]
    return [skipped for skipped in skips if skipped.first < skipped.behind]


def _branched_at(opening: Opening) -> int:
    """Where a generation left the one that it went on from."""
    return opening.start_index - int(getattr(opening, "skipped", 0))


def _generations(openings: Sequence[Opening], lineage: Sequence[Opening], end: int) -> list[GenerationReport]:
    kept = {before.generation: (before.start_index, _branched_at(behind)) for before, behind in pairwise(lineage)}
    if lineage:
        kept[lineage[-1].generation] = (lineage[-1].start_index, end)
    return [
        GenerationReport(
            generation=opening.generation,
            parent=opening.parent,
            attempt=opening.attempt,
            world_size=opening.world_size,
            batch_size=opening.batch_size,
            opened_at=opening.opened_at,
            start_index=opening.start_index,
            kept=Range(first=span[0], behind=span[1]) if (span := kept.get(opening.generation)) else None,
        )
        for opening in openings
    ]


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
