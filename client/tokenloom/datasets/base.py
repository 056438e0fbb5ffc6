"""What all datasets have in common, whether they have a connection of their own or a peer's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenloom.connection.join import RunFacts, SampleForm, Source, sources_at
from tokenloom.connection.topology import Topology
from tokenloom.snapshot import KEY, History, Loaded, Older, Point, Positioned

if TYPE_CHECKING:
    from typing_extensions import Self

_RUN_UNKNOWN = "only known once the run is joined: call iter() on the dataset first"


class BatchDataset(Positioned):
    """Batches of a run, with what is known of that run, and with an end. The base of every dataset."""

    _topology: Topology
    _facts: RunFacts | None = None
    _closed = False

    @property
    def rank(self) -> int:
        """This process's data-parallel rank."""
        return self._topology.rank

    @property
    def world_size(self) -> int:
        """The number of data-parallel ranks."""
        return self._topology.world_size

    @property
    def facts(self) -> RunFacts:
        """What is known of the run. Raises ``RuntimeError`` before the first ``iter()``, as all that follows from
        it."""
        if self._facts is None:
            raise RuntimeError(_RUN_UNKNOWN)
        return self._facts

    @property
    def generation(self) -> int:
        """The run's fencing number, made by this attempt; 0 where none was made."""
        return self.facts.generation

    @property
    def start_index(self) -> int:
        """The sample index at which this attempt began."""
        return self.facts.start_index

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample."""
        return self._form.sequence_length

    @property
    def vocab_size(self) -> int:
        """How many ids there are: the rows of a model's embedding, at least. 0 of a run of rows."""
        return self._form.vocab_size

    @property
    def pad_id(self) -> int:
        """The id that padding is made of, where samples are padded."""
        return self._form.pad_id

    @property
    def end_of_text_id(self) -> int | None:
        """The id that ends a document; None where the tokeniser has none."""
        return self._form.end_of_text_id

    @property
    def _form(self) -> SampleForm:
        return self.facts.form

    @property
    def labels(self) -> str:
        """``"same"``: labels are the input ids, and a model shifts them inside; ``"shifted"``: they are the ids one
        further. Of a run of rows: ``"same"``."""
        return self.facts.labels

    @property
    def sources(self) -> list[Source]:
        """The run's sources, by the ids that ``source_ids`` holds."""
        return sorted(self.facts.sources, key=lambda source: source.id)

    def report(self, losses: Mapping[int, tuple[float, int]], **numbers: Any) -> None:
        """Refused with ``ValueError``: only who trains reports losses."""
        raise ValueError(
            f"{type(self).__name__} takes no part in the training, and the server shows the losses of that: "
            "SourceLoss.reduce() gives them without a report"
        )

    def close(self) -> None:
        """Ends the dataset."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return True  # whatever its length

    def _check_not_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed: make a new one to go on")

    def _check_state_is_here(self) -> None:
        """Raises ``RuntimeError`` where another process has the batches, and with them the state."""


class ResumableDataset(BatchDataset):
    """A dataset of the run's order: it begins at any state, and writes one after any recent batch."""

    #: Where it stands as long as nothing was loaded or joined.
    _start: Loaded | Older
    _loaded: Loaded | Older | None = None
    _history: History | None = None

    def state_dict(self, at: int | None = None) -> dict[str, str]:
        """The state after the last batch yielded, or after that which ended at sample index ``at``.

        Equal on every rank. Needs no network, and works before the first batch and with the server dead. Raises
        ``ValueError`` where no recent batch ended at ``at``.
        """
        self._check_state_is_here()
        if self._history is not None:
            return {KEY: self._history.text(at)}
        position = self._loaded or self._start
        if at is not None and at != position.sample_index:
            raise ValueError(f"there is no state at sample index {at}: no batch was yielded yet")
        return {KEY: position.text}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps a state for the Join, which the first ``iter()`` makes; does not contact the server.

        Also what an older data loader saved: ``{"resume_state": {"datasets": […]}}``, ``{"sample_index": N}`` or
        a state of nested interleaved datasets. Raises
        ``SnapshotInvalid`` for anything else.
        """
        self._check_state_is_here()
        if self._closed or self._history is not None:
            raise RuntimeError(
                "load_state_dict comes before the first iter(), which joins the run at that state; "
                "to go back, close() this dataset and make a new one"
            )
        self._loaded = Loaded.read(state)

    @property
    def history(self) -> History:
        """What states are written from, for who hands the batches on to another process."""
        if self._history is None:
            raise RuntimeError(_RUN_UNKNOWN)
        return self._history

    @property
    def sources(self) -> list[Source]:
        """The run's sources as far as the last batch yielded, by the ids that ``source_ids`` holds: a revision may add
        some while the run trains."""
        return sources_at(self.history.last.base, self.facts.sources)

    @property
    def _position(self) -> Point | Loaded | Older:
        self._check_state_is_here()
        return self._history.last if self._history is not None else self._loaded or self._start
