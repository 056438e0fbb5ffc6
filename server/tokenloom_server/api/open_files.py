"""How many files and connections this process may have open, and who gets them: the system counts both as one.

The limit is raised as far as the system allows. REST, health and the process itself have a fixed part; of the rest
gRPC's connections get one half, and the files of sources the other. So who only connects takes nothing that a source
needs.
"""

from __future__ import annotations

import logging
import resource

from tokenloom_server.api.grpc.server import MAX_CALLS
from tokenloom_server.api.rest.listener import MAX_CONNECTIONS, MAX_HEALTH_CONNECTIONS
from tokenloom_server.errors import ConfigError

_log = logging.getLogger(__name__)

#: Files and connections that a server asks to be allowed, at most.
MAX_OPEN_FILES = 2**17
#: With fewer a server does not start.
MIN_OPEN_FILES = 512
#: The ledger, the tokeniser's processes, listeners, libraries.
OWN = 64
#: Two where it is read, two where its past samples are made again.
FILES_PER_SOURCE = 4
FIXED = MAX_CONNECTIONS + MAX_HEALTH_CONNECTIONS + OWN


def raise_limit() -> int:
    """How many this process may have open from now on. Raises ``ConfigError`` where a server needs more."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (MAX_OPEN_FILES if each == resource.RLIM_INFINITY else each for each in allowed)
    limit = max(soft, min(hard, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, allowed[1]))
    require(limit)
    _log.info("open files: %d at most, of which gRPC may have %d", limit, grpc_connections(limit))
    return limit


def grpc_connections(limit: int) -> int:
    """At most so many at a time, of trainers and all others."""
    return min(MAX_CALLS, (limit - FIXED) // 2)


def require(limit: int, sources: int = 0) -> None:
    """Raises ``ConfigError`` where the files of so many sources do not fit in their part, or a server in the whole."""
    needed = max(MIN_OPEN_FILES, FIXED + 2 * FILES_PER_SOURCE * sources)
    if limit < needed:
        of_sources = f" of {sources} sources" if sources else ""
        raise ConfigError(
            f"this process may have {limit} files and connections open, and a server{of_sources} needs {needed}: raise "
            f"the limit (a shell: ulimit -n {needed}; systemd: LimitNOFILE={needed}; Docker: --ulimit nofile={needed})"
        )
