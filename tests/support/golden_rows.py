"""Rows and mixtures of those golden orders that are read, rendered or encoded in other ways than by their bytes:
conversations, loss masks, a tokeniser's folder, rows that a filter leaves out, and bad ones that are skipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from support.corpora import mixture, numbers
from support.sources import write_table

#: Byte-level, with few merges, written by hand: most characters beyond ASCII have several tokens.
_TOKENIZER = Path(__file__).parents[1] / "golden" / "tokenizer"

_PLAIN = ("the", "snow", "100", "x = y;", "in\n\n", "ther")
_WORDS = (
    *_PLAIN,
    "naïve",
    "日本語",
    "😀",
    "👩‍👩‍👧",
    "<|end|>",
    "<tool>",
    "<|endoftext|>",
    "e\u0301",
    "\u00a0",
    "𝒳",
)
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "météo", "parameters": {"city": "string", "days": 1.5}},
    }
]

#: Each is a bad row where rows hold conversations: refused by the template, failing in it, and none at all.
_BAD_CHATS = (
    [{"role": "nobody", "content": "hi"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 7}],
    [],
    "no conversation",
    ["no message"],
)
#: Each is a bad row where lines hold a text.
_BAD_LINES = (
    '{"text": "cut',
    "[1]",
    '{"title": "no text"}',
    '{"text": ["a list"]}',
    '{"text": "\\ud800"}',
)


def write_golden_rows(folder: Path) -> Path:
    """The files of ``GOLDEN_ROWS``, below ``folder/data`` and ``folder/tokenizer``."""
    shutil.copytree(_TOKENIZER, folder / "tokenizer")
    (folder / "data").mkdir(exist_ok=True)
    _write_conversations(folder / "data")
    _write_ids(folder / "data")
    _write_texts(folder / "data")
    _write_json_and_nulls(folder / "data")
    _write_formats(folder)
    return folder


def _write_formats(folder: Path) -> None:
    """Conversations in other formats, and a tokeniser's folder whose chat template has no blocks."""
    plain = shutil.copytree(_TOKENIZER, folder / "without blocks") / "chat_template.jinja"
    template = plain.read_text(encoding="utf-8").replace("{%- generation %}", "")
    asks = "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
    plain.write_text(
        template.replace("{%- endgeneration %}", "").replace("{{- eos_token }}", asks),
        encoding="utf-8",
    )
    chats = [_chat(6, 400 + i) for i in range(16)]
    names = {"user": "human", "assistant": "gpt"}
    turns = [
        [{"from": names.get(one["role"], "system"), "value": one["content"]} for one in chat]
        for chat in chats
    ]
    _write_lines(folder / "data/turns.jsonl", [json.dumps({"said": each}) for each in turns])
    pairs = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats]
    pairs.append({"prompt": _text(4, 500), "completion": _text(5, 501)})
    _write_lines(folder / "data/pairs.jsonl", map(json.dumps, pairs))
    tasks = [
        {
            "instruction": _text(5, 520 + i),
            "input": (None, "", _text(3, 540 + i))[i % 3],
            "output": _text(6, 560 + i),
        }
        for i in range(12)
    ]
    pq.write_table(pa.Table.from_pylist(tasks), folder / "data/tasks.parquet", row_group_size=5)


def _write_conversations(data: Path) -> None:
    chats: list[Any] = [_chat(5, 1 + i) for i in range(30)]
    for i, bad in enumerate(_BAD_CHATS):
        chats.insert(5 * i + 3, bad)
    _write_lines(data / "chats.jsonl", map(json.dumps, map(_with_tools, chats, range(len(chats)))))
    ends = [_chat(7, 300 + i, ("日本", "😀", "𝒳", "e\u0301")) for i in range(20)]
    _write_lines(data / "ends.jsonl", [json.dumps({"messages": chat}) for chat in ends])
    rows = [_with_tools(_chat(8, 100 + i), i) for i in range(25)]
    write_table(data / "chats-0.parquet", pa.Table.from_pylist(rows[:14]), 4)
    write_table(data / "chats-1.parquet", pa.Table.from_pylist(rows[14:]), 4)
    as_text = [{"messages": json.dumps(_chat(9, 200 + i))} for i in range(18)]
    write_table(
        data / "chats" / "data.arrow", pa.Table.from_pylist([*as_text, {"messages": None}]), 5
    )


def _write_ids(data: Path) -> None:
    lengths = numbers(30, 9, 0, 40)
    ids = [numbers(length, 400 + i, 0, 280) for i, length in enumerate(lengths)]
    masks = [numbers(length, 500 + i, 0, 2) for i, length in enumerate(lengths)]
    marked = {
        "ids": pa.array(ids, pa.list_(pa.int32())),
        "mask": pa.array(masks, pa.list_(pa.int8())),
    }
    write_table(data / "marked.parquet", pa.table(marked), 7)
    # Ids outside of the vocabulary.
    outside = [*ids[:9], [1, 300, 2], *ids[9:15], [-1], *ids[15:]]
    write_table(
        data / "outside.parquet", pa.table({"ids": pa.array(outside, pa.list_(pa.int32()))}), 7
    )


def _write_texts(data: Path) -> None:
    texts = [_text(1 + i % 19, 600 + i) for i in range(50)]
    lines = [
        json.dumps({"text": text or None, "title": f"№ {i}" if i % 3 else None, "score": i % 7})
        for i, text in enumerate(texts)
    ]
    for i, line in enumerate((*_BAD_LINES, " \t", "")):
        lines.insert(6 * i + 2, line)
    _write_lines(data / "good.jsonl", [line for line in lines if line not in _BAD_LINES])
    _write_lines(data / "some bad.jsonl", lines)
    _write_lines(data / "lines.txt", [repr(_text(7, 700 + i)) for i in range(24)])
    # Some of it is no UTF-8.
    encoded = [
        text.encode("latin-1" if i % 9 == 4 else "utf-8", "ignore") for i, text in enumerate(texts)
    ]
    buffers = pa.array(encoded, pa.binary()).buffers()
    write_table(
        data / "latin.parquet", pa.table({"text": pa.StringArray.from_buffers(50, *buffers[1:])}), 8
    )


def _write_json_and_nulls(data: Path) -> None:
    """What says by its type that it is JSON, or that all is null; masks of booleans; and values in names of folders."""
    chats = [_chat(6, i) for i in range(9)]
    content = pa.array([json.dumps(turn["content"]) for chat in chats for turn in chat], pa.json_())
    roles = pa.array([turn["role"] for chat in chats for turn in chat])
    turns = pa.StructArray.from_arrays([roles, content], ["role", "content"])
    messages = pa.ListArray.from_arrays([0, *accumulate(map(len, chats))], turns)
    write_table(data / "parts of json.parquet", pa.table({"messages": messages}), 4)
    texts = [
        json.dumps({"said": _text(5, 800 + i)}, ensure_ascii=False) if i % 4 else None
        for i in range(16)
    ]
    table = pa.table({"text": pa.array(texts, pa.json_()), "note": pa.nulls(16)})
    write_table(data / "json" / "lang=en" / "0.parquet", table, 5)
    write_table(
        data / "json" / "lang=de" / "1.parquet", pa.table({"text": pa.nulls(3), "note": ["a"] * 3})
    )
    write_table(
        data / "json" / "lang=fr" / "2.parquet", pa.table({"text": ["'"] * 5, "note": ["b"] * 5})
    )
    ids = [numbers(1 + i % 7, 900 + i, 0, 280) for i in range(20)]
    masks = [[number % 3 == 0 for number in row] for row in ids]
    write_table(data / "booleans.parquet", pa.table({"ids": ids, "mask": masks}), 6)
    write_table(
        data / "booleans.parquet.null.parquet", pa.table({"ids": pa.nulls(2), "mask": pa.nulls(2)})
    )


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _text(words: int, salt: int, among: Sequence[str] = _WORDS) -> str:
    return " ".join(among[i] for i in numbers(words, salt, 0, len(among)))


def _chat(words: int, salt: int, ends: Sequence[str] = _PLAIN[:2]) -> list[dict[str, Any]]:
    """One to three turns each, of up to so many words; the assistant's end with one of ``ends``."""
    turns, *lengths = (1 + number for number in numbers(7, salt, 0, words))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "sno"}] if salt % 4 == 0 else []
    for turn in range(1 + turns % 3):
        messages.append({"role": "user", "content": _text(lengths[2 * turn], salt + 1000 + turn)})
        said = f"{_text(lengths[2 * turn + 1], salt + 2000 + turn)} {ends[(salt + turn) % len(ends)]}".lstrip(
            "\u00a0 "
        )
        messages.append({"role": "assistant", "content": said})
        if salt % 5 == 0:
            messages[-1]["reasoning"] = _text(3, salt + 3000 + turn)
    return messages


def _with_tools(chat: Any, number: int) -> dict[str, Any]:
    language = ("de", "en", "fr", "en", None)[number % 5]
    return {"messages": chat, "lang": language, "tools": _TOOLS if number % 3 == 0 else None}


def _of_folder(children: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A mixture whose texts go through the tokeniser's folder."""
    return mixture(
        mixture={"policy": "least_consumed", "children": list(children)},
        tokenizer="tokenizer",
        **fields,
    )


_CHATS = {"template": "chat", "chat_tools": "tools"}
_ANSWERS = {"template": "chat", "loss_on": "answers"}
#: What the assistant says ends with a character of one token, but in the third of these.
GOLDEN_ROWS: dict[str, dict[str, Any]] = {
    "conversations, a row each, bad ones skipped": _of_folder(
        [
            {
                "source": "jsonl:data/chats.jsonl:messages",
                "filter": 'lang in ["de", "en"]',
                "epochs": 1.5,
                **_CHATS,
            }
        ],
        packing="none",
        sequence_length=160,
        on_bad_row="skip",
    ),
    "conversations beside ids with masks and texts without, best fit": _of_folder(
        [
            {
                "source": "parquet:data/chats-*.parquet:messages",
                "shuffle": "rows",
                "shuffle_window_rows": 6,
                **_CHATS,
            },
            {
                "source": "arrow:data/chats:messages",
                "template": "chat",
                "weight": 2,
                "add_eot": True,
            },
            {
                "source": "parquet:data/marked.parquet:ids",
                "loss_mask": "mask",
                "epochs": 2,
                "add_bos": True,
            },
            {"source": "txt:data/lines.txt:text"},
        ],
        packing="best_fit",
        pack_window_rows=8,
        sequence_length=128,
        labels="shifted",
        padding="left",
    ),
    "conversations whose turns end with characters of several tokens": _of_folder(
        [{"source": "jsonl:data/ends.jsonl:messages", "template": "chat"}],
        packing="best_fit",
        sequence_length=160,
    ),
    "a tokeniser's folder, special tokens are text": _of_folder(
        [
            {
                "source": "jsonl:data/good.jsonl:text",
                "filter": "score > 1",
                "template": "{title}: {text}",
            },
            {
                "source": "txt:data/lines.txt:text",
                "shuffle": "rows",
                "shuffle_window_rows": 5,
                "epochs": 2,
            },
        ],
        sequence_length=24,
        add_bos=True,
    ),
    "a tokeniser's folder, special tokens are parsed, bad rows skipped": _of_folder(
        [
            {"source": "jsonl:data/some bad.jsonl:text", "weight": 2, "epochs": 2},
            {"source": "parquet:data/latin.parquet:text"},
            {"source": "parquet:data/outside.parquet:ids"},
        ],
        sequence_length=32,
        special_tokens_in_text="parse",
        on_bad_row="skip",
        tail="pad",
    ),
    "conversations in other formats, answers found without blocks, and completions": _of_folder(
        [
            {"source": "jsonl:data/turns.jsonl:said", "chat_format": "sharegpt", **_ANSWERS},
            {"source": "parquet:data/tasks.parquet:output", "chat_format": "alpaca", **_ANSWERS},
            {
                "source": "jsonl:data/pairs.jsonl:completion",
                "chat_format": "prompt_completion",
                **_ANSWERS,
            },
            {
                "source": "parquet:data/tasks*.parquet:output",
                "template": "{instruction} {input}: {output}\n",
                "loss_on": "completion",
                "epochs": 2,
            },
        ],
        packing="best_fit",
        sequence_length=160,
    )
    | {"tokenizer": "without blocks"},
    "conversations with JSON in them": _of_folder(
        [{"source": "parquet:data/parts of json.parquet:messages", "template": "chat"}],
        packing="none",
        sequence_length=160,
    ),
    "JSON, files of nulls, folders that are compared, and masks of booleans": _of_folder(
        [
            {
                "source": "parquet:data/json/**/*.parquet:text",
                "filter": 'lang in ["en", "de"]',
                "template": "{text} {note}",
            },
            {"source": "parquet:data/booleans*.parquet:ids", "loss_mask": "mask", "epochs": 2},
        ],
        packing="best_fit",
        sequence_length=48,
    ),
}
