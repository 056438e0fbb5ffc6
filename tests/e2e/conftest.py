"""A small corpus of four schemes, what it must become, and servers that serve it."""

from __future__ import annotations

import itertools
import json
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.server_process import ServerProcess
from support.trainer import Sample, World
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub

LENGTH = 16
END = "<|endoftext|>"
SPECS = (
    "parquet:code-*.parquet:text",
    "txt:prose.txt:text",
    "jsonl:docs.jsonl:body",
    "arrow:wiki:input_ids",
)
_TEXT = (
    "the quick brown fox jumps over lazy dogs while naïve 日本 tokens 😀 flow from disk to tensors"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Corpus:
    """Four sources under ``folder``; by source id, all epochs: their tokens, and where each row's tokens end."""

    folder: Path
    streams: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    end_id: int

    def mixture(self, run: str, **fields: Any) -> Path:
        """Writes a mixture file: a tree of two levels, in which the smallest source is read twice."""
        document: dict[str, Any] = {
            "run": run,
            "seed": 7,
            "tokenizer": "tokenizer.json",
            "sequence_length": LENGTH,
            "mixture": {
                "policy": "least_consumed",
                "children": [
                    {"source": SPECS[0], "alias": "code", "weight": 2},
                    {"source": SPECS[1], "alias": "prose", "epochs": 2},
                    {
                        "policy": "weighted",
                        "alias": "notes",
                        "children": [
                            {"source": SPECS[2], "alias": "docs", "weight": 0.75},
                            {"source": SPECS[3]},
                        ],
                    },
                ],
            },
        }
        path = self.folder / f"{run}.yaml"
        path.write_text(yaml.safe_dump(document | fields), encoding="utf-8")
        return path

    def expected(self, source: int, length: int = LENGTH) -> list[tuple[int, ...]]:
        """A source's samples in their order: nothing is left out but the last tail."""
        stream = self.streams[source]
        return [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]

    def rows(self, samples: list[Sample]) -> dict[str, int]:
        """Rows taken to their end, by spec. One without tokens counts once what follows it is begun."""
        found = {}
        for source, (spec, tokens) in enumerate(self.tokens(samples).items()):
            behind = bisect_left(self.ends[source], tokens)
            found[spec] = behind + (tokens in self.ends[source])
        return found

    def tokens(self, samples: list[Sample]) -> dict[str, int]:
        """Tokens by spec."""
        return {
            spec: sum(len(sample.ids) for sample in samples if sample.source == source)
            for source, spec in enumerate(SPECS)
        }


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    code, prose, docs, wiki = (
        _documents(seed, count) for seed, count in enumerate((44, 7, 33, 22))
    )
    docs[3] += f" {END} is only text here"
    docs[5] = ""
    tokenizer = _tokenizer([*code, *prose, *docs, *wiki])
    tokenizer.save(str(folder / "tokenizer.json"))
    end_id = tokenizer.token_to_id(END)
    tokenizer.encode_special_tokens = True
    for number, part in enumerate((code[:30], code[30:])):
        table = pa.table({"id": list(range(len(part))), "text": part})
        pq.write_table(table, folder / f"code-{number}.parquet", row_group_size=7)
    (folder / "prose.txt").write_text("\n".join(prose) + "\n", encoding="utf-8")
    lines = [json.dumps({"number": number, "body": text}) for number, text in enumerate(docs)]
    (folder / "docs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    ids = [tokenizer.encode(text).ids for text in wiki]
    _quietly(
        lambda: datasets.Dataset.from_dict({"input_ids": ids}).save_to_disk(
            str(folder / "wiki"), num_shards=2
        )
    )

    streams, ends = [], []
    for documents in (code, prose * 2, docs, wiki):
        # A row that is empty has no token, not even an end.
        rows = [[*tokenizer.encode(text).ids, end_id] if text else [] for text in documents]
        streams.append(tuple(itertools.chain.from_iterable(rows)))
        ends.append(tuple(itertools.accumulate(map(len, rows))))
    return Corpus(folder, tuple(streams), tuple(ends), end_id)


def _documents(seed: int, count: int) -> list[str]:
    """Texts of very different length: most within a sample, some over several."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(_WORDS, k=draw.choice((1, 4, 9, 15, 40)))) for _ in range(count)]


def _tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=320,
        special_tokens=[END],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _quietly(write: Callable[[], None]) -> None:
    datasets.disable_progress_bars()
    try:
        write()
    finally:
        datasets.enable_progress_bars()


@pytest.fixture(scope="session")
def sequence(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """The run's one order, as a server gives it to one rank without interruption, checked against the files."""
    server = ServerProcess(
        tmp_path_factory.mktemp("reference"), corpus.mixture("reference")
    ).start()
    try:
        with World(server.url("reference")) as world:
            samples = world.run().receipt.sequence()
    finally:
        server.terminate()
    for source in range(len(SPECS)):
        assert [sample.ids for sample in samples if sample.source == source] == corpus.expected(
            source
        )
    return samples


@pytest.fixture(params=["sqlite", "redis"])
def ledger(request: pytest.FixtureRequest) -> str:
    """The URL of an empty ledger, of each kind."""
    if request.param == "sqlite":
        return "sqlite:///ledger.db"
    url: str = request.getfixturevalue("redis_url")
    return url


StartServer = Callable[..., ServerProcess]


def _starting(folder: Path) -> Iterator[StartServer]:
    servers: list[ServerProcess] = []

    def start(*mixtures: Path, **options: Any) -> ServerProcess:
        servers.append(
            ServerProcess(
                folder / options.pop("name", f"server-{len(servers)}"), *mixtures, **options
            )
        )
        return servers[-1].start()

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers, each in a folder of its own unless ``name`` is given; what still runs is killed at the end."""
    yield from _starting(tmp_path)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """As ``start_server``, for servers that a module's tests share."""
    yield from _starting(tmp_path_factory.mktemp("shared"))


class Rpc:
    """The calls that need no join, and Join itself for what the client would not send."""

    def __init__(self, server: ServerProcess) -> None:
        # Connections of its own: one that a killed server left must not be tried again.
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(server.grpc, options=options)
        self.stub = DataLoaderStub(self.channel)

    def __enter__(self) -> Rpc:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def snapshot(self, run: str, sample_index: int = -1, save: bool = False) -> str:
        request = wire.SnapshotRequest(run=run, sample_index=sample_index, save=save)
        return str(self.stub.Snapshot(request, timeout=120).snapshot_json)


@pytest.fixture
def rpc() -> Iterator[Callable[[ServerProcess], Rpc]]:
    opened: list[Rpc] = []

    def connect(server: ServerProcess) -> Rpc:
        opened.append(Rpc(server))
        return opened[-1]

    yield connect
    for each in opened:
        each.channel.close()
