"""Which files a spec names, and that a run's manifest sees every change of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.catalog import SOURCES, paths_of, spec_of
from support.hostile import is_shown_as_it_is
from tokenloom_server.errors import SourceChanged, SourceError
from tokenloom_server.sources import files, manifest
from tokenloom_server.sources.manifest import Manifest
from tokenloom_server.storage.local import LocalFile

GLOB = spec_of("txt:data/*.txt:text")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "c.jsonl", "a10.txt", "a9.txt", "deep/z.txt"):
        (tmp_path / "data" / name).write_text(f"content of {name}\n")
    return tmp_path


def test_a_pattern_gives_its_files_sorted_and_relative(folder: Path) -> None:
    assert paths_of(GLOB, folder) == ("data/a.txt", "data/a10.txt", "data/a9.txt", "data/b.txt")


def test_two_stars_cross_folders_and_meet_each_file_once(folder: Path) -> None:
    found = paths_of(spec_of("txt:**/**/*.txt:text"), folder)
    assert found == ("data/a.txt", "data/a10.txt", "data/a9.txt", "data/b.txt", "data/deep/z.txt")


def test_an_absolute_pattern_gives_absolute_paths(folder: Path) -> None:
    found = paths_of(spec_of(f"txt:{folder}/data/a?.txt:text"), Path("elsewhere"))
    assert found == (f"{folder}/data/a9.txt",)


def test_a_file_with_brackets_in_its_name_can_be_named(folder: Path) -> None:
    (folder / "data" / "a[1].txt").write_text("x\n")
    assert paths_of(spec_of("txt:data/a[1].txt:text"), folder) == ("data/a[1].txt",)


def test_no_match_names_the_pattern_and_what_lies_in_the_nearest_folder(folder: Path) -> None:
    with pytest.raises(SourceError) as caught:
        paths_of(spec_of("jsonl:data/none/x/*.jsonl:text"), folder)
    message = str(caught.value)
    assert "source 'jsonl:data/none/x/*.jsonl:text': no file matches" in message
    assert f"{folder}/data/none/x/*.jsonl" in message
    assert (
        f"the nearest folder that exists is '{folder}/data' (in it: a.txt, a10.txt, a9.txt, b.txt, c.jsonl, deep/)"
        in message
    )


def test_a_long_listing_is_cut(folder: Path) -> None:
    for i in range(20):
        (folder / "data" / f"f{i:02}.bin").touch()
    with pytest.raises(SourceError, match=r"a\.txt, a10\.txt, .* and 18 more\)"):
        paths_of(spec_of("jsonl:data/x.jsonl:text"), folder)


def test_a_folder_in_place_of_files_is_refused_with_a_pattern(folder: Path) -> None:
    with pytest.raises(
        SourceError, match=r"is a folder, expected files; name them by a pattern such as 'data/\*\.txt'"
    ):
        paths_of(spec_of("txt:data/:text"), folder)


def test_a_manifest_survives_its_json_form_and_has_one_digest(folder: Path) -> None:
    built = manifest.build([GLOB, spec_of("jsonl:data/c.jsonl:text")], folder)
    assert Manifest.from_json(built.to_json()) == built
    assert (
        Manifest.from_json(built.to_json()).digest
        == built.digest
        == manifest.build([GLOB, spec_of("jsonl:data/c.jsonl:text")], folder).digest
    )
    assert [shard.path for shard in built.shards("jsonl:data/c.jsonl:text")] == ["data/c.jsonl"]
    with pytest.raises(SourceError, match="has no source 'txt:x:text'; it has 'txt:data"):
        built.shards("txt:x:text")


def test_a_manifest_moves_with_its_folder(folder: Path, tmp_path: Path) -> None:
    built = manifest.build([GLOB], folder)
    moved = tmp_path / "moved"
    moved.mkdir()
    (folder / "data").rename(moved / "data")
    manifest.verify(built, moved, SOURCES)
    assert manifest.build([GLOB], moved).digest == built.digest


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format":1}', '{"format":1,"sources":[{"spec":"x"}]}'])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(SourceError, match="this is not a manifest"):
        Manifest.from_json(text)


def test_a_manifest_of_another_format_is_refused() -> None:
    with pytest.raises(SourceError, match="has format 2, but this server reads format 1"):
        Manifest.from_json('{"format":2,"sources":[]}')


def test_a_changed_modification_time_is_no_change_and_new_files_are_only_listed(folder: Path) -> None:
    built = manifest.build([GLOB], folder)
    os.utime(folder / "data" / "a.txt", (1, 1))
    manifest.verify(built, folder, SOURCES)
    assert manifest.appeared(built, folder, manifest.Listings(SOURCES)) == ()
    (folder / "data" / "new.txt").write_text("new\n")
    manifest.verify(built, folder, SOURCES)
    assert manifest.appeared(built, folder, manifest.Listings(SOURCES)) == ("data/new.txt",)


def test_every_change_of_a_file_is_refused_by_name(folder: Path) -> None:
    path = folder / "data" / "a10.txt"
    content = path.read_bytes()
    built = manifest.build([GLOB], folder)
    changes = {
        b"": f"'data/a10.txt' was shortened: found 0 bytes, expected {len(content)}",
        content + b"x": f"'data/a10.txt' has grown: found {len(content) + 1} bytes, expected {len(content)}",
        content.replace(b"c", b"C"): "'data/a10.txt' has other content: found fingerprint xxh3:",
    }
    for changed, expected in changes.items():
        path.write_bytes(changed)
        with pytest.raises(SourceChanged) as caught:
            manifest.verify(built, folder, SOURCES)
        assert f"source 'txt:data/*.txt:text': {expected}" in str(caught.value)
        assert "put the file back as it was, or begin a new run" in str(caught.value)
    path.unlink()
    (folder / "data" / "b.txt").unlink()
    with pytest.raises(SourceChanged, match=r"'data/a10\.txt' is missing .*\(1 more files differ\)"):
        manifest.verify(built, folder, SOURCES)


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 200_000])
def test_a_fingerprint_sees_size_head_and_end(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    seen = set()
    for head, end in ((b"", b""), (b"H", b""), (b"", b"E")):
        data = head + bytes(max(0, size - len(head) - len(end))) + end
        path.write_bytes(data)
        with LocalFile(path, "'file'") as file:
            seen.add((files.fingerprint_of(file), data))
    assert len({text for text, _ in seen}) == len({data for _, data in seen})
    assert all(text.startswith("xxh3:") and len(text) == 37 for text, _ in seen)


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "data" / "gone.txt").symlink_to("nowhere")
    with pytest.raises(SourceError, match=r"'data/gone\.txt' cannot be read \(No such file"):
        files.shards_of(GLOB, ["data/a.txt", "data/gone.txt"], folder)


@pytest.mark.parametrize("name", ["\x1b[2J.txt", "a\nforged.txt", "\u202etxt.exe.txt", "\x9b.txt"])
def test_a_file_whose_name_a_terminal_would_obey_is_refused_and_listed_escaped(folder: Path, name: str) -> None:
    (folder / "data" / name).write_text("x\n")
    with pytest.raises(
        SourceError, match="rename a file: expected UTF-8 text on one line, without control chara"
    ) as caught:
        paths_of(GLOB, folder)
    assert is_shown_as_it_is(str(caught.value))
    with pytest.raises(SourceError, match="no file matches") as caught:
        paths_of(spec_of("txt:data/none*:text"), folder)
    assert is_shown_as_it_is(str(caught.value))
