"""What a mixture file names lies below a data root, with every link resolved; whatever way it is named."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.corpora import flat, mixture, parsed, write_corpus, write_parquet, write_txt
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.errors import ConfigError
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory

SECRET = "the content of a file outside"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with data, and beside it something that is nobody's business."""
    write_txt(tmp_path / "outside/secret.txt", [SECRET])
    (tmp_path / "outside/tokenizer.json").write_text(SECRET, encoding="utf-8")
    write_txt(tmp_path / "root/inside.txt", ["inside"] * 9)
    (tmp_path / "outside/deep").mkdir()
    (tmp_path / "root/sub").mkdir()
    (tmp_path / "root/saved").mkdir()
    write_parquet(tmp_path / "outside/a.parquet", [[1, 2, 3]])
    write_txt(tmp_path / "root-of-another/secret.txt", [SECRET])
    state = {"_data_files": [{"filename": "../../outside/secret.txt"}]}
    (tmp_path / "root/saved/state.json").write_text(json.dumps(state), encoding="utf-8")
    return tmp_path / "root"


def create(root: Path, spec: str, **fields: Any) -> PipelineFactory:
    return builder.create(parsed(flat([spec], **fields)), root, None, DataRoots.of([root]))


def test_a_corpus_below_a_root_is_read_as_without_one(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    config = parsed(mixture())
    roots = DataRoots.of([tmp_path / "data"])
    free, bound = (
        builder.create(config, tmp_path, None),
        builder.create(config, tmp_path, None, roots),
    )

    assert free.record.to_json() == bound.record.to_json()
    assert (
        builder.load(config, tmp_path, None, free.record.to_json(), roots).record.to_json()
        == free.record.to_json()
    )


#: Links in the root and where they lead, and the spec that leads out.
WAYS_OUT: dict[str, tuple[dict[str, str], str]] = {
    "a link to a file": ({"innocent.txt": "../outside/secret.txt"}, "txt:innocent.txt:text"),
    "a link to a link": ({"b.txt": "../outside/secret.txt", "a.txt": "b.txt"}, "txt:a.txt:text"),
    "a link to a folder": ({"linked": "../outside"}, "txt:linked/*.txt:text"),
    "a link that a pattern meets": ({"linked": "../outside"}, "txt:**/*.txt:text"),
    "one of many files": ({"zzz.txt": "../outside/secret.txt"}, "txt:*.txt:text"),
    "dots": ({}, "txt:../outside/secret.txt:text"),
    "dots after a folder": ({}, "txt:sub/../../outside/*.txt:text"),
    "dots after a link": ({"linked": "../outside/deep"}, "txt:linked/../secret.txt:text"),
    "an absolute path": ({}, "txt:{parent}/outside/secret.txt:text"),
    "a neighbour whose name begins alike": ({}, "txt:../root-of-another/secret.txt:text"),
    "a saved dataset that names a file elsewhere": ({}, "arrow:saved:text"),
    "Parquet through a link": ({"a.parquet": "../outside/a.parquet"}, "parquet:a.parquet:ids"),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_no_way_leads_out_of_a_root(root: Path, way: str) -> None:
    links, spec = WAYS_OUT[way]
    spec = spec.format(parent=root.parent)
    for name, target in links.items():
        (root / name).symlink_to(target)
    with pytest.raises(
        ConfigError, match=f"lies below no data root; expected it below {root}: "
    ) as caught:
        create(root, spec)

    assert spec.split(":")[1].partition("*")[0].rstrip("/") in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "place", ["/proc/self/fd/0", "../outside/secret.txt", "sub/*/../../../outside/s*.txt"]
)
def test_what_lies_outside_is_refused_as_it_was_written_and_never_looked_at(
    root: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    for name in ("stat", "lstat", "readlink", "scandir", "open"):
        look = getattr(os, name)
        monkeypatch.setattr(
            os,
            name,
            lambda path, *a, _l=look, **k: (looked_at.append(str(path)), _l(path, *a, **k))[1],
        )
    with pytest.raises(ConfigError) as caught:
        create(root, f"txt:{place}:text")

    assert re.findall(r"'([^']*)'", str(caught.value)) == [place]
    assert looked_at
    assert not [
        path for path in looked_at if "/outside" in path or path.startswith("/proc/self/fd")
    ]


def test_nothing_outside_is_listed_in_an_error(root: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        create(root, "txt:../outside/no-such-*.txt:text")

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../outside/tokenizer.json", "../outside", "tok", "tok/tokenizer.json", "configured"]
)
def test_a_tokeniser_lies_below_a_root_too(root: Path, name: str) -> None:
    outside = root.parent / "outside"
    (root / "tok").mkdir()
    (root / "tok/tokenizer.json").symlink_to(outside / "tokenizer.json")
    (root / "configured").mkdir()
    (root / "configured/tokenizer_config.json").symlink_to(outside / "tokenizer.json")

    with pytest.raises(ConfigError, match=r"tokenizer: .* lies below no data root") as caught:
        create(root, "txt:inside.txt:text", tokenizer=name)

    assert SECRET not in str(caught.value)


def test_a_run_that_began_without_roots_is_held_to_them_afterwards(root: Path) -> None:
    (root / "linked.txt").symlink_to(root.parent / "outside/secret.txt")
    config = parsed(flat(["txt:*.txt:text"]))
    record = builder.create(config, root, None).record.to_json()

    with pytest.raises(
        ConfigError, match=r"source 'txt:\*\.txt:text': 'linked\.txt' lies below no data"
    ):
        builder.load(config, root, None, record, DataRoots.of([root]))


def test_several_roots_and_links_between_them_are_fine(root: Path) -> None:
    other = root.parent / "other"
    write_txt(other / "more.txt", ["more"] * 9)
    (root / "more.txt").symlink_to(other / "more.txt")
    roots = DataRoots.of([root, other])

    order = builder.create(parsed(flat(["txt:*.txt:text"])), root, None, roots)

    assert order.record.shard_paths == (("inside.txt", "more.txt"),)


def test_a_root_that_is_a_link_stands_for_its_folder(root: Path) -> None:
    (root.parent / "link").symlink_to(root)

    builder.create(
        parsed(flat(["txt:inside.txt:text"])), root, None, DataRoots.of([root.parent / "link"])
    )


def test_a_root_that_is_not_there_is_refused(root: Path) -> None:
    for path in (root / "absent", root / "inside.txt"):
        with pytest.raises(ConfigError, match=f"--data-root {path}: there is no such folder"):
            DataRoots.of([path])
