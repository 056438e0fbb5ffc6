"""The gRPC side: the only place that knows wire types."""

from tokenloom.connection.joining import Opening, Request, Source, sources_at
from tokenloom.connection.reporting import Report
from tokenloom.connection.stream import Connection

__all__ = ["Connection", "Opening", "Report", "Request", "Source", "sources_at"]
