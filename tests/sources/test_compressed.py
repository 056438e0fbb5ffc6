"""Compressed lines: the same rows as without, from any row on; damage and bombs are refused."""

from __future__ import annotations

import bz2
import gzip
import lzma
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from support.catalog import SOURCES
from support.sources import opened, rows_of
from tokenloom_server.errors import ConfigError, SourceError
from tokenloom_server.sources import compressed, lines
from tokenloom_server.sources.files import CODECS, codec_of, ending_of
from tokenloom_server.storage.file import LocalFile

zstd_library = compressed._zstd()

TEXTS = [
    "first",
    "",
    "zwölf Boxkämpfer 🥊",
    "a\tb",
    "x" * 3000,
    "",
    "last",
    *(f"row {i}" for i in range(500)),
]

Compress = Callable[[bytes], bytes]


def zstd(data: bytes) -> bytes:
    packed: bytes = zstd_library.compress(
        data, options={zstd_library.CompressionParameter.checksum_flag: 1}
    )
    return packed


def divided(compress: Compress, between: bytes = b"", after: bytes = b"") -> Compress:
    """Two members, what stands between them and behind."""
    return lambda data: compress(data[:777]) + between + compress(data[777:]) + after


#: Also of several members or frames, which may end anywhere, and with nothing in one of them.
PACKERS: dict[str, tuple[str, Compress]] = {
    "gzip": (".gz", gzip.compress),
    "zstd": (".zst", zstd),
    "gzip members": (".gz", divided(gzip.compress, gzip.compress(b""))),
    "zstd frames": (".zst", divided(zstd)),
    "bz2 streams": (".bz2", divided(bz2.compress, bz2.compress(b""))),
    "xz streams": (".xz", divided(lzma.compress, lzma.compress(b""))),
    # tar and tapes fill up with zeros, and so may xz in steps of four.
    "gzip, padded": (".gz", divided(gzip.compress, bytes(3), bytes(70_001))),
    "xz, padded": (".xz", divided(lzma.compress, bytes(8), bytes(70_000))),
    # As pzstd and zstd --seekable write them: with a frame that has no content.
    "zstd, skippable": (
        ".zst",
        lambda d: b"\x50\x2a\x4d\x18\3\0\0\0abc" + zstd(d) + b"\x5f\x2a\x4d\x18\0\0\0\0",
    ),
}


@pytest.mark.parametrize(
    ("block_bytes", "end"), [(7, "\r\n"), (100, ""), (lines.BLOCK_BYTES, "\n")]
)
@pytest.mark.parametrize("packer", PACKERS)
def test_rows_are_those_of_the_plain_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packer: str, end: str, block_bytes: int
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", block_bytes)
    suffix, pack = PACKERS[packer]
    text = (end or "\n").join(TEXTS) + end
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(b"\xef\xbb\xbf" + text.encode()))
    source = opened(tmp_path, f"txt:*.txt{suffix}:text", tmp_path / "index")
    assert source.row_count(0) == len(TEXTS)
    assert source.blocks(0).tolist() == [0, len(TEXTS)]
    for row in (0, 1, 5, len(TEXTS) - 1, len(TEXTS)):
        assert rows_of(source, row) == TEXTS[row:]
    with pytest.raises(
        SourceError,
        match=rf"a\.txt{suffix}' has {len(TEXTS)} rows, but row {len(TEXTS) + 1} was asked",
    ):
        rows_of(source, len(TEXTS) + 1)


@pytest.mark.parametrize("packer", ["gzip", "zstd", "bz2 streams", "xz streams"])
def test_what_is_damaged_cut_off_or_no_such_file_is_an_error_that_names_it(
    tmp_path: Path, packer: str
) -> None:
    suffix, pack = PACKERS[packer]
    whole = pack("\n".join(TEXTS).encode())
    size = len("\n".join(TEXTS).encode())
    damaged = r"cannot be decompressed somewhere after byte \d+ of its content"
    at = -6 if suffix == ".gz" else -2
    # bz2 and xz do not tell which fault it is.
    wrong = (
        "was decompressed, but its checksum is not that of its content"
        if suffix in (".gz", ".zst")
        else damaged
    )
    after = rf"is whole up to byte {size} of its content, but what stands after that is no {CODECS[suffix]}"
    for bad, says in (
        *((bad, damaged) for bad in (whole[:-5], whole[:20], b"plain text\n")),
        (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], wrong),
        *((whole + rest, after) for rest in (b"more", bytes(8) + b"more", bytes(2) + b"x")),
    ):
        (tmp_path / f"a.txt{suffix}").write_bytes(bad)
        with pytest.raises(SourceError, match=rf"a\.txt{suffix}' {says} .*again"):
            rows_of(opened(tmp_path, f"txt:a.txt{suffix}:text"))


def test_a_window_that_takes_much_memory_is_decoded_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {
        zstd_library.CompressionParameter.window_log: 28,
        zstd_library.CompressionParameter.content_size_flag: 0,
    }
    packer = zstd_library.ZstdCompressor(options=long)
    (tmp_path / "a.txt.zst").write_bytes(packer.compress(b"a\nb\n") + packer.flush())
    large = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 29}]
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"a\nb\n", filters=large) + bytes(4))
    for suffix in (".zst", ".xz"):
        with pytest.raises(
            SourceError, match=r"more memory than is allowed: set TOKENLOOM_DECOMPRESS_MIB=2048"
        ):
            rows_of(opened(tmp_path, f"txt:a.txt{suffix}:text"))
    monkeypatch.setenv(compressed.MEMORY, "2 GiB")
    with pytest.raises(
        ConfigError, match="TOKENLOOM_DECOMPRESS_MIB: found '2 GiB', expected a whole number of MiB"
    ):
        opened(tmp_path, "txt:a.txt.zst:text")
    monkeypatch.setenv(compressed.MEMORY, "640")
    for suffix in (".zst", ".xz"):
        assert rows_of(opened(tmp_path, f"txt:a.txt{suffix}:text")) == ["a", "b"]


def test_a_file_with_nothing_in_it_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(SourceError, match="has no rows: its 1 files are empty"):
        opened(tmp_path, "txt:*.txt.gz:text")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"row"))
    source = opened(tmp_path, "txt:*.txt.gz:text")
    assert [source.row_count(shard) for shard in range(2)] == [0, 1]


@pytest.mark.parametrize("line", [b"\n", b"\0"], ids=["of lines", "of one line"])
@pytest.mark.parametrize("packer", ["gzip", "zstd"])
def test_bombs_are_refused_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packer: str, line: bytes
) -> None:
    monkeypatch.setattr(compressed, "FREE_BYTES", 8 << 20)
    suffix, pack = PACKERS[packer]
    size = 32 << 20
    bomb = pack(line * size)
    assert len(bomb) * 500 < size
    (tmp_path / f"a.txt{suffix}").write_bytes(bomb)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        SourceError, match=rf"a\.txt{suffix}'.*(more than 250 times as many|more than the)"
    ):
        for _ in opened(tmp_path, f"txt:a.txt{suffix}:text").read(0, 0):
            pass
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 192 << 10, "KiB"
    if line == b"\0":
        with pytest.raises(
            SourceError, match=r"line 1 has more than the 1 MiB that max_row_mib allows"
        ):
            rows_of(opened(tmp_path, f"txt:a.txt{suffix}:text", most_bytes=1 << 20))


def test_how_much_of_a_file_its_first_lines_take(tmp_path: Path) -> None:
    rows = [f"{i * 7919 % 100_003} {i}" * 9 for i in range(40_000)]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    source = opened(tmp_path, "txt:a.txt.gz:text")
    assert isinstance(source, lines.LinesSource)
    size = source.shards[0].size
    head, most = source.bytes_of(0, 0, 100), source.bytes_of(0, 0, 30_000)
    assert 0 < head < most <= size
    assert most > size // 2


def test_endings(tmp_path: Path) -> None:
    for name in ("a.b|.jsonl.gz", "a|.txt.zst", "a|.parquet", "a|", "a|.gz"):
        assert ending_of(name.replace("|", "")) == name.partition("|")[2]
    assert {ending for ending in SOURCES.endings if codec_of(f"a{ending}")} == {
        f"{plain}{packed}" for plain in (".jsonl", ".ndjson", ".json", ".txt") for packed in CODECS
    }
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"abc"))
    with LocalFile(tmp_path / "a.gz", "'a.gz'") as file:
        assert compressed.Decompressed(file, "gzip").read(9) == b"abc"
