"""Why the system refuses a file: where rights are missing, at which part of its path, to whom, and what gives them."""

from __future__ import annotations

import os
from pathlib import Path


def reason(error: Exception, *, private: bool = False) -> str:
    """What the system says. ``private``: the file is for its owner alone, so that others get no right to it."""
    said: str = getattr(error, "strerror", None) or str(error)
    if not isinstance(error, PermissionError) or not isinstance(error.filename, (str, os.PathLike)):
        return said
    path, user = Path(os.path.realpath(error.filename)), os.geteuid()
    wanted = [(folder, os.X_OK, "enter") for folder in reversed(path.parents)]
    wanted += [
        (path, os.R_OK, "read"),
        (path, os.W_OK, "write to"),
        (path.parent, os.W_OK, "write to"),
    ]
    for place, right, verb in wanted:
        if os.access(place, right) or not os.path.lexists(place):
            continue
        # All above it may be entered, and no part of it is a link: so it can be looked at.
        status, remedy = place.stat(), f"chmod a+rX {place}"
        if right == os.W_OK or (private and place == path):
            remedy = f"chown {user} {place} && chmod u+rwX {place}"  # others get no such right
        return (
            f"{said}: user {user} may not {verb} {place}, which is user {status.st_uid}'s, mode "
            f"{status.st_mode & 0o7777:04o}: {remedy}, or on the host what a container has mounted there"
        )
    return said
