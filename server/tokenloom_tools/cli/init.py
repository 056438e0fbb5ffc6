"""``tokenloom init``: from folders of data to a mixture file."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tokenloom_server.core.control_characters import escaped
from tokenloom_server.errors import ConfigError, TokenloomError
from tokenloom_server.storage.io_stats import given_up_soon

from tokenloom_tools.cli.output import console, print_document, say

if TYPE_CHECKING:
    from tokenloom_server.config.run import RunConfig
    from tokenloom_server.core.token_curve import TokenCurve
    from tokenloom_server.sources.base import Content
    from tokenloom_server.sources.catalog import SourceCatalog

    from tokenloom_tools.survey import Candidate, Survey


def schema_text() -> str:
    """The JSON Schema of the mixture file, with the plugins that the environment allows."""
    from tokenloom_server.catalog import environment_catalog
    from tokenloom_server.config.mixture_file import mixture_schema

    return json.dumps(mixture_schema(environment_catalog()), indent=1)


def schema() -> None:
    """Print the JSON Schema of the mixture file, with which editors complete it and find mistakes.

    tokenloom schema > mixture.schema.json writes it; the first line of the mixture file is then
    "# yaml-language-server: $schema=mixture.schema.json".
    """
    print_document(schema_text())


#: Beside the mixture file, for editors.
SCHEMA_FILE = "mixture.schema.json"
#: Where a file has one of these columns, that is read: of text, and of ids.
COLUMNS = (
    *("text", "content", "document", "body", "raw_content"),
    *("input_ids", "ids", "tokens", "token_ids"),
)
#: Columns of conversations, of which the last is the source's own, with what the mixture file says of them.
CHATS: Mapping[tuple[str, ...], str] = {
    ("messages",): "messages",
    ("conversations",): "sharegpt",
    ("instruction", "input", "output"): "alpaca",
    ("prompt", "completion"): "prompt_completion",
}
#: Tokens per sample, unless the data are too few.
SEQUENCE_LENGTH = 2048
#: Samples that the smallest source has at least, at a byte for each token.
MIN_SAMPLES = 16
#: How many files and folders that are left out are named.
LISTED = 10
#: How many folders above the data may have the tokeniser.
FOLDERS_ABOVE = 3
_NEXT = """\
next:
  tokenloom validate {mixture}    # opens every source, and makes the first samples
  tokenloom plan {mixture}        # says what the run will be
  tokenloom serve {mixture}       # until Ctrl-C
and, while it serves, the trainer:
  from tokenloom import RemoteDataset

  for batch in RemoteDataset("grpc://127.0.0.1:50051/{run}", batch_size=4):
      print(batch["sample_index"], batch["input_ids"].shape)
with a model, a checkpoint and a resume: the quick start of the documentation"""
#: What a document is, by the column of plain text.
_ROWS = {"text": "line", "paragraph": "paragraph", "file": "file"}
#: What the mixture file says of a run's own fields.
_COMMENTS = {
    "seed": "another one gives another order",
    "tokenizer": "its ids are the model's vocabulary",
    "sequence_length": "tokens per sample",
    "packing": "a conversation that fits stays whole",
}


@dataclass(frozen=True, slots=True)
class _Answers:
    """Answers that ``init`` need not find out, or ask for at a terminal."""

    run: Annotated[str | None, typer.Option(help="The run's name; the folder's if not given.")] = (
        None
    )
    tokenizer: Annotated[
        str | None, typer.Option(help="As a mixture file names it; else one near the data.")
    ] = None
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens per sample; 2048, or less of few data.")
    ] = None
    column: Annotated[
        list[str] | None, typer.Option(help="The column, of one or all.", metavar="[ALIAS=]NAME")
    ] = None

    def fields(
        self, folder: Path, base_dir: Path, sources: Mapping[str, Candidate]
    ) -> dict[str, str | int]:
        """The run's own fields. Raises ``ConfigError``."""
        own = folder.name.partition(".")[0] if folder.is_file() else folder.name
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", own).strip("-._") or "run"
        enough = min(source.size for source in sources.values()) // MIN_SAMPLES
        length = min(SEQUENCE_LENGTH, 2 ** max(3, enough.bit_length() - 1))
        return {
            "run": self.run or _ask("The run's name", name),
            "seed": 0,
            "tokenizer": self.tokenizer
            or _tokenizer(folder, base_dir)
            or _ask(
                "The tokeniser: a tokenizer.json, a folder with one, a name on the Hub, or bytes",
                missing="there is no tokenizer.json beside or above the data: give --tokenizer FILE, a name on the Hub "
                "such as gpt2, or bytes",
            ),
            "sequence_length": self.sequence_length or int(_ask("Tokens per sample", length)),
            **({"packing": "best_fit"} if any(map(_answers, sources.values())) else {}),
        }

    @property
    def named(self) -> Mapping[str, str]:
        """The columns that were named, by alias; that of all by the empty one."""
        return {of: name for of, _, name in (text.rpartition("=") for text in self.column or ())}

    def is_named(self, alias: str) -> bool:
        """Whether the column of a source was named."""
        return not self.named.keys().isdisjoint((alias, ""))

    def sources(self, candidates: Sequence[Candidate]) -> Mapping[str, Candidate]:
        """The sources by their aliases, with their columns. Raises ``ConfigError``."""
        names = _aliases(candidates)
        unknown = {*self.named} - {"", *names}
        if unknown:
            raise ConfigError(
                f"--column {min(unknown)}=…: no source has this alias; expected one of {', '.join(names)}"
            )
        columns = map(self.column_of, candidates, names)
        return {
            alias: each.with_column(column)
            for alias, each, column in zip(names, candidates, columns, strict=True)
        }

    def column_of(self, candidate: Candidate, alias: str) -> str:
        """Which column of a source is read. Raises ``ConfigError`` where that does not show."""
        chats = [columns[-1] for columns in CHATS if _answers(candidate.with_column(columns[-1]))]
        if chats and not self.is_named(alias) and not {*COLUMNS} & {*candidate.columns}:
            return chats[0]
        readable = [name for name, content in candidate.columns.items() if content is not None]
        usual = [name for name in COLUMNS if name in readable] or readable
        column = self.named.get(alias, self.named.get("", usual[0] if len(usual) == 1 else ""))
        return column or _ask(
            f"{alias}: the column that is read ({', '.join(usual)})",
            missing=f"{alias}: found no single column to read: its columns are {', '.join(candidate.columns)}, and "
            f"{' and '.join(usual) or 'none'} may be meant; give --column {alias}=NAME (NAME.KEY within an object)",
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """What the sources hold, by alias, as far as samples of them tell."""

    vocab_size: int
    curves: Mapping[str, TokenCurve]


@given_up_soon()
def init(
    places: Annotated[
        list[str],
        typer.Argument(help="Folders, or datasets of the Hub.", metavar="FOLDER|hf:REPO..."),
    ],
    output: Annotated[Path, typer.Option(help="The mixture file to write.")] = Path("mixture.yaml"),
    force: Annotated[
        bool, typer.Option("--force", help="Write over files that are there.")
    ] = False,
    *,
    answers: _Answers,
) -> None:
    """Write a mixture file for folders or a dataset on the Hub, and print the next commands.

    Each folder and each series of files becomes a source, with a weight by its tokens, which samples of the files tell.
    Of plain text a document is a line, a paragraph or a file, by what is in it. What does not show is asked at a
    terminal; elsewhere the error names the option that says it.
    """
    import yaml
    from tokenloom_server.catalog import environment_catalog
    from tokenloom_server.config import mixture_file as config
    from tokenloom_server.sources.catalog import sources_of
    from tokenloom_server.storage.file import write_whole
    from tokenloom_server.tokenizer.files import tokenizer_files

    schema, schema_content = output.with_name(SCHEMA_FILE), schema_text() + "\n"
    _check_output(output, schema, schema_content, force)
    base_dir, catalog = output.resolve().parent, environment_catalog()
    survey = _survey(places, base_dir, sources_of(catalog))
    sources = answers.sources(survey.candidates)
    fields = answers.fields(Path(places[0]).resolve(), base_dir, sources)

    def text_of(
        sources: Mapping[str, Candidate], measured: Measured | None = None
    ) -> tuple[str, RunConfig]:
        text = _mixture_text(fields, sources, measured)
        return text, config.parse(
            yaml.safe_load(text), where=str(output), catalog=catalog, text=text
        )

    def run_of(sources: Mapping[str, Candidate]) -> RunConfig:
        return text_of(sources)[1]

    measured, fault = None, None
    with console(stderr=True).status("opening sources and tokeniser") as status:
        # By themselves: what is wrong with another source says nothing of them.
        plain = {
            alias: source
            for alias, source in sources.items()
            if source.spec.scheme.name == "txt" and not answers.is_named(alias)
        }
        with suppress(TokenloomError):  # said below
            sources = {**sources, **(_with_documents(plain, run_of, base_dir) if plain else {})}
        try:
            measured = _looked_into(
                sources, run_of, base_dir, lambda name: status.update(f"measuring {name}")
            )
        except TokenloomError as error:
            fault = error
    text, _ = text_of(sources, measured)
    if fault is not None:
        survey.warnings.append(
            f"no run can begin with this yet: {fault}. Until then weights are the parts of the bytes on disk"
        )
    write_whole(output, text)
    write_whole(schema, schema_content)
    for alias, source in sources.items():
        say(f"{alias}: {_contents(source, alias, measured)}: {source.spec}{_row_note(source)}")
    if measured is not None:
        say(
            f"tokeniser: {fields['tokenizer']}, {measured.vocab_size:,} ids: as many rows the model's embedding has"
        )
    for file in tokenizer_files(str(fields["tokenizer"]), base_dir):
        survey.left_out.pop(file, "")
    for warning in survey.warnings:
        say(f"warning: {warning}")
    if survey.left_out:
        say(f"left out: {_left_out(survey)}")
    say(f"wrote {output}, and {schema} for editors")
    print_document(_NEXT.format(mixture=shlex.quote(str(output)), run=fields["run"]))


def _looked_into(
    sources: Mapping[str, Candidate],
    run_of: Callable[[Mapping[str, Candidate]], RunConfig],
    base_dir: Path,
    measuring: Callable[[str], object],
) -> Measured:
    """What the sources hold. Raises what keeps a run from beginning."""
    from tokenloom_server.order import builder
    from tokenloom_server.order.size_estimates import measure

    factory = builder.create(run_of(sources), base_dir, None)
    curves = {}
    for source in factory.config.sources:
        measuring(source.name)
        curves[source.name] = measure(factory, source.id)
    return Measured(factory.record.vocab_size, curves)


def _with_documents(
    sources: Mapping[str, Candidate],
    run_of: Callable[[Mapping[str, Candidate]], RunConfig],
    base_dir: Path,
) -> Mapping[str, Candidate]:
    """Sources of plain text with rows that are documents. Raises what keeps a run of them from beginning."""
    from tokenloom_server.order import builder

    from tokenloom_tools.scan import rows_of_text

    factory = builder.create(run_of(sources), base_dir, None)
    return {alias: sources[alias].with_column(column) for alias, column in rows_of_text(factory)}


def _check_output(output: Path, schema: Path, schema_content: str, force: bool) -> None:
    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(
            f"--output {output}: expected a file, in a folder that exists; make that first"
        )
    if output.name == SCHEMA_FILE:
        raise ConfigError(
            f"--output {output}: the schema for editors has this name; give another one"
        )
    for path in (output, schema):
        if path.exists() and not force and path.read_bytes() != schema_content.encode():
            raise ConfigError(
                f"{path}: is there already; give another --output, or --force to write over it"
            )


def _survey(places: Sequence[str], base_dir: Path, catalog: SourceCatalog) -> Survey:
    """Raises ``ConfigError`` where there is nothing to read."""
    from tokenloom_tools.survey import Survey

    survey = Survey(base_dir, catalog, _choose, _form_of)
    for place in dict.fromkeys(places):
        scheme = catalog.schemes.get(place.partition(":")[0])
        if scheme is not None and ":" in place:
            survey.look_up(scheme, place.partition(":")[2])
        else:
            survey.look_at(_path_from(base_dir, Path(place).resolve()))
    if not survey.candidates:
        endings = ", ".join(ending for ending in catalog.endings if ending.count(".") == 1)
        raise ConfigError(
            f"{', '.join(places)}: has no data that a scheme reads ({_left_out(survey) or 'it is empty'}); expected "
            f"files that end with {endings}, or one of these compressed, or folders of other libraries: "
            "docs/mixture-file.md"
        )
    return survey


def _choose(paths: Sequence[str], more: int) -> str:
    """Which of some files with one name is meant, and so in some more cases. Raises ``ConfigError``."""
    named = (
        f"{' and '.join(paths)}{f' (and {more} more such pairs)' * bool(more)} may be the same data"
    )
    answer = _ask(
        f"{named}: the one that is read",
        missing=f"{named}: move one of them away, or name the files to init",
    )
    if answer not in paths:
        raise ConfigError(f"{named}: found {answer!r}, expected one of them")
    return answer


def _aliases(candidates: Sequence[Candidate]) -> list[str]:
    """The name of each one's folder, unless another source has it, too."""
    from tokenloom_tools.short_form import aliases

    pairs = [
        (each.folder, alias)
        for each, alias in zip(candidates, aliases([c.spec for c in candidates]), strict=True)
    ]
    uses = Counter(name for pair in pairs for name in {*pair})
    return [folder if folder and uses[folder] == 1 else alias for folder, alias in pairs]


def _left_out(survey: Survey) -> str:
    more = len(survey.left_out) - LISTED
    some = [f"{place} ({reason})" for place, reason in list(survey.left_out.items())[:LISTED]]
    return ", ".join(some) + (f", and {more} more" if more > 0 else "")


def _contents(candidate: Candidate, alias: str, measured: Measured | None) -> str:
    files = f"{candidate.files} file{'s' * (candidate.files > 1)}, {candidate.size / 1e6:,.2f} MB"
    if measured is None or not (tokens := measured.curves[alias].epoch_tokens):
        return files
    documents = measured.curves[alias].epoch_rows
    return f"{files}, about {documents:,} documents of {max(1, round(tokens / documents)):,} tokens, {tokens:,} in all"


def _answers(candidate: Candidate) -> Mapping[str, str]:
    """What the mixture file says of the rows of a source of conversations, or of prompts and completions."""
    from tokenloom_server.sources.base import Content

    for columns, chat_format in CHATS.items():
        if columns[-1] != candidate.spec.column or not {*columns} <= {*candidate.columns}:
            continue
        are_texts = [candidate.columns[name] is Content.TEXT for name in columns]
        if chat_format == "prompt_completion" and all(are_texts):
            return {"template": "{prompt}{completion}", "loss_on": "completion"}
        if are_texts == [chat_format == "alpaca"] * len(columns):
            named = {} if chat_format == "messages" else {"chat_format": chat_format}
            return {"template": "chat", **named, "loss_on": "answers"}
    return {}


def _form_of(columns: Mapping[str, Content | None]) -> object:
    """The column that is read, or the columns of a conversation; None where none is known."""
    chats = (own for own in CHATS if {*own} <= {*columns})
    return next(chats, None) or next((name for name in COLUMNS if name in columns), None)


def _row_note(candidate: Candidate) -> str:
    """What of plain text is a document, and what else it could be."""
    if candidate.spec.scheme.name != "txt":
        return ""
    others = " and ".join(
        f":{column} {row}s" for column, row in _ROWS.items() if column != candidate.spec.column
    )
    return f" (each {_ROWS[candidate.spec.column]} is a document; {others} instead)"


def _path_from(base_dir: Path, path: Path) -> str:
    """A path as a mixture file in ``base_dir`` has it."""
    return str(path.relative_to(base_dir) if path.is_relative_to(base_dir) else path)


def _tokenizer(folder: Path, base_dir: Path) -> str | None:
    """The tokenizer.json in a folder of data or above it."""
    from tokenloom_server.tokenizer.files import TOKENIZER_FILE

    files = (place / TOKENIZER_FILE for place in (folder, *folder.parents[:FOLDERS_ABOVE]))
    return next((_path_from(base_dir, file) for file in files if file.is_file()), None)


def _mixture_text(
    fields: Mapping[str, str | int], sources: Mapping[str, Candidate], measured: Measured | None
) -> str:
    """The mixture file. Weights are the sources' parts of all tokens, or where these are not known of all bytes. JSON's
    texts and numbers are YAML's."""
    from tokenloom_server.sources.files import codec_of

    if measured is None:
        sizes = {alias: source.size for alias, source in sources.items()}
    else:
        sizes = {alias: curve.epoch_tokens for alias, curve in measured.curves.items()}
    total = sum(sizes.values()) or 1
    lines = [
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        "# Written by tokenloom init. More fields: tokenloom schema",
    ]
    for name, value in fields.items():
        comment = f"  # {_COMMENTS[name]}" if name in _COMMENTS else ""
        lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}{comment}")
    lines += [
        "# Weights are shares of the tokens; these, the parts of all that there are, as samples of the files tell."
        if measured is not None
        else "# Weights are shares of the tokens; these, of all bytes on disk: raise those of compressed files.",
        "mixture:",
    ]
    lines += [
        "  policy: least_consumed  # next comes the source that has used least of its share",
        "  children:",
    ]
    for alias, source in sources.items():
        lines += [
            f"    # {_contents(source, alias, measured)}; columns: {escaped(', '.join(source.columns))}",
            f"    - source: {json.dumps(str(source.spec), ensure_ascii=False)}",
            f"      alias: {json.dumps(alias, ensure_ascii=False)}",
            f"      weight: {max(sizes[alias] / total, 0.001):.3g}",
            *(f"      {name}: {json.dumps(value)}" for name, value in _answers(source).items()),
            "      epochs: 1  # read once; .inf: again and again",
            f"      shuffle: {'rows' if codec_of(source.spec.location) is None else 'shards'}",
        ]
    return "\n".join(lines) + "\n"


def _ask(question: str, default: str | int = "", missing: str = "") -> str:
    """What somebody at a terminal says, else the default. Raises ``ConfigError``, with ``missing``, if none."""
    if sys.stdin.isatty():
        return str(typer.prompt(question, default=default or None, type=type(default)))
    if not default:
        raise ConfigError(missing)
    return str(default)
