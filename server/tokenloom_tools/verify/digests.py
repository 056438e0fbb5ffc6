"""Rolling digests at sample indices, as a served run or a snapshot out of a checkpoint knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenloom_server.core.state import digest_hex
from tokenloom_server.errors import SnapshotInvalid

from tokenloom_tools.checkpoint.file import find
from tokenloom_tools.remote import Remote

#: What decides about the order: a comparison names what differs.
DECIDES = (
    "seed",
    "sequence_length",
    "order_version",
    "config_digest",
    "manifest_digest",
    "tokenizer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestPoint:
    """The digest at a sample index, and what is known of the samples before it."""

    index: int
    digest: str
    tokens: int
    #: Samples by spec; None where not known.
    samples: Mapping[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestSource:
    """The digests of one run, as a server or a file knows them."""

    #: Where they are from.
    name: str
    run: str
    run_uid: str
    #: Of ``DECIDES``, what is known.
    decides: Mapping[str, Any]
    #: The first and the last sample index that it knows a digest at.
    first: int
    end: int
    #: All that it knows one at; None for every index in between.
    indices: tuple[int, ...] | None
    #: Changes of the mixture, as (sample index, digest); None where they are not known.
    revisions: tuple[tuple[int, str], ...] | None
    #: The digest at an index; where a server is asked, once for each.
    point_at: Callable[[int], DigestPoint]


def of_server(remote: Remote, run: str, name: str) -> DigestSource:
    """A run of a server, asked over REST. Raises what ``Remote.receipt`` raises, as its ``point_at`` does."""
    last = remote.receipt(run)

    @cache
    def point_at(index: int) -> DigestPoint:
        receipt = last if index == last.sample_index else remote.receipt(run, index)
        return DigestPoint(
            index=receipt.sample_index,
            digest=receipt.digest,
            tokens=receipt.total_tokens,
            samples=receipt.samples,
        )

    return DigestSource(
        name=name,
        run=last.run,
        run_uid=last.run_uid,
        decides=last.model_dump(include=set(DECIDES)),
        first=last.oldest_index,
        end=last.committed_index,
        indices=None,
        revisions=tuple((mark.sample_index, mark.digest) for mark in last.revisions),
        point_at=point_at,
    )


def of_file(path: Path, inside: str | None = None) -> DigestSource:
    """A state in a checkpoint, see ``checkpoint.file.find``; that of another data loader has no digest, so nothing but
    the beginning is known of it. Raises ``SnapshotInvalid``."""
    state = find(path, inside)
    document, is_snapshot = state.document, "format" in state.document
    if state.damage is not None:
        raise SnapshotInvalid(f"{path}: {state.damage}")
    # Where both are at one index, the state knows what the snapshot does.
    states: list[Mapping[str, Any]] = [
        own for own in (document, document.get("resume_state")) if own
    ]
    if not is_snapshot:
        states = [{"sample_index": 0, "digest": digest_hex(0), "total_tokens": 0}]
    for key, kind in (("sample_index", int), ("digest", str), ("total_tokens", int)):
        for own in states:
            if type(own.get(key)) is not kind:
                raise SnapshotInvalid(
                    f"{path}: {key} is {own.get(key)!r}, expected {kind.__name__}"
                )
    points = {own["sample_index"]: _point(own) for own in states}
    return DigestSource(
        name=str(path) if is_snapshot else f"{path} (of another data loader, without a digest)",
        run=str(document.get("run", "unknown")),
        run_uid=str(document.get("run_uid")),
        decides={key: document[key] for key in DECIDES if document.get(key) is not None},
        first=min(points),
        end=max(points),
        indices=tuple(sorted(points)),
        revisions=None,
        point_at=points.__getitem__,
    )


def open_source(
    named: str, connect: Callable[[str], Remote], inside: str | None = None
) -> DigestSource:
    """What an argument of the command line names: a server (``http://host:port``, perhaps with ``/run``), or a file.

    Raises ``ConfigError``, ``SnapshotInvalid``, and what asking the server raises.
    """
    if Path(named).exists() or ":" not in named:
        return of_file(Path(named), inside)
    remote = connect(named)
    name = remote.only_run()
    return of_server(remote, name, f"{remote.url}/{name}")


def _point(state: Mapping[str, Any]) -> DigestPoint:
    index, digest, tokens = state["sample_index"], state["digest"], state["total_tokens"]
    return DigestPoint(index=index, digest=digest, tokens=tokens, samples=None)
