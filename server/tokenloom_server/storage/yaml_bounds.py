"""Bounds of YAML that anybody may have written, checked before any of it is built: libyaml builds what it reads by
recursion, and an alias, or a number of many digits, is far larger than its text."""

from __future__ import annotations

import re

import yaml

#: Of a document; what an alias stands for counts each time.
MAX_VALUES = 200_000
MAX_DEPTH = 100
#: Of a number: Python itself converts at most 4,300 digits.
MAX_DIGITS = 1000

_NUMBER = re.compile(r"[-+]?[0-9._][0-9a-fx._:]*")


def check_yaml(text: str) -> None:
    """Raises ``ValueError`` naming the line where a document passes one of the bounds, and ``yaml.YAMLError`` for what
    is no YAML."""
    try:
        _check_events(text)
    except yaml.MarkedYAMLError as error:
        # libyaml 0.2.6 and later has a bound of its own, and meets it first where it reads far ahead for a key.
        if error.problem != "exceeded maximum nesting depth" or error.problem_mark is None:
            raise
        raise ValueError(_too_deep(error.problem_mark.line + 1)) from None


def _too_deep(line: int) -> str:
    return f"line {line}: nested deeper than {MAX_DEPTH} levels"


def _check_events(text: str) -> None:
    values = 0
    open_collections: list[tuple[str | None, int]] = []
    sizes: dict[str | None, int] = {}
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        values += isinstance(event, yaml.NodeEvent)
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((event.anchor, values))
            sizes[event.anchor] = MAX_VALUES  # within itself it has no end
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, begin = open_collections.pop()
            sizes[anchor] = values - begin
        elif isinstance(event, yaml.AliasEvent):
            values += sizes.get(event.anchor, 0)
        line = event.start_mark.line + 1 if event.start_mark else 0
        if values > MAX_VALUES:
            raise ValueError(
                f"line {line}: more than {MAX_VALUES:,} values, with those of each alias"
            )
        if len(open_collections) > MAX_DEPTH:
            raise ValueError(_too_deep(line))
        if (
            isinstance(event, yaml.ScalarEvent)
            and len(event.value) > MAX_DIGITS
            and _NUMBER.fullmatch(event.value)
        ):
            raise ValueError(
                f"line {line}: a number of {len(event.value):,} digits; expected at most {MAX_DIGITS:,}"
            )
