"""``loss_on: answers``: what the assistant says, found by a chat template without blocks, is what TRL trains on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenloom_server.errors import TokenizerError
from tokenloom_server.tokenizer.chat_renderer import ChatRenderer, Spans

spec = find_spec("trl")
TEMPLATES = Path(spec.origin or "").parent / "chat_templates" if spec else Path()
#: The families that TRL has a training template for.
FAMILIES = [
    path.stem.removesuffix("_training") for path in sorted(TEMPLATES.glob("*_training.jinja"))
]
#: Those whose training template writes other text, so that another template has to be named.
REFUSED = {
    "glm4moe": "nothing after an answer",
    "gptoss": "'strftime_now' is undefined",
    "qwen3": "otherwise where other messages follow",
    "qwen3_5_nothink": "otherwise where other messages follow",
    "qwen3_5_think": "otherwise where other messages follow",
    "qwen3_6": "otherwise where other messages follow",
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "snow",
            "description": "how much",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "snow", "arguments": {"city": "Bern"}}}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TURNS = [said("user", "Why?"), said("assistant", "Because."), said("user", " So ")]
THOUGHT = "<think>\nwell\n</think>\n\nSure."
CONVERSATIONS: list[list[dict[str, Any]]] = [
    TURNS[:2],
    [*TURNS, said("assistant", "Yes.  ")],
    [said("system", "Be brief."), *TURNS],
    [*TURNS, said("assistant", "")],
    [TURNS[0], said("assistant", "A.", reasoning_content="a"), TURNS[2], said("assistant", "B.")],
    [*TURNS, said("assistant", "B.", reasoning_content="b")],
    [TURNS[0], said("assistant", THOUGHT), TURNS[2], said("assistant", THOUGHT)],
    [
        TURNS[0],
        said("assistant", "Look: ", tool_calls=[CALL], reasoning_content="a"),
        said("tool", "lots", name="snow"),
        said("assistant", "Lots."),
        *TURNS,
    ],
]


def in_parts(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As templates of models that see read it."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]} for message in chat
    ]


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def answering(text: str) -> ChatRenderer:
    return ChatRenderer("t", text, TOKENS, "answers")


def row(chat: list[dict[str, Any]]) -> str:
    return json.dumps(chat) + "\n" + json.dumps(TOOLS if "tool_calls" in chat[1] else None)


def joined(spans: Spans) -> Spans:
    """Without those of nothing, and those that follow each other as one."""
    whole: Spans = []
    for begin, end in spans:
        if whole and whole[-1][1] == begin:
            whole[-1] = whole[-1][0], end
        elif begin < end:
            whole.append((begin, end))
    return whole


def both(family: str) -> Iterator[tuple[tuple[str, Spans] | str, tuple[str, Spans]]]:
    """Of each conversation that TRL's training template renders, what is found by the family's own, and by that."""
    ours = answering(template(family))
    theirs = ChatRenderer("t", template(f"{family}_training"), TOKENS)
    for chat in (*CONVERSATIONS, *map(in_parts, CONVERSATIONS)):
        try:
            expected = theirs.render(row(chat))
        except ValueError:
            continue
        try:
            yield ours.render(row(chat)), expected
        except ValueError as error:
            yield str(error), expected


@pytest.mark.skipif(not FAMILIES, reason="TRL is not installed")
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_answers_are_those_of_trls_training_template(family: str) -> None:
    compared = 0
    for found, (text, spans) in both(family):
        if isinstance(found, str):
            # TRL's text has what this one lacks, or it names what the template cannot say.
            assert any(
                part in found
                for part in ("leaves out the reasoning", "gives it no turn of its own", "TypeError")
            )
        elif found[0] == text:
            assert joined(found[1]) == joined(spans)
            compared += 1
    assert compared >= 4


@pytest.mark.skipif(not FAMILIES, reason="TRL is not installed")
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_whose_answers_cannot_be_told_is_refused_with_the_template_to_use(
    family: str,
) -> None:
    named = family.replace("_nothink", "_think")
    with pytest.raises(TokenizerError, match=rf"{REFUSED[family]}.* {named}_training\.jinja"):
        answering(template(family))


LOOP = "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '.' }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LOOP, r"before an answer it writes '\[assistant\]', and of that only ''"),
        (LOOP.replace("+ '.'", "") + ASKS, "it writes nothing after an answer"),
        ("{% set all %}" + LOOP + "{% endset %}{{ all }}" + ASKS, "in one pass of a loop"),
        ("{{ messages[1].content }}" + ASKS, "in one pass of a loop"),
        (LOOP.replace("'.'", "('.' if loop.last else ',')") + ASKS, "otherwise where other"),
    ],
)
def test_a_template_whose_answers_cannot_be_told_is_refused(text: str, reason: str) -> None:
    with pytest.raises(TokenizerError, match=f"{reason}.* or put .% generation %. and"):
        answering(text)


def test_what_another_message_may_have_written_is_a_bad_row() -> None:
    looks_ahead = (
        "{% for m in messages %}{% if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}"
        "{% if loop.nextitem and loop.nextitem.role == 'tool' %}{{ loop.nextitem.content }}{% endif %}.{% endif %}"
        "{% endfor %}" + ASKS
    )
    renderer = answering(looks_ahead)
    assert renderer.render(row(TURNS)) == ("[user]Why?.[assistant]Because..[user] So .", [(22, 31)])
    with pytest.raises(
        ValueError, match="reads message 2, of 'tool', but gives it no turn of its own"
    ):
        renderer.render(row([*TURNS[:2], said("tool", "secret")]))
    nested = looks_ahead.replace(
        "loop.nextitem.content",
        "'' }}{% for n in messages[loop.index:] %}{{ n.content }}{% endfor %}{{ ''",
    )
    with pytest.raises(ValueError, match="writes a message within the turn of another"):
        answering(nested).render(row([*TURNS[:2], said("tool", "secret")]))
    first = LOOP.replace("m.role + ']'", "('x' if loop.index == 5 else m.role) + ']'") + ASKS
    with pytest.raises(
        ValueError, match=r"begins message 4 with '\[x\]so\.', expected '\[assistant\]'"
    ):
        answering(first).render(row([*TURNS, TURNS[1], said("assistant", "so")]))


def test_blocks_of_a_template_say_it_before_anything_is_looked_for() -> None:
    text = LOOP.replace("{{", "{% generation %}{{").replace("}}", "}}{% endgeneration %}")
    assert joined(answering(text).render(row(TURNS))[1]) == [(0, 42)]


def test_a_block_whose_text_is_written_later_is_refused() -> None:
    block = "{% generation %}{{ m.content }}.{% endgeneration %}"
    for later in (
        "{% for m in messages %}{% set out %}" + block + "{% endset %}{{ out }}{% endfor %}",
        "{% macro say(m) %}"
        + block
        + "{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
        "{% for m in messages %}{% filter upper %}" + block + "{% endfilter %}{% endfor %}",
    ):
        with pytest.raises(TokenizerError, match="put the block around what is written"):
            ChatRenderer("t", later, TOKENS)


def test_a_text_that_is_held_back_until_the_answer_is_a_bad_row() -> None:
    held_back = (
        "{% set kept = namespace(text='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set kept.text = m.content %}"
        "{% elif m.role == 'user' %}[{{ m.content }}]{% else %}{{ kept.text }}{{ m.content }}.{% endif %}{% endfor %}"
    )
    renderer = answering(held_back)
    assert renderer.render(row(TURNS[:2]))[1] == [(6, 15)]
    with pytest.raises(ValueError, match="writes another message's text in the turn of message 2"):
        renderer.render(row([said("system", "Be brief"), *TURNS[:2]]))


@pytest.mark.parametrize("role", ["model", "Assistant", "gpt"])
def test_another_name_for_the_assistant_makes_a_bad_row(role: str) -> None:
    renderer = answering(LOOP + ASKS)
    with pytest.raises(ValueError, match=f"an assistant's message, found those of user, {role}"):
        renderer.render(row([said("user", "Why?"), said(role, "Because")]))
