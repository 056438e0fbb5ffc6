"""A true server for what a protocol peer cannot tell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from support.corpora import CODE, DOCS, WIKI, flat, write_corpus
from support.served import url_of

#: Runs whose steps have different numbers of labels: padding, boundaries, an incomplete last step.
PACKED = {
    labels: flat(
        [CODE, DOCS, WIKI],
        run=labels,
        labels=labels,
        sequence_length=24,
        packing="best_fit",
        mask_boundaries=True,
        last_micro_step="pad",
        pad_id=0,
    )
    for labels in ("same", "shifted")
}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What stands before ``/same`` and ``/shifted`` in the URLs of these runs."""
    folder = write_corpus(tmp_path_factory.mktemp("served"))
    files = []
    for run, document in PACKED.items():
        files.append(folder / f"{run}.yaml")
        files[-1].write_text(yaml.safe_dump(document), encoding="utf-8")
    with url_of(folder, *files) as url:
        yield url
