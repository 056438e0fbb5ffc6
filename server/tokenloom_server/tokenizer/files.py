"""Where a tokeniser's files lie: a path, or in the Hub's cache on this machine. Nothing is downloaded here."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tokenloom_server.errors import TokenizerError
from tokenloom_server.storage.file import pointer_fault_at

_log = logging.getLogger(__name__)

#: The name of the tokeniser that needs no file: its ids are the bytes of UTF-8.
BYTES_TOKENIZER = "bytes"

#: What a tokeniser's folder holds: the tokeniser, further tokens and names of special ones, where its class is not
#: known otherwise the model's config, and the chat template.
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
MODEL_FILE = "config.json"
CHAT_FILE = "chat_template.jinja"
FILES = (TOKENIZER_FILE, CONFIG_FILE, SPECIAL_FILE, ADDED_FILE, MODEL_FILE, CHAT_FILE)

CONVERT = (
    "save it as a tokenizer.json, for example with transformers: "
    "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
)

#: A repository on the Hub as mixture files name it: ``gpt2``, ``org/name``, ``org/name@revision``.
_HUB_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@(?P<revision>[\w./-]+))?"
)
_LISTED_FILES = 12


def tokenizer_file(name: str, base_dir: Path) -> Path:
    """The file that holds a tokeniser, by the path or the Hub's name in a mixture file; relative paths begin at
    ``base_dir``.

    A path that exists is meant before a name on the Hub. Raises ``TokenizerError`` where neither is on this machine,
    and where it, or a file beside it, only points to data.
    """
    path = base_dir / name
    if path.is_dir():
        path /= TOKENIZER_FILE
    elif not path.exists() and not path.is_symlink():
        path = _cached(name, path)
    # A file of another name may stand beside files that are not its own.
    for file in map(path.with_name, FILES if path.name == TOKENIZER_FILE else (path.name,)):
        if fault := pointer_fault_at(file):
            raise TokenizerError(f"tokenizer {name!r}: {file} {fault}")
    if path.exists():
        return path
    there = sorted(entry.name for entry in path.parent.iterdir())
    listed = ", ".join(there[:_LISTED_FILES]) + (", …" if len(there) > _LISTED_FILES else "")
    raise TokenizerError(
        f"tokenizer {name!r}: the folder {path.parent} has no tokenizer.json (found: {listed or 'nothing'}); {CONVERT}"
    )


def tokenizer_files(name: str, base_dir: Path) -> Iterator[str]:
    """What ``tokenizer_file``, and who reads beside it, may look at, the name itself first; nothing is looked at before
    that was taken. A repository on the Hub is one URL."""
    if name == BYTES_TOKENIZER:
        return
    hub = _HUB_NAME.fullmatch(name)
    if hub is not None and not (base_dir / name).exists():
        yield f"hf://{hub['repo']}"
        return
    yield name
    folder = Path(name) if (base_dir / name).is_dir() else Path(name).parent
    yield from (str(folder / file) for file in FILES)


def _cached(name: str, path: Path) -> Path:
    """``tokenizer.json`` of a repository in the cache, at the commit that its revision had when it was downloaded."""
    missing, hub = f"tokenizer {name!r}: {path} does not exist", _HUB_NAME.fullmatch(name)
    if hub is None:
        raise TokenizerError(
            f"{missing}; expected a tokenizer.json, a folder with one, a name on the Hub such as 'gpt2' or "
            f"'org/name@revision', or {BYTES_TOKENIZER!r}"
        )
    try:
        look_up = import_module("huggingface_hub").try_to_load_from_cache
    except ImportError:
        raise TokenizerError(
            f"{missing}; to take it as a name on the Hub needs huggingface_hub: pip install 'tokenloom[hf]'"
        ) from None
    try:
        cached = look_up(hub["repo"], TOKENIZER_FILE, revision=hub["revision"])
    except ValueError:  # no name that a repository may have
        cached = None
    if isinstance(cached, str):
        _log.info(
            "tokenizer %r: from the Hub's cache, at commit %s", name, Path(cached).parent.name
        )
        return Path(cached)
    revision = f" --revision {hub['revision']}" if hub["revision"] else ""
    raise TokenizerError(
        f"{missing}, and the Hub's cache on this machine has no tokenizer.json of {hub['repo']!r}; give another path "
        f"or 'bytes', or download it: hf download {hub['repo']}{revision} --include 'tokenizer*' "
        "--include 'chat_template*' --include '*tokens*.json' --include config.json "
        f"(if the repository has no tokenizer.json, {CONVERT})"
    )
