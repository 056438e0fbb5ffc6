"""``tokenloom validate``: a mixture checked, without serving it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from tokenloom_server.errors import ConfigError
from tokenloom_server.storage.io_stats import given_up_soon, waits_said

from tokenloom_tools.cli.options import PANEL, Mixture, MixtureOptions
from tokenloom_tools.cli.output import console, print_document, print_notes, set_up_logging

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table
    from tokenloom_server.config.data_roots import DataRoots
    from tokenloom_server.config.run import RunConfig
    from tokenloom_server.order.factory import PipelineFactory
    from tokenloom_server.sources.manifest import Manifest


_HELP = {
    "print": "Print the mixture file that --dataset-mix stands for; all else goes to standard error.",
    "scan": "Read every row once, and list the bad ones: 20 of a file, with their count; then the status is 1.",
    "full": "Compare all of the local files with digests.json beside the mixture file; status 1 where one differs.",
    "seconds": "Look at rows for so long; 60 if not given.",
    "bytes": "And of so many bytes of the files at most; a GiB if not given.",
    "record": "With --full: write digests.json anew, from the files as they are.",
}


@given_up_soon()
@waits_said()
def validate(
    mixture: Mixture = None,
    *,
    mixture_options: MixtureOptions,
    print_file: Annotated[
        bool, typer.Option("--print", help=_HELP["print"], rich_help_panel=PANEL)
    ] = False,
    scan: Annotated[bool, typer.Option("--scan", help=_HELP["scan"])] = False,
    full: Annotated[bool, typer.Option("--full", help=_HELP["full"])] = False,
    record: Annotated[bool, typer.Option("--record", help=_HELP["record"])] = False,
    look_seconds: Annotated[float, typer.Option(help=_HELP["seconds"], min=0, metavar="S")] = 60.0,
    look_bytes: Annotated[int, typer.Option(help=_HELP["bytes"], min=0, metavar="N")] = 1 << 30,
) -> None:
    """Check a mixture, its sources and its tokeniser, without serving anything.

    Opens every source, chooses the tokeniser engine, makes the first samples, and looks at rows of as many files as
    its bounds allow. It says valid only where it has read all.
    """
    from tokenloom_server.order import builder
    from tokenloom_server.order.notes import begin_notes, label_notes
    from tokenloom_server.order.segments import lay, measured_ahead, refuse_unfilled
    from tokenloom_server.run.evaluation_streams import EvaluationStreams

    set_up_logging("warning")
    out = console(stderr=print_file)
    run_config, text, base_dir = mixture_options.load(mixture)
    if print_file and not text:
        raise ConfigError(
            "--print writes out what --dataset-mix stands for; a mixture file is one already"
        )
    if record and not full:
        raise ConfigError("--record writes the digests that --full compares with; give both")
    if scan:
        _scan(out, run_config, base_dir, mixture_options.roots())
    with console(stderr=True).status("opening sources and tokeniser"):
        factory = measured_ahead(
            builder.create(run_config, base_dir, None, mixture_options.roots())
        )
        refuse_unfilled(lay(factory, (), None, 0))
        samples = factory.pipeline(factory.initial())
        samples.advance(run_config.pick_samples)
        streams = EvaluationStreams.checked(factory, run_config)
    if full:
        _compare_all(out, factory.record.manifest, base_dir, record=record)
    out.print(_sources(factory))
    _print_reading(out, factory)
    for name in streams.names:
        out.print(f"stream to evaluate on: {name}, of {streams.described(name)}")
    print_notes(out, (*label_notes(factory), *begin_notes(factory)))
    for warning in builder.warnings(factory):
        out.print(f"warning: {warning}", style="yellow")
    if samples.ended is not None:
        out.print(
            f"warning: the data are too short for one sample: {samples.ended}", style="yellow"
        )
    out.print(
        "valid" if scan else _looked_at(out, factory, look_seconds, look_bytes), style="green"
    )
    if print_file:
        print_document(text)


def _looked_at(out: Console, factory: PipelineFactory, seconds: float, most_bytes: int) -> str:
    """Looks at rows, prints what is to be said of some, and gives what may be said of all."""
    from dataclasses import replace

    from tokenloom_tools.prepare.job import reading_once
    from tokenloom_tools.scan import look

    if factory.config.batching is not None:
        return "valid as far as read: of every file what decides its bucket"
    order = factory.with_record(replace(factory.record, config=reading_once(factory.config)))
    with console(stderr=True).status("looking at rows"):
        verdict, notes = look(order, seconds, most_bytes)
    for note in notes:
        out.print(note, soft_wrap=True)
    return verdict


def _scan(out: Console, run_config: RunConfig, base_dir: Path, roots: DataRoots) -> None:
    """Prints the bad rows of all files. Raises ``typer.Exit`` where there is one."""
    from tokenloom_server.order import builder

    from tokenloom_tools.cli.output import Progress
    from tokenloom_tools.prepare.job import reading_once
    from tokenloom_tools.scan import scan

    if run_config.batching is not None:
        raise ConfigError(
            "--scan reads documents, but with batching rows are tensors; leave it out"
        )
    once = reading_once(run_config, on_bad_row="skip", max_bad_rows=None)
    order = builder.create(once, base_dir, None, roots, encoders=os.cpu_count() or 1)
    with Progress(
        sum(shard.size for shards in order.record.shards for shard in shards), "rows"
    ) as progress:
        files = scan(order, progress.advance)
    for file in files:
        more = (
            [f"{file.bad - len(file.reasons):,} more of that file"]
            if file.bad > len(file.reasons)
            else []
        )
        for reason in (*file.reasons, *more):
            out.print(f"bad row: {reason}", soft_wrap=True)
    bad, filtered = sum(file.bad for file in files), sum(file.filtered for file in files)
    out.print(
        f"{sum(file.rows for file in files):,} rows: {bad:,} bad, {filtered:,} filtered or blank"
    )
    if bad:
        raise typer.Exit(1)


def _compare_all(out: Console, manifest: Manifest, base_dir: Path, *, record: bool) -> None:
    """Prints the local files that are not as recorded; ``record``: records them anew. Raises ``typer.Exit`` where there
    is one, and ``ConfigError`` where nothing is recorded."""
    import json

    from tokenloom_server.storage.file import checksum, write_whole
    from tokenloom_server.storage.urls import is_remote

    from tokenloom_tools.cli.output import Progress
    from tokenloom_tools.prepare.preparer import DIGESTS

    path, digests = base_dir / DIGESTS, {}
    if not record and not path.is_file():
        raise ConfigError(
            f"{path}: is missing; validate --full --record writes it from the files as they are"
        )
    files = {
        shard.path: shard.size
        for each in manifest.sources
        for shard in each.shards
        if not is_remote(shard.path)
    }
    with Progress(sum(files.values()), "files") as progress:
        for file, size in files.items():
            digests[file] = checksum(base_dir / file)
            progress.advance(1, 0, size)
    try:
        if record:
            write_whole(path, json.dumps(digests, indent=1) + "\n")
        recorded = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: {error}; expected what validate --full --record writes there"
        ) from None
    # A pattern matches what there is. What another mixture of the folder reads is none of its files, and lies there.
    gone = {
        file: "nothing"
        for file in recorded
        if file not in digests and not (base_dir / file).exists()
    }
    differing = {
        file: digest for file, digest in (digests | gone).items() if recorded.get(file) != digest
    }
    for file, digest in differing.items():
        text = f"changed: {file!r}: found {digest}, recorded {recorded.get(file, 'nothing')}"
        out.print(text, soft_wrap=True)
    if differing:
        raise typer.Exit(1)


def _sources(factory: PipelineFactory) -> Table:
    """The sources with their sizes and shares."""
    from tokenloom_server.mixing.mixer import target_shares

    from tokenloom_tools.reports.terminal import table

    config, record = factory.config, factory.record
    kind = f"sequence length {config.sequence_length}, {config.packing}"
    if config.batching is not None:
        kind = f"batches of {config.global_batch_size} by {config.batching.bucket_by}"
    shares = target_shares(config, factory.initial(), record.size_estimates)
    rows = [
        (
            str(i),
            source.name,
            str(len(shards)),
            f"{sum(shard.size for shard in shards) / 1e6:,.1f}",
            f"{share:.2%}",
            f"{config.epochs[i]:g}",
        )
        for i, (source, shards, share) in enumerate(
            zip(config.sources, record.shards, shares, strict=True)
        )
    ]
    headings = ("id", "source", "shards", "MB", "target share", "epochs")
    return table(headings, rows, title=f"run {config.run}: {kind}, seed {config.seed}")


def _print_reading(out: Console, factory: PipelineFactory) -> None:
    """How the sources are read: commits of the Hub, buckets of tensors, or the tokeniser."""
    record = factory.record
    for spec, commits in record.manifest.commits.items():
        out.print(f"{spec} is read at {', '.join(commits)}")
    if factory.config.batching is None:
        engine = (
            f"{record.engine.engine} {record.engine.version}"
            if record.engine
            else "none: every source holds ids"
        )
        kind = f"ids travel as {record.dtype.name}"
        out.print(f"tokeniser engine: {engine}; vocabulary: {record.vocab_size:,}; {kind}")
        return
    from tokenloom_server.order.readers import bucket_summary

    for i, spec in enumerate(record.specs):
        out.print(f"{spec}: {bucket_summary(factory.readers.bucket_epochs(i))}")
