"""Digests of whole files, beside a mixture file: what ``tokenloom validate --full`` compares with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenloom_server.errors import ConfigError
from tokenloom_server.prepare.preparer import DIGESTS
from tokenloom_server.sources.files import in_threads
from tokenloom_server.sources.manifest import Manifest
from tokenloom_server.storage.drafts import checksum, write_whole
from tokenloom_server.storage.urls import is_remote


def compare(
    manifest: Manifest, base_dir: Path, on_file: Callable[[int, int, int], None], *, record: bool = False
) -> list[str]:
    """How the local files of a manifest differ from their recorded digests; ``record``: writes these anew instead.
    ``on_file`` is called with 1, 0 and a file's bytes, from any thread. Raises ``ConfigError`` without digests."""
    files = {shard.path: shard.size for each in manifest.sources for shard in each.shards if not is_remote(shard.path)}

    def digest(path: str) -> str:
        on_file(1, 0, files[path])
        return checksum(base_dir / path)

    path = base_dir / DIGESTS
    try:
        recorded = {} if record else json.loads(path.read_text(encoding="utf-8"))
        actual = dict(zip(files, in_threads(digest, files), strict=True))
        if record:
            write_whole(path, json.dumps(actual, indent=1) + "\n")
            recorded = actual
    except (OSError, ValueError) as error:
        remedy = "validate --full --record writes it from the files as they are"
        raise ConfigError(f"{path}: cannot be compared with ({error}); {remedy}") from None
    pairs = [(file, actual[file], recorded.get(file, "nothing")) for file in files]
    return [f"{file!r}: found {now}, recorded {then}" for file, now, then in pairs if now != then]
