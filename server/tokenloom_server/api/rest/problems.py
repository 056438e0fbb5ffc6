"""How errors leave: ``{"error": name, "message": text}`` with a status, and nothing of our insides."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokenloom_server.errors import TokenloomError

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

#: The names of errors that belong to HTTP and not to ``errors``.
HTTP_ERRORS = {
    400: "BadRequest",
    403: "OriginRefused",
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "RequestTimeout",
    413: "BodyTooLarge",
    415: "ContentTypeRequired",
    421: "HostRefused",
    422: "InvalidRequest",
    500: "InternalError",
    503: "NotReady",
}


def add_error_handlers(app: FastAPI) -> None:
    """Every error that a route can meet, in one shape."""
    app.add_exception_handler(TokenloomError, _on_tokenloom_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_fault)


def problem(
    status: int, name: str, message: str, headers: dict[str, str] | None = None
) -> Response:
    # A message may quote a lone surrogate out of a request; it leaves as JSON's own escape of it.
    text = json.dumps({"error": name, "message": message}, ensure_ascii=False)
    retry = {"retry-after": "1"} if status == 503 else {}
    return Response(
        text.encode("utf-8", "backslashreplace"),
        status_code=status,
        media_type="application/json",
        headers=retry | (headers or {}),
    )


def _on_tokenloom_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TokenloomError)
    return problem(error.http_status, error.name, str(error))


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"no such path: {quoted(request.url.path)}; /openapi.json lists them"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{quoted(request.url.path)} answers to {allowed}, but this is {request.method}"
    return problem(
        error.status_code,
        HTTP_ERRORS.get(error.status_code, "BadRequest"),
        message,
        dict(error.headers or {}),
    )


def _on_fault(request: Request, error: Exception) -> Response:
    # Starlette raises the fault again after this answer, and uvicorn logs it with its trace.
    message = "the server met a fault of its own; its log has the details"
    return problem(500, HTTP_ERRORS[500], message, SECURITY_HEADERS)


def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem(422, HTTP_ERRORS[422], "\n".join(_fault_line(fault) for fault in error.errors()))


def _fault_line(fault: dict[str, Any]) -> str:
    """``body.sample_index: found "5"; expected a valid integer``."""
    field = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        return f"{field}: found nothing, but it is required"
    if fault["type"] == "extra_forbidden":
        return f"{field}: found a field that is not known here; /openapi.json lists those that are"
    expected = (
        str(fault["msg"])
        .removeprefix("Value error, ")
        .removeprefix("expected ")
        .removeprefix("Input should be ")
    )
    return f"{field}: found {quoted(fault['input'])}; expected {expected[:1].lower()}{expected[1:]}"


def quoted(value: object) -> str:
    """A value out of a request as JSON, cut to a length that fits a message."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}… ({len(text)} characters)"
