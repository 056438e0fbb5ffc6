"""``tokenloom import``: what a job had read with another data loader, as the beginning of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.common import print_document


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
