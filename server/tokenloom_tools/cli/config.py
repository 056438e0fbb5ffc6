"""Where the options of a server come from besides its command line, and what they are then."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from tokenloom_proto.files import read_file, reason

from tokenloom_tools.cli.common import say

#: Each option of a server may also be a variable: this, an underscore, and its name.
PREFIX = "TOKENLOOM_SERVE"
#: What click takes, so that it looks into the environment.
SETTINGS = {"auto_envvar_prefix": PREFIX}
#: Options that read variables of their own, which other commands read, too.
OWN_VARIABLES = {
    "data_root": ("TOKENLOOM_DATA_ROOTS",),
    "allow_plugins": ("TOKENLOOM_ALLOW_PLUGINS",),
    "allow_transforms": ("TOKENLOOM_ALLOW_TRANSFORMS",),
    "cache": ("TOKENLOOM_CACHE",),
    "cache_size": ("TOKENLOOM_CACHE_SIZE",),
    "token_file": ("TOKENLOOM_TOKEN", "TOKENLOOM_TOKEN_FILE"),
    "read_token_file": ("TOKENLOOM_READ_TOKEN", "TOKENLOOM_READ_TOKEN_FILE"),
}
_PASSWORD = re.compile(r"(://[^/@:\s]*:)[^/\s]+(?=@)|(ssl_password=)[^&\s\"]+")


def _read_config(ctx: typer.Context, file: Path | None) -> Path | None:
    """Makes a file's values the defaults of the other options. Raises ``typer.BadParameter``."""
    if file is None:
        return None
    import yaml

    try:
        document = yaml.safe_load(read_file(file, 2**20)) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {reason(error)}") from None
    options = {
        _key(option): option
        for option in ctx.command.params
        if option.name not in ("help", "config")
    }
    if not isinstance(document, dict):
        raise typer.BadParameter(
            f"{file}: found {type(document).__name__}; expected lines such as grpc: 127.0.0.1:0"
        )
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key not in options:
            near = "".join(
                f"; did you mean {name}?" for name in get_close_matches(str(key), options, 1)
            )
            raise typer.BadParameter(
                f"{file}: {key} is no option of a server{near} (tokenloom serve --settings)"
            )
        if (
            value is None
            or isinstance(value, dict)
            or (isinstance(value, list) and not _is_list(options[key]))
        ):
            raise typer.BadParameter(
                f"{file}: {key}: found {value!r}; expected a value as on the command line"
            )
        if _PASSWORD.search(str(value)):
            raise typer.BadParameter(f"{file}: {key} holds a password; set it in the environment")
        name = str(options[key].name)
        if not any(os.environ.get(variable) for variable in OWN_VARIABLES.get(name, ())):
            values[name] = (
                [value] if _is_list(options[key]) and not isinstance(value, list) else value
            )
    ctx.default_map = values
    return file


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file with options."""

    config: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file with options, by their names.",
            envvar="TOKENLOOM_CONFIG",
            is_eager=True,
            callback=_read_config,
            metavar="FILE",
        ),
    ] = None


def show(ctx: typer.Context) -> None:
    """Prints the settings that are in force, as lines of such a file, and where each comes from."""
    for option in ctx.command.params:
        name, source = str(option.name), ctx.get_parameter_source(str(option.name))
        if name in ("help", "settings") or source is None:
            continue
        value, origin = ctx.params[name], source.name.lower()
        named = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
        variables = (*named, f"{PREFIX}_{name.upper()}", *OWN_VARIABLES.get(name, ()))
        variable = next((each for each in variables if os.environ.get(each)), None)
        if origin == "default_map":
            origin = str(ctx.params["config"])
        elif origin in ("environment", "default") and variable is not None:
            # One that click does not read is read by what uses the option.
            value, origin = os.environ[variable] if origin == "default" else value, variable
        shown = _PASSWORD.sub(r"\1\2…", json.dumps(value, default=str, ensure_ascii=False))
        hidden = origin.endswith("_TOKEN")
        say(f"{_key(option)}: {'(hidden)' if hidden else shown}  # {origin}")


def _key(option: Any) -> str:
    """The name of an option in the file, as on the command line; of the argument, its own."""
    return next((name[2:] for name in option.opts if name.startswith("--")), str(option.name))


def _is_list(option: Any) -> bool:
    return bool(getattr(option, "multiple", False)) or option.nargs == -1
