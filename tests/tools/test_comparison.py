"""The search for the first sample that differs, held against asking at every index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenloom_proto.seal import seal
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_tools.verify import (
    DigestPoint,
    DigestSource,
    compare,
    document,
    explain,
    open_source,
)

TOKENS = 8


@dataclass
class Known:
    """Samples that a run had, as letters of their sources, and what is known of them."""

    samples: str
    first: int = 0
    indices: tuple[int, ...] | None = None
    decides: dict[str, object] = field(default_factory=lambda: {"seed": 7})
    revisions: tuple[tuple[int, str], ...] | None = ()
    asked: list[int] = field(default_factory=list)

    @property
    def source(self) -> DigestSource:
        return DigestSource(
            name="known",
            run="run",
            run_uid="uid",
            decides=self.decides,
            first=self.first,
            end=self.indices[-1] if self.indices is not None else len(self.samples),
            indices=self.indices,
            revisions=self.revisions,
            point_at=self.point_at,
        )

    def point_at(self, index: int) -> DigestPoint:
        assert self.first <= index <= len(self.samples)
        assert self.indices is None or index in self.indices
        self.asked.append(index)
        known = self.samples[:index]
        return DigestPoint(
            index=index,
            digest=known,
            tokens=TOKENS * index,
            samples={letter: known.count(letter) for letter in "abc"},
        )


def both(a: Known, b: Known) -> tuple[DigestSource, DigestSource]:
    return a.source, b.source


def equal_samples(a: str, b: str) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(
    st.text("abc", min_size=1, max_size=300),
    st.text("abc", min_size=1, max_size=40),
    st.integers(0, 300),
)
def test_the_first_that_differs_is_found_wherever_it_is(common: str, rest: str, at: int) -> None:
    a, b = Known(common), Known(common[:at] + rest)
    verdict = compare(*both(a, b))
    expected = equal_samples(a.samples, b.samples)
    assert (verdict.same_samples, verdict.same_tokens) == (expected, TOKENS * expected)
    if expected == min(verdict.ends):
        assert (verdict.outcome, verdict.status, verdict.differ_before) == ("same", 0, None)
        return
    assert (verdict.outcome, verdict.status, verdict.differ_before) == ("differ", 1, expected + 1)
    assert verdict.sources == (a.samples[expected], b.samples[expected])
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
    verdict = compare(*both(Known(a, indices=known), Known(b, indices=theirs)))
    equal = equal_samples(a, b)
    assert verdict.same_samples <= equal
    shared = {index for index in known if index <= len(b) and (theirs is None or index in theirs)}
    if verdict.outcome == "differ":
        assert verdict.differ_before is not None
        assert verdict.differ_before > equal
        assert verdict.differ_before in shared
    elif verdict.outcome == "same":
        assert verdict.same_samples == min(verdict.ends) > 0
    else:
        assert verdict.same_samples < min(verdict.ends) or min(verdict.ends) == 0
    assert verdict.same_samples == max({index for index in shared if index <= equal} | {0})


def test_nothing_is_proven_of_what_neither_ledger_holds() -> None:
    late, early = Known("abcabc", first=4), Known("abc")
    assert compare(*both(late, early)).outcome == "unknown"
    other = Known("bbcabcab")
    verdict = compare(*both(late, other))
    assert (verdict.outcome, verdict.same_samples, verdict.differ_before) == ("differ", 0, 4)
    assert "the first sample that differs is one of 0 to 3" in "\n".join(
        explain(verdict, *both(late, other))
    )
    beginning = Known("")
    assert compare(*both(beginning, early)).status == 2


def test_what_decides_about_the_order_is_named_where_it_differs() -> None:
    a, b = (
        Known("aab", decides={"seed": 7, "order_version": 1}),
        Known("abb", decides={"seed": 8, "config_digest": "x"}),
    )
    verdict = compare(*both(a, b))
    assert verdict.differences == {"seed": (7, 8)}
    lines = explain(verdict, *both(a, b))
    assert "seed: A has 7, B has 8" in lines
    assert lines[-3:] == [
        "the same through sample index 1 (8 tokens); sample 1 is the first that differs",
        "sample 1 of A is of a",
        "sample 1 of B is of b",
    ]
    assert document(verdict, *both(a, b))["first_differing_sample"] == 1


def test_revisions_are_named_where_they_differ_before_the_end_of_the_shorter() -> None:
    early, late = (2, "aa" * 32), (50, "bb" * 32)
    a, b = Known("abcabc", revisions=(early, late)), Known("abcabc" * 20, revisions=(early,))
    assert compare(*both(a, b)).differences == {}
    b.revisions = ()
    verdict = compare(*both(a, b))
    assert verdict.differences == {"revisions": (["aaaaaaaaaaaa from sample 2"], [])}
    assert "revisions: A has aaaaaaaaaaaa from sample 2, B has none" in explain(
        verdict, *both(a, b)
    )
    b.revisions = None
    assert compare(*both(a, b)).differences == {}


def opened(path: Path | str) -> DigestSource:
    """A side of a comparison that is a file: no server is asked."""
    return open_source(str(path), lambda _: pytest.fail("a server is asked"))


def test_a_file_without_a_snapshot_that_has_a_digest_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"epoch": 3}')
    (tmp_path / "cut.json").write_text(
        seal({"format": "tokenloom/snapshot", "version": 2, "sample_index": 3})
    )
    for name, fault in (
        ("model.json", "holds no state of data"),
        ("cut.json", "digest is None, expected str"),
    ):
        with pytest.raises(SnapshotInvalid, match=f"{name}: .*{fault}"):
            opened(tmp_path / name)


def test_a_state_of_another_data_loader_has_no_digest_to_compare(tmp_path: Path) -> None:
    (tmp_path / "older.json").write_text('{"sample_index": 3}')
    older = opened(tmp_path / "older.json")
    verdict = compare(older, Known("abc").source)
    assert (verdict.outcome, verdict.status) == ("unknown", 2)
    assert (
        "of another data loader, without a digest"
        in explain(verdict, older, Known("abc").source)[0]
    )
