"""``tokenloom trace``: what a past sample, or a micro-step by rank, was made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.common import console, print_json
from tokenloom_tools.cli.options import ReadAccess, RunName, Url

if TYPE_CHECKING:
    from tokenloom_tools.reports.trace import TracedMicroStep, TracedSample


def trace(
    url: Url,
    sample: Annotated[
        int | None, typer.Option(min=0, help="A sample index: one sample's documents.")
    ] = None,
    micro_step: Annotated[
        int | None,
        typer.Option(min=0, help="A micro-step of a generation, from 0: what its ranks got in it."),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Of the micro-step, one rank; all if not given.")
    ] = None,
    generation: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The launch whose line to follow, where a later one rewound it; the present one if not given.",
        ),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(help="Of a sample that was evaluated on: its stream, such as validation."),
    ] = None,
    run: RunName = None,
    text: Annotated[bool, typer.Option("--text", help="Print each document's text, too.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the answer as JSON; with --text also texts and ids."),
    ] = False,
    *,
    access: ReadAccess,
) -> None:
    """Show which documents a sample was made of, or what each rank got in a micro-step: file, row, and tokens of the
    row.

    Nothing of this was kept: the server makes the samples again from the nearest state in its ledger and reads their
    rows once more, in turns with the peeks, so that training is not slowed. Tokens of a row are counted with its
    begin- and end-of-text ids.
    """
    if (sample is None) == (micro_step is None):
        raise ConfigError("give one of --sample and --micro-step")
    if rank is not None and micro_step is None:
        raise ConfigError("--rank goes with --micro-step; a sample is one rank's anyway")
    if stream is not None and sample is None:
        raise ConfigError(
            "--stream goes with --sample; a stream that is evaluated on has no micro-steps of its own"
        )
    server = access.connect(url)
    name = server.only_run(run)
    traced: TracedSample | TracedMicroStep
    if micro_step is not None:
        traced = server.trace_micro_step(
            name, micro_step, rank=rank, generation=generation, text=text
        )
    else:
        assert sample is not None
        traced = server.trace_sample(name, sample, generation=generation, text=text, stream=stream)
    if as_json:
        print_json(traced.model_dump())
    else:
        from tokenloom_tools.reports.trace_text import print_trace

        print_trace(console(), name, traced, text)
