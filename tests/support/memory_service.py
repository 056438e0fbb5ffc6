"""``Runs`` that are held in memory, for tests of the layers above them. They really keep and seal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tokenloom_proto.seal import seal, unseal
from tokenloom_server.api.auth import Access
from tokenloom_server.api.mixture_origin import MixtureOrigin
from tokenloom_server.api.service import Reason, RunProblem, Runs
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.core.measures import LabelledCounter, Measures, StorageMeasures
from tokenloom_server.core.state import RowCounts, digest_hex
from tokenloom_server.errors import (
    BeyondHorizon,
    ConfigError,
    NotFound,
    SnapshotInvalid,
    TokenloomError,
)
from tokenloom_server.order.readers_stats import ReaderNode, ReaderSource, ReadersStats
from tokenloom_server.planning.plan import PlannedEnding, PlannedSegment, PlannedSource, RunPlan
from tokenloom_server.reports.history import RunEvent, RunEvents, RunHistory, SourceHistory
from tokenloom_server.reports.stats import (
    LedgerStats,
    MixtureInfo,
    NextLaunch,
    PlannedRevision,
    RankStats,
    ReportStats,
    RevisionInfo,
    RunLosses,
    RunStats,
    SnapshotInfo,
    SourceStats,
)
from tokenloom_server.run.recorder import Recent
from tokenloom_tools.receipts import Receipts
from tokenloom_tools.reports.documents import (
    Receipt,
    RunReport,
    SourceReport,
    Tokenizer,
    TracedDocument,
    TracedMicroStep,
    TracedRank,
    TracedSample,
)
from tokenloom_tools.trace import Traces

#: With a part for each metric about it.
ACCESS = Access(tls=cast("Any", SimpleNamespace(is_stale=False)))
RUNS_DIR = cast("Any", SimpleNamespace(is_stale=False))


def source_stats(source_id: int = 0, **figures: Any) -> SourceStats:
    return SourceStats(
        **{
            "id": source_id,
            "spec": f"parquet:data/source-{source_id}-*.parquet:text",
            "alias": f"source-{source_id}",
            "group": figures.get("alias", f"source-{source_id}"),
            "target_share": 0.5,
            "expected_share": 0.5,
            "actual_share": 0.5,
            "window_share": 0.5,
            "samples": 2048,
            "rows": 1311,
            "tokens": 1_048_576,
            "epoch": 0.42,
            "epochs": 1.0,
            "exhausted": False,
            "dropped_tokens": 0,
            "excluded_rows": 0,
            **RowCounts()._asdict(),
            "fill_rate": 1.0,
            "cut_rate": 0.0,
            "skipped_samples": 0,
            "skipped_rows": 0,
            "skipped_tokens": 0,
            "loss": None,
            "last_loss": None,
            "remaining_samples": 2828,
        }
        | figures
    )


def rank_stats(rank: int = 0, **figures: Any) -> RankStats:
    heard = {"last_heard_s": 0.2, "waited_s": 3.5, "release": "0.1.0"}
    figures = {"rank": rank, "state": "connected", "position": 4104, "lag": 0} | heard | figures
    return RankStats(**{"connected": figures["state"] == "connected"} | figures)


def report_stats(**figures: Any) -> ReportStats:
    return ReportStats(
        **{
            "sample_index": 4096,
            "total_tokens": 2_097_152,
            "step": 512,
            "loss": 3.25,
            "smoothed_loss": 3.3,
            "learning_rate": 6e-4,
            "age_s": 1.5,
        }
        | figures
    )


def readers_stats(**figures: Any) -> ReadersStats:
    work: dict[str, Any] = {
        "answers": 12,
        "tokens": 1_000_000,
        "cpu_s": 0.0415,
        "ns_per_token": 41.5,
    }
    source = ReaderSource(id=0, alias="code", rows_ahead=5000, asked_again=3, **work)
    return ReadersStats(
        **{"away": "", "nodes": [ReaderNode(name="a-node", cpus=4.0, **work)], "sources": [source]}
        | figures
    )


def run_stats(run: str = "wiki-and-code", **figures: Any) -> RunStats:
    return RunStats(
        **{
            "run": run,
            "stream": "train",
            "streams": ["validation"],
            "run_uid": "6f0c2f6d9b7a4b5e",
            "seed": 7,
            "generation": 3,
            "leads": True,
            "server_epoch": 2,
            "world_size": 2,
            "batch_size": 4,
            "sequence_length": 512,
            "vocab_size": 258,
            "pad_id": 0,
            "end_of_text_id": 257,
            "count": "positions",
            "sample_index": 4096,
            "produced_index": 4160,
            "digest": digest_hex(0x5EED),
            "total_tokens": 2_097_152,
            "real_tokens": 2_097_152,
            "skipped_tokens": 0,
            "tokens_per_s": 81_234.5,
            "window_samples": 4800,
            "window_fill": 0.25,
            "waiting_for": "",
            "opening": False,
            "going_forward": "",
            "waiting_reason": None,
            "data_wait_share": 0.02,
            "straggler": None,
            "ended": None,
            "exhausted": False,
            "error": None,
            "warning": "",
            "tokenizer": "gigatoken 0.10.0",
            "revision": 1,
            "skips": {96: 12},
            "pin": None,
            "next_revision": PlannedRevision(number=2, sample_index=8192, eta_s=25.8),
            "reported": None,
            "sources": [source_stats(0, alias="code"), source_stats(1, alias="prose")],
            "readers": None,
            "ranks": [rank_stats(0), rank_stats(1, position=4096, lag=8)],
            "ledger": LedgerStats(
                backend="sqlite:///tokenloom.db",
                available=True,
                error=None,
                last_commit_index=4096,
                last_commit_age_s=0.4,
            ),
        }
        | figures
    )


def run_history(
    run: str = "wiki-and-code", points: int = 0, **tokens: list[int | None]
) -> RunHistory:
    """So many points, ten seconds apart; ``tokens`` by alias."""
    shares = [0.5] * points
    return RunHistory(
        run=run,
        stream="train",
        every_s=10.0,
        time=[1.8e9 + 10 * i for i in range(points)],
        generation=[1] * points,
        sample_index=[64 * (i + 1) for i in range(points)],
        total_tokens=[64 * 512 * (i + 1) for i in range(points)],
        rewound=[False] * points,
        world_size=[8] * points,
        tokens_per_s=[1e6] * points,
        data_wait_share=[0.01] * points,
        window_fill=[0.9] * points,
        loss=[3.0] * points,
        learning_rate=[6e-4] * points,
        step=[8 * (i + 1) for i in range(points)],
        sources=[
            SourceHistory(
                id=i,
                spec=f"parquet:{alias}.parquet:text",
                alias=alias,
                tokens=counts,
                target_share=shares,
                expected_share=shares,
                actual_share=shares,
                window_share=shares,
                loss=[3.0] * points,
                epoch=[0.1] * points,
            )
            for i, (alias, counts) in enumerate(tokens.items())
        ],
    )


def run_event(number: int = 0, **figures: Any) -> RunEvent:
    position = {"sample_index": 64, "total_tokens": 64 * 512, "generation": 1, "rewound": False}
    event = {"kind": "launch", "text": "generation 1 began", "author": ""}
    return RunEvent(**{"id": number, "time": 1.8e9 + number} | position | event | figures)


def run_plan(run: str = "wiki-and-code", **figures: Any) -> RunPlan:
    source = {
        "rows": 10_000,
        "tokens_per_row": 512.5,
        "tokens_per_epoch": 5_125_000,
        "epochs": 1.0,
        "epochs_read": 1.0,
        "tokens": 5_124_608,
        "share": 0.5,
        "exhausted": True,
        "exhausted_at_tokens": 10_249_216,
        "exhausted_at_sample": 20_018,
    }
    return RunPlan(
        **{
            "run": run,
            "sequence_length": 512,
            "count": "positions",
            "labels": "same",
            "last_micro_step": "drop",
            "from_sample_index": 4096,
            "from_tokens": 2_097_152,
            "until_sample_index": 20_018,
            "until_tokens": 10_249_216,
            "ends": True,
            "reason": "every source is exhausted",
            "sources": [
                PlannedSource(id=i, spec=f"parquet:{alias}.parquet:text", alias=alias, **source)
                for i, alias in enumerate(("code", "prose"))
            ],
            "endings": [
                PlannedEnding(
                    tokens=10_249_216, sample_index=20_018, name=alias, why="is exhausted"
                )
                for alias in ("code", "prose")
            ],
            "segments": [
                PlannedSegment(from_tokens=2_097_152, until_tokens=10_249_216, shares=[0.5, 0.5])
            ],
        }
        | figures
    )


_TOKENIZER = Tokenizer(engine="gigatoken", version="0.10.0", digest="ab" * 32)


def run_receipt(stats: RunStats, index: int) -> Receipt:
    return Receipt(
        run=stats.run,
        stream=stats.stream,
        run_uid=stats.run_uid,
        sample_index=index,
        digest=digest_hex(index),
        total_tokens=index * stats.sequence_length,
        samples={source.spec: index // len(stats.sources) for source in stats.sources},
        revisions=[],
        oldest_index=0,
        committed_index=stats.sample_index,
        seed=stats.seed,
        order_version=3,
        sequence_length=stats.sequence_length,
        config_digest="cd" * 32,
        manifest_digest="ef" * 32,
        tokenizer=_TOKENIZER,
    )


def run_report(stats: RunStats, **fields: Any) -> RunReport:
    sources = [
        SourceReport(
            id=source.id,
            spec=source.spec,
            alias=source.alias,
            files=3,
            bytes=12_345_678,
            files_digest="0a" * 32,
            commits=[],
            samples=source.samples,
            rows=source.rows,
            tokens=source.tokens,
            skipped_tokens=0,
            excluded_rows=0,
            share=source.actual_share,
            expected_share=source.expected_share,
            target_share=source.target_share,
            epochs=source.epoch,
            unique_tokens=source.tokens,
            unique_is_exact=True,
            dropped_tokens=0,
            exhausted=False,
        )
        for source in stats.sources
    ]
    document: dict[str, Any] = {
        "run": stats.run,
        "stream": stats.stream,
        "run_uid": stats.run_uid,
        "made_at": 1.8e9,
        "sample_index": stats.sample_index,
        "total_tokens": stats.total_tokens,
        "consumed_tokens": stats.total_tokens,
        "unique_tokens": stats.total_tokens,
        "unique_is_exact": True,
        "digest": stats.digest,
        "ended": None,
        "seed": stats.seed,
        "order_version": 3,
        "sequence_length": stats.sequence_length,
        "packing": "concat",
        "labels": "same",
        "vocab_size": 50_257,
        "tokenizer": _TOKENIZER,
        "config_digest": "cd" * 32,
        "manifest_digest": "ef" * 32,
        "mixture": {"policy": "least_consumed"},
        "sources": sources,
        "generations": [],
        "parent_run": None,
        "revisions": [],
        "exclusions": [],
        "software": {"tokenloom": "0.1.0"},
    }
    return RunReport(**document | fields)


def run_measures() -> Measures:
    lock = threading.Lock()
    return Measures(lock, StorageMeasures(lock))


@dataclass
class MemoryService(Runs):
    """Set ``runs``, ``fault`` or ``reason`` from a test, at any time."""

    runs: dict[str, RunStats] = field(default_factory=dict)
    saved: dict[str, dict[str, str]] = field(default_factory=dict)
    restored: dict[str, NextLaunch] = field(default_factory=dict)
    revisions: dict[str, list[RevisionInfo]] = field(default_factory=dict)
    histories: dict[str, RunHistory] = field(default_factory=dict)
    happened: dict[str, list[RunEvent]] = field(default_factory=dict)
    broken: list[RunProblem] = field(default_factory=list)
    reason: str | None = None
    """What ``not_ready`` answers."""
    fault: Exception | None = None
    """Raised by every call about a run."""
    gate: threading.Event | None = None
    """Calls about a run wait for it."""
    calls: int = 0
    identity: str = "0123456789abcdef"
    without_text: bool = False
    """Whether the runs have no tokeniser."""
    rpc_errors: LabelledCounter = field(default_factory=lambda: LabelledCounter(threading.Lock()))
    recent: dict[str, Recent] = field(default_factory=dict)
    measures: dict[str, Measures] = field(default_factory=dict)
    """By run."""

    def put(self, stats: RunStats) -> RunStats:
        self.runs[stats.run] = stats
        return stats

    def names(self) -> list[str]:
        return list(self.runs)

    def problems(self) -> list[RunProblem]:
        return self.broken

    def origin(self, name: str) -> MixtureOrigin:
        self.stats(name)
        return MixtureOrigin.of_file(Path(f"/srv/{name}.yaml"), None)

    def add_from(self, origin: MixtureOrigin, reason: Reason | None = None) -> Any:
        if origin.where != "/srv/runs/new.yaml":
            raise ConfigError(f"{origin.where}: cannot be read; expected a mixture file")
        return SimpleNamespace(name=next(iter(self.runs)))

    def reload(self, name: str, reason: Reason | None = None) -> str:
        return f"{self.origin(name).where} was read."

    def remove(self, name: str) -> MixtureOrigin:
        return self.origin(name)  # the other tests go on with it

    def get(self, run: str) -> Any:
        """What is asked of a ``ServedRun``, answered by the methods below."""

        def owner(**methods: Callable[..., Any]) -> SimpleNamespace:
            return SimpleNamespace(
                **{name: partial(method, run) for name, method in methods.items()}
            )

        return SimpleNamespace(
            coordinator=SimpleNamespace(name=run, pins=SimpleNamespace(pin=None)),
            recorder=SimpleNamespace(
                note=lambda *_, **__: None, recent=self.recent.get(run, Recent())
            ),
            measures=self.measures.setdefault(run, run_measures()),
            stats=owner(read=self.stats),
            losses=owner(read=self.losses),
            history=owner(read=self.history, events=self.events),
            plan=partial(self.plan, run),
            plan_under=partial(self.plan_under, run),
            snapshots=owner(
                take=self.snapshot,
                list=self.snapshots,
                saved_at=self.saved_at,
                saved=self.saved_snapshot,
            ),
            restores=owner(restore=self.restore, cancel=self.cancel),
            companion={
                Receipts: owner(receipt=self.receipt, report=self.report),
                Traces: owner(
                    sample=self.trace_sample,
                    of_source=self.trace_of_source,
                    evaluated=self.trace_evaluated,
                    micro_step=self.trace_micro_step,
                ),
            }.__getitem__,
            mixture=owner(info=self.mixture, revise=self.revise, drop=self.drop_revisions),
        )

    def saved_at(self, run: str) -> float | None:
        return 1.8e9 if self.saved.get(run) else None

    def stats(self, run: str) -> RunStats:
        self.calls += 1
        if self.gate is not None:
            self.gate.wait()
        if self.fault is not None:
            raise self.fault
        try:
            return self.runs[run]
        except KeyError:
            raise NotFound(
                f"run {run!r} is not served here; expected one of {', '.join(self.runs)}"
            ) from None

    def history(self, run: str, since: float, until: float, most: int) -> RunHistory:
        self.stats(run)
        return self.histories.get(run) or run_history(run)

    def events(self, run: str, since: float, until: float, kinds: Sequence[str]) -> RunEvents:
        self.stats(run)
        kept = [each for each in self.happened.get(run, []) if not kinds or each.kind in kinds]
        return RunEvents(run=run, stream="train", dropped=0, events=kept)

    def losses(self, run: str) -> RunLosses:
        self.stats(run)
        nothing: dict[str, list[Any]] = {
            name: [] for name in ("sample_index", "total_tokens", "step", "loss")
        }
        return RunLosses(
            run=run, stream="train", since=1.8e9, stride=1, learning_rate=[], sources=[], **nothing
        )

    def plan(self, run: str, until_tokens: int | None) -> RunPlan:
        stats = self.stats(run)
        if until_tokens is None:
            return run_plan(run)
        if until_tokens <= stats.total_tokens:
            raise ConfigError(
                f"tokens: {until_tokens} are asked for, but the run has {stats.total_tokens} already"
            )
        return run_plan(run, until_tokens=until_tokens, ends=False)

    def plan_under(
        self, run: str, change: MixtureChange, until_tokens: int | None
    ) -> tuple[RevisionInfo, RunPlan]:
        stats, now = self.stats(run), change.model_copy(update={"sample_index": None})
        shares = [0.25, 0.75] if change.set else [1 / len(stats.sources)] * len(stats.sources)
        plan = self.plan(run, until_tokens)
        segments = [segment.model_copy(update={"shares": shares}) for segment in plan.segments]
        return self.revise(run, now), plan.model_copy(update={"segments": segments})

    def receipt(self, run: str, sample_index: int | None) -> Receipt:
        stats = self.stats(run)
        index = stats.sample_index if sample_index is None else sample_index
        if index > stats.sample_index:
            raise BeyondHorizon(
                f"sample index {index} is beyond the committed {stats.sample_index}"
            )
        return run_receipt(stats, index)

    def report(self, run: str) -> RunReport:
        return run_report(self.stats(run))

    def snapshot(self, run: str, sample_index: int | None, *, save: bool) -> tuple[str, str | None]:
        stats = self.stats(run)
        index = stats.sample_index if sample_index is None else sample_index
        if index > stats.produced_index:
            raise BeyondHorizon(
                f"sample index {index} is beyond the horizon {stats.produced_index}"
            )
        text = seal(
            {
                "run": run,
                "sample_index": index,
                "digest": digest_hex(index),
                "total_tokens": index * stats.sequence_length,
                "note": "Zwölf",
            }
        )
        if not save:
            return text, None
        snapshots = self.saved.setdefault(run, {})
        snapshot_id = f"s{len(snapshots)}-{index}"
        snapshots[snapshot_id] = text
        return text, snapshot_id

    def snapshots(self, run: str) -> list[SnapshotInfo]:
        self.stats(run)
        return [
            SnapshotInfo(id=key, sample_index=unseal(text)["sample_index"], saved_at=time.time())
            for key, text in self.saved.get(run, {}).items()
        ]

    def saved_snapshot(self, run: str, snapshot_id: str) -> str:
        self.stats(run)
        try:
            return self.saved[run][snapshot_id]
        except KeyError:
            raise NotFound(f"run {run!r} has no snapshot {snapshot_id!r}") from None

    def restore(
        self,
        run: str,
        *,
        snapshot_id: str | None = None,
        sample_index: int | None = None,
        text: str | None = None,
        skip_samples: int = 0,
        skip_tokens: int = 0,
        undo_skip: bool = False,
    ) -> NextLaunch:
        stats = self.stats(run)
        if [snapshot_id, sample_index, text].count(None) != 2:
            raise ConfigError("a restore names one of the three")
        if snapshot_id is not None:
            text = self.saved_snapshot(run, snapshot_id)
        if text is not None:
            try:
                sample_index = unseal(text)["sample_index"]
            except ValueError as error:
                raise SnapshotInvalid(str(error)) from None
        assert sample_index is not None
        if sample_index > stats.produced_index:
            raise BeyondHorizon(
                f"sample index {sample_index} is beyond the horizon {stats.produced_index}"
            )
        skip = skip_samples or -(-skip_tokens // stats.sequence_length)
        self.restored[run] = NextLaunch(
            sample_index=sample_index,
            digest=digest_hex(sample_index),
            skips={sample_index: skip} if skip else {} if undo_skip else None,
        )
        return self.restored[run]

    def cancel(self, run: str) -> NextLaunch:
        if run not in self.restored:
            raise NotFound(f"nothing is pinned for the next launch of run {run!r}")
        return self.restored.pop(run)

    def trace_of_source(
        self, run: str, source: str, number: int | None, text: bool
    ) -> TracedSample:
        names = [each.alias for each in self.stats(run).sources]
        if source not in names:
            raise NotFound(f"source: run {run!r} has no source {source!r}; it has {names}")
        sample = self.trace_sample(run, 17 if number is None else number * len(names), None, text)
        return sample.model_copy(update={"source": source, "source_id": names.index(source)})

    def trace_evaluated(self, run: str, stream: str, index: int, text: bool) -> TracedSample:
        stats = self.stats(run)
        if stream not in stats.streams:
            raise NotFound(
                f"run {run!r} has no stream {stream!r}; it has {[stats.stream, *stats.streams]}"
            )
        return self.trace_sample(run, index, None, text)

    def trace_sample(
        self, run: str, index: int, generation: int | None, text: bool
    ) -> TracedSample:
        stats = self.stats(run)
        if generation not in (None, stats.generation):
            raise NotFound(
                f"there is no generation {generation}; the ledger has {stats.generation}"
            )
        if index >= stats.produced_index:
            raise BeyondHorizon(
                f"sample {index} was not delivered: {stats.produced_index} are produced"
            )
        document = TracedDocument(
            position=0,
            shard="data/source-0-00.parquet",
            shard_index=0,
            row=index,
            epoch=0,
            begin=0,
            end=stats.sequence_length,
            row_tokens=stats.sequence_length,
            text="a" * stats.sequence_length if text and not self.without_text else None,
        )
        step, place = divmod(index, stats.batch_size * stats.world_size)
        return TracedSample(
            sample=index,
            generation=stats.generation,
            status="committed" if index < stats.sample_index else "produced",
            micro_step=step,
            rank=place // stats.batch_size,
            place=place % stats.batch_size,
            source_id=0,
            source=stats.sources[0].alias,
            spec=stats.sources[0].spec,
            source_sample=index,
            tokens=stats.sequence_length,
            hash=digest_hex(index),
            digest=digest_hex(index + 1),
            documents=[document],
            ids=[97] * stats.sequence_length if text else None,
        )

    def trace_micro_step(
        self, run: str, step: int, rank: int | None, generation: int | None, text: bool
    ) -> TracedMicroStep:
        stats = self.stats(run)
        size = stats.batch_size
        begin = step * size * stats.world_size
        if rank is not None and rank >= stats.world_size:
            raise ConfigError(
                f"rank is {rank}, but generation {stats.generation} has {stats.world_size}"
            )
        ranks = range(stats.world_size) if rank is None else (rank,)
        return TracedMicroStep(
            generation=stats.generation,
            micro_step=step,
            begin=begin,
            end=begin + size * stats.world_size,
            world_size=stats.world_size,
            batch_size=size,
            rotation=0,
            ranks=[
                TracedRank(
                    rank=each,
                    samples=[
                        self.trace_sample(run, begin + each * size + i, generation, text)
                        for i in range(size)
                    ],
                    padding=0,
                )
                for each in ranks
            ],
        )

    def fork(
        self,
        run: str,
        *,
        parent: str | None = None,
        sample_index: int | None = None,
        text: str | None = None,
    ) -> NextLaunch:
        stats = self.stats(parent or run)
        return self.restore(
            run, sample_index=stats.sample_index if sample_index is None else sample_index
        )

    def mixture(self, run: str) -> MixtureInfo:
        stats = self.stats(run)
        return MixtureInfo(
            run=run,
            sample_index=stats.sample_index,
            sequence_length=stats.sequence_length,
            mixture={
                "policy": "weighted",
                "children": [{"source": source.spec} for source in stats.sources],
            },
            paused=[],
            dropped=[],
            phases=[],
            revisions=self.revisions.get(run, []),
            first_revisable=stats.produced_index,
        )

    def revise(self, run: str, change: MixtureChange) -> RevisionInfo:
        stats = self.stats(run)
        index = stats.produced_index if change.sample_index is None else change.sample_index
        if index < stats.produced_index:
            raise BeyondHorizon(
                f"sample {index} may have been produced already; one from {stats.produced_index} on is not"
            )
        made = self.revisions.setdefault(run, [])
        revision = RevisionInfo(
            number=len(made) + 1,
            sample_index=index,
            total_tokens=index * stats.sequence_length,
            made_at=0.0,
            author=change.author,
            reason=change.reason,
            changes=[f"{each.child}: changed" for each in change.set],
            in_force=False,
        )
        if not change.dry_run:
            made.append(revision)
        return revision

    def drop_revisions(self, run: str, number: int) -> list[RevisionInfo]:
        self.stats(run)
        made = self.revisions.get(run, [])
        if number > len(made):
            raise NotFound(f"run {run!r} has no revision {number}")
        dropped, self.revisions[run] = made[number - 1 :], made[: number - 1]
        return dropped

    def not_ready(self) -> str | None:
        if isinstance(self.fault, TokenloomError):
            return str(self.fault)
        return self.reason
