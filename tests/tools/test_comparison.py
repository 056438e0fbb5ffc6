"""The search for the first sample that differs, held against asking at every index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenloom_server.errors import ConfigError, SnapshotInvalid
from tokenloom_server.reports.receipt import Range
from tokenloom_server.tools.verify.compare import compare
from tokenloom_server.tools.verify.digests import DigestPoint, DigestSource, RunIdentity, open_source
from tokenloom_server.tools.verify.text import document, explain

TOKENS = 8


@dataclass
class Told:
    """A side that tells what it is given: ``samples`` are what it had, as letters of their sources."""

    samples: str
    first: int = 0
    indices: tuple[int, ...] | None = None
    skips: tuple[Range, ...] | None = ()
    decides: dict[str, object] = field(default_factory=lambda: {"seed": 7})
    revisions: tuple[tuple[int, str], ...] | None = ()
    asked: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.indices[-1] if self.indices is not None else len(self.samples)

    @property
    def identity(self) -> RunIdentity:
        return RunIdentity(name="told", run="run", run_uid="uid", decides=self.decides)

    def at(self, index: int) -> DigestPoint:
        assert self.first <= index <= self.end
        assert self.indices is None or index in self.indices
        self.asked.append(index)
        known = self.samples[:index]
        skips = None if self.skips is None else tuple(skip for skip in self.skips if skip.first < index)
        return DigestPoint(
            index=index,
            digest=known,
            tokens=TOKENS * index,
            samples={letter: known.count(letter) for letter in "abc"},
            skipped=sum(skip.end - skip.first for skip in skips or ()),
            skips=skips,
        )


def sides(a: Told, b: Told) -> tuple[DigestSource, DigestSource]:
    return a, b  # type: ignore[return-value]


def equal_samples(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.text("abc", min_size=1, max_size=300), st.text("abc", min_size=1, max_size=40), st.integers(0, 300))
def test_the_first_that_differs_is_found_wherever_it_is(common: str, rest: str, at: int) -> None:
    a, b = Told(common), Told(common[:at] + rest)
    found = compare(*sides(a, b))
    expected = equal_samples(a.samples, b.samples)
    assert (found.same_samples, found.same_tokens) == (expected, TOKENS * expected)
    if expected == min(found.ends):
        assert (found.outcome, found.status, found.differ_before) == ("same", 0, None)
        return
    assert (found.outcome, found.status, found.differ_before) == ("differ", 1, expected + 1)
    assert found.sources == (a.samples[expected], b.samples[expected])
    assert len(set(a.asked)) <= 2 * len(common).bit_length() + 5, "a search asks for few indices"


@given(
    st.text("ab", min_size=1, max_size=60),
    st.text("ab", min_size=1, max_size=60),
    st.lists(st.integers(0, 60), min_size=1, max_size=2),
    st.one_of(st.none(), st.lists(st.integers(0, 60), min_size=1, max_size=2)),
)
def test_what_files_tell_is_never_more_than_they_know(
    a: str, b: str, some: Sequence[int], others: Sequence[int] | None
) -> None:
    known = tuple(sorted({min(index, len(a)) for index in some}))
    theirs = None if others is None else tuple(sorted({min(index, len(b)) for index in others}))
    found = compare(*sides(Told(a, indices=known, skips=None), Told(b, indices=theirs, skips=None)))
    equal = equal_samples(a, b)
    assert found.same_samples <= equal
    both = {index for index in known if index <= len(b) and (theirs is None or index in theirs)}
    if found.outcome == "differ":
        assert found.differ_before is not None
        assert found.differ_before > equal
        assert found.differ_before in both
    elif found.outcome == "same":
        assert found.same_samples == min(found.ends) > 0
    else:
        assert found.same_samples < min(found.ends) or min(found.ends) == 0
    assert found.same_samples == max({index for index in both if index <= equal} | {0})


def test_nothing_is_proven_of_what_neither_ledger_holds() -> None:
    late, early = Told("abcabc", first=4), Told("abc")
    assert compare(*sides(late, early)).outcome == "unknown"
    other = Told("bbcabcab")
    found = compare(*sides(late, other))
    assert (found.outcome, found.same_samples, found.differ_before) == ("differ", 0, 4)
    assert "the first sample that differs is one of 0 to 3" in "\n".join(explain(found, *sides(late, other)))
    beginning = Told("")
    assert compare(*sides(beginning, early)).status == 2


def test_what_one_run_skipped_and_the_other_had_is_a_difference() -> None:
    skip = Range(first=3, end=5)
    a, b = Told("abcabcab", skips=(skip,)), Told("abcabcab")
    found = compare(*sides(a, b))
    assert (found.outcome, found.same_samples) == ("differ", 3)
    elsewhere = Told("abcabcab", skips=(Range(first=4, end=6),))
    assert compare(*sides(a, elsewhere)).outcome == "differ"
    assert compare(*sides(a, Told("abcabcab", skips=(skip,)))).outcome == "same"
    assert "of which 2 samples were skipped" in explain(found, *sides(a, b))[0]


def test_what_decides_about_the_order_is_named_where_it_differs() -> None:
    a, b = Told("aab", decides={"seed": 7, "order_version": 1}), Told("abb", decides={"seed": 8, "config_digest": "x"})
    found = compare(*sides(a, b))
    assert found.differences == {"seed": (7, 8)}
    lines = explain(found, *sides(a, b))
    assert "seed: A has 7, B has 8" in lines
    assert lines[-3:] == [
        "the same through sample index 1 (8 tokens); sample 1 is the first that differs",
        "sample 1 of A is of a",
        "sample 1 of B is of b",
    ]
    assert document(found, *sides(a, b))["first_differing_sample"] == 1


def test_revisions_are_named_where_they_differ_before_the_end_of_the_shorter() -> None:
    early, late = (2, "aa" * 32), (50, "bb" * 32)
    a, b = Told("abcabc", revisions=(early, late)), Told("abcabc" * 20, revisions=(early,))
    assert compare(*sides(a, b)).differences == {}
    b.revisions = ()
    found = compare(*sides(a, b))
    assert found.differences == {"revisions": (["aaaaaaaaaaaa from sample 2"], [])}
    assert "revisions: A has aaaaaaaaaaaa from sample 2, B has none" in explain(found, *sides(a, b))
    b.revisions = None
    assert compare(*sides(a, b)).differences == {}


class FakeRemote:
    """A server of one run, of which no receipt is asked here."""

    def runs(self) -> list[str]:
        return ["the-run"]


@pytest.mark.parametrize(
    ("named", "run", "fault"),
    [
        ("a.json", "x", "is a file"),
        ("grpc://host/run", None, "expected the REST address"),
        ("http://host:1/one", "two", "names the run 'one', and the option 'two'"),
    ],
)
def test_a_side_that_cannot_be_meant_is_refused(named: str, run: str | None, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        open_source(named, run, lambda _: FakeRemote())  # type: ignore[arg-type, return-value]


def test_a_file_without_a_snapshot_that_has_a_digest_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"epoch": 3}')
    (tmp_path / "older.json").write_text('{"sample_index": 3}')
    for name, fault in (("model.json", "holds no state of data"), ("older.json", "only snapshots of Tokenloom")):
        with pytest.raises(SnapshotInvalid, match=f"{name}: .*{fault}"):
            open_source(str(tmp_path / name), None, lambda _: FakeRemote())  # type: ignore[arg-type, return-value]
