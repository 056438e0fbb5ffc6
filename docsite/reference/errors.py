"""The errors, by their classes: the first paragraph of a docstring is the meaning, the second the remedy."""

from __future__ import annotations

import inspect

import tokenloom
from tokenloom_proto.errors import TokenloomError

from docsite.reference.markdown import entries, prose


def errors() -> str:
    """A list of all errors that a server sends or a client raises. Raises ``LookupError`` for one without a remedy."""
    kinds = [getattr(tokenloom, name) for name in tokenloom.__all__]
    of_ours = [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, TokenloomError)]
    rows = (_row(kind) for kind in of_ours if kind is not TokenloomError)
    return entries(rows)


def _row(kind: type[TokenloomError]) -> tuple[str, str, str]:
    meaning, _, remedy = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
    if not remedy:
        raise LookupError(
            f"{kind.__name__}'s docstring lacks its second paragraph, which says what to do"
        )
    own = kind.__module__.startswith("tokenloom.")
    statuses = "raised by the client" if own else f"{kind.grpc_status}, {kind.http_status}"
    return f"`{kind.__name__}`", statuses, f"{prose(meaning)} *{prose(remedy)}*"
