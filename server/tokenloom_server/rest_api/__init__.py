"""REST: figures, snapshots and restore of the runs of this server, health, metrics and the page.

A request passes, in this order:

1. ``guard``     before any route: which host was asked and from where, content type, size, strict JSON
2. ``app``       FastAPI: path and body against ``models``, in an order and shape that OpenAPI documents
3. the service   ``stats.RunService``; it may block, so routes that call it run in worker threads
4. ``problems``  every error leaves as ``{"error": name, "message": …}`` with its status, never as a trace

``server`` runs all of it on a socket, in a thread of this process.
"""

from __future__ import annotations

from tokenloom_server.rest_api.app import create_app
from tokenloom_server.rest_api.server import RestServer, serve_rest

__all__ = ["RestServer", "create_app", "serve_rest"]
