"""How a command is made of a function: its groups of options become options, and an error of ours ends it; and the
command line that commands are added to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache, wraps
from typing import Annotated, Any, get_type_hints

import typer
from tokenloom_server.errors import ConfigError, TokenloomError, reason
from typer.core import TyperCommand

from tokenloom_tools.cli.output import console, fail

_Function = Callable[..., None]


class _Command(TyperCommand):
    """A command whose hidden options are settings: the environment or a file has them, and not the command line."""

    def make_parser(self, ctx: Any) -> Any:
        every = self.params
        self.params = [each for each in every if not getattr(each, "hidden", False)]
        try:
            return super().make_parser(ctx)
        finally:
            self.params = every


def command(
    app: typer.Typer, name: str | None = None, **settings: Any
) -> Callable[[_Function], _Function]:
    """Decorates the function of a command of ``app``, see ``add_command``."""

    def add(function: _Function) -> _Function:
        add_command(app, function, name, **settings)
        return function

    return add


def add_command(
    app: typer.Typer, function: _Function, name: str | None = None, **settings: Any
) -> None:
    """Makes a function a command of ``app``, with the function's name if none is given.

    A parameter whose type is a dataclass is a group of options: each field of it is an option, or a group, in the
    group's place. A ``TokenloomError`` ends the command with its name and message, and exit status 2. ``settings``:
    what click's context takes.
    """
    app.command(name, cls=_Command, context_settings=settings)(run_by(function))


def run_by(function: _Function) -> _Function:
    """What Typer reads the options of, and calls, for a command's function."""
    options = list(_options(function))
    for option in options:
        for setting in getattr(option.annotation, "__metadata__", ()):
            setting.readable = (
                False  # whoever reads a file says why it cannot be read, and what to do
            )
            setting.show_envvar = (
                False  # every option of a server is a variable, which is said once
            )

    @wraps(function)
    def run(**values: Any) -> None:
        try:
            _called(function, values)
        except TokenloomError as error:
            fail(error)
        except PermissionError as error:
            if error.filename is None:
                raise
            fail(ConfigError(f"{error.filename}: cannot be used ({reason(error)})"))

    # A paragraph is a line: what wraps it knows how wide the terminal is.
    paragraphs = (function.__doc__ or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    # Typer reads the options of a command from its signature.
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _options(called: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for parameter in _parameters(called):
        yield from (
            _options(parameter.annotation) if _is_group(parameter.annotation) else [parameter]
        )


def _called(called: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """A function or a dataclass, with the values of its options."""
    return called(
        **{
            each.name: _called(each.annotation, values)
            if _is_group(each.annotation)
            else values[each.name]
            for each in _parameters(called)
        }
    )


@cache  # many commands have the same groups, and each is read once more when it is called
def _parameters(called: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function, or the fields of a dataclass, with their types."""
    hints = get_type_hints(called, include_extras=True)
    return [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(called).parameters.values()
    ]


class App(typer.Typer):
    """``tokenloom``, to which commands are added."""

    def __init__(self) -> None:
        super().__init__(
            name="tokenloom",
            help="A data loader for language-model training: one server, one canonical order, exact elastic resume.",
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        self.callback()(_root)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        console().print(f"tokenloom {version('tokenloom')}")
        raise typer.Exit


def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass
