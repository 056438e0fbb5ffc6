"""Jobs of ``tokenloom prepare``, and what they leave in a folder or an object store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.workers.transforms import Transform
from tokenloom_tools.prepare.folder import Folder
from tokenloom_tools.prepare.job import Job

from .catalog import CATALOG
from .corpora import flat, text_rows


def write_texts(folder: Path, files: int = 6) -> dict[str, Any]:
    """Files of 40 rows, of which one in the first is bad, and one with so many lines that it is cut into three shards
    of about a mebibyte; a mixture of them."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for number in range(files):
        rows = [json.dumps({"text": text}) for text in text_rows(40, number, 9)]
        rows[7] = rows[7] if number else '{"text": 7}'
        (folder / f"data/{number}.jsonl").write_text("".join(row + "\n" for row in rows))
    (folder / "data/large.jsonl").write_text(
        "".join(f'{{"text": "{"row " * 60}{i}"}}\n' for i in range(13_000))
    )
    return flat(["jsonl:data/*.jsonl:text"], on_bad_row="skip")


def job_of(
    folder: Path,
    document: dict[str, Any],
    transform: Transform | None = None,
    *,
    shard_bytes: int = 1_000_000,
    **options: Any,
) -> Job:
    """A job of two threads, for shards of 10^6 bytes; its index lies in ``folder``."""
    parsed = config.parse(document, where="test", catalog=CATALOG)
    given = {"form": "arrow", "ids_too": False, "shuffled": False, "threads": 2, **options}
    return Job(
        parsed,
        folder,
        folder / "index",
        DataRoots(),
        shard_bytes=shard_bytes,
        transform=transform,
        **given,
    )


def write_tokenizer(path: Path, texts: list[str]) -> None:
    """One that either engine reads: byte-level BPE of 300 ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def nothing(*_: int) -> None:
    pass


def shards_of(place: Path | str) -> dict[str, bytes]:
    """The bytes of all shards, by name."""
    folder = Folder(place)
    return {name: folder.read(name) or b"" for name in folder.entries("sources")}
