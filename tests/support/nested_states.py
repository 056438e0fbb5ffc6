"""A small loader of nested interleaved datasets, as other training stacks have them: its states in all their shapes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Shape = Literal["counts", "output alone", "nothing"]


@dataclass
class OldDataset:
    """A dataset of so many rows, of which some make one example (packed), or each makes some (split)."""

    length: int
    rows_per_example: int = 1
    examples_per_row: int = 1
    rows: int = 0
    examples: int = 0

    def draw(self) -> bool:
        """Gives one example; False where there is none left."""
        if self.examples % self.examples_per_row == 0:
            if self.rows + self.rows_per_example > self.length:
                return False
            self.rows += self.rows_per_example
        self.examples += 1
        return True

    @property
    def total(self) -> int:
        """Examples in all, by what was counted so far."""
        return self.length * self.examples // self.rows if self.rows else self.length

    def state(self, shape: Shape) -> dict[str, Any] | None:
        if shape == "nothing":
            return None
        counts = {"output_count": self.examples}
        if shape == "counts":
            counts |= {"input_count": self.rows, "original_length": self.length}
        return {
            "current_file_index": 0,
            "current_example_index": self.rows,
            "epoch": 0,
            "shuffle_seed": None,
            "shard_config": None,
            "split_start_idx": None,
            "cached_exact_length": None,
            "num_files": 1,
            **counts,
        }


@dataclass
class OldInterleaved:
    """Draws from its children with fixed probabilities, or in turn; the state is that of ``state_dict()``."""

    children: Sequence[OldDataset | OldInterleaved]
    probabilities: Sequence[float] | None = None
    count: int = 0
    by_child: list[int] = field(default_factory=list)
    out: list[bool] = field(default_factory=list)
    current: int = 0

    def __post_init__(self) -> None:
        self.by_child, self.out = [0] * len(self.children), [False] * len(self.children)

    def draw(self, rng: random.Random) -> bool:
        while not all(self.out):
            live = [i for i, out in enumerate(self.out) if not out]
            weights = [self.probabilities[i] if self.probabilities else 1.0 for i in live]
            self.current = rng.choices(live, weights)[0]
            child = self.children[self.current]
            if child.draw(rng) if isinstance(child, OldInterleaved) else child.draw():
                self.count += 1
                self.by_child[self.current] += 1
                return True
            self.out[self.current] = True
        return False

    @property
    def examples(self) -> int:
        return self.count

    @property
    def total(self) -> int:
        return sum(child.total for child in self.children)

    def state(self, shape: Shape = "counts", *, by_child: bool = True) -> dict[str, Any]:
        """``by_child``: with ``examples_per_dataset``."""
        states = [
            child.state(shape, by_child=by_child)
            if isinstance(child, OldInterleaved)
            else child.state(shape)
            for child in self.children
        ]
        state = {
            "current_dataset_index": self.current,
            "current_example_count": self.count,
            "datasets_exhausted": list(self.out),
            "probabilities": list(self.probabilities) if self.probabilities else None,
            "seed": 42,
            "stopping_strategy": "all_exhausted",
            "child_states": states,
        }
        return state | ({"examples_per_dataset": list(self.by_child)} if by_child else {})

    def leaves(self) -> list[OldDataset]:
        """Its datasets, depth first."""
        return [
            leaf
            for child in self.children
            for leaf in (child.leaves() if isinstance(child, OldInterleaved) else [child])
        ]


def three_levels(draws: int, lengths: Sequence[int] = (40, 60, 30, 50)) -> OldInterleaved:
    """A dataset beside an interleaved one, in which another lies: after so many examples. The second is packed, the
    last is split."""
    a, b, c, d = lengths
    inner = OldInterleaved([OldDataset(c), OldDataset(d, examples_per_row=3)])
    loader = OldInterleaved(
        [OldDataset(a), OldInterleaved([OldDataset(b, rows_per_example=4), inner], [0.25, 0.75])]
    )
    rng = random.Random(7)
    for _ in range(draws):
        loader.draw(rng)
    return loader


def in_workers(*states: dict[str, Any]) -> dict[str, Any]:
    """As a stateful loader with worker processes saves them."""
    return {
        "_snapshot": {
            "_snapshot_step": 9,
            "_main_snapshot": {"_num_workers": len(states), "_sampler_iter_state": None},
            "_worker_snapshots": {
                f"worker_{i}": {"worker_id": i, "dataset_state": state, "fetcher_state": None}
                for i, state in enumerate(states)
            },
        },
        "_steps_since_snapshot": 0,
        "_iterator_finished": False,
    }


def in_process(state: dict[str, Any]) -> dict[str, Any]:
    """As a stateful loader without workers saves it."""
    return {
        "_sampler_iter_yielded": 3,
        "_num_yielded": 3,
        "dataset_state": state,
        "_iterator_finished": False,
    }
