"""Options that several commands have: how a server is reached, and the mixture that a command is about."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple
from urllib.parse import quote

import typer
from tokenloom_proto.address import Address, ServerAddress, reached_at
from tokenloom_proto.credentials import TlsFiles, is_loopback
from tokenloom_server.errors import ConfigError, SnapshotInvalid
from typer.models import OptionInfo

from tokenloom_tools.cli.token import DEFAULT_FOLDER, kept_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenloom_server.config.catalog import Catalog
    from tokenloom_server.config.data_roots import DataRoots
    from tokenloom_server.config.run import RunConfig

    from tokenloom_tools.remote import Remote
    from tokenloom_tools.servers import Servers

Url = Annotated[
    str,
    typer.Argument(
        help="HOST:PORT of either port of a server; with /RUN where it has several.", metavar="URL"
    ),
]
_ControlTokenFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with the server's control token; mode 0600. Without it: TOKENLOOM_TOKEN."
    ),
]


def _parsed(url: str) -> ServerAddress:
    try:
        return ServerAddress.parse(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None


@dataclass(frozen=True, slots=True)
class ReadAccess:
    """The token of a command that only reads from a server. Files of TLS are the environment's: TOKENLOOM_TLS_CA."""

    token_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the server's token; mode 0600. Without it: TOKENLOOM_READ_TOKEN or TOKENLOOM_TOKEN."
        ),
    ] = None
    control: ClassVar[bool] = False

    def connect(self, url: str) -> Remote:
        """The server at an address of either of its ports. Raises ``ConfigError``, and ``ServerUnreachable`` where it
        has to be asked for the other one. Of several the one that can serve: those that stand by know little."""
        from tokenloom_tools.remote import ServerUnreachable

        address = _parsed(url)
        for target in address.targets if len(address.targets) > 1 else ():
            scheme = f"{address.scheme}://" if address.scheme else ""
            try:
                remote = self.connect(f"{scheme}{target}/{quote(address.run)}")
                remote.check_ready()
            except ServerUnreachable:
                continue
            return remote
        return self._rest(url if url.startswith(("http://", "https://")) else self._locate(url)[0])

    def servers(self, url: str) -> Servers:
        """The servers of a run, by an address as ``connect`` takes it, or by those of all of them (gRPC's)."""
        address = _parsed(url)
        if address.is_grpc and address.run:
            return self._grpc(Address(address.targets, address.run, address.is_tls(False)))
        rest_url, grpc_address = self._locate(url)
        rest = self._rest(rest_url)
        return _same(rest, self._grpc(replace(grpc_address, run=rest.only_run())))

    def _locate(self, url: str) -> tuple[str, Address]:
        """The URL of REST and the address of gRPC, by what the port at an address says of the other one."""
        from tokenloom_tools.remote import ServerUnreachable

        address = _parsed(url)
        grpc_address = Address(
            address.targets, address.run, address.is_tls(TlsFiles().or_of(os.environ) != TlsFiles())
        )
        if not address.is_grpc:
            try:
                target = reached_at(self._rest(url).about().address, address.targets[0])
                return url, replace(grpc_address, targets=(target,))
            except ServerUnreachable:
                if address.scheme:
                    raise
        servers = self._grpc(grpc_address)
        rest_url = f"http{'s' * grpc_address.tls}://{servers.about().address}/{quote(address.run)}"
        _same(self._rest(rest_url), servers)
        return rest_url, grpc_address

    def _rest(self, url: str) -> Remote:
        from tokenloom_tools.remote import Remote

        file = self._token_file(_parsed(url).targets)
        return Remote(url, os.environ, token_file=file, control=self.control)

    def _grpc(self, address: Address) -> Servers:
        from tokenloom_tools.servers import Servers

        return Servers(address, os.environ, token_file=self._token_file(address.targets))

    def _token_file(self, targets: Sequence[str]) -> Path | None:
        """Where no token is given, for a server of this machine, the one that it made in this folder."""
        is_here = all(is_loopback(target.rpartition(":")[0]) for target in targets)
        return self.token_file or (kept_token(DEFAULT_FOLDER) if is_here else None)


def _same(rest: Remote, servers: Servers) -> Servers:
    """Two ports of one server, of which one was found by the other's word, before the token goes there. Raises
    ``ServerUnreachable``."""
    from tokenloom_tools.remote import ServerUnreachable

    if not servers.is_server(rest.identity()):
        raise ServerUnreachable(
            f"{rest.url} and {servers.url} are two servers, though one says that the other is its own port: it is "
            "published under another number; give the address of that port, http://HOST:PORT or grpc://HOST:PORT/RUN"
        )
    return servers


@dataclass(frozen=True, slots=True)
class ControlAccess(ReadAccess):
    """The token of a command that changes something at a server."""

    token_file: _ControlTokenFile = None

    control: ClassVar[bool] = True


#: Where a command takes a checkpoint.
Inside = Annotated[
    str | None, typer.Option(help="Where in the checkpoint the state lies, if it holds several.")
]


def snapshot_text(path: Path, inside: str | None) -> str:
    """The text of the state in a checkpoint, as a trainer would send it. Raises ``SnapshotInvalid``."""
    from tokenloom_proto.seal import canonical, seal

    from tokenloom_tools.checkpoint.file import find

    state = find(path, inside)
    if state.damage is not None:
        raise SnapshotInvalid(f"{path}: {state.damage}")
    return seal(state.document) if "format" in state.document else canonical(state.document)


# The mixture: a file, or the short form on the command line.

#: The headings in --help of what stands instead of a mixture file, and of what a mixture may read.
PANEL, DATA = "A mixture without a file", "The data"
Mixture = Annotated[
    Path | None,
    typer.Argument(help="A mixture file (YAML); see docs/mixture-file.md.", metavar="MIXTURE.yaml"),
]
#: Where --data-root is not given: places, separated by colons.
DATA_ROOTS = "TOKENLOOM_DATA_ROOTS"


#: The options that are fields of a mixture file, in a mixture file's order.
_FIELDS = (
    *(
        "run",
        "seed",
        "bucket_by",
        "edges",
        "global_batch_size",
        "tokenizer",
        "vocab_size",
        "end_of_text_id",
    ),
    *("sequence_length", "policy"),
)


class _Short(OptionInfo):
    """An option of the short form."""

    def __init__(self, text: str, *names: str) -> None:
        super().__init__(default=..., param_decls=names, help=text, rich_help_panel=PANEL)


class LoadedMixture(NamedTuple):
    config: RunConfig
    #: The mixture file that the short form stands for; empty for a file.
    text: str
    #: Where relative paths begin.
    base_dir: Path


@dataclass(frozen=True, slots=True)
class MixtureOptions:
    """Where data may lie, and the short form: a flat mixture on the command line, and what else a run needs."""

    data_root: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder or URL below which all data and tokenisers of a mixture file must lie; may be given again; "
            f"or {DATA_ROOTS}.",
            metavar="PLACE",
            rich_help_panel=DATA,
        ),
    ] = None
    allow_plugins: Annotated[
        str | None,
        typer.Option(
            help="Source schemes of other installed packages that a mixture may name; their code is run; "
            "or TOKENLOOM_ALLOW_PLUGINS.",
            metavar="NAME,…",
            rich_help_panel=DATA,
        ),
    ] = None
    allow_transforms: Annotated[
        str | None,
        typer.Option(
            help="Experimental. Functions of yours that a mixture's sources may name as transform; their code is run; "
            "or TOKENLOOM_ALLOW_TRANSFORMS.",
            metavar="NAME,…",
            rich_help_panel=DATA,
        ),
    ] = None
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Keep what is read of remote storage in this folder of a local disk; or TOKENLOOM_CACHE.",
            metavar="DIR",
            rich_help_panel=DATA,
        ),
    ] = None
    cache_size: Annotated[
        str | None,
        typer.Option(
            help="How large it may become; 100G if not given; or TOKENLOOM_CACHE_SIZE.",
            hidden=True,
        ),
    ] = None
    decompress_mib: Annotated[
        int | None,
        typer.Option(
            help="MiB of memory that decoding a compressed file may take: 128 of zstd and 256 of xz if not given; "
            "or TOKENLOOM_DECOMPRESS_MIB.",
            min=1,
            max=99999,
            hidden=True,
        ),
    ] = None
    dataset_mix: Annotated[
        str | None,
        _Short(
            "Instead of a mixture file: files, patterns or folders with their weights, such as "
            '"wiki/*.parquet:0.9 code:0.1"; path@column:weight where the column does not show.',
            "--dataset-mix",
            "--dataset_mix",
        ),
    ] = None
    run: Annotated[str | None, _Short("The run's name.", "--run")] = None
    sequence_length: Annotated[int | None, _Short("Tokens per sample.")] = None
    tokenizer: Annotated[
        str | None, _Short("A tokenizer.json, a folder with one, a name on the Hub, or bytes.")
    ] = None
    seed: Annotated[int | None, _Short("Seeds every draw; 0 if not given.")] = None
    policy: Annotated[str | None, _Short("The mixture's policy; least_consumed if not given.")] = (
        None
    )
    vocab_size: Annotated[
        int | None, _Short("Greatest id + 1, where all hold ids and there is no tokeniser.")
    ] = None
    end_of_text_id: Annotated[
        int | None, _Short("The id that ends a document, where there is no tokeniser.")
    ] = None
    bucket_by: Annotated[
        str | None, _Short("Of ready tensors: the column of the bucket, or length(COLUMN).")
    ] = None
    edges: Annotated[
        list[str] | None, _Short("The greatest length of each bucket: 64,128; may be given again.")
    ] = None
    global_batch_size: Annotated[
        int | None, _Short("With --bucket-by: rows of a micro-step, over all ranks.")
    ] = None

    def roots(self) -> DataRoots:
        """What --data-root says, or else the environment. Raises ``ConfigError``."""
        from tokenloom_server.config.data_roots import DataRoots

        # The colon of s3://bucket separates nothing.
        from_environment = [
            place for place in re.split(r":(?!//)", os.environ.get(DATA_ROOTS, "")) if place
        ]
        return DataRoots.of(self.data_root or from_environment)

    def use_cache(self) -> None:
        """Whatever this process reads of remote storage is kept where --cache says, and what is compressed takes as
        much memory as decompress-mib says. Raises ``ConfigError``."""
        from tokenloom_server.sources import compressed
        from tokenloom_server.storage import cache

        options = {
            cache.FOLDER: self.cache,
            cache.SIZE: self.cache_size,
            compressed.MEMORY: self.decompress_mib,
        }
        os.environ.update(
            {name: str(value) for name, value in options.items() if value is not None}
        )
        cache.block_cache()

    def catalog(self) -> Catalog:
        """What a mixture may name. Raises ``ConfigError`` for a plugin that does not load."""
        from tokenloom_server.catalog import open_catalog

        return open_catalog(self.plugins(), self.transforms())

    def plugins(self) -> list[str]:
        """What --allow-plugins says, or else the environment."""
        from tokenloom_server.catalog import ALLOW_PLUGINS, allowed_names

        return allowed_names(ALLOW_PLUGINS, self.allow_plugins)

    def transforms(self) -> list[str]:
        """What --allow-transforms says, or else the environment."""
        from tokenloom_server.catalog import ALLOW_TRANSFORMS, allowed_names

        return allowed_names(ALLOW_TRANSFORMS, self.allow_transforms)

    def load(self, file: Path | None) -> LoadedMixture:
        """The mixture of the file or of the short form, of which there must be one. Raises ``ConfigError``."""
        from tokenloom_server.config import mixture_file as config

        self.use_cache()
        short = self.short_form()
        if short is not None and file is None:
            return short
        if short is None and file is not None:
            return LoadedMixture(config.load(file, self.catalog()), "", file.resolve().parent)
        raise ConfigError("expected a mixture file or --dataset-mix, one of the two")

    def short_form(self) -> LoadedMixture | None:
        """The mixture of --dataset-mix, below the current folder; None without it. Raises ``ConfigError``."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        if self.dataset_mix is None:
            if extra := [_option(name) for name, value in fields.items() if value is not None]:
                raise ConfigError(
                    f"{', '.join(extra)}: belongs to --dataset-mix; a mixture file says it itself"
                )
            return None
        size = "global_batch_size" if self.bucket_by is not None else "sequence_length"
        if missing := [_option(name) for name in ("run", size) if fields[name] is None]:
            raise ConfigError(f"--dataset-mix needs {' and '.join(missing)} beside it")
        from tokenloom_server.config import mixture_file as config
        from tokenloom_server.sources.catalog import sources_of

        from tokenloom_tools import short_form

        catalog = self.catalog()
        document = short_form.document(
            self.dataset_mix, Path.cwd(), sources_of(catalog), self.roots(), **fields
        )
        run_config = config.parse(document, where=short_form.OPTION, catalog=catalog)
        return LoadedMixture(run_config, short_form.as_yaml(document), Path.cwd())


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def local_cpus(option: str, address: str) -> tuple[str, int | None]:
    """An address of Ray's, and how many CPUs of this machine ``local:N`` asks for. Raises ``ConfigError``."""
    kind, colon, count = address.partition(":")
    if kind != "local" or not colon:
        return address, None
    if not (count.isdecimal() and int(count) > 0):
        raise ConfigError(
            f"{option}: found {address!r}, expected auto, or local:N with N CPUs, such as local:4"
        )
    return kind, int(count)


def amounts(option: str, texts: Sequence[str] | None) -> dict[str, float]:
    """Amounts by name, as NAME=AMOUNT each. Raises ``ConfigError``."""
    by_name = {}
    for text in texts or ():
        name, _, amount = text.partition("=")
        try:
            by_name[name] = float(amount)
            if not 0 < by_name[name] < float("inf"):
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"{option}: found {text!r}, expected NAME=AMOUNT, such as tokeniser=1"
            ) from None
    return by_name
