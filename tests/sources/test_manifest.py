"""Which files a spec names, and that a run's manifest sees every change of them."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
from support.catalog import SOURCES, paths_of, spec_of
from support.hostile import is_shown_as_it_is
from tokenloom_server.errors import SourceChanged, SourceError
from tokenloom_server.sources import files, manifest
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.manifest import Manifest
from tokenloom_server.sources.open import open_source
from tokenloom_server.storage.file import LocalFile
from tokenloom_server.storage.io_stats import IoStats

GLOB = spec_of("txt:data/*.txt:text")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "c.jsonl", "a10.txt", "a9.txt", "deep/z.txt"):
        (tmp_path / "data" / name).write_text(f"content of {name}\n")
    return tmp_path


def test_a_pattern_gives_its_files_sorted_once_each_relative_where_it_is(folder: Path) -> None:
    (folder / "data" / "c[1].txt").write_text("x\n")
    for pattern, names in (
        ("data/[ab]*.txt", "data/a.txt data/a10.txt data/a9.txt data/b.txt"),
        ("**/**/[bz]*.txt", "data/b.txt data/deep/z.txt"),
        (f"{folder}/data/a?.txt", f"{folder}/data/a9.txt"),
        ("data/c[1].txt", "data/c[1].txt"),
    ):
        assert paths_of(spec_of(f"txt:{pattern}:text"), folder) == tuple(names.split()), pattern


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


def test_a_folder_in_place_of_files_is_refused_with_a_pattern(folder: Path) -> None:
    with pytest.raises(
        SourceError,
        match=r"is a folder, expected files; name them by a pattern such as 'data/\*\.txt'",
    ):
        paths_of(spec_of("txt:data/:text"), folder)


def test_a_manifest_survives_its_json_form_and_has_one_digest(folder: Path) -> None:
    built = manifest.build([GLOB, spec_of("jsonl:data/c.jsonl:text")], folder)
    read = Manifest.from_document(json.loads(json.dumps(built.document())))
    again = manifest.build([GLOB, spec_of("jsonl:data/c.jsonl:text")], folder)
    assert read == built
    assert read.digest == built.digest == again.digest
    assert [shard.path for shard in built.shards("jsonl:data/c.jsonl:text")] == ["data/c.jsonl"]
    with pytest.raises(SourceError, match="has no source 'txt:x:text'; it has 'txt:data"):
        built.shards("txt:x:text")


@pytest.mark.parametrize(
    "document", [None, [], {}, {"format": 1}, {"format": 1, "sources": [{"spec": "x"}]}]
)
def test_what_is_no_manifest_is_refused(document: Any) -> None:
    with pytest.raises(SourceError, match="this is not a manifest"):
        Manifest.from_document(document)


def test_a_manifest_of_another_format_is_refused() -> None:
    with pytest.raises(SourceError, match="has format 2, but this server reads format 1"):
        Manifest.from_document({"format": 2, "sources": []})


def test_a_changed_modification_time_is_no_change_and_new_files_are_only_listed(
    folder: Path,
) -> None:
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
        content
        + b"x": f"'data/a10.txt' has grown: found {len(content) + 1} bytes, expected {len(content)}",
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
    with pytest.raises(
        SourceChanged, match=r"'data/a10\.txt' is missing .*\(1 more files differ\)"
    ):
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


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 1234567\n"
ANNEX = b"/annex/objects/SHA256E-s123--4d4d.txt\n"


@pytest.mark.parametrize(
    ("content", "command"),
    [
        (LFS, "git lfs pull"),
        (LFS.replace(b"\n", b"\r\n"), "git lfs pull"),
        (LFS.replace(b"oid", b"ext-0-x sha256:1\noid"), "git lfs pull"),
        (ANNEX, "git annex get"),
        (b"../.git/annex/objects/Zx/8q/SHA256E-s1--4d/SHA256E-s1--4d", "git annex get"),
        (LFS + b"and a line of text\n", ""),
        (b"text, and " + LFS, ""),
        (ANNEX + b"text\n", ""),
        (LFS[:-1] + b"0" * 1024, ""),
    ],
)
def test_a_file_that_only_points_to_data_is_refused_with_what_brings_them(
    folder: Path, content: bytes, command: str
) -> None:
    (folder / "data" / "p.txt").write_bytes(content)
    for spec in (GLOB, spec_of("npy:data/p.txt:uint16"), spec_of("parquet:data/*.txt:text")):
        if not command:
            assert manifest.build([spec], folder)
            continue
        with pytest.raises(
            SourceError,
            match=f"'data/p.txt' is no data, but a pointer .* the data with '{command}'",
        ):
            manifest.build([spec], folder)


def test_what_a_run_recorded_is_not_questioned(folder: Path) -> None:
    (folder / "data" / "a.txt").write_bytes(LFS)
    with LocalFile(folder / "data" / "a.txt", "a") as file:
        shard = Shard("data/a.txt", len(LFS), files.fingerprint_of(file))
    recorded = manifest.Manifest((manifest.SourceFiles(str(GLOB), (shard,)),))
    (folder / "data" / "gone.txt").symlink_to("nowhere")
    manifest.verify(recorded, folder, SOURCES)
    assert open_source(GLOB, folder, (shard,)).row_count(0) == 3


@pytest.mark.parametrize(
    ("target", "bring"),
    [
        ("nowhere", "bring it there"),
        ("../.git/annex/objects/4/d/SHA256E-s1--4d/SHA256E-s1--4d", "'git annex get'"),
    ],
)
def test_a_link_that_leads_nowhere_is_refused_with_what_brings_its_file(
    folder: Path, target: str, bring: str
) -> None:
    (folder / "data" / "gone.txt").symlink_to(target)
    of = {
        "txt:data/*.txt:text": "gone.txt",
        "txt:data/gone.txt:text": "gone.txt",
        "arrow:data:text": "b.arrow",
    }
    of |= {"mds:data:text": "index.json", "arrow:data/:text": "state.json"}
    for text, name in of.items():
        if name != "gone.txt":
            (folder / "data" / name).symlink_to(target)
        with pytest.raises(
            SourceError, match=f"data/{name}' is a link to '{target}', where no file is: .*{bring}"
        ):
            manifest.build([spec_of(text)], folder)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["web-00000-of-00002.txt", "web-00001-of-00002.txt"], ""),
        (["web-1-of-2.txt", "web-2-of-2.txt"], ""),
        (["a-00000-of-00002-0123456789ab.txt", "a-00001-of-00002-ba9876543210.txt"], ""),
        (
            ["web-00000-of-00005.txt", "web-00004-of-00005.txt"],
            "3 of the 5 files 'web-…-of-00005.txt'",
        ),
        (["d/x_of_y-3.txt", "part_2.txt"], ""),
        (
            ["a-0-of-2.txt", "b-0-of-2.txt", "b-1-of-2.txt", "c_1.of.3.txt"],
            "1 of the 2 files 'a-…-of-2.txt', 2 of the 3",
        ),
        (
            ["a-0-of-3-0b.txt", "a-1-of-3-1b.txt", "a-1-of-3-zz.txt"],
            "1 of the 3 files 'a-…-of-3.txt'",
        ),
        # As DCLM's.
        ([f"g_01_of_9/l_{i}_of_2/a.jsonl" for i in range(2)], "8 of the 9 folders 'g_…_of_9/' are"),
        (
            [f"g_{i}_of_2/l_{i}_of_2/a.txt" for i in range(2)],
            "1 of the 2 folders 'g_0_of_2/l_…_of_2/', 1 of the 2",
        ),
        (["a-0-of-2.bin", "a-0-of-2.idx", "a-1-of-2.bin"], "1 of the 2 files 'a-…-of-2.idx'"),
    ],
)
def test_a_gap_in_a_series_is_a_warning_with_its_count(names: list[str], missing: str) -> None:
    found = files.gap_warning("s", [Shard(name, 1, "") for name in names])
    assert found.startswith(f"source 's': {missing}") if missing else not found


def large(folder: Path, name: str, size: int) -> Path:
    path = folder / "large" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(random.Random(name).randbytes(size))
    return path


def edit(path: Path, offset: int, size: int = 1) -> None:
    """Other bytes at a place, and all else as it was, the time of modification too."""
    times, data = path.stat(), bytearray(path.read_bytes())
    data[offset : offset + size] = bytes(byte ^ 1 for byte in data[offset : offset + size])
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


LARGE = spec_of("txt:large/*.txt:text")


@pytest.mark.parametrize(("size", "edited"), [(4 << 20, 1), (12 << 20, 2 * (12 << 20) // 64)])
def test_an_edit_that_the_fingerprint_does_not_see_is_noticed_by_spots(
    tmp_path: Path, size: int, edited: int
) -> None:
    # Of four mebibytes every byte is seen, of a larger file whatever is as long as two of its 64 parts.
    path = large(tmp_path, "a.txt", size)
    built = manifest.build([LARGE], tmp_path)
    for offset in range(100_000, size - 100_000 - edited, size // 4):
        edit(path, offset, edited)
        manifest.verify(built, tmp_path, SOURCES)
        with pytest.raises(SourceChanged) as caught:
            manifest.verify_spots(built, tmp_path, math.inf)
        for part in (
            "'large/a.txt' was changed within",
            "found spot digest 64:",
            "put the file back as it was",
        ):
            assert part in str(caught.value)
        assert f"recorded {built.sources[0].shards[0].spots.partition(':')[2]}" in str(caught.value)
        edit(path, offset, edited)
    manifest.verify_spots(built, tmp_path, math.inf)


def test_spots_are_bounded_recorded_beside_the_fingerprint_and_no_part_of_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "ALL_SPOTS", 6)
    for name, size in (("a", 1 << 18), ("b", 1 << 17), ("c", 1 << 19)):
        large(tmp_path, f"{name}.txt", size)
    built = manifest.build([LARGE], tmp_path)
    counts = [shard.spots.partition(":")[2].partition(":")[0] for shard in built.sources[0].shards]
    assert counts == ["2", "", "2"]  # a third of them is for each file
    read = Manifest.from_document(built.document()).sources[0].shards
    assert [shard.spots for shard in read] == [shard.spots for shard in built.sources[0].shards]
    with caplog.at_level("WARNING"):
        manifest.verify_spots(built, tmp_path, -math.inf)
    assert (
        "time was up before all files were compared with their spots: 'large/a.txt' was not"
        in caplog.text
    )
    before_spots = Manifest.from_document(built.document(spots=False))
    edit(tmp_path / "large/a.txt", 1 << 17)
    manifest.verify_spots(before_spots, tmp_path, math.inf)
    os.utime(tmp_path / "large/a.txt", ns=(1, 1))
    assert manifest.build([LARGE], tmp_path).digest == before_spots.digest == built.digest


def test_a_file_that_is_written_while_it_is_served_is_a_warning_or_refused_by_its_spots(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, io_stats = large(tmp_path, "a.txt", 1 << 19), IoStats()
    (shard,) = manifest.build([LARGE], tmp_path).sources[0].shards
    for modified in (None, 1, None):
        if modified is not None:
            os.utime(path, ns=(modified, modified))
        with caplog.at_level("WARNING"):
            files.open_shard(LARGE, shard, tmp_path, io_stats).close()
    assert (
        "'large/a.txt' was written or copied since the run began; what was recorded of it is"
        in io_stats.warning
    )
    assert caplog.messages == [io_stats.warning]
    edit(path, 1 << 18)
    os.utime(path, ns=(2, 2))
    with pytest.raises(SourceChanged, match=r"'large/a\.txt' was changed within"):
        files.open_shard(LARGE, shard, tmp_path, io_stats)


@pytest.mark.parametrize("name", ["\x1b[2J.txt", "a\nforged.txt", "\u202etxt.exe.txt", "\x9b.txt"])
def test_a_file_whose_name_a_terminal_would_obey_is_refused_and_listed_escaped(
    folder: Path, name: str
) -> None:
    (folder / "data" / name).write_text("x\n")
    with pytest.raises(
        SourceError, match="rename a file: expected UTF-8 text on one line, without control chara"
    ) as caught:
        paths_of(GLOB, folder)
    assert is_shown_as_it_is(str(caught.value))
    with pytest.raises(SourceError, match="no file matches") as caught:
        paths_of(spec_of("txt:data/none*:text"), folder)
    assert is_shown_as_it_is(str(caught.value))
