"""What of a source's rows is read: which of them pass, what text is made of their columns, what becomes of bad ones.

Only what is written here can be said in a mixture file: comparisons with constants, texts with gaps, or that the
tokeniser's chat template is meant. There is no expression to evaluate, and so no code of a user's on the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

Operator: TypeAlias = Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"]
Constant: TypeAlias = str | int | float | bool

_OPERATOR = re.compile(r"==|!=|<=|>=|<|>|(?<=\s)(?:not\s+in|in)(?=[\s\[])")
#: What is more than plain text in a template: a doubled brace, or a column in braces.
_GAPS = re.compile(r"(\{\{|\}\}|\{[^{}]+\})")
#: The template that is the tokeniser's own, for conversations.
CHAT = "chat"
#: How a conversation may lie in columns: those that are read before the source's own, with their names.
CHAT_FORMATS: Mapping[str, tuple[str, ...]] = {
    "messages": (),
    "sharegpt": (),
    "alpaca": ("instruction", "input"),
    "prompt_completion": ("prompt",),
}
_EXAMPLES = """such as 'score >= 0.5', 'lang == "en"' or 'lang in ["en", "de"]'"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A column compared with a constant, or looked up in a list of them. A null passes none."""

    column: str
    operator: Operator
    values: tuple[Constant, ...]
    """One, but for ``in`` and ``not in``. All of them are text, or all numbers, or all true or false."""

    @classmethod
    def parse(cls, text: str) -> Comparison:
        """Reads ``COLUMN OPERATOR VALUE``; the value is JSON. Raises ``ValueError``."""
        match = _OPERATOR.search(text)
        column, written = (
            ("", "")
            if match is None
            else (text[: match.start()].strip(), text[match.end() :].strip())
        )
        if match is None or not column:
            raise ValueError(
                f"{text!r} is no comparison; expected COLUMN OPERATOR VALUE, {_EXAMPLES}"
            )
        operator = cast("Operator", " ".join(match[0].split()))
        try:
            value = json.loads(written, parse_constant=_refuse_constant)
        except ValueError:
            raise ValueError(
                f"{text!r}: {written!r} is no value; expected a number, true, false, a text in double quotes, "
                f"or a list of those, {_EXAMPLES}"
            ) from None
        if isinstance(value, list) is not operator.endswith("in"):
            expected = (
                "a list"
                if operator.endswith("in")
                else "one value (a list is for 'in' and 'not in')"
            )
            raise ValueError(f"{text!r}: found {written} after {operator!r}, expected {expected}")
        values = tuple(
            _constant(text, each) for each in (value if isinstance(value, list) else [value])
        )
        if not values or len({_kind(each) for each in values}) > 1:
            raise ValueError(
                f"{text!r}: expected a list of numbers, or of texts, with something in it"
            )
        if isinstance(values[0], bool) and operator[0] in "<>":
            raise ValueError(f"{text!r}: true and false have no order; expected == or !=")
        return cls(column, operator, values)

    @property
    def kind(self) -> Literal["text", "number", "truth"]:
        """What the constants are, and so what the column has to hold."""
        return _kind(self.values[0])

    def __str__(self) -> str:
        values = [json.dumps(value, ensure_ascii=False) for value in self.values]
        value = f"[{', '.join(values)}]" if self.operator.endswith("in") else values[0]
        return f"{self.column} {self.operator} {value}"


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _constant(text: str, value: object) -> Constant:
    if not isinstance(value, str | int | float):
        raise ValueError(
            f"{text!r}: {json.dumps(value)} cannot be compared with; expected a number, true, false or text"
        )
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)  # 1.0 and 1 are the same comparison
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{text!r}: {value} is beyond 64 bits")
    return value


def _kind(value: Constant) -> Literal["text", "number", "truth"]:
    if isinstance(value, bool):
        return "truth"
    return "text" if isinstance(value, str) else "number"


@dataclass(frozen=True, slots=True)
class Template:
    """A text with gaps: ``texts[0]``, the value of ``columns[0]``, ``texts[1]``, and so on up to the last text."""

    texts: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def of_lines(cls, *columns: str) -> Template:
        """A line of each column: of a conversation's messages, and of its tools, if it has any."""
        return cls(("", *["\n"] * (len(columns) - 1), ""), columns)

    def of_parts(self) -> Template:
        """Of columns that are JSON, the list of its texts and their values, one after the other."""
        texts = [f",{json.dumps(text)}," for text in self.texts]
        texts[0], texts[-1] = f"[{texts[0][1:]}", f"{texts[-1][:-1]}]"
        return Template(tuple(texts), self.columns)

    @classmethod
    def parse(cls, text: str) -> Template:
        """Reads ``{column}`` as a gap, and doubled braces as one. Raises ``ValueError``."""
        texts, columns, position = [""], [], 1
        for part in _GAPS.split(text):
            if part in ("{{", "}}"):
                texts[-1] += part[0]
            elif part.startswith("{") and part.endswith("}"):
                columns.append(part[1:-1])
                texts.append("")
            elif brace := re.search("[{}]", part):
                fault = (
                    "begins no {column}; write {{"
                    if brace[0] == "{"
                    else "ends no {column}; write }}"
                )
                raise ValueError(
                    f"the brace at character {position + brace.start()} of {text!r} {fault} for a brace itself"
                )
            else:
                texts[-1] += part
            position += len(part)
        if not columns:
            raise ValueError(
                f"{text!r} names no column; expected a text such as '{{title}}\\n\\n{{text}}'"
            )
        return cls(tuple(texts), tuple(columns))


@dataclass(frozen=True, slots=True)
class RowRules:
    """How the rows of one source are read."""

    filter: tuple[Comparison, ...] = ()
    """All have to hold."""
    template: Template | None = None
    as_json: bool = False
    """Of a template's columns, values that are no text become their JSON."""
    quoted: bool = False
    """Of these, text becomes its JSON, too, and a null is one."""
    is_mask: bool = False
    """The column is a loss mask: lists of true and false are as good as such of 1 and 0."""
    skip_bad: bool = False
    """Rows that do not decode are marked among the others (``Rows.bad``); else reading ends at the first."""
    skip_blank: bool = True
    """Blank lines of JSON lines are marked as filtered; else they are bad."""
    most_bytes: int = 256 << 20
    """Of a row. Reading ends at a longer one, bad rows skipped or not: it is no row before it is there."""

    @property
    def plain(self) -> bool:
        """Whether the source's own column is all that is read."""
        return not self.filter and self.template is None

    @property
    def too_long(self) -> str:
        """The end of an error about a row that is."""
        return (
            f"more than the {self.most_bytes >> 20} MiB that max_row_mib allows: cut it into several rows, or set "
            "max_row_mib higher"
        )

    def reads(self, column: str) -> tuple[str, ...]:
        """All columns that are read of a source whose own is ``column``, each once."""
        return tuple(dict.fromkeys((column, *self.text_columns, *self.filter_columns)))

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Those that the template names, each once."""
        return () if self.template is None else tuple(dict.fromkeys(self.template.columns))

    @property
    def filter_columns(self) -> tuple[str, ...]:
        """Those that are compared, each once."""
        return tuple(dict.fromkeys(comparison.column for comparison in self.filter))


#: The source's own column, every row of it, up to the first that is bad.
PLAIN = RowRules()
