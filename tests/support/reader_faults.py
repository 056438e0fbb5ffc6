"""Readers that fail where they are told to, and what a run with them gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.steps import BatchPlan
from tokenloom_server.workers.cluster.readers.link import RayReaders

from support.corpora import id_rows, mixture, text_rows, write_jsonl, write_parquet

TEXT = "jsonl:data/text-*.jsonl:text"
#: Three files of text in several hundred requests, twice, beside ids.
DOCUMENT = mixture(
    sequence_length=16,
    mixture={
        "policy": "least_consumed",
        "children": [{"source": TEXT, "epochs": 2}, {"source": "parquet:data/code-*.parquet:ids"}],
    },
)
#: Python reads it as it starts. A reader takes a file from a folder before it reads rows, and does what its name says;
#: a node is another one by its environment.
_SITE = """
import os, signal, sys, time
NODE = os.environ.get("FAULTY_NODE", "")
if NODE == "no ray":
    sys.modules["ray"] = None
if "default_worker.py" in " ".join(sys.orig_argv):
    from tokenloom_server.workers.cluster import description
    from tokenloom_server.workers.cluster.readers import worker
    reads, rebuilds = worker.read, worker.rebuild
    def read(*arguments):
        for name in sorted(os.listdir(os.environ["READER_FAULTS"])):
            try:
                os.rename(os.environ["READER_FAULTS"] + "/" + name, os.environ["READER_FAULTS"] + "-done/" + name)
            except OSError:
                continue
            os.kill(os.getpid(), int(name.partition("-")[0]))
        time.sleep(2 * (NODE == "slow"))
        return reads(*arguments)
    worker.read = read
    if NODE == "version":
        description.version = lambda name: "9.9.9"
    if NODE == "files":
        import json
        worker.rebuild = lambda text: rebuilds(json.dumps(json.loads(text) | {"base_dir": "/nowhere"}))
    if NODE == "tokenloom":
        sys.modules["tokenloom_server"] = None
if "Engine" in NODE and any(name in " ".join(sys.orig_argv) for name in ("default_worker.py", "crashes")):
    import ctypes
    from tokenloom_server.tokenizer import engine
    def deadly(kind):
        encode = kind.encode
        def encoded(self, texts):
            if any("this one kills" in text for text in texts.to_pylist()):
                ctypes.string_at(0)
            return encode(self, texts)
        kind.encode = encoded
    for name in NODE.split(","):
        deadly(getattr(engine, name))
"""


class Faults:
    """A folder of faults that readers come upon, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "faults"
        self.folder.mkdir()
        Path(f"{self.folder}-done").mkdir()
        self._count = 0

    def signal(self, number: int, times: int = 1) -> Callable[[], None]:
        """Sends a signal to whoever reads next."""

        def put() -> None:
            for _ in range(times):
                self._count += 1
                (self.folder / f"{number}-{self._count}").touch()

        return put

    def all_happened(self) -> bool:
        return not list(self.folder.iterdir())


@contextmanager
def faulty_readers(folder: Path) -> Iterator[Faults]:
    """The environment, for Ray's processes that are started meanwhile."""
    faults = Faults(folder)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")])),
        )
        patch.setenv("READER_FAULTS", str(faults.folder))
        patch.setattr("tokenloom_server.workers.cluster.readers.source.REQUEST_BYTES", 8000)
        patch.setattr("tokenloom_server.workers.cluster.readers.source.FIRST_ROWS", 50)
        yield faults


def write_texts(folder: Path) -> Path:
    """The files of ``DOCUMENT``."""
    for number in range(3):
        write_jsonl(folder / f"data/text-{number}.jsonl", text_rows(300, number, 60))
    write_parquet(folder / "data/code-0.parquet", id_rows(200, 1, 40))
    return folder


def samples(
    order: PipelineFactory,
    readers: RayReaders | None = None,
    at: Mapping[int, Callable[[], object]] | None = None,
) -> list[tuple[int, bytes]]:
    """All samples of a run, sources and ids. ``at``: what is done once there are so many."""
    order.resources.readers = readers
    pipeline, found, left = order.pipeline(order.initial(), ahead=True), [], dict(at or {})
    while pipeline.ended is None:
        plan = BatchPlan(start_index=len(found), world_size=1, batch_size=1, group_micro_steps=5)
        group = pipeline.begin_group(plan)
        while len(group.marks) < 5 and pipeline.ended is None:
            pipeline.fill(group, 3)
        sources = group.source_ids[0, :, 0].tolist()
        found += [
            (sources[i], group.ids(0, i, i + 1)[0].tobytes()) for i in range(len(group.marks))
        ]
        for index in [index for index in left if index <= len(found)]:
            left.pop(index)()
    return found
