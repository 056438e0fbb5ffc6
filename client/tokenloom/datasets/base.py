"""What all datasets have in common, whether they have a connection of their own or a peer's."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawValue
from typing import TYPE_CHECKING, Any, TypeAlias

from tokenloom.batch.layout import check_columns
from tokenloom.connection import calls
from tokenloom.connection.buffer import Metrics
from tokenloom.connection.join import Request, RunFacts, SampleForm, Source, sources_at
from tokenloom.connection.options import ConnectionOptions
from tokenloom.connection.server import RunServer, find_run
from tokenloom.connection.stream import Connection
from tokenloom.connection.topology import Topology, joins
from tokenloom.job_server import LaunchServer, mixture_path
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


# A dataset with a connection of its own: opened by the first ``iter()``, and the business of one process.


#: The address of a run, the path of a mixture file, or the server that another dataset has.
RunUrl: TypeAlias = str | os.PathLike[str] | RunServer

#: This process's slot by the run's name, ``stream`` and ``timeout_s``.
SlotOf: TypeAlias = Callable[..., Topology]

#: The stream that is trained on; all others are evaluated on.
TRAIN = "train"


def _find_server(
    url: RunUrl, options: ConnectionOptions, stream: str, slot_of: SlotOf
) -> tuple[RunServer, Topology]:
    """The server of a run, which is started where ``url`` is a mixture file, and this process's slot, by the name that
    its ranks have in common for the run."""
    slot_of = partial(slot_of, stream=stream, timeout_s=options.connect_timeout_s)
    if isinstance(url, RunServer):
        return url, slot_of(url.address.run)
    mixture = mixture_path(url)
    if mixture is None:
        address = find_run(os.fspath(url), options)
        server = RunServer(address, options.credentials(address))
        return server, slot_of(address.run)
    options.refuse_credentials(mixture)
    slot = slot_of(str(mixture))
    return LaunchServer(mixture, stream, slot, options.connect_timeout_s), slot


class ConnectedDataset(BatchDataset):
    """What every dataset has whose batches come over a connection of its own."""

    def __init__(
        self,
        url: RunUrl,
        slot_of: SlotOf,
        connection: ConnectionOptions | None,
        *,
        stream: str = TRAIN,
        columns: Iterable[str],
        **fields: Any,
    ) -> None:
        """``slot_of`` gives this process's slot, as ``topology.resolve`` does; it may wait for other ranks, so all else
        is checked before. ``fields`` are further fields of ``Request``."""
        super().__init__()
        options = connection or ConnectionOptions()
        fields["columns"] = check_columns(columns)
        server, self._topology = _find_server(url, options, stream, slot_of)
        #: What a Join asks for, where no state was loaded.
        self._request = Request(
            server=server, topology=self._topology, stream=stream, options=options, **fields
        )
        closer = weakref.finalize(self, server.share().release)
        self._server_closer: weakref.finalize[[], ConnectedDataset] | None = closer
        # The process that joined. In memory that forked and spawned DataLoader workers share, so that the trainer's
        # copy can tell that a worker's copy has the batches, and with them the state.
        self._joined_in = RawValue("q", 0)
        self._joins = joins(self.run, self._topology)
        self._connection: Connection | None = None
        self._connection_pid: int | None = None
        self._closer: weakref.finalize[[Connection, int], ConnectedDataset] | None = None
        self._form_before: SampleForm | None = None
        # This process's name for its slot. It outlasts a Join that was interrupted, which may have reached the server.
        self._nonce = uuid.uuid4().hex

    @property
    def run(self) -> str:
        """The run's name."""
        return self._request.address.run

    @property
    def stream(self) -> str:
        """The stream's name: ``"train"``, or that of one to evaluate on."""
        return self._request.stream

    @property
    def batch_size(self) -> int | tuple[tuple[int, int], ...] | None:
        """Samples per rank and micro-step, or the schedule of that, as asked for; None where the run says it."""
        return self._request.batch_sizes or self._request.batch_size or None

    @property
    def end_reason(self) -> str | None:
        """Why the data ended; None while it has not."""
        return self._connection.buffer.end_reason if self._connection else None

    @property
    def _form(self) -> SampleForm:
        """Before the Join the server is asked, once: a model is made before the batches for it are wanted."""
        if self._facts is not None:
            return super()._form
        if self._form_before is None:
            stats = self.stats()
            self._form_before = SampleForm(*(stats[name] for name in SampleForm._fields))
        return self._form_before

    def plan(self, tokens: int | None = None) -> dict[str, Any]:
        """What the run will be, from its beginning to the end of its data or up to so many total tokens, if nothing is
        changed: the document of ``GET /v1/runs/{run}/plan``. Where data never end and no ``tokens`` are given,
        ``ends`` is false. It does not depend on how far the run is, and needs no Join."""
        return calls.plan(self._request, tokens or 0)

    def stats(self) -> dict[str, Any]:
        """The run's figures as the server has them now: the document of ``GET /v1/runs/{run}/stats``. Needs no Join."""
        return calls.stats(self._request)

    def metrics(self) -> dict[str, float]:
        """Figures of this rank for experiment trackers; all 0 before the Join. Costs no micro-step anything, and asks
        nobody.

        ``wait_ms_last``, ``wait_ms_mean`` and ``wait_ms_max``: what ``next()`` waited for batches since this was called
        last (0 for those that were there). ``queue_micro_steps`` of at most ``queue_capacity_micro_steps``: batches
        that are there now. ``micro_steps``: taken since the Join, and ``tokens`` of the whole run in them.
        ``sample_index`` and ``total_tokens``: of the last batch. ``uncommitted_samples``: by how many samples the
        ledger is short of that. ``reconnects``: how often the stream was opened again.
        """
        self._check_state_is_here()
        connection = self._connection
        metrics = (
            Metrics() if connection is None else connection.buffer.metrics(connection.reconnects)
        )
        return metrics._asdict()

    def close(self) -> None:
        """Reports the last batch yielded to the server and ends the stream. The state stays readable."""
        self._closed = True
        if self._closer is not None:
            self._closer()
        if self._server_closer is not None:
            self._server_closer()

    def __repr__(self) -> str:
        parts = [repr(str(self._request.address)), *self._role()]
        parts += [f"batch_size={self.batch_size}"] if self.batch_size else []
        return f"<{type(self).__name__} {', '.join(parts)}: {self._describe()}>"

    def __getstate__(self) -> dict[str, Any]:
        """A copy is another client, also of a slot that nobody has taken yet, and joins by itself."""
        own: dict[str, Any] = {
            "_server_closer": None,
            "_connection": None,
            "_closer": None,
            "_facts": None,
        }
        if (
            get_spawning_popen() is None
        ):  # a copy in this process, whose Join is no business of this one's
            own |= {"_joined_in": None, "_joins": None}
        return self.__dict__ | own | {"_nonce": uuid.uuid4().hex}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["_joined_in"] is None:
            self._joined_in = RawValue("q", 0)
            self._joins = joins(self.run, self._topology)

    def _role(self) -> list[str]:
        """What it is in the run; for people, as what follows."""
        return [f"rank {self.rank} of {self.world_size}"]

    def _describe(self) -> str:
        """Where it stands, and whether it goes on."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        """What ``iter()`` gives. Contacts the server."""
        raise NotImplementedError

    # The connection, and the processes

    def _connect(self, request: Request) -> Connection:
        joined = self._joins.value
        if joined and self._topology.of_step:
            slot = replace(request.topology, attempt=f"{request.topology.attempt}-{joined}")
            request = replace(request, topology=slot)
        connection = Connection(request, f"{self._nonce}-{os.getpid()}")
        self._joins.value = joined + 1
        return connection

    def _keep(self, connection: Connection) -> None:
        """Has the connection for as long as this dataset lives."""
        self._connection = connection
        self._facts = connection.opening.facts
        self._closer = weakref.finalize(self, _close, connection, os.getpid())
        self._connection_pid = os.getpid()
        self._request.server.watch(connection.buffer.fail)

    def _check_process(self) -> None:
        """Raises ``RuntimeError`` where another process than this one has joined."""
        if self._connection_pid == os.getpid():  # the usual case, at each batch: cheap
            return
        if self._connection is not None:
            # Measured: in most forks of a process with an open stream, gRPC crashes or hangs one of the two.
            raise RuntimeError(
                f"this {type(self).__name__} joined the run in process {self._connection_pid}, of which this one is a "
                "fork, and a connection does not survive that: use num_workers=0 (batches are fetched in the "
                'background all the same), multiprocessing_context="spawn" or "forkserver", fork before the first '
                "iter(), or make a new dataset before you fork"
            )
        if self._joined_elsewhere():
            raise RuntimeError(
                f"this {type(self).__name__} joined the run in another process ({self._joined_in.value}), and a slot "
                "is served to one process only: keep a DataLoader's worker (persistent_workers=True), or make a new "
                "dataset"
            )

    def _joined_elsewhere(self) -> bool:
        """Whether another process has the batches. One that this copy was handed over by gave them up."""
        return self._joined_in.value not in (0, os.getpid(), self._connection_pid)

    def _check_state_is_here(self) -> None:
        if self._joined_elsewhere():
            raise RuntimeError(
                "the batches are read in a DataLoader worker, and the state is there, too: use num_workers=0 (batches "
                "are fetched in the background all the same), or tokenloom.integrations.stateful.StatefulLoader"
            )


def batches_of(next_batch: Callable[[], Any]) -> Iterator[Any]:
    """What ``next_batch`` gives until it raises. An error is raised anew each time that it is met: a generator would
    turn it into an end of the data."""
    return iter(next_batch, None)


def _close(connection: Connection, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must leave its parent's connection alone
        connection.close()
