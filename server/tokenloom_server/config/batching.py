"""``batching``: rows that are ready tensors, in batches of one shape each."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tokenloom_server.config.base import Name, Section

ALL_COLUMNS = "*"
"""The column of a spec whose rows travel as they are: with ``batching``."""

#: The fields of a run that mean something with ``batching``; the others keep their defaults.
RUN_FIELDS = {
    *(
        "run",
        "seed",
        "batching",
        "global_batch_size",
        "sequence_length",
        "window_micro_steps",
        "new_source_baseline",
    ),
    *("mixture", "phases"),
}
#: The same of its sources.
SOURCE_FIELDS = {
    *("id", "presence", "source", "alias", "weight", "epochs", "max_tokens", "on_exhausted"),
    *("shuffle", "shuffle_window_rows"),
}

_LENGTH_OF = re.compile(r"length\((.+)\)")


class BatchingConfig(Section):
    """Rows that are ready tensors, in batches of one shape each."""

    bucket_by: Name
    """The column whose value names a row's bucket; or ``length(COLUMN)``, the length of its list."""
    edges: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] | None = None
    """With ``length(COLUMN)``: the greatest length of each bucket, ascending. Rows are padded to it with zeros; rows
    longer than the last are left out."""
    columns: Annotated[list[Name], Field(min_length=1)] | None = None
    """The columns to send, in this order; by default all that can be sent."""
    pad: list[Name] = Field(default_factory=list)
    """With ``edges``: columns that are as long as the one that ``length`` names, and padded like it."""
    dtypes: dict[str, Literal["bfloat16", "float8_e4m3fn", "float8_e5m2"]] = Field(
        default_factory=dict
    )
    """The types of columns that Arrow has no type for: bfloat16 is stored as uint16, float8 as uint8."""

    @property
    def length_of(self) -> str | None:
        """The column whose length names the bucket; None where a value does."""
        match = _LENGTH_OF.fullmatch(self.bucket_by)
        return match[1] if match else None

    @property
    def bucket_column(self) -> str:
        """The column that decides a row's bucket."""
        return self.length_of or self.bucket_by

    @property
    def padded(self) -> frozenset[str]:
        """The columns that are padded to the edge."""
        return frozenset((self.bucket_column, *self.pad)) if self.edges is not None else frozenset()

    @model_validator(mode="after")
    def _check_edges(self) -> Self:
        if self.edges is None:
            if self.pad:
                raise ValueError(
                    "pad: rows are only padded up to edges; give edges, or leave it out"
                )
            return self
        if self.length_of is None:
            raise ValueError(
                f"edges: are for lengths, but bucket_by is {self.bucket_by!r}; write length({self.bucket_by}), or "
                "leave edges out"
            )
        for previous, edge in pairwise(self.edges):
            if edge <= previous:
                raise ValueError(f"edges: {edge} stands after {previous}; expected them ascending")
        if self.columns is not None and not set(self.columns) >= self.padded:
            missing = ", ".join(sorted(self.padded - set(self.columns)))
            raise ValueError(
                f"columns: {missing} is padded, but not among those that travel; add it"
            )
        return self

    @model_validator(mode="after")
    def _check_distinct_columns(self) -> Self:
        for name in ("columns", "pad"):
            listed = getattr(self, name) or []
            repeated = sorted({column for column in listed if listed.count(column) > 1})
            if repeated:
                raise ValueError(
                    f"{name}: {', '.join(repeated)} stands there twice; name each column once"
                )
        return self


def refuse_other_fields(section: Section, allowed: set[str], path: str) -> None:
    """Raises ``ValueError`` where a field that means nothing with ``batching`` does not have its default."""
    for name, field in type(section).model_fields.items():
        if name not in allowed and getattr(section, name) != field.get_default(
            call_default_factory=True
        ):
            raise ValueError(
                f"{path}{name}: does not apply with batching, where rows are ready tensors and each micro-step is one "
                "batch of them; leave it out"
            )
