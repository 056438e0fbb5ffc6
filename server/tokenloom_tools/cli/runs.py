"""The commands that ask a server of its runs: ``runs`` adds, reloads and removes them, ``stats`` shows them, ``verify``
compares them, ``restore`` and ``fork`` say where one begins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.mixture import user_name
from tokenloom_tools.cli.options import ControlAccess, Inside, ReadAccess, Url, snapshot_text
from tokenloom_tools.cli.output import console, print_document, print_json, say

if TYPE_CHECKING:
    from tokenloom_tools.remote import Remote


def runs(
    url: Url,
    add: Annotated[
        Path | None,
        typer.Option(
            help="Add a run, of this mixture file on the server's machine. One that the ledger knows goes on where it "
            "was.",
            metavar="MIXTURE.yaml",
        ),
    ] = None,
    reload: Annotated[
        str | None,
        typer.Option(
            help="Have the mixture file of this run read again; one that could not be brought up is tried again. "
            "Trainers go on, or wait for a moment.",
            metavar="RUN",
        ),
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(
            help="Remove this run. Its trainers end with an error that says so; the ledger keeps the run.",
            metavar="RUN",
        ),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(
            help="Where the mixture differs from the one in force, make that a revision, for this reason; else it is "
            "refused."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
    *,
    access: ControlAccess,
) -> None:
    """List a server's runs, and mixtures that it cannot serve, with the reason; or add, reload or remove a run.

    Whether an added run is there again after a restart of the server, the answer says. A run is called as its file
    where that could not be read.
    """
    server, why = access.connect(url), {"reason": reason, "author": user_name()}
    if [add, reload, remove].count(None) < 2:
        raise ConfigError("give at most one of --add, --reload and --remove")
    if reason is not None and add is None and reload is None:
        raise ConfigError("--reason goes with --add or --reload")
    if as_json and (add or reload or remove):
        raise ConfigError(
            "--json prints the list of runs: leave it out, or --add, --reload or --remove"
        )
    if add is not None:
        done, text = server.add_run(file=str(add.absolute()), **why), "added, from {}"
    elif reload is not None:
        done, text = server.reload_run(reload, **why), "reloaded, from {}"
    elif remove is not None:
        done, text = server.remove_run(remove), "removed; the ledger keeps it"
    else:
        _list(server, as_json)
        return
    say(f"{done.run}: {text.format(done.origin)}. {done.note}")


def _list(server: Remote, as_json: bool) -> None:
    from tokenloom_tools.reports.terminal import line_of

    listed = server.list_runs()
    if as_json:
        print_json(listed.model_dump())
        return
    for document in server.stats():
        say(line_of(document))
    for broken in listed.broken:
        state = (
            "served as it was; its mixture file was not taken" if broken.served else "not served"
        )
        say(f"{broken.run}: {state} ({broken.origin}): {broken.error}: {broken.message}")


def stats(
    url: Url,
    every_source: Annotated[
        bool, typer.Option("--all", help="Show each source also where there are many.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the documents as JSON, one a line.")
    ] = False,
    *,
    access: ReadAccess,
) -> None:
    """Show a run's mix: shares, rows, tokens, epochs, ranks; if a server has several runs, a line for each."""
    from tokenloom_tools.reports.terminal import line_of, print_stats

    documents = access.connect(url).stats()
    for document in documents:
        if as_json:
            print_json(document.model_dump())
        elif len(documents) > 1:
            say(line_of(document))
        else:
            print_stats(console(), document, every_source=every_source)
    if len(documents) > 1 and not as_json:
        say(f"{url}/RUN shows one of them")


def verify(
    a: Annotated[
        str,
        typer.Argument(
            help="A server's address, with /RUN where it has several, or a checkpoint, a file or folder.",
            metavar="A",
        ),
    ],
    b: Annotated[
        str | None, typer.Argument(help="The other one, to compare A with.", metavar="B")
    ] = None,
    inside: Inside = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as JSON.")] = False,
    *,
    access: ReadAccess,
) -> None:
    """Prove whether two runs had the same data, and up to which sample; or report which data one run had.

    Of two, compares rolling digests. Where they differ, servers are asked for digests at earlier samples until the
    first sample that differs is found. Exit status: 0 if the data are the same up to the end of the shorter run, 1 if
    they differ, 2 if that is not known.

    Of a served run alone, writes what a model card needs to say about its data, as Markdown: sources, tokens, epochs,
    digests, launches.
    """
    if b is None:
        from tokenloom_tools.reports.model_card import markdown

        if Path(a).exists():
            raise ConfigError(
                f"{a!r} is a checkpoint: name what to compare it with, a server or another checkpoint"
            )
        if inside is not None:
            raise ConfigError("--inside goes with a checkpoint, and so with two to compare")
        server = access.connect(a)
        report = server.report(server.only_run())
        print_json(report.model_dump()) if as_json else print_document(markdown(report))
        return
    from tokenloom_tools.verify import PROVES, compare, document, explain, open_source

    with console(stderr=True).status("comparing"):
        both = (open_source(a, access.connect, inside), open_source(b, access.connect, inside))
        verdict = compare(*both)
        lines = explain(verdict, *both)
    if as_json:
        print_json(document(verdict, *both))
    else:
        out = console()
        for line in lines:
            out.print(line, soft_wrap=True)
        out.print(PROVES, style="dim")
    raise typer.Exit(verdict.status)


def restore(
    url: Url,
    snapshot: Annotated[
        str | None, typer.Option(help="The id of a snapshot that was saved in the ledger.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=0, help="A sample index: where the trainer's checkpoint stands."),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="A checkpoint, whatever tokenloom checkpoint reads.")
    ] = None,
    inside: Inside = None,
    skip_samples: Annotated[
        int,
        typer.Option(min=0, help="Samples after that point that are not delivered: a bad range."),
    ] = 0,
    skip_tokens: Annotated[
        int, typer.Option(min=0, help="The same in tokens, rounded up to whole samples.")
    ] = 0,
    undo_skip: Annotated[
        bool,
        typer.Option(
            "--undo-skip", help="Take back the skips that the state at that point did not pass."
        ),
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Take back what is pinned, and pin nothing.")
    ] = False,
    *,
    access: ControlAccess,
) -> None:
    """Pin where the next launch starts, and which samples it skips there.

    Nothing moves until that launch joins. A trainer that brings a state of its own has to bring this one; another is
    refused. Samples to skip are those of the order right after it, such as a range at which the loss went up: every
    launch that comes there passes over them, and they count as skipped, not as consumed.
    """
    server = access.connect(url)
    name = server.only_run()
    if cancel:
        server.cancel_restore(name)
        say(f"{name}: nothing is pinned any more; the next launch resumes from where it asks to")
        return
    if [snapshot, sample, state].count(None) != 2:
        raise ConfigError("give one of --snapshot, --sample and --state")
    if skip_samples and skip_tokens:
        raise ConfigError("give at most one of --skip-samples and --skip-tokens")
    point = server.restore(
        name,
        snapshot_id=snapshot,
        sample_index=sample,
        snapshot=None if state is None else snapshot_text(state, inside),
        skip_samples=skip_samples,
        skip_tokens=skip_tokens,
        undo_skip=undo_skip,
    )
    say(
        f"{name}: the next launch resumes from sample {point.sample_index:,} (digest {point.digest})"
    )
    if point.skips is not None:
        # Not at the top: the models of reports take pydantic, and --help of every command would wait for it.
        from tokenloom_server.reports.stats import skips_text

        say(f"from then on, what the order passes over: {skips_text(point.skips)}")


def fork(
    url: Url,
    parent: Annotated[
        str | None, typer.Option("--from", help="The run that it begins from, served there, too.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=0, help="Where that run stood; what it has committed if not given."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --from: its checkpoint, whatever tokenloom checkpoint reads."
        ),
    ] = None,
    inside: Inside = None,
    *,
    access: ControlAccess,
) -> None:
    """Branch the run of URL off another run's checkpoint, with a mixture of its own.

    Sources that both mixtures have go on where they stood; others begin at their first row. Sample index, tokens and
    rolling digest go on. The first launch of the new run then joins without a state; in a trainer,
    RemoteDataset(…, launch=LaunchOptions(fork_from=state_dict)) does the same.
    """
    if (parent is None) == (state is None):
        raise ConfigError("give one of --from and --state")
    server = access.connect(url)
    run = server.only_run()
    snapshot = None if state is None else snapshot_text(state, inside)
    point = server.fork(run, parent=parent, sample_index=sample, snapshot=snapshot)
    say(
        f"{run}: begins at sample {point.sample_index:,} (digest {point.digest}), with the first launch"
    )
