"""The tables of the docs that come from the code: ``make tables`` writes them, and a test says which is stale."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tokenloom_server.api import metric_tables
from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.app import create_app
from tokenloom_server.api.rest.routes import Backend

from tests.support import exchange
from tests.support.memory_service import MemoryService

DOCS = Path(__file__).resolve().parents[2] / "docs"
TOKENS = {
    Scope.OPEN: "none",
    Scope.READ: "reading",
    Scope.TRAIN: "training",
    Scope.CONTROL: "control",
    Scope.ADMIN: "admin",
}


def _table(*rows: Iterable[str]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def routes() -> str:
    app = create_app(Backend(MemoryService(), "0"))

    def rows() -> Iterator[tuple[str, ...]]:
        for path, operations in app.openapi()["paths"].items():
            for method, operation in operations.items():
                query = [f"`{field['name']}`" for field in operation.get("parameters", ()) if field["in"] == "query"]
                token = TOKENS[app.resource_routes.scopes[method.upper(), path]]
                yield f"`{method.upper()} {path}`", token, ", ".join(query), operation["summary"]

    return _table(("route", "token", "query", "what it is"), ("---",) * 4, *rows())


def metric_names() -> str:
    rows = (
        (f"`{metric.name}`", ", ".join(f"`{label}`" for label in (*labels, *metric.labels)), metric.help)
        for labels, level in metric_tables.TABLES
        for metric in level
    )
    return _table(("metric", "labels", "meaning"), ("---",) * 3, *rows)


def worked_exchange() -> str:
    return _table(("message", "field", "bytes", "value"), ("---",) * 4, *exchange.table())


#: The table of each page, the only one there.
TABLES: dict[str, Callable[[], str]] = {
    "rest.md": routes,
    "metrics.md": metric_names,
    "protocol.md": worked_exchange,
}


def written(page: str, table: str) -> str:
    """The page with this table in place of the one that it has."""
    return re.sub(r"(^\|.*\n)+", lambda _: table, page, count=1, flags=re.MULTILINE)


if __name__ == "__main__":
    for name, make in TABLES.items():
        file = DOCS / name
        file.write_text(written(file.read_text(encoding="utf-8"), make()), encoding="utf-8")
