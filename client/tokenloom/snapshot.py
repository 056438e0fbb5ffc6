"""The trainer's side of a snapshot: enough is kept to write one at any recent batch, with no network.

The server sends the state at boundaries that are the same for all ranks, and what is the same at
every sample index; a snapshot is both, plus where the trainer stands. A restore goes forward from
the boundary to that point.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenloom_proto.resume import KEY as KEY
from tokenloom_proto.resume import (
    OLDER_KEYS,
    Given,
    composed,
    older_payload,
    unwrapped,
)
from tokenloom_proto.seal import (
    CHECKSUM,
    SNAPSHOT_FORMAT,
    SNAPSHOT_VERSION,
    canonical,
    seal,
    unseal,
)

from tokenloom.errors import SnapshotInvalid

log = logging.getLogger("tokenloom")

#: How far back ``state_dict(at=)`` reaches: frameworks fetch a few batches ahead, not a thousand.
HISTORY_STEPS = 1024
ZERO_DIGEST = "0" * 32


@dataclass(frozen=True, slots=True)
class Base:
    """The resume state at a boundary, as it travelled: JSON, read only when a snapshot is written."""

    sample_index: int
    resume_state: bytes


class Point(NamedTuple):
    """Where a trainer stands after a batch.

    ``base`` is the boundary that was in force for the micro-step which ends here, and came with it at the
    latest. (A boundary exactly here may or may not have come yet, so it would differ between ranks.)
    """

    sample_index: int
    total_tokens: int
    real_tokens: int
    digest: str
    base: Base
    #: What sources gave since that, as it travelled; read only when a snapshot is written.
    counts: Given = (b"", 0)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A state as the checkpoint held it: checked for damage here, for its meaning by the server."""

    text: str
    sample_index: int
    total_tokens: int
    digest: str
    real_tokens: int

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Loaded | Older:
        """Opens a ``state_dict()``, or what an older data loader saved; raises ``SnapshotInvalid`` with what was
        found."""
        expected = (
            f"a state of RemoteDataset is {{{KEY!r}: '<one JSON string>'}}, as state_dict() gave it, or an older data "
            "loader's {'resume_state': {'datasets': […]}}, {'sample_index': N} or {'child_states': […], …}"
        )
        if not isinstance(state, Mapping):
            raise SnapshotInvalid(f"{expected}; got a {type(state).__name__}")
        state = unwrapped(state)
        if KEY not in state:
            payload = older_payload(state)
            if not payload:
                raise SnapshotInvalid(f"{expected}; got the keys {sorted(map(str, state))}")
            try:
                return Older(canonical(payload))
            except (TypeError, ValueError) as error:
                raise SnapshotInvalid(
                    f"{' and '.join(payload)}: expected plain JSON, but {error}"
                ) from None
        text = state[KEY]
        if not isinstance(text, str):
            raise SnapshotInvalid(f"{expected}; got a {type(text).__name__} under {KEY!r}")
        if _is_older(text):
            return Older(text)
        try:
            document = unseal(text)
        except ValueError as error:
            raise SnapshotInvalid(str(error)) from None
        index, tokens, digest = (
            document.get(key) for key in ("sample_index", "total_tokens", "digest")
        )
        real = document.get(
            "real_tokens", None if index else 0
        )  # before the first sample nothing was counted
        if (
            type(index) is not int
            or type(tokens) is not int
            or type(real) is not int
            or not isinstance(digest, str)
        ):
            raise SnapshotInvalid(
                "a snapshot has the integers sample_index, total_tokens and real_tokens and the string digest; "
                f"this one has sample_index={index!r}, total_tokens={tokens!r}, real_tokens={real!r}, digest={digest!r}"
            )
        return cls(text, index, tokens, digest, real)

    def leads_to(self, start: Point) -> bool:
        """Whether a server that starts there begins at this state."""
        return (start.sample_index, start.digest) == (self.sample_index, self.digest)

    @classmethod
    def start(cls, run: str, stream: str) -> Loaded:
        """The state of a run that has not begun: what is saved before the first batch and before a Join."""
        text = seal(
            {
                "format": SNAPSHOT_FORMAT,
                "version": SNAPSHOT_VERSION,
                "run": run,
                "stream": stream,
                "sample_index": 0,
                "total_tokens": 0,
                "digest": ZERO_DIGEST,
            }
        )
        return cls(text, 0, 0, ZERO_DIGEST, 0)


@dataclass(frozen=True, slots=True)
class Older:
    """What an older data loader saved: where it stands in the run's order, the server finds out at the Join."""

    text: str

    @property
    def sample_index(self) -> int:
        raise self._unknown("sample_index")

    @property
    def total_tokens(self) -> int:
        raise self._unknown("total_tokens")

    @property
    def real_tokens(self) -> int:
        raise self._unknown("real_tokens")

    @property
    def digest(self) -> str:
        raise self._unknown("digest")

    def leads_to(self, start: Point) -> bool:
        """Wherever the server found its place."""
        return True

    def _unknown(self, name: str) -> RuntimeError:
        return RuntimeError(
            f"{name}: an older data loader's checkpoint was loaded, and where that stands in this run's order is known "
            "once the run is joined: call iter() on the dataset first"
        )


class Positioned:
    """What stands somewhere in the run's one global order."""

    @property
    def sample_index(self) -> int:
        """End of the last batch yielded."""
        return self._position.sample_index

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run up to there, over all ranks and restarts."""
        return self._position.total_tokens

    @property
    def real_tokens(self) -> int:
        """Documents' tokens of these, without padding."""
        return self._position.real_tokens

    @property
    def digest(self) -> str:
        """Rolling digest of all samples up to there: equal digests are equal data."""
        return self._position.digest

    @property
    def _position(self) -> Point | Loaded | Older:
        """Where that is."""
        raise NotImplementedError


def _is_older(text: str) -> bool:
    """Whether a text is such a checkpoint's; what else it may be is for ``unseal`` to say."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return (
        isinstance(document, dict)
        and CHECKSUM not in document
        and any(key in document for key in OLDER_KEYS)
    )


class History:
    """The last points that the trainer was at, and how to write each as a snapshot."""

    def __init__(self, template: bytes, start: Point, loaded: Loaded | None) -> None:
        """``loaded``: the state at the start, which is given out again as it came."""
        self.template = template
        self.loaded = loaded
        self.start = start
        self._points = deque([start], maxlen=HISTORY_STEPS)
        # Where the last iterator began; None where it is over, or a state was taken since.
        self._begun: Point | None = None
        self._warned = False

    def copy(self) -> History:
        """One that begins at the last point, for who is handed the batches after it, in another process perhaps."""
        return History(self.template, self.last, self.loaded if self.last is self.start else None)

    @property
    def last(self) -> Point:
        """The point that the trainer is at."""
        return self._points[-1]

    def begin(self) -> None:
        """An iterator begins at the last point. Where the one before it was left after a single batch, of which no
        state was taken, the log says so, once: who only looked at that batch has lost it."""
        begun, self._begun = self._begun, self.last
        if begun is None or self._warned or len(self._points) < 2 or self._points[-2] is not begun:
            return
        self._warned = True
        log.warning(
            "an iterator was left after one batch, which began at sample %d, and the next one goes on at sample %d: "
            "who only wants to look at a batch takes a peek, dataset.peek(at=%d) or a PeekDataset",
            begun.sample_index, self.last.sample_index, begun.sample_index,
        )  # fmt: skip

    def finish(self) -> None:
        """The data ended, and with them the iterator."""
        self._begun = None

    def append(self, point: Point) -> None:
        """Takes the point that the trainer has now reached."""
        self._points.append(point)

    def text(self, at: int | None = None) -> str:
        """The sealed snapshot at a batch boundary that was reached; the last one by default."""
        self._begun = None
        points = tuple(self._points)  # a framework may ask while its prefetching thread goes on
        point = (
            points[-1]
            if at is None
            else next((point for point in points if point.sample_index == at), None)
        )
        if point is None:
            raise ValueError(
                f"there is no state at sample index {at}: it must be the end of a batch that was yielded, "
                f"of those from {points[0].sample_index} to {points[-1].sample_index} "
                f"(the last {HISTORY_STEPS} at most are kept)"
            )
        if point is self.start and self.loaded is not None:
            return self.loaded.text
        resume_state = point.base.resume_state.decode()
        return composed(
            json.loads(self.template),
            resume_state,
            json.loads(resume_state),
            point.sample_index,
            point.total_tokens,
            point.digest,
            point.counts,
        )
