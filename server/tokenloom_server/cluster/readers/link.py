"""The server's side of its readers: what is asked of them, who waits, and the process beside it that speaks to Ray."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from tokenloom_server.cluster.connection import Needs
from tokenloom_server.cluster.description import describe, verify_file
from tokenloom_server.cluster.readers import messages
from tokenloom_server.cluster.readers.counts import ReaderCounts
from tokenloom_server.cluster.readers.reading import read
from tokenloom_server.cluster.readers.rows import ANSWER_BYTES, Answer, Request
from tokenloom_server.cluster.readers.source import RowsOfReaders
from tokenloom_server.core.control_characters import escaped
from tokenloom_server.errors import ConfigError, SourceError, StorageError, TokenloomError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.readers_stats import ReadersStats
from tokenloom_server.order.record import RunRecord
from tokenloom_server.order.resources import RunResources
from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.endings import codec_of
from tokenloom_server.storage.io_stats import Wait

_log = logging.getLogger(__name__)

#: Requests that are asked for each CPU of the readers: one that is worked on, and one that comes next.
REQUESTS_PER_CPU = 2
#: Bytes of a node's object store at least, so that nothing is put on its disk; of a local cluster for all its CPUs.
STORE_BYTES = 100_000_000
#: Seconds between tries to reach Ray again.
RETRY_S = 2.0
#: Seconds that a start may take, and the checks of a run's files on all nodes.
START_S = 120.0
#: What of the environment readers need not know: tokens, and where the ledger is.
PRIVATE = "TOKENLOOM_"


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

    def __init__(self, readers: RayReaders, order: PipelineFactory, number: int, request: Request) -> None:
        self.number = number
        self.request = request
        self.source = request.source
        self.alias = order.config.sources[request.source].name
        self.run, self.counts = order.name, readers.counts(order.resources)
        self.answer: Answer | None = None
        self.wait: Wait | None = None
        self.trouble = ""
        #: Whether a node's files or versions are not those of the server, as far as that one knows.
        self.is_refused = False
        self._order = order
        self._readers = readers

    def __del__(self) -> None:
        if self.answer is None:
            self._readers.forget(self.number)

    def is_answered(self) -> bool:
        return self.answer is not None

    def take(self) -> Answer:
        """See ``Ticket``."""
        first = self.request.ranges[0]
        path = self._order.record.shard_paths[self.source][first.shard]
        name = f"rows from {first.first_row} on of {self.alias}: {path}"
        stats = self._order.resources.io_stats
        with stats.waiting(name, reason="readers") as wait:
            self.wait = wait
            until = monotonic() + self._readers.patience_s
            while (answer := self._readers.wait(self, wait, until, lambda: stats.stopped)) is None and self.is_refused:
                self.is_refused = False
                try:
                    for shard in {each.shard for each in self.request.ranges}:
                        verify_file(self._order, self.request.source, shard)
                except TokenloomError:
                    return read(self._order, self.request)  # with the error of a run without readers
        if answer is not None:
            return answer
        why = wait.trouble or "all of their CPUs are busy, or have stopped"
        limit = self._readers.options.timeout_s
        if not self._readers.options.falls_back:
            raise SourceError(f"{name}: no reader has given them for {limit:g} s: {why}; look at the cluster")
        if self._readers.patience_s:
            _log.warning(
                "%s: no reader has given them for %g s: %s; until one answers, the server reads", name, limit, why
            )
        self._readers.patience_s = 0.0
        return read(self._order, self.request)


class RayReaders:
    """Implements ``Readers`` and ``Asked``. Thread-safe."""

    def __init__(self, options: ReaderOptions) -> None:
        """Raises ``ConfigError`` where Ray cannot be reached, or has too little."""
        self.options = options
        #: For how long an answer is waited for: no more, once one was waited for in vain, until there is one again.
        self.patience_s = options.timeout_s
        #: The nodes' names and CPUs.
        self.nodes: list[tuple[str, float]] = []
        #: Why Ray is away; empty where it is not.
        self.away = ""
        #: What is said where no CPU is free.
        self.busy = ""
        self._counts: weakref.WeakKeyDictionary[RunResources, ReaderCounts] = weakref.WeakKeyDictionary()
        self._changed = threading.Condition()
        self._tickets: weakref.WeakValueDictionary[int, _Ticket] = weakref.WeakValueDictionary()
        self._count = 0
        #: Texts, and the sources of each that are to be checked still.
        self._described: dict[str, tuple[str, Sequence[int]]] = {}
        self._digests: weakref.WeakKeyDictionary[RunRecord, str] = weakref.WeakKeyDictionary()
        #: Of descriptions that were checked, why nodes cannot read what they describe.
        self._faults: dict[str, list[str]] = {}
        self._stopping = False
        self._process, self._socket = self._start()
        head = self._receive_up(self._socket)
        if "up" not in head:
            self.close()
            raise ConfigError(head.get("refused", "the process that speaks to Ray ended; the log above says why"))
        self.nodes = head["up"]
        threading.Thread(target=self._listen, name="readers", daemon=True).start()

    # --- what others ask -----------------------------------------------------------------------------

    def source(
        self, record: RunRecord, resources: RunResources, source_id: int, reader: Source
    ) -> RowsOfReaders | None:
        """See ``Readers``: ids are cheaper to read than to send, and compressed files are read from their heads."""
        if not can_read(record, source_id, reader):
            return None
        order = PipelineFactory(record, resources)
        return RowsOfReaders(order, self._digest(order), source_id, reader, self)

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
        digest = self._digest(order, sources)
        with self._changed:
            self._changed.wait_for(lambda: digest in self._faults, START_S)
            faults = self._faults.get(digest, [f"no node has answered within {START_S:g} s"])
        if faults:
            raise ConfigError(f"--readers: {faults[0]}")

    def ask(self, order: PipelineFactory, request: Request) -> _Ticket:
        """See ``Asked``."""
        with self._changed:
            self._count += 1
            ticket = _Ticket(self, order, self._count, request)
            self._tickets[ticket.number] = ticket
            ticket.counts.asked(ticket.source, ticket.alias)
        self._send({"number": ticket.number}, request.to_json().encode())
        return ticket

    def stats(self, resources: RunResources) -> ReadersStats:
        """See ``Readers``."""
        with self._changed:
            counts = self.counts(resources)
            tickets = [ticket for ticket in self._tickets.values() if ticket.counts is counts]
            return counts.stats(self.nodes, tickets, self.away)

    def counts(self, resources: RunResources) -> ReaderCounts:
        """What was counted of a run. For whoever holds the lock."""
        return self._counts.setdefault(resources, ReaderCounts())

    def has_room(self) -> bool:
        """See ``Asked``."""
        most = REQUESTS_PER_CPU * max(1.0, sum(cpus for _, cpus in self.nodes) / self.options.needs.cpus)
        with self._changed:
            return sum(ticket.answer is None for ticket in self._tickets.values()) < most

    def forget(self, number: int) -> None:
        """Nobody waits for a request any more."""
        self._send({"forget": number})

    def wait(self, ticket: _Ticket, wait: Any, until: float, is_stopping: Any) -> Answer | None:
        """The answer; None where there is none in time, or a node refuses. Raises ``StorageError`` where the server
        stops."""
        with self._changed:
            while ticket.answer is None and not ticket.is_refused and (left := until - monotonic()) > 0:
                wait.trouble = self.away or "; ".join(filter(None, [ticket.trouble, self.busy]))
                self._changed.wait(min(1.0, left))
                if is_stopping():
                    raise StorageError(f"{wait.name} are no longer waited for: the server stops")
            return ticket.answer

    def close(self) -> None:
        """Ends the process beside the server, and with it what was begun on this machine."""
        self._stopping = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # to close it is not enough, as long as a thread listens
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        _end(self._process)

    # --- the process beside --------------------------------------------------------------------------

    def _digest(self, order: PipelineFactory, sources: Sequence[int] = ()) -> str:
        with self._changed:
            known = self._digests.get(order.record)
        if known is not None and not sources:
            return known
        text = describe(order)
        digest = hashlib.sha256(text.encode()).hexdigest()
        with self._changed:
            self._described[digest] = text, sources
            self._faults.pop(digest, None)
        self._send({"order": digest, "sources": sources}, text.encode())
        with self._changed:
            self._digests[order.record] = digest  # from now on requests may name it
        return digest

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = messages.pair()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
        command = [sys.executable, "-m", "tokenloom_server.cluster.readers.child", str(theirs.fileno())]
        # In a session of its own: Ctrl-C is for the server, which ends it in order.
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        options = self.options
        begin = {
            "address": options.address,
            "local_cpus": options.local_cpus,
            "needs": asdict(options.needs),
            "store_bytes": max(STORE_BYTES, 2 * REQUESTS_PER_CPU * ANSWER_BYTES * (options.local_cpus or 1)),
            "late_s": options.late_s,
        }
        messages.send(ours, begin)
        return process, ours

    def _receive_up(self, of: socket.socket) -> dict[str, Any]:
        of.settimeout(START_S)
        try:
            message = messages.receive(of)
        except OSError:
            message = None
        of.settimeout(None)
        return message.head if message is not None else {}

    def _send(self, head: dict[str, Any], content: bytes | None = None) -> None:
        # Where that fails, the thread that listens hears of it, too, and asks again for everything.
        with suppress(OSError):
            messages.send(self._socket, head, content)

    def _listen(self) -> None:
        while not self._stopping:
            try:
                message = messages.receive(self._socket)
            except OSError:
                message = None
            if message is not None:
                self._take(message)
            elif not self._stopping:
                self._begin_again()

    def _take(self, message: messages.Message) -> None:
        head, content = message
        with self._changed:
            if "checked" in head:
                self._faults[head["checked"]] = head["faults"]
                self._described[head["checked"]] = self._described[head["checked"]][0], ()
            elif "busy" in head:
                self.busy = head["busy"]
            elif "again" in head:
                if ticket := self._tickets.get(head["again"]):
                    ticket.counts.asked_again[ticket.source] += 1
                    ticket.trouble, ticket.is_refused = f"asked again: {head['reason']}", head["is_refused"]
            elif ticket := self._tickets.get(head["number"]):
                ticket.answer, self.patience_s = (answer := Answer.from_bytes(content)), self.options.timeout_s
                ticket.counts.answered(ticket.source, answer)
                for level, line in answer.work.log:
                    _log.log(
                        level, "%s: source %s on %s: %s", ticket.run, ticket.alias, answer.work.node, escaped(line)
                    )
            self._changed.notify_all()

    def _is_away(self, why: str) -> None:
        """Whoever waits hears it at once, for it may not last."""
        with self._changed:
            self.away = f"Ray is away: {why}"
            self._changed.notify_all()
        _log.warning(self.away)

    def _begin_again(self) -> None:
        """Another process in place of one that ended; everything that is waited for is asked for again."""
        self._process.wait()
        status = _end(self._process)
        self._socket.close()
        self._is_away(f"the process that speaks to it ended with status {status}")
        while not self._stopping:
            process, ours = self._start()
            head = self._receive_up(ours)
            if "up" in head:
                break
            _end(process)
            ours.close()
            self._is_away(head.get("refused", f"no answer within {START_S:g} s"))
            threading.Event().wait(RETRY_S)
        else:
            return
        with self._changed:
            self._process, self._socket, self.nodes, self.away, self.busy = process, ours, head["up"], "", ""
            described = list(self._described.items())
            waiting = [ticket for ticket in self._tickets.values() if ticket.answer is None]
            for ticket in waiting:
                ticket.counts.asked_again[ticket.source] += 1
        for digest, (text, sources) in described:
            self._send({"order": digest, "sources": sources}, text.encode())
        for ticket in waiting:
            self._send({"number": ticket.number}, ticket.request.to_json().encode())
        _log.info("Ray is back: %d requests are asked for again", len(waiting))


def _end(process: subprocess.Popen[bytes]) -> int:
    """Ends a process, with all that it started on this machine; its status."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def can_read(record: RunRecord, source_id: int, reader: Source) -> bool:
    """Whether readers may read a source: text, in files that can be read from the middle."""
    paths = record.shard_paths[source_id]
    return reader.content is Content.TEXT and not any(codec_of(path) for path in paths)
