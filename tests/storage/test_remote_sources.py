"""Sources behind URLs give the rows that the same files give on a disk; what changed there is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.catalog import SOURCES, paths_of, spec_of
from support.corpora import PROSE, flat, mixture, parsed, write_corpus
from tokenloom_server.config.catalog import Spec
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.core.state import State
from tokenloom_server.errors import ConfigError, SourceChanged, SourceError
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.steps import BatchPlan
from tokenloom_server.sources import manifest
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.open import open_source

PLACE = "memory://corpus"


@pytest.fixture
def store() -> Iterator[Any]:
    """fsspec's file system in memory."""
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture
def corpus(tmp_path: Path, store: Any) -> Path:
    """The same files on a disk and in memory."""
    write_corpus(tmp_path)
    store.put(str(tmp_path / "data"), "/corpus/data", recursive=True)
    return tmp_path


def at(place: str, spec: str) -> Spec:
    scheme, rest = spec.split(":", 1)
    return spec_of(f"{scheme}:{place}/{rest}")


def rows(source: Source, shard: int, row: int) -> list[Any]:
    return [value for piece in source.read(shard, row) for value in piece.column.to_pylist()]


@pytest.mark.parametrize(
    "pattern",
    [
        "*.txt",
        "**/*.txt",
        "*/*.txt",
        "**",
        "**.txt",
        "a**.txt",
        "p*/**",
        ".h*.txt",
        "*/.*/*.txt",
        "?*.txt",
        "[!a].txt",
    ],
)
def test_patterns_match_what_they_match_of_local_files(
    tmp_path: Path, store: Any, pattern: str
) -> None:
    names = (
        "a.txt",
        "ab.txt",
        "b.txt",
        ".hidden.txt",
        "part/c.txt",
        "part/.d.txt",
        ".trash/e.txt",
        "part/.old/f.txt",
    )
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("text\n")
    store.put(str(tmp_path / "data"), "/corpus/data", recursive=True)
    spec = f"txt:data/{pattern}:text"
    found = paths_of(at(PLACE, spec), tmp_path)
    assert found == tuple(f"{PLACE}/{path}" for path in paths_of(spec_of(spec), tmp_path))


def test_a_run_of_remote_files_is_the_run_of_local_ones(corpus: Path) -> None:
    local = builder.create(parsed(mixture()), corpus, None)
    specs = {spec: str(at(PLACE, spec)) for spec in local.record.specs}
    document = mixture()

    def away(node: dict[str, Any]) -> None:
        for child in node.get("children", ()):
            away(child)
        if "source" in node:
            node["source"] = specs[node["source"]]

    away(document["mixture"])
    remote_order = builder.create(parsed(document), corpus, None)

    assert digests(remote_order, remote_order.initial()) == digests(local, local.initial())
    again = builder.load(parsed(document), corpus, None, remote_order.record.to_json())
    assert again.record.to_json() == remote_order.record.to_json()


def digests(order: PipelineFactory, state: State) -> list[int]:
    """The digest behind each of the samples from a state to the end of data."""
    pipeline = order.pipeline(state)
    group = pipeline.begin_group(
        BatchPlan(
            start_index=state.sample_index, world_size=1, batch_size=1, group_micro_steps=10_000
        )
    )
    pipeline.fill(group, 10_000)
    assert pipeline.ended is not None
    return [mark.digest for mark in group.marks]


def test_a_remote_file_that_is_missing_changed_or_shortened_is_named(
    corpus: Path, store: Any
) -> None:
    spec = at(PLACE, PROSE)
    frozen = manifest.build([spec], corpus)
    name = "/corpus/data/prose/1.txt"
    text = store.cat_file(name)
    shown = f"{PLACE}/data/prose/1.txt"

    def found() -> list[str]:
        """What a restore says, by a listing and file by file, and what opening the file says."""
        said = []
        for listings in (manifest.Listings(SOURCES), None):
            with pytest.raises(SourceChanged) as caught:
                manifest.verify(frozen, corpus, SOURCES, listings)
            said.append(str(caught.value))
        with pytest.raises(SourceChanged) as caught:
            rows(open_source(spec, corpus, frozen.sources[0].shards), 1, 0)
        return [*said, str(caught.value)]

    manifest.verify(frozen, corpus, SOURCES, manifest.Listings(SOURCES))
    store.pipe_file(name, text[:-1])
    assert all(
        f"{shown!r} was shortened: found {len(text) - 1} bytes, expected {len(text)}" in said
        for said in found()
    )
    store.pipe_file(name, text[::-1])
    assert all(
        f"{shown!r} has other content: found fingerprint modified:" in said for said in found()
    )
    store.rm_file(name)
    assert all(
        f"{shown!r} is missing (expected {len(text)} bytes at {shown!r})" in said
        for said in found()
    )


@pytest.mark.parametrize(
    ("file", "spec"),
    [
        ("data/prose/9.txt", PROSE),
        ("saved/state.json", f"arrow:{PLACE}/saved:text"),
        ("saved/index.json", f"mds:{PLACE}/saved:text"),
    ],
)
def test_a_remote_pointer_is_refused(corpus: Path, store: Any, file: str, spec: str) -> None:
    store.pipe_file(f"/corpus/{file}", b"/annex/objects/SHA256E-s123--4d4d.txt\n")
    with pytest.raises(SourceError, match=rf"{file}' is no data, but a pointer .* 'git annex get'"):
        manifest.build([at(PLACE, spec) if spec == PROSE else spec_of(spec)], corpus)


def test_files_that_appeared_are_told(corpus: Path, store: Any) -> None:
    frozen = manifest.build([at(PLACE, PROSE)], corpus)
    store.pipe_file("/corpus/data/prose/9.txt", b"new\n")
    assert manifest.appeared(frozen, corpus, manifest.Listings(SOURCES)) == (
        f"{PLACE}/data/prose/9.txt",
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"txt:{PLACE}/no-such-*.txt:text", f"no file matches '{PLACE}/no-such-*.txt'"),
        (
            f"txt:{PLACE}/data:text",
            f"'{PLACE}/data' is a folder, expected files; name them by a pattern such as",
        ),
        (f"arrow:{PLACE}/data/prose:text", "no Arrow file in"),
        (f"parquet:{PLACE}/data/docs.jsonl:text", "is not a readable Parquet file"),
        ("txt:no-such-storage://x/y:text", "storage that fsspec cannot read"),
        ("txt:gs://bucket/y:text", "install gcsfs"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(corpus: Path, spec: str, message: str) -> None:
    with pytest.raises((SourceError, ConfigError)) as caught:
        open_source(spec_of(spec), corpus)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:SECRET@bucket/x.txt",
        "https://SECRET@host/x.txt",
        "https://host/x.txt?X-Amz-Signature=SECRET",
        "s3://bucket/x.txt?versionId=SECRET",
        "simplecache::s3://bucket/x.txt",
        "file:///etc/passwd",
        "s3://bucket/a/../b.txt",
        "https://host/a/%2E%2e/b.txt",
    ],
)
def test_urls_with_secrets_and_detours_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match=r"URL|view of other storage|has a part") as caught:
        spec_of(f"txt:{url}:text")
    assert "SECRET" not in str(caught.value)


def test_a_question_mark_may_be_a_wildcard() -> None:
    assert spec_of("txt:s3://bucket/part-?.txt:text").location == "s3://bucket/part-?.txt"


def test_data_roots_hold_urls_too(corpus: Path) -> None:
    config = parsed(flat([str(at(PLACE, PROSE))]))
    for places in ([f"{PLACE}/data"], [f"{PLACE}/data/prose/"], [corpus, "memory://corpus"]):
        builder.create(config, corpus, None, DataRoots.of(places))
    for places in (
        [corpus],
        ["memory://corp"],
        ["memory://corpus/data/prose/deep"],
        ["s3://corpus"],
    ):
        with pytest.raises(ConfigError, match=r"lies below no data root; expected it below"):
            builder.create(config, corpus, None, DataRoots.of(places))
    with pytest.raises(ConfigError, match="lies below no data root"):
        builder.create(
            parsed(flat(["txt:data/prose/0.txt:text"])), corpus, None, DataRoots.of([PLACE])
        )
    with pytest.raises(ConfigError, match=r"--data-root: the URL 's3://…@bucket' carries"):
        DataRoots.of(["s3://KEY:SECRET@bucket"])
