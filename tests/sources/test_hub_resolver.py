"""Which files a split on the Hub has: those that `datasets` reads, at one commit; else what is said instead."""

from __future__ import annotations

import re

import pytest
from support.catalog import hub_resolver, spec_of
from support.hub import CONVERSION, Repo, StandInHub, blob_id, card, files, hash_of
from tokenloom_server.errors import SourceError
from tokenloom_server.sources.hub import HubLocation


def paths(spec: str) -> list[str]:
    """The files of a split below the repository's root."""
    return [
        shard.path.partition("@")[2].partition("/")[2]
        for shard in hub_resolver().shards(spec_of(spec))
    ]


def message(spec: str) -> str:
    with pytest.raises(SourceError) as caught:
        paths(spec)
    return str(caught.value)


@pytest.mark.parametrize(
    ("location", "parts"),
    [
        ("org/name:train", ("org/name", None, None, "train")),
        ("name:train", ("name", None, None, "train")),
        ("name@v1.0:train", ("name", None, "v1.0", "train")),
        ("org/name/20231101.en:train", ("org/name", "20231101.en", None, "train")),
        ("org/name/a b@refs/pr/3:partial-train", ("org/name", "a b", "refs/pr/3", "partial-train")),
        ("org/n.a-m_e@feature/x:my_split.2", ("org/n.a-m_e", None, "feature/x", "my_split.2")),
    ],
)
def test_a_spec_names_repository_config_revision_and_split(
    location: str, parts: tuple[str, str | None, str | None, str]
) -> None:
    spec, hub = spec_of(f"hf:{location}:text"), HubLocation.parse(location)
    assert (hub.repo, hub.config, hub.revision, hub.split) == parts
    assert (str(spec), spec.column) == (f"hf:{location}:text", "text")


def test_a_file_is_named_by_its_commit_and_known_apart_by_its_content(hub: StandInHub) -> None:
    commit = hub.repo("org/name").commit(
        {"train/a.parquet": b"large", "README.md": b"", "train/b.jsonl": b"{}"}
    )

    resolved = hub_resolver().shards(spec_of("hf:org/name:train:text"))

    assert [(one.path, one.size, one.fingerprint) for one in resolved] == [
        (f"hf://datasets/org/name@{commit}/train/a.parquet", 5, f"sha256:{hash_of(b'large')}")
    ]
    hub.repo("org/lines").commit({"train.txt": b"small"})
    (only,) = hub_resolver().shards(spec_of("hf:org/lines:train:text"))
    assert only.fingerprint == f"blob:{blob_id(b'small')}"


def test_a_long_listing_is_followed_from_page_to_page(hub: StandInHub) -> None:
    hub.page = 3
    names = [f"data/train-{i:05}-of-00010.parquet" for i in range(10)]
    hub.repo("org/name").commit(files(*names))
    assert paths("hf:org/name:train:text") == names
    assert len(hub.asked("/tree/")) == 4


def test_the_next_page_is_asked_of_the_hub_whatever_host_its_answer_names(hub: StandInHub) -> None:
    hub.repo("org/name").commit(files("train.parquet"))
    elsewhere = f'<{hub.storage_url}/tree?recursive=True&cursor=0>; rel="next"'
    hub.fail("/tree/", status=200, headers={"Link": elsewhere}, body=b"[]")
    assert paths("hf:org/name:train:text") == ["train.parquet"]
    assert len(hub.asked("/tree/")) == 2
    assert hub.asked("", "storage") == []


def test_sources_of_one_repository_have_one_commit_and_list_it_once(hub: StandInHub) -> None:
    names = [f"c{i}" for i in range(50)]
    configs = [{"config_name": name, "data_files": f"{name}/*.parquet"} for name in names]
    repo = hub.repo("org/name")
    commit = repo.commit(
        {"README.md": card(*configs)} | files(*(f"{name}/0.parquet" for name in names))
    )
    resolver = hub_resolver()
    for name in names:
        (shard,) = resolver.shards(spec_of(f"hf:org/name/{name}:train:text"))
        assert shard.path.endswith(f"@{commit}/{name}/0.parquet")
        repo.commit({})
    assert len(hub.asked("/tree/")) == 1
    assert len(hub.asked(r"api/datasets/org/name\?")) == 1
    assert len(hub.asked("README")) == 2  # which leads to a copy


def test_a_repository_goes_by_its_present_name_whatever_the_spec_calls_it(hub: StandInHub) -> None:
    hub.repo("rajpurkar/squad", old_names=["squad"]).commit(files("train/a.parquet"))
    (only,) = hub_resolver().shards(spec_of("hf:squad:train:text"))
    assert only.path.startswith("hf://datasets/rajpurkar/squad@")


# --- the Hub's conversion -------------------------------------------------------------------------------


def with_conversion(hub: StandInHub, own: dict[str, bytes], *converted: str) -> Repo:
    repo = hub.repo("org/name")
    repo.commit(own)
    repo.commit(files(*converted), CONVERSION)
    return repo


def test_what_no_scheme_reads_is_named_with_the_spec_of_the_hubs_conversion(
    hub: StandInHub,
) -> None:
    with_conversion(
        hub,
        files("train.csv", "train_2.csv"),
        "default/train/0001.parquet",
        "default/train/0000.parquet",
    )
    error = message("hf:org/name:train:text")
    assert (
        "2 files for the split 'train' that no scheme reads (as 'train.csv'; to `datasets` they are csv)"
        in error
    )
    assert error.endswith(
        "maybe at an earlier commit: 'hf:org/name@refs/convert/parquet:train:text'"
    )
    assert paths(f"hf:org/name@{CONVERSION}:train:text") == [
        "default/train/0000.parquet",
        "default/train/0001.parquet",
    ]
    # And a loading script, which is never run, and whose configs only the conversion knows.
    hub.repos["org/name"].commit({"name.py": b"raise SystemExit"})
    hub.repos["org/name"].commit(
        files("en/train/0000.parquet", "de/train/0000.parquet"), CONVERSION
    )
    error = message("hf:org/name/de:train:text")
    assert "scripts are no longer supported, but found name.py" in error
    assert error.endswith("'hf:org/name/de@refs/convert/parquet:train:text'")
    assert paths(f"hf:org/name/de@{CONVERSION}:train:text") == ["de/train/0000.parquet"]
    assert "its configs: 'de', 'en'" in message(f"hf:org/name/fr@{CONVERSION}:train:text")


def test_what_nobody_converted_is_named_with_what_to_do(hub: StandInHub) -> None:
    with_conversion(hub, files("train/a.png", "train/b.png"), "default/partial-train/0000.parquet")
    error = message("hf:org/name:train:text")
    assert "(as 'train/a.png'; to `datasets` they are imagefolder)" in error
    assert "write it as Parquet, with load_dataset(…).to_parquet(…)" in error
    assert "converted in part only" in message(f"hf:org/name@{CONVERSION}:train:text")
    assert paths(f"hf:org/name@{CONVERSION}:partial-train:text") == [
        "default/partial-train/0000.parquet"
    ]


@pytest.mark.parametrize(
    ("name", "option"),
    [("a.json", "field: data"), ("a.txt", "sample_by: paragraph"), ("a.txt", "encoding: latin-1")],
)
def test_a_card_that_makes_other_rows_of_the_files_is_named(
    hub: StandInHub, name: str, option: str
) -> None:
    key, value = option.split(": ")
    header = f"---\nconfigs: [{{config_name: a, data_files: {name}, {option}}}]\n---\n"
    hub.repo("org/name").commit(files(name) | {"README.md": header.encode()})
    assert f"that no scheme reads (with {key}: {value!r} in its card;" in message(
        "hf:org/name:train:text"
    )


# --- what is not there ----------------------------------------------------------------------------------


def test_an_unknown_repository_config_split_or_revision_is_named_with_what_there_is(
    hub: StandInHub,
) -> None:
    repo = hub.repo("org/name")
    repo.commit(
        files("en/a.parquet", "de/a.parquet")
        | {
            "README.md": card(
                {"config_name": "en", "data_files": "en/*"},
                {"config_name": "de", "data_files": "de/*"},
            )
        }
    )
    repo.commit(files("train/a.parquet"), ref="next")
    repo.refs["refs/tags/v1.0"] = repo.refs["next"]

    error = message("hf:org/nmae:train:text")
    assert error.startswith(
        "source 'hf:org/nmae:train:text': the dataset 'org/nmae' is not on http://127.0.0.1:"
    )
    assert error.endswith("no token was sent: HF_TOKEN is not set; datasets of 'org': 'org/name'")
    assert message("hf:org/name@v2:train:text").endswith(
        "has no such revision 'v2'; branches and tags: 'main', 'next', 'v1.0'"
    )
    assert "has no default config; name one of its configs: 'en', 'de'" in message(
        "hf:org/name:train:text"
    )
    assert "has no config 'fr'; its configs: 'en', 'de'" in message("hf:org/name/fr:train:text")
    assert "has no split 'test' in its config 'en'; its splits: 'train'" in message(
        "hf:org/name/en:test:text"
    )
    assert "has no split 'dev'; its splits: 'train'" in message("hf:org/name@next:dev:text")


def test_an_empty_repository_has_no_splits(hub: StandInHub) -> None:
    hub.repo("org/name").commit({"README.md": b"# nothing yet"})
    error = message("hf:org/name:train:text")
    assert (
        "`datasets` finds no splits in it: The directory at its root doesn't contain any data files"
        in error
    )
    hub.repo("org/packed").commit({"train.zip": b"PK"})
    error = message("hf:org/packed:train:text")
    assert "its files lie in zip archives (BadZipFile). Files may be named by a pattern" in error


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ("configs: 3", "Expected configs to be a list, but got '3'"),
        ("configs: [{data_files: x}]", "must include `config_name` field"),
        (
            "configs: [{config_name: a, data_files: 3}]",
            "Expected data_files in YAML to be either a string or a list",
        ),
        (
            "configs: [{config_name: a, data_files: [{split: train}]}]",
            "with two keys: 'split' and 'path', but got [{'split': 'train'}]",
        ),
        (
            "configs: [{config_name: a, data_files: [{split: t, path: x}, {split: t, path: y}]}]",
            "Some splits are duplicated in data_files",
        ),
        (
            "configs: [{config_name: a, data_files: 'https://example.org/x.parquet'}]",
            "names files elsewhere",
        ),
        (
            "configs: [{config_name: a, data_files: [{split: t, path: [b, /etc/*.txt]}]}]",
            "elsewhere: '/etc/*.txt'",
        ),
        (
            "configs: [{config_name: a, data_dir: a/../../b}]",
            "README.md names files elsewhere: 'a/../../b'",
        ),
        (
            "configs: [{config_name: a, data_files: 'data/**.parquet'}]",
            "Invalid pattern: '**' can only be an entire path component",
        ),
        (
            "configs: [{config_name: a, data_files: [train.parquet, b.parquet]}]",
            "Unable to find 'b.parquet' (FileNotFoundError)",
        ),
        ("configs: [", "README.md has no YAML that is read"),
    ],
)
def test_a_card_that_says_something_else_is_named(hub: StandInHub, header: str, fault: str) -> None:
    hub.repo("org/name").commit(
        files("train.parquet") | {"README.md": f"---\n{header}\n---\n".encode()}
    )
    assert fault in message("hf:org/name:train:text")


@pytest.mark.parametrize(
    ("answer", "path"),
    [
        (b"[]", "org/name?"),
        (b'{"id": "org/name"}', "org/name?"),
        (b'{"id": "../../etc", "sha": "' + b"0" * 40 + b'"}', "org/name?"),
        (b'{"id": "org/name", "sha": "../main"}', "org/name?"),
        (b'{"error": "?"}', "/tree/"),
        (b"[3]", "/tree/"),
        (b'[{"type": "file", "path": "a.parquet"}]', "/tree/"),
        (b'[{"type": "file", "path": "../../a.parquet", "size": 1, "oid": "0"}]', "/tree/"),
    ],
)
def test_an_answer_that_no_hub_gives_is_refused(hub: StandInHub, answer: bytes, path: str) -> None:
    hub.repo("org/name").commit(files("train.parquet"))
    hub.fail(re.escape(path), status=200, body=answer, times=1e9)
    assert "cannot be looked up: http://127.0.0.1:" in message("hf:org/name:train:text")


# --- whom it lets in ------------------------------------------------------------------------------------


def test_private_and_gated_datasets_say_so_and_open_with_a_token(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.tokens.add("hf_good")
    hub.repo("org/private", private=True).commit(files("train.parquet"))
    hub.repo("org/gated", gated=True).commit(files("train.parquet"))

    assert "or is private, and no token was sent: HF_TOKEN is not set" in message(
        "hf:org/private:train:text"
    )
    error = message("hf:org/gated:train:text")
    assert (
        "is gated, and no token was sent: HF_TOKEN is not set; accept its terms on http://127.0.0.1:"
        in error
    )
    monkeypatch.setenv("HF_TOKEN", "hf_stale")
    error = message("hf:org/gated:train:text")
    assert "the Hub does not know the token in HF_TOKEN" in error
    assert "hf_stale" not in error
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert (
        paths("hf:org/private:train:text") == paths("hf:org/gated:train:text") == ["train.parquet"]
    )


def test_an_answer_that_repeats_the_token_is_not_repeated(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.tokens.add("hf_secret")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.repo("org/name").commit({})
    hub.fail("org/name", status=418, headers={"X-Error-Message": "no tea for hf_secret"})
    caplog.set_level("DEBUG")
    assert "answered 418 (no tea for …)" in message("hf:org/name:train:text")
    assert "hf_secret" not in caplog.text


# --- a Hub that is busy ---------------------------------------------------------------------------------


def test_a_busy_hub_is_asked_again_when_it_says_or_soon(
    hub: StandInHub, slept: list[float]
) -> None:
    hub.repo("org/name").commit(files("train.parquet"))
    hub.fail(r"org/name\?", status=429, headers={"Retry-After": "7"})
    hub.fail("/tree/", status=503)
    hub.fail(r"/tree/\w+\?", cut=10)
    hub.fail(r"/tree/\w+\?", status=429, headers={"RateLimit": '"api";r=0;t=55'})
    assert paths("hf:org/name:train:text") == ["train.parquet"]
    assert slept == [7, 0.5, 1, 55]


def test_a_hub_that_stays_busy_is_given_up(hub: StandInHub, slept: list[float]) -> None:
    hub.repo("org/name").commit(files("train.parquet"))
    hub.fail("org/name", status=502, times=1000)
    assert "cannot be looked up now: http://127.0.0.1 answered 502" in message(
        "hf:org/name:train:text"
    )
    assert slept == [0.5, 1, 2, 4, 8]
    assert len(hub.requests) == 6


def test_a_hub_that_asks_for_too_long_a_pause_is_given_up_at_once(
    hub: StandInHub, slept: list[float]
) -> None:
    hub.repo("org/name").commit(files("train.parquet"))
    hub.fail("org/name", status=429, headers={"Retry-After": "3600"}, times=1000)
    assert "answered 429 and asks to wait for 3600 s" in message("hf:org/name:train:text")
    assert slept == []


def test_an_address_where_nobody_is_says_so(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be looked up now: http://127.0.0.1: " in message("hf:org/name:train:text")
    assert len(slept) == 5


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between tries, which are not made."""
    from tokenloom_server.storage import hub_client

    pauses: list[float] = []
    monkeypatch.setattr(hub_client.time, "sleep", pauses.append)
    return pauses
