"""An upgrade from the last release: what its wheel wrote goes on with the code of today, and with equal digests.

The wheel is kept as it was built from the tag (now ``before-house``; CONTRIBUTING says how a release takes its place).
Its ledger and its trainers' states are read, or migrated; an older client is either served or refused with a clear
word; and a server is replaced by one of the next release under a trainer that goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.goldens import FOLDER, MIXTURES, write_mixtures
from support.server_process import ServerProcess
from tokenloom import LocalDataset, ProtocolError, RemoteDataset
from tokenloom.datasets.training import TrainingDataset
from tokenloom_proto.protocol import VERSION
from tokenloom_proto.release import own_release

(WHEEL,) = (FOLDER / "last_release").glob("*.whl")
#: What the server says to a client of the wheel: None where it serves it, else what the refusal's text has in it.
OLD_CLIENT_IS_REFUSED_WITH: str | None = (
    f"this client speaks version 1 of Tokenloom's wire protocol, and this server version {VERSION}: install the same "
    "release of tokenloom on both sides"
)
#: Fields of a mixture file by the names that the wheel reads.
OLD_FIELDS = {"last_micro_step": "last_step", "window_micro_steps": "window_steps"}
#: Two launches of so many steps; the second begins with a state that is not the run's first.
STEPS = (4, 2)

#: A trainer: {run: digest by sample index}, and the state one step before its end.
_TRAINER = """
import json, sys
from tokenloom import RemoteDataset
asked = json.loads(sys.argv[1])
found = {}
for run, url in asked["urls"].items():
    digests = {}
    for resume, steps in zip(asked["resume"], asked["steps"]):
        with RemoteDataset(url, asked["batch_size"][run], resume=resume, takeover=True) as dataset:
            batches = iter(dataset)
            for step in range(steps):
                state = dataset.state_dict()
                if next(batches, None) is not None:
                    digests[dataset.sample_index] = dataset.digest
    found[run] = {"digests": digests, "state": state}
import tokenloom
print(json.dumps([tokenloom.__file__, found]))
"""


def batch_size(run: str) -> int | None:
    return None if "batching" in MIXTURES[run] else 2


def read(dataset: TrainingDataset, steps: int = 10**6) -> dict[int, str]:
    """The digests of its next steps, by sample index."""
    digests: dict[int, str] = {}
    with dataset:
        for _, _batch in zip(range(steps), dataset, strict=False):
            digests[dataset.sample_index] = dataset.digest
    return digests


def read_to_the_end(url: str, run: str) -> dict[int, str]:
    """A launch more wherever one ends, as at a phase with another sequence length."""
    found: dict[int, str] = {}
    while more := read(RemoteDataset(url, batch_size(run), resume="latest" if found else None, takeover=True)):
        found |= more
    return found


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which Python has the wheel's packages in place of the tree's."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(WHEEL) as archive:
        archive.extractall(folder)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_mixtures(tmp_path_factory.mktemp("mixtures"))


@pytest.fixture(scope="module")
def version_1(mixtures: list[Path]) -> list[Path]:
    """The same for runs that begin today under the order version of then."""
    paths = [path.with_stem(f"{path.stem}-under-1") for path in mixtures]
    for path, path_under_1 in zip(mixtures, paths, strict=True):
        path_under_1.write_text(path.read_text(encoding="utf-8") + "order_version: 1\n", encoding="utf-8")
    return paths


@pytest.fixture(scope="module")
def old_mixtures(mixtures: list[Path]) -> list[Path]:
    """The same, beside them, with the names that the wheel reads."""
    paths = [path.with_stem(f"{path.stem}-of-then") for path in mixtures]
    for path, old_path in zip(mixtures, paths, strict=True):
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        renamed = {OLD_FIELDS.get(field, field): value for field, value in document.items()}
        old_path.write_text(yaml.safe_dump(renamed), encoding="utf-8")
    return paths


def train_with_the_wheel(
    server: ServerProcess,
    environment: dict[str, str],
    *,
    resume: tuple[str | None, ...],
    steps: tuple[int, ...],
    runs: Sequence[str] = (*MIXTURES,),
) -> subprocess.CompletedProcess[str]:
    asked = {
        "urls": {run: server.url(run) for run in runs},
        "batch_size": {run: batch_size(run) for run in MIXTURES},
        "resume": resume,
        "steps": steps,
    }
    return subprocess.run(
        [sys.executable, "-c", _TRAINER, json.dumps(asked)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=400,
    )


def said(done: subprocess.CompletedProcess[str], environment: dict[str, str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    path, found = json.loads(done.stdout)
    assert path.startswith(environment["PYTHONPATH"]), "it was the wheel's client"
    return dict(found)


@pytest.fixture(scope="module")
def today(version_1: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of today's code, with a ledger of its own."""
    server = ServerProcess(tmp_path_factory.mktemp("today"), *version_1).start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def whole(today: ServerProcess) -> dict[str, dict[int, str]]:
    """The digests of every run, uninterrupted."""
    return {run: read_to_the_end(today.url(run), run) for run in MIXTURES}


@pytest.mark.parametrize("ledger", ["sqlite", "redis"])
def test_a_ledger_and_a_state_of_then_go_on_with_equal_digests(
    ledger: str,
    request: pytest.FixtureRequest,
    old: dict[str, str],
    mixtures: list[Path],
    old_mixtures: list[Path],
    version_1: list[Path],
    whole: dict[str, dict[int, str]],
    tmp_path: Path,
) -> None:
    url = request.getfixturevalue("redis_url") if ledger == "redis" else "sqlite:///ledger.db"
    runs = [*MIXTURES] if ledger == "sqlite" else [*MIXTURES][:1]  # one more shows what is Redis's own
    before = ServerProcess(tmp_path / "server", *old_mixtures, ledger=url, options=(), environment=old).start()
    try:
        written = said(train_with_the_wheel(before, old, resume=(None, "latest"), steps=STEPS, runs=runs), old)
        run = runs[0]
        with pytest.raises(ProtocolError, match=f"does not speak version {VERSION} .* install the same release"):
            read(RemoteDataset(before.url(run), batch_size(run), resume="latest", takeover=True))
    finally:
        before.terminate()
    after = ServerProcess(tmp_path / "server", *mixtures, ledger=url)
    assert ledger == "redis" or after.ledger_file.exists()
    after.start()
    try:
        for run in runs:
            digests = {int(index): digest for index, digest in written[run]["digests"].items()}
            assert digests.items() <= whole[run].items(), f"{run}: what the wheel trained on"
            end, state = max(digests), written[run]["state"]

            latest = read(RemoteDataset(after.url(run), batch_size(run), resume="latest", takeover=True), 2)
            assert latest == {i: d for i, d in whole[run].items() if i in latest}, f"{run}: the ledger"
            assert not latest or min(latest) > end

            for dataset in (
                RemoteDataset(after.url(run), batch_size(run), takeover=True),
                LocalDataset(version_1[[*MIXTURES].index(run)], batch_size(run)),
            ):
                dataset.load_state_dict(state)
                assert dataset.sample_index < end
                found = read(dataset)
                assert min(found) <= end
                assert found.items() <= whole[run].items(), f"{run}: the state, by a {type(dataset).__name__}"
    finally:
        after.terminate()


def test_a_client_of_then_is_served_or_refused_with_a_clear_word(
    old: dict[str, str], today: ServerProcess, whole: dict[str, dict[int, str]]
) -> None:
    done = train_with_the_wheel(today, old, resume=("fresh",), steps=(3,))

    if OLD_CLIENT_IS_REFUSED_WITH is None:
        for run, found in said(done, old).items():
            digests = {int(index): digest for index, digest in found["digests"].items()}
            assert len(digests) == 3
            assert digests.items() <= whole[run].items(), run
    else:
        assert done.returncode != 0
        assert OLD_CLIENT_IS_REFUSED_WITH in done.stderr


def test_a_server_is_replaced_by_the_next_release_while_a_trainer_goes_on(
    version_1: list[Path], whole: dict[str, dict[int, str]], tmp_path: Path
) -> None:
    run = next(iter(MIXTURES))
    own = [int(number) for number in own_release().split(".")[:2]]
    releases = [f"{own[0]}.{own[1] + further}.0" for further in (1, 2)]
    server = ServerProcess(tmp_path / "server", version_1[0]).start()
    try:
        with RemoteDataset(server.url(run), batch_size(run)) as dataset:
            batches, digests = iter(dataset), {}
            for release in (None, *releases):
                if release is not None:
                    server.terminate()
                    newer = installed(tmp_path, release)
                    replacing = ServerProcess(tmp_path / "server", version_1[0], options=(), environment=newer)
                    replacing.grpc, replacing.rest = server.grpc, server.rest
                    server = replacing.start()
                    assert server.get("/healthz")["version"] == release
                next(batches)
                digests[dataset.sample_index] = dataset.digest
            # Its stream goes on, for the wire is the same; a launch would be two minor versions apart.
            assert digests.items() <= whole[run].items()
            assert server.get(f"/v1/runs/{run}/stats")["generation"] == 1
        with pytest.raises(
            ProtocolError, match=rf"Tokenloom {own_release()}, and this server {releases[1]}: .* install"
        ):
            read(RemoteDataset(server.url(run), batch_size(run), resume="latest", takeover=True))
    finally:
        server.kill()


def installed(folder: Path, release: str) -> dict[str, str]:
    """The environment in which this tree is a release of that number."""
    described = folder / release / f"tokenloom-{release}.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tokenloom\nVersion: {release}\n")
    return {"PYTHONPATH": str(described.parent)}
