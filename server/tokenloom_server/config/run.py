"""A run: one validated mixture file, and what follows from its tree."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationInfo, model_validator

from tokenloom_server.config.base import RUN_NAME, EndOfText, OnBadRow, PlainText, RowCount, Section
from tokenloom_server.config.batching import (
    ALL_COLUMNS,
    RUN_FIELDS,
    SOURCE_FIELDS,
    BatchingConfig,
    refuse_other_fields,
)
from tokenloom_server.config.catalog import Catalog, catalog_of
from tokenloom_server.config.node import (
    NodeConfig,
    check_distinct,
    check_ends,
    descend,
    numbered,
    walk,
)
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.config.stream import VALIDATION, Streams, with_training_on_top
from tokenloom_server.core.state import SourceState, State

#: What ends the first part of a source's name.
_PREFIX = re.compile(r"[/\-_.: ]")

# ``phases``: parts of the run, one after the other.


class PhaseConfig(Section):
    """A part of the run, by its tokens: annealing, longer contexts."""

    until_tokens: Annotated[int, Field(gt=0)] | None = None
    """The phase ends with the first whole sample at this many total tokens of the run. The last phase may leave it out,
    and then ends with the data."""
    sequence_length: Annotated[int, Field(ge=2, le=2**24)] | None = None
    """Tokens per sample in this phase; unchanged if not given."""
    mixture: NodeConfig | None = None
    """The mixture in this phase; unchanged if not given."""


def check_ascending(phases: Sequence[PhaseConfig]) -> None:
    """Raises ``ValueError`` unless each phase ends after it begins, and only the last one has no end."""
    begin = 0
    for i, phase in enumerate(phases):
        if phase.until_tokens is None and i < len(phases) - 1:
            raise ValueError(
                f"phases.{i}.until_tokens: is missing; only the last phase may go on to the end"
            )
        if phase.until_tokens is not None and phase.until_tokens <= begin:
            raise ValueError(
                f"phases.{i}.until_tokens: {phase.until_tokens} is not above the {begin} at which it begins"
            )
        begin = phase.until_tokens or begin


# The fields of a run as they stand in the mixture file, and the plain questions about them.


_NOT_GIVEN = "(not given)"


def _sequence_length(value: object, info: ValidationInfo) -> object:
    if "batching" not in info.data:
        return 1 if value == _NOT_GIVEN else value  # batching itself is wrong, which is reported
    if info.data["batching"] is None:
        if value == _NOT_GIVEN:
            raise ValueError("is missing")
        if type(value) is int and value == 1:
            raise ValueError("expected at least 2 tokens, found 1")
        return value
    # A dumped model has the 1.
    if value != _NOT_GIVEN and not (type(value) is int and value == 1):
        raise ValueError(
            f"does not apply with batching, where a sample is a row; found {value!r}: leave it out"
        )
    return 1


class RunFields(Section):
    """One run: what is read, how it is cut into samples, and in which proportions."""

    run: Annotated[str, Field(pattern=RUN_NAME)]
    """The run's name, for clients and in the ledger: up to 128 letters (a to z), digits, dots, hyphens and
    underscores."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds every random draw and tie."""
    batching: BatchingConfig | None = None
    """For rows that are ready tensors, which are neither tokenised nor packed: each micro-step is a batch from one
    bucket of one source."""
    global_batch_size: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """With ``batching``: samples of a micro-step, over all ranks."""
    tokenizer: PlainText | None = None
    """A ``tokenizer.json``, a folder with one, a name in the Hub's cache, or ``bytes``. Not needed if every source
    holds ids."""
    vocab_size: Annotated[int, Field(ge=2, le=2**32)] | None = None
    """Greatest id + 1, if there is no tokeniser."""
    end_of_text_id: Annotated[int, Field(ge=0)] | None = None
    """Ends each document; taken from the tokeniser unless given."""
    begin_of_text_id: Annotated[int, Field(ge=0)] | None = None
    """Begins each document with ``add_bos``; taken from the tokeniser unless given."""
    special_tokens_in_text: Literal["text", "parse"] = "text"
    """Whether strings such as ``<|endoftext|>`` inside documents are plain text or special tokens."""
    sequence_length: Annotated[int, Field(ge=1, le=2**24), BeforeValidator(_sequence_length)] = (
        Field(default=_NOT_GIVEN, validate_default=True)
    )
    """Tokens per sample, at least 2. Not given with ``batching``, where each row is a sample and counts as one
    token."""
    packing: Literal["concat", "best_fit", "none"] = "concat"
    """How documents become samples. ``concat``: joined and cut. ``best_fit``: kept whole where possible. ``none``: one
    row each."""
    tail: Literal["drop", "pad"] = "drop"
    """With ``concat``: whether tokens at a source's end that fill no sample are dropped or padded."""
    pack_window_rows: Annotated[int, Field(ge=1, le=2**20)] = 8192
    """With ``best_fit``: how many rows are packed together at most."""
    pack_window_tokens: Annotated[int, Field(ge=2, le=2**28)] = 2**22
    """With ``best_fit``: how many tokens are packed together; a window ends with the row that reaches them."""
    long_rows: Literal["truncate", "split"] = "truncate"
    """With ``none``: whether a row longer than a sample is truncated or split."""
    count: Literal["real", "positions"] = "real"
    """Whether the mixture balances the real tokens of padded samples, or all positions."""
    padding: Literal["right", "left"] = "right"
    """On which side samples are padded."""
    pad_id: Annotated[int, Field(ge=0)] = 0
    """The id of padding. Labels and masks leave padding out, whatever the id."""
    mask_boundaries: bool = False
    """Whether no document has to predict the first token of the next one."""
    labels: Literal["same", "shifted"] = "same"
    """``same``: labels equal input_ids. ``shifted``: labels are the next ids."""
    add_bos: bool = False
    """Put the begin-of-text id before each document."""
    add_eot: EndOfText = True
    """Put the end-of-text id after each document; ``auto``: unless the document already ends with it."""
    last_micro_step: Literal["drop", "pad"] = "drop"
    """Whether an incomplete last micro-step is dropped, or padded with samples of source −1 and labels −100."""
    on_bad_row: OnBadRow = "fail"
    """Whether a row that does not decode stops the run with an error, or is skipped and counted."""
    max_bad_rows: RowCount | None = None
    """How many rows of a source may be skipped in each epoch before the run stops; without it any number."""
    max_row_mib: Annotated[int, Field(ge=1, le=2047)] = 256
    """Largest row in MiB; a larger one stops the run, even if bad rows are skipped."""
    window_micro_steps: Annotated[int, Field(ge=2, le=100_000)] | None = None
    """How many micro-steps may be produced ahead of the committed one; by default 64 MiB, 4 to 64 messages."""
    new_source_baseline: Literal["min", "mean", "zero"] = "min"
    """For a source that another data loader's checkpoint lacks, where its balance begins: at the minimum or mean tokens
    per weight of its siblings, or at 0."""
    mixture: NodeConfig
    """The root of the mixture."""
    phases: list[PhaseConfig] = Field(default_factory=list)
    """Parts of the run, one after the other. The first takes what it does not set from the run."""
    streams: Streams = Field(default_factory=dict)
    """Streams to evaluate on, by name. Training may be given here, too, as ``train`` with its mixture."""

    @model_validator(mode="before")
    @classmethod
    def _move_training_to_the_top(cls, value: Any) -> Any:
        return with_training_on_top(value) if isinstance(value, dict) else value

    def mixtures(self) -> Iterator[tuple[NodeConfig, str]]:
        """Every mixture in the file, with its place."""
        yield self.mixture, "mixture"
        yield from (
            (phase.mixture, f"phases.{i}.mixture")
            for i, phase in enumerate(self.phases)
            if phase.mixture is not None
        )

    def phase_sources(self) -> Iterator[tuple[str, SourceConfig]]:
        """Every source of every phase with its place in the file."""
        for mixture, mixture_path in self.mixtures():
            yield from walk(mixture, mixture_path)

    def named_sources(self) -> Iterator[tuple[str, SourceConfig]]:
        """The same, each spec once."""
        seen: set[str] = set()
        for path, source in self.phase_sources():
            if source.source not in seen:
                seen.add(source.source)
                yield path, source

    def stream_mixtures(self) -> Iterator[tuple[NodeConfig, str]]:
        """Every mixture of a stream with its place in the file."""
        for name, stream in self.streams.items():
            if stream.mixture is not None:
                yield stream.mixture, f"streams.{name}.mixture"

    def stream_sources(self) -> Iterator[tuple[str, SourceConfig]]:
        """Every source of the streams that have a mixture of their own, with its place in the file."""
        for mixture, mixture_path in self.stream_mixtures():
            yield from walk(mixture, mixture_path)

    @property
    def stream_names(self) -> tuple[str, ...]:
        """The streams beside training, sorted."""
        holds_out = any(source.holdout is not None for _, source in self.named_sources())
        return tuple(sorted({*self.streams, *([VALIDATION] if holds_out else [])}))

    @property
    def masks_loss(self) -> bool:
        """Whether samples carry a loss mask: a source has one, in whichever phase."""
        return any(source.has_loss_mask for _, source in self.named_sources())

    @property
    def has_chats(self) -> bool:
        """Whether the tokeniser's chat template is needed: a source that is trained on has conversations."""
        return any(source.is_chat for _, source in self.named_sources())

    def adds_bos(self, source: SourceConfig) -> bool:
        """Whether each document of a source gets the begin-of-text id; a chat template writes its own."""
        if source.add_bos is not None:
            return source.add_bos
        return self.add_bos and not source.has_its_ids

    def adds_eot(self, source: SourceConfig) -> EndOfText:
        """Whether each document of a source gets the end-of-text id; a chat template writes its own."""
        if source.add_eot is not None:
            return source.add_eot
        if source.has_its_ids:
            return False
        return (
            "auto" if self.add_eot is True and source.spec.scheme.ends_documents else self.add_eot
        )

    def skips_bad_rows(self, source: SourceConfig) -> bool:
        """What the source says of bad rows, or the run."""
        return (source.on_bad_row or self.on_bad_row) == "skip"


# What must hold between the fields of a run; each check raises ``ValueError`` with path, value and remedy.


def check_run(run: RunFields) -> None:
    """All checks, in the order in which their faults are reported."""
    if run.batching is None:
        _check_without_batching(run)
    else:
        _check_with_batching(run)
    _check_phases(run)
    for mixture, path in run.mixtures():
        _check_mixture(mixture, path)
    if run.batching is None:
        _check_ids(run)
        _check_packing(run)
        _check_loss_masks(run)
    _check_streams(run, _holdouts(run))


def _check_without_batching(run: RunFields) -> None:
    if run.global_batch_size is not None:
        raise ValueError(
            "global_batch_size: is for batching; without it any batch size gives the same order, so each client says "
            "its own: leave it out"
        )
    for path, source in run.phase_sources():
        if source.spec.column == ALL_COLUMNS:
            raise ValueError(f"{path}.source: the column '*' is for batching; name one column")


def _check_with_batching(run: RunFields) -> None:
    if run.global_batch_size is None:
        raise ValueError("global_batch_size: is missing; with batching it is a part of the order")
    refuse_other_fields(run, RUN_FIELDS, "")
    for i, phase in enumerate(run.phases):
        if phase.sequence_length is not None:
            raise ValueError(
                f"phases.{i}.sequence_length: does not apply with batching; leave it out"
            )
    for path, source in run.phase_sources():
        _check_batched_source(source, path)


def _check_batched_source(source: SourceConfig, path: str) -> None:
    refuse_other_fields(source, SOURCE_FIELDS, f"{path}.")
    if source.shuffle == "shards":
        raise ValueError(
            f"{path}.shuffle: 'shards' does not apply with batching, where buckets go through all files; set "
            "shuffle: rows, or leave it out"
        )
    if not source.spec.scheme.reads_any_row:
        raise ValueError(
            f"{path}.source: {source.spec.scheme.name!r} files cannot be read row by row in any order, as batching "
            "does; convert them to parquet or arrow"
        )
    if source.spec.column != ALL_COLUMNS:
        raise ValueError(
            f"{path}.source: with batching the rows travel as they are, so the column is '*', but this is "
            f"{source.spec.column!r}; name columns in batching.columns"
        )


def _check_phases(run: RunFields) -> None:
    check_ascending(run.phases)
    lengths = {phase.sequence_length for phase in run.phases} - {None, run.sequence_length}
    if lengths and run.last_micro_step == "drop":
        raise ValueError(
            "phases: the sequence length changes, and micro-steps end where it does: an incomplete micro-step there "
            "would be lost with last_micro_step: drop; set last_micro_step: pad"
        )


def _check_mixture(mixture: NodeConfig, path: str) -> None:
    check_distinct(mixture, path)
    if isinstance(mixture.weight, list):
        raise ValueError(f"{path}.weight: found points, but the root has no siblings; leave it out")
    check_ends(mixture, path)


def _check_ids(run: RunFields) -> None:
    sources = [*run.named_sources(), *run.stream_sources()]
    lacks_end = run.end_of_text_id is None and any(run.adds_eot(source) for _, source in sources)
    if run.tokenizer is None and (run.vocab_size is None or lacks_end):
        raise ValueError(
            "tokenizer: expected a tokenizer.json, a folder with one, a name on the Hub, or 'bytes'; where every "
            "source holds ids, give vocab_size instead, and end_of_text_id unless add_eot is false"
        )
    for field in ("end_of_text_id", "begin_of_text_id", "pad_id"):
        value = getattr(run, field)
        if value is not None and run.vocab_size is not None and value >= run.vocab_size:
            raise ValueError(f"{field}: {value} is not below vocab_size {run.vocab_size}")
    for path, source in sources:
        if source.max_bad_rows is not None and not run.skips_bad_rows(source):
            raise ValueError(
                f"{path}.max_bad_rows: is for on_bad_row: skip, which neither source nor run says"
            )


def _check_packing(run: RunFields) -> None:
    pads = run.packing != "concat" or run.tail == "pad"
    for options, packing, applies in (
        (("tail",), "packing: concat", run.packing == "concat"),
        (
            ("pack_window_rows", "pack_window_tokens"),
            "packing: best_fit",
            run.packing == "best_fit",
        ),
        (("long_rows",), "packing: none", run.packing == "none"),
        (
            ("padding", "pad_id"),
            "samples that are padded (packing: best_fit or none, or tail: pad)",
            pads,
        ),
    ):
        for option in options:
            value = getattr(run, option)
            if not applies and value != type(run).model_fields[option].default:
                raise ValueError(
                    f"{option}: found {value!r}, but it is for {packing}; leave it out"
                )
    lengths = [run.sequence_length, *(phase.sequence_length or 0 for phase in run.phases)]
    if run.packing == "best_fit" and run.pack_window_tokens < max(lengths):
        raise ValueError(
            f"pack_window_tokens: {run.pack_window_tokens} do not fill a sample of {max(lengths)} tokens; give a "
            "multiple of that, or leave it out"
        )


def _check_loss_masks(run: RunFields) -> None:
    for path, source in (*run.named_sources(), *run.stream_sources()):
        if not source.has_loss_mask:
            continue
        masks = "template" if source.loss_mask is None else "loss_mask"
        if run.packing == "concat":
            raise ValueError(
                f"{path}.{masks}: is for packing: none or best_fit, where a row's tokens stay together, not 'concat'"
            )
        for field in ("fim", "template"):
            if field != masks and getattr(source, field) is not None:
                raise ValueError(
                    f"{path}.{masks}: says nothing of the tokens that {field} makes; leave one out"
                )


def _holdouts(run: RunFields) -> dict[str, float | None]:
    """By spec, the share of each source that is held out: the same one in every phase."""
    shares: dict[str, float | None] = {}
    for path, source in run.phase_sources():
        if shares.setdefault(source.source, source.holdout) != source.holdout:
            raise ValueError(
                f"{path}.holdout: found {source.holdout or 'none'}, but {source.source!r} has "
                f"{shares[source.source] or 'none'} elsewhere, so one part of the run would train on what another "
                "holds out: give both the same"
            )
    return shares


def _check_streams(run: RunFields, holdouts: dict[str, float | None]) -> None:
    for name, stream in run.streams.items():
        if run.batching is not None:
            raise ValueError(
                f"streams.{name}: does not apply with batching, whose streams are batches of rows; leave it out"
            )
        if stream.mixture is None and not any(holdouts.values()):
            raise ValueError(
                f"streams.{name}: has no mixture, and no source holds rows out for it; give it a mixture, or a "
                "source a holdout"
            )
    for mixture, path in run.stream_mixtures():
        _check_mixture(mixture, path)
    for path, source in run.stream_sources():
        if source.holdout is not None:
            raise ValueError(
                f"{path}.holdout: is for the sources that are trained on; leave it out"
            )
        if source.loss_mask is not None and not run.masks_loss:
            raise ValueError(
                f"{path}.loss_mask: no source that is trained on has one, so samples have no room for it; leave it out"
            )


class RunConfig(RunFields):
    """One run: what is read, how it is cut into samples, and in which proportions."""

    _catalog: Catalog = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        self._catalog = catalog_of(context)

    @property
    def catalog(self) -> Catalog:
        """What the run was read against."""
        return self._catalog

    @model_validator(mode="after")
    def _check_and_number(self) -> Self:
        check_run(self)
        if self.mixture.id < 0:
            # Frozen for everybody else; here the model is made.
            object.__setattr__(self, "mixture", numbered(self.mixture))
        return self

    @staticmethod
    def sources_of(mixture: NodeConfig) -> list[SourceConfig]:
        """The sources of a tree, depth first: the order of source ids in a mixture that was never revised."""
        return [source for _, source in walk(mixture, "")]

    @property
    def pick_samples(self) -> int:
        """Samples of one decision of the mixture: a whole global batch with ``batching``, else one."""
        return self.global_batch_size or 1

    @property
    def pick_tokens(self) -> int:
        """Their tokens."""
        return self.sequence_length * self.pick_samples

    def counting(self, count: Literal["real", "positions"]) -> Self:
        """The same run, which counts so where it makes no difference: of joined documents."""
        return (
            self.model_copy(update={"count": count})
            if self.packing == "concat" and not self.batching
            else self
        )

    @property
    def balances_real(self) -> bool:
        """Whether balances leave out the padding of samples. Of joined documents only a source's last one has any."""
        return self.count == "real" and self.packing != "concat" and self.batching is None

    def balanced(self, source: SourceState) -> int:
        """What balances count of a source."""
        return source.real_tokens if self.balances_real else source.tokens

    def consumed(self, state: State) -> tuple[int, ...]:
        """What balances count of each source, by id, without what was passed over."""
        return tuple(
            source.tokens
            - source.skipped_tokens
            - self.balances_real * source.consumed_padding_tokens
            for source in state.sources
        )

    @cached_property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Every source that the run ever had, the dropped ones, too; the position is the source id."""
        return tuple(sorted(self.sources_of(self.mixture), key=lambda source: source.id))

    @cached_property
    def epochs(self) -> tuple[float, ...]:
        """How often each source is read, by id: its own epochs times those of the nodes above it."""
        by_source: dict[int, float] = {}
        for _, child, above in descend(self.mixture, ""):
            if isinstance(child, SourceConfig):
                factors = [*(node.epochs for node in above), child.epochs]
                # As the decimals that they are written as: 3 × 0.1 is not 0.30000000000000004.
                product = (
                    math.inf
                    if math.inf in factors
                    else math.prod(Fraction(repr(factor)) for factor in factors)
                )
                by_source[child.id] = float(product)
        return tuple(by_source[source] for source in range(len(by_source)))

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Of each source, by id, the group that people see it in among many: the node below the root that holds it; or
        what other sources' aliases begin with, too; else its own name."""
        alone, by_source = dict[int, str](), dict[int, str]()
        for _, child, above in descend(self.mixture, ""):
            if isinstance(child, SourceConfig) and len(above) > 1:
                by_source[child.id] = above[1].name
            elif isinstance(child, SourceConfig):
                by_source[child.id] = child.name
                alone[child.id] = _PREFIX.split(child.alias or "")[0]
        shared = Counter(alone.values())
        by_source |= {each: name for each, name in alone.items() if name and shared[name] > 1}
        return tuple(by_source[source] for source in range(len(by_source)))

    @cached_property
    def measured_sources(self) -> tuple[int, ...]:
        """The ids of the sources whose size counts: those that end by themselves below a policy that estimates."""
        estimated = [
            child
            for _, child, above in descend(self.mixture, "")
            if isinstance(child, SourceConfig) and any(node.rules.estimates for node in above)
        ]
        ends = [
            of.id
            for of in estimated
            if of.presence != "dropped" and not math.isinf(self.epochs[of.id])
        ]
        return tuple(sorted(ends))

    def ends_with_last_phase(self, left_tokens: int = 0) -> bool:
        """Whether the mixture's ``max_tokens`` stand for the end of the last phase, to the next whole sample, and not
        for what a file says; ``left_tokens``: those that a fork left before it began."""
        ends, most = self.phases[-1].until_tokens if self.phases else None, self.mixture.max_tokens
        return (
            ends is not None
            and most is not None
            and 0 <= most - max(1, ends - left_tokens) < self.pick_tokens
        )

    @cached_property
    def nodes(self) -> tuple[NodeConfig, ...]:
        """Every inner node, by id."""
        nodes = [
            child for _, child, _ in descend(self.mixture, "") if isinstance(child, NodeConfig)
        ]
        return tuple(sorted(nodes, key=lambda node: node.id))
