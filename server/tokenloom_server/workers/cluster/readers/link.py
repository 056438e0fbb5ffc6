"""The server's side of its readers: what is asked of them, who waits, and the process beside it that speaks to Ray."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe, reduction
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenloom_proto.threads import Loop

from tokenloom_server.core.control_characters import escaped
from tokenloom_server.errors import ConfigError, SourceError, StorageError, TokenloomError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.readers_stats import ReaderNode, ReaderSource, ReadersStats
from tokenloom_server.order.record import RunRecord
from tokenloom_server.order.resources import RunResources
from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.files import codec_of
from tokenloom_server.storage.io_stats import NAMED_AFTER_S, Wait
from tokenloom_server.workers.cluster.connection import Needs
from tokenloom_server.workers.cluster.description import describe, verify_file
from tokenloom_server.workers.cluster.readers import rows
from tokenloom_server.workers.cluster.readers.rows import ANSWER_BYTES, Answer, Request
from tokenloom_server.workers.cluster.readers.source import RowsOfReaders
from tokenloom_server.workers.cluster.readers.worker import read

_log = logging.getLogger(__name__)

#: Requests that are asked for each CPU of the readers: one that is worked on, and one that comes next.
REQUESTS_PER_CPU = 2
#: Answers that wait for use, for each request of all CPUs: beyond them a source has one ahead, so that memory
#: has a bound however unevenly sources are used.
ANSWERED_PER_REQUEST = 4
#: Bytes of a node's object store at least, so that nothing is put on its disk; of a local cluster for all its CPUs.
STORE_BYTES = 100_000_000
#: Seconds between tries to reach Ray again.
RETRY_S = 2.0
#: Seconds that a start may take, and the checks of a run's files on all nodes.
START_S = 120.0
#: What of the environment readers need not know: tokens, and where the ledger is.
PRIVATE = "TOKENLOOM_"
#: Nodes that are counted by name; all others are one, for where nodes come and go there is no end of names.
MOST_NODES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """``address``: see ``connection``; ``local_cpus``: of a cluster of this machine's own; ``needs`` of a task.

    ``late_s``: seconds after which a request is asked for again elsewhere. ``timeout_s``: seconds after which nobody
    waits, and the run ends, or with ``falls_back`` goes on in the server."""

    address: str = "local"
    local_cpus: int | None = None
    needs: Needs = field(default_factory=Needs)
    late_s: float = 30.0
    timeout_s: float = 300.0
    falls_back: bool = False


class _Ticket:
    """Implements ``Ticket``."""

    def __init__(
        self, readers: RayReaders, order: PipelineFactory, number: int, request: Request
    ) -> None:
        self.number = number
        self.request = request
        self.source = request.source
        self.alias = order.config.sources[request.source].name
        self.order = order
        self.counts = readers.counts(order.resources)
        self.answer: Answer | None = None
        self.wait: Wait | None = None
        self.trouble = ""
        #: Whether a node's files or versions are not those of the server, as far as that one knows.
        self.is_refused = False
        self._readers = readers

    def __del__(self) -> None:
        self._readers.unused.append({"forget": self.number})

    def is_answered(self) -> bool:
        return self.answer is not None

    def take(self) -> Answer:
        """See ``Ticket``."""
        readers, first, stats = self._readers, self.request.parts[0], self.order.resources.io_stats
        path = self.order.record.shard_paths[self.source][first.shard]
        name = f"rows from {first.first_row} on of {self.alias}: {path}"
        until = monotonic() + readers.patience_s
        with stats.waiting(name, reason="readers") as wait:
            self.wait = wait
            while self.answer is None and (left_s := until - monotonic()) > 0:
                if stats.stopped:
                    raise StorageError(f"{name} are no longer waited for: the server stops")
                if self.is_refused and self._has_changed():
                    return read(self.order, self.request)  # with the error of a run without readers
                with readers.changed:
                    if self.answer is None:
                        wait.trouble = readers.away or "; ".join(
                            filter(None, [self.trouble, readers.busy])
                        )
                        readers.changed.wait(min(1.0, left_s))
        if self.answer is not None:
            return self.answer
        limit_s, why = (
            readers.options.timeout_s,
            wait.trouble or "all of their CPUs are busy, or have stopped",
        )
        said = f"{name}: no reader has given them for {limit_s:g} s: {why}"
        if not readers.options.falls_back:
            raise SourceError(f"{said}; look at the cluster")
        if readers.patience_s:
            _log.warning("%s; until one answers, the server reads", said)
        readers.patience_s = 0.0
        return read(self.order, self.request)

    def _has_changed(self) -> bool:
        """Whether the files are not those of the run for the server, either."""
        self.is_refused = False
        try:
            for shard in {part.shard for part in self.request.parts}:
                verify_file(self.order, self.source, shard)
        except TokenloomError:
            return True
        return False


class RayReaders:
    """Implements ``Readers`` and ``Asked``. Thread-safe."""

    def __init__(self, options: ReaderOptions) -> None:
        """Raises ``ConfigError`` where Ray cannot be reached, or has too little."""
        self.options = options
        #: For how long an answer is waited for: no more, once one was waited for in vain, until there is one again.
        self.patience_s = options.timeout_s
        #: The nodes' names and CPUs.
        self.nodes: list[tuple[str, float]] = []
        #: Why Ray is away; empty where it is not. What is said where no CPU is free.
        self.away = self.busy = ""
        #: Guards all of this, and wakes who waits whenever any of it changed.
        self.changed = threading.Condition()
        #: Messages about requests and memory that nobody holds any more. To add one needs no lock.
        self.unused: deque[dict[str, Any]] = deque()
        #: By name, the memory of answers.
        self._memory: dict[str, mmap.mmap] = {}
        self._numbers = itertools.count()
        self._tickets: weakref.WeakValueDictionary[int, _Ticket] = weakref.WeakValueDictionary()
        self._counts: weakref.WeakKeyDictionary[RunResources, ReaderCounts] = (
            weakref.WeakKeyDictionary()
        )
        #: By digest, the messages that describe records.
        self._described: dict[str, dict[str, Any]] = {}
        self._digests: weakref.WeakKeyDictionary[RunRecord, str] = weakref.WeakKeyDictionary()
        self._sources: weakref.WeakSet[RowsOfReaders] = weakref.WeakSet()
        #: Of descriptions that were checked, why a node cannot read what they describe; or nothing.
        self._faults: dict[str, str] = {}
        self._stopping = threading.Event()
        if why := self._connect():
            raise ConfigError(why)
        self._thread = Loop("readers", self._listen)
        self._thread.start()

    # --- what others ask -----------------------------------------------------------------------------

    def source(
        self, record: RunRecord, resources: RunResources, source_id: int, reader: Source
    ) -> RowsOfReaders | None:
        """See ``Readers``: ids are cheaper to read than to send, and compressed files are read from their heads."""
        if not can_read(record, source_id, reader):
            return None
        order = PipelineFactory(record, resources)
        with self.changed:
            source = RowsOfReaders(order, self._digest(order), source_id, reader, self)
            self._sources.add(source)
        return source

    def check(self, order: PipelineFactory) -> None:
        """Compares versions, tokeniser and first files on each node. Raises ``ConfigError`` where they differ, or where
        the run has nothing for readers."""
        count = len(order.config.sources) if order.config.batching is None else 0
        sources = [i for i in range(count) if can_read(order.record, i, order.readers.open(i))]
        if not sources:
            raise ConfigError(
                f"--readers: run {order.name!r} has no source of text that can be read from the middle; ids and rows "
                "of tensors are cheaper to read than to send, so serve it without --readers"
            )
        with self.changed:
            digest = self._digest(order, sources)
            self._faults.pop(digest, None)
            self.changed.wait_for(lambda: digest in self._faults, START_S)
            fault = self._faults.pop(digest, f"no node has answered within {START_S:g} s")
        if fault:
            raise ConfigError(f"--readers: {fault}")

    def ask(self, order: PipelineFactory, request: Request) -> _Ticket:
        """See ``Asked``."""
        with self.changed:
            ticket = _Ticket(self, order, next(self._numbers), request)
            self._tickets[ticket.number] = ticket
            ticket.counts.asked(ticket.source, ticket.alias)
            self._send(number=ticket.number, request=request.to_json())
        return ticket

    def stats(self, resources: RunResources) -> ReadersStats:
        """See ``Readers``."""
        with self.changed:
            counts = self.counts(resources)
            tickets = [ticket for ticket in self._tickets.values() if ticket.counts is counts]
            return counts.stats(self.nodes, tickets, self.away)

    def counts(self, resources: RunResources) -> ReaderCounts:
        """What was counted of a run. For whoever holds the lock."""
        return self._counts.setdefault(resources, ReaderCounts())

    def has_room(self) -> bool:
        """See ``Asked``."""
        most = REQUESTS_PER_CPU * max(
            1.0, sum(cpus for _, cpus in self.nodes) / self.options.needs.cpus
        )
        with self.changed:
            tickets = list(self._tickets.values())
            answered = sum(ticket.answer is not None for ticket in tickets)
            return len(tickets) - answered < most and answered < ANSWERED_PER_REQUEST * most

    def close(self) -> None:
        """Ends the process beside the server, and with it what was begun on this machine."""
        self._stopping.set()
        with self.changed:
            self._send()
        self._thread.join(10)
        _end(self._process)
        self._thread.join()
        self._link.close()

    # --- the process beside --------------------------------------------------------------------------

    def _digest(self, order: PipelineFactory, sources: Sequence[int] = ()) -> str:
        """What names a record from now on; nodes are to look at these of its sources."""
        known = self._digests.get(order.record, "")
        if known in self._described and not sources:
            return known
        text = describe(order)
        digest = hashlib.sha256(text.encode()).hexdigest()
        with self.changed:
            # Those of revisions before, of which nothing is read any more.
            for unused in self._described.keys() - {source.digest for source in self._sources}:
                del self._described[unused]
                self._send(drop=unused)
            self._described[digest] = {"digest": digest, "text": text, "sources": sources}
            self._digests[order.record] = digest
            self._send(**self._described[digest])
        return digest

    def _connect(self) -> str:
        """Starts the process, and asks it for everything that is waited for. Why Ray cannot be reached, or nothing."""
        in_store = 2 * REQUESTS_PER_CPU * ANSWER_BYTES * (self.options.local_cpus or 1)
        begin = asdict(self.options) | {"store_bytes": max(STORE_BYTES, in_store)}
        ours, theirs = Pipe()
        # In a session of its own: Ctrl-C is for the server, which ends it in order.
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                f"{__package__}.child",
                str(theirs.fileno()),
                json.dumps(begin),
            ],
            pass_fds=[theirs.fileno()],
            env={name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        until = monotonic() + START_S
        while not ours.poll(0.1) and monotonic() < until and not self._stopping.is_set():
            pass
        head = rows.receive(ours) if ours.poll() else None
        if head is None or "up" not in head:
            _end(self._process)
            ours.close()
            return str(
                (head or {}).get(
                    "refused", "the process that speaks to Ray ended; the log above says why"
                )
            )
        with self.changed:
            self._link, self.nodes, self.away, self.busy = ours, head["up"], "", ""
            self._memory.clear()
            for described in self._described.values():
                self._send(**described)
            waiting = [ticket for ticket in self._tickets.values() if ticket.answer is None]
            for ticket in waiting:
                ticket.counts.asked_again[ticket.source] += 1
                self._send(number=ticket.number, request=ticket.request.to_json())
        return ""

    def _send(self, **message: Any) -> None:
        # Where that fails, the thread that listens hears of it, too, and asks again for everything.
        with suppress(OSError):
            rows.send(self._link, **message)

    def _listen(self) -> bool:
        try:
            if (message := rows.receive(self._link)) is not None:
                with self.changed:
                    self._take(message)
                    self.changed.notify_all()
                return not self._stopping.is_set()
        except (EOFError, OSError, RuntimeError) as error:
            # It ended between a message and the memory that belongs to it, or there is no room for that here.
            _log.warning("an answer of the readers cannot be taken (%s)", error)
        if not self._stopping.is_set():
            self._begin_again()
        return not self._stopping.is_set()

    def _take(self, message: dict[str, Any]) -> None:
        if "checked" in message:
            self._faults[message["checked"]] = message["fault"]
        elif "busy" in message:
            self.busy = message["busy"]
        elif "again" in message:
            if ticket := self._tickets.get(message["again"]):
                ticket.counts.asked_again[ticket.source] += 1
                ticket.trouble, ticket.is_refused = (
                    f"asked again: {message['reason']}",
                    message["is_refused"],
                )
        else:
            content = self._content(message)
            if ticket := self._tickets.get(message["answer"]):
                answer = Answer.decoded(
                    message["head"], pa.ipc.open_stream(content) if len(content) else ()
                )
                ticket.answer, self.patience_s = answer, self.options.timeout_s
                ticket.counts.answered(ticket.source, answer)
                where = f"{ticket.order.name}: source {ticket.alias} on {answer.work.node}"
                for level, line in answer.work.log:
                    _log.log(level, "%s: %s", where, escaped(line))
        while self.unused:
            self._send(**self.unused.popleft())

    def _content(self, message: dict[str, Any]) -> npt.NDArray[np.uint8]:
        """The bytes of an answer, where the other process wrote them; that one hears of it once they are unused."""
        name = message["memory"]
        if message["is_new"]:
            file = reduction.recv_handle(self._link)
            self._memory[name] = mmap.mmap(file, 0, prot=mmap.PROT_READ)
            os.close(file)
        content = np.frombuffer(self._memory[name], np.uint8, message["size"])
        weakref.finalize(content, self.unused.append, {"free": name}).atexit = False
        return content

    def _begin_again(self) -> None:
        """Another process in place of one that ended."""
        why = f"the process that speaks to it ended with status {_end(self._process)}"
        while why and not self._stopping.is_set():
            with self.changed:
                # Whoever waits hears it at once, for it may not last.
                self.away = f"Ray is away: {why}"
                self.changed.notify_all()
            _log.warning(self.away)
            if why := self._connect():
                self._stopping.wait(RETRY_S)
        _log.info("Ray is back: what is waited for is asked for again")


def _end(process: subprocess.Popen[bytes]) -> int:
    """Ends a process, with all that it started on this machine; its status."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def can_read(record: RunRecord, source_id: int, reader: Source) -> bool:
    """Whether readers may read a source: text, in files that can be read from the middle."""
    paths = record.shard_paths[source_id]
    return reader.content is Content.TEXT and not any(codec_of(path) for path in paths)


class ReaderCounts:
    """For whoever holds the lock of ``RayReaders``."""

    def __init__(self) -> None:
        self._nodes: dict[str, ReaderNode] = {}
        self._sources: dict[int, ReaderSource] = {}
        #: Requests that were asked again, by source.
        self.asked_again = Counter[int]()

    def asked(self, source: int, alias: str) -> None:
        self._sources.setdefault(source, ReaderSource(id=source, alias=alias))

    def answered(self, source: int, answer: Answer) -> None:
        name, work = answer.work.node, (answer.tokens, answer.work.cpu_s)
        name = name if name in self._nodes or len(self._nodes) < MOST_NODES else "others"
        self._nodes[name] = self._nodes.get(name, ReaderNode(name=name)).plus(*work)
        self._sources[source] = self._sources[source].plus(*work)

    def stats(
        self, present: Sequence[tuple[str, float]], tickets: Iterable[Any], away: str
    ) -> ReadersStats:
        """``present``: names and CPUs of the nodes that are there. ``tickets``: those of the run that are held."""
        ahead, waiting = Counter[int](), defaultdict[int, str](str)
        for ticket in tickets:
            if ticket.answer is not None:
                ahead[ticket.source] += ticket.answer.rows
            elif ticket.wait is not None and monotonic() - ticket.wait.since >= NAMED_AFTER_S:
                waiting[ticket.source] = ticket.wait.text()
        figures: Any = {
            "rows_ahead": ahead,
            "asked_again": self.asked_again,
            "waiting_for": waiting,
        }
        cpus = {
            of: sum(count for name, count in present if name == of)
            for of, _ in present[:MOST_NODES]
        }
        nodes = {name: ReaderNode(name=name) for name in cpus} | self._nodes
        return ReadersStats(
            away=away,
            nodes=[
                node.model_copy(update={"cpus": cpus.get(name, 0.0)})
                for name, node in nodes.items()
            ],
            sources=[
                source.model_copy(update={name: counts[key] for name, counts in figures.items()})
                for key, source in sorted(self._sources.items())
            ],
        )
