"""``tokenloom checkpoint``: what a checkpoint's file says of its data. ``tokenloom import``: what a job had read with
another data loader, as the beginning of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from tokenloom_proto.files import resolved
from tokenloom_server.errors import ConfigError, SnapshotInvalid, SourceError

from tokenloom_tools.cli.options import Inside
from tokenloom_tools.cli.output import console, print_document, print_json

if TYPE_CHECKING:
    from tokenloom_tools.checkpoint.content import Content


def checkpoint(
    file: Annotated[
        Path,
        typer.Argument(
            help="A snapshot, a JSON file with a state of data in it (an older data loader's, too), a torch "
            "checkpoint, or a folder of torch.distributed.checkpoint.",
            metavar="FILE",
        ),
    ],
    later: Annotated[
        Path | None,
        typer.Argument(help="A later one, to show what was consumed between.", metavar="LATER"),
    ] = None,
    probabilities: Annotated[
        bool,
        typer.Option(
            "--probabilities",
            help="Show with which probability each child of a node is next: with the saved counters, and as if they "
            "were lost.",
        ),
    ] = False,
    mixture: Annotated[
        Path | None,
        typer.Option(help="The mixture file, for a checkpoint that does not say its mixture."),
    ] = None,
    inside: Inside = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show where a checkpoint's data stand: run, sources, counters of every node, and what is suspicious.

    Of two: what was consumed between them, by source, and whether they are of one run. No server is needed, and nothing
    in the file is run.
    """
    from dataclasses import asdict

    from tokenloom_tools.checkpoint import report
    from tokenloom_tools.checkpoint.report import difference

    content = _content(file, mixture, inside, measured=probabilities)
    if probabilities:
        if later is not None:
            raise ConfigError("--probabilities are those of one checkpoint; name one")
        nodes = report.probabilities(content)
        print_json(nodes) if as_json else report.show_probabilities(nodes, console())
        if all(child["with_counters"] is None for node in nodes for child in node["children"]):
            raise typer.Exit(1)
    elif later is not None:
        after = _content(later, mixture, inside)
        consumed = difference(content, after)
        print_json(asdict(consumed)) if as_json else report.show_difference(
            consumed, content, after, console()
        )
    else:
        print_json(report.as_json(content)) if as_json else report.show(content, console())


def _content(
    file: Path, mixture: Path | None, inside: str | None, *, measured: bool = False
) -> Content:
    """What a checkpoint's file says; with ``measured`` at its own sample index, and also how much the mixture's data
    will give, where only they say it. Raises ``ConfigError`` and ``SnapshotInvalid``."""
    from tokenloom_server.catalog import environment_catalog
    from tokenloom_server.config import mixture_file as config

    from tokenloom_tools.checkpoint.content import read
    from tokenloom_tools.checkpoint.file import find
    from tokenloom_tools.checkpoint.probabilities import missing

    run = config.load(mixture, environment_catalog()) if mixture else None
    state, base_dir = find(file, inside), resolved(mixture or file).parent
    content = read(file, state, run, base_dir=base_dir, at_index=measured)
    if run is not None and measured and any(missing(content, node) for node in content.nodes):
        from tokenloom_server.order import builder

        try:
            factory = builder.create(run, base_dir, None)
            content = read(file, state, run, factory, base_dir=base_dir, at_index=True)
        except (SourceError, SnapshotInvalid) as error:
            console(stderr=True).print(
                f"{mixture}: its data are not measured: {error}", soft_wrap=True
            )
    return content


def import_seen(
    library: Annotated[
        Literal["mosaic", "litdata"], typer.Argument(help="The library, which has to be installed.")
    ],
    state: Annotated[Path, typer.Argument(help="What its state_dict() gave, as JSON.")],
    spec: Annotated[str, typer.Argument(help="The source, as the mixture file has it.")],
    output: Annotated[
        Path, typer.Option(help="The file of flags to write, .npy; seen.file in the mixture file.")
    ],
    argument: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE of the job's StreamingDataset, once for each that it had, such as shuffle=true."
        ),
    ] = None,
) -> None:
    """Continue another loader's epoch: write which rows it had read, and print the source for the mixture file. The
    data are not read. Run it in the mixture file's folder."""
    import yaml
    from tokenloom_server.catalog import environment_catalog

    from tokenloom_tools.moving import write_seen

    arguments = {}
    for text in argument or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                f"--argument: found {text!r}; expected NAME=VALUE, such as shuffle=true"
            )
        arguments[name] = yaml.safe_load(value)
    source = environment_catalog().sources.spec(spec)
    print_document(write_seen(library, state, source, arguments, output))
