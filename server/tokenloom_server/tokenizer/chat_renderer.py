"""Renders conversations by a chat template: Jinja in a sandbox, with blocks that say where the assistant speaks.

What a template may use is what it may in transformers, but for what would make other tokens on another day:
``strftime_now``, random choices and ``lipsum`` are not there. At work in the processes of ``workers.chats``.
"""

from __future__ import annotations

import json
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from posixpath import commonprefix
from typing import Any, NoReturn, TypeAlias

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tokenloom_server.config.row_rules import CHAT_FORMATS
from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources import arrays

Spans: TypeAlias = list[tuple[int, int]]
"""From which character to before which the assistant speaks, each time."""

#: The name under which a rendering finds what it has written so far.
_WRITTEN = "tokenloom_written"
#: The filter by which the loops of a template note it.
_NOTE = "tokenloom_note"

#: Names of a message's reasoning; templates read the first two, and data has any of them.
_REASONING = ("reasoning_content", "thinking", "reasoning")

#: What an answer may begin with that is no header, though some templates ask with it.
_OPENER = "<think>"
#: What ends the reasoning within the text of a message.
_REASONED = "</think>"
#: Headers of families whose training templates in TRL count them: one answer may have several.
_COUNTED_HEADERS = ("<｜Assistant｜>", "<|start|>assistant")
#: The family whose training template counts the end of the header's line, by its own words.
_COUNTS_LINE_END = "You are Qwen, created by Alibaba Cloud"
#: Families whose answers cannot be found, by what only their templates have, with the template that TRL trains them by.
_FAMILIES = {
    "[gMASK]": "GLM-4: glm4moe_training.jinja",
    "<|channel|>": "gpt-oss: gptoss_training.jinja, with a date in the place of strftime_now",
    "preserve_thinking": "Qwen3.6: qwen3_6_training.jinja",
    "<function=": "Qwen3.5: qwen3_5_think_training.jinja, or …_nothink_… for models up to 2B",
    "last_query_index": "Qwen3: qwen3_training.jinja",
}
#: Who speaks in ShareGPT's conversations, and as whom templates know them.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "observation"), "tool"),
    "system": "system",
}
#: Who speaks beside the assistant.
_OTHERS = frozenset({"system", "developer", "user", "tool"})
#: What stands for an answer where a template is tried.
_PROBE = "tokenloom"


class _Written:
    """What a rendering has written so far: how many characters, and where the assistant spoke among them."""

    def __init__(self) -> None:
        self.characters = 0
        self.spans: Spans = []
        #: By the ``id`` of a message, where loops over messages wrote something in their passes of it.
        self.turns = defaultdict[int, Spans](list)
        self._passes: dict[int, tuple[object, int]] = {}

    def note_pass(self, loop: int, item: object) -> None:
        """Notes that a loop begins its pass of an item, or with None that it has ended."""
        before, begin = self._passes.pop(loop, (None, 0))
        if before is not None and begin < self.characters:
            self.turns[id(before)].append((begin, self.characters))
        if isinstance(item, _Message):
            self._passes[loop] = item, self.characters


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


class _Passes(NodeTransformer):
    """Puts notes into the loops of a template: which item each pass is of, and where the last pass ends."""

    _loops = 0

    def visit_For(self, loop: nodes.For) -> list[nodes.Node]:  # noqa: N802  # Jinja looks for this name
        self.generic_visit(loop)
        if not isinstance(loop.target, nodes.Name):
            return [loop]
        self._loops += 1
        written, number = nodes.Name(_WRITTEN, "load"), nodes.Const(self._loops)
        # A filter is called as it is; what else could be called goes through the sandbox, for ten times as much.
        begin, end = (
            nodes.ExprStmt(nodes.Filter(written, _NOTE, [number, item], [], None, None)).set_lineno(
                loop.lineno
            )
            for item in (nodes.Name(loop.target.name, "load"), nodes.Const(None))
        )
        loop.body.insert(0, begin)
        return [loop, end]


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

    def __init__(
        self,
        name: str,
        chat_template: str,
        special_tokens: Mapping[str, str],
        loss_on: str | None = None,
        chat_format: str = "messages",
    ) -> None:
        """Of the tokeniser ``name``; the last two: as the source says. Raises ``TokenizerError`` for a template that is
        no Jinja, or does not say where the assistant speaks; with ``loss_on``, for one by which that is not found."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.filters[_NOTE] = _Written.note_pass
        environment.globals["raise_exception"] = _raise
        # The same tokens on every day, and in every process.
        del environment.filters["random"], environment.globals["lipsum"]
        try:
            tree = environment.parse(chat_template)
            blocks = list(tree.find_all(nodes.ExtensionAttribute))
            if loss_on is not None or chat_format == _PAIRS:
                _Passes().visit(tree)
            self._template = environment.from_string(tree)
        except (
            Exception
        ) as error:  # syntax errors, and whatever else a hostile text makes Jinja's parser raise
            raise TokenizerError(
                f"tokenizer {name!r}: its chat template is no Jinja template ({error})"
            ) from None
        self._variables = {**special_tokens, "documents": None, "add_generation_prompt": False}
        kept = (nodes.Macro, nodes.AssignBlock, nodes.FilterBlock)
        for block in (
            block
            for each in tree.find_all(kept)
            for block in each.find_all(nodes.ExtensionAttribute)
        ):
            if block.identifier == _Generation.identifier:
                raise TokenizerError(
                    f"tokenizer {name!r}: its chat template has a {{% generation %}} block within a macro, a "
                    "{% set %} or a {% filter %}, whose text it writes later, so that which tokens count is not known; "
                    "put the block around what is written"
                )
        self._chat_format = chat_format
        #: What stands before each answer; None where blocks say what an answer is.
        self._header: str | None = None
        if any(block.identifier == _Generation.identifier for block in blocks):
            return
        if loss_on is None:
            raise TokenizerError(
                f"tokenizer {name!r}: its chat template has no {{% generation %}} block, so it does not say "
                "which tokens count for the loss; set loss_on: answers on the source, or in chat_template.jinja "
                "put {% generation %} and {% endgeneration %} around what the assistant says, or around all of it"
            )
        try:
            self._header = self._header_of_answers(chat_template)
        except ValueError as error:
            known = next((_FAMILIES[sign] for sign in _FAMILIES if sign in chat_template), "")
            family = f" (this is of {known})" if known else ""
            raise TokenizerError(
                f"tokenizer {name!r}: which tokens are the assistant's cannot be found by its chat template: {error}; "
                f"take the training template of its family, from trl/chat_templates{family}, as chat_template.jinja, "
                "or put {% generation %} and {% endgeneration %} around what the assistant says"
            ) from None

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
        """A conversation as text; ``row``: its columns as JSON, and after them the tools, if there are any.

        Raises ``ValueError`` for what is no conversation, and for what the template refuses or fails at.
        """
        messages, tools, first = self._conversation(row)
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
        keys = [dict[str, bool]() for _ in messages]
        seen = list(map(_message, messages, keys))
        text, written = self._write(seen, tools=tools)
        _refuse_unread(seen, keys)
        spans = written.spans if self._header is None else self._answers(text, seen, keys, written)
        if first:
            begins = [begin for begin, _ in written.turns[id(seen[first])]]
            if not begins:
                raise ValueError("the chat template gives the completion no turn of its own")
            spans = [span for span in spans if span[0] >= begins[0]]
        if not spans and (self._header is not None or first):
            # A conversation without an answer is one; by another name for the assistant it would teach nothing.
            roles = [str(dict.get(message, "role")) for message in seen[first:]]
            if first or not _OTHERS.issuperset(roles):
                raise ValueError(
                    f"nothing of it is an answer: expected an assistant's message, found those of {', '.join(roles)}"
                )
        return text, spans

    def _conversation(self, row: str) -> tuple[Any, Any, int]:
        """Messages, tools, and the first message that may count. Raises ``ValueError``."""
        if self._chat_format == "messages":
            messages, end = json.JSONDecoder().raw_decode(row.lstrip())
            return messages, json.loads(row.lstrip()[end:].strip() or "null"), 0
        values = [json.loads(line) for line in row.split("\n")]
        count = len(CHAT_FORMATS[self._chat_format]) + 1
        tools = values[count] if values[count:] else None
        messages, first = _READ[self._chat_format](*values[:count])
        return messages, json.loads(tools) if isinstance(tools, str) else tools, first

    def _write(self, messages: Sequence[_Message], **variables: Any) -> tuple[str, _Written]:
        """A conversation as text. Raises ``ValueError``."""
        written, parts = _Written(), list[str]()
        own = {"messages": messages, "tools": None, _WRITTEN: written}
        try:
            for part in self._template.generate(self._variables | own | variables):
                parts.append(part)
                written.characters += len(part)
            text = "".join(parts)
            text.encode()  # no half of a surrogate pair
        except MemoryError:
            raise
        except Exception as error:  # a template may fail in any way that an expression can
            raise ValueError(f"the chat template: {type(error).__name__}: {error}") from None
        return text, written

    def _answers(
        self,
        text: str,
        messages: Sequence[_Message],
        asked: Sequence[Mapping[str, bool]],
        written: _Written,
    ) -> Spans:
        """What loops over messages wrote in their passes of the assistant's, each without its header. Raises
        ``ValueError`` where another message's text may lie there, too."""
        assert self._header is not None
        spans: Spans = []
        in_order = sorted(turn for turns in written.turns.values() for turn in turns)
        if any(begin < end for (_, end), (begin, _) in pairwise(in_order)):
            raise ValueError("the chat template writes a message within the turn of another")
        mixed: list[int] = []
        unplaced = [
            content
            for message, keys in zip(messages, asked, strict=True)
            if keys.get("content")
            and not written.turns[id(message)]
            and isinstance(content := dict.get(message, "content"), str)
            and content
        ]
        for number, (message, keys) in enumerate(zip(messages, asked, strict=True)):
            turns, role = written.turns[id(message)], dict.get(message, "role")
            if spans and keys.get("content") and not turns:
                raise ValueError(
                    f"the chat template reads message {number}, of {role!r}, but gives it no turn of its own, so that "
                    "answers cannot be found; put {% generation %} blocks into the template"
                )
            if role != "assistant":
                continue
            for begin, end in turns:
                if message is messages[-1]:
                    end = len(text)  # what is written after the last message ends the answer
                turn = text[begin:end].rstrip(" ")
                if not turn.startswith(self._header):
                    raise ValueError(
                        f"the chat template begins message {number} with {turn[:40]!r}, expected {self._header!r}, so "
                        "that its answer cannot be found"
                    )
                own = str(dict.get(message, "content"))
                if any(content in turn.replace(own, "", 1) for content in unplaced):
                    mixed.append(number)
                if _REASONED in own and _REASONED not in turn:
                    raise ValueError(
                        f"the chat template leaves out the reasoning in the content of message {number}; take a "
                        "training template of its family, or put it under reasoning_content"
                    )
                spans.append((begin + len(self._header), begin + len(turn)))
        if mixed:
            raise ValueError(
                f"the chat template writes another message's text in the turn of message {mixed[0]}, so that its "
                "answer cannot be found; put {% generation %} blocks into the template"
            )
        return spans

    def _header_of_answers(self, chat_template: str) -> str:
        """What the template writes before an answer that is none of it. Raises ``ValueError`` where it does not show
        which text is an answer."""
        try:
            return self._header_before(_PROBE, chat_template)
        except ValueError as error:
            try:
                # Some read a list of parts alone.
                return self._header_before([{"type": "text", "text": _PROBE}], chat_template)
            except ValueError:
                raise error from None

    def _header_before(self, content: Any, chat_template: str) -> str:
        chat = [
            _message({"role": role, "content": content}, {}) for role in ("user", "assistant") * 2
        ]
        text, written = self._write(chat)
        answers = [
            text[begin:end].partition(_PROBE)
            for message in chat[1::2]
            for begin, end in written.turns[id(message)]
        ]
        if len(answers) != 2 or not answers[0][1]:
            raise ValueError("it does not write each of them in one pass of a loop over messages")
        (head, _, tail), second = answers
        if (head, _PROBE, tail) != second:
            raise ValueError("it writes an answer otherwise where other messages follow")
        if not tail.strip():
            raise ValueError(
                "it writes nothing after an answer, by which a model would learn to end"
            )
        text, written = self._write(chat[:1], add_generation_prompt=True)
        question_end = max((end for _, end in written.turns[id(chat[0])]), default=0)
        header = commonprefix([text[question_end:], head])
        header = header.partition(_OPENER)[0]
        if header in _COUNTED_HEADERS:
            return ""
        more = head.removeprefix(header).strip()
        if more and not more.startswith(_OPENER):
            raise ValueError(
                f"before an answer it writes {head!r}, and of that only {header!r} where it asks for one"
            )
        return header.removesuffix("\n") if _COUNTS_LINE_END in chat_template else header


def _sharegpt(turns: Any) -> tuple[Any, int]:
    turns = json.loads(turns) if isinstance(turns, str) else turns
    messages = []
    for number, turn in enumerate(turns if isinstance(turns, list) else [turns]):
        if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
            shown = ", ".join(turn) if isinstance(turn, dict) else reprlib.repr(turn)
            raise ValueError(
                f"message {number} has {shown}; chat_format: sharegpt expects from and value, and role and content are "
                "read without it"
            )
        role = _ROLES.get(str(turn["from"]))
        if role is None:
            raise ValueError(
                f"message {number} is from {turn['from']!r}; expected {', '.join(_ROLES)}"
            )
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append({**others, "role": role, "content": turn["value"]})
    return messages, 0


def _alpaca(instruction: Any, more: Any, output: Any) -> tuple[Any, int]:
    if not (
        isinstance(instruction, str) and isinstance(more, str | None) and isinstance(output, str)
    ):
        raise ValueError("expected text as instruction and output, and as input text or nothing")
    question = f"{instruction}\n\n{more}" if more else instruction
    return [{"role": "user", "content": question}, {"role": "assistant", "content": output}], 0


def _prompt_completion(*pair: Any) -> tuple[Any, int]:
    prompt, completion = (
        [{"role": role, "content": part}] if isinstance(part, str) else part
        for role, part in zip(("user", "assistant"), pair, strict=True)
    )
    if not (isinstance(prompt, list) and isinstance(completion, list) and prompt and completion):
        raise ValueError("expected text or messages as prompt and as completion")
    return prompt + completion, len(prompt)


_PAIRS = "prompt_completion"
#: What makes messages of a format's columns, with the first that may count.
_READ: Mapping[str, Callable[..., tuple[Any, int]]] = {
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    _PAIRS: _prompt_completion,
}


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
