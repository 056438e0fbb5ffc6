"""REST: figures, snapshots and restore of the runs of this server, health, metrics and the page.

A request passes, in this order:

1. ``guard``     before any route: which host was asked and from where, content type, size, strict JSON
2. ``app``       FastAPI: path and body against ``models``, in an order and shape that OpenAPI documents
3. the service   ``stats.RunService``; it may block, so routes that call it run in worker threads
4. ``problems``  every error leaves as ``{"error": name, "message": …}`` with its status, never as a trace

``server`` holds the socket and imports the rest when somebody asks; ``http`` is uvicorn on that socket.
"""
