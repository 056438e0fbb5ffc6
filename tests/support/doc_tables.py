"""The tables of the docs that come from the code: ``make tables`` writes them, and a test says which is stale.

They stand between ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenloom_server.api import metric_tables
from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.app import create_app
from tokenloom_server.api.rest.routes import Backend

from docsite.reference import commands, errors, mixture_file
from docsite.reference.markdown import table
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


def routes() -> str:
    app = create_app(Backend(MemoryService(), "0"))

    def rows() -> Iterator[tuple[str, ...]]:
        for path, operations in app.openapi()["paths"].items():
            for method, operation in operations.items():
                query = [f"`{field['name']}`" for field in operation.get("parameters", ()) if field["in"] == "query"]
                token = TOKENS[app.resource_routes.scopes[method.upper(), path]]
                yield f"`{method.upper()} {path}`", token, ", ".join(query), operation["summary"]

    return table(("route", "token", "query", "what it is"), rows())


def metric_names() -> str:
    rows = (
        (f"`{metric.name}`", ", ".join(f"`{label}`" for label in (*labels, *metric.labels)), metric.help)
        for labels, level in metric_tables.TABLES
        for metric in level
    )
    return table(("metric", "labels", "meaning"), rows)


def worked_exchange() -> str:
    return table(("message", "field", "bytes", "value"), exchange.table())


#: By their names.
TABLES: dict[str, Callable[[], str]] = {
    "commands": commands.overview,
    "errors": errors.errors,
    "metrics": metric_names,
    "routes": routes,
    "worked exchange": worked_exchange,
    **mixture_file.tables(),
}
_PLACE = re.compile(r"^<!-- table: (?P<name>[\w ]+) -->\n.*?^<!-- end -->\n", re.DOTALL | re.MULTILINE)


def pages() -> dict[Path, list[str]]:
    """The pages that have tables, with the tables' names."""
    names = {page: _PLACE.findall(page.read_text(encoding="utf-8")) for page in sorted(DOCS.rglob("*.md"))}
    return {page: named for page, named in names.items() if named}


def written(page: str) -> str:
    """The page with its tables as they are to be."""
    return _PLACE.sub(lambda place: f"<!-- table: {place['name']} -->\n{TABLES[place['name']]()}<!-- end -->\n", page)


if __name__ == "__main__":
    for page in pages():
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
