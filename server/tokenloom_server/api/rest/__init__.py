"""REST: stats, snapshots and restore of the runs of this server, health, metrics and the page.

A request passes, in this order:

1. ``guard``      before any route: which host was asked and from where, token, content type, size, strict JSON
2. ``resources``  a module per resource: its routes, the scope that each asks for, its bodies, what it calls
3. the run        ``ServedRun``; it may block, so routes that call it run in worker threads
4. ``problems``   every error leaves as ``{"error": name, "message": …}`` with its status, never as a trace

``app`` puts them together; ``server`` holds the socket and imports the rest when the first request comes; ``uvicorn``
serves on that socket.
"""
