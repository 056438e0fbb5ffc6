"""``tokenloom mixture``: a run's mixture, looked at and changed while it trains."""

from __future__ import annotations

import getpass
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tokenloom_server.cli.common import (
    ControlTokenFile,
    RunName,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    Url,
    console,
    fail,
    print_json,
)
from tokenloom_server.errors import ConfigError, TokenloomError

app = typer.Typer(
    name="mixture",
    help="Look at the mixture of a served run, and change it while it trains: no restart, and every restore reproduces "
    "it.",
    no_args_is_help=True,
)
_Children = Annotated[
    list[str],
    typer.Argument(
        help="Aliases or specs; of a node without an alias its place, such as mixture.children.2.",
        metavar="CHILD...",
        show_default=False,
    ),
]
#: A change as the route takes it.
_Change = dict[str, Any]


@app.command()
def show(
    url: Url,
    run: RunName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print the mixture in force as a mixture file has it.")
    ] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show the mixture in force, what is paused and dropped, and all phases and revisions, those to come, too."""
    from tokenloom_server.reports import mixture_text
    from tokenloom_server.tools.remote import Remote

    try:
        remote = Remote(url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
        info = remote.mixture(remote.only_run(run))
    except TokenloomError as error:
        fail(error)
    if as_json:
        print_json(info.model_dump())
    elif as_yaml:
        print(mixture_text.as_yaml(info), end="")
    else:
        mixture_text.print_mixture(console(), info)


def _send(
    url: Url,
    reason: Annotated[str, typer.Option(help="Why, for whoever asks later; it stays in the ledger.")],
    author: Annotated[
        str | None, typer.Option(help="Who asks for it; the name of the user if not given.", show_default=False)
    ] = None,
    run: RunName = None,
    at: Annotated[
        int | None,
        typer.Option(
            min=0, help="The first sample index under it; the first possible one if not given.", show_default=False
        ),
    ] = None,
    at_tokens: Annotated[
        str | None,
        typer.Option(help="From so many tokens of the run on instead, such as 2B or 1.5T.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what it would change, and change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the revision as JSON.")] = False,
    token_file: ControlTokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    *,
    change: Callable[[], _Change],
    ask: bool = False,
) -> None:
    """Has the server make a change. ``ask``: only once somebody said yes to it."""
    from tokenloom_server.core.amounts import parse_amount
    from tokenloom_server.reports.mixture_text import print_revision
    from tokenloom_server.tools.remote import Remote

    out = console()
    try:
        asked = {"reason": reason, "author": _user() if author is None else author, **change()}
        if at is not None:
            asked["sample_index"] = at
        if at_tokens is not None:
            asked["total_tokens"] = parse_amount(at_tokens, "--at-tokens")
        remote = Remote(
            url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, control=True
        )
        name = remote.only_run(run or asked.pop("run", None))
        asked.pop("run", None)
        if dry_run or ask:
            tried = remote.revise(name, {**asked, "dry_run": True})
            if not as_json or ask:
                print_revision(console(stderr=as_json), name, tried, "would hold")
            if dry_run:
                if as_json:
                    print_json(tried.model_dump())
                return
            if not sys.stdin.isatty():
                raise ConfigError("whether to make this revision is asked first, and nobody is here to answer: --yes")
            typer.confirm("Make this revision?", abort=True, err=as_json)
        made = remote.revise(name, asked)
    except TokenloomError as error:
        fail(error)
    if as_json:
        print_json(made.model_dump())
    else:
        print_revision(out, name, made, "holds")


def _revises(make: Callable[..., _Change]) -> Callable[..., None]:
    """A command out of a function that makes a change: with the options that all of these have."""
    # Typer reads a command's options from its signature.
    hints = get_type_hints(_send, include_extras=True)
    shared = [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(_send).parameters.values()
        if parameter.name not in ("change", "ask")
    ]
    own_hints = get_type_hints(make, include_extras=True)
    own = [
        parameter.replace(annotation=own_hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(make).parameters.values()
    ]

    def command(**given: Any) -> None:
        of_own = {parameter.name: given.pop(parameter.name) for parameter in own}
        yes = of_own.get("yes")
        _send(**given, change=lambda: make(**of_own), ask=yes is False)

    command.__doc__ = make.__doc__
    parameters = [*shared[:1], *own, *shared[1:]]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@app.command("set")
@_revises
def _set(
    child: Annotated[
        str,
        typer.Argument(
            help="A source or node: its alias or spec, or its place, such as mixture.children.2.",
            metavar="CHILD",
            show_default=False,
        ),
    ],
    weight: Annotated[
        str | None,
        typer.Option(
            help="Its share among its siblings; below a schedule also points TOKENS:WEIGHT, such as 0:1,2B:0.1.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Of a node: another policy.", show_default=False)] = None,
    epochs: Annotated[
        str | None, typer.Option(help="How often it is read: a number, or inf.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option(help="At most so many tokens of the run, such as 500M; or none.", show_default=False)
    ] = None,
    on_exhausted: Annotated[
        str | None, typer.Option(help="drop or stop; of a source also none: as its node says.", show_default=False)
    ] = None,
    unit: Annotated[str | None, typer.Option(help="Of a weighted node: tokens or samples.", show_default=False)] = None,
    interpolate: Annotated[str | None, typer.Option(help="Of a schedule: linear or step.", show_default=False)] = None,
    alias: Annotated[str | None, typer.Option(help="Another short name.", show_default=False)] = None,
) -> _Change:
    """Set a source's or node's weight, policy, epochs, limits or alias."""
    from tokenloom_server.core.amounts import parse_amount

    given: _Change = {"policy": policy, "unit": unit, "interpolate": interpolate, "alias": alias}
    given = {field: value for field, value in given.items() if value is not None}
    if weight is not None:
        given["weight"] = _weight(weight)
    if epochs is not None:
        given["epochs"] = _number(epochs, "--epochs", "a number above 0, or inf")
    if max_tokens is not None:
        given["max_tokens"] = None if max_tokens == "none" else parse_amount(max_tokens, "--max-tokens")
    if on_exhausted is not None:
        given["on_exhausted"] = None if on_exhausted == "none" else on_exhausted
    return {"set": [{"child": child, **given}]}


@app.command("pause")
@_revises
def _pause(children: _Children) -> _Change:
    """Have sources or nodes give nothing until they are resumed; their siblings take over their share."""
    return {"set": [{"child": child, "paused": True} for child in children]}


@app.command("resume")
@_revises
def _resume(children: _Children) -> _Change:
    """Let what was paused go on where it stood; it does not catch up."""
    return {"set": [{"child": child, "paused": False} for child in children]}


@app.command("add")
@_revises
def _add(
    spec: Annotated[
        str,
        typer.Argument(
            help="The new source, such as parquet:data/crawl2-*.parquet:text; paths are the server's. One that was "
            "dropped goes on where it stood.",
            metavar="SPEC",
            show_default=False,
        ),
    ],
    to: Annotated[str, typer.Option(help="The node that gets it: its alias or place.")] = "mixture",
    weight: Annotated[
        str | None, typer.Option(help="Its share among its siblings, as for set.", show_default=False)
    ] = None,
    alias: Annotated[str | None, typer.Option(help="A short name.", show_default=False)] = None,
    epochs: Annotated[
        str | None, typer.Option(help="How often it is read: a number, or inf.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option(help="At most so many tokens, such as 500M.", show_default=False)
    ] = None,
) -> _Change:
    """Add a source; its share is its own from the first sample on, without catching up."""
    from tokenloom_server.core.amounts import parse_amount

    child: _Change = {"source": spec}
    if alias is not None:
        child["alias"] = alias
    if weight is not None:
        child["weight"] = _weight(weight)
    if epochs is not None:
        child["epochs"] = _number(epochs, "--epochs", "a number above 0, or inf")
    if max_tokens is not None:
        child["max_tokens"] = parse_amount(max_tokens, "--max-tokens")
    return {"add": [{"child": child, "to": to}]}


@app.command("drop")
@_revises
def _drop(children: _Children) -> _Change:
    """Let sources or nodes leave the mixture; their counters stay."""
    return {"drop": children}


@app.command("apply")
@_revises
def _apply(
    mixture: Annotated[
        Path,
        typer.Argument(help="A mixture file, of which mixture: is taken.", metavar="MIXTURE.yaml", show_default=False),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> _Change:
    """Take over the whole mixture of a mixture file, once its changes were shown and agreed to.

    Sources are known by their specs, nodes by their aliases. What the file does not have any more is dropped.
    """
    from tokenloom_server.config import mixture_file as config
    from tokenloom_server.order.revision import as_file

    found = config.load(mixture)
    return {"mixture": as_file(found), "run": found.run}


@app.command("append-files")
@_revises
def _append_files(
    sources: Annotated[
        list[str],
        typer.Argument(help="Aliases or specs of sources.", metavar="SOURCE...", show_default=False),
    ],
) -> _Change:
    """Read files, too, that match a source's spec and appeared since the run began: behind those that it has."""
    return {"append_files": sources}


@app.command("exclude")
@_revises
def _exclude(
    file: Annotated[
        str,
        typer.Argument(
            help="JSON lines, or CSV with a header: spec (or alias), shard, row. The path is the server's, and the "
            "file has to stay there as it is.",
            metavar="FILE",
            show_default=False,
        ),
    ],
) -> _Change:
    """Leave rows out from then on: take-downs, duplicates that were found late."""
    return {"exclude": {"file": file}}


@app.command()
def undo(
    url: Url,
    number: Annotated[int, typer.Argument(min=1, help="The revision's number.", metavar="NUMBER", show_default=False)],
    run: RunName = None,
    token_file: ControlTokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Take back a revision, and all after it, none of which production has reached."""
    from tokenloom_server.reports.mixture_text import print_revision
    from tokenloom_server.tools.remote import Remote

    try:
        remote = Remote(
            url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, control=True
        )
        name = remote.only_run(run)
        dropped = remote.drop_revisions(name, number)
    except TokenloomError as error:
        fail(error)
    for revision in dropped:
        print_revision(console(), name, revision, "was taken back; it was to hold")


def _weight(text: str) -> float | list[list[float]]:
    """A number, or the points of a schedule."""
    from tokenloom_server.core.amounts import parse_amount

    expected = "a number above 0, or points TOKENS:WEIGHT such as 0:1,2B:0.1"
    if ":" not in text:
        return float(_number(text, "--weight", expected))
    points = []
    for part in text.split(","):
        tokens, _, weight = part.partition(":")
        at = 0 if tokens.strip() == "0" else parse_amount(tokens, "--weight")
        points.append([at, float(_number(weight, "--weight", expected))])
    return points


def _number(text: str, option: str, expected: str) -> float | str:
    """As JSON has it: no infinity."""
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is not {expected}") from None
    if value != value or value < 0:
        raise ConfigError(f"{option}: {text!r} is not {expected}")
    return "inf" if value == float("inf") else value


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""  # a container may have no name for its user
