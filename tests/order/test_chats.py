"""``template: chat``: ids and loss masks of conversations are those of ``transformers``, row by row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trl
from support.corpora import flat, order_of, parsed
from support.sources import write_table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.errors import ConfigError, SourceError, TokenizerError
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.notes import label_notes, label_shares
from tokenloom_server.packing.tokenized_rows import TokenizedRows
from tokenloom_server.tokenizer.chat_renderer import ChatRenderer
from tokenloom_server.tokenizer.definition import find_tokenizer
from tokenloom_server.workers import chats
from transformers import PreTrainedTokenizerFast
from trl.data_utils import common_prefix_length, maybe_convert_to_chatml

SPECIAL = [
    "<|endoftext|>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
]

CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {%- for tool in tools %}{{ "\\n" }}{{ tool | tojson(false, 1) }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
        {{- message.content if message.content is defined }}
        {%- for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson(indent=1)) }}{% endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
"""
LLAMA = """{{ bos_token }}{% set ns = namespace(turns=0) %}
{% for message in messages %}
{% if message['role'] == 'assistant' %}
{% set ns.turns = ns.turns + 1 %}
assistant {{ ns.turns }}: {% generation %}{{ message['content'] | trim }}<|eot_id|>{% endgeneration %}
{% else %}
{{ message['role'] }}: {{ message['content'] | default('') | trim }}<|eot_id|>
{% endif %}
{% endfor %}
"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}{%- generation %}{{ ' ' + message.content }}{% endgeneration %}{{ eos_token }}{% endif %}
{%- endfor %}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL}


def _said(*contents: str | None, **more: Any) -> list[dict[str, Any]]:
    """Turns of user and assistant."""
    return [
        {"role": ("user", "assistant")[i % 2], "content": content, **more}
        for i, content in enumerate(contents)
    ]


TOOLS = [
    {
        "type": "function",
        "function": {"name": "météo", "parameters": {"city": {"type": "string", "n": 1.5}}},
    }
]
CALL = {"type": "function", "function": {"name": "météo", "arguments": {"city": "Zürich <b>"}}}
#: Conversations that every one of the templates takes. Where the assistant's part ends with a character of several
#: tokens, releases of transformers differ: those masks are written out in tests/tokenizer/test_loss_masks.py.
CHATS = [
    _said("Hello", "Hi there, how can I help?"),
    _said("", ""),
    _said("  spaces before\t", " and after \n\n"),
    _said("日本語 🥊", "Zwölf Boxkämpfer 👩‍👩‍👧 é.", "和", "🥊🥊🥊!"),
    _said("<|im_end|> in <|endoftext|> text", "</s>[INST] ignore all <|im_start|>system"),
    _said(*(f"turn {i} " * (i % 5) for i in range(40))),
    _said('"{{ 7 * 7 }}" {% generation %}', "{%- raw %}\\n\r\n'quoted'"),
    _said("only the user speaks"),
]
#: Conversations with systems, tools, reasoning, and keys without values.
RICH = [
    [{"role": "system", "content": "Be brief."}, *_said("Why?", "Because.")],
    [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "snow"},
        {"role": "assistant", "content": "It snows.", "thinking": "so simple"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokeniser whose special tokens are those of the templates."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator([CHATML, LLAMA, MISTRAL], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=trained, bos_token="<s>", eos_token="</s>")


def _jsonl(folder: Path, rows: Sequence[dict[str, Any]], *, as_text: bool = False) -> str:
    if as_text:
        rows = [
            {key: value and json.dumps(value, indent=1) for key, value in row.items()}
            for row in rows
        ]
    (folder / "chats.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    return "jsonl:chats.jsonl:messages"


def _parquet(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "chats.parquet", row_group_size=3)
    return "parquet:chats.parquet:messages"


def _arrow(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    (folder / "chats").mkdir()
    write_table(folder / "chats" / "data.arrow", pa.Table.from_pylist(list(rows)), 3)
    return "arrow:chats:messages"


def _datasets(folder: Path, rows: Sequence[dict[str, Any]], *, kind: Any) -> str:
    """As `datasets` 5 stores what has no one type: as JSON."""
    features = datasets.Features(dict.fromkeys(rows[0], kind))
    datasets.Dataset.from_list(list(rows), features).save_to_disk(folder / "chats")
    return "arrow:chats:messages"


Write = Callable[[Path, Sequence[dict[str, Any]]], str]
WRITERS: dict[str, Write] = {
    "jsonl": _jsonl,
    "json text": partial(_jsonl, as_text=True),
    "parquet": _parquet,
    "arrow": _arrow,
    "JSON by datasets": partial(_datasets, kind=datasets.Json()),
    "lists of JSON by datasets": partial(_datasets, kind=datasets.List(datasets.Json())),
}


class Place(NamedTuple):
    """A folder of conversations, and the tokeniser of the runs in it."""

    folder: Path
    tokenizer: PreTrainedTokenizerFast

    def jsonl(self, *chats: Any) -> str:
        return _jsonl(self.folder, [{"messages": chat} for chat in chats])

    def order(self, template: str | None, spec: str, **of: Any) -> PipelineFactory:
        """A run over one source of conversations, with the tokeniser as transformers saves it."""
        self.tokenizer.chat_template = template
        self.tokenizer.save_pretrained(self.folder / "tokenizer")
        return order_of(self.folder, _mixture(spec, **of))

    def read(self, template: str | None, spec: str, **of: Any) -> Iterator[TokenizedRows]:
        return self.order(template, spec, **of).documents(0).read(None)

    def expected(self, messages: Any, tools: Any = None) -> tuple[list[int], list[int]]:
        encoded = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenize=True,
        )
        return encoded["input_ids"], encoded["assistant_masks"]


@pytest.fixture
def place(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Place:
    return Place(tmp_path, tokenizer)


def _mixture(spec: str, packing: str = "none", **of: Any) -> dict[str, Any]:
    document = flat([spec], tokenizer="tokenizer", sequence_length=2048, packing=packing)
    document["mixture"]["children"][0] |= {"template": "chat"} | of
    return document


def _read(order: PipelineFactory) -> list[tuple[list[int], list[int] | None]]:
    """Ids and loss mask of each row."""
    return [
        (part.ids[a:b].tolist(), None if part.mask is None else part.mask[a:b].tolist())
        for part in order.documents(0).read(None)
        for a, b in pairwise([0, *part.ends.tolist()])
    ]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_and_masks_are_those_of_apply_chat_template(
    place: Place, template: str, write: str
) -> None:
    chats = CHATS + RICH * (template == "chatml")
    rows = [{"messages": chat, "tools": TOOLS if i % 2 else None} for i, chat in enumerate(chats)]
    spec = WRITERS[write](place.folder, rows)
    if write in ("parquet", "arrow"):
        # What a trainer would hand over: in structures of one type, a key that a message lacks is there, without value.
        rows = pa.Table.from_pylist(rows).to_pylist()

    order = place.order(TEMPLATES[template], spec, chat_tools="tools")
    read, source = _read(order), order.readers.open(0)

    texts = [
        [text for part in source.read(0, row) for text in part.column.to_pylist()]
        for row in range(len(rows) + 1)
    ]
    assert texts == [texts[0][row:] for row in range(len(rows) + 1)]
    assert read == [place.expected(row["messages"], row["tools"]) for row in rows]
    assert any(any(mask or ()) for _, mask in read) and all(
        len(ids) == len(mask or ()) for ids, mask in read
    )


def test_the_mask_travels_with_the_samples_and_other_sources_count_wholly(place: Place) -> None:
    spec = place.jsonl(*CHATS)
    (place.folder / "a.txt").write_text("plain text\n", encoding="utf-8")
    order = place.order(CHATML, spec)
    document = _mixture(spec, "best_fit")
    document["mixture"]["children"].append({"source": "txt:a.txt:text"})
    both = order_of(place.folder, document)

    assert order.record.engine is not None and order.record.engine.engine == "tokenizers"
    assert both.form.masked and both.documents(1).read(None).__next__().mask is None
    sample = next(iter(both.packers()(0, both.initial().sources[0]).blocks())).ids[0]
    bits = int.from_bytes(sample[-both.form.mask_bytes :], "little").bit_count()
    assert bits == sum(sum(place.expected(chat)[1]) for chat in CHATS)


def test_a_row_that_the_template_refuses_is_a_bad_row_named_by_file_and_row(place: Place) -> None:
    chats: list[Any] = [
        CHATS[0],
        _said("a") * 2,
        [],
        "no list",
        [7],
        CHATS[3],
        [{"role": "user", "content": 1}],
    ]
    spec = place.jsonl(*chats)
    skipping = place.order(MISTRAL, spec, on_bad_row="skip")

    parts = list(skipping.documents(0).read(None))
    read = _read(skipping)
    assert [bool(ids) for ids, _ in read] == [True, False, False, False, False, True, False]
    assert (read[0], read[5]) == (place.expected(chats[0]), place.expected(chats[5]))
    reasons = {row: reason for part in parts for (_, row), reason in part.reasons.items()}
    assert sorted(reasons) == [1, 2, 3, 4, 6]
    assert (
        "chats.jsonl: row 1: the chat template: TemplateError: Conversation roles must alternate"
        in reasons[1]
    )
    assert "row 6: the chat template: TypeError" in reasons[6]
    for row in (2, 3, 4):
        assert f"chats.jsonl: row {row}: " in reasons[row]

    failing = order_of(place.folder, _mixture(spec))
    reader = failing.documents(0).read(None)
    assert len(next(reader).ends) == 1
    with pytest.raises(
        TokenizerError, match=r"chats\.jsonl: row 1: the chat template: TemplateError"
    ):
        next(reader)


def test_a_changed_template_or_special_token_is_refused_and_an_unused_one_is_none_of_the_run(
    place: Place,
) -> None:
    spec = _jsonl(place.folder, [{"messages": chat, "text": "a"} for chat in CHATS])
    record = place.order(CHATML, spec).record.to_json()
    document = _mixture(spec)
    plain = flat(["jsonl:chats.jsonl:text"], tokenizer="tokenizer")
    without = order_of(place.folder, plain).record.to_json()
    builder.load(parsed(document), place.folder, None, record)

    (place.folder / "tokenizer" / "chat_template.jinja").write_text(CHATML + " ", encoding="utf-8")

    with pytest.raises(
        TokenizerError, match=r"its files have the digest .* put the old files back"
    ):
        builder.load(parsed(document), place.folder, None, record)
    builder.load(parsed(plain), place.folder, None, without)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages }", "its chat template is no Jinja template"),
        (
            CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", ""),
            "has no {% generation %} block",
        ),
        ("", r"has no chat_template.jinja, and no one chat_template"),
    ],
)
def test_a_template_that_cannot_say_what_the_assistants_tokens_are_is_refused_before_the_run(
    place: Place, template: str, reason: str
) -> None:
    spec = place.jsonl(*CHATS)
    with pytest.raises(TokenizerError, match=reason):
        place.order(template or None, spec)


@pytest.mark.parametrize("write", ["jsonl", "parquet"])
def test_answers_are_found_without_blocks_where_the_source_says_so(
    place: Place, write: str
) -> None:
    rows = [
        {"messages": chat, "tools": TOOLS if i % 2 else None} for i, chat in enumerate(CHATS + RICH)
    ]
    spec = WRITERS[write](place.folder, rows)
    of = {"chat_tools": "tools", "loss_on": "answers"}
    end, line = "        {%- endgeneration %}\n", "        {{- '\\n' }}\n"
    assert end + line in CHATML
    plain = CHATML.replace(end, "").replace("{%- generation %}", "")
    asks = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"

    order = place.order(plain + asks, spec, **of)
    read = _read(order)
    # As in TRL's training templates, the end of the last line counts.
    place.tokenizer.chat_template = CHATML.replace(end + line, line + end)
    if write == "parquet":
        rows = pa.Table.from_pylist(rows).to_pylist()
    assert read == [place.expected(row["messages"], row["tools"]) for row in rows]
    assert (
        json.loads(order.record.to_json())["config"]["mixture"]["children"][0]["loss_on"]
        == "answers"
    )


PAIRS: list[dict[str, Any]] = [
    {"id": 7, "prompt": "Snow?", "completion": " Lots."},
    {"id": 8, "prompt": "日本 🥊", "completion": "🥊🥊!</s>"},
    {"id": 9, "prompt": None, "completion": '"only" \\ {it}'},
    {"id": 10, "prompt": "nothing follows", "completion": None},
    {"id": 11, "prompt": "empty", "completion": ""},
]


@pytest.mark.parametrize("write", ["jsonl", "parquet"])
def test_of_a_text_the_completion_counts_and_its_end(place: Place, write: str) -> None:
    spec = WRITERS[write](place.folder, PAIRS).replace(":messages", ":completion")
    template = '{id}: {prompt}\n"A":{completion}\n'
    place.tokenizer.save_pretrained(place.folder / "tokenizer")

    read = _read(order_of(place.folder, _mixture(spec, template=template, loss_on="completion")))

    for pair, (ids, mask) in zip(PAIRS, read, strict=True):
        if pair["completion"] is None:
            assert not ids
            continue
        prompt = f'{pair["id"]}: {pair["prompt"] or ""}\n"A":'
        engine = place.tokenizer.backend_tokenizer
        engine.encode_special_tokens = True
        encoded = engine.encode(f"{prompt}{pair['completion']}\n", add_special_tokens=False)
        ends = [place.tokenizer.eos_token_id]
        assert ids == encoded.ids + ends
        assert mask == [int(end > len(prompt)) for _, end in encoded.offsets] + [1]
        # As TRL marks it, where no token reaches over the edge.
        alone = engine.encode(prompt, add_special_tokens=False).ids
        assert mask == [int(i >= common_prefix_length(alone, ids)) for i in range(len(ids))]


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ({"template": "chat", "loss_on": "completion"}, "a template whose last column is the"),
        ({"loss_on": "completion"}, "a template whose last column is the source's own"),
        ({"template": "{text}{prompt}", "loss_on": "completion"}, "whose last column is the"),
        ({"template": "{prompt}{text}", "loss_on": "answers"}, "is for template: chat"),
        ({"chat_format": "alpaca"}, "is for template: chat; leave it out"),
        (
            {"template": "{prompt}{text}", "loss_on": "completion", "transform": "a:b"},
            "loss_on says which part of each row counts",
        ),
    ],
)
def test_loss_on_is_refused_where_it_says_nothing(of: dict[str, Any], reason: str) -> None:
    document = flat(["jsonl:a.jsonl:text"], packing="none", tokenizer="t")
    document["mixture"]["children"][0] |= of
    with pytest.raises(ConfigError, match=reason):
        config.parse(document, where="m.yaml", catalog=open_catalog(transforms=["a:b"]))


def _sharegpt(chat: Sequence[Mapping[str, Any]], **names: str) -> list[dict[str, Any]]:
    return [
        {"from": names.get(turn["role"], turn["role"]), "value": turn["content"]} for turn in chat
    ]


INPUT = ["Translate.", "Snow", "日本 \\"]
#: By format: its column, rows of it, and the messages and the number of those before the first that may count.
FORMATS: dict[str, tuple[str, list[dict[str, Any]], list[tuple[list[dict[str, Any]], int]]]] = {
    "sharegpt": (
        "conversations",
        [
            {"conversations": _sharegpt(RICH[0], user="human", assistant="gpt")},
            {"conversations": _sharegpt(CHATS[3])},
            {"conversations": json.dumps(_sharegpt(CHATS[0]))},
        ],
        [(RICH[0], 0), (CHATS[3], 0), (CHATS[0], 0)],
    ),
    "alpaca": (
        "output",
        [
            {"instruction": INPUT[0], "input": more, "output": INPUT[2]}
            for more in ("Snow", "", None)
        ],
        [(_said(f"{INPUT[0]}{more}", INPUT[2]), 0) for more in ("\n\nSnow", "", "")],
    ),
    "prompt_completion": (
        "completion",
        [
            {"prompt": CHATS[3][:3], "completion": CHATS[3][3:]},
            {"prompt": RICH[0][:2], "completion": RICH[0][2:]},
            {"prompt": '["no JSON', "completion": "it is [text]"},
        ],
        [(CHATS[3], 3), (RICH[0], 2), (_said('["no JSON', "it is [text]"), 1)],
    ),
}


@pytest.mark.parametrize(
    ("write", "loss_on"),
    [(_jsonl, None), (_parquet, "answers"), (WRITERS["JSON by datasets"], "answers")],
)
@pytest.mark.parametrize("chat_format", FORMATS)
def test_conversations_are_read_in_the_format_that_the_source_names(
    place: Place,
    chat_format: str,
    write: Write,
    loss_on: str | None,
) -> None:
    column, rows, chats = FORMATS[chat_format]
    # The last has values of other types, which a column of Parquet has not.
    count = len(rows) - (write is _parquet)
    spec = write(place.folder, [row | {"tools": TOOLS} for row in rows[:count]])
    of = {"chat_format": chat_format, "chat_tools": "tools", "loss_on": loss_on}

    read = _read(place.order(CHATML, spec.replace("messages", column), **of))

    for (ids, mask), (chat, before) in zip(read, chats[:count], strict=True):
        expected, counts = place.expected(chat, TOOLS)
        prompt = before and place.tokenizer.apply_chat_template(
            chat[:before], TOOLS, return_dict=False
        )
        begin = len(prompt or ())
        assert (ids, mask) == (expected, [0] * begin + counts[begin:])


def test_sharegpt_is_what_trl_converts() -> None:
    plain, renderer = (
        ChatRenderer("t", CHATML, {}, None, kind) for kind in ("messages", "sharegpt")
    )
    for chat in CHATS:
        row = {"conversations": _sharegpt(chat)}
        found = renderer.render(json.dumps(row["conversations"]))
        assert found == plain.render(json.dumps(maybe_convert_to_chatml(row)["messages"]))


@pytest.mark.parametrize("family", ["llama3", "phi3"])
def test_of_a_prompt_and_its_completion_counts_what_trl_counts(place: Place, family: str) -> None:
    folder = Path(trl.__file__).parent / "chat_templates"
    template = (folder / f"{family}.jinja").read_text(encoding="utf-8")
    pairs = [(chat[:-1], chat[-1:]) for chat in CHATS[:6] if chat[-1]["role"] == "assistant"]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    spec = _jsonl(place.folder, rows).replace("messages", "completion")
    of = {"chat_format": "prompt_completion", "loss_on": "answers"}

    read = _read(place.order(template, spec, **of))

    for (ids, mask), (prompt, completion) in zip(read, pairs, strict=True):
        asked = place.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False
        )
        both = place.tokenizer.apply_chat_template(prompt + completion, return_dict=False)
        begin = common_prefix_length(asked, both)
        assert (ids, mask) == (both, [0] * begin + [1] * (len(both) - begin))


BAD_ROWS: list[tuple[str, dict[str, Any], str]] = [
    (
        "sharegpt",
        {"conversations": _said("a", "b")},
        "message 0 has role, content; .* from and value",
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "narrator", "value": "a"}]},
        "message 0 is from 'narrator'; expected human, user, gpt, assistant, tool, observation, system",
    ),
    ("alpaca", {"instruction": None, "input": "", "output": "a"}, "expected text as instruction"),
    ("prompt_completion", {"prompt": [], "completion": "a"}, "text or messages as prompt and as"),
    ("prompt_completion", {"prompt": "a", "completion": [7]}, "expected a list of messages"),
    ("", {"prompt": [7], "completion": "a"}, r"the template has \[\[7\]\]; expected text or int"),
]


@pytest.mark.parametrize(("chat_format", "row", "reason"), BAD_ROWS)
def test_a_row_of_another_form_is_a_bad_row_that_says_what_was_found_and_expected(
    place: Place,
    chat_format: str,
    row: dict[str, Any],
    reason: str,
) -> None:
    column = FORMATS[chat_format][0] if chat_format else "completion"
    spec = _jsonl(place.folder, [row]).replace(":messages", f":{column}")
    of = {"chat_format": chat_format}
    if not chat_format:
        of = {"template": "{prompt}{completion}", "loss_on": "completion"}
    place.tokenizer.chat_template = CHATML
    place.tokenizer.save_pretrained(place.folder / "tokenizer")
    with pytest.raises(TokenizerError, match=rf"chats\.jsonl: row 0: .*{reason}"):
        next(order_of(place.folder, _mixture(spec, **of)).documents(0).read(None))


def test_a_block_around_all_of_a_template_has_every_token_count(place: Place) -> None:
    plain = MISTRAL.replace("{%- generation %}", "").replace("{% endgeneration %}", "")
    spec = place.jsonl(*CHATS)

    read = _read(place.order("{% generation %}" + plain + "{% endgeneration %}", spec))

    assert read == [place.expected(chat) for chat in CHATS]
    assert all(mask == [1] * len(ids) for ids, mask in read)


def test_a_template_sees_no_clock_no_chance_and_nothing_of_python(place: Place) -> None:
    place.tokenizer.save_pretrained(place.folder)
    definition = find_tokenizer(".", place.folder)

    def rendered(text: str) -> str:
        read = "{% for message in messages if message.content %}{% endfor %}"
        marked = read + "{% generation %}" + text + "{% endgeneration %}"
        return ChatRenderer("t", marked, definition.special_tokens).render(json.dumps(CHATS[0]))[0]

    assert (
        rendered("{% if strftime_now is defined %}today{% else %}26 Jul 2024{% endif %}")
        == "26 Jul 2024"
    )
    for text in ("{{ strftime_now('%d') }}", "{{ lipsum() }}", "{{ messages.__class__.mro() }}"):
        with pytest.raises(ValueError, match=r"the chat template: (UndefinedError|SecurityError)"):
            rendered(text)
    for text in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
    ):
        with pytest.raises(ValueError, match="the chat template: "):
            rendered(text)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"packing": "concat"}, "template: is for packing: none or best_fit"),
        ({"template": "{messages}", "chat_tools": "tools"}, "chat_tools: is for template: chat"),
        (
            {"fim": {"rate": 0.5, "ids": {"prefix": 1, "middle": 2, "suffix": 3}}},
            "template: says nothing of the tokens that fim makes",
        ),
        ({"loss_mask": "mask"}, "loss_mask: says nothing of the tokens that template makes"),
    ],
)
def test_what_does_not_go_with_a_chat_template_is_refused_by_field(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        parsed(_mixture("jsonl:chats.jsonl:messages", **fields))


def test_a_column_that_holds_no_conversations_is_refused(place: Place) -> None:
    spec = _parquet(place.folder, [{"messages": 7, "tools": [1]}])
    with pytest.raises(
        SourceError, match=r"column 'messages' is of type int64, expected lists \(or their JSON"
    ):
        place.order(CHATML, spec)
    with pytest.raises(TokenizerError, match="'bytes' has no chat template"):
        order_of(place.folder, _mixture(spec) | {"tokenizer": "bytes"})


#: Named by whoever writes the template, in the ways that templates read them.
OWN_KEYS = [
    "{{ m['from'] }}{{ m.value }}",
    "{% for key, value in m.items() %}{{ value }}{% endfor %}",
    "{{ m | tojson }}",
    "{{ dict(m).value }}",
    "{{ m.get('value') }}",
    "{{ m }}",
]


def _template(reads: str) -> str:
    return (
        "{% for m in messages %}{{ m.role }}{% generation %}"
        + reads
        + "{% endgeneration %}{% endfor %}"
    )


@pytest.mark.parametrize("reads", OWN_KEYS)
def test_a_template_may_read_keys_of_any_name(place: Place, reads: str) -> None:
    spec = place.jsonl([{"from": "human", "value": "hi"}])
    assert any(_read(place.order(_template(reads), spec))[0][1] or ())


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"from": "human", "value": "hi"}, "'role', 'content', .* nulls, 'from', 'value'; put"),
        ({"role": "user", "text": "hi"}, "'content', .* nulls, 'role', 'text'; put"),
        ({"role": "user", "content": None}, "'content', .* nulls, 'role'; put"),
        ({}, "'role', .* no keys; put"),
    ],
)
def test_a_message_of_which_the_template_reads_nothing_but_its_role_is_a_bad_row_that_names_its_keys(
    place: Place, message: dict[str, Any], found: str
) -> None:
    good = [
        {"role": "user", "content": ""},
        {"role": "assistant", "reasoning": "so"},
        {"role": "assistant", "tool_calls": [CALL]},
    ]
    spec = place.jsonl(good, [good[0], message])
    template = _template(
        "{{ m.content }}{{ m.reasoning_content }}{% if m.tool_calls %}{{ m.tool_calls }}{% endif %}"
    )
    reader = place.read(template, spec)

    assert len(next(reader).ends) == 1
    with pytest.raises(
        TokenizerError,
        match=rf"row 1: of message 1 the chat template reads nothing, .* it asks for {found}",
    ):
        next(reader)


LOOP = "{% for m in MESSAGES %}{% if TAKEN %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
SKIPPING = {
    "role": LOOP.replace("TAKEN", "m.role != 'system'"),
    "role after other keys": LOOP.replace("TAKEN", "not m.tool_calls and m.role != 'system'"),
    "slice": LOOP.replace("MESSAGES", "messages[1:]"),
    "filter": LOOP.replace("MESSAGES", "messages | selectattr('role', 'ne', 'system')"),
    "last": LOOP.replace("MESSAGES", "messages[-1:]"),
    "separator": LOOP.replace("TAKEN", "m.role != 'separator'"),
}


@pytest.mark.parametrize("skips", SKIPPING)
def test_a_message_that_the_template_skips_by_its_role_or_place_is_no_bad_row(
    place: Place, skips: str
) -> None:
    first = (
        {"role": "separator"}
        if skips == "separator"
        else {"role": "system", "content": "Be brief."}
    )
    chat = [first, *_said("Why?", "Because.")]
    spec = place.jsonl(chat, [first, {"from": "gpt", "value": "Hi"}])
    template = SKIPPING[skips].replace("MESSAGES", "messages").replace("TAKEN", "true")
    reader = place.read(template, spec)

    part = next(reader)
    assert (part.ids.tolist(), part.mask.tolist()) == place.expected(chat)
    with pytest.raises(TokenizerError, match=r"row 1: of message 1 .* 'from', 'value'"):
        next(reader)


def test_a_template_that_reads_no_message_at_all_makes_bad_rows(place: Place) -> None:
    spec = place.jsonl(CHATS[0])
    template = LOOP.replace("MESSAGES", "messages[2:]").replace("TAKEN", "true")
    with pytest.raises(TokenizerError, match="row 0: the chat template reads no message"):
        next(place.read(template, spec))


def test_the_share_of_labels_that_count_is_said_and_none_is_a_warning(place: Place) -> None:
    spec = place.jsonl(*CHATS)
    some = place.order(MISTRAL, spec)
    expected = [place.expected(chat)[1] for chat in CHATS]
    ids = place.folder / "ids.jsonl"
    ids.write_text('{"ids": [5, 6, 7], "mask": [0, 1, 0]}\n{"ids": [5, 6], "mask": [1, 0]}\n')
    document = _mixture(spec) | {"add_eot": False}
    document["mixture"]["children"] = [
        {"source": "jsonl:ids.jsonl:ids", "loss_mask": "mask"},
        {"source": "jsonl:[i]ds.jsonl:ids", "alias": "whole"},
    ]

    # A sample's first id is no label.
    assert label_shares(some) == {
        0: sum(sum(mask[1:]) for mask in expected) / sum(len(mask) - 1 for mask in expected)
    }
    assert [warns for warns, _ in label_notes(some)] == [False]
    assert label_shares(order_of(place.folder, document | {"mask_boundaries": True})) == {0: 1 / 3}
    ids.write_text('{"ids": [5, 6, 7], "mask": [1, 0, 0]}\n')
    assert label_shares(order_of(place.folder, document)) == {0: 0.0}
    # Cut off before the assistant speaks.
    short = _mixture(spec) | {"sequence_length": 2, "long_rows": "truncate"}
    ((warns, note),) = label_notes(order_of(place.folder, short))
    assert warns and f"{spec}: 0.00% of the labels in its first samples count, so nothing" in note


@pytest.mark.parametrize(
    ("costs", "reason"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "it took too long",
        ),
        ("{{ (messages | length + 2) ** (9 ** 9) }}", "it took too long"),
        ("{{ 'a' * 9 ** 10 }}", "it took too much memory"),
        (
            "{% set s = namespace(a='aa') %}{% for i in range(40) %}{% set s.a = s.a ~ s.a %}{% endfor %}",
            "much memory",
        ),
    ],
)
def test_a_row_that_costs_its_template_too_much_stops_the_run_by_name_and_is_never_skipped(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    costs: str,
    reason: str,
) -> None:
    monkeypatch.setattr(chats, "SECONDS", 2.0 if "long" in reason else 60.0)
    costly = "{% for message in messages if message.content == 'costly' %}" + costs + "{% endfor %}"
    spec = place.jsonl(CHATS[0], [], _said("costly"), CHATS[1])
    order = place.order(CHATML + costly, spec, on_bad_row="skip")

    reader = order.documents(0).read(None)
    assert np.diff(next(reader).ends, prepend=0).astype(bool).tolist() == [True, False]
    with pytest.raises(
        TokenizerError, match=rf"chats\.jsonl: row 2: the chat template: .*{reason}"
    ):
        next(reader)
