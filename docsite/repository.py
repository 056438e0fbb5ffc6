"""Where the repository's files are on the site: pages of ``docs/``, pages beside them, and what only the host has."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import join, normpath, relpath

ROOT = Path(__file__).resolve().parents[1]
#: Of a file that is no page of the site.
HOST = "https://github.com/tokenloom/tokenloom"
#: By their paths from the repository's root: the pages that lie outside of ``docs/``, and what they are there.
OUTSIDE = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "THREAT_MODEL.md": "threat-model.md",
}
_SOURCES = {page: path for path, page in OUTSIDE.items()}
#: A block of code, a code span, or a link with its target.
_CODE_OR_LINK = re.compile(
    r"^ *```.*?^ *```$|`[^`\n]+`|\]\((?P<target>[^)\s]+)\)", re.DOTALL | re.MULTILINE
)


def links_of_site(text: str, page: str) -> str:
    """A page's text with the links that work on the site: those that leave ``docs/`` lead to the page beside it, or to
    the repository's host. ``page`` is its path on the site. A target that does not exist stays as it is."""
    source = _SOURCES.get(page, f"docs/{page}")

    def on_site(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or ":" in target or target.startswith("#"):
            return match[0]
        path, _, anchor = target.partition("#")
        linked = normpath(join(source.rpartition("/")[0], path))
        moved = OUTSIDE.get(
            linked, linked.removeprefix("docs/") if linked.startswith("docs/") else None
        )
        if moved is not None:
            place = relpath(moved, page.rpartition("/")[0] or ".")
        elif (ROOT / linked).exists():
            place = f"{HOST}/{'tree' if (ROOT / linked).is_dir() else 'blob'}/main/{linked}"
        else:
            return match[0]
        return f"]({place}{'#' if anchor else ''}{anchor})"

    return _CODE_OR_LINK.sub(on_site, text)
