"""A server is replaced by one of the next release under a trainer that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.goldens import MIXTURES, write_mixtures
from support.server_process import ServerProcess
from tokenloom import LaunchOptions, LocalDataset, ProtocolError, RemoteDataset
from tokenloom_proto.versions import own_release

pytestmark = pytest.mark.slow


def installed(folder: Path, release: str) -> dict[str, str]:
    """The environment in which this tree is a release of that number."""
    described = folder / release / f"tokenloom-{release}.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tokenloom\nVersion: {release}\n"
    )
    return {"PYTHONPATH": str(described.parent)}


def test_a_server_is_replaced_by_the_next_release_while_a_trainer_goes_on(tmp_path: Path) -> None:
    run, path = next(iter(MIXTURES)), write_mixtures(tmp_path)[0]
    with LocalDataset(path, 2) as uninterrupted:
        whole = [uninterrupted.digest for _, _ in zip(range(3), uninterrupted, strict=False)]
    own = [int(number) for number in own_release().split(".")[:2]]
    releases = [f"{own[0]}.{own[1] + further}.0" for further in (1, 2)]
    server = ServerProcess(tmp_path / "server", path).start()
    try:
        with RemoteDataset(server.url(run), 2) as dataset:
            batches, digests = iter(dataset), []
            for release in (None, *releases):
                if release is not None:
                    server.terminate()
                    newer = installed(tmp_path, release)
                    replacing = ServerProcess(
                        tmp_path / "server", path, options=(), environment=newer
                    )
                    replacing.grpc, replacing.rest = server.grpc, server.rest
                    server = replacing.start()
                    assert server.get("/healthz")["version"] == release
                next(batches)
                digests.append(dataset.digest)
            # Its stream goes on, for the wire is the same; a launch would be two minor versions apart.
            assert digests == whole
            assert server.get(f"/v1/runs/{run}/stats")["generation"] == 1
        with pytest.raises(
            ProtocolError,
            match=rf"Tokenloom {own_release()}, and this server {releases[1]}: .* install",
        ):
            iter(
                RemoteDataset(
                    server.url(run), 2, resume="latest", launch=LaunchOptions(takeover=True)
                )
            )
    finally:
        server.kill()
