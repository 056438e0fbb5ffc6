"""What rank 0 of an attempt asks to resume from, which every other rank has to ask for, too."""

from __future__ import annotations

from typing import NamedTuple


class ResumeChoice(NamedTuple):
    """``position`` of the state that was loaded, or else what ``resume`` says, empty where neither is given."""

    position: str | None
    resume: str

    @classmethod
    def of_state(cls, sample_index: int, digest: str | None) -> ResumeChoice:
        """A state that was loaded; without a digest where an older checkpoint has none."""
        return cls(position_of(sample_index, digest), "")

    def __str__(self) -> str:
        if self.position is not None:
            return f"a loaded state at {self.position}"
        return f"resume={self.resume!r}" if self.resume else "no state"


def position_of(sample_index: int, digest: str | None) -> str:
    """A place in the order, for people; two are equal where their texts are."""
    return f"sample {sample_index} ({f'digest {digest}' if digest is not None else 'an older checkpoint'})"
