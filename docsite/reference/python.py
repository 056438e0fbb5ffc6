"""The public names of the client, for mkdocstrings to say what their docstrings do."""

from __future__ import annotations

import inspect

import tokenloom

from docsite.repository import ROOT

_INTEGRATIONS = ROOT / "client" / "tokenloom" / "integrations"


def names() -> str:
    """The classes and functions of ``tokenloom`` but its errors, and the integrations."""
    public = (name for name in tokenloom.__all__ if not _is_error(getattr(tokenloom, name)))
    modules = sorted(
        path.stem for path in _INTEGRATIONS.glob("*.py") if not path.stem.startswith("_")
    )
    return "\n".join(
        (
            "## tokenloom\n",
            *(f"::: tokenloom.{name}\n" for name in public),
            "## Integrations\n",
            *(f"::: tokenloom.integrations.{module}\n" for module in modules),
        )
    )


def _is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)
