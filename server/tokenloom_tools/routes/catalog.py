"""The routes of tools, for the entry points that serve REST."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenloom_server.api.rest.routes import Routes


def tool_routes() -> Sequence[Routes]:
    """Of each module beside this one; imports them."""
    from tokenloom_tools.routes import plan_picture, receipts, trace

    return [module.ROUTES for module in (plan_picture, receipts, trace)]
