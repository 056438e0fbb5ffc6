"""``tokenloom plan``: what a run will be, before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from tokenloom_server.errors import ConfigError, reason
from tokenloom_server.storage.io_stats import waits_said

from tokenloom_tools.cli.options import MixtureOptions, ReadAccess
from tokenloom_tools.cli.output import console, print_document, print_notes, set_up_logging

if TYPE_CHECKING:
    from tokenloom_server.planning.plan import RunPlan

_Subject = Annotated[
    str | None,
    typer.Argument(
        help="A mixture file (YAML); or a server, or the URL of a run, to plan from where it is.",
        metavar="MIXTURE.yaml|URL",
    ),
]


@waits_said()
def plan(
    mixture: _Subject = None,
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
    access: ReadAccess,
) -> None:
    """Show a run's future: when sources run out, epochs, shares over time, and how it ends.

    Reads the sources' headers and a sample of their rows, so it takes seconds, whatever their size and however many
    tokens are planned. Beyond two million samples, drawn policies are planned at their mean.
    """
    from tokenloom_server.core.numbers import parse_amount

    set_up_logging("warning")
    until = None if tokens is None else parse_amount(tokens, "--tokens")
    form = None if picture is None else _picture_format(picture)
    notes: Sequence[tuple[bool, str]] = ()
    if mixture is not None and _is_server(mixture):
        server = access.connect(mixture)
        made = server.plan(server.only_run(mixture_options.run or ""), until)
    else:
        made, notes = _planned(mixture_options, Path(mixture) if mixture else None, until)
    if picture is not None and form is not None:
        from tokenloom_tools.reports.picture import draw

        _write(picture, draw(made, form))
    print_notes(console(stderr=as_json), notes)
    if as_json:
        print_document(made.model_dump_json(indent=2))
        return
    from tokenloom_tools.reports.terminal import report

    out = console()
    for part in report(made):
        out.print(part)
    if picture is not None:
        out.print(f"the picture is {picture}")


def _is_server(text: str) -> bool:
    """Whether that is the address of a server, and no file."""
    return "://" in text or (re.search(r":\d+(/|$)", text) is not None and not Path(text).exists())


def _planned(
    options: MixtureOptions, mixture: Path | None, until: int | None
) -> tuple[RunPlan, Sequence[tuple[bool, str]]]:
    """The plan of a mixture, and what is to be said of it."""
    from tokenloom_server.order import builder
    from tokenloom_server.order.notes import label_notes
    from tokenloom_server.order.timeline import Timeline
    from tokenloom_server.planning.forecast import Planner

    run_config, _, base_dir = options.load(mixture)
    with console(stderr=True).status("opening sources and tokeniser") as status:
        factory = builder.create(run_config, base_dir, None, options.roots())
        timeline = Timeline(factory)
        planner = Planner(lambda name: status.update(f"measuring {name}"))
        return planner.plan(timeline, timeline.initial(), until), [*label_notes(factory)]


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
