"""The mixture file: one YAML file, validated once, here; everything behind it trusts the result."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from tokenloom_proto.seal import canonical

from tokenloom_server.config.row_rules import Comparison, RowRules, Template
from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import ConfigError

BYTES_TOKENIZER = "bytes"

#: Schemes of ids whose documents as a rule carry their end-of-text id.
ENDED_SCHEMES = ("megatron", "npy")

#: Fields of a run that its order does not depend on; the tokeniser's content is digested elsewhere.
OUTSIDE_THE_ORDER = (
    *("run", "window_steps", "tokenizer", "last_step", "new_source_baseline", "mask_boundaries"),
    # Where bad rows end a run it has no order behind them, so a run may be served on with another answer.
    *("on_bad_row", "max_bad_rows"),
    # Of training's order, that is: each stream with a mixture of its own has its own record.
    "streams",
)

#: The same of a source.
SOURCE_OUTSIDE_THE_ORDER = ("alias", "on_bad_row", "max_bad_rows", "commit")


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, strict=True, use_attribute_docstrings=True
    )


def _not_bool(value: object) -> object:
    # YAML reads ``yes`` and ``on`` as true, and pydantic true as 1. It also reads 1e-3 as text, which is a number.
    if isinstance(value, bool):
        raise ValueError(f"expected a number above 0, but this is {value!r}")
    return value


def _whole(value: object) -> object:
    # As above: 1e9 is text in YAML, and 1.0e9 a float.
    if isinstance(value, str | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            return value
        if math.isfinite(number) and number.is_integer():
            return int(number)
    return value


def _not_nan(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, float) and math.isnan(value)):
        raise ValueError(f"epochs is a number above 0 or .inf, but this is {value!r}")
    return math.inf if value == "inf" else value


def _ascending(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    for (before, _), (tokens, _) in pairwise(points):
        if tokens <= before:
            raise ValueError(f"the point at {tokens} tokens stands behind the one at {before}; expected them ascending")
    if not any(weight for _, weight in points):
        raise ValueError("every point has the weight 0, and the child would never get anything; leave the child out")
    return points


def _pair(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _weight_kind(value: object) -> str:
    return "points" if isinstance(value, list) else "number"


_Tokens = Annotated[int, Field(ge=0, le=2**53 - 1), BeforeValidator(_whole)]
_Point = Annotated[
    tuple[_Tokens, Annotated[float, Field(ge=0, strict=False), BeforeValidator(_not_bool)]], BeforeValidator(_pair)
]

Points = Annotated[list[_Point], Field(min_length=1), AfterValidator(_ascending)]
"""Of a ``schedule``: ``[total tokens of the run, weight]``, ascending."""
Weight = Annotated[
    Annotated[float, Field(gt=0, strict=False), BeforeValidator(_not_bool), Tag("number")]
    | Annotated[Points, Tag("points")],
    Discriminator(_weight_kind),
]
Share = Annotated[float, Field(gt=0, lt=1, strict=False), BeforeValidator(_not_bool)]
Epochs = Annotated[float, Field(gt=0, allow_inf_nan=True, strict=False), BeforeValidator(_not_nan)]
MaxTokens = Annotated[int, Field(gt=0, le=2**53 - 1), BeforeValidator(_whole)]


Presence = Literal["live", "paused", "dropped"]
"""Whether a child takes part. Only revisions pause and drop; what was dropped stays in the tree with its counters."""


class FimIds(_Model):
    """The ids that stand before each part of a rearranged document."""

    prefix: Annotated[int, Field(ge=0)]
    """Before what came first."""
    middle: Annotated[int, Field(ge=0)]
    """Before what is to be filled in."""
    suffix: Annotated[int, Field(ge=0)]
    """Before what came last."""

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if len({self.prefix, self.middle, self.suffix}) < 3:
            raise ValueError(
                f"found prefix {self.prefix}, middle {self.middle} and suffix {self.suffix}, expected three different "
                "ids, or nobody can tell the parts apart"
            )
        return self


class FimConfig(_Model):
    """Fill in the middle."""

    rate: Annotated[float, Field(gt=0, le=1, strict=False), BeforeValidator(_not_bool)]
    """The share of documents that are rearranged, drawn for each row and epoch."""
    spm_rate: Annotated[float, Field(ge=0, le=1, strict=False), BeforeValidator(_not_bool)] = 0.0
    """Of these, the share in the order suffix, prefix, middle; the others are in the order prefix, suffix, middle."""
    ids: FimIds
    """What marks the parts; of the vocabulary."""


def _comparisons(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected a comparison such as 'score >= 0.5', or a list of them, but this is {value!r}")
    try:
        # As the rules write them, so that spaces and 0.50 for 0.5 make no other order.
        return [str(Comparison.parse(text)) for text in texts]
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _parsed_template(value: str) -> str:
    try:
        Template.parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


#: Schemes of sources without columns.
_WITHOUT_COLUMNS = ("txt", "npy", "megatron")


class SourceConfig(_Model):
    """A leaf of the mixture."""

    id: int = -1
    """The source id: given once, by ``RunConfig`` or a revision, and never to another spec."""
    presence: Presence = "live"
    source: str
    """The spec: ``scheme:location:column``."""
    alias: Annotated[str, Field(min_length=1)] | None = None
    """A short name for pages and logs; the spec where there is none."""
    weight: Weight = 1.0
    """Share within the parent node, relative to its siblings; below a ``schedule``, a number or points."""
    epochs: Epochs = 1.0
    """How often the source is read; fractions and ``.inf`` are allowed."""
    max_tokens: MaxTokens | None = None
    """Gives at most so many tokens, in whole samples, since the run began; what would be beyond is its end."""
    on_exhausted: Literal["drop", "stop"] | None = None
    """What its end does to its node; None: what the node says."""
    add_bos: bool | None = None
    """Overrides the run's ``add_bos``."""
    add_eot: Literal[True, False, "auto"] | None = None
    """Overrides the run's ``add_eot``; for ``megatron:`` and ``npy:``, whose documents as a rule carry the id already,
    ``auto`` where the run says true."""
    loss_mask: Annotated[str, Field(min_length=1)] | None = None
    """A column beside the ids: for each of them 0 or 1, whether it counts for the loss."""
    commit: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None = None
    """Of a dataset on the Hub: where the run begins, its files are those of this commit, although the spec names a
    branch or none. Which files these are stands in the manifest, so this is no part of the order."""
    shuffle: Literal["none", "shards", "rows"] = "none"
    """In which order rows are read, another one each epoch. ``none``: as they lie in the files. ``shards``: file by
    file, the files shuffled. ``rows``: the source's blocks shuffled, and the rows within windows of them."""
    shuffle_window_rows: Annotated[int, Field(ge=2, le=2**24), BeforeValidator(_whole)] = 2**16
    """Rows of a window of ``shuffle: rows``."""
    lanes: Annotated[int, Field(ge=1, le=64), BeforeValidator(_whole)] = 1
    """Reads the source at so many places in turn, sample by sample: each lane has a part of every epoch's rows."""
    filter: Annotated[list[str], BeforeValidator(_comparisons), Field(min_length=1)] | None = None
    """Comparisons such as ``score >= 0.5``; only rows for which all hold give tokens."""
    template: Annotated[str, AfterValidator(_parsed_template)] | None = None
    """The text of a row, made of its columns: ``{title}\\n\\n{text}``."""
    fim: FimConfig | None = None
    """Rearranges documents so that a model learns to fill in the middle."""
    on_bad_row: Literal["fail", "skip"] | None = None
    """Overrides the run's ``on_bad_row``."""
    max_bad_rows: Annotated[int, Field(ge=0, le=2**53 - 1), BeforeValidator(_whole)] | None = None
    """Overrides the run's ``max_bad_rows``."""
    holdout: Share | None = None
    """The share of documents that are kept out of training: they are the source's part of the stream ``validation``.
    Drawn by the content of each, so that files may be added, moved and written anew, and copies of a document are all
    on one side."""

    @model_validator(mode="after")
    def _rules_fit_the_source(self) -> Self:
        spec = self.spec
        for field in ("filter", "template"):
            if getattr(self, field) is not None and spec.scheme in _WITHOUT_COLUMNS:
                raise ValueError(
                    f"{field}: a {spec.scheme} source has no columns; leave it out, or take another format"
                )
        if self.template is not None and spec.column not in Template.parse(self.template).columns:
            raise ValueError(
                f"template: {self.template!r} does not name the source's column {{{spec.column}}}; put it in, or name "
                "another column in the source"
            )
        if self.max_bad_rows is not None and self.on_bad_row == "fail":
            raise ValueError("max_bad_rows: is for on_bad_row: skip; with 'fail' the first bad row is an error")
        return self

    @property
    def rules(self) -> RowRules:
        """Which rows are read, and what of them; but for what the run says of bad rows."""
        return RowRules(
            filter=tuple(map(Comparison.parse, self.filter or ())),
            template=None if self.template is None else Template.parse(self.template),
        )

    @field_validator("source")
    @classmethod
    def _parses(cls, value: str) -> str:
        try:
            return str(Spec.parse(value))
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _a_window_is_of_rows(self) -> Self:
        default = type(self).model_fields["shuffle_window_rows"].default
        if self.shuffle != "rows" and self.shuffle_window_rows != default:
            raise ValueError(
                f"shuffle_window_rows: found {self.shuffle_window_rows}, but shuffle is {self.shuffle!r}, which has no "
                "windows; set shuffle: rows, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _a_commit_is_on_the_hub(self) -> Self:
        if self.commit is not None and not self.source.startswith("hf:"):
            raise ValueError(
                f"commit: found {self.commit!r}, but {self.source!r} is no dataset on the Hub; leave it out"
            )
        return self

    @property
    def in_file_order(self) -> bool:
        """Whether all that lies before a row in its files comes before it."""
        return self.shuffle == "none" and self.lanes == 1

    @property
    def spec(self) -> Spec:
        spec = Spec.parse(self.source)
        return spec if self.commit is None else replace(spec, commit=self.commit)

    @property
    def name(self) -> str:
        return self.alias or self.source


class NodeConfig(_Model):
    """An inner node of the mixture: a policy over its children."""

    id: int = -1
    """The node id: given once, by ``RunConfig`` or a revision."""
    presence: Presence = "live"
    policy: Literal[
        "least_consumed",
        "weighted",
        "round_robin",
        "sequential",
        "soft_sequential",
        "balance_remaining",
        "schedule",
    ]
    """``least_consumed``: deterministic, within one sample of target. ``weighted``: seeded draws. ``round_robin``: a
    sample of each child in turn. ``sequential``: one child after the other. ``soft_sequential``: the same, but each
    begins while the one before it comes to its end. ``balance_remaining``: all end together. ``schedule``: weights by
    the run's total tokens."""
    children: Annotated[list[Child], Field(min_length=1)]
    """Sources, or nodes."""
    alias: Annotated[str, Field(min_length=1)] | None = None
    """A short name for pages and logs."""
    weight: Weight = 1.0
    """Share within the parent node, relative to its siblings; below a ``schedule``, a number or points."""
    epochs: Epochs = 1.0
    """Multiplies the epochs of every source below."""
    max_tokens: MaxTokens | None = None
    """Gives at most so many tokens, in whole samples, since the run began; what would be beyond is its end."""
    on_exhausted: Literal["drop", "stop"] = "drop"
    """When a child runs out: ``drop`` renormalises the rest; ``stop`` ends this node."""
    unit: Literal["tokens", "samples"] = "tokens"
    """What the shares of ``weighted`` are counted in. Every sample of a run has the same length, so both give the same
    order."""
    interpolate: Literal["linear", "step"] = "linear"
    """Weights of a ``schedule`` between two points: in a straight line, or as at the one before."""

    @property
    def name(self) -> str:
        return self.alias or f"node {self.id}"

    @property
    def estimates(self) -> bool:
        """Whether weights follow from what the sources below have left."""
        return self.policy in ("soft_sequential", "balance_remaining")

    @model_validator(mode="after")
    def _weights_have_a_meaning(self) -> Self:
        for i, child in enumerate(self.children):
            if self.policy in ("round_robin", "sequential", "soft_sequential", "balance_remaining"):
                if child.weight != 1.0:
                    raise ValueError(
                        f"children.{i}.weight: found {_short_weight(child.weight)}, but the policy {self.policy!r} "
                        "knows no weights; leave it out, or take the policy 'least_consumed' or 'weighted'"
                    )
            elif self.policy != "schedule" and isinstance(child.weight, list):
                raise ValueError(
                    f"children.{i}.weight: found {_short_weight(child.weight)}, but the policy {self.policy!r} takes "
                    "one number; give one, or take the policy 'schedule'"
                )
        if self.policy == "schedule":
            self._some_weight_at_every_token()
        for option, policy in (("unit", "weighted"), ("interpolate", "schedule")):
            if getattr(self, option) != type(self).model_fields[option].default and self.policy != policy:
                raise ValueError(f"{option}: is for the policy {policy!r}, but this is {self.policy!r}; leave it out")
        return self

    def _some_weight_at_every_token(self) -> None:
        """Weights are above 0 somewhere between two points of any child if they are at one of them."""
        points = [child.weight if isinstance(child.weight, list) else [(0, child.weight)] for child in self.children]
        for tokens in sorted({0, *(at for weights in points for at, _ in weights)}):
            if not any(_is_above_0(weights, tokens, self.interpolate) for weights in points):
                raise ValueError(
                    f"children: at {tokens} tokens every weight is 0, and nothing could be given; let the weight of "
                    "one child begin earlier or end later"
                )


def _short_weight(weight: float | list[tuple[int, float]]) -> str:
    return f"{len(weight)} points" if isinstance(weight, list) else f"{weight:g}"


def _is_above_0(points: list[tuple[int, float]], tokens: int, interpolate: str) -> bool:
    before = [weight for at, weight in points if at <= tokens] or [points[0][1]]
    if before[-1] > 0 or interpolate == "step":
        return before[-1] > 0
    behind = [weight for at, weight in points if at > tokens]
    return points[0][0] <= tokens and tokens not in [at for at, _ in points] and bool(behind) and behind[0] > 0


def _child_kind(value: object) -> str:
    if isinstance(value, NodeConfig) or (isinstance(value, dict) and ("children" in value or "policy" in value)):
        return "node"
    return "source"


Child = Annotated[
    Annotated[SourceConfig, Tag("source")] | Annotated[NodeConfig, Tag("node")],
    Discriminator(_child_kind),
]


class PhaseConfig(_Model):
    """A part of the run, by its tokens: annealing, longer contexts."""

    until_tokens: Annotated[int, Field(gt=0)] | None = None
    """The run's total tokens at which the phase ends, to the next whole sample. Behind the last phase the run ends, or
    with the data where that one leaves it out."""
    sequence_length: Annotated[int, Field(ge=2, le=2**24)] | None = None
    """Tokens per sample from here on; what was in force if not given."""
    mixture: NodeConfig | None = None
    """The mixture from here on; what was in force if not given."""


class StreamConfig(_Model):
    """A stream beside training: samples to evaluate on, the same ones each time."""

    mixture: NodeConfig | None = None
    """What it is made of; if not given, the documents that training's sources hold out."""

    @model_validator(mode="after")
    def _children_are_numbered(self) -> Self:
        if self.mixture is not None and self.mixture.id < 0:
            object.__setattr__(self, "mixture", numbered(self.mixture))
        return self


def _empty_stream(value: object) -> object:
    return {} if value is None else value


TRAIN = "train"
"""The stream that is trained on."""
VALIDATION = "validation"
"""The stream of what sources hold out, which exists wherever one does."""

StreamName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

_LENGTH_OF = re.compile(r"length\((.+)\)")

#: Of a run with ``batching``, the fields that mean something; the others keep their defaults.
_WITH_BATCHING = {
    "run",
    "seed",
    "batching",
    "global_batch_size",
    "sequence_length",
    "window_steps",
    "new_source_baseline",
    "mixture",
    "phases",
}
#: And of its sources.
_SOURCE_WITH_BATCHING = {
    *("id", "presence", "source", "alias", "weight", "epochs", "max_tokens", "on_exhausted"),
    *("shuffle", "shuffle_window_rows"),
}

ALL_COLUMNS = "*"
"""The column of a spec whose rows travel as they are: with ``batching``."""


class BatchingConfig(_Model):
    """Rows that are ready tensors, in batches of one shape each."""

    bucket_by: Annotated[str, Field(min_length=1)]
    """The column whose value names a row's bucket; or ``length(COLUMN)``, the length of its list."""
    edges: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] | None = None
    """Of ``length(COLUMN)``: the greatest length of each bucket, ascending. Rows are padded to it with zeros; longer
    ones than the last are left out."""
    columns: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """The columns that travel, in this order; all that can if not given."""
    pad: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """With ``edges``: columns that are as long as the one that ``length`` names, and padded as it is."""
    dtypes: dict[str, Literal["bfloat16", "float8_e4m3fn", "float8_e5m2"]] = Field(default_factory=dict)
    """By column, what its bits are where Arrow has no such type: bfloat16 is stored as uint16, float8 as uint8."""

    @property
    def length_of(self) -> str | None:
        """The column whose length names the bucket; None where a value does."""
        found = _LENGTH_OF.fullmatch(self.bucket_by)
        return found[1] if found else None

    @property
    def bucket_column(self) -> str:
        """The column that decides a row's bucket."""
        return self.length_of or self.bucket_by

    @property
    def padded(self) -> frozenset[str]:
        """The columns that are padded to the edge."""
        return frozenset((self.bucket_column, *self.pad)) if self.edges is not None else frozenset()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.edges is None:
            if self.pad:
                raise ValueError("pad: rows are only padded up to edges; give edges, or leave it out")
            return self
        if self.length_of is None:
            raise ValueError(
                f"edges: are for lengths, but bucket_by is {self.bucket_by!r}; write length({self.bucket_by}), or "
                "leave edges out"
            )
        for before, behind in pairwise(self.edges):
            if behind <= before:
                raise ValueError(f"edges: {behind} stands behind {before}; expected them ascending")
        if self.columns is not None and not set(self.columns) >= self.padded:
            left = ", ".join(sorted(self.padded - set(self.columns)))
            raise ValueError(f"columns: {left} is padded, but not among those that travel; add it")
        return self

    @model_validator(mode="after")
    def _columns_are_distinct(self) -> Self:
        for name in ("columns", "pad"):
            listed = getattr(self, name) or []
            twice = sorted({column for column in listed if listed.count(column) > 1})
            if twice:
                raise ValueError(f"{name}: {', '.join(twice)} stands there twice; name each column once")
        return self


_NOT_GIVEN = "(not given)"


def _sequence_length(value: object, info: ValidationInfo) -> object:
    if "batching" not in info.data:
        return 1 if value == _NOT_GIVEN else value  # that it is wrong is told already
    if info.data["batching"] is None:
        if value == _NOT_GIVEN:
            raise ValueError("is missing")
        if type(value) is int and value == 1:
            raise ValueError("expected at least 2 tokens, found 1")
        return value
    # A model that was dumped has the 1.
    if value != _NOT_GIVEN and not (type(value) is int and value == 1):
        raise ValueError(f"does not apply with batching, where a sample is a row; found {value!r}: leave it out")
    return 1


class RunConfig(_Model):
    """One run: what is read, how it is cut into samples, and in which proportions."""

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    """The run's name: what clients ask for and what the ledger's keys carry."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds every draw and every tie."""
    batching: BatchingConfig | None = None
    """For rows that are ready tensors: each step is a batch from one bucket of one source. Nothing is tokenised or
    packed then."""
    global_batch_size: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """With ``batching``: samples of a step, over all ranks."""
    tokenizer: str | None = None
    """A ``tokenizer.json``, a folder with one, or ``bytes``. Not needed where every source holds ids."""
    vocab_size: Annotated[int, Field(ge=2, le=2**32)] | None = None
    """Greatest id + 1, where there is no tokeniser."""
    end_of_text_id: Annotated[int, Field(ge=0)] | None = None
    """Ends each document; found in the tokeniser unless given here."""
    begin_of_text_id: Annotated[int, Field(ge=0)] | None = None
    """Begins each document where ``add_bos`` is on; found in the tokeniser unless given here."""
    special_tokens_in_text: Literal["text", "parse"] = "text"
    """What strings such as ``<|endoftext|>`` inside documents are: plain text, or the special token."""
    sequence_length: Annotated[int, Field(ge=1, le=2**24), BeforeValidator(_sequence_length)] = Field(
        default=_NOT_GIVEN, validate_default=True
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
    add_eot: Literal[True, False, "auto"] = True
    """Put the end-of-text id after each document; ``auto``: unless the document ends with it already."""
    last_step: Literal["drop", "pad"] = "drop"
    """What becomes of an incomplete last step."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """What becomes of a row that does not decode: the run stops with an error that names it, or it is skipped and
    counted."""
    max_bad_rows: Annotated[int, Field(ge=0, le=2**53 - 1), BeforeValidator(_whole)] | None = None
    """So many rows of a source may be skipped in each epoch; one more stops the run. None: any number."""
    window_steps: Annotated[int, Field(ge=2, le=100_000)] | None = None
    """Steps that may be produced ahead of the committed one; the default follows the message size."""
    new_source_baseline: Literal["min", "mean", "zero"] = "min"
    """At how many tokens for each unit of its weight the balance of a source begins that an older data loader's
    checkpoint does not have: the minimum or the mean of its siblings, or 0."""
    mixture: NodeConfig
    """The root of the mixture."""
    phases: list[PhaseConfig] = Field(default_factory=list)
    """Parts of the run, one after the other; the run's own mixture and sequence length are those of the first where it
    gives none."""
    streams: dict[StreamName, Annotated[StreamConfig, BeforeValidator(_empty_stream)]] = Field(default_factory=dict)
    """By name, streams to evaluate on. Training may stand here, too, as ``train`` with its mixture."""

    @model_validator(mode="before")
    @classmethod
    def _training_may_stand_among_the_streams(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("streams"), dict) or TRAIN not in value["streams"]:
            return value
        train = value["streams"][TRAIN]
        if "mixture" in value:
            raise ValueError(f"streams.{TRAIN}: found a mixture at the top already; give training one of the two")
        if not isinstance(train, dict) or set(train) != {"mixture"}:
            raise ValueError(f"streams.{TRAIN}: expected a mapping with mixture, found {train!r}")
        others = {name: stream for name, stream in value["streams"].items() if name != TRAIN}
        return {**value, "mixture": train["mixture"], "streams": others}

    @model_validator(mode="after")
    def _batching_is_all_or_nothing(self) -> Self:
        if self.batching is None:
            if self.global_batch_size is not None:
                raise ValueError(
                    "global_batch_size: is for batching; without it any batch size gives the same order, so each "
                    "client says its own: leave it out"
                )
            for mixture, at in self.mixtures():
                for path, source in _walk(mixture, at):
                    if source.spec.column == ALL_COLUMNS:
                        raise ValueError(f"{path}.source: the column '*' is for batching; name one column")
            return self
        if self.global_batch_size is None:
            raise ValueError("global_batch_size: is missing; with batching it is a part of the order")
        _refuse_others(self, _WITH_BATCHING, "")
        for i, phase in enumerate(self.phases):
            if phase.sequence_length is not None:
                raise ValueError(f"phases.{i}.sequence_length: does not apply with batching; leave it out")
        for mixture, at in self.mixtures():
            for path, source in _walk(mixture, at):
                _refuse_others(source, _SOURCE_WITH_BATCHING, f"{path}.")
                if source.shuffle == "shards":
                    raise ValueError(
                        f"{path}.shuffle: 'shards' does not apply with batching, where buckets go through all files; "
                        "set shuffle: rows, or leave it out"
                    )
                if source.spec.scheme not in ("parquet", "arrow", "hf"):
                    raise ValueError(
                        f"{path}.source: {source.spec.scheme!r} files cannot be read row by row in any order, as "
                        "batching does; convert them to parquet or arrow"
                    )
                if source.spec.column != ALL_COLUMNS:
                    raise ValueError(
                        f"{path}.source: with batching the rows travel as they are, so the column is '*', but this is "
                        f"{source.spec.column!r}; name columns in batching.columns"
                    )
        return self

    @model_validator(mode="after")
    def _phases_follow_each_other(self) -> Self:
        before = 0
        for i, phase in enumerate(self.phases):
            last = i == len(self.phases) - 1
            if phase.until_tokens is None and not last:
                raise ValueError(f"phases.{i}.until_tokens: is missing; only the last phase may go on to the end")
            if phase.until_tokens is not None and phase.until_tokens <= before:
                raise ValueError(
                    f"phases.{i}.until_tokens: {phase.until_tokens} is not above the {before} at which it begins"
                )
            before = phase.until_tokens or before
        lengths = {phase.sequence_length for phase in self.phases} - {None, self.sequence_length}
        if lengths and self.last_step == "drop":
            raise ValueError(
                "phases: the sequence length changes, and steps end where it does: an incomplete step there would be "
                "lost with last_step: drop; set last_step: pad"
            )
        return self

    @model_validator(mode="after")
    def _sources_are_distinct(self) -> Self:
        for mixture, at in self.mixtures():
            _check_distinct(mixture, at)
            if isinstance(mixture.weight, list):
                raise ValueError(f"{at}.weight: found points, but the root has no siblings; leave it out")
            _check_ends(mixture, at, False, None)
        if self.batching is not None:
            return self
        if self.tokenizer is None and (self.vocab_size is None or self.end_of_text_id is None):
            raise ValueError(
                "tokenizer: expected a tokenizer.json, a folder with one, or 'bytes'; where every source holds ids, "
                "give vocab_size and end_of_text_id instead"
            )
        for field in ("end_of_text_id", "begin_of_text_id"):
            value = getattr(self, field)
            if value is not None and self.vocab_size is not None and value >= self.vocab_size:
                raise ValueError(f"{field}: {value} is not below vocab_size {self.vocab_size}")
        for at, source in (*self.named_sources(), *self._sources_of_streams()):
            if source.max_bad_rows is not None and not self.skips_bad_rows(source):
                raise ValueError(f"{at}.max_bad_rows: is for on_bad_row: skip, which neither source nor run says")
        return self

    @model_validator(mode="after")
    def _packing_options_have_a_meaning(self) -> Self:
        pads = self.packing != "concat" or self.tail == "pad"
        for options, packing, applies in (
            (("tail",), "packing: concat", self.packing == "concat"),
            (("pack_window_rows", "pack_window_tokens"), "packing: best_fit", self.packing == "best_fit"),
            (("long_rows",), "packing: none", self.packing == "none"),
            (("padding", "pad_id"), "samples that are padded (packing: best_fit or none, or tail: pad)", pads),
        ):
            for option in options:
                found = getattr(self, option)
                if not applies and found != type(self).model_fields[option].default:
                    raise ValueError(f"{option}: found {found!r}, but it is for {packing}; leave it out")
        lengths = [self.sequence_length, *(phase.sequence_length or 0 for phase in self.phases)]
        if self.packing == "best_fit" and self.pack_window_tokens < max(lengths):
            raise ValueError(
                f"pack_window_tokens: {self.pack_window_tokens} do not fill a sample of {max(lengths)} tokens; give a "
                "multiple of that, or leave it out"
            )
        for path, source in (*self.named_sources(), *self._sources_of_streams()):
            if source.loss_mask is None:
                continue
            if self.packing == "concat":
                raise ValueError(
                    f"{path}.loss_mask: is for packing: none or best_fit, where a row's tokens stay together; this is "
                    "'concat'"
                )
            for field in ("fim", "template"):
                if getattr(source, field) is not None:
                    raise ValueError(f"{path}.loss_mask: says nothing of the tokens that {field} makes; leave one out")
        if self.vocab_size is not None and self.pad_id >= self.vocab_size:
            raise ValueError(f"pad_id: {self.pad_id} is not below vocab_size {self.vocab_size}")
        return self

    @model_validator(mode="after")
    def _streams_have_rows(self) -> Self:
        shares: dict[str, float | None] = {}
        for mixture, at in self.mixtures():
            for path, source in _walk(mixture, at):
                if shares.setdefault(source.source, source.holdout) != source.holdout:
                    raise ValueError(
                        f"{path}.holdout: found {source.holdout}, but {source.source!r} has {shares[source.source]} "
                        "elsewhere, and what one part of the run keeps out the other would train on: give both the same"
                    )
        for name, stream in self.streams.items():
            at = f"streams.{name}"
            if self.batching is not None:
                raise ValueError(f"{at}: does not apply with batching, whose streams are batches of rows; leave it out")
            if stream.mixture is None:
                if not any(shares.values()):
                    raise ValueError(
                        f"{at}: has no mixture, and no source holds rows out for it; give it a mixture, or a source "
                        "a holdout"
                    )
                continue
            _check_distinct(stream.mixture, f"{at}.mixture")
            _check_ends(stream.mixture, f"{at}.mixture", False, None)
            for path, source in _walk(stream.mixture, f"{at}.mixture"):
                if source.holdout is not None:
                    raise ValueError(f"{path}.holdout: is for the sources that are trained on; leave it out")
                if source.loss_mask is not None and not self.masks_loss:
                    raise ValueError(
                        f"{path}.loss_mask: no source that is trained on has one, so samples have no room for it; "
                        "leave it out"
                    )
        return self

    @staticmethod
    def sources_of(mixture: NodeConfig) -> list[SourceConfig]:
        """The sources of a tree, depth first."""
        return [source for _, source in _walk(mixture, "")]

    def _sources_of_streams(self) -> Iterator[tuple[str, SourceConfig]]:
        for name, stream in self.streams.items():
            if stream.mixture is not None:
                yield from _walk(stream.mixture, f"streams.{name}.mixture")

    @property
    def stream_names(self) -> tuple[str, ...]:
        """The streams beside training, sorted."""
        holds_out = any(source.holdout is not None for _, source in self.named_sources())
        return tuple(sorted({*self.streams, *([VALIDATION] if holds_out else [])}))

    @property
    def masks_loss(self) -> bool:
        """Whether samples carry a loss mask: a source has one, in whichever phase."""
        return any(source.loss_mask is not None for _, source in self.named_sources())

    def adds_bos(self, source: SourceConfig) -> bool:
        """Whether each document of a source gets the begin-of-text id."""
        return self.add_bos if source.add_bos is None else source.add_bos

    def adds_eot(self, source: SourceConfig) -> Literal[True, False, "auto"]:
        """Whether each document of a source gets the end-of-text id."""
        if source.add_eot is not None:
            return source.add_eot
        return "auto" if self.add_eot is True and source.spec.scheme in ENDED_SCHEMES else self.add_eot

    def skips_bad_rows(self, source: SourceConfig) -> bool:
        """What the source says of bad rows, or the run."""
        return (source.on_bad_row or self.on_bad_row) == "skip"

    @property
    def pick_samples(self) -> int:
        """Samples of one decision of the mixture: a whole global batch with ``batching``, else one."""
        return self.global_batch_size or 1

    @property
    def pick_tokens(self) -> int:
        """Their tokens."""
        return self.sequence_length * self.pick_samples

    def mixtures(self) -> Iterator[tuple[NodeConfig, str]]:
        """Every mixture in the file, with its place."""
        yield self.mixture, "mixture"
        yield from (
            (phase.mixture, f"phases.{i}.mixture") for i, phase in enumerate(self.phases) if phase.mixture is not None
        )

    def named_sources(self) -> Iterator[tuple[str, SourceConfig]]:
        """Every source of every phase with its place in the file; each spec once."""
        seen: set[str] = set()
        for mixture, at in self.mixtures():
            for path, source in _walk(mixture, at):
                if source.source not in seen:
                    seen.add(source.source)
                    yield path, source

    def sources_with_paths(self) -> Iterator[tuple[str, SourceConfig]]:
        """Every source with its place in the file, depth first: the order of source ids in a mixture that was never
        revised."""
        yield from _walk(self.mixture, "mixture")

    @model_validator(mode="after")
    def _children_are_numbered(self) -> Self:
        if self.mixture.id < 0:
            # Frozen for everybody else: this is where the model is made.
            object.__setattr__(self, "mixture", numbered(self.mixture))
        return self

    @cached_property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Every source that the run ever had, the dropped ones, too; the position is the source id."""
        found = [source for _, source in self.sources_with_paths()]
        return tuple(sorted(found, key=lambda source: source.id))

    @cached_property
    def epochs(self) -> tuple[float, ...]:
        """How often each source is read, by id: its own epochs times those of the nodes above it."""
        found: dict[int, float] = {}

        def visit(node: NodeConfig, above: list[float]) -> None:
            for child in node.children:
                factors = [*above, child.epochs]
                if isinstance(child, NodeConfig):
                    visit(child, factors)
                elif any(math.isinf(factor) for factor in factors):
                    found[child.id] = math.inf
                else:
                    # As the decimals that they are written as: 3 × 0.1 is not 0.30000000000000004.
                    found[child.id] = float(math.prod(Fraction(repr(factor)) for factor in factors))

        visit(self.mixture, [self.mixture.epochs])
        return tuple(found[source] for source in range(len(found)))

    @cached_property
    def measured_sources(self) -> tuple[int, ...]:
        """The ids of the sources whose extent decides: those that end of themselves below a policy that estimates."""

        def below(node: NodeConfig, estimated: bool) -> Iterator[int]:
            for child in node.children:
                if isinstance(child, NodeConfig):
                    yield from below(child, estimated or child.estimates)
                elif estimated and child.presence != "dropped" and not math.isinf(self.epochs[child.id]):
                    yield child.id

        return tuple(sorted(below(self.mixture, self.mixture.estimates)))

    @cached_property
    def nodes(self) -> tuple[NodeConfig, ...]:
        """Every inner node, by id."""

        def below(node: NodeConfig) -> Iterator[NodeConfig]:
            yield node
            for child in node.children:
                if isinstance(child, NodeConfig):
                    yield from below(child)

        return tuple(sorted(below(self.mixture), key=lambda node: node.id))

    def order_fields(self) -> dict[str, Any]:
        """What the canonical order depends on, defaults omitted, numbers and specs normalised.

        The tokeniser's content and the files' are digested elsewhere; here stands only that there is one.
        """
        fields = self.model_dump(mode="json", exclude_defaults=True, exclude=set(OUTSIDE_THE_ORDER))
        fields["sequence_length"] = self.sequence_length
        if self.batching is not None:
            del fields["sequence_length"]
        # The root has no siblings, so its weight decides nothing.
        fields["mixture"] = order_of_mixture(self.mixture, self)
        for phase, given in zip(self.phases, fields.get("phases", []), strict=True):
            if phase.mixture is not None:
                given["mixture"] = order_of_mixture(phase.mixture, self)
        return fields

    @property
    def digest(self) -> str:
        """SHA-256 of the order-affecting fields."""
        return hashlib.sha256(canonical(self.order_fields()).encode()).hexdigest()


def _refuse_others(model: BaseModel, allowed: set[str], path: str) -> None:
    """That fields that mean nothing with ``batching`` have their defaults."""
    for name, field in type(model).model_fields.items():
        if name not in allowed and getattr(model, name) != field.get_default(call_default_factory=True):
            raise ValueError(
                f"{path}{name}: does not apply with batching, where rows are ready tensors and each step is one batch "
                "of them; leave it out"
            )


def _check_distinct(mixture: NodeConfig, at: str) -> None:
    seen: dict[str, str] = {}
    named: dict[str, str] = {}
    for path, source in _walk(mixture, at):
        if source.source in seen:
            raise ValueError(
                f"{path}.source: {source.source!r} is there already, at {seen[source.source]}; "
                "counters are keyed by the spec, so name each spec once and give it the sum of the weights"
            )
        seen[source.source] = path
        if source.name in named:
            raise ValueError(
                f"{path}.alias: {source.name!r} names the source at {named[source.name]} already; give each its own"
            )
        named[source.name] = path


def _check_ends(child: Child, path: str, endless: bool, estimated: str | None) -> None:
    """That what a policy estimates has an end. ``estimated``: the policy above that does so, unless a limit lies
    between."""
    if child.max_tokens is not None:
        estimated = None
    endless = endless or math.isinf(child.epochs)
    if isinstance(child, NodeConfig):
        for i, below in enumerate(child.children):
            _check_ends(below, f"{path}.children.{i}", endless, child.policy if child.estimates else estimated)
    elif endless and estimated is not None and child.presence != "dropped":
        raise ValueError(
            f"{path}.epochs: found .inf, but the policy {estimated!r} above goes by what its sources have left; give "
            "a number, or max_tokens to the source or to a node between"
        )


def _too_small_limits(child: Child, path: str, sample_tokens: int) -> Iterator[str]:
    """Limits that do not hold one sample."""
    if child.max_tokens is not None and child.max_tokens < sample_tokens:
        yield (
            f"{path}.max_tokens: {child.max_tokens} is less than one sample of {sample_tokens} tokens; give at least "
            "that many, or leave the child out"
        )
    if isinstance(child, NodeConfig):
        for i, below in enumerate(child.children):
            yield from _too_small_limits(below, f"{path}.children.{i}", sample_tokens)


def _walk(node: NodeConfig, path: str) -> Iterator[tuple[str, SourceConfig]]:
    for i, child in enumerate(node.children):
        at = f"{path}.children.{i}"
        if isinstance(child, NodeConfig):
            yield from _walk(child, at)
        else:
            yield at, child


def numbered(mixture: NodeConfig) -> NodeConfig:
    """The tree with ids depth first, parents first: nodes and sources each count from 0."""
    nodes, sources = count(), count()

    def visit(node: NodeConfig) -> NodeConfig:
        number = next(nodes)
        children = [
            visit(child) if isinstance(child, NodeConfig) else child.model_copy(update={"id": next(sources)})
            for child in node.children
        ]
        return node.model_copy(update={"id": number, "children": children})

    return visit(mixture)


def _order_of(child: NodeConfig | SourceConfig, run: RunConfig) -> dict[str, Any]:
    """A child's order-affecting fields: no name, no commit, and no override that says what the run says."""
    fields: dict[str, Any] = {"weight": weight_text(child.weight)}
    if isinstance(child, NodeConfig):
        return fields | order_of_mixture(child, run)
    fields |= {"source": child.source, "epochs": _number(child.epochs)}
    given = child.model_dump(
        mode="json", exclude_defaults=True, exclude={*fields, "id", "presence", *SOURCE_OUTSIDE_THE_ORDER}
    )
    # What overrides the run's own setting with the same is nothing.
    plain = child.model_copy(update={"add_bos": None, "add_eot": None})
    same = {"add_bos": run.adds_bos(plain), "add_eot": run.adds_eot(plain)}
    return fields | {key: value for key, value in given.items() if value != same.get(key, getattr(run, key, None))}


def order_of_mixture(node: NodeConfig, run: RunConfig) -> dict[str, Any]:
    """What of a tree decides the order of its samples."""
    fields: dict[str, Any] = {
        "policy": node.policy,
        "on_exhausted": node.on_exhausted,
        "children": [_order_of(child, run) for child in node.children],
    }
    if node.epochs != 1.0:
        fields["epochs"] = _number(node.epochs)
    # Later settings stand here only where they are not as they were before there was one.
    for key in ("max_tokens", "unit", "interpolate"):
        if getattr(node, key) != NodeConfig.model_fields[key].default:
            fields[key] = getattr(node, key)
    return fields


def weight_text(weight: float | list[tuple[int, float]]) -> Any:
    """A weight as it is recorded: the shortest text of the number, and of those in points."""
    if isinstance(weight, list):
        return [[tokens, _number(value)] for tokens, value in weight]
    return _number(weight)


def _number(value: float) -> str:
    """The shortest text of a number: 1 and 1.0 are "1"."""
    return repr(value).removesuffix(".0")


def load(path: Path) -> RunConfig:
    """Reads and validates a mixture file.

    Raises ``ConfigError`` with one line per fault: file, path of the field, what was found, what was expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a mixture file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply for a mixture file") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a mapping with run, mixture, …, found {type(document).__name__}")
    return parse(document, where=str(path))


def parse(document: dict[str, Any], *, where: str) -> RunConfig:
    """Validates a mixture that was read already; ``where`` begins each line of an error."""
    try:
        config = RunConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(explain(error, where)) from None
    found = list(given_by_the_server(document, ""))
    if found:
        raise ConfigError("\n".join(f"{where}: {at}: unknown key; ids and presence are this server's" for at in found))
    shortest = min([config.pick_tokens, *(phase.sequence_length or math.inf for phase in config.phases)])
    mixtures = [*config.mixtures()]
    mixtures += [
        (stream.mixture, f"streams.{name}.mixture") for name, stream in config.streams.items() if stream.mixture
    ]
    small = [line for mixture, at in mixtures for line in _too_small_limits(mixture, at, int(shortest))]
    if small:
        raise ConfigError("\n".join(f"{where}: {line}" for line in small))
    return config


def explain(error: ValidationError, where: str, field: str = "") -> str:
    """A line for each fault; ``where`` begins it. ``field``: in which the document stands."""
    begin = f"{where}: " if where else ""
    within = (field,) if field else ()
    return "\n".join(f"{begin}{_field((*within, *fault['loc']))}{_explain(dict(fault))}" for fault in error.errors())


def given_by_the_server(value: object, path: str) -> Iterator[str]:
    """Where a document has what only this server writes."""
    if isinstance(value, dict):
        yield from (f"{path}{key}" for key in ("id", "presence") if key in value)
        for key, below in value.items():
            yield from given_by_the_server(below, f"{path}{key}.")
    elif isinstance(value, list):
        for i, below in enumerate(value):
            yield from given_by_the_server(below, f"{path}{i}.")


def _is_tag(part: str | int, before: str | int) -> bool:
    if isinstance(before, int):
        return part in ("source", "node")
    return before == "weight" and part in ("number", "points")


def _field(location: tuple[str | int, ...]) -> str:
    # The tags of the union are pydantic's own; the user's file has no such level.
    parts = [str(p) for i, p in enumerate(location) if not (i and _is_tag(p, location[i - 1]))]
    return ".".join(parts) + ": " if parts else ""


def _explain(fault: dict[str, Any]) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        return f"unknown key; check its spelling against the README's configuration section (found {fault['input']!r})"
    if fault["type"] == "missing":
        return "is missing"
    if fault["type"] == "value_error":
        return message
    return f"{message}; found {fault['input']!r}"


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key named twice, which YAML would silently resolve to the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice in one mapping", node.value[i][0].start_mark
                )
        return super().construct_mapping(node, deep)


NodeConfig.model_rebuild()
