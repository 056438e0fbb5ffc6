"""``tokenloom export``: a range of a run's order as files that others read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.common import console, say, set_up_logging
from tokenloom_tools.cli.options import ReadAccess, Url


def export(
    url: Url,
    out: Annotated[
        Path,
        typer.Option(
            help="The name of the files without their endings: OUT.bin, OUT.idx (or OUT.parquet), OUT.json."
        ),
    ],
    begin: Annotated[int, typer.Option("--from", min=0, help="The first sample index.")] = 0,
    end: Annotated[
        int | None,
        typer.Option(
            "--to",
            min=1,
            help="The sample index after the last; where the ledger stands if not given.",
        ),
    ] = None,
    form: Annotated[
        Literal["megatron", "parquet"],
        typer.Option(
            "--format", help="Megatron-LM's .bin and .idx, or one Parquet file with page checksums."
        ),
    ] = "megatron",
    *,
    access: ReadAccess,
) -> None:
    """Write samples N to M of a served run's order as files that other tools read: the way out.

    The samples are those that trainers got, or will get: they come as peeks do, so nothing is joined, counted or
    committed, and it may be done while the run trains. Each sample becomes one document: as megatron with a sequence
    for each document that it has a part of; as parquet a row with sample, source, ids and starts. Where labels are the
    next ids (labels: shifted), a sample has one id more, as it travels.

    OUT.json says of which run and range they are, with the digests before and after it, the config's digest and the
    files' checksums. It is written last: where it is, all is whole. A server that goes away is waited for a minute.
    """
    from tokenloom_tools.cli.progress import Progress
    from tokenloom_tools.export import export as write
    from tokenloom_tools.peek.range import SampleRange

    set_up_logging("warning")
    if end is not None and end <= begin:
        raise ConfigError(f"--from {begin} --to {end}: expected --to above --from")
    samples = SampleRange(access.servers(url), begin, end, clock=time.monotonic)
    total = None if end is None else end - begin
    try:
        with Progress(total, "samples", bytes_are_total=False) as progress:
            done = write(samples, out, form, progress.advance)
    except KeyboardInterrupt:
        console(stderr=True).print("stopped; nothing was written")
        raise typer.Exit(130) from None
    files = ", ".join(str(path) for path in done.files)
    say(f"samples {done.begin:,} to {done.end - 1:,}, {done.tokens:,} tokens: {files}")
