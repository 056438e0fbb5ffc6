"""That a reader without a network sees all of the built site: what its pages and styles would load from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

#: By an element: the attributes whose address a browser loads by itself. A link (``a``) is the reader's to follow.
_LOADED = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "image": ("href", "xlink:href"),
    "img": ("src", "srcset"),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "use": ("href", "xlink:href"),
    "video": ("poster", "src"),
}
_ELSEWHERE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
_STYLE = re.compile(
    r"""(?:url\(|@import)\s*["']?(?P<address>(?:https?:)?//[^"')\s]+)""", re.IGNORECASE
)


def loads_from_elsewhere(site: Path) -> Iterator[str]:
    """Each address on another host that a page, a style or a picture of the site loads, after the file's name."""
    for file in sorted(site.rglob("*")):
        if file.suffix in (".html", ".svg", ".css"):
            text = file.read_text(encoding="utf-8")
            loads = _Loads()
            if file.suffix != ".css":
                loads.feed(text)
            addresses = [*loads.addresses, *(match["address"] for match in _STYLE.finditer(text))]
            yield from (f"{file.relative_to(site)}: {address}" for address in addresses)


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        is_canonical = ("rel", "canonical") in attrs
        for name, value in attrs:
            if (
                name in _LOADED.get(tag, ())
                and value
                and _ELSEWHERE.match(value)
                and not is_canonical
            ):
                self.addresses.append(value)
