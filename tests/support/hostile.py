"""What strangers, and slips of the pen, write: texts, mixture files, cards, tokenisers that end in a clear error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tokenloom_server.core.control_characters import ESCAPES

#: Names and sentences that a terminal, a log or a page would obey instead of showing.
TEXTS = (
    "\x1b[2J\x1b[31mall is well",  # clears the screen
    "\x1b]0;title\x07",
    "\x9b2J",  # the same in one character of C1
    "wiki\n2026-01-01 INFO a forged line",
    "wiki\rspoofed",
    "tab\there",
    "wiki\x00",
    "wiki\x08\x08\x08\x08code",
    "\x7f",
    "line\u2028separator",
    "paragraph\u2029separator",
    "\u202egpj.exe",  # shown from right to left
    "\u2067isolated\u2069",
    "half a pair \ud83d",
)
#: Texts of many scripts that mean no harm.
PLAIN_TEXTS = (
    "wiki",
    "Übergrößen, straße",
    "ви́ки",
    "维基百科",
    "ويكي‌پدیا \u200f",
    "👩\u200d🔬 science",
)


def is_shown_as_it_is(text: str, *, lines: bool = False) -> bool:
    """Whether no character of a text commands a terminal; ``lines``: beyond line feeds and tabs."""
    ours = {"\n", "\t"} if lines else set()
    return not any(ord(character) in ESCAPES for character in text if character not in ours)


DIGITS = 100_000
DEPTH = 100_000


def yaml_bombs() -> dict[str, str]:
    """Documents that are small as text; by name. They are mappings with the key ``bomb``, or not even that."""
    tenfold = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30))
    merged = "\n".join(
        f"m{i}: &m{i}\n  <<: [{', '.join([f'*m{i - 1}'] * 10)}]" for i in range(1, 30)
    )
    return {
        "aliases of aliases": f"a0: &a0 [x]\n{tenfold}\nbomb: *a29",
        "mappings merged": f"m0: &m0 {{x: 1}}\n{merged}\nbomb: *m29",
        "an alias of what it lies in": "bomb: &a [*a, *a]",
        "many aliases of a long list": f"a: &a [{'x, ' * 3000}]\nbomb: [{'*a, ' * 3000}]",
        "a long number": f"bomb: {'9' * DIGITS}",
        "a long number in quotes": f"bomb: '{'9' * DIGITS}'",
        "a long hexadecimal number": f"bomb: 0x{'f' * DIGITS}",
        "a long number to the base of 60": f"bomb: 1{':59' * DIGITS}",
        "a long float": f"bomb: 1.{'0' * DIGITS}1",
        "a tagged number": f"bomb: !!int '{'9' * DIGITS}'",
        "lists in lists": f"bomb: {'[' * DEPTH}",
        "lists in lists, as a block": f"bomb:\n  {'- ' * DEPTH}x",
        "mappings in mappings": f"bomb: {'{a: ' * DEPTH}",
        "keys in keys": f"{'? ' * DEPTH}x",
        "more values than any mixture has": f"bomb: [{'x, ' * 300_000}]",
        "a day that there is none of": "bomb: 2026-99-99",
        "a list as a key": "bomb: 1\n[a, b]: 2",
    }


def mixtures() -> dict[str, str]:
    """Mixture files, by name: the bombs, and each field with a number or text that it was not made for."""
    run = """\
run: wiki
tokenizer: bytes
sequence_length: 8
mixture:
  policy: least_consumed
  children:
    - {source: "txt:a.txt:text", FIELD}
"""
    child = {
        **{
            f"{field}: a long number": f"{field}: {'9' * 900}"
            for field in ("weight", "epochs", "max_tokens", "lanes")
        },
        **{
            f"{field}: text": f"{field}: '{'9' * 100}e{'9' * 900}'"
            for field in ("weight", "epochs", "max_tokens")
        },
        "an alias of a megabyte": f"alias: '{'x' * 2**20}'",
        "a comparison of blanks": f"filter: 'a{' ' * 20_000}b'",
        "a comparison with a long number": f"filter: 'a == {'9' * 20_000}'",
        "a template of braces": f"template: '{'{' * 20_001}'",
        "a key of a megabyte": f"? {'x' * 2**20}\n      : 1",
    }
    return {
        **{f"bomb: {name}": text for name, text in yaml_bombs().items()},
        **{
            f"seed: {name}": f"{run.replace('FIELD', 'weight: 1')}{text.replace('bomb:', 'seed:')}\n"
            for name, text in yaml_bombs().items()
            if "keys" not in name
        },
        **{f"child: {name}": run.replace("FIELD", text) for name, text in child.items()},
        "nothing at all": "",
        "a megabyte of blanks": " " * 2**20,
    }


def cards() -> dict[str, str]:
    """Cards of datasets on a Hub (README.md), by name."""
    return {
        name: f"---\n{text.replace('bomb:', 'configs:')}\n---\n# A dataset\n"
        for name, text in yaml_bombs().items()
    }


def tokenizers() -> dict[str, str]:
    """``tokenizer.json``, by name."""

    def with_ids(kind: str, *ids: int, added: int = 3) -> str:
        words = {"a": 0, "[UNK]": 1, **{f"w{i}": i for i in ids}}
        model: dict[str, Any] = {"type": kind, "vocab": words, "unk_token": "[UNK]"}
        if kind == "BPE":
            model["merges"] = []
        token = {"id": added, "content": "<x>", "special": True, "normalized": False}
        token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        return json.dumps({"version": "1.0", "added_tokens": [token], "model": model})

    return {
        **{
            f"{kind} with the id {i}": with_ids(kind, i)
            for kind in ("BPE", "WordLevel")
            for i in (2**24, 2**32 - 1)
        },
        "an id beyond 32 bits": with_ids("BPE", 2**32),
        "an id below 0": with_ids("BPE", -1),
        "a long number": f'{{"model": {"9" * DIGITS}}}',
        "a long id": with_ids("BPE", 7).replace("7", "9" * 4000),
        "lists in lists": f'{{"model": {"[" * DEPTH}',
        "mappings in mappings": '{"model": {"a": ' * DEPTH,
    }


class Outcome(NamedTuple):
    """What became of all inputs in one process."""

    errors: dict[str, str]
    """By name; empty for what was taken."""
    peak_mib: int
    """Of that process's memory."""


def outcome_of(call: str, inputs: dict[str, str], folder: Path) -> Outcome:
    """Has a child process with at most 4 GiB of addresses read each input from a file; ``call``: Python that does it
    for ``path``, with ``TokenloomError`` or ``LayoutError`` where it refuses."""
    paths = {}
    for i, (name, text) in enumerate(inputs.items()):
        (folder / str(i)).mkdir()
        paths[name] = str(folder / str(i) / "tokenizer.json")
        Path(paths[name]).write_text(text, encoding="utf-8")
    program = f"""
import json, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
from tokenloom_server.errors import TokenloomError
from tokenloom_server.sources.hub_layout import LayoutError, checked_card
errors = {{}}
for name, path in json.loads(sys.stdin.read()).items():
    path = Path(path)
    try:
        {call}
        errors[name] = ""
    except (TokenloomError, LayoutError) as error:
        errors[name] = str(error)
# Not ru_maxrss, which begins with that of the process that started this one.
peak_kib = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
print(json.dumps([errors, peak_kib // 1024]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, input=json.dumps(paths), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors, peak = json.loads(done.stdout)
    return Outcome(errors, peak)
