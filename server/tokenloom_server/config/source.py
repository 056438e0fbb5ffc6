"""A source: one leaf of the mixture, with the options that are its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tokenloom_server.config.base import (
    EndOfText,
    Epochs,
    MaxTokens,
    Name,
    OnBadRow,
    OnExhausted,
    PlainText,
    Presence,
    RowCount,
    Section,
    Share,
    Weight,
    not_bool,
    whole_number,
)
from tokenloom_server.config.catalog import Spec, catalog_of
from tokenloom_server.config.row_rules import CHAT, CHAT_FORMATS, Comparison, RowRules, Template
from tokenloom_server.core.control_characters import refuse_control_characters
from tokenloom_server.errors import ConfigError

# ``fim``: documents rearranged so that a model learns to fill in the middle.


class FimIds(Section):
    """The ids that stand before each part of a rearranged document."""

    prefix: Annotated[int, Field(ge=0)]
    """Marks the first part."""
    middle: Annotated[int, Field(ge=0)]
    """Marks the part to fill in."""
    suffix: Annotated[int, Field(ge=0)]
    """Marks the last part."""

    @model_validator(mode="after")
    def _check_distinct(self) -> Self:
        if len({self.prefix, self.middle, self.suffix}) < 3:
            raise ValueError(
                f"found prefix {self.prefix}, middle {self.middle} and suffix {self.suffix}, expected three different "
                "ids, or nobody can tell the parts apart"
            )
        return self


class FimConfig(Section):
    """Fill in the middle."""

    rate: Annotated[float, Field(gt=0, le=1, strict=False), BeforeValidator(not_bool)]
    """The share of documents that are rearranged, drawn for each row and epoch."""
    spm_rate: Annotated[float, Field(ge=0, le=1, strict=False), BeforeValidator(not_bool)] = 0.0
    """Of these, the share in the order suffix, prefix, middle; the others are in the order prefix, suffix, middle."""
    ids: FimIds
    """The ids that mark the parts."""


# ``seen``: the rows of a source that a job had read with another data loader, in the epoch that goes on here.


class SeenConfig(Section):
    """A file of flags, as numpy saves them: for each row of the source, file after file, whether it was read."""

    file: Annotated[PlainText, Field(min_length=1)]
    """Its path; one that is relative counts from the mixture file's folder."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Of the file: another one makes another order."""


def comparisons(value: object) -> object:
    """Reads one comparison as a list of one."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"expected a comparison such as 'score >= 0.5', or a list of them, but this is {value!r}"
        )
    # As the rules write them, so that spaces and 0.50 for 0.5 make no other order.
    return [str(Comparison.parse(text)) for text in texts]


def _checked_template(value: str) -> str:
    if value != CHAT:
        Template.parse(value)
    return value


class SourceConfig(Section):
    """A leaf of the mixture."""

    id: int = -1
    """The source id: given once, by ``RunConfig`` or a revision, and never to another spec."""
    presence: Presence = "live"
    source: str
    """The spec: ``scheme:location:column``."""
    alias: Name | None = None
    """A short name for pages and logs; by default the spec."""
    weight: Weight = 1.0
    """Share within the parent node, relative to its siblings; below a ``schedule``, a number or points."""
    epochs: Epochs = 1.0
    """How often the source is read; fractions and ``.inf`` are allowed."""
    max_tokens: MaxTokens | None = None
    """Ends the source after this many tokens since the run began, in whole samples."""
    on_exhausted: OnExhausted | None = None
    """What its end does to its node; by default what the node says."""
    add_bos: bool | None = None
    """Overrides the run's ``add_bos``."""
    add_eot: EndOfText | None = None
    """Overrides the run's ``add_eot``. For ``megatron:`` and ``npy:``, whose documents usually have the id already, the
    run's true means ``auto``."""
    loss_mask: Name | None = None
    """A column beside the ids that says for each id whether it counts for the loss: 0 or 1, or false or true."""
    commit: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None = None
    """For a dataset on the Hub: the run begins with the files of this commit, even if the spec names a branch or none.
    The manifest records the files, so this is no part of the order."""
    shuffle: Literal["none", "shards", "rows"] = "none"
    """The order of rows, drawn again for each epoch. ``none``: as in the files. ``shards``: the files shuffled.
    ``rows``: the source's blocks shuffled, and rows shuffled within windows of blocks."""
    shuffle_window_rows: Annotated[int, Field(ge=2, le=2**24), BeforeValidator(whole_number)] = (
        2**16
    )
    """Rows in a window of ``shuffle: rows``."""
    lanes: Annotated[int, Field(ge=1, le=64), BeforeValidator(whole_number)] = 1
    """Reads the source at this many places in turn, sample by sample; each lane has a part of every epoch's rows."""
    filter: Annotated[list[str], BeforeValidator(comparisons), Field(min_length=1)] | None = None
    """Comparisons such as ``score >= 0.5``; only rows that pass all of them give tokens."""
    template: Annotated[str, AfterValidator(_checked_template)] | None = None
    """Makes a row's text of its columns: ``{title}\\n\\n{text}``. ``chat``: the column holds conversations, which the
    tokeniser's own chat template renders."""
    chat_tools: Name | None = None
    """With ``template: chat``: the column with each conversation's tools."""
    chat_format: Literal["messages", "sharegpt", "alpaca", "prompt_completion"] = "messages"
    """With ``template: chat``: the form of a conversation."""
    loss_on: Literal["answers", "completion"] | None = None
    """``answers``, with ``template: chat``: finds what the assistant says, if the template has no blocks for it.
    ``completion``: only the source's own column counts, which the template must end with."""
    transform: Annotated[str, Field(pattern=r"^[^:,\s]+:[^:,\s]+$")] | None = None
    """Experimental. ``MODULE:FUNCTION``, your function that changes each text before it is tokenised, if whoever starts
    the server allows it."""
    fim: FimConfig | None = None
    """Rearranges documents so that a model learns to fill in the middle."""
    on_bad_row: OnBadRow | None = None
    """Overrides the run's ``on_bad_row``."""
    on_blank_line: OnBadRow = "skip"
    """For JSON lines: whether a blank line is a bad row, or skipped and counted as filtered."""
    max_bad_rows: RowCount | None = None
    """Overrides the run's ``max_bad_rows``."""
    holdout: Share | None = None
    """The share of documents that are kept out of training, for the stream ``validation``. Their content decides, so
    files may be added, moved and rewritten, and copies of a document are all on one side."""

    seen: SeenConfig | None = None
    """Rows that another data loader had read when the job moved: left out of the first epoch only."""

    _spec: Spec = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        self._spec = catalog_of(context).sources.spec(self.source)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        spec = self.spec
        for field in ("filter", "template"):
            if getattr(self, field) is not None and not spec.scheme.has_columns:
                raise ValueError(
                    f"{field}: a {spec.scheme.name} source has no columns; leave it out, or take another format"
                )
        if (
            self.template not in (None, CHAT)
            and spec.column not in Template.parse(self.template or "").columns
        ):
            raise ValueError(
                f"template: {self.template!r} does not name the source's column {{{spec.column}}}; put it in, or name "
                "another column in the source"
            )
        if self.chat_tools is not None and not self.is_chat:
            raise ValueError("chat_tools: is for template: chat; leave it out")
        if self.chat_format != "messages" and not self.is_chat:
            raise ValueError("chat_format: is for template: chat; leave it out")
        if self.loss_on == "answers" and not self.is_chat:
            raise ValueError(
                "loss_on: answers is for template: chat; set completion, or leave it out"
            )
        if self.loss_on == "completion" and (
            self.template in (None, CHAT)
            or Template.parse(self.template or "").columns[-1] != spec.column
        ):
            raise ValueError(
                "loss_on: completion is for a template whose last column is the source's own, such as "
                f"'{{prompt}}{{{spec.column}}}'; found {self.template!r}"
            )
        if self.transform is not None and self.is_rendered:
            raise ValueError(
                f"transform: is for texts, and {'template: chat' if self.is_chat else 'loss_on'} says which part of "
                "each row counts; leave one of them out"
            )
        if self.on_blank_line == "fail" and not spec.scheme.has_blank_lines:
            raise ValueError(
                f"on_blank_line: is for JSON lines; leave it out of a {spec.scheme.name} source"
            )
        if self.max_bad_rows is not None and self.on_bad_row == "fail":
            raise ValueError(
                "max_bad_rows: is for on_bad_row: skip; with 'fail' the first bad row is an error"
            )
        default = type(self).model_fields["shuffle_window_rows"].default
        if self.shuffle != "rows" and self.shuffle_window_rows != default:
            raise ValueError(
                f"shuffle_window_rows: found {self.shuffle_window_rows}, but shuffle is {self.shuffle!r}, which has no "
                "windows; set shuffle: rows, or leave it out"
            )
        if self.seen is not None and self.holdout is not None:
            raise ValueError(
                "seen: another loader may have trained on the rows that holdout keeps for validation; leave one of the "
                "two out"
            )
        if self.commit is not None and not spec.scheme.has_commits:
            raise ValueError(
                f"commit: found {self.commit!r}, but {self.source!r} is no dataset on the Hub; leave it out"
            )
        return self

    @property
    def rules(self) -> RowRules:
        """Which rows are read, and what of them; but for what the run says of bad rows."""
        template = (
            Template.parse(self.template)
            if self.template is not None and not self.is_chat
            else None
        )
        return RowRules(
            filter=tuple(map(Comparison.parse, self.filter or ())),
            template=Template.of_lines(
                *CHAT_FORMATS[self.chat_format],
                self.spec.column,
                *([self.chat_tools] if self.chat_tools is not None else ()),
            )
            if self.is_chat
            else template.of_parts()
            if template is not None and self.is_rendered
            else template,
            as_json=self.is_rendered,
            quoted=self.is_rendered and not (self.is_chat and self.chat_format == "messages"),
            skip_blank=self.on_blank_line == "skip",
        )

    @property
    def is_chat(self) -> bool:
        """Whether rows are conversations."""
        return self.template == CHAT

    @property
    def is_rendered(self) -> bool:
        """Whether text and loss mask are made together, of each row."""
        return self.is_chat or self.loss_on is not None

    @property
    def has_its_ids(self) -> bool:
        """Whether begin- and end-of-text ids stand where they belong already."""
        return self.is_chat or self.spec.scheme.gives_samples

    @property
    def has_loss_mask(self) -> bool:
        """Whether some of its tokens may count for no loss."""
        return self.loss_mask is not None or self.is_rendered

    @field_validator("source")
    @classmethod
    def _normalise(cls, value: str, info: ValidationInfo) -> str:
        refuse_control_characters(value)
        try:
            return str(catalog_of(info.context).sources.spec(value))
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @field_validator("transform")
    @classmethod
    def _refuse_other_code(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and value not in catalog_of(info.context).transforms:
            raise ValueError(
                f"{value!r} is code that is not run unless whoever starts the server allows it: start with "
                f"--allow-transforms {value}, or name it in TOKENLOOM_ALLOW_TRANSFORMS"
            )
        return value

    @property
    def in_file_order(self) -> bool:
        """Whether all that lies before a row in its files comes before it."""
        return self.shuffle == "none" and self.lanes == 1

    @property
    def spec(self) -> Spec:
        """The source's spec, parsed; with the commit at which its files are looked up."""
        return self._spec if self.commit is None else replace(self._spec, commit=self.commit)

    @property
    def name(self) -> str:
        return self.alias or self.source
