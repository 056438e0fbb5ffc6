"""Three corpora of very different size and document length, from the text that every Python carries.

    code         the library's source, a file a document    parquet, several shards    about 11 MB
    docstrings   of the same files, read and not run        one jsonl file             about 2 MB
    prose        the licences of what is installed          txt, a paragraph a row     about 0.1 MB

One installation always gives the same bytes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenloom_tools.demo.processes import DemoFailed

CODE, DOCSTRINGS, PROSE, TOKENIZER = "code", "docstrings.jsonl", "prose", "tokenizer.json"
#: So few that the demonstration goes through several shards.
DOCUMENTS_PER_SHARD = 8
ROWS_PER_GROUP = 4
#: The prose is small on purpose: it is the source that is read more than once.
PROSE_BYTES = 96_000
#: Shorter ones are headings, tables and signatures.
SHORTEST_PARAGRAPH = 60
SHORTEST_DOCSTRING = 40
VOCAB_SIZE = 8192
END_OF_TEXT = "<|endoftext|>"
#: Characters of each corpus that the tokeniser learns from: about a second on one core.
TOKENIZER_SAMPLE = 3_000_000
#: Folders of the library that hold tests, or packages that somebody installed.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
LICENCE_NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What the data folder holds."""

    vocab_size: int
    documents: dict[str, int]
    """Rows of each corpus."""
    characters: dict[str, int]


def library_folder() -> Path:
    """Where this Python keeps the source of its library."""
    return Path(sysconfig.get_path("stdlib"))


def build(folder: Path, progress: Progress, library: Path) -> Corpus:
    """Writes the corpora and the tokeniser into ``folder``, in place of what is there, from the Python files below
    ``library``. Raises ``DemoFailed`` where these give no text."""
    sources = _sources(library)
    texts = {
        "code": [text for _, text in sources],
        "docstrings": [
            docstring
            for name, text in progress.track(sources, description="docstrings")
            for docstring in _docstrings(name, text)
        ],
        "prose": list(_first_bytes(_paragraphs(_licences()), PROSE_BYTES)),
    }
    for name, documents in texts.items():
        if not documents:
            raise DemoFailed(
                f"no text for the corpus {name!r}: this Python carries no library source at {library}"
            )
    shutil.rmtree(folder, ignore_errors=True)
    for corpus in (CODE, PROSE):
        (folder / corpus).mkdir(parents=True)
    for shard, begin in enumerate(range(0, len(texts["code"]), DOCUMENTS_PER_SHARD)):
        table = pa.table({"text": texts["code"][begin : begin + DOCUMENTS_PER_SHARD]})
        pq.write_table(table, folder / CODE / f"{shard:03}.parquet", row_group_size=ROWS_PER_GROUP)
    with (folder / DOCSTRINGS).open("w", encoding="utf-8") as lines:
        lines.writelines(
            json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts["docstrings"]
        )
    (folder / PROSE / "licences.txt").write_text(
        "".join(f"{text}\n" for text in texts["prose"]), encoding="utf-8"
    )
    return Corpus(
        vocab_size=_train_tokenizer(folder / TOKENIZER, progress, texts),
        documents={name: len(documents) for name, documents in texts.items()},
        characters={name: sum(map(len, documents)) for name, documents in texts.items()},
    )


def _sources(library: Path) -> list[tuple[str, str]]:
    """(name, text) of each file, in an order that mixes the packages: sources are read in file order."""
    files: list[tuple[bytes, str, str]] = []
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        if SKIPPED_FOLDERS.isdisjoint(name.parts):
            with suppress(OSError, UnicodeDecodeError):
                text = path.read_text(encoding="utf-8")
                if text.strip():
                    files.append(
                        (hashlib.sha256(name.as_posix().encode()).digest(), name.as_posix(), text)
                    )
    return [(name, text) for _, name, text in sorted(files)]


def _docstrings(name: str, text: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in somebody else's source
        try:
            tree = ast.parse(text, filename=name)
        except (SyntaxError, ValueError, RecursionError):
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) >= SHORTEST_DOCSTRING:
                yield docstring


def _licences() -> list[str]:
    paths = [library_folder() / "LICENSE.txt"]
    for distribution in distributions():
        files = distribution.files or ()
        paths += [
            Path(str(file.locate()))
            for file in files
            if file.name.upper().startswith(LICENCE_NAMES)
        ]
    texts = []
    for path in sorted(paths, key=lambda path: (path.parent.name, path.name)):
        with suppress(OSError, UnicodeDecodeError):
            texts.append(path.read_text(encoding="utf-8"))
    return texts


def _paragraphs(texts: Iterable[str]) -> Iterator[str]:
    """Each paragraph once, as one line."""
    seen: set[str] = set()
    for text in texts:
        for block in text.replace("\r\n", "\n").split("\n\n"):
            line = " ".join(block.split())
            if len(line) >= SHORTEST_PARAGRAPH and line not in seen:
                seen.add(line)
                yield line


def _first_bytes(rows: Iterable[str], limit: int) -> Iterator[str]:
    size = 0
    for row in rows:
        size += len(row.encode()) + 1
        if size > limit:
            return
        yield row


def _train_tokenizer(path: Path, progress: Progress, texts: dict[str, list[str]]) -> int:
    """Byte-level BPE, as GPT-2's; returns the size of the vocabulary."""
    task = progress.add_task("tokeniser", total=None)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = chain.from_iterable(
        _first_bytes(documents, TOKENIZER_SAMPLE) for documents in texts.values()
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(path))
    progress.update(task, total=1, completed=1)
    return int(tokenizer.get_vocab_size())
