"""Documents that are kept out of training: each is on one side, whatever reads it, and in whichever order."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from support.corpora import mixture, order_of
from test_combinations import SCHEMES, SHUFFLES
from tokenloom_server.hashing import Purpose, draw
from tokenloom_server.packing.documents import Documents
from tokenloom_server.state import Cursor

SEED = 7
SHARE = 0.3


def of_one(spec: str, share: float | None = SHARE, **fields: Any) -> dict[str, Any]:
    source = {"source": spec} | ({} if share is None else {"holdout": share})
    return mixture(mixture={"policy": "sequential", "children": [source | fields]}, seed=SEED)


def rows_of(documents: Documents) -> Counter[tuple[int, int]]:
    """The rows of the first epoch that have tokens, by file and row."""
    found: Counter[tuple[int, int]] = Counter()
    for piece in documents.read(Cursor()):
        if piece.epoch:
            break
        lengths = np.diff(piece.ends, prepend=0)
        found.update(piece.origin(at) for at in np.flatnonzero(lengths).tolist())
    return found


def held(rows: list[bytes], share: float = SHARE, seed: int = SEED) -> list[int]:
    """Which documents are held out, counted anew: by the definition alone."""
    key = draw(seed, Purpose.HOLDOUT, 0, 0)
    return [
        at for at, row in enumerate(rows) if Fraction(xxhash.xxh3_64_intdigest(row, key), 2**64) < Fraction(str(share))
    ]


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_row_is_on_one_side_and_none_on_both(scheme: str, shuffle: str, tmp_path: Path) -> None:
    spec = SCHEMES[scheme](tmp_path)
    options = {key: value for key, value in SHUFFLES[shuffle].items() if key != "lanes"}
    whole = rows_of(order_of(tmp_path, of_one(spec, None, **options)).documents(0))
    order = order_of(tmp_path, of_one(spec, **options))
    kept, out = rows_of(order.documents(0)), rows_of(order.aside(order.config).documents(0))
    assert kept and out
    assert not kept & out
    assert kept + out == whole
