"""What only points to data and stands in their place: the pointers of Git's tools, and links that lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path

#: A file of at most so many bytes may be nothing but a pointer.
POINTER_BYTES = 1024
#: By the tool that brings what they point to, such files, and targets of links.
_POINTERS = {
    "git lfs pull": re.compile(
        rb"version https://git-lfs\.github\.com/spec/v1\r?\n([\w.-]+ \S+\r?\n)*size \d+\s*"
    ),
    "git annex get": re.compile(rb"\S*/annex/objects/\S+\s*"),
}


def fault_of(content: bytes) -> str:
    """What to say of a file with such content where it is a pointer; or nothing."""
    bring = _brought_by(content)
    return bring and f"is no data, but a pointer to them in their place: {bring}"


def fault_at(path: Path) -> str:
    """What to say of what lies at a local path where it is a pointer, or a link that leads nowhere; or nothing, also
    where nothing is or it cannot be read."""
    try:
        if path.is_symlink() and not path.exists():
            target = str(path.readlink())
            bring = _brought_by(target.encode()) or "bring it there, or remove the link"
            return f"is a link to {target!r}, where no file is: {bring}"
        is_small = path.is_file() and path.stat().st_size <= POINTER_BYTES
        return fault_of(path.read_bytes()) if is_small else ""
    except OSError:
        return ""


def _brought_by(pointer: bytes) -> str:
    command = next((command for command, form in _POINTERS.items() if form.fullmatch(pointer)), "")
    return command and f"bring the data with {command!r} in the folder of the repository"
