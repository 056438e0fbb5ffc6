"""``tokenloom plan``: what a run will be, before it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from tokenloom_server.errors import ConfigError, reason

from tokenloom_tools.cli.common import console, print_document, print_notes, set_up_logging
from tokenloom_tools.cli.options import Mixture, MixtureOptions


def plan(
    mixture: Mixture = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Plan up to so many tokens, such as 500M, 10B or 1.5T; to the end if not given, and where there is "
            "none for as many as the sources have once."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw the shares over the tokens into this file, .svg or .png (pip install 'tokenloom\\[plot]')."
        ),
    ] = None,
    *,
    mixture_options: MixtureOptions,
) -> None:
    """Say what a run will be, before it: when each source runs out, epochs, shares over time, and when it ends.

    Reads the sources' headers and a sample of their rows, so it takes seconds, whatever their size and however many
    tokens are planned. Beyond two million samples, drawn policies are planned at their mean.
    """
    from tokenloom_server.core.amounts import parse_amount
    from tokenloom_server.order import builder
    from tokenloom_server.order.notes import label_notes
    from tokenloom_server.order.timeline import Timeline
    from tokenloom_server.planning.planner import Planner

    set_up_logging("warning")
    until = None if tokens is None else parse_amount(tokens, "--tokens")
    form = None if picture is None else _picture_format(picture)
    run_config, _, base_dir = mixture_options.load(mixture)
    with console(stderr=True).status("opening sources and tokeniser") as status:
        factory = builder.create(run_config, base_dir, None, mixture_options.roots())
        timeline = Timeline(factory)
        planner = Planner(lambda name: status.update(f"measuring {name}"))
        made = planner.plan(timeline, timeline.initial(), until)
    if picture is not None and form is not None:
        from tokenloom_tools.plan.picture import draw

        _write(picture, draw(made, form))
    print_notes(console(stderr=as_json), label_notes(factory))
    if as_json:
        print_document(made.model_dump_json(indent=2))
        return
    from tokenloom_tools.plan.report import report

    out = console()
    for part in report(made):
        out.print(part)
    if picture is not None:
        out.print(f"the picture is {picture}")


def _picture_format(path: Path) -> Literal["svg", "png"]:
    match path.suffix.lower():
        case ".svg":
            return "svg"
        case ".png":
            return "png"
    raise ConfigError(f"--picture {path}: expected a file name that ends with .svg or .png")


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({reason(error)})") from None
