"""``tokenloom serve``: runs brought up, and served until a signal."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from tokenloom_proto.credentials import CONTROL_VARIABLE
from tokenloom_proto.files import read_file, reason
from tokenloom_proto.threads import Background
from tokenloom_server.core.control_characters import escaped
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.command import App, add_command
from tokenloom_tools.cli.options import DATA, MixtureOptions, amounts, local_cpus
from tokenloom_tools.cli.output import LogFormat, logs_json, say, set_up_logging
from tokenloom_tools.cli.token import MadeToken, make_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenloom_server.api.auth import Access
    from tokenloom_server.api.rest.routes import Routes
    from tokenloom_server.api.server import ServeOptions
    from tokenloom_server.workers.cluster.readers.link import ReaderOptions


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


def show_settings(ctx: typer.Context) -> None:
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


#: ``tokenloom`` with this command alone.
app = App()

#: Objects that may be made, beyond those that went, before the newest are searched for cycles. Production makes and
#: drops views by the thousand, in no cycle; by Python's own default their search took 2 to 10 % of the server.
GC_THRESHOLD = 50_000
#: How long a signal to stop may go unnoticed, seconds.
SIGNALS_EVERY_S = 0.25
#: How long a server takes to end, seconds: more than its parts may take together. Then it ends as it stands.
END_S = 25.0
#: How long, after that, what its threads are at may still last: a tokeniser takes minutes for a long row.
ROW_S = 1.0


#: The headings in --help of what few need.
WAITS, CALLERS, PROCESS = "How long it waits", "Who may call", "The process"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where a server listens, where it keeps what, and for how long it waits."""

    grpc: Annotated[
        str,
        typer.Option(help="Where trainers connect; port 0 picks a free one.", metavar="HOST:PORT"),
    ] = "127.0.0.1:50051"
    rest: Annotated[
        str,
        typer.Option(
            help="REST API, metrics and the page; port 0 picks a free one.", metavar="HOST:PORT"
        ),
    ] = "127.0.0.1:8080"
    health: Annotated[
        str | None,
        typer.Option(
            help="Also answer /healthz and /readyz there, by themselves: also while all connections of REST are "
            "taken. Without a token and TLS; port 0 picks a free one; or TOKENLOOM_HEALTH.",
            metavar="HOST:PORT",
            envvar="TOKENLOOM_HEALTH",
            rich_help_panel=PROCESS,
        ),
    ] = None
    ledger: Annotated[
        str,
        typer.Option(
            help="Where committed state lives: sqlite:///file (relative to the first mixture file) or "
            "redis://host:port/db (needs appendonly yes and appendfsync always). auto: tokenloom.db beside the first "
            "mixture file, or on a disk of this machine where that folder is shared or read-only; "
            "or TOKENLOOM_LEDGER.",
            envvar="TOKENLOOM_LEDGER",
            metavar="URL",
        ),
    ] = "sqlite:///tokenloom.db"
    ready_file: Annotated[
        Path | None,
        typer.Option(
            help="Write both addresses and the runs there as JSON once the server is ready.",
            metavar="FILE",
            rich_help_panel=PROCESS,
        ),
    ] = None
    index_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for cached line indexes; beside each mixture file if not given.",
            metavar="DIR",
            rich_help_panel=PROCESS,
        ),
    ] = None
    runs_dir: Annotated[
        Path | None,
        typer.Option(
            help="A folder of mixture files: each *.yaml in it is a run. Files that come, change or go while the "
            "server is up add, reload and remove their runs.",
            metavar="DIR",
        ),
    ] = None
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Where another server leads a run, wait and take over when its lease lapses; else refuse.",
        ),
    ] = False
    revise: Annotated[
        str | None,
        typer.Option(
            help="Where a mixture file differs from the mixture in force, make that a revision, for this reason; else "
            "refuse.",
            metavar="REASON",
        ),
    ] = None
    lease: Annotated[
        float,
        typer.Option(
            min=1,
            max=3600,
            help="After which a server that cannot reach the ledger may be replaced.",
            metavar="SECONDS",
            rich_help_panel=WAITS,
        ),
    ] = 15.0
    liveness: Annotated[
        float,
        typer.Option(
            min=0,
            max=3600,
            help="Of silence, after which a rank no longer keeps its run from a new attempt.",
            metavar="SECONDS",
            rich_help_panel=WAITS,
        ),
    ] = 15.0
    storage_timeout: Annotated[
        float,
        typer.Option(
            min=1,
            help="That storage may not answer, or answer with errors, before the run stops with an error.",
            metavar="SECONDS",
            rich_help_panel=WAITS,
        ),
    ] = 300.0
    log_positions: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds between lines that say where each source stands; 0 for none.",
            hidden=True,
        ),
    ] = 0.0
    rank_timeout: Annotated[
        float,
        typer.Option(
            min=1,
            help="That ranks wait for one that does not go on, before they get an error.",
            metavar="SECONDS",
            rich_help_panel=WAITS,
        ),
    ] = 300.0


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """Who may call the server, and how it proves who it is."""

    token_file: Annotated[
        Path | None,
        typer.Option(
            help="The token that trainers and operators show; mode 0600. Without it: TOKENLOOM_TOKEN.",
            metavar="FILE",
            rich_help_panel=CALLERS,
        ),
    ] = None
    read_token_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with a second token, for reading alone: figures, metrics, the page. Without it: "
            "TOKENLOOM_READ_TOKEN.",
            hidden=True,
        ),
    ] = None
    make_token: Annotated[
        bool,
        typer.Option(
            "--make-token",
            help="Where no token is given: make one at the first start, keep it in the folder of indexes (mode 0600) "
            "and show it once; tokenloom token shows it again.",
        ),
    ] = False
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="Named tokens, each with a scope and its runs, made by tokenloom token create; mode 0600. Read again "
            "when the file changes.",
            metavar="FILE",
            rich_help_panel=CALLERS,
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="The server's certificate chain, PEM: gRPC and REST use TLS.",
            metavar="FILE",
            rich_help_panel=CALLERS,
        ),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(help="Its key, PEM.", metavar="FILE", rich_help_panel=CALLERS)
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="A CA, PEM: every client must show a certificate of it (mTLS).", hidden=True
        ),
    ] = None

    def access(self, made: MadeToken | None) -> Access:
        """The tokens that callers show, and the server's TLS. Raises ``ConfigError``."""
        from tokenloom_server.api.auth import Access
        from tokenloom_server.api.tls import Tls
        from tokenloom_server.api.tokens import watched_tokens

        tls = Tls.load(self.tls_cert, self.tls_key, self.tls_client_ca)
        named = watched_tokens(self.tokens) if self.tokens is not None else None
        return Access.find(
            os.environ, made.file if made else self.token_file, self.read_token_file, tls, named
        )

    def made_token(self, folder: Path) -> MadeToken | None:
        """The server's own token, kept in a folder, where it is asked for and no other is given."""
        variables = (CONTROL_VARIABLE, f"{CONTROL_VARIABLE}_FILE")
        if (
            not self.make_token
            or self.token_file is not None
            or any(map(os.environ.get, variables))
        ):
            return None
        return make_token(folder)


@dataclass(frozen=True, slots=True)
class Readers:
    """Where text is read and tokenised, if not in the server."""

    readers: Annotated[
        str | None,
        typer.Option(
            help="Read and tokenise text in tasks of Ray: auto, on the cluster that this machine belongs to; or "
            "local:N, on N CPUs of this machine. The order stays the same to the token. See docs/scale.md: to prepare "
            "the text once is nearly always better.",
            metavar="auto|local:N",
            rich_help_panel=DATA,
        ),
    ] = None
    readers_cpus: Annotated[
        float,
        typer.Option(min=0.01, max=1024, help="CPUs that a task of a reader takes.", hidden=True),
    ] = 1.0
    readers_resource: Annotated[
        list[str] | None,
        typer.Option(
            help="A resource of Ray's that a task takes beside, such as tokeniser=1.", hidden=True
        ),
    ] = None
    readers_late: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds without an answer after which rows are asked for again elsewhere.",
            hidden=True,
        ),
    ] = 30.0
    readers_fallback: Annotated[
        Literal["local"] | None,
        typer.Option(
            help="Where readers give nothing for the storage timeout: local reads the rows in the server; else the run "
            "ends with an error.",
            hidden=True,
        ),
    ] = None

    def options(self, storage_timeout: float) -> ReaderOptions | None:
        """What is asked for. Raises ``ConfigError``."""
        if self.readers is None:
            return None
        from tokenloom_server.workers.cluster.connection import Needs
        from tokenloom_server.workers.cluster.readers.link import ReaderOptions

        address, cpus = local_cpus("--readers", self.readers)
        if address != "auto" and cpus is None:
            raise ConfigError(
                f"--readers: found {self.readers!r}, expected auto, or local:N with N CPUs, such as local:4"
            )
        return ReaderOptions(
            address=address,
            local_cpus=cpus,
            needs=Needs(
                self.readers_cpus, resources=amounts("readers-resource", self.readers_resource)
            ),
            late_s=self.readers_late,
            timeout_s=storage_timeout,
            falls_back=self.readers_fallback is not None,
        )


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How the process lives, and what it logs."""

    parent: Annotated[
        int | None,
        typer.Option(
            help="The process that starts this server: killed at once when that ends, on Linux.",
            metavar="PID",
            rich_help_panel=PROCESS,
        ),
    ] = None
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", metavar="LEVEL")
    ] = "info"
    log_format: Annotated[
        LogFormat,
        typer.Option(
            help="Lines for people, or a JSON object a line. Times are in UTC.",
            rich_help_panel=PROCESS,
        ),
    ] = LogFormat.TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """All that ``serve`` takes."""

    mixtures: Annotated[
        list[Path] | None,
        typer.Argument(help="One mixture file per run to serve.", metavar="MIXTURE.yaml..."),
    ] = None
    options: ServerOptions
    access: ServerAccess
    readers: Readers
    process: ProcessOptions
    file: ConfigFile
    mixture_options: MixtureOptions

    def serve_options(self, access: Access) -> ServeOptions:
        """All that the server needs. Raises ``ConfigError``."""
        from tokenloom_server.api.server import ServeOptions
        from tokenloom_server.run.timeouts import Timeouts

        self.mixture_options.use_cache()
        mixture = self.mixture_options.short_form()
        if mixture is None and not self.mixtures and self.options.runs_dir is None:
            raise ConfigError(
                "nothing to serve: name a mixture file, or give --runs-dir or --dataset-mix"
            )
        if mixture is not None:
            json_alone = logs_json()
            text = f"\n{mixture.text}" if json_alone else ""
            logging.getLogger(__name__).info("the mixture of --dataset-mix, as a file:%s", text)
            if not json_alone:
                print(escaped(mixture.text, lines=True), file=sys.stderr, flush=True)
        settings = asdict(self.options)
        del settings["log_positions"]
        waits = ("lease", "liveness", "rank_timeout", "storage_timeout")
        return ServeOptions(
            mixtures=self.mixtures or [],
            mixture=mixture.config if mixture is not None else None,
            timeouts=Timeouts(**{f"{name}_s": settings.pop(name) for name in waits}),
            access=access,
            data_roots=self.mixture_options.roots(),
            plugins=self.mixture_options.plugins(),
            transforms=self.mixture_options.transforms(),
            readers=self.readers.options(self.options.storage_timeout),
            routes=tool_routes,
            **settings,
        )


def tool_routes() -> Sequence[Routes]:
    """The REST routes of tools; imports them."""
    from tokenloom_tools.routes import ROUTES

    return [ROUTES]


def serve(
    ctx: typer.Context,
    *,
    command: Command,
    settings: Annotated[
        bool,
        typer.Option("--settings", help="Print all settings, and where each comes from, and end."),
    ] = False,
) -> None:
    """Serve one or more runs until SIGTERM or Ctrl-C.

    Trainers then use RemoteDataset("grpc://HOST:PORT/RUN", batch_size=…).

    Each option may also be a variable (TOKENLOOM_SERVE_GRPC), or a line of the file of --config; some settings are
    nothing else, and --settings prints them all. The command line wins over variables, and these over the file.
    """
    if settings:
        show_settings(ctx)
        return
    options, access, process = command.options, command.access, command.process
    set_up_logging(process.log_level, process.log_format)
    if process.parent is not None:
        from tokenloom_server.api import parent_death

        parent_death.hold(process.parent)
    # numpy's linear algebra starts a thread for each core, with memory of its own; a server multiplies no matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(GC_THRESHOLD)
    from tokenloom_server.api.mixture_origin import INDEX_FOLDER
    from tokenloom_server.api.server import Server

    stopping, serving = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        stopping.set()
        if not serving.is_set():
            # Large corpora, or another server's lease, may keep a start for long: it is given up where it stands.
            _leave_soon()
            raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    _end_in_time()
    folder = command.mixtures[0].parent if command.mixtures else options.runs_dir or Path()
    made = access.made_token(options.index_dir or folder / INDEX_FOLDER)
    server = Server(command.serve_options(access.access(made)))
    serving.set()
    gc.freeze()  # what is there now stays until the end: no search goes through it
    gc.enable()  # see __main__
    # One line, plain, for people and scripts alike.
    print(
        f"tokenloom {'stands by' if options.standby else 'is ready'}: gRPC on {server.grpc_address}, REST and page on "
        f"{server.page_url} (runs: {', '.join(server.run_names) or 'none'})",
        flush=True,
    )
    if made is not None and made.is_new:
        print(
            made.lines(server.page_url, server.grpc_address, (server.run_names or ["RUN"])[0]),
            flush=True,
        )
    # The system may hand a signal to a thread that is not Python's own, and then nothing wakes this one, which has to
    # handle it: so it looks now and then.
    due = time.monotonic() + options.log_positions
    while not stopping.wait(SIGNALS_EVERY_S):
        if options.log_positions and time.monotonic() >= due:
            server.log_positions()
            due += options.log_positions
    logging.getLogger(__name__).info("stopping")
    server.close()
    _leave_soon()


def _end_in_time() -> None:
    """Ends the process ``END_S`` after the first signal, also where a library keeps the thread that handles it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        os.read(reading, 1)
        faulthandler.dump_traceback_later(END_S, exit=True)

    Background("end", watch).start()


def _leave_soon() -> None:
    """Does not let Python wait, as it ends, for threads that are at a row."""
    Background("leave", partial(os._exit, 0), after_s=ROW_S).start()


add_command(app, serve, **SETTINGS)
