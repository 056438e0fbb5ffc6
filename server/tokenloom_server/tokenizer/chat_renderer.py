"""Renders conversations by a chat template: Jinja in a sandbox, with blocks that say where the assistant speaks.

What a template may use is what it may in transformers, but for what would make other tokens on another day:
``strftime_now``, random choices and ``lipsum`` are not there. At work in the processes of ``workers.chats``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources import arrays

Spans: TypeAlias = list[tuple[int, int]]
"""From which character to before which the assistant speaks, each time."""

#: The name under which a rendering finds what it has written so far.
_WRITTEN = "tokenloom_written"

#: Names of a message's reasoning; templates read the first two, and data has any of them.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Written:
    """What a rendering has written so far: how many characters, and where the assistant spoke among them."""

    def __init__(self) -> None:
        self.characters = 0
        self.spans: Spans = []


class _Message(dict[str, Any]):
    """A message that notes the keys for which a template asks it, and whether it has each."""

    def __init__(self, values: Mapping[str, Any], asked: dict[str, bool]) -> None:
        super().__init__(values)
        # Templates take a public attribute for a key.
        self._asked = asked

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._asked[str(key)] = is_there = super().__contains__(key)
        return is_there

    def get(self, key: str, default: Any = None) -> Any:
        is_there = key in self
        return super().__getitem__(key) if is_there else default

    def items(self) -> Any:
        self._asked |= dict.fromkeys(self.keys(), True)
        return super().items()

    def values(self) -> Any:
        return self.copy().values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __repr__(self) -> str:
        return repr(self.copy())

    def __iter__(self) -> Iterator[str]:
        # With it Python copies what is here by the methods above.
        return super().__iter__()


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``: what lies between is the assistant's."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # Jinja's is a set that it only reads

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_note", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _note(self, context: Context, caller: Callable[[], str]) -> str:
        # Blocks are written as they come, so that all before this one is counted by now.
        text, written = caller(), context[_WRITTEN]
        written.spans.append((written.characters, written.characters + len(text)))
        return text


def rendered(batch: Any) -> Any:
    """What a process of functions calls: the first text is a ``ChatRenderer`` as JSON, the others are conversations.

    Of the former comes why it is refused, or nothing; of each of the others a line of JSON, and then its text: the
    spans, or why it is a bad row, or null where it takes too much memory.
    """
    definition, *chats = batch.column(0).to_pylist()
    try:
        renderer = _renderer(definition)
    except TokenizerError as error:
        return arrays.strings([str(error)])
    return arrays.strings(["", *map(renderer.answer, chats)])


@lru_cache(maxsize=1)
def _renderer(definition: str) -> ChatRenderer:
    return ChatRenderer(*json.loads(definition))


class ChatRenderer:
    """Renders a run's conversations."""

    def __init__(self, name: str, chat_template: str, special_tokens: Mapping[str, str]) -> None:
        """Of the tokeniser ``name``. Raises ``TokenizerError`` for a template that is no Jinja, or does not say where
        the assistant speaks."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        # The same tokens on every day, and in every process.
        del environment.filters["random"], environment.globals["lipsum"]
        try:
            self._template = environment.from_string(chat_template)
            blocks = list(environment.parse(chat_template).find_all(nodes.ExtensionAttribute))
        except (
            Exception
        ) as error:  # syntax errors, and whatever else a hostile text makes Jinja's parser raise
            raise TokenizerError(
                f"tokenizer {name!r}: its chat template is no Jinja template ({error})"
            ) from None
        self._variables = {**special_tokens, "documents": None, "add_generation_prompt": False}
        if not any(block.identifier == _Generation.identifier for block in blocks):
            raise TokenizerError(
                f"tokenizer {name!r}: its chat template has no {{% generation %}} block, so it does not say "
                "which tokens count for the loss; in chat_template.jinja, put {% generation %} and {% endgeneration %} "
                "around what the assistant says, or around all of it"
            )

    def answer(self, row: str) -> str:
        """Of a conversation, or a text without any: see ``rendered``."""
        try:
            text, spans = self.render(row) if row else ("", [])
            return f"{json.dumps(spans)}\n{text}"
        except MemoryError:
            return json.dumps(None)
        except (ValueError, RecursionError) as error:
            return json.dumps(str(error))

    def render(self, row: str) -> tuple[str, Spans]:
        """A conversation as text; ``row``: its messages as JSON, and after them the tools, if there are any.

        Raises ``ValueError`` for what is no conversation, and for what the template refuses or fails at.
        """
        messages, end = json.JSONDecoder().raw_decode(row.lstrip())
        tools = json.loads(row.lstrip()[end:].strip() or "null")
        if not (
            messages
            and isinstance(messages, list)
            and all(isinstance(one, dict) for one in messages)
        ):
            raise ValueError(
                "expected a list of messages, at least one, each an object with role and content"
            )
        if not isinstance(tools, list | None):
            raise ValueError("expected a list of tools")
        written, parts = _Written(), list[str]()
        keys = [dict[str, bool]() for _ in messages]
        seen = list(map(_message, messages, keys))
        variables = self._variables | {"messages": seen, "tools": tools, _WRITTEN: written}
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                written.characters += len(part)
            text = "".join(parts)
            text.encode()  # no half of a surrogate pair
        except MemoryError:
            raise
        except Exception as error:  # a template may fail in any way that an expression can
            raise ValueError(f"the chat template: {type(error).__name__}: {error}") from None
        _refuse_unread(seen, keys)
        return text, written.spans


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """With the options of transformers, in their order: Jinja's own filter would escape what is special to HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _message(message: Mapping[str, Any], asked: dict[str, bool]) -> _Message:
    """A message as templates expect it: no key without a value, and reasoning under the names that they read."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return _Message(plain, asked)


def _refuse_unread(messages: Sequence[_Message], asked: Sequence[Mapping[str, bool]]) -> None:
    """Raises ``ValueError`` for a message that has other keys than the template reads. What it skips by the role or the
    place of a message is its own decision."""
    if not any(asked):
        raise ValueError(
            "the chat template reads no message; expected one that writes what is in messages"
        )
    known = {key for keys in asked for key in keys} - {"role"}
    for number, (message, keys) in enumerate(zip(messages, asked, strict=True)):
        lacks = [key for key, is_there in keys.items() if not is_there]
        is_read = any(is_there for key, is_there in keys.items() if key != "role")
        # Some templates ask each message for such as tool_calls before they skip it.
        if lacks and not is_read and ("role" in lacks or known.isdisjoint(message.keys())):
            raise ValueError(
                f"of message {number} the chat template reads nothing, or its role alone: it asks for "
                f"{', '.join(map(repr, lacks))}, and the message has, but for nulls, "
                f"{', '.join(map(repr, message)) or 'no keys'}; put its text under a key for which the template asks"
            )
