"""``tokenloom mixture``: a run's mixture, looked at and changed while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenloom_tools.cli.command import command
from tokenloom_tools.cli.common import console, print_document, print_json
from tokenloom_tools.cli.options import ControlAccess, ReadAccess, RunName, Url
from tokenloom_tools.cli.revision import RevisionOptions, parse_number, parse_weight

app = typer.Typer(
    name="mixture",
    help="Look at the mixture of a served run, and change it while it trains: no restart, and every restore reproduces "
    "it.",
    no_args_is_help=True,
)
_FromStart = Annotated[
    bool,
    typer.Option(
        "--from-start",
        help="Read sources that come back from their first row, not where they stood.",
    ),
]
_Children = Annotated[
    list[str],
    typer.Argument(
        help="Aliases or specs; of a node without an alias its place, such as mixture.children.2.",
        metavar="CHILD...",
    ),
]


@dataclass(frozen=True, slots=True)
class _ChildOptions:
    """What ``add`` gives a new source, and ``set`` changes of a source or node."""

    weight: Annotated[
        str | None,
        typer.Option(
            help="Its share among its siblings; below a schedule also points TOKENS:WEIGHT, such as 0:1,2B:0.1."
        ),
    ] = None
    alias: Annotated[str | None, typer.Option(help="Its short name.")] = None
    epochs: Annotated[str | None, typer.Option(help="How often it is read: a number, or inf.")] = (
        None
    )
    max_tokens: Annotated[
        str | None, typer.Option(help="At most so many tokens of the run, such as 500M; or none.")
    ] = None

    def fields(self) -> dict[str, Any]:
        """Those that are given, as a mixture file has them. Raises ``ConfigError``."""
        from tokenloom_server.core.amounts import parse_amount

        fields: dict[str, Any] = {}
        if self.alias is not None:
            fields["alias"] = self.alias
        if self.weight is not None:
            fields["weight"] = parse_weight(self.weight)
        if self.epochs is not None:
            fields["epochs"] = parse_number(self.epochs, "--epochs")
        if self.max_tokens is not None:
            fields["max_tokens"] = (
                None if self.max_tokens == "none" else parse_amount(self.max_tokens, "--max-tokens")
            )
        return fields


@command(app)
def show(
    url: Url,
    run: RunName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print the mixture in force as a mixture file has it.")
    ] = False,
    *,
    access: ReadAccess,
) -> None:
    """Show the mixture in force, what is paused and dropped, and all phases and revisions, those to come, too."""
    from tokenloom_tools.reports import mixture_text

    server = access.connect(url)
    info = server.mixture(server.only_run(run))
    if as_json:
        print_json(info.model_dump())
    elif as_yaml:
        print_document(mixture_text.as_yaml(info))
    else:
        mixture_text.print_mixture(console(), info)


@command(app, "set")
def set_child(
    url: Url,
    child: Annotated[
        str,
        typer.Argument(
            help="A source or node: its alias or spec, or its place, such as mixture.children.2.",
            metavar="CHILD",
        ),
    ],
    options: _ChildOptions,
    policy: Annotated[str | None, typer.Option(help="Of a node: another policy.")] = None,
    on_exhausted: Annotated[
        str | None, typer.Option(help="drop or stop; of a source also none: as its node says.")
    ] = None,
    unit: Annotated[str | None, typer.Option(help="Of a weighted node: tokens or samples.")] = None,
    interpolate: Annotated[str | None, typer.Option(help="Of a schedule: linear or step.")] = None,
    *,
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Set a source's or node's weight, policy, epochs, limits or alias."""
    texts = {
        "policy": policy,
        "unit": unit,
        "interpolate": interpolate,
        "on_exhausted": on_exhausted,
    }
    fields: dict[str, Any] = {field: text for field, text in texts.items() if text is not None}
    if on_exhausted == "none":
        fields["on_exhausted"] = None
    revision.make(url, access, {"set": [{"child": child, **options.fields(), **fields}]})


@command(app)
def pause(url: Url, children: _Children, revision: RevisionOptions, access: ControlAccess) -> None:
    """Have sources or nodes give nothing until they are resumed; their siblings take over their share."""
    revision.make(url, access, {"set": [{"child": child, "paused": True} for child in children]})


@command(app)
def resume(url: Url, children: _Children, revision: RevisionOptions, access: ControlAccess) -> None:
    """Let what was paused go on where it stood; it does not catch up."""
    revision.make(url, access, {"set": [{"child": child, "paused": False} for child in children]})


@command(app)
def add(
    url: Url,
    spec: Annotated[
        str,
        typer.Argument(
            help="The new source, such as parquet:data/crawl2-*.parquet:text; paths are the server's. One that the run "
            "knows goes on where it stood.",
            metavar="SPEC",
        ),
    ],
    options: _ChildOptions,
    to: Annotated[str, typer.Option(help="The node that gets it: its alias or place.")] = "mixture",
    from_start: _FromStart = False,
    *,
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Add a source; its share is its own from the first sample on, without catching up."""
    addition = {"child": {"source": spec, **options.fields()}, "to": to}
    revision.make(url, access, {"add": [addition], "from_start": from_start})


@command(app)
def drop(url: Url, children: _Children, revision: RevisionOptions, access: ControlAccess) -> None:
    """Let sources or nodes leave the mixture; their counters stay."""
    revision.make(url, access, {"drop": children})


@command(app)
def apply(
    url: Url,
    mixture: Annotated[
        Path,
        typer.Argument(help="A mixture file, of which mixture: is taken.", metavar="MIXTURE.yaml"),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    from_start: _FromStart = False,
    *,
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Take over the whole mixture of a mixture file, once its changes were shown and agreed to.

    Sources are known by their specs, nodes by their aliases. What the file does not have any more is dropped; what it
    has again goes on where it stood.
    """
    from tokenloom_server.catalog import environment_catalog
    from tokenloom_server.config import mixture_file as config
    from tokenloom_server.order.mixture_content import as_file

    run_config = config.load(mixture, environment_catalog())
    change = {"mixture": as_file(run_config), "from_start": from_start}
    revision.make(url, access, change, run=run_config.run, ask=not yes)


@command(app, "append-files")
def append_files(
    url: Url,
    sources: Annotated[
        list[str], typer.Argument(help="Aliases or specs of sources.", metavar="SOURCE...")
    ],
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Read files, too, that match a source's spec and appeared since the run began: after those that it has."""
    revision.make(url, access, {"append_files": sources})


@command(app)
def exclude(
    url: Url,
    file: Annotated[
        str,
        typer.Argument(
            help="JSON lines, or CSV with a header: spec (or alias), shard, row. The path is the server's, and the "
            "file has to stay there as it is.",
            metavar="FILE",
        ),
    ],
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Leave rows out from then on: take-downs, duplicates that were found late."""
    revision.make(url, access, {"exclude": {"file": file}})


@command(app)
def undo(
    url: Url,
    number: Annotated[int, typer.Argument(min=1, help="The revision's number.", metavar="NUMBER")],
    run: RunName = None,
    *,
    access: ControlAccess,
) -> None:
    """Take back a revision, and all after it, none of which production has reached."""
    from tokenloom_tools.reports.mixture_text import print_revision

    server = access.connect(url)
    name = server.only_run(run)
    for revision in server.drop_revisions(name, number):
        print_revision(console(), name, revision, "was taken back; it was to hold")
