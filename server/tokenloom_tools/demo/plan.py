"""The numbers of the demonstration, and the mixture file that they are about."""

from __future__ import annotations

import math
from dataclasses import dataclass

RUN, REFERENCE_RUN = "demo", "demo-reference"
DEFAULT_STEPS = 48
#: Below this there is no room for a checkpoint, some steps after it, and a rest.
FEWEST_STEPS = 8
#: The highest learning rate, and the part of it that is left at the end.
LEARNING_RATE, LR_FLOOR = 3e-3, 0.1

MIXTURE = """\
# Written by `tokenloom demo`. Paths are relative to this file.
run: {run}
seed: 7
tokenizer: data/tokenizer.json
sequence_length: {sequence_length}
packing: concat
mixture:
  policy: least_consumed        # deterministic: every share stays within one sample of its target
  children:
    - source: "parquet:data/code/*.parquet:text"
      alias: code
      weight: 2
    - source: "jsonl:data/docstrings.jsonl:text"
      alias: docstrings
      weight: 1
    - source: "txt:data/prose/*.txt:text"
      alias: prose              # the smallest: its share takes it through several epochs
      weight: 1
      epochs: {prose_epochs}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Trainers that start together."""

    name: str
    ranks: int
    batch_size: int

    @property
    def samples_per_step(self) -> int:
        return self.ranks * self.batch_size

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' if self.ranks > 1 else ''} × {self.batch_size} samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens when, in samples of the one global order."""

    steps: int = DEFAULT_STEPS
    """Steps that the first launch would need for the whole run."""
    sequence_length: int = 256
    first: Launch = Launch(name="first", ranks=2, batch_size=8)
    second: Launch = Launch(name="second", ranks=1, batch_size=12)
    prose_epochs: int = 4

    @property
    def checkpoint_step(self) -> int:
        """Half-way through."""
        return self.steps // 2

    @property
    def kill_step(self) -> int:
        """Some steps after the checkpoint: what these trained on is lost and has to come again."""
        return self.checkpoint_step + max(1, self.steps // 12)

    @property
    def checkpoint_index(self) -> int:
        return self.checkpoint_step * self.first.samples_per_step

    @property
    def end_index(self) -> int:
        """End of the run: what is planned, rounded up to a whole step of the second launch."""
        planned = self.steps * self.first.samples_per_step
        rest = math.ceil((planned - self.checkpoint_index) / self.second.samples_per_step)
        return self.checkpoint_index + rest * self.second.samples_per_step

    @property
    def tokens(self) -> int:
        return self.end_index * self.sequence_length

    @property
    def warmup_tokens(self) -> int:
        return self.tokens // 8

    @property
    def reader_batch_size(self) -> int:
        """Divides the run, so that the reference ends exactly where the run does."""
        return math.gcd(self.end_index, 32)

    def mixture(self, run: str) -> str:
        """The mixture file of a run. Its name has no part in the order."""
        return MIXTURE.format(
            run=run, sequence_length=self.sequence_length, prose_epochs=self.prose_epochs
        )
