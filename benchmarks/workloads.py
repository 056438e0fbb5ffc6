"""The workloads: which corpus in which form, and the mixture file that serves it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from benchmarks import corpora
from benchmarks.corpora import (
    END_OF_TEXT,
    W1,
    W1_40,
    W1_128K,
    W1_200,
    W1_1000,
    W1_OWNED,
    W2,
    WEIGHTS,
    Corpus,
    TextCorpus,
)

#: As in the comparison with other loaders.
SEQUENCE_LENGTH, BATCH_SIZE, RANKS = 2_048, 8, 2

Form = Literal["parquet", "arrow"]
OwnedForm = Literal["megatron", "npy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A run to serve. ``form`` is how ids lie on disk: int32 Parquet, mapped Arrow of the narrowest type, or files that
    people own already."""

    name: str
    about: str
    corpus: Corpus
    form: Form | OwnedForm = "parquet"
    sequence_length: int = SEQUENCE_LENGTH
    shuffle: Literal["none", "rows"] = "none"
    ledger: Literal["sqlite", "redis"] = "sqlite"
    ranks: int = RANKS
    packing: Literal["concat", "best_fit"] = "concat"
    #: A web server has the files, and waits so long before each answer; None: they are on this machine's disk.
    delay_ms: float | None = None

    @property
    def reads_once(self) -> bool:
        """Text that was seen before is encoded faster than new text: such a run ends with its data."""
        return isinstance(self.corpus, TextCorpus)

    def document(self, place: str | None = None) -> dict[str, Any]:
        """The mixture, its sources' paths absolute. Many sources get weights from 1 to 20, from a fixed seed.

        ``place``: a URL where the corpus's folder is served.
        """
        folder = corpora.folder_of(self.corpus)
        if isinstance(self.corpus, TextCorpus):
            column, weights = "text", list(WEIGHTS)
            fields: dict[str, Any] = {"tokenizer": str(folder / "tokenizer.json")}
        else:
            column, count = "ids", len(self.corpus.sources)
            spread = (
                np.exp(np.random.default_rng(3).uniform(0, np.log(20), count)).round(2).tolist()
            )
            weights = list(WEIGHTS) if count == len(WEIGHTS) else spread
            fields = {"vocab_size": self.corpus.vocabulary, "end_of_text_id": END_OF_TEXT}
        files = {
            "parquet": f"/*.parquet:{column}",
            "arrow": f":{column}",
            "megatron": "/*",
            "npy": "/*.npy",
        }
        children = [
            {
                "source": f"{self.form}:{place or folder}/{self.form}/{source}{files[self.form]}",
                "alias": f"source-{source}",
                "weight": weight,
                "shuffle": self.shuffle,
                "epochs": 1 if self.reads_once else float("inf"),
            }
            for source, weight in enumerate(weights)
        ]
        return {
            "run": self.name,
            "sequence_length": self.sequence_length,
            "packing": self.packing,
            "mixture": {
                "policy": "least_consumed",
                "on_exhausted": "stop" if self.reads_once else "drop",
                "children": children,
            },
            **fields,
        }

    def write(self, folder: Path, place: str | None = None) -> Path:
        """Writes the mixture file into a folder, and returns its path. ``place`` as for ``document``."""
        path = folder / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(self.document(place)), encoding="utf-8")
        return path


def _ids(name: str, about: str, **options: Any) -> tuple[Workload, Workload]:
    """A workload of ids in both forms."""
    corpus = options.pop("corpus", W1)
    return (
        Workload(
            name=f"parquet{name}",
            about=f"W1, int32 ids in Parquet{about}",
            corpus=corpus,
            **options,
        ),
        Workload(
            name=f"arrow{name}",
            about=f"W1, narrow ids in Arrow{about}",
            corpus=corpus,
            form="arrow",
            **options,
        ),
    )


#: The three that the targets are about.
HEADLINES: tuple[Workload, ...] = (
    *_ids("", ""),
    Workload(name="text", about="W2, raw text, never seen before", corpus=W2),
)
VARIANTS: tuple[Workload, ...] = (
    *_ids("-512", ", sequences of 512", sequence_length=512),
    Workload(name="text-512", about="W2, sequences of 512", corpus=W2, sequence_length=512),
    *_ids("-200", ", 200 sources", corpus=W1_200),
    *_ids("-1000", ", 1,000 sources", corpus=W1_1000),
    *_ids("-1000-rows", ", 1,000 sources, rows shuffled", corpus=W1_1000, shuffle="rows"),
    *_ids(
        "-40",
        ", 40 sources, vocabulary of 128k, sequences of 4,096",
        corpus=W1_40,
        sequence_length=4_096,
    ),
    *_ids("-128k", ", vocabulary of 128k", corpus=W1_128K),
    Workload(
        name="megatron",
        about="W1, Megatron-LM's indexed datasets",
        corpus=W1_OWNED,
        form="megatron",
    ),
    Workload(name="npy", about="W1, flat .npy files", corpus=W1_OWNED, form="npy"),
    *_ids("-redis", ", ledger in Redis", ledger="redis"),
)
#: What large runs look like: many sources, shuffled, packed without cuts, from a store that is not near.
REALISTIC = Workload(
    name="realistic",
    about="40 sources of int32 ids, `shuffle: rows`, `best_fit`, sequences of 4,096, 128k vocabulary, 8 ranks",
    corpus=W1_40,
    sequence_length=4_096,
    ranks=8,
    packing="best_fit",
    shuffle="rows",
)
REALISTIC_REMOTE = dataclasses.replace(
    REALISTIC,
    name="realistic-http",
    about="the same over http, each answer 20 ms late",
    delay_ms=20.0,
)
WORKLOADS = {
    workload.name: workload for workload in (*HEADLINES, *VARIANTS, REALISTIC, REALISTIC_REMOTE)
}
