"""``tokenloom mixture``: a run's mixture, looked at and changed while it trains, by revisions."""

from __future__ import annotations

import getpass
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.command import command
from tokenloom_tools.cli.options import ControlAccess, ReadAccess, Url
from tokenloom_tools.cli.output import console, print_document, print_json


@dataclass(frozen=True, slots=True)
class RevisionOptions:
    """Why a revision is made, by whom, and from where on it holds."""

    reason: Annotated[
        str, typer.Option(help="Why, for whoever asks later; it stays in the ledger.")
    ]
    author: Annotated[
        str | None, typer.Option(help="Who asks for it; the name of the user if not given.")
    ] = None
    sample_index: Annotated[
        int | None,
        typer.Option(
            "--at",
            min=0,
            help="The first sample index under it; the first possible one if not given.",
        ),
    ] = None
    total_tokens: Annotated[
        str | None,
        typer.Option(
            "--at-tokens", help="From so many tokens of the run on instead, such as 2B or 1.5T."
        ),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what it would change, and change nothing.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the revision as JSON.")] = False

    def make(
        self,
        url: str,
        access: ControlAccess,
        change: dict[str, Any],
        *,
        run: str = "",
        ask: bool = False,
    ) -> None:
        """Has the server make the ``change`` (a body as the route takes it), and prints the revision.

        ``run``: where the address names none. ``ask``: only once somebody said yes to it. Raises ``ConfigError``, and
        what the server answers.
        """
        from tokenloom_server.core.numbers import parse_amount

        from tokenloom_tools.reports.terminal import print_revision

        body = {
            "reason": self.reason,
            "author": user_name() if self.author is None else self.author,
            **change,
        }
        if self.sample_index is not None:
            body["sample_index"] = self.sample_index
        if self.total_tokens is not None:
            body["total_tokens"] = parse_amount(self.total_tokens, "--at-tokens")
        server = access.connect(url)
        name = server.only_run(run)
        if self.dry_run or ask:
            planned = server.revise(name, {**body, "dry_run": True})
            if not self.as_json or ask:
                print_revision(console(stderr=self.as_json), name, planned, "would hold")
            if self.dry_run:
                if self.as_json:
                    print_json(planned.model_dump())
                return
            if not sys.stdin.isatty():
                raise ConfigError(
                    "whether to make this revision is asked first, and nobody is here to answer: --yes"
                )
            typer.confirm("Make this revision?", abort=True, err=self.as_json)
        made = server.revise(name, body)
        if self.as_json:
            print_json(made.model_dump())
        else:
            print_revision(console(), name, made, "holds")


def user_name() -> str:
    """Who is at this command line; empty where the system has no name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""  # a container may have no name for its user


app = typer.Typer(
    name="mixture",
    help="Show the mixture of a served run, or change it while it trains.",
    no_args_is_help=True,
)
_FromStart = Annotated[
    bool,
    typer.Option(
        "--from-start",
        help="Read sources that come back from their first row, not where they stood.",
    ),
]
_FIELD = re.compile(r"[a-z_]+=")


def _fields(texts: Iterable[str]) -> dict[str, Any]:
    """The fields of arguments FIELD=VALUE, with their values as a mixture file has them. Raises ``ConfigError``."""
    import yaml
    from tokenloom_server.core.numbers import parse_amount

    fields: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{text}: expected FIELD=VALUE as a mixture file has it ({error})"
            ) from None
        if name == "max_tokens" and isinstance(read, str):
            read = parse_amount(read, name)
        fields[name] = "inf" if read == inf else read
    return fields


@command(app)
def show(
    url: Url,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print the mixture in force as a mixture file has it.")
    ] = False,
    *,
    access: ReadAccess,
) -> None:
    """Show the mixture in force, what is paused and dropped, and all phases and revisions, those to come, too."""
    from tokenloom_tools.reports.terminal import mixture_yaml, print_mixture

    if as_json and as_yaml:
        raise ConfigError("give one of --json and --yaml")
    server = access.connect(url)
    info = server.mixture(server.only_run())
    if as_json:
        print_json(info.model_dump())
    elif as_yaml:
        print_document(mixture_yaml(info))
    else:
        print_mixture(console(), info)


@command(app, "set")
def set_child(
    url: Url,
    changes: Annotated[
        list[str],
        typer.Argument(
            help="Sources and nodes by alias or spec, or of a node its place, such as mixture.children.2; then what "
            "they get, as a mixture file has it: weight=0.5, epochs=2, max_tokens=500M, policy=weighted, "
            "on_exhausted=stop, alias=web. paused=true: they give nothing, and their siblings take over their share, "
            "until paused=false. What is null is not given any more.",
            metavar="CHILD... FIELD=VALUE...",
        ),
    ],
    append_files: Annotated[
        bool,
        typer.Option(
            "--append-files",
            help="Read files, too, that match a source's spec and appeared since the run began: after those that it "
            "has.",
        ),
    ] = False,
    *,
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Set fields of sources or nodes: weight, policy, epochs, limits, alias; pause them, and let them go on."""
    children = [text for text in changes if not _FIELD.match(text)]
    fields = _fields(text for text in changes if _FIELD.match(text))
    if not children:
        raise ConfigError(
            f"{' '.join(changes)}: sets fields of nothing; name a source or node before them"
        )
    change: dict[str, Any] = {"append_files": children} if append_files else {}
    if fields or not append_files:
        change["set"] = [{**fields, "child": child} for child in children]
    revision.make(url, access, change)


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
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            help="Its other fields, as a mixture file has them: weight=0.1, alias=crawl2.",
            metavar="FIELD=VALUE...",
        ),
    ] = None,
    to: Annotated[str, typer.Option(help="The node that gets it: its alias or place.")] = "mixture",
    from_start: _FromStart = False,
    *,
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Add a source; its share is its own from the first sample on, without catching up."""
    addition = {"child": {**_fields(fields or ()), "source": spec}, "to": to}
    revision.make(url, access, {"add": [addition], "from_start": from_start})


@command(app)
def drop(
    url: Url,
    children: Annotated[
        list[str] | None,
        typer.Argument(
            help="Aliases or specs; of a node without an alias its place, such as mixture.children.2.",
            metavar="CHILD...",
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            help="Leave the rows of this file out: take-downs, duplicates that were found late. JSON lines, or CSV "
            "with a header: spec (or alias), shard, row. The path is the server's, and the file has to stay there as "
            "it is.",
            metavar="FILE",
        ),
    ] = None,
    *,
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Let sources, nodes or rows leave the mixture; counters stay."""
    change: dict[str, Any] = {"drop": children or []}
    if rows is not None:
        change["exclude"] = {"file": rows}
    revision.make(url, access, change)


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


@command(app)
def undo(
    url: Url,
    number: Annotated[int, typer.Argument(min=1, help="The revision's number.", metavar="NUMBER")],
    *,
    access: ControlAccess,
) -> None:
    """Take back a revision, and all after it, none of which production has reached."""
    from tokenloom_tools.reports.terminal import print_revision

    server = access.connect(url)
    name = server.only_run()
    for revision in server.drop_revisions(name, number):
        print_revision(console(), name, revision, "was taken back; it was to hold")
