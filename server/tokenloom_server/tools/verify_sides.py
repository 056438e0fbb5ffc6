"""What can tell which data it had: a served run, and a snapshot out of a checkpoint."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenloom_proto.seal import unseal

from tokenloom_server.errors import ConfigError, SnapshotInvalid
from tokenloom_server.order.snapshot import FORMAT, MAX_BYTES
from tokenloom_server.reports.receipt import Range, Receipt
from tokenloom_server.tools.remote import Remote

#: What decides about the order: a comparison names what differs.
DECIDES = ("seed", "sequence_length", "order_version", "config_digest", "manifest_digest", "tokenizer")
#: A state as `state_dict` gives it has its snapshot under this key.
_STATE_KEY = "tokenloom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What is known of a side at a sample index."""

    index: int
    digest: str
    tokens: int
    #: Samples by spec; None where not known.
    samples: Mapping[str, int] | None
    #: Jumped over before the index: how many samples, and which (None where not known).
    skipped: int
    skips: tuple[Range, ...] | None

    def equals(self, other: Point) -> bool:
        """Whether both had the same samples before the index."""
        if self.digest != other.digest or self.skipped != other.skipped:
            return False
        return self.skips is None or other.skips is None or self.skips == other.skips


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which run a side is of, and what its order depends on."""

    name: str
    run: str
    run_uid: str
    decides: Mapping[str, Any]


class Side(Protocol):
    """One of the two."""

    identity: Identity
    #: The sample indices at the two ends of what it can tell.
    first: int
    end: int
    #: All that it can tell at; None for every one in between.
    indices: tuple[int, ...] | None
    #: Changes of the mixture, as (sample index, digest); None where they are not known.
    revisions: tuple[tuple[int, str], ...] | None

    def at(self, index: int) -> Point: ...


class ServedSide:
    """A run of a server."""

    indices: tuple[int, ...] | None = None

    def __init__(self, remote: Remote, run: str, name: str) -> None:
        """Raises what ``Remote.receipt`` raises."""
        self._remote = remote
        self._run = run
        self._known: dict[int, Point] = {}
        receipt = remote.receipt(run)
        self.first, self.end = receipt.oldest_index, receipt.committed_index
        self.revisions: tuple[tuple[int, str], ...] | None = tuple(
            (mark.sample_index, mark.digest) for mark in receipt.revisions
        )
        self.identity = Identity(
            name=name,
            run=receipt.run,
            run_uid=receipt.run_uid,
            decides={**{key: getattr(receipt, key) for key in DECIDES}, "tokenizer": receipt.tokenizer.model_dump()},
        )
        self._keep(receipt)

    def at(self, index: int) -> Point:
        """Asks the server, once for each index."""
        return self._known.get(index) or self._keep(self._remote.receipt(self._run, index))

    def _keep(self, receipt: Receipt) -> Point:
        point = Point(
            index=receipt.sample_index,
            digest=receipt.digest,
            tokens=receipt.total_tokens,
            samples=receipt.samples,
            skipped=sum(skip.behind - skip.first for skip in receipt.skipped),
            skips=tuple(receipt.skipped),
        )
        self._known[point.index] = point
        return point


class SnapshotSide:
    """A snapshot in a file."""

    revisions: tuple[tuple[int, str], ...] | None = None

    def __init__(self, path: Path) -> None:
        """Reads a sealed snapshot, or a JSON file with what ``state_dict()`` gave anywhere in it.

        Raises ``ConfigError`` for a file that cannot be read or holds none, ``SnapshotInvalid`` for one that is torn.
        """
        document = _snapshot_in(path)
        points = [_point(document, document)]
        if (base := document.get("resume_state")) is not None:
            points.append(_point(base, base))
            if base["sample_index"] == document["sample_index"]:
                points.pop(0)
        self._points = {point.index: point for point in points}
        self.indices: tuple[int, ...] | None = tuple(sorted(self._points))
        self.first, self.end = self.indices[0], self.indices[-1]
        found = {key: document.get(key) for key in DECIDES}
        self.identity = Identity(
            name=str(path),
            run=str(document.get("run")),
            run_uid=str(document.get("run_uid")),
            decides={key: value for key, value in found.items() if value is not None},
        )

    def at(self, index: int) -> Point:
        return self._points[index]


def side(named: str, run: str | None, connect: Callable[[str], Remote]) -> Side:
    """What a word of the command line names: a server (``http://host:port``, perhaps with ``/run``), or a file.

    Raises ``ConfigError``, and what opening it raises.
    """
    scheme, colon, _ = named.partition("://")
    if not colon:
        if run is not None:
            raise ConfigError(
                f"{named}: is a file, which says itself of which run it is; {run!r} is for a server's URL"
            )
        return SnapshotSide(Path(named))
    if scheme not in ("http", "https"):
        raise ConfigError(
            f"{named!r}: expected the REST address that the server printed, such as http://127.0.0.1:8080"
        )
    parts = urllib.parse.urlsplit(named)
    in_path = urllib.parse.unquote(parts.path.strip("/")) or None
    if run is not None and in_path is not None and run != in_path:
        raise ConfigError(f"{named!r} names the run {in_path!r}, and the option {run!r}; name it once")
    address = f"{parts.scheme}://{parts.netloc}"
    remote = connect(address)
    name = run or in_path
    found = remote.runs() if name is None else [name]
    if len(found) != 1:
        raise ConfigError(
            f"{address} serves {len(found)} runs: {', '.join(found) or 'none'}; name one: {address}/RUN, or by "
            "--run-a, --run-b"
        )
    return ServedSide(remote, found[0], f"{address}/{found[0]}")


def _point(position: Mapping[str, Any], state: Mapping[str, Any]) -> Point:
    datasets = state.get("datasets") or (state.get("resume_state") or {}).get("datasets") or []
    return Point(
        index=position["sample_index"],
        digest=position["digest"],
        tokens=position["total_tokens"],
        samples=None,
        # Restores jump to where a generation begins, and that is a boundary: none lie between the two points.
        skipped=sum(dataset.get("skipped_samples", 0) for dataset in datasets),
        skips=None,
    )


def _snapshot_in(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > 16 * MAX_BYTES:
            raise ConfigError(f"{path}: has {path.stat().st_size} bytes, expected a snapshot or a checkpoint in JSON")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); expected a snapshot, or a server's URL"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path}: is no JSON; of a torch checkpoint, save what state_dict() gave as JSON, and compare that"
        ) from None
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no JSON ({error}); expected a snapshot, or a checkpoint with one") from None
    found = [text] if isinstance(loaded, dict) and loaded.get("format") == FORMAT else list(_states(loaded))
    if len(found) != 1:
        raise ConfigError(
            f"{path}: holds {len(found) or 'no'} snapshots; expected one: the sealed text, or JSON with what "
            f"state_dict() gave, {{{_STATE_KEY!r}: …}}"
        )
    try:
        document = unseal(found[0])
        for where in filter(None, (document, document.get("resume_state"))):
            for key, kind in (("sample_index", int), ("digest", str), ("total_tokens", int)):
                if type(where.get(key)) is not kind:
                    raise ValueError(f"{key} is {where.get(key)!r}, expected {kind.__name__}")
    except (ValueError, AttributeError) as error:
        raise SnapshotInvalid(f"{path}: {error}") from None
    return document


def _states(loaded: Any) -> Iterator[str]:
    """What ``state_dict()`` gave, wherever it stands in a checkpoint."""
    if isinstance(loaded, dict):
        for key, value in loaded.items():
            if key == _STATE_KEY and isinstance(value, str):
                yield value
            else:
                yield from _states(value)
    elif isinstance(loaded, list):
        for value in loaded:
            yield from _states(value)
