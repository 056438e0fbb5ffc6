"""``RemoteDataset``: a run's batches as a torch dataset that can be saved and resumed to the sample."""

from __future__ import annotations

import logging
import multiprocessing.context
import os
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from tokenloom_proto.credentials import Credentials
from torch.utils.data import IterableDataset

from tokenloom import figures, loaders, ramp, topology
from tokenloom.connection.address import Address
from tokenloom.batch.packed import Batch
from tokenloom.connection import Connection, Report, Request, Source, ask, sources_at
from tokenloom.batch.device import resolve
from tokenloom.job_server.shared import Embedded
from tokenloom.errors import EndOfData, ProtocolError
from tokenloom.job_server.in_process import Local
from tokenloom.job_server.mixture_file import path_of, refuse_options_of_servers
from tokenloom.snapshot import KEY, History, Loaded, Older, Point

if TYPE_CHECKING:  # a build of torch may lack it
    from torch.distributed import ProcessGroup

log = logging.getLogger("tokenloom")

#: The stream that is trained on; all others are evaluated on.
TRAIN = "train"


class RemoteDataset(IterableDataset[Batch]):
    """The batches of one rank, streamed from a Tokenloom server.

    ``url`` is ``grpc://host:port/run``; with a standby ``grpc://a:50051,b:50051/run``: whichever leads is found.
    Rank and world size are fixed here: as given, else those of ``process_group`` (or of the default group), else the
    launcher's. All ranks of one launch share an ``attempt`` id, by the process group's store, the SLURM job step, or as
    given.

    ``url`` may be the path of a mixture file instead (``.yaml``): rank 0 then starts the server, which all ranks of the
    launch join, and ends it when they have closed their datasets or it dies. What is wrong with the file is raised
    here, on every rank. With ``local=True``, for one process alone, the same samples come without a server or a
    socket, and what is wrong with the data is raised by the first ``iter()``. Both need
    ``pip install 'tokenloom[server]'``.

    The first ``iter()`` joins the run, where ``load_state_dict()`` was called from that state, else
    from ``resume``: ``"latest"`` (what the ledger has committed), ``"fresh"`` (the beginning) or the id
    of a saved snapshot. Batches are fetched in the background, ``prefetch_steps`` ahead at most; ``next()``
    waits for one at most ``batch_timeout_s``.

    ``batch_size`` may follow the run's tokens: ``[(0, 4), (1_000_000, 8)]`` are pairs of total tokens, ascending from
    0, and samples per rank and step, each from the first optimiser step on that begins at so many tokens or behind
    them.

    ``accumulate`` is how many steps of ``next()`` an optimiser step has, counted from where this launch joined; the
    same on all ranks. The batch size only changes between two optimiser steps. ``global_label_tokens`` is of all
    batches of one, so ``next()`` waits until they are all there or the data end; at least twice as many are fetched
    ahead.

    A run that another attempt trains on is refused with ``RunBusy`` as long as every rank of that is alive;
    ``takeover=True`` ends it on purpose.

    ``fork_from`` is another run's ``state_dict()``: this run, which must not have begun, begins there, under its own
    mixture. A state that is loaded comes first, so a script that is restarted from its checkpoint may leave it there.

    Batches have the columns ``position_ids``, ``document_ids``, ``attention_mask``, ``loss_mask`` and ``cu_seqlens``
    (with ``max_seqlen``) where these are asked for.

    ``device="cuda"`` makes the tensors there, equal to the bit: ids cross to it as narrow as they travelled, from
    pinned memory and one batch ahead, and are widened there. A batch is ready for the stream that is current at
    ``next()``.

    A second ``iter()`` goes on after the last batch yielded. Going back is a new dataset's business.

    At the end of the data iteration stops; with ``at_end="raise"`` it raises ``EndOfData``, which says why they ended.

    It may be handed to a process that is spawned, such as a DataLoader's worker. With one rank that is so even after it
    has joined: the copy goes on where this one stands, as a new attempt, and this one is fenced.

    ``peek=True`` only looks: it joins nothing, counts nothing and fences nobody, whatever the run is doing. The whole
    order comes, to this process alone, from where the ledger stands unless a state was loaded or ``resume`` says
    otherwise; there it may also be a sample index as text, such as ``resume="38000"``. The order is the run's own,
    so ``state_dict()`` is a point that training can resume at.

    ``stream="validation"`` is what training's sources hold out (``stream="validation/ALIAS"``: what one of them does),
    or another stream that the mixture file names. Its first ``samples`` (None: all of it) come, the same ones at each
    ``iter()``, cut over the ranks: the last step is filled up with padding samples (source −1, labels −100), so that
    every rank does as many steps, and ``len()`` tells how many. Evaluating joins no generation and counts nothing, so
    it may happen before, while and after the run trains. It has no state: ``state_dict()`` is that of a stream which
    has not begun, and loading it changes nothing.

    Where the server wants a token, it is ``token`` or the environment's ``TOKENLOOM_TOKEN``. With ``grpcs://`` the
    connection uses TLS: ``tls_ca`` is the CA that is trusted (PEM), ``tls_cert`` and ``tls_key`` are for a server
    that wants to see a certificate (or ``TOKENLOOM_TLS_CA``, ``_CERT`` and ``_KEY``). Without TLS a token is only sent
    to this machine, and to the hosts that ``TOKENLOOM_PLAINTEXT_HOSTS`` names.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        batch_size: int | ramp.Schedule | None = None,
        *,
        local: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        attempt: str | None = None,
        process_group: ProcessGroup | None = None,
        resume: str | None = None,
        takeover: bool = False,
        fork_from: Mapping[str, Any] | None = None,
        stream: str = TRAIN,
        samples: int | None = None,
        accumulate: int = 1,
        prefetch_steps: int | None = None,
        peek: bool = False,
        at_end: Literal["stop", "raise"] = "stop",
        document_ids: bool = False,
        position_ids: bool = False,
        attention_mask: bool = False,
        loss_mask: bool = False,
        cu_seqlens: bool = False,
        device: str | torch.device | None = None,
        connect_timeout_s: float = 300.0,
        reconnect_timeout_s: float = 300.0,
        batch_timeout_s: float = 3600.0,
        token: str | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        shown = {"token": token, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
        mixture = path_of(url)
        if mixture is not None:
            refuse_options_of_servers(mixture, **shown)
        elif local:
            raise ValueError(f"local=True needs no server: give the path of a mixture file (.yaml), not {url!r}")
        else:
            address = Address.parse(os.fspath(url))
            credentials = Credentials.find(
                address.hosts,
                tls=address.tls,
                token=token,
                tls_ca=tls_ca,
                tls_cert=tls_cert,
                tls_key=tls_key,
                environment=os.environ,
            )
        counts = {"accumulate": accumulate, "prefetch_steps": prefetch_steps, "samples": samples}
        for name, value in counts.items():
            if (value is not None or name == "accumulate") and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1; got {value!r}")
        if prefetch_steps is not None and prefetch_steps < accumulate:
            raise ValueError(
                f"prefetch_steps is {prefetch_steps}; expected at least accumulate, {accumulate}: all steps of an "
                "optimiser step are fetched before the first is handed out"
            )
        for name, seconds in (
            ("connect_timeout_s", connect_timeout_s),
            ("reconnect_timeout_s", reconnect_timeout_s),
            ("batch_timeout_s", batch_timeout_s),
        ):
            if not 0 < seconds < float("inf"):
                raise ValueError(f"{name} must be a number of seconds above 0; got {seconds!r}")
        if resume is not None and not resume:
            raise ValueError('resume must be "latest", "fresh" or the id of a snapshot; got an empty text')
        if at_end not in ("stop", "raise"):
            raise ValueError(f'at_end must be "stop" or "raise"; got {at_end!r}')
        if fork_from is not None and resume:
            raise ValueError(f"fork_from begins a new run, and resume={resume!r} goes on with one: give one of them")
        batch_sizes = ramp.check(batch_size)
        evaluates = stream not in ("", TRAIN)
        if evaluates:
            _refuse_with_evaluation(
                stream,
                batch_size,
                peek=peek,
                resume=resume,
                takeover=takeover,
                fork_from=fork_from,
                accumulate=accumulate > 1 and accumulate,
                at_end=at_end != "stop" and at_end,
            )
        elif samples is not None:
            raise ValueError(f"samples={samples} is for a stream to evaluate on; training goes on to its end")
        if peek:
            if batch_sizes:
                raise ValueError(f"peek=True has steps of one batch size; got batch_size={batch_size!r}")
            given = {"rank": rank, "world_size": world_size, "attempt": attempt, "process_group": process_group}
            _refuse_with_peek(**given, takeover=takeover, fork_from=fork_from)
            slot = topology.ALONE
        else:
            slot = topology.resolve(
                run=address.run if mixture is None else str(mixture),
                stream=stream,
                rank=rank,
                world_size=world_size,
                # Who evaluates takes no slot, so there is no id to share, and nobody to wait for; but for a server that
                # rank 0 starts.
                attempt=stream if evaluates and mixture is None else attempt,
                process_group=process_group,
                timeout_s=connect_timeout_s,
            )
        self._served_here: Embedded | Local | None = None
        self._server_closer: weakref.finalize[[], RemoteDataset] | None = None
        if mixture is not None:
            served: Embedded | Local
            served = Local(mixture, slot) if local else Embedded(mixture, stream, slot, connect_timeout_s)
            self._served_here, address, credentials = served, served.address, served.credentials
            self._server_closer = weakref.finalize(self, served.close)
        #: What a Join asks for, where no state was loaded.
        self._asked = Request(
            address=address,
            credentials=credentials,
            stream=stream,
            topology=slot,
            batch_size=batch_size if isinstance(batch_size, int) else 0,
            batch_sizes=batch_sizes,
            resume=resume or "",
            state="",
            position_ids=position_ids,
            document_ids=document_ids,
            attention_mask=attention_mask,
            loss_mask=loss_mask,
            cu_seqlens=cu_seqlens,
            prefetch_steps=prefetch_steps,
            accumulate=accumulate,
            takeover=takeover,
            fork=False,
            peek=peek,
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            batch_timeout_s=batch_timeout_s,
            device=resolve(device) if device is not None else None,
            samples=(samples or 0) if evaluates else None,
        )
        self._fork = Loaded.read(fork_from) if fork_from is not None else None
        self._at_end = at_end
        # In memory that forked and spawned DataLoader workers share, so that the trainer's copy can
        # tell that a worker's copy has the batches, and with them the state.
        self._joined_in = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._loaded: Loaded | Older | None = None
        self._connection: Connection | None = None
        self._connection_pid: int | None = None
        self._history: History | None = None
        self._closer: weakref.finalize[[Connection, int], RemoteDataset] | None = None
        self._closed = False
        # This process's name for its slot. It outlasts a Join that was interrupted, which may have reached the server.
        self._nonce = uuid.uuid4().hex
        #: Of an evaluation, once the server said how many samples it has.
        self._steps: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Joins the run if that was not done, and goes on after the last batch yielded. Of a stream to evaluate on,
        its first samples, each time."""
        loaders.check_workers(self._asked.device)
        loaders.check_collation(sys._getframe(1))
        self._check_process()
        if self._evaluates:
            return self._evaluation()
        if self._connection is None:
            self._join()
        return _Batches(self._next)

    def __len__(self) -> int:
        """Steps of an evaluation. Asks the server where there was none yet, and waits until it has made the samples."""
        if not self._evaluates:
            raise TypeError(loaders.NO_LENGTH)
        if self._steps is None:
            with self._connect(self._asked) as connection:
                self._learn_length(connection)
        assert self._steps is not None
        return self._steps

    def __bool__(self) -> bool:
        return True  # whatever its length

    def _evaluation(self) -> Iterator[Batch]:
        if self._closed:
            raise RuntimeError("this RemoteDataset is closed: make a new one to go on")
        if self._closer is not None:
            self._closer()
        connection = self._connect(self._asked)
        self._learn_length(connection)
        self._keep(connection)

        def following() -> Batch:
            if self._closed:
                raise RuntimeError("this RemoteDataset is closed: make a new one to go on")
            taken = connection.take()
            if taken is None:
                raise StopIteration
            return taken[0]

        return _Batches(following)

    def _learn_length(self, connection: Connection) -> None:
        found = connection.opening.samples
        if self._steps is None and found < (self._asked.samples or 0) and self.rank == 0:
            log.warning(
                "%s: stream %s has %d samples, not %d: these are evaluated on",
                self._asked.address, self._asked.stream, found, self._asked.samples,
            )  # fmt: skip
        self._steps = -(-found // (self.world_size * connection.opening.layout.batch_size))

    def _next(self) -> Batch:
        self._check_process()
        if self._closed or self._connection is None or self._history is None:
            raise RuntimeError("this RemoteDataset is closed: make a new one to go on")
        taken = self._connection.take()
        if taken is None:
            raise StopIteration if self._at_end == "stop" else self._ended(self._history.last)
        batch, point = taken
        self._history.append(point)
        return batch

    def _ended(self, point: Point) -> EndOfData:
        return EndOfData(
            f"the data of {self._asked.address} end at sample index {point.sample_index} ({point.total_tokens} "
            f"tokens): {self.end_reason}",
            reason=self.end_reason or "",
            sample_index=point.sample_index,
            total_tokens=point.total_tokens,
        )

    def __repr__(self) -> str:
        rank, world_size = self._asked.topology.rank, self._asked.topology.world_size
        parts = [
            repr(str(self._asked.address)),
            *([f"stream={self._asked.stream!r}"] if self._asked.stream != "train" else ()),
            "peek" if self._asked.peek else f"rank {rank} of {world_size}",
            *([f"batch_size={self.batch_size}"] if self.batch_size else ()),
        ]
        return f"<RemoteDataset {', '.join(parts)}: {self._describe()}>"

    def _describe(self) -> str:
        """Where it stands, and whether it goes on; for people."""
        if self._evaluates:
            return f"to evaluate on, {'so far unknown' if self._steps is None else self._steps} steps"
        if self._connection is None or self._history is None:
            if self._closed:
                return "closed before it joined"
            if self._joined_elsewhere():
                return f"joined in process {int(self._joined_in[0])}"
            if isinstance(self._loaded, Loaded):
                return f"not joined yet, to go on at sample index {self._loaded.sample_index}"
            return "not joined yet"
        point, ended = self._history.last, self.end_reason
        at = f"generation {self.generation} at sample index {point.sample_index}, {point.total_tokens} tokens"
        if ended is not None and self._connection.buffer.drained:
            return f"{at}, at the end of the data: {ended}"
        return at + (", closed" if self._closed else "")

    # State

    def state_dict(self, at: int | None = None) -> dict[str, str]:
        """The state after the last batch yielded, or after that which ended at sample index ``at``.

        Equal on every rank. Needs no network, and works before the first batch and with the server dead.
        """
        self._check_state_is_here()
        if self._evaluates:
            return {KEY: self._standing.text}
        if self._history is not None:
            return {KEY: self._history.text(at)}
        place = self._standing
        if at is not None and at != place.sample_index:
            raise ValueError(f"there is no state at sample index {at}: no batch was yielded yet")
        return {KEY: place.text}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps a state for the Join, which the first ``iter()`` makes; does not contact the server.

        Also what an older data loader saved: ``{"resume_state": {"datasets": […]}}`` or ``{"sample_index": N}``.
        """
        self._check_state_is_here()
        if (self._closed or self._connection is not None) and not self._evaluates:
            raise RuntimeError(
                "load_state_dict comes before the first iter(), which joins the run at that state; "
                "to go back, close() this dataset and make a new one"
            )
        if self._evaluates:
            _check_no_state(Loaded.read(state), self._asked.stream)
            return
        self._loaded = Loaded.read(state)

    @property
    def sample_index(self) -> int:
        """End of the last batch yielded, in the run's one global order."""
        return self._place.sample_index

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run up to there, over all ranks and restarts."""
        return self._place.total_tokens

    @property
    def digest(self) -> str:
        """Rolling digest of all samples up to there: equal digests are equal data."""
        return self._place.digest

    @property
    def history(self) -> History:
        """What states are written from, for who hands the batches on to another process."""
        if self._history is None:
            raise RuntimeError("only known once the run is joined: call iter() on the dataset first")
        return self._history

    @property
    def _place(self) -> Point | Loaded | Older:
        self._check_state_is_here()
        if self._evaluates and self._connection is not None:
            return self._connection.buffer.consumed
        return self._history.last if self._history is not None else self._standing

    @property
    def _standing(self) -> Loaded | Older:
        """Where the trainer stands as long as it has not joined."""
        return self._loaded or Loaded.start(self._asked.address.run, self._asked.stream)

    # The run

    @property
    def run(self) -> str:
        """The run's name."""
        return self._asked.address.run

    @property
    def stream(self) -> str:
        """The stream's name: ``"train"``, or that of one to evaluate on."""
        return self._asked.stream or TRAIN

    @property
    def _evaluates(self) -> bool:
        return self._asked.samples is not None

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._asked.topology.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._asked.topology.world_size

    @property
    def batch_size(self) -> int | tuple[tuple[int, int], ...] | None:
        """Samples per rank and step, or the schedule of that, as asked for; None where the run says it."""
        return self._asked.batch_sizes or self._asked.batch_size or None

    @property
    def accumulate(self) -> int:
        """Steps of ``next()`` for each of the optimiser's."""
        return self._asked.accumulate

    def plan(self, tokens: int | None = None) -> dict[str, Any]:
        """What the run will be, from its beginning to the end of its data or up to so many total tokens, if nothing is
        changed: the document of ``GET /v1/runs/{run}/plan``. Where data never end and no ``tokens`` are given,
        ``ends`` is false. It does not depend on how far the run is, and needs no Join."""
        return ask.plan(self._asked.address, self._asked.credentials, tokens or 0, self._asked.connect_timeout_s)

    def stats(self) -> dict[str, Any]:
        """The run's figures as the server has them now: the document of ``GET /v1/runs/{run}/stats``. Needs no Join."""
        return ask.stats(self._asked.address, self._asked.credentials, self._asked.connect_timeout_s)

    def metrics(self) -> dict[str, float]:
        """Figures of this rank for experiment trackers; all 0 before the Join. Costs no step anything, and asks nobody.

        ``wait_ms_last``, ``wait_ms_mean`` and ``wait_ms_max``: what ``next()`` waited for batches since this was called
        last (0 for those that were there). ``queue_steps`` of at most ``queue_capacity_steps``: batches that are there
        now. ``steps``: taken since the Join, and ``tokens`` of the whole run in them. ``sample_index`` and
        ``total_tokens``: of the last batch. ``uncommitted_samples``: how far the ledger is behind that.
        ``reconnects``: how often the stream was opened again.
        """
        self._check_state_is_here()
        return figures.of(self._connection)

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample."""
        return self._joined.opening.layout.sequence_length

    @property
    def labels(self) -> str:
        """``"same"``: labels are the input ids, and a model shifts them inside; ``"shifted"``: they are the ids one
        further. Of a run of rows: ``"same"``."""
        return "shifted" if self._joined.opening.layout.shifted else "same"

    @property
    def sources(self) -> list[Source]:
        """The run's sources as far as the last batch yielded, by the ids that ``source_ids`` holds: a revision may add
        some while the run trains."""
        opened = self._joined.opening.sources
        if self._history is None:
            return sorted(opened, key=lambda source: source.id)
        return sources_at(self._history.last.base, opened)

    @property
    def generation(self) -> int:
        """The run's fencing number, made by this attempt; 0 for a peek."""
        return self._joined.opening.generation

    @property
    def start_index(self) -> int:
        """The sample index at which this attempt began."""
        return self._joined.opening.start.sample_index

    @property
    def end_reason(self) -> str | None:
        """Why the data ended; None while it has not."""
        return self._connection.buffer.end_reason if self._connection else None

    def report(
        self,
        losses: Mapping[int, tuple[float, int]],
        *,
        sample_index: int,
        total_tokens: int,
        step: int,
        loss: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Sends losses over all ranks to the server, which shows them: by source id the mean and the tokens it is of.

        For one rank of the run to call, with a rising ``sample_index``; ``SourceLoss`` does. Returns at once: it is
        sent in the background, and what cannot be sent is logged and dropped.
        """
        if self._asked.peek or self._evaluates:
            what = "peek=True" if self._asked.peek else f"stream={self._asked.stream!r}"
            raise ValueError(
                f"{what} takes no part in the training, and the server shows the losses of that: SourceLoss.reduce() "
                "gives them without a report"
            )
        self._joined.report(
            Report(
                sample_index=sample_index,
                total_tokens=total_tokens,
                step=step,
                sources=dict(losses),
                loss=loss,
                learning_rate=learning_rate,
            )
        )

    @property
    def _joined(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("only known once the run is joined: call iter() on the dataset first")
        return self._connection

    # Life

    def close(self) -> None:
        """Reports the last batch yielded to the server and ends the stream. The state stays readable."""
        self._closed = True
        if self._closer is not None:
            self._closer()
        if self._server_closer is not None:
            self._server_closer()

    def __enter__(self) -> RemoteDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_server_closer": None}
        # Two processes are two clients, also of a slot that nobody has taken yet.
        state["_nonce"] = uuid.uuid4().hex
        if self._connection is None:
            return state
        left = {"_connection": None, "_history": None, "_closer": None}
        if self._evaluates:
            return state | left
        if multiprocessing.context.get_spawning_popen() is None:
            raise RuntimeError(
                "a RemoteDataset cannot be copied once it has joined the run: both would take the same batches; make a "
                "new one"
            )
        why = "it is closed" if self._closed else "" if self.world_size == 1 else "its other ranks would be left behind"
        if why or self._served_here is not None:
            raise RuntimeError(
                "this RemoteDataset joined the run and cannot be handed to another process, since "
                f"{why or 'the server is in this one'}: hand it over before the first iter(), use num_workers=0 "
                "(batches are fetched in the background all the same), or make a new one"
            )
        # The other process goes on from here, as an attempt of its own, which fences this one.
        moved: dict[str, Any] = left | {"_loaded": Loaded.read(self.state_dict())}
        if not self._asked.peek:
            slot = replace(self._asked.topology, attempt=uuid.uuid4().hex)
            moved["_asked"] = replace(self._asked, topology=slot, takeover=True)
        return state | moved

    def _join(self) -> None:
        if self._closed:
            raise RuntimeError("this RemoteDataset is closed: make a new one to go on")
        fork = self._fork if self._loaded is None else None
        loaded = self._loaded or fork
        asked = self._asked
        if loaded is not None:
            asked = replace(asked, resume="", state=loaded.text, fork=fork is not None)
        connection = self._connect(asked)
        start, skipped = connection.opening.start, connection.opening.skipped_samples
        if loaded and not loaded.leads_to(start, skipped):
            connection.close()
            raise ProtocolError(
                f"the loaded state stands at sample index {loaded.sample_index} (digest {loaded.digest}), "
                f"but the server starts at {start.sample_index} (digest {start.digest}), {skipped} skipped samples "
                "behind it"
            )
        if skipped and self.rank == 0:
            log.warning(
                "run %s: samples %d to %d are skipped, as the restore before this launch said",
                self._asked.address.run, start.sample_index - skipped, start.sample_index - 1,
            )  # fmt: skip
        self._keep(connection)
        self._joined_in[0] = os.getpid()
        # Behind samples that are skipped the loaded state is of no use any more: it would bring them back.
        # And a state of the run that was forked is none of this one, nor is an older data loader's.
        own = self._loaded if isinstance(self._loaded, Loaded) and not skipped and not fork else None
        self._history = History(connection.opening.template, start, own)

    def _connect(self, asked: Request) -> Connection:
        return Connection(asked, f"{self._nonce}-{os.getpid()}")

    def _keep(self, connection: Connection) -> None:
        self._connection = connection
        self._closer = weakref.finalize(self, _close, connection, os.getpid())
        self._connection_pid = os.getpid()
        if self._served_here is not None:
            self._served_here.watch(connection.buffer.fail)

    def _check_process(self) -> None:
        if self._connection_pid == os.getpid():  # the usual case, at each batch: far cheaper than asking torch
            return
        if self._connection is not None:
            # Measured: in most forks of a process with an open stream, gRPC crashes or hangs one of the two.
            raise RuntimeError(
                f"this RemoteDataset joined the run in process {self._connection_pid}, of which this one is a fork, "
                "and a connection does not survive that: use num_workers=0 (batches are fetched in the background all "
                'the same), multiprocessing_context="spawn" or "forkserver", fork before the first iter(), or make a '
                "new dataset before you fork"
            )
        if self._joined_elsewhere():
            raise RuntimeError(
                f"this RemoteDataset joined the run in another process ({int(self._joined_in[0])}), and a slot is "
                "served to one process only: keep a DataLoader's worker (persistent_workers=True), or make a new "
                "dataset"
            )

    def _joined_elsewhere(self) -> bool:
        """Whether another process has the batches. One that this copy was handed over by gave them up."""
        return int(self._joined_in[0]) not in (0, os.getpid(), self._connection_pid)

    def _check_state_is_here(self) -> None:
        if self._joined_elsewhere():
            raise RuntimeError(
                "the batches are read in a DataLoader worker, and the state is there, too: use num_workers=0 (batches "
                "are fetched in the background all the same), or tokenloom.integrations.stateful.StatefulLoader"
            )


class _Batches:
    """An iterator that keeps raising what it met: a generator would turn an error into an end of data."""

    def __init__(self, following: Callable[[], Batch]) -> None:
        self._following = following

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Batch:
        return self._following()


def _refuse_with_peek(**given: object) -> None:
    """Raises ``ValueError`` for what only a rank of the run can have."""
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None and value is not False]
    if named:
        raise ValueError(
            f"peek=True takes no part in the run, so it is no rank of an attempt: leave out {', '.join(named)}"
        )


def _refuse_with_evaluation(stream: str, batch_size: int | ramp.Schedule | None, **given: object) -> None:
    """Raises ``ValueError`` for what only training has."""
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None and value is not False]
    if named:
        raise ValueError(
            f"stream={stream!r} is evaluated on, each time from its beginning, and takes no part in training: leave "
            f"out {', '.join(named)}"
        )
    if batch_size is None:
        raise ValueError(f"stream={stream!r}: batch_size is missing; give the samples of a rank and step")
    if not isinstance(batch_size, int):
        raise ValueError(
            f"stream={stream!r}: batch_size must be one number, since no tokens are counted in it; got {batch_size!r}"
        )


def _check_no_state(state: Loaded | Older, stream: str) -> None:
    """Raises ``ValueError`` for a state that would lead somewhere."""
    if isinstance(state, Older) or state.sample_index:
        raise ValueError(
            f"this is the state of a dataset that is trained on, and stream={stream!r} is evaluated on, each time from "
            "its beginning: load it into the dataset that you train on"
        )


def _close(connection: Connection, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must leave its parent's connection alone
        connection.close()
