"""Why the system refuses a file: where rights are missing, at which part of its path, to whom, and what gives them."""

from __future__ import annotations

import os
from pathlib import Path


def reason(error: Exception, *, private: bool = False) -> str:
    """What the system says. ``private``: the file is for its owner alone, so that others get no right to it."""
    said: str = getattr(error, "strerror", None) or str(error)
    if not isinstance(error, PermissionError) or not isinstance(error.filename, (str, os.PathLike)):
        return said
    path = Path(os.path.realpath(error.filename))
    wanted = [(folder, os.X_OK, "enter") for folder in reversed(path.parents)]
    wanted += [(path, os.R_OK, "read"), (path, os.W_OK, "write to"), (path.parent, os.W_OK, "write to")]
    user = os.geteuid()
    for place, right, verb in wanted:
        # Links are resolved, and it lies in folders that may be entered: so it is there if it can be looked at.
        if _may(place, right) or not os.path.lexists(place):
            continue
        status = place.stat()
        is_member = status.st_gid in (os.getegid(), *os.getgroups())
        who = "u" if status.st_uid == user else "g" if is_member else "o"
        remedy = f"chmod {who}+{'w' if right == os.W_OK else 'rX'} {place}"
        if who != "u" and (right == os.W_OK or (private and place == path)):
            remedy = f"chown {user} {place}"  # nobody else is to write there
        return (
            f"{said}: user {user} may not {verb} {place}, which is user {status.st_uid}'s, mode "
            f"{status.st_mode & 0o7777:04o}: {remedy}, or on the host what a container has mounted there"
        )
    return said


def _may(path: Path, right: int) -> bool:
    return os.access(path, right, effective_ids=os.access in os.supports_effective_ids)
