"""``fim``: documents rearranged so that a model learns to fill in the middle."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from tokenloom_server.config.base import Section, not_bool


class FimIds(Section):
    """The ids that stand before each part of a rearranged document."""

    prefix: Annotated[int, Field(ge=0)]
    """Before what came first."""
    middle: Annotated[int, Field(ge=0)]
    """Before what is to be filled in."""
    suffix: Annotated[int, Field(ge=0)]
    """Before what came last."""

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
    """What marks the parts; of the vocabulary."""
