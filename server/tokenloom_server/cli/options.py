"""The mixture that a command is given: a mixture file, or a flat mixture on the command line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenloom_server.errors import ConfigError

if TYPE_CHECKING:
    from tokenloom_server.config.data_roots import DataRoots
    from tokenloom_server.config.run import RunConfig

#: The heading in --help of what stands instead of a mixture file.
PANEL = "A mixture without a file"
Mixture = Annotated[
    Path | None,
    typer.Argument(
        help="A mixture file (YAML); see the README's configuration section.",
        metavar="MIXTURE.yaml",
        show_default=False,
    ),
]
#: Where --data-root is not given: places, separated by colons.
DATA_ROOTS = "TOKENLOOM_DATA_ROOTS"
Roots = Annotated[
    list[str] | None,
    typer.Option(
        help="A folder or URL below which all data and tokenisers of a mixture file must lie; may be given again. "
        f"[env: {DATA_ROOTS}]",
        metavar="PLACE",
        show_default=False,
    ),
]
# Instead of a mixture file: a flat mixture on the command line, and what else a run needs.
DatasetMix = Annotated[
    str | None,
    typer.Option(
        help="Instead of a mixture file: files, patterns or folders with their weights, such as "
        '"wiki/*.parquet:0.9 code:0.1"; path@column:weight where the column does not show.',
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
MixRun = Annotated[
    str | None,
    typer.Option("--run", help="The run's name.", rich_help_panel=PANEL, show_default=False),
]
MixLength = Annotated[
    int | None,
    typer.Option("--sequence-length", help="Tokens per sample.", rich_help_panel=PANEL, show_default=False),
]
MixTokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", help="A tokenizer.json, a folder with one, or bytes.", rich_help_panel=PANEL, show_default=False
    ),
]
MixSeed = Annotated[
    int | None,
    typer.Option("--seed", help="Seeds every draw; 0 if not given.", rich_help_panel=PANEL, show_default=False),
]
MixPolicy = Annotated[
    str | None,
    typer.Option(
        "--policy", help="The mixture's policy; least_consumed if not given.", rich_help_panel=PANEL, show_default=False
    ),
]
MixVocabSize = Annotated[
    int | None,
    typer.Option(
        "--vocab-size",
        help="Greatest id + 1, where all hold ids and there is no tokeniser.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
MixEndOfText = Annotated[
    int | None,
    typer.Option(
        "--end-of-text-id",
        help="The id that ends a document, where there is no tokeniser.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]


def fields_of(
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


def one_mixture(mixture: Path | None, short: tuple[RunConfig, str] | None) -> tuple[RunConfig, str, Path]:
    """The config of the file or of the short form, the text that the latter stands for, and where paths begin."""
    from tokenloom_server.config import mixture_file as config

    if short is not None and mixture is None:
        return *short, Path.cwd()
    if short is None and mixture is not None:
        return config.load(mixture), "", mixture.resolve().parent
    raise ConfigError("expected a mixture file or --dataset-mix, one of the two")


def data_roots(given: list[str] | None) -> DataRoots:
    """What --data-root says, or else the environment. Raises ``ConfigError``."""
    from tokenloom_server.config.data_roots import DataRoots

    # The colon of s3://bucket separates nothing.
    named = [place for place in re.split(r":(?!//)", os.environ.get(DATA_ROOTS, "")) if place]
    return DataRoots.of(given or named)


def short_form(mix: str | None, fields: dict[str, str | int | None], roots: DataRoots) -> tuple[RunConfig, str] | None:
    """The mixture of --dataset-mix, below the current folder, and its text as a file; None without it."""
    named = [f"--{name.replace('_', '-')}" for name, value in fields.items() if value is not None]
    if mix is None:
        if named:
            raise ConfigError(f"{', '.join(named)}: belongs to --dataset-mix; a mixture file says it itself")
        return None
    missing = [f"--{name.replace('_', '-')}" for name in ("run", "sequence_length") if fields[name] is None]
    if missing:
        raise ConfigError(f"--dataset-mix needs {' and '.join(missing)} beside it")
    from tokenloom_server.config import mixture_file as config
    from tokenloom_server.sources import short_form

    document = short_form.document(mix, Path.cwd(), roots, **fields)
    return config.parse(document, where=short_form.OPTION), short_form.as_yaml(document)
