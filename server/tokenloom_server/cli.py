"""The command line: the one place where things are wired together."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tokenloom_server import cli_mixture
from tokenloom_server.cli_parts import TlsCa, TlsCert, TlsKey, TokenFile, console, fail
from tokenloom_server.errors import ConfigError, TokenloomError

if TYPE_CHECKING:
    from tokenloom_server.config import RunConfig
    from tokenloom_server.data_roots import DataRoots
    from tokenloom_server.traced import TracedSample, TracedStep
    from tokenloom_server.viewer import View

app = typer.Typer(
    name="tokenloom",
    help="A data loader for language-model training: one server, one canonical order, exact elastic resume.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cli_mixture.app)
_REST_URL = typer.Argument(help="The server's REST address, such as http://127.0.0.1:8080", metavar="URL")
_Mixture = Annotated[
    Path | None,
    typer.Argument(
        help="A mixture file (YAML); see the README's configuration section.",
        metavar="MIXTURE.yaml",
        show_default=False,
    ),
]
_DataRoots = Annotated[
    list[Path] | None,
    typer.Option(
        help="A folder below which all data and tokenisers of a mixture file must lie; may be given again.",
        envvar="TOKENLOOM_DATA_ROOTS",
        show_default=False,
    ),
]
# Instead of a mixture file: a flat mixture on the command line, and what else a run needs.
_DatasetMix = Annotated[
    str | None,
    typer.Option(
        help="Instead of a mixture file: files, patterns or folders with their weights, such as "
        '"wiki/*.parquet:0.9 code:0.1"; path@column:weight where the column does not show.',
        rich_help_panel="A mixture without a file",
        show_default=False,
    ),
]
_MixRun = Annotated[
    str | None,
    typer.Option("--run", help="The run's name.", rich_help_panel="A mixture without a file", show_default=False),
]
_MixLength = Annotated[
    int | None,
    typer.Option(
        "--sequence-length", help="Tokens per sample.", rich_help_panel="A mixture without a file", show_default=False
    ),
]
_MixTokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="A tokenizer.json, a folder with one, or bytes.",
        rich_help_panel="A mixture without a file",
        show_default=False,
    ),
]
_MixSeed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="Seeds every draw; 0 if not given.",
        rich_help_panel="A mixture without a file",
        show_default=False,
    ),
]
_MixPolicy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="The mixture's policy; least_consumed if not given.",
        rich_help_panel="A mixture without a file",
        show_default=False,
    ),
]
_MixVocabSize = Annotated[
    int | None,
    typer.Option(
        "--vocab-size",
        help="Greatest id + 1, where all hold ids and there is no tokeniser.",
        rich_help_panel="A mixture without a file",
        show_default=False,
    ),
]
_MixEndOfText = Annotated[
    int | None,
    typer.Option(
        "--end-of-text-id",
        help="The id that ends a document, where there is no tokeniser.",
        rich_help_panel="A mixture without a file",
        show_default=False,
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        console().print(f"tokenloom {version('tokenloom')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    mixtures: Annotated[
        list[Path] | None,
        typer.Argument(help="One mixture file per run to serve.", metavar="MIXTURE.yaml...", show_default=False),
    ] = None,
    grpc: Annotated[str, typer.Option(help="Where trainers connect; port 0 picks a free one.")] = "127.0.0.1:50051",
    rest: Annotated[
        str, typer.Option(help="REST API, metrics and the page; port 0 picks a free one.")
    ] = "127.0.0.1:8080",
    ledger: Annotated[
        str,
        typer.Option(
            help="Where committed state lives: sqlite:///file (relative to the first mixture file) or "
            "redis://host:port/db (needs appendonly yes and appendfsync always).",
            envvar="TOKENLOOM_LEDGER",
        ),
    ] = "sqlite:///tokenloom.db",
    ready_file: Annotated[
        Path | None, typer.Option(help="Write both addresses there as JSON once the server is ready.")
    ] = None,
    index_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for cached line indexes; beside each mixture file if not given.", show_default=False),
    ] = None,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Where another server leads a run, wait and take over when its lease lapses; else refuse."
        ),
    ] = False,
    revise: Annotated[
        str | None,
        typer.Option(
            help="Where a mixture file differs from the mixture in force, make that a revision, for this reason; else "
            "refuse.",
            metavar="REASON",
            show_default=False,
        ),
    ] = None,
    lease: Annotated[
        float,
        typer.Option(
            min=1, max=3600, help="Seconds after which a server that cannot reach the ledger may be replaced."
        ),
    ] = 15.0,
    liveness: Annotated[
        float,
        typer.Option(
            min=0,
            max=3600,
            help="Seconds of silence after which a rank no longer keeps its run from a new attempt.",
        ),
    ] = 15.0,
    rank_timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds that ranks wait for one that does not go on, before they get an error."),
    ] = 300.0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the token that trainers and operators show; mode 0600. Without it: TOKENLOOM_TOKEN.",
            show_default=False,
        ),
    ] = None,
    read_token_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with a second token, for reading alone: figures, metrics, the page. Without it: "
            "TOKENLOOM_READ_TOKEN.",
            show_default=False,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="The server's certificate chain, PEM: gRPC and REST use TLS.", show_default=False),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.", show_default=False)] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="A CA, PEM: every client must show a certificate of it (mTLS).", show_default=False),
    ] = None,
    data_root: _DataRoots = None,
    dataset_mix: _DatasetMix = None,
    run: _MixRun = None,
    sequence_length: _MixLength = None,
    tokenizer: _MixTokenizer = None,
    seed: _MixSeed = None,
    policy: _MixPolicy = None,
    vocab_size: _MixVocabSize = None,
    end_of_text_id: _MixEndOfText = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve one or more runs until SIGTERM or Ctrl-C.

    Trainers then use RemoteDataset("grpc://HOST:PORT/RUN", batch_size=…).
    """
    # numpy's linear algebra starts a thread for each core, with memory of its own; a server multiplies no matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from tokenloom_server.data_roots import DataRoots
    from tokenloom_server.security import Access
    from tokenloom_server.server import ServeOptions, Server
    from tokenloom_server.tls import Tls

    _set_up_logging(log_level)
    stopping, serving = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        stopping.set()
        if not serving.is_set():
            # Large corpora, or another server's lease, may keep a start for long: it is given up where it stands.
            raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        roots = DataRoots.of(data_root or ())
        fields = _fields(run, sequence_length, tokenizer, seed, policy, vocab_size, end_of_text_id)
        short = _short_form(dataset_mix, fields, roots)
        if short is None and not mixtures:
            raise ConfigError("nothing to serve: name a mixture file, or give --dataset-mix")
        if short is not None:
            logging.getLogger(__name__).info("the mixture of --dataset-mix, as a file:\n%s", short[1])
        server = Server(
            ServeOptions(
                mixtures=mixtures or (),
                mixture=short[0] if short is not None else None,
                grpc=grpc,
                rest=rest,
                ledger=ledger,
                ready_file=ready_file,
                index_dir=index_dir,
                standby=standby,
                revise=revise,
                lease_s=lease,
                liveness_s=liveness,
                rank_timeout_s=rank_timeout,
                access=Access.find(os.environ, token_file, read_token_file),
                tls=Tls.load(tls_cert, tls_key, tls_client_ca),
                data_roots=roots,
            )
        )
        serving.set()
    except TokenloomError as error:
        fail(error)
    # One line, plain, for people and scripts alike.
    print(
        f"tokenloom {'stands by' if standby else 'is ready'}: gRPC on {server.grpc_address}, REST and page on "
        f"{server.page_url} (runs: {', '.join(server.run_names)})",
        flush=True,
    )
    stopping.wait()
    logging.getLogger(__name__).info("stopping")
    server.close()


@app.command()
def validate(
    mixture: _Mixture = None,
    data_root: _DataRoots = None,
    dataset_mix: _DatasetMix = None,
    run: _MixRun = None,
    sequence_length: _MixLength = None,
    tokenizer: _MixTokenizer = None,
    seed: _MixSeed = None,
    policy: _MixPolicy = None,
    vocab_size: _MixVocabSize = None,
    end_of_text_id: _MixEndOfText = None,
    print_file: Annotated[
        bool,
        typer.Option(
            "--print",
            help="Print the mixture file that --dataset-mix stands for; all else goes to standard error.",
            rich_help_panel="A mixture without a file",
        ),
    ] = False,
) -> None:
    """Check a mixture, its sources and its tokeniser, without serving anything.

    Opens every source, reads its first rows, chooses the tokeniser engine, and makes the first samples.
    """
    from rich.table import Table

    from tokenloom_server.data_roots import DataRoots
    from tokenloom_server.mixing.mixer import target_shares
    from tokenloom_server.order import Order

    _set_up_logging("warning")
    out = console(stderr=print_file)
    try:
        roots = DataRoots.of(data_root or ())
        fields = _fields(run, sequence_length, tokenizer, seed, policy, vocab_size, end_of_text_id)
        found, text, base_dir = _one_mixture(mixture, _short_form(dataset_mix, fields, roots))
        if print_file and not text:
            raise ConfigError("--print writes out what --dataset-mix stands for; a mixture file is one already")
        with console(stderr=True).status("opening sources and tokeniser"):
            order = Order.create(found, base_dir, None, roots)
            samples = order.pipeline(order.initial())
            samples.advance(1)
    except TokenloomError as error:
        fail(error)
    table = Table(title=f"run {found.run}: sequence length {found.sequence_length}, {found.packing}, seed {found.seed}")
    for heading in ("id", "source", "shards", "MB", "target share", "epochs"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for i, (source, shards, share) in enumerate(
        zip(found.sources, order.shards, target_shares(found, order.extents), strict=True)
    ):
        size = sum(shard.size for shard in shards) / 1e6
        table.add_row(str(i), source.name, str(len(shards)), f"{size:,.1f}", f"{share:.2%}", f"{found.epochs[i]:g}")
    out.print(table)
    engine = f"{order.engine.engine} {order.engine.version}" if order.engine else "none: every source holds ids"
    out.print(f"tokeniser engine: {engine}; vocabulary: {order.vocab_size:,}; ids travel as {order.dtype.name}")
    for warning in order.warnings():
        out.print(f"warning: {warning}", style="yellow")
    if samples.ended is not None:
        out.print(f"warning: the data are too short for one sample: {samples.ended}", style="yellow")
    out.print("valid", style="green")
    if print_file:
        print(text, end="")


@app.command()
def plan(
    mixture: _Mixture = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Plan up to so many tokens, such as 500M, 10B or 1.5T; to the end if not given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw the shares over the tokens into this file, .svg or .png (pip install 'tokenloom[plot]').",
            show_default=False,
        ),
    ] = None,
    data_root: _DataRoots = None,
    dataset_mix: _DatasetMix = None,
    run: _MixRun = None,
    sequence_length: _MixLength = None,
    tokenizer: _MixTokenizer = None,
    seed: _MixSeed = None,
    policy: _MixPolicy = None,
    vocab_size: _MixVocabSize = None,
    end_of_text_id: _MixEndOfText = None,
) -> None:
    """Say what a run will be, before it: when each source runs out, epochs, shares over time, and when it ends.

    Reads the sources' headers and a sample of their rows, so it takes seconds, whatever their size and however many
    tokens are planned. Drawn policies are planned at their mean.
    """
    from tokenloom_server.amounts import parse_amount
    from tokenloom_server.course import Course
    from tokenloom_server.data_roots import DataRoots
    from tokenloom_server.order import Order
    from tokenloom_server.planning.planner import Planner

    _set_up_logging("warning")
    try:
        until = None if tokens is None else parse_amount(tokens, "--tokens")
        form = None if picture is None else _picture_format(picture)
        roots = DataRoots.of(data_root or ())
        fields = _fields(run, sequence_length, tokenizer, seed, policy, vocab_size, end_of_text_id)
        found, _, base_dir = _one_mixture(mixture, _short_form(dataset_mix, fields, roots))
        with console(stderr=True).status("opening sources and tokeniser") as status:
            order = Order.create(found, base_dir, None, roots)
            course = Course(order)
            planner = Planner(lambda name: status.update(f"measuring {name}"))
            made = planner.plan(course, course.initial(), until)
        if picture is not None and form is not None:
            from tokenloom_server.picture import draw

            _write(picture, draw(made, form))
    except TokenloomError as error:
        fail(error)
    if as_json:
        print(made.model_dump_json(indent=2))
        return
    from tokenloom_server.planning.report import report

    out = console()
    for part in report(made):
        out.print(part, highlight=False)
    if picture is not None:
        out.print(f"the picture is {picture}", highlight=False)


def _picture_format(path: Path) -> Literal["svg", "png"]:
    match path.suffix.lower():
        case ".svg":
            return "svg"
        case ".png":
            return "png"
    raise ConfigError(f"--picture {path}: expected a file name that ends with .svg or .png")


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


@app.command()
def stats(
    url: Annotated[str, _REST_URL],
    run: Annotated[str | None, typer.Option(help="One run; all of the server's if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the documents as JSON, one a line.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show the mix of a running server: shares, rows, tokens, epochs, ranks."""
    from rich.table import Table

    from tokenloom_server.remote import Remote

    out = console()
    try:
        remote = Remote(url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
        found = remote.stats(run)
    except TokenloomError as error:
        fail(error)
    for document in found:
        if as_json:
            print(json.dumps(document.model_dump(), ensure_ascii=False))
            continue
        out.print(
            f"{document.run}: sample {document.sample_index:,}, {document.total_tokens:,} tokens committed, "
            f"{document.tokens_per_s:,.0f} tokens/s; generation {document.generation}, "
            f"{document.world_size} ranks × {document.batch_size}; ledger {document.ledger.backend}"
        )
        coming = document.next_revision
        if document.revision or coming:
            behind = f"; revision {coming.number} from sample {coming.sample_index:,} on" if coming else ""
            what = f"revision {document.revision}" if document.revision else "the mixture that the run began with"
            out.print(f"in force: {what}{behind} (tokenloom mixture show)")
        table = Table()
        for heading in ("source", "target", "actual", "recent", "samples", "rows", "tokens", "epoch", "left"):
            table.add_column(heading, justify="left" if heading == "source" else "right")
        for source in document.sources:
            left = "?" if source.remaining_samples is None else f"{source.remaining_samples:,}"
            table.add_row(
                source.alias,
                f"{source.target_share:.2%}",
                f"{source.actual_share:.2%}",
                f"{source.window_share:.2%}",
                f"{source.samples:,}",
                f"{source.rows:,}",
                f"{source.tokens:,}",
                f"{source.epoch:.2f}",
                "exhausted" if source.exhausted else left,
            )
        out.print(table)
        skipped = [source for source in document.sources if source.skipped_samples]
        if skipped:
            named = ", ".join(
                f"{source.alias} {source.skipped_samples:,} samples, {source.skipped_rows:,} rows, "
                f"{source.skipped_tokens:,} tokens"
                for source in skipped
            )
            out.print(f"skipped by restores, and not counted above: {named}", highlight=False)
        for rank in document.ranks:
            heard = "never heard" if rank.last_heard_s is None else f"heard {rank.last_heard_s:.1f} s ago"
            state = "connected" if rank.connected else "away"
            out.print(f"rank {rank.rank}: {state}, at sample {rank.position:,} (lag {rank.lag:,}), {heard}")
        for note in (document.waiting_for and f"waiting for {document.waiting_for}", document.ended, document.error):
            if note:
                out.print(note)


@app.command()
def verify(
    a: Annotated[
        str,
        typer.Argument(
            help="A server's REST address, with /RUN where it has several, or a snapshot or checkpoint in JSON.",
            metavar="A",
            show_default=False,
        ),
    ],
    b: Annotated[str, typer.Argument(help="The other one.", metavar="B", show_default=False)],
    run_a: Annotated[str | None, typer.Option(help="The run of A, where A is a server.", show_default=False)] = None,
    run_b: Annotated[str | None, typer.Option(help="The run of B, where B is a server.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as JSON.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Prove whether two runs had the same data, on any topology, and up to which sample.

    Compares rolling digests. Where they differ, servers are asked for digests at earlier samples until the first
    sample that differs is found. Exit status: 0 if the data are the same up to the end of the shorter run, 1 if they
    differ, 2 if that cannot be told.
    """
    from tokenloom_server import comparison, sides
    from tokenloom_server.remote import Remote

    def connect(url: str) -> Remote:
        return Remote(url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)

    try:
        with console(stderr=True).status("comparing"):
            both = sides.side(a, run_a, connect), sides.side(b, run_b, connect)
            verdict = comparison.compare(*both)
            lines = comparison.explain(verdict, *both)
    except TokenloomError as error:
        fail(error)
    if as_json:
        print(json.dumps(comparison.document(verdict, *both), ensure_ascii=False))
    else:
        out = console()
        for line in lines:
            out.print(line, highlight=False, soft_wrap=True)
        out.print(comparison.PROVES, style="dim", highlight=False)
    raise typer.Exit(verdict.status)


@app.command()
def report(
    url: Annotated[str, typer.Argument(help="The server's REST address, such as http://127.0.0.1:8080", metavar="URL")],
    run: Annotated[str | None, typer.Option(help="The run, where the server has several.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json/--markdown", help="As JSON, or as Markdown.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Write what a model card needs to say about a run's data: sources, tokens, epochs, digests, launches."""
    from tokenloom_server.model_card import markdown
    from tokenloom_server.remote import Remote

    try:
        remote = Remote(url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
        found = remote.report(remote.only_run(run))
    except TokenloomError as error:
        fail(error)
    print(
        json.dumps(found.model_dump(), ensure_ascii=False) if as_json else markdown(found), end="\n" if as_json else ""
    )


@app.command()
def peek(
    url: Annotated[
        str,
        typer.Argument(
            help="What trainers use: grpc://HOST:PORT/RUN, or grpcs:// with TLS.", metavar="URL", show_default=False
        ),
    ],
    at: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The sample index to begin at, such as a trainer's sample_index before a loss spike; where the "
            "ledger stands if not given.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=10_000, help="How many samples.")] = 8,
    text: Annotated[bool, typer.Option("--text", help="Print the whole text of each sample.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the samples as JSON, one a line, with ids, text and digest.")
    ] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Look at the samples of a served run, as the model sees them, without taking part in it.

    Nothing is joined, counted, committed or fenced: it may be done while the run trains, before it begins and after
    its end. Samples come by their index in the run's one order, so the samples of a step with a loss spike are those
    between the sample_index of the batch before it and its own. Any index works that the ledger's journal reaches,
    and up to 65,536 samples beyond what is committed.

    Text is the run's tokeniser's, control characters as pictures; without a tokeniser, ids are shown.
    """
    from tokenloom_server.viewer import look

    try:
        view = look(
            url,
            at,
            samples,
            os.environ,
            token_file=token_file,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
        )
    except TokenloomError as error:
        fail(error)
    if as_json:
        for seen in view.samples:
            print(json.dumps(seen.document(view.decode), ensure_ascii=False))
    elif text:
        _print_texts(view)
    else:
        _print_samples(view)
    if view.end is not None:
        console(stderr=True).print(f"the data end here: {view.end}", highlight=False)


def _print_samples(view: View) -> None:
    from rich.table import Table

    from tokenloom_server.tokenizer.text import on_one_line

    out = console()
    out.print(f"{view.run}: {view.committed:,} samples are committed", highlight=False)
    table = Table(expand=True)
    for heading in ("sample", "source", "tokens", "documents"):
        table.add_column(heading, justify="left" if heading == "source" else "right", no_wrap=True)
    table.add_column("text" if view.decode else "ids", no_wrap=True, overflow="ellipsis", ratio=1)
    for seen in view.samples:
        begin = on_one_line(seen.text(view.decode, out.width))
        table.add_row(f"{seen.index:,}", seen.source, f"{len(seen.ids):,}", f"{seen.documents:,}", begin)
    out.print(table)


def _print_texts(view: View) -> None:
    from tokenloom_server.tokenizer.text import as_lines

    out = console()
    for seen in view.samples:
        out.rule(
            f"sample {seen.index:,}: {seen.source}, {len(seen.ids):,} tokens, {seen.documents:,} documents",
            align="left",
        )
        out.print(as_lines(seen.text(view.decode)), highlight=False, soft_wrap=True)


@app.command()
def trace(
    url: Annotated[str, _REST_URL],
    sample: Annotated[
        int | None, typer.Option(min=0, help="A sample index: one sample's documents.", show_default=False)
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="A step of a generation, from 0: what its ranks got in it.", show_default=False),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Of the step, one rank; all if not given.")] = None,
    generation: Annotated[
        int | None,
        typer.Option(
            min=1, help="The launch whose line to follow, where a later one rewound it; the present one if not given."
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(help="The run; needed where the server has several.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print each document's text, too.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer as JSON; with --text also texts and ids.")
    ] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show which documents a sample was made of, or what each rank got in a step: file, row, and tokens of the row.

    Nothing of this was kept: the server makes the samples again from the nearest state in its ledger and reads their
    rows once more, in turns with the peeks, so that training is not slowed. Tokens of a row are counted with its
    begin- and end-of-text ids.
    """
    from tokenloom_server.remote import Remote

    try:
        if (sample is None) == (step is None):
            raise ConfigError("give one of --sample and --step")
        if rank is not None and step is None:
            raise ConfigError("--rank goes with --step; a sample is one rank's anyway")
        remote = Remote(url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
        name = remote.only_run(run)
        found: TracedSample | TracedStep
        if step is not None:
            found = remote.trace_step(name, step, rank=rank, generation=generation, text=text)
        else:
            assert sample is not None
            found = remote.trace_sample(name, sample, generation=generation, text=text)
    except TokenloomError as error:
        fail(error)
    if as_json:
        print(json.dumps(found.model_dump(), ensure_ascii=False))
    else:
        from tokenloom_server.trace_report import print_trace

        print_trace(console(), name, found, text)


@app.command()
def restore(
    url: Annotated[str, _REST_URL],
    run: Annotated[str | None, typer.Option(help="The run; needed where the server has several.")] = None,
    snapshot: Annotated[
        str | None, typer.Option(help="The id of a snapshot that was saved in the ledger.", show_default=False)
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=0, help="A sample index: where the trainer's checkpoint stands.", show_default=False),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="A file with a snapshot, or with what state_dict() gave, as JSON.", show_default=False),
    ] = None,
    skip_samples: Annotated[
        int, typer.Option(min=0, help="Samples behind that point that are not delivered: a bad range.")
    ] = 0,
    skip_tokens: Annotated[int, typer.Option(min=0, help="The same in tokens, rounded up to whole samples.")] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the server's control token; mode 0600. Without it: TOKENLOOM_TOKEN.", show_default=False
        ),
    ] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Pin where the next launch of the trainers starts, and what it jumps over behind that point.

    Nothing moves until that launch joins. A trainer that brings a state of its own has to bring this one; another is
    refused. Samples to skip are those of the order right behind it, such as a range at which the loss went up: they
    count as skipped, not as consumed, and the launch begins behind them.
    """
    from tokenloom_server.remote import Remote

    try:
        if [snapshot, sample, state].count(None) != 2:
            raise ConfigError("give one of --snapshot, --sample and --state")
        if skip_samples and skip_tokens:
            raise ConfigError("give at most one of --skip-samples and --skip-tokens")
        remote = Remote(
            url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, control=True
        )
        name = remote.only_run(run)
        asked: dict[str, str | int] = {"skip_samples": skip_samples, "skip_tokens": skip_tokens}
        if snapshot is not None:
            asked["snapshot_id"] = snapshot
        elif sample is not None:
            asked["sample_index"] = sample
        elif state is not None:
            asked["snapshot"] = _snapshot_text(state)
        point = remote.restore(name, **asked)
    except TokenloomError as error:
        fail(error)
    out = console()
    out.print(
        f"{name}: the next launch resumes from sample {point.sample_index:,} (digest {point.digest})", highlight=False
    )
    if point.skipped_samples:
        out.print(
            f"samples {point.sample_index:,} to {point.start_index - 1:,} are skipped: it begins at sample "
            f"{point.start_index:,}",
            highlight=False,
        )


def _snapshot_text(path: Path) -> str:
    """The text of a snapshot out of a file that holds it, or what ``state_dict()`` gave as JSON."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--state {path}: expected a snapshot as JSON ({error})") from None
    if isinstance(document, dict) and isinstance(document.get("tokenloom"), str):
        return str(document["tokenloom"])
    return text.strip()


@app.command()
def fork(
    url: Annotated[str, _REST_URL],
    run: Annotated[str, typer.Option(help="The new run; its mixture file is served already.")],
    parent: Annotated[
        str | None,
        typer.Option("--from", help="The run that it begins from, served there, too.", show_default=False),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=0, help="Where that run stood; what it has committed if not given.", show_default=False),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --from: a file with its snapshot, or with what state_dict() gave, as JSON.",
            show_default=False,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the server's control token; mode 0600. Without it: TOKENLOOM_TOKEN.", show_default=False
        ),
    ] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Begin a run where another one stands: a branch off one checkpoint, with a mixture of its own.

    Sources that both mixtures have go on where they stood; others begin at their first row. Sample index, tokens and
    rolling digest go on. The first launch of the new run then joins without a state; in a trainer,
    RemoteDataset(…, fork_from=state_dict) does the same.
    """
    from tokenloom_server.remote import Remote

    try:
        if (parent is None) == (state is None):
            raise ConfigError("give one of --from and --state")
        remote = Remote(
            url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, control=True
        )
        text = _snapshot_text(state) if state is not None else None
        point = remote.fork(run, parent=parent, sample_index=sample, snapshot=text)
    except TokenloomError as error:
        fail(error)
    console().print(
        f"{run}: begins at sample {point.sample_index:,} (digest {point.digest}), with the first launch",
        highlight=False,
    )


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where corpora, logs and checkpoints go.")] = Path("tokenloom-demo"),
    steps: Annotated[int, typer.Option(min=8, help="Training steps of the first, two-rank part's plan.")] = 48,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the server and its page up at the end, until Ctrl-C.")
    ] = False,
) -> None:
    """Run the whole job on text that is on this machine: train, kill everything, resume elsewhere, prove it."""
    from tokenloom_server.demo.main import run_demo

    raise typer.Exit(run_demo(folder, steps=steps, keep=keep))


def _fields(
    run: str | None,
    sequence_length: int | None,
    tokenizer: str | None,
    seed: int | None,
    policy: str | None,
    vocab_size: int | None,
    end_of_text_id: int | None,
) -> dict[str, str | int | None]:
    """What stands beside --dataset-mix, by its name in a mixture file, in a mixture file's order."""
    return {
        "run": run,
        "seed": seed,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "end_of_text_id": end_of_text_id,
        "sequence_length": sequence_length,
        "policy": policy,
    }


def _one_mixture(mixture: Path | None, short: tuple[RunConfig, str] | None) -> tuple[RunConfig, str, Path]:
    """The config of the file or of the short form, the text that the latter stands for, and where paths begin."""
    from tokenloom_server import config

    if short is not None and mixture is None:
        return *short, Path.cwd()
    if short is None and mixture is not None:
        return config.load(mixture), "", mixture.resolve().parent
    raise ConfigError("expected a mixture file or --dataset-mix, one of the two")


def _short_form(mix: str | None, fields: dict[str, str | int | None], roots: DataRoots) -> tuple[RunConfig, str] | None:
    """The mixture of --dataset-mix, below the current folder, and its text as a file; None without it."""
    named = [f"--{name.replace('_', '-')}" for name, value in fields.items() if value is not None]
    if mix is None:
        if named:
            raise ConfigError(f"{', '.join(named)}: belongs to --dataset-mix; a mixture file says it itself")
        return None
    missing = [f"--{name.replace('_', '-')}" for name in ("run", "sequence_length") if fields[name] is None]
    if missing:
        raise ConfigError(f"--dataset-mix needs {' and '.join(missing)} beside it")
    from tokenloom_server import config, dataset_mix

    document = dataset_mix.document(mix, Path.cwd(), roots, **fields)
    return config.parse(document, where=dataset_mix.OPTION), dataset_mix.as_yaml(document)


def _set_up_logging(level: str) -> None:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise typer.BadParameter(f"{level!r}; expected debug, info, warning or error", param_hint="--log-level")
    # Plain lines, never wrapped: logs are read with grep as often as by eye.
    logging.basicConfig(level=number, format="%(asctime)s %(levelname)-7s %(message)s")
