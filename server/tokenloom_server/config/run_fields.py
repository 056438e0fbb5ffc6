"""The fields of a run as they stand in the mixture file, and the plain questions about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from tokenloom_server.config.base import RUN_NAME, EndOfText, OnBadRow, PlainText, RowCount, Section
from tokenloom_server.config.batching import BatchingConfig
from tokenloom_server.config.node import NodeConfig, walk
from tokenloom_server.config.phase import PhaseConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.config.stream import VALIDATION, Streams, with_training_on_top

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
    """The run's name: what clients ask for and what the ledger's keys carry. Letters (a to z), digits, dots, hyphens
    and underscores, 128 at most."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds every draw and every tie."""
    batching: BatchingConfig | None = None
    """For rows that are ready tensors: each micro-step is a batch from one bucket of one source. Nothing is tokenised
    or packed then."""
    global_batch_size: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """With ``batching``: samples of a micro-step, over all ranks."""
    tokenizer: PlainText | None = None
    """A ``tokenizer.json``, a folder with one, a name in the Hub's cache, or ``bytes``. Not needed where every source
    holds ids."""
    vocab_size: Annotated[int, Field(ge=2, le=2**32)] | None = None
    """Greatest id + 1, where there is no tokeniser."""
    end_of_text_id: Annotated[int, Field(ge=0)] | None = None
    """Ends each document; found in the tokeniser unless given here."""
    begin_of_text_id: Annotated[int, Field(ge=0)] | None = None
    """Begins each document where ``add_bos`` is on; found in the tokeniser unless given here."""
    special_tokens_in_text: Literal["text", "parse"] = "text"
    """What strings such as ``<|endoftext|>`` inside documents are: plain text, or the special token."""
    sequence_length: Annotated[int, Field(ge=1, le=2**24), BeforeValidator(_sequence_length)] = (
        Field(default=_NOT_GIVEN, validate_default=True)
    )
    """Tokens per sample, at least 2. Not given with ``batching``, where a sample is a row and counts as one token."""
    packing: Literal["concat", "best_fit", "none"] = "concat"
    """How documents become samples. ``concat``: joined and cut. ``best_fit``: whole, as they fit best. ``none``: a row
    each."""
    tail: Literal["drop", "pad"] = "drop"
    """``concat``: what becomes of the tokens at a source's end that fill no sample."""
    pack_window_rows: Annotated[int, Field(ge=1, le=2**20)] = 8192
    """``best_fit``: rows that are packed at once, at most."""
    pack_window_tokens: Annotated[int, Field(ge=2, le=2**28)] = 2**22
    """``best_fit``: tokens that are packed at once; a window ends with the row that reaches them."""
    long_rows: Literal["truncate", "split"] = "truncate"
    """``none``: what becomes of a row that is longer than a sample."""
    count: Literal["real", "positions"] = "real"
    """Which tokens of padded samples the mixture balances: documents' (``real``), or all."""
    padding: Literal["right", "left"] = "right"
    """On which side of its documents a sample is padded."""
    pad_id: Annotated[int, Field(ge=0)] = 0
    """The id that fills the rest of a sample. Labels and masks leave it out, whatever it is."""
    mask_boundaries: bool = False
    """The first token of a document is no label for the document before it."""
    labels: Literal["same", "shifted"] = "same"
    """``same``: labels equal input_ids. ``shifted``: labels are the next ids."""
    add_bos: bool = False
    """Put the begin-of-text id before each document."""
    add_eot: EndOfText = True
    """Put the end-of-text id after each document; ``auto``: unless the document ends with it already."""
    last_micro_step: Literal["drop", "pad"] = "drop"
    """What becomes of an incomplete last micro-step: dropped, or padded with samples of source −1 and labels −100."""
    on_bad_row: OnBadRow = "fail"
    """What becomes of a row that does not decode: the run stops with an error that names it, or it is skipped and
    counted."""
    max_bad_rows: RowCount | None = None
    """So many rows of a source may be skipped in each epoch; one more stops the run. None: any number."""
    max_row_mib: Annotated[int, Field(ge=1, le=2047)] = 256
    """MiB of a row at most; a longer one stops the run, whatever becomes of bad rows."""
    window_micro_steps: Annotated[int, Field(ge=2, le=100_000)] | None = None
    """Micro-steps that may be produced ahead of the committed one; by default 64 MiB, which are 4 to 64 messages."""
    new_source_baseline: Literal["min", "mean", "zero"] = "min"
    """At how many tokens for each unit of its weight the balance of a source begins that an older data loader's
    checkpoint does not have: the minimum or the mean of its siblings, or 0."""
    mixture: NodeConfig
    """The root of the mixture."""
    phases: list[PhaseConfig] = Field(default_factory=list)
    """Parts of the run, one after the other; the run's own mixture and sequence length are those of the first where it
    gives none."""
    streams: Streams = Field(default_factory=dict)
    """By name, streams to evaluate on. Training may stand here, too, as ``train`` with its mixture."""

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
