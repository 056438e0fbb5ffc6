"""The wire contract with its comments, message by message."""

from __future__ import annotations

import re
from collections.abc import Iterator

from docsite.repository import ROOT

CONTRACT = ROOT / "proto" / "tokenloom" / "v2" / "dataloader.proto"
#: What stands at the left margin: the comment before it, its kind and name, and all to its closing brace.
_BLOCK = re.compile(
    r"^(?P<comment>(?://[^\n]*\n)*)(?P<text>(?:service|message|enum) (?P<name>\w+) \{(?:\}|.*?^\}))",
    re.M | re.S,
)


def contract() -> str:
    """A section for each service, message and enumeration, in the contract's order."""
    return "\n".join(_sections(CONTRACT.read_text(encoding="utf-8")))


def _sections(text: str) -> Iterator[str]:
    yield f"```protobuf\n{_BLOCK.split(text)[0].strip()}\n```\n"
    for block in _BLOCK.finditer(text):
        yield f"### {block['name']}\n\n```protobuf\n{block['comment']}{block['text']}\n```\n"
