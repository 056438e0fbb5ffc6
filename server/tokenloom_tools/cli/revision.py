"""A revision: the options of all commands that make one, and how a server is asked for it."""

from __future__ import annotations

import getpass
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.common import console, print_json
from tokenloom_tools.cli.options import ControlAccess


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
        from tokenloom_server.core.amounts import parse_amount

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
