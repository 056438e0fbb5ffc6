"""Reading files on the Hub by ranges: what is asked of whom, what is held to what, and what the local cache spares."""

from __future__ import annotations

import pytest
from support.catalog import hub_resolver, spec_of
from support.hub import Repo, StandInHub
from tokenloom_server.errors import SourceChanged, SourceError
from tokenloom_server.storage.hub_client import HubBusy
from tokenloom_server.storage.hub_repository import HubFiles, HubPath
from tokenloom_server.storage.io_stats import given_up_soon

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def repo(hub: StandInHub) -> Repo:
    repo = hub.repo("org/name")
    repo.commit(
        {"train/a b%.parquet": CONTENT, "train/lines.txt": CONTENT[:999], "README.md": b"# hello"}
    )
    return repo


def url(repo: Repo, path: str = "train/a b%.parquet") -> str:
    return f"hf://datasets/{repo.name}@{repo.refs['main']}/{path}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf://datasets/org/name@main/a/b.parquet", ("org/name", "main", "a/b.parquet")),
        ("hf://datasets/org/name/a/b@c.parquet", ("org/name", None, "a/b@c.parquet")),
        ("hf://datasets/org/name@refs/pr/1/a.parquet", ("org/name", "refs/pr/1", "a.parquet")),
        ("hf://datasets/name@main/a.parquet", ("name", "main", "a.parquet")),
    ],
)
def test_a_url_is_taken_apart(text: str, parts: tuple[str, str | None, str]) -> None:
    found = HubPath.parse(text)
    assert (found.repo, found.revision, found.path) == parts


@pytest.mark.parametrize(
    "text", ["hf://datasets/org/name", "hf://spaces/org/name/a", "s3://datasets/org/name/a"]
)
def test_a_url_that_names_nothing_in_a_dataset_is_refused(text: str) -> None:
    with pytest.raises(SourceError, match="names nothing in a dataset, expected hf://datasets/"):
        HubPath.parse(text)


def test_opening_costs_one_request_and_each_range_another(hub: StandInHub, repo: Repo) -> None:
    handle = HubFiles().open(url(repo))
    assert (handle.details["size"], len(hub.requests)) == (len(CONTENT), 1)

    assert handle._fetch_range(0, 10) == CONTENT[:10]
    assert handle._fetch_range(5000, 6000) == CONTENT[5000:6000]
    assert handle._fetch_range(len(CONTENT) - 4, len(CONTENT)) == CONTENT[-4:]

    assert [request.place for request in hub.requests] == ["hub", "storage", "storage", "storage"]
    assert hub.bytes_sent() == 10 + 1000 + 4


def test_the_token_goes_to_the_hub_and_never_to_its_storage(
    hub: StandInHub, repo: Repo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.tokens.add("hf_secret")
    repo.private = True
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    caplog.set_level("DEBUG")
    handle = HubFiles().open(url(repo))
    handle._fetch_range(0, 10)
    HubFiles().open(url(repo, "train/lines.txt"))._fetch_range(0, 10)

    sent = {place: [one.headers.get("authorization") for one in hub.requests if one.place == place]
            for place in ("hub", "storage")}  # fmt: skip
    assert set(sent["hub"]) == {"Bearer hf_secret"}
    assert set(sent["storage"]) == {None}
    assert "hf_secret" not in caplog.text
    assert hub.signature not in caplog.text


def test_a_signature_that_has_run_out_is_asked_for_anew(hub: StandInHub, repo: Repo) -> None:
    handle = HubFiles().open(url(repo))
    handle._fetch_range(0, 10)
    hub.signature = "secret-signature-1"
    assert handle._fetch_range(10, 20) == CONTENT[10:20]
    assert handle._fetch_range(20, 30) == CONTENT[20:30]
    assert [(one.place, one.status) for one in hub.requests[2:]] == [
        ("storage", 403), ("hub", 302), ("storage", 206), ("storage", 206),
    ]  # fmt: skip


def test_a_busy_storage_is_for_the_caller_to_ask_again(hub: StandInHub, repo: Repo) -> None:
    handle = HubFiles().open(url(repo))
    for status in (408, 429, 500, 502, 503, 504):
        hub.fail("/blobs/", status=status, headers={"Retry-After": "3"})
        with pytest.raises(HubBusy, match=f"answered {status} and asks to wait for 3 s") as caught:
            handle._fetch_range(0, 10)
        assert caught.value.headers == {"Retry-After": "3.0"}
    hub.fail("/blobs/", cut=700)
    with pytest.raises(HubBusy):
        handle._fetch_range(0, 1000)
    assert handle._fetch_range(0, 1000) == CONTENT[:1000]


def test_a_command_does_not_wait_as_long_as_the_hub_asks(hub: StandInHub, repo: Repo) -> None:
    hub.fail("/api/", status=429, headers={"Retry-After": "60"})
    with given_up_soon(), pytest.raises(HubBusy, match="asks to wait for 60 s"):
        HubFiles().glob(f"hf://datasets/{repo.name}/*.txt")


def test_a_hub_or_storage_that_says_nothing_is_given_up(
    hub: StandInHub, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenloom_server.storage import hub_client

    handle = HubFiles().open(url(repo))
    monkeypatch.setattr(hub_client, "SILENCE_S", 0.1)
    monkeypatch.setattr(hub_client, "TRIES", 1)
    hub.fail("/blobs/", delay_s=10)
    with pytest.raises(HubBusy, match=r"127\.0\.0\.1"):
        handle._fetch_range(0, 1000)
    hub.fail("/tree/", delay_s=10)
    with pytest.raises(HubBusy, match=r"127\.0\.0\.1"):
        HubFiles().ls(f"hf://datasets/{repo.name}/train")


def test_a_huggingface_hub_without_what_is_used_of_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("huggingface_hub.errors.HTTPError")
    with pytest.raises(SourceError, match=r"need huggingface_hub 1\.33 .*'HTTPError'.*pip install"):
        HubFiles()


@pytest.mark.parametrize(
    ("headers", "error", "told"),
    [
        ({"Content-Range": "bytes 0-9/12"}, SourceChanged, "has 12 bytes, expected 16384"),
        (
            {"Content-Range": "bytes 1-10/16384"},
            HubBusy,
            "asked for bytes 0-9, the answer has 1-10",
        ),
        ({}, SourceError, "with 206 and no range"),
    ],
)
def test_an_answer_is_held_to_what_was_asked_for(
    hub: StandInHub, repo: Repo, headers: dict[str, str], error: type[Exception], told: str
) -> None:
    handle = HubFiles().open(url(repo))
    hub.fail("/blobs/", status=206, headers=headers)
    with pytest.raises(error, match=told):
        handle._fetch_range(0, 10)


def test_a_file_that_is_not_there_is_not_found(hub: StandInHub, repo: Repo) -> None:
    with pytest.raises(FileNotFoundError):
        HubFiles().open(url(repo, "train/none.parquet"))


def test_a_pattern_finds_files_at_the_commit_that_its_revision_is_at(
    hub: StandInHub, repo: Repo
) -> None:
    found = HubFiles().glob("hf://datasets/org/name/train/*.parquet")
    assert list(found) == [url(repo)]
    assert found[url(repo)]["size"] == len(CONTENT)
    assert HubFiles().info(url(repo)) == found[url(repo)]
    assert [info["name"] for info in HubFiles().ls("hf://datasets/org/name/train")] == [
        url(repo), url(repo, "train/lines.txt"),
    ]  # fmt: skip


# --- the local cache ------------------------------------------------------------------------------------


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def resolved(spec: str) -> list[str]:
    return [shard.path for shard in hub_resolver().shards(spec_of(spec))]


def test_a_file_in_the_cache_is_found_while_online_for_its_commit_alone(
    hub: StandInHub, repo: Repo
) -> None:
    import huggingface_hub

    huggingface_hub.hf_hub_download("org/name", "train/a b%.parquet", repo_type="dataset")
    assert HubFiles().cached(url(repo)) is not None
    repo.commit({"train/a b%.parquet": CONTENT})
    assert HubFiles().cached(url(repo)) is None


def test_what_the_cache_lacks_is_named_offline_with_the_way_to_get_it(
    hub: StandInHub, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch)
    with pytest.raises(
        SourceError, match=r"is not in the cache .* while online: hf download org/name"
    ):
        resolved("hf:org/name:train:text")
    with pytest.raises(SourceError, match=r"is not known at commit \w+ by the cache"):
        resolved(f"hf:org/name@{repo.refs['main']}:train:text")


def test_a_part_of_a_dataset_in_the_cache_is_not_taken_for_all(
    hub: StandInHub, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    huggingface_hub.snapshot_download("org/name", repo_type="dataset", allow_patterns="README.md")
    offline(monkeypatch)
    with pytest.raises(SourceError, match="1 of them are not in the local cache"):
        resolved("hf:org/name:train:text")
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE is set"):
        HubFiles().open(url(repo))
