"""The state of a stream at a sample index: plain, frozen data, and nothing else is needed to go on.

``samples(state)`` continues bit for bit: every buffer of the pipeline is rebuilt from the cursors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

#: Names the rules by which rows are read, rendered, encoded, packed, mixed, hashed and shuffled. A change to any of
#: them is a new number, and no number is used again: what names another one is refused.
ORDER_VERSION = 3

#: Counters are refused above this: JSON and Lua readers hold integers in doubles.
MAX_COUNTER = 2**53 - 1

#: Shares in force, and what a source is owed by them, are whole numbers of this part of one, or of a token.
SHARE_UNIT = 2**32

#: The rolling digest: D' = (D × MULTIPLIER + h) mod MODULUS for each sample's hash h (0 ≤ h < 2^128).
#: A polynomial hash (Karp & Rabin, 1987), so that digests of ranges can be combined.
DIGEST_MODULUS = 2**127 - 1
DIGEST_MULTIPLIER = 0x5BD1E995CC9E2D51A3C59AC72E1B6F4D


def digest_hex(digest: int) -> str:
    """The digest as it is written everywhere: 32 hexadecimal digits."""
    return f"{digest:032x}"


@dataclass(frozen=True, slots=True)
class FileCursor:
    """In a file: ``tokens`` tokens were taken of its row ``row``, and all of the rows before that in the epoch's order.

    ``epoch`` counts from 0. ``shard`` is the file's position in the manifest, ``row`` counts within the file,
    ``tokens`` with the row's begin- and end-of-text ids. A row that was taken to its end is written as (row + 1, 0),
    also where that is after the file's last row.
    """

    epoch: int
    shard: int
    row: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class WindowCursor:
    """In a window of shuffled rows, the ``window``-th of its epoch: as in a file, with ``row`` counted in the order in
    which the window's rows come."""

    epoch: int
    window: int
    row: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class PackedCursor:
    """Among rows that best fit packs together, of which ``first`` is the first one (no token of it is taken by itself):
    they have given ``samples`` samples, one at least."""

    first: FileCursor | WindowCursor
    samples: int

    @property
    def epoch(self) -> int:
        """The epoch of the rows."""
        return self.first.epoch


@dataclass(frozen=True, slots=True)
class EpochCursor:
    """In the batches of an epoch, whose rows come from many files at once: ``rows`` rows of it were given."""

    epoch: int
    rows: int


#: Where a source stands: just after the last token that a sample took.
Cursor = FileCursor | WindowCursor | PackedCursor | EpochCursor


def row_cursor(cursor: Cursor | None) -> FileCursor | WindowCursor | EpochCursor | None:
    """The row from which reading goes on: of rows packed together the first."""
    return cursor.first if isinstance(cursor, PackedCursor) else cursor


def tokens_in_row(cursor: Cursor | None) -> int:
    """Tokens that were taken of a row which is not at its end."""
    return cursor.tokens if isinstance(cursor, FileCursor | WindowCursor) else 0


class RowCounts(NamedTuple):
    """What became of a source's rows and samples beside the tokens that were given, since the run began.

    ``bad_rows`` did not decode, ``filtered_rows`` did not pass the filter or are blank; both are part of the source's
    ``rows``.
    ``padding_tokens`` are the part of its ``tokens`` that no document filled. ``cut_documents`` do not lie in one
    sample as a whole, though the packing would have had them so; ``lost_tokens`` are those that were cut off.
    """

    bad_rows: int = 0
    filtered_rows: int = 0
    padding_tokens: int = 0
    cut_documents: int = 0
    lost_tokens: int = 0


_NOTHING_COUNTED = RowCounts()


class Lane(NamedTuple):
    """Where one of several cursors of a source stands, and what it has given since the run began."""

    cursor: Cursor | None = None
    samples: int = 0
    rows: int = 0
    row_counts: RowCounts = _NOTHING_COUNTED


@dataclass(frozen=True, slots=True)
class SourceState:
    """A source's cursor (None: the beginning of its first epoch) and its counters since the run began.

    ``rows`` counts rows taken to their end (and rows without tokens before them). ``tokens`` counts
    samples × sequence length. ``dropped_tokens`` is the tail that filled no sample, known once the
    source is exhausted. A source that is read in several ``lanes`` is counted with all of them, and its ``cursor`` is
    the one of the lane that gave the last sample; before its first there are none. ``skipped_…`` are the part of them
    that was passed over: the rest was consumed.
    """

    cursor: Cursor | None = None
    samples: int = 0
    rows: int = 0
    tokens: int = 0
    dropped_tokens: int = 0
    exhausted: bool = False
    skipped_samples: int = 0
    skipped_rows: int = 0
    skipped_tokens: int = 0
    skipped_padding_tokens: int = 0
    row_counts: RowCounts = _NOTHING_COUNTED
    lanes: tuple[Lane, ...] = ()
    owed: int = 0
    """What the shares in force asked of it so far, without what was passed over, less what it gave, as balances count
    tokens; in 1/``SHARE_UNIT`` tokens. Nothing is decided by it."""

    @property
    def epoch(self) -> int:
        """The epoch in which it stands, counted from 0."""
        return self.cursor.epoch if self.cursor is not None else 0

    @property
    def number(self) -> int:
        """The number of its next sample, among those that are not skipped."""
        return self.samples - self.skipped_samples

    @property
    def real_tokens(self) -> int:
        """Its tokens without padding."""
        return self.tokens - self.row_counts.padding_tokens

    @property
    def owed_tokens(self) -> float:
        """``owed`` in tokens."""
        return self.owed / SHARE_UNIT

    @property
    def consumed_padding_tokens(self) -> int:
        """Its padding without that of what was passed over."""
        return self.row_counts.padding_tokens - self.skipped_padding_tokens


def begun_again(source: SourceState) -> SourceState:
    """A source in which the row, or the rows packed together, that have begun are read again from their first token."""

    def again(cursor: Cursor | None) -> Cursor | None:
        match cursor:
            case PackedCursor():
                return cursor.first
            case FileCursor() | WindowCursor():
                return replace(cursor, tokens=0)
        return cursor

    lanes = tuple(lane._replace(cursor=again(lane.cursor)) for lane in source.lanes)
    return replace(source, cursor=again(source.cursor), lanes=lanes)


@dataclass(frozen=True, slots=True)
class ChildState:
    """What a mixture node knows about one of its children.

    ``credit`` is the policy's, frozen while the child is out: what the child is owed, in 1/W tokens, where W is the
    sum of the integer weights of the node's live children, or turns that went by before it joined; 0 where the policy
    keeps none. Where the policy makes the weights itself, ``weight`` is the one in force, and ``total`` the estimate of
    all that the child will give, in samples.
    """

    samples: int = 0
    tokens: int = 0
    credit: int = 0
    exhausted: bool = False
    weight: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Imported:
    """The place at which an order began from an older data loader's checkpoint: no sample before it is the run's."""

    sample_index: int
    digest: int


class Skip(NamedTuple):
    """So many samples, with these tokens, that the order passed over before it gave the one at a sample index."""

    sample_index: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class State:
    """Everything that decides samples ``sample_index``, ``sample_index + 1``, …

    ``sources`` are in source-id order; ``nodes`` in node-id order, each with its children in order.
    """

    sample_index: int
    total_tokens: int
    digest: int
    sources: tuple[SourceState, ...]
    nodes: tuple[tuple[ChildState, ...], ...]
    preserved: tuple[str, ...] = ()
    """Of an older data loader's checkpoint, the sources that no mixture of the run has, as found (canonical JSON)."""
    imported: Imported | None = None
    """Where the order began, if not at its own sample 0."""
    #: By how many tokens ``total_tokens``, the clock, exceeds those of its samples: as an older checkpoint's did.
    clock_offset: int = 0
    skips: tuple[Skip, ...] = ()
    """What was passed over so far, in order, one for each sample index. It has no index, and moved neither
    ``total_tokens`` nor the digest; sources and nodes count it."""

    @property
    def clock_ahead(self) -> int:
        """By how many tokens the clock exceeds those that sources and nodes have counted."""
        return self.clock_offset - sum(skip.tokens for skip in self.skips)

    @property
    def real_tokens(self) -> int:
        """The total tokens without padding."""
        return self.total_tokens - sum(source.consumed_padding_tokens for source in self.sources)

    def given(self, source_id: int) -> int:
        """How many samples a source has given, without those that were passed over; 0 for one that comes later."""
        return self.sources[source_id].number if source_id < len(self.sources) else 0


def passed_over(before: State, after: State) -> State:
    """The state at ``before`` once the samples from there to ``after`` are passed over: they count as skipped, and the
    next sample has the index that the first of them would have had."""
    index, skips = before.sample_index, {skip.sample_index: skip for skip in before.skips}
    _, samples, tokens = skips.get(index, Skip(index, 0, 0))
    samples, tokens = (
        samples + after.sample_index - index,
        tokens + after.total_tokens - before.total_tokens,
    )
    skips[index] = Skip(index, samples, tokens)
    sources = [
        replace(
            now,
            skipped_samples=was.skipped_samples + now.samples - was.samples,
            skipped_rows=was.skipped_rows + now.rows - was.rows,
            skipped_tokens=was.skipped_tokens + now.tokens - was.tokens,
            skipped_padding_tokens=was.skipped_padding_tokens
            + now.row_counts.padding_tokens
            - was.row_counts.padding_tokens,
            owed=was.owed,
        )
        for was, now in zip(before.sources, after.sources, strict=True)
    ]
    return replace(
        after,
        sample_index=index,
        total_tokens=before.total_tokens,
        digest=before.digest,
        sources=tuple(sources),
        skips=tuple(skips.values()),
    )
