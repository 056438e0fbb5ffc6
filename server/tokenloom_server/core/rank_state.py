"""What a rank does, in a word: the same in stats, metrics, on the page and the command line."""

from __future__ import annotations

from typing import Literal, TypeAlias

#: ``finished``: the rank said goodbye. ``away``: it never came, its connection broke, or another server knew it.
RankState: TypeAlias = Literal["connected", "finished", "away"]
