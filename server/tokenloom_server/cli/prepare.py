"""``tokenloom prepare``: text tokenised once, into shards that are served at the speed of memory."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tokenloom_server.cli.common import console, say, set_up_logging
from tokenloom_server.cli.options import Mixture, MixtureOptions

if TYPE_CHECKING:
    from tokenloom_server.prepare.job import Job
    from tokenloom_server.prepare.preparer import Done
    from tokenloom_server.sources.transform import Transform


@dataclass(frozen=True, slots=True)
class _ShardOptions:
    """Which shards are made, and by how many threads."""

    form: Annotated[
        Literal["arrow", "parquet"],
        typer.Option(
            "--format", help="Arrow files, which are mapped and served fastest; or Parquet with page checksums."
        ),
    ] = "arrow"
    ids: Annotated[
        bool, typer.Option("--ids", help="Also sources that hold ids already, as shards of the narrowest type.")
    ] = False
    shuffle: Annotated[
        bool,
        typer.Option(
            "--shuffle",
            help="Write rows in the shuffled order of the mixture's first epoch; every epoch has it then.",
        ),
    ] = False
    shard_mb: Annotated[
        int, typer.Option(min=1, max=100_000, help="MB of a source's files that become one shard, about.")
    ] = 128
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Shards that are made at once; as many as cores if not given.")
    ] = None

    transform: Annotated[
        str | None,
        typer.Option(
            help="A function of yours that gets batches of texts and gives those to tokenise; see docs/prepare.md.",
            metavar="MODULE:FUNCTION",
        ),
    ] = None
    transform_seconds: Annotated[
        float, typer.Option(min=0.01, max=86_400, help="Seconds that the function may take for a batch.")
    ] = 300.0
    transform_mb: Annotated[
        int, typer.Option(min=64, max=10_000_000, help="MB of memory that each process of the function may take.")
    ] = 4096

    def open_transform(self) -> AbstractContextManager[Transform | None]:
        """The function of --transform, until the end. Raises ``ConfigError`` where it cannot be imported."""
        if self.transform is None:
            return nullcontext()
        from tokenloom_server.sources.transform import Transform

        return closing(Transform(self.transform, seconds=self.transform_seconds, memory_mb=self.transform_mb))

    def job(self, mixture: Path | None, out: Path, mixture_options: MixtureOptions, transform: Transform | None) -> Job:
        """What is to be prepared into the folder ``out``. Raises ``ConfigError``, and what opening sources raises."""
        from tokenloom_server.prepare.job import Job

        run_config, _, base_dir = mixture_options.load(mixture)
        return Job(
            run_config,
            base_dir,
            out / ".index",
            mixture_options.roots(),
            form=self.form,
            shard_bytes=self.shard_mb * 1_000_000,
            ids_too=self.ids,
            shuffled=self.shuffle,
            threads=self.threads or os.cpu_count() or 1,
            transform=transform,
        )


def prepare(
    mixture: Mixture = None,
    out: Annotated[
        Path, typer.Option(help="The folder to prepare into: a new one, an empty one, or one to go on in.")
    ] = Path("prepared"),
    *,
    options: _ShardOptions,
    mixture_options: MixtureOptions,
) -> None:
    """Tokenise each text source of a mixture once, into shards of ids, and write the mixture file that serves them.

    The folder then holds mixture.yaml (serve this), manifest.json (what was made from what, with checksums), the shards
    and the tokeniser. A run of it has the same tokens in the same order as one of the text, served at the speed of
    memory.

    It may be ended at any time: the same command goes on after the shards that are whole, after a check of what lies
    there. Other files, another tokeniser or other settings are refused, with the difference.
    """
    from tokenloom_server.cli.progress import Progress
    from tokenloom_server.prepare.journal import refuse_others
    from tokenloom_server.prepare.preparer import input_bytes
    from tokenloom_server.prepare.preparer import prepare as make

    set_up_logging("warning")
    refuse_others(out)
    try:
        with options.open_transform() as transform:
            with console(stderr=True).status("opening sources and tokeniser"):
                job = options.job(mixture, out, mixture_options, transform)
            with Progress(input_bytes(job), "rows") as progress:
                done = make(job, out, on_done=progress.advance, on_kept=progress.kept)
    except KeyboardInterrupt:
        console(stderr=True).print("stopped; the same command goes on after what is done")
        raise typer.Exit(130) from None
    _print_summary(done)


def _print_summary(done: Done) -> None:
    without = [
        f"{count:,} {kind}" for count, kind in ((done.bad_rows, "bad"), (done.filtered_rows, "filtered")) if count
    ]
    rows = f"{done.rows:,} rows" + (f" ({' and '.join(without)} ones, without tokens)" if without else "")
    before = f" ({done.kept} were there already)" if done.kept else ""
    say(f"{rows}, {done.tokens:,} tokens, {done.bytes / 1e6:,.1f} MB in {done.shards} shards{before}")
    say(f"serve it: tokenloom serve {done.mixture}")
