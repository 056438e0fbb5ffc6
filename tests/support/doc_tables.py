"""The tables of the docs that come from the code: ``make tables`` writes them, and a test says which is stale."""

from __future__ import annotations

from collections.abc import Iterator

from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.app import create_app
from tokenloom_server.api.rest.routes import Backend
from tokenloom_tools.cli.serve import tool_routes

from docsite.reference import tables
from docsite.reference.markdown import entries, table
from tests.support import exchange
from tests.support.memory_service import MemoryService

TOKENS = {
    Scope.OPEN: "none",
    Scope.READ: "reading",
    Scope.TRAIN: "training",
    Scope.CONTROL: "control",
    Scope.ADMIN: "admin",
}


def routes() -> str:
    app = create_app(Backend(MemoryService(), "0"), tool_routes())

    def rows() -> Iterator[tuple[str, str, str]]:
        for path, operations in app.openapi()["paths"].items():
            for method, operation in operations.items():
                query = [
                    f"`{field['name']}`"
                    for field in operation.get("parameters", ())
                    if field["in"] == "query"
                ]
                token = TOKENS[app.scopes[method.upper(), path]]
                remark = "; ".join(filter(None, (token, ", ".join(query))))
                yield f"`{method.upper()} {path}`", remark, operation["summary"]

    return entries(rows())


def worked_exchange() -> str:
    return table(("message", "field", "bytes", "value"), exchange.table())


#: By their names.
TABLES = {**tables.TABLES, "routes": routes, "worked exchange": worked_exchange}


if __name__ == "__main__":
    for page in tables.pages():
        page.write_text(tables.written(page.read_text(encoding="utf-8"), TABLES), encoding="utf-8")
