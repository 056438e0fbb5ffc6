"""``tokenloom token``, and the token that a server makes where it is given none."""

from __future__ import annotations

import os
import secrets
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from tokenloom_proto.credentials import CONTROL_VARIABLE, find_token, is_given, read_token
from tokenloom_server.errors import ConfigError, reason

from tokenloom_tools.cli.command import command, run_by

FILE_NAME = "token"
#: Of indexes, where a server that makes its token keeps it.
DEFAULT_FOLDER = Path(".tokenloom-index")
_File = Annotated[
    Path,
    typer.Option(help="The file of named tokens that servers have (--tokens).", metavar="FILE"),
]

app = typer.Typer(name="token")


def kept_token(folder: Path) -> Path | None:
    """The token that a server made in a folder, for who has no other in the environment."""
    file = folder / FILE_NAME
    return None if is_given(os.environ) or not file.exists() else file


class MadeToken(NamedTuple):
    """The token that a server made for itself."""

    file: Path
    is_new: bool

    def lines(self, page_url: str, grpc_address: str, run: str) -> str:
        """What people and trainers need, once, at the start that made it."""
        token = read_token(self.file)
        # An address that stands for all of this machine's is none to connect to.
        page, target = (
            address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
            for address in (page_url, grpc_address)
        )
        scheme = "grpcs" if page.startswith("https:") else "grpc"
        folder = shlex.quote(str(self.file.parent.resolve()))
        return (
            f"made a token, shown this once, and again by: tokenloom token --index-dir {folder}\n"
            f"  the page:   {page}#token={token}\n"
            f"  a trainer:  export {CONTROL_VARIABLE}={token}\n"
            f'              RemoteDataset("{scheme}://{target}/{run}", batch_size=4)'
        )


def make_token(folder: Path) -> MadeToken:
    """The token in a folder, made there where there is none. Raises ``ConfigError``."""
    file = folder / FILE_NAME
    draft = file.with_name(f".{FILE_NAME}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.touch(mode=0o600)
        draft.write_text(f"{secrets.token_hex(32)}\n", encoding="ascii")
        try:
            # Whole from the first, and of two servers that make one at once both have the same.
            os.link(draft, file)
        except FileExistsError:
            return MadeToken(file, is_new=False)
        finally:
            draft.unlink()
    except OSError as error:
        raise ConfigError(
            f"--make-token: no token can be kept in {str(folder)!r} ({reason(error)}); set {CONTROL_VARIABLE}, or "
            "name a folder that may be written to with --index-dir"
        ) from None
    return MadeToken(file, is_new=True)


@app.callback(invoke_without_command=True)
@run_by
def token(
    context: typer.Context,
    index_dir: Annotated[
        Path, typer.Option(help="The folder of indexes that the server has.", show_default=True)
    ] = DEFAULT_FOLDER,
) -> None:
    """Print the control token of the server that runs here, or make, list and revoke named tokens.

    Without a command: the token in TOKENLOOM_TOKEN, or the one that the server made. In the folder where the server
    runs: export TOKENLOOM_TOKEN=$(tokenloom token), or with Compose $(docker compose exec server tokenloom token).
    """
    if context.invoked_subcommand is not None:
        return
    try:
        control = find_token(CONTROL_VARIABLE, os.environ, kept_token(index_dir))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if control is None:
        raise ConfigError(
            f"there is no token here: {CONTROL_VARIABLE} is not set, and {str(index_dir / FILE_NAME)!r} does not "
            "exist; a server that is started with --make-token and without a token makes that file"
        )
    print(control)


@command(app, "create")
def create(
    *,
    tokens: _File,
    name: Annotated[str, typer.Option(help="Whose it is: what the audit log calls it.")],
    scope: Annotated[
        str,
        typer.Option(help="read, train, control or admin; each is good for those before it, too."),
    ],
    run: Annotated[
        list[str] | None,
        typer.Option(
            help="A run that it is good for, or a pattern (wiki*); repeat it. All if not given."
        ),
    ] = None,
    expires: Annotated[
        datetime | None,
        typer.Option(help="When it ends, UTC.", formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%SZ"]),
    ] = None,
) -> None:
    """Make a token, print it this once, and keep its digest in the file.

    A server that was started with --tokens takes it up within seconds. The file is made (mode 0600) where there is
    none.
    """
    from tokenloom_server.api import tokens as file

    print(file.create(tokens, name, scope, run or ["*"], expires and expires.replace(tzinfo=UTC)))


@command(app, "list")
def list_tokens(*, tokens: _File) -> None:
    """Show the names of the tokens, with scope, runs and end."""
    from tokenloom_server.api.tokens import read_document

    for token in read_document(tokens).tokens:
        print(
            f"{token.name}  {token.scope}  {','.join(token.runs)}  {token.expires or 'never expires'}"
        )


@command(app, "revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="Its name.", metavar="NAME")], *, tokens: _File
) -> None:
    """Take a token out of the file: servers refuse it within seconds, and end the streams that it opened."""
    from tokenloom_server.api import tokens as file

    file.revoke(tokens, name)
