"""``tokenloom prepare``: text tokenised once, into shards that are served at the speed of memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.options import Mixture, MixtureOptions, amounts, local_cpus
from tokenloom_tools.cli.output import console, say, set_up_logging

if TYPE_CHECKING:
    from tokenloom_server.workers.transforms import Transform

    from tokenloom_tools.prepare.job import Job
    from tokenloom_tools.prepare.preparer import Done, MakeAll


@dataclass(frozen=True, slots=True)
class _ShardOptions:
    """Which shards are made, and by how many threads."""

    form: Annotated[
        Literal["arrow", "parquet"],
        typer.Option(
            "--format",
            help="Arrow files, which are mapped and served fastest; or Parquet with page checksums.",
        ),
    ] = "arrow"
    ids: Annotated[
        bool,
        typer.Option(
            "--ids", help="Also sources that hold ids already, as shards of the narrowest type."
        ),
    ] = False
    shuffle: Annotated[
        bool,
        typer.Option(
            "--shuffle",
            help="Write rows in the shuffled order of the mixture's first epoch; every epoch has it then.",
        ),
    ] = False
    shard_mb: Annotated[
        int,
        typer.Option(
            min=1, max=100_000, help="MB of a source's files that become one shard, about."
        ),
    ] = 128
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=9999, help="Shards that are made at once; as many as cores if not given."
        ),
    ] = None

    transform: Annotated[
        str | None,
        typer.Option(
            help="A function of yours that gets batches of texts and gives those to tokenise; see docs/prepare.md.",
            metavar="MODULE:FUNCTION",
        ),
    ] = None
    transform_seconds: Annotated[
        float,
        typer.Option(min=0.01, max=86_400, help="Seconds that the function may take for a batch."),
    ] = 300.0
    transform_mb: Annotated[
        int,
        typer.Option(
            min=64, max=10_000_000, help="MB of memory that each process of the function may take."
        ),
    ] = 4096

    def open_transform(self) -> AbstractContextManager[Transform | None]:
        """The function of --transform, until the end. Raises ``ConfigError`` where it cannot be imported."""
        if self.transform is None:
            return nullcontext()
        from tokenloom_server.workers.transforms import Transform

        return closing(
            Transform(self.transform, seconds=self.transform_seconds, memory_mb=self.transform_mb)
        )

    def job(
        self,
        mixture: Path | None,
        index: Path,
        mixture_options: MixtureOptions,
        transform: Transform | None,
    ) -> Job:
        """What is to be prepared. Raises ``ConfigError``, and what opening sources raises."""
        from tokenloom_tools.prepare.job import Job

        run_config, _, base_dir = mixture_options.load(mixture)
        return Job(
            run_config,
            base_dir,
            index,
            mixture_options.roots(),
            form=self.form,
            shard_bytes=self.shard_mb * 1_000_000,
            ids_too=self.ids,
            shuffled=self.shuffle,
            threads=self.threads or os.cpu_count() or 1,
            transform=transform,
        )


@dataclass(frozen=True, slots=True)
class _ClusterOptions:
    """Where else shards are made, and what each of them takes."""

    ray: Annotated[
        str | None,
        typer.Option(
            help="Make shards on a Ray cluster.", metavar="auto|local[:N]|HOST:PORT|ray://HOST:PORT"
        ),
    ] = None
    ray_cpus: Annotated[
        float, typer.Option(min=0.01, max=1024, help="CPUs that Ray keeps for each shard.")
    ] = 1.0
    ray_memory: Annotated[
        int, typer.Option(min=0, help="MB of memory that Ray keeps for each.", metavar="MB")
    ] = 0
    ray_resource: Annotated[
        list[str] | None,
        typer.Option(help="What else, by name; may be given again.", metavar="NAME=AMOUNT"),
    ] = None

    @contextmanager
    def connected(
        self, threads: int | None
    ) -> Iterator[Callable[[Callable[[int], None]], MakeAll] | None]:
        """What makes shards on the cluster, for whom it tells how many nodes there are; None without one. Raises what
        ``connect`` does."""
        if self.ray is None:
            if self != _ClusterOptions():
                raise ConfigError(
                    "--ray-cpus, --ray-memory and --ray-resource belong to --ray: give it, too"
                )
            yield None
            return
        from tokenloom_server.workers.cluster.connection import Needs, connect

        from tokenloom_tools.prepare.cluster import OnRay

        needs = Needs(self.ray_cpus, self.ray_memory, amounts("--ray-resource", self.ray_resource))
        address, cpus = local_cpus("--ray", self.ray)
        cpus = cpus or (threads and math.ceil(threads * self.ray_cpus))
        with connect(address, needs, option="--ray", cpus=cpus):
            yield partial(OnRay, needs, threads)


def prepare(
    mixture: Mixture = None,
    out: Annotated[
        str,
        typer.Option(
            help="Where to prepare into: a new folder, an empty one, or one to go on in.",
            metavar="DIR|URL",
        ),
    ] = "prepared",
    *,
    options: _ShardOptions,
    cluster: _ClusterOptions,
    mixture_options: MixtureOptions,
) -> None:
    """Tokenise each text source of a mixture once, into shards of ids, and write the mixture file that serves them.

    The folder then holds mixture.yaml (serve this), manifest.json (what was made from what, with checksums), the shards
    and the tokeniser. A run of it has the same tokens in the same order as one of the text, served at the speed of
    memory.

    It may be ended at any time: the same command goes on after the shards that are whole, after a check of what lies
    there. Other files, another tokeniser or other settings are refused, with the difference.

    With --ray the shards are tasks on the nodes of a Ray cluster: the same bytes, whatever is killed meanwhile. auto is
    the cluster of this machine, local one of its own (local:2: with two CPUs), to try it; ray:// reaches one from
    elsewhere. Nodes must see the files and --out at the same paths, or at URLs such as s3://bucket/prepared; each first
    compares what it has with what is here: Tokenloom's version, the tokeniser, the files, --out. A task takes
    --ray-cpus, --ray-memory and what --ray-resource names, as a node was given it by `ray start --resources`.
    """
    from tokenloom_tools.cli.output import Progress
    from tokenloom_tools.prepare.folder import Folder
    from tokenloom_tools.prepare.journal import refuse_others
    from tokenloom_tools.prepare.preparer import cannot_write
    from tokenloom_tools.prepare.preparer import prepare as make

    set_up_logging("warning")
    folder = Folder(out)
    try:
        refuse_others(folder)
        with (
            cluster.connected(options.threads) as on_ray,
            options.open_transform() as transform,
            folder.on_disk(".index") as index,
        ):
            with console(stderr=True).status("opening sources and tokeniser"):
                job = options.job(mixture, index, mixture_options, transform)
                for path in () if folder.is_local else index.glob("*.npy"):
                    folder.write(f".index/{path.name}", path.read_bytes())
            total, unit = sum(task.bytes for task in job.tasks), "shards" if on_ray else "rows"
            with Progress(total, unit) as progress:
                make_all = on_ray and on_ray(progress.on_nodes)
                done = make(
                    job, out, on_done=progress.advance, on_kept=progress.kept, make_all=make_all
                )
    except OSError as error:
        raise cannot_write(error, folder) from None
    except KeyboardInterrupt:
        console(stderr=True).print("stopped; the same command goes on after what is done")
        raise typer.Exit(130) from None
    _print_summary(done)


def _print_summary(done: Done) -> None:
    without = [
        f"{count:,} {kind}"
        for count, kind in ((done.bad_rows, "bad"), (done.filtered_rows, "filtered"))
        if count
    ]
    rows = f"{done.rows:,} rows" + (
        f" ({' and '.join(without)} ones, without tokens)" if without else ""
    )
    before = f" ({done.kept} were there already)" if done.kept else ""
    say(
        f"{rows}, {done.tokens:,} tokens, {done.bytes / 1e6:,.1f} MB in {done.shards} shards{before}"
    )
    fetched = (
        ""
        if isinstance(done.mixture, Path)
        else "fetch this and, if it is there, tokenizer/ beside it, then: "
    )
    say(f"serve it: {fetched}tokenloom serve {done.mixture}")
