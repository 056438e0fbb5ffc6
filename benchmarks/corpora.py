"""The data of the benchmarks: made once, from a seed or from this machine's own text, and kept in a cache folder.

    python -m benchmarks.corpora                    # makes those that `make bench` needs
    python -m benchmarks.corpora --list             # what there is, and where

Ids are log-uniform (near to Zipf's law), documents log-normal in length, Parquet in row groups of 1,000 documents.
Text is what this machine has: source code, headers, documentation; each file once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from benchmarks.results import ROOT

CACHE = ROOT / ".cache" / "benchmarks"
ROW_GROUP = 1_000
TEXT_ROW_GROUP = 100
#: The shares of the three sources, by which they are mixed; the text is cut to them.
WEIGHTS = (0.7, 0.25, 0.05)
VOCABULARY = 32_000
END_OF_TEXT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """One source's documents: how many, their mean length in tokens, and the spread (sigma) of its logarithm."""

    count: int
    mean: float = 480
    sigma: float = 0.9
    files: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IdCorpus:
    """Sources of token ids, as int32 Parquet and as mapped Arrow files of the narrowest type.

    Files: ``parquet/<source>/<shard>.parquet`` and ``arrow/<source>/<shard>.arrow``, column ``ids``.
    """

    name: str
    sources: tuple[Documents, ...]
    vocabulary: int = VOCABULARY
    #: Each file is there so often, under further names of the same file: rows without disk.
    links: int = 1

    def make(self, folder: Path) -> None:
        narrow = np.min_scalar_type(self.vocabulary - 1)
        for source, documents in enumerate(self.sources):
            rng = np.random.default_rng([1, source])
            for form in ("parquet", "arrow"):
                (folder / form / str(source)).mkdir(parents=True)
            for shard, count in enumerate(_parts(documents.count, documents.files)):
                lengths = document_lengths(rng, count, documents)
                ids = draw_ids(rng, int(lengths.sum()), self.vocabulary)
                ends = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
                wide = pa.table({"ids": pa.ListArray.from_arrays(ends, pa.array(ids))})
                path = folder / "parquet" / str(source) / f"{shard:05d}.parquet"
                pq.write_table(wide, path, row_group_size=ROW_GROUP)
                table = pa.table(
                    {"ids": pa.ListArray.from_arrays(ends, pa.array(ids.astype(narrow)))}
                )
                mapped = folder / "arrow" / str(source) / f"{shard:05d}.arrow"
                with (
                    pa.OSFile(str(mapped), "wb") as out,
                    pa.ipc.new_file(out, table.schema) as writer,
                ):
                    writer.write_table(table, max_chunksize=ROW_GROUP)
                for copy in range(1, self.links):
                    for original in (path, mapped):
                        number = copy * documents.files + shard
                        os.link(original, original.with_name(f"{number:05d}{original.suffix}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCorpus:
    """Three sources of text, in proportion to ``WEIGHTS``, and a byte-level BPE of ``VOCABULARY`` for them.

    Files: ``parquet/<source>/<shard>.parquet``, column ``text``, and ``tokenizer.json``. It has as much as it finds
    under ``roots``, at most ``megabytes``: a run reads it once, since text that was seen before is encoded faster.
    """

    name: str
    megabytes: int
    roots: tuple[Path, ...]
    files: tuple[int, ...] = (8, 4, 4)
    #: The tokeniser learns from every so many-th document.
    learn_every: int = 24

    def make(self, folder: Path) -> None:
        kinds: tuple[list[str], ...] = ([], [], [])
        sizes = [0, 0, 0]
        for kind, text in own_text(self.roots):
            # A kind that has its share of the most there may be takes no more.
            if sizes[kind] < WEIGHTS[kind] * self.megabytes * 1e6:
                kinds[kind].append(text)
                sizes[kind] += len(text.encode())
        if not all(sizes):
            raise SystemExit(
                f"too little text under {[str(root) for root in self.roots]}: found {sizes} bytes by kind"
            )
        total = min(size / weight for size, weight in zip(sizes, WEIGHTS, strict=True))
        rng = np.random.default_rng(2)
        learned: list[str] = []
        for source, (texts, weight) in enumerate(zip(kinds, WEIGHTS, strict=True)):
            rng.shuffle(texts)
            left = total * weight
            kept = []
            for text in texts:
                if left <= 0:
                    break
                kept.append(text)
                left -= len(text.encode())
            learned += kept[:: self.learn_every]
            into = folder / "parquet" / str(source)
            into.mkdir(parents=True)
            first = 0
            for shard, count in enumerate(_parts(len(kept), self.files[source])):
                part = pa.table({"text": kept[first : first + count]})
                pq.write_table(part, into / f"{shard:05d}.parquet", row_group_size=TEXT_ROW_GROUP)
                first += count
        _learn_tokenizer(learned, folder / "tokenizer.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedCorpus:
    """An ``IdCorpus`` as people own it already: every document with its end-of-text id.

    Files: ``megatron/<source>/<shard>.bin`` and ``.idx``, ``npy/<source>/<shard>.npy``.
    """

    name: str
    ids: IdCorpus

    @property
    def sources(self) -> tuple[Documents, ...]:
        return self.ids.sources

    @property
    def vocabulary(self) -> int:
        return self.ids.vocabulary

    def make(self, folder: Path) -> None:
        for path in sorted(folder_of(self.ids).glob("arrow/*/*.arrow")):
            rows = (
                pa.ipc.open_file(pa.memory_map(str(path))).read_all().column("ids").combine_chunks()
            )
            offsets = np.asarray(rows.offsets).astype(np.int64)
            ids = np.insert(np.asarray(rows.values), offsets[1:], END_OF_TEXT)
            lengths = np.diff(offsets) + 1
            for form in ("megatron", "npy"):
                (folder / form / path.parent.name).mkdir(parents=True, exist_ok=True)
            np.save(folder / "npy" / path.parent.name / f"{path.stem}.npy", ids)
            write_megatron(folder / "megatron" / path.parent.name / path.stem, ids, lengths)


def write_megatron(
    prefix: Path, ids: npt.NDArray[np.uint16], lengths: npt.NDArray[np.int64]
) -> None:
    """An indexed dataset of Megatron-LM: one sequence for each document."""
    ids.tofile(prefix.with_suffix(".bin"))
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(((np.cumsum(lengths) - lengths) * ids.itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFiles:
    """So many files of twenty documents, each another one: what files cost, and nothing of what is in them.

    Files: ``<form>/<a hundredth of them>/<number>.<form>``, those of Arrow in one folder; column ``ids``.
    """

    name: str
    count: int
    form: str

    def make(self, folder: Path) -> None:
        rng = np.random.default_rng(3)
        for number in range(self.count):
            within = "." if self.form == "arrow" else f"{number % 100:02d}"
            path = folder / self.form / within / f"{number:06d}.{self.form}"
            path.parent.mkdir(parents=True, exist_ok=True)
            ids = draw_ids(rng, 20 * 50, VOCABULARY).reshape(20, 50)
            table = pa.table(
                {
                    "ids": pa.FixedSizeListArray.from_arrays(ids.ravel(), 50).cast(
                        pa.list_(pa.int32())
                    )
                }
            )
            if self.form == "parquet":
                pq.write_table(table, path)
            elif self.form == "arrow":
                with (
                    pa.OSFile(str(path), "wb") as out,
                    pa.ipc.new_file(out, table.schema) as writer,
                ):
                    writer.write_table(table)
            else:
                path.write_text("".join(json.dumps({"ids": row}) + "\n" for row in ids.tolist()))


Corpus = IdCorpus | OwnedCorpus | TextCorpus

#: W1: the data of the comparison with other loaders.
W1 = IdCorpus(
    name="ids",
    sources=(
        Documents(count=200_000, mean=480, sigma=0.9, files=8),
        Documents(count=50_000, mean=800, sigma=1.2, files=4),
        Documents(count=5_000, mean=3_000, sigma=0.7, files=4),
    ),
)
W1_OWNED = OwnedCorpus(name="owned", ids=W1)
W1_128K = IdCorpus(
    name="ids-128k",
    sources=tuple(
        Documents(count=old.count // 2, mean=old.mean, sigma=old.sigma, files=old.files)
        for old in W1.sources
    ),
    vocabulary=128_256,
)
W1_200 = IdCorpus(name="ids-200", sources=(Documents(count=1_000),) * 200)
W1_1000 = IdCorpus(name="ids-1000", sources=(Documents(count=400),) * 1_000)
W1_40 = IdCorpus(name="ids-40", sources=(Documents(count=6_000),) * 40, vocabulary=128_256)
W2 = TextCorpus(
    name="text",
    megabytes=600,
    roots=tuple(Path(root) for root in dict.fromkeys((sys.base_prefix, sys.prefix, "/usr"))),
)


def sources_corpus(count: int) -> IdCorpus:
    """So many sources of equal size, 48 M tokens in all, or a row group each where they are many."""
    return IdCorpus(
        name=f"sources-{count}", sources=(Documents(count=max(1_000, 100_000 // count)),) * count
    )


def shards_corpus(count: int) -> IdCorpus:
    """Three sources of so many shards of five row groups each; the shards behind the tenth are links."""
    files = min(count, 10)
    return IdCorpus(
        name=f"shards-{count}",
        sources=(Documents(count=5 * ROW_GROUP * files, files=files),) * 3,
        links=count // files,
    )


def rows_corpus(millions: int) -> IdCorpus:
    """One source of so many million rows, in shards of 250,000: one file and links to it."""
    return IdCorpus(
        name=f"rows-{millions}m", sources=(Documents(count=250_000),), links=4 * millions
    )


def files_corpus(count: int) -> IdCorpus:
    """One source of so many files, a multiple of twenty, of five row groups each: twenty files and links to them."""
    return IdCorpus(
        name=f"files-{count}",
        sources=(Documents(count=100 * ROW_GROUP, files=20),),
        links=count // 20,
    )


def folder_of(corpus: Corpus | SmallFiles, cache: Path = CACHE) -> Path:
    """Where a corpus lies; made at the first call, anew whenever what it is made of changes."""
    digest = hashlib.blake2b(repr(corpus).encode(), digest_size=4).hexdigest()
    folder = cache / f"{corpus.name}-{digest}"
    if not folder.exists():
        draft = cache / f".{folder.name}.{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            corpus.make(draft)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def document_lengths(
    rng: np.random.Generator, count: int, documents: Documents
) -> npt.NDArray[np.int64]:
    """Log-normal lengths in tokens, at least 4, of mean ``documents.mean``."""
    mu = np.log(documents.mean) - documents.sigma**2 / 2
    return np.maximum(4, rng.lognormal(mu, documents.sigma, count)).astype(np.int64)


def draw_ids(rng: np.random.Generator, count: int, vocabulary: int) -> npt.NDArray[np.int32]:
    """Log-uniform ids in [1, vocabulary): id 0 is the end of a text."""
    drawn = rng.random(count, np.float32)
    np.exp(np.multiply(drawn, np.float32(np.log(vocabulary)), out=drawn), out=drawn)
    return np.minimum(drawn.astype(np.int32), vocabulary - 1)


_CODE = frozenset({".py", ".pyi"})
_REFERENCE = frozenset(
    {".h", ".hpp", ".cuh", ".c", ".cpp", ".html", ".md", ".rst", ".txt", ".java", ".rs"}
)
_OTHER = frozenset({".js", ".css", ".pm", ".pl", ".tcl", ".sh", ".xml", ".json"})
_KINDS = {
    ending: kind for kind, endings in enumerate((_CODE, _REFERENCE, _OTHER)) for ending in endings
}
#: What stands in several installations of Python is the same, or nearly so.
_INSTALLED = re.compile(r".*/(?:site-packages|dist-packages|python\d\.\d+|python3|include)/")


def own_text(roots: Sequence[Path]) -> Iterator[tuple[int, str]]:
    """(kind, text) of this machine's text files of 200 bytes to 400 kB, in the order of their paths, each once.

    Kinds: 0 Python, 1 headers and documentation, 2 scripts and data.
    """
    seen: set[str] = set()
    for root in roots:
        for path in sorted(
            path for folder, _, names in os.walk(root) for path in (Path(folder, n) for n in names)
        ):
            kind = _KINDS.get(path.suffix)
            name = _INSTALLED.sub("", str(path))
            if (
                kind is None
                or name in seen
                or path.is_symlink()
                or not 200 <= path.stat().st_size <= 400_000
            ):
                continue
            try:
                content = path.read_bytes()
                text = content.decode()
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.blake2b(content, digest_size=12).hexdigest()
            if digest not in seen:
                seen.update((digest, name))
                yield kind, text


def _learn_tokenizer(texts: Sequence[str], path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def _parts(count: int, parts: int) -> Iterator[int]:
    """The sizes of ``parts`` nearly equal parts."""
    for part in range(parts):
        yield (part + 1) * count // parts - part * count // parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list", action="store_true", help="show what is there instead of making it"
    )
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help=f"where to keep them (default {CACHE})"
    )
    options = parser.parse_args()
    if options.list:
        for folder in sorted(options.cache.glob("*")):
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            print(f"{size / 1e6:10,.0f} MB  {folder}")
        return
    for corpus in (W1, W1_128K, W1_200, W2):
        print(folder_of(corpus, options.cache))


if __name__ == "__main__":
    main()
