"""``tokenloom validate --full``: every byte of a mixture's files compared with recorded digests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from support.server_process import CommandLine


def mixture(folder: Path) -> Path:
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(f"a line of {name}\n" * 30_000)
    document = {
        "run": "full", "tokenizer": "bytes", "sequence_length": 8,
        "mixture": {"policy": "weighted", "children": [{"source": "txt:*.txt:text"}]},
    }  # fmt: skip
    path = folder / "mixture.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def change_a_byte(path: Path) -> None:
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_byte_that_was_changed_anywhere_is_found_by_its_file(
    tmp_path: Path, tokenloom: CommandLine
) -> None:
    path = mixture(tmp_path)
    done = tokenloom("validate", path, "--full")
    assert done.status == 2
    assert "digests.json: is missing" in done.output
    assert "validate --full --record writes it from the files as they are" in done.output
    assert tokenloom("validate", path, "--full", "--record").status == 0
    assert set(json.loads((tmp_path / "digests.json").read_text())) == {"a.txt", "b.txt"}
    done = tokenloom("validate", path, "--full")
    assert done.status == 0
    assert "0 tokens" not in done.output
    change_a_byte(tmp_path / "b.txt")
    (tmp_path / "c.txt").write_text("new\n")
    done = tokenloom("validate", path, "--full")
    assert done.status == 1
    assert "changed: 'b.txt': found xxh3:" in done.output
    assert "changed: 'c.txt': found xxh3:" in done.output
    assert ", recorded nothing" in done.output
    assert "'a.txt'" not in done.output
    (tmp_path / "a.txt").unlink()
    done = tokenloom("validate", path, "--full")
    assert done.status == 1
    assert "changed: 'a.txt': found nothing, recorded xxh3:" in done.output
    done = tokenloom("validate", path, "--record")
    assert (done.status, "give both" in done.output) == (2, True)


@pytest.mark.parametrize("text", ['{"a.txt": "xxh3:', "[1]", "\xff"])
def test_digests_that_are_none_are_named(tmp_path: Path, tokenloom: CommandLine, text: str) -> None:
    path = mixture(tmp_path)
    (tmp_path / "digests.json").write_text(text, encoding="latin-1")
    done = tokenloom("validate", path, "--full")
    assert done.status == 2
    assert "digests.json: " in done.output
    assert "expected what validate --full --record writes there" in done.output
    assert "Traceback" not in done.output


def test_what_is_prepared_has_its_digests(tmp_path: Path, tokenloom: CommandLine) -> None:
    path = mixture(tmp_path)
    assert tokenloom("prepare", path, "--out", tmp_path / "out").status == 0
    assert tokenloom("validate", tmp_path / "out/mixture.yaml", "--full").status == 0
    (shard, *_) = sorted((tmp_path / "out").glob("sources/*/*.arrow"))
    change_a_byte(shard)
    done = tokenloom("validate", tmp_path / "out/mixture.yaml", "--full")
    assert done.status == 1
    assert f"changed: '{shard.relative_to(tmp_path / 'out')}': found" in done.output
