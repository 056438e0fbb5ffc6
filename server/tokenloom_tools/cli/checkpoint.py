"""``tokenloom checkpoint``: what a checkpoint's file says of its data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tokenloom_proto.files import resolved
from tokenloom_server.errors import SnapshotInvalid, SourceError

from tokenloom_tools.cli.command import command
from tokenloom_tools.cli.common import console, print_json
from tokenloom_tools.cli.options import Inside

if TYPE_CHECKING:
    from tokenloom_tools.checkpoint.content import Content

app = typer.Typer(
    name="checkpoint",
    help="Look into a checkpoint's file: where its data stand. No server is needed, and nothing in the file is run.",
    no_args_is_help=True,
)
_Checkpoint = Annotated[
    Path,
    typer.Argument(
        help="A snapshot, a JSON file with a state of data in it (an older data loader's, too), a torch checkpoint, or "
        "a folder of torch.distributed.checkpoint."
    ),
]


@dataclass(frozen=True, slots=True)
class _Options:
    """How a file is read, and printed."""

    mixture: Annotated[
        Path | None,
        typer.Option(help="The mixture file, for a checkpoint that does not say its mixture."),
    ] = None
    inside: Inside = None
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False

    def content(self, file: Path, *, measured: bool = False) -> Content:
        """What a checkpoint's file says; with ``measured`` at its own sample index, and also how much the mixture's
        data will give, where only they say it. Raises ``ConfigError`` and ``SnapshotInvalid``."""
        from tokenloom_server.catalog import environment_catalog
        from tokenloom_server.config import mixture_file as config

        from tokenloom_tools.checkpoint.content import read
        from tokenloom_tools.checkpoint.file import find
        from tokenloom_tools.checkpoint.probabilities import missing

        mixture = config.load(self.mixture, environment_catalog()) if self.mixture else None
        state, base_dir = find(file, self.inside), resolved(self.mixture or file).parent
        content = read(file, state, mixture, base_dir=base_dir, at_index=measured)
        if (
            mixture is not None
            and measured
            and any(missing(content, node) for node in content.nodes)
        ):
            from tokenloom_server.order import builder

            try:
                factory = builder.create(mixture, base_dir, None)
                content = read(file, state, mixture, factory, base_dir=base_dir, at_index=True)
            except (SourceError, SnapshotInvalid) as error:
                console(stderr=True).print(
                    f"{self.mixture}: its data are not measured: {error}", soft_wrap=True
                )
        return content


@command(app, "show")
def show_checkpoint(file: _Checkpoint, options: _Options) -> None:
    """Show where a checkpoint's data stand: run, sources, counters of every node, and what is suspicious."""
    from tokenloom_tools.checkpoint import report

    content = options.content(file)
    print_json(report.as_json(content)) if options.as_json else report.show(content, console())


@command(app, "diff")
def diff_checkpoints(a: _Checkpoint, b: _Checkpoint, options: _Options) -> None:
    """Show what was consumed between two checkpoints, by source, and whether they are of one run."""
    from dataclasses import asdict

    from tokenloom_tools.checkpoint import report
    from tokenloom_tools.checkpoint.difference import difference

    before, after = options.content(a), options.content(b)
    consumed = difference(before, after)
    print_json(asdict(consumed)) if options.as_json else report.show_difference(
        consumed, before, after, console()
    )


@command(app, "probabilities")
def checkpoint_probabilities(file: _Checkpoint, options: _Options) -> None:
    """Show with which probability each child of a node is next: with the saved counters, and as if they were lost."""
    from tokenloom_tools.checkpoint import report

    content = options.content(file, measured=True)
    nodes = report.probabilities(content)
    print_json(nodes) if options.as_json else report.show_probabilities(nodes, console())
    if all(child["with_counters"] is None for node in nodes for child in node["children"]):
        raise typer.Exit(1)
