"""Which files of a dataset make which split: by its card's ``configs``, or by the usual names of files and folders.

The rules are those of `datasets` (its documentation, "Structure your repository" and "Manual configuration"), so that a
split has the files that ``load_dataset`` would read, in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import has_magic
from posixpath import basename
from typing import Any

import yaml

from tokenloom_server.storage.yaml_bounds import check_yaml

#: Endings that follow that of the content.
COMPRESSED = ("gz", "zst", "bz2", "xz", "lz4")

#: Files that are never data, whatever pattern they match.
_NO_DATA = frozenset(
    {"README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json"}
)
_NO_DATA_ENDINGS = ("py", "md", "yaml", "yml", "ipynb", "sh")

_SHARDED = "data/*-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]*.*"
_SHARDED_NAME = re.compile(r"(.+)-\d{5}-of-\d{5}.*\..*", re.DOTALL)
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_IN_FOLDER_NAME = (
    "**/{}/**",
    "**/{}[-._ 0-9]*/**",
    "**/*[-._ 0-9]{}/**",
    "**/*[-._ 0-9]{}[-._ 0-9]*/**",
)
_IN_FILE_NAME = ("**/{}[-._ 0-9]*", "**/*[-._ 0-9]{}[-._ 0-9]*")

Patterns = Mapping[str, Sequence[str]]
"""By split, the patterns that find its files, in order."""

Find = Callable[[str], Sequence[str]]
"""The files that match a pattern, in the order of their paths; none where none does."""


class CardError(Exception):
    """A card's ``configs`` are not what they should be."""


@dataclass(frozen=True, slots=True)
class Config:
    """A part of a dataset, as a card's ``configs`` has it."""

    name: str
    folder: str
    """``data_dir``: below which its files lie; empty for the whole repository."""
    patterns: Patterns | None
    """``data_files``; None: the usual names."""
    is_default: bool


def configs_of(card: str) -> dict[str, Config]:
    """What a card (README.md) says of configs; one named ``default`` where it says nothing. Raises ``CardError``."""
    entries = _header(card).get("configs")
    if not entries:
        return {"default": Config("default", "", None, True)}
    if not isinstance(entries, list):
        raise CardError(f"its card's configs are {type(entries).__name__}, expected a list")
    configs: dict[str, Config] = {}
    for entry in entries:
        if not isinstance(entry, dict) or "config_name" not in entry:
            raise CardError(f"its card has a config without config_name: {str(entry)[:80]}")
        name, files = str(entry["config_name"]), entry.get("data_files")
        patterns = None if files is None else _patterns(name, files)
        folder = str(entry.get("data_dir") or "").strip("/")
        configs[name] = Config(name, folder, patterns, name == "default" or bool(entry.get("default")))
    if len(configs) == 1:
        only = next(iter(configs.values()))
        configs[only.name] = Config(only.name, only.folder, only.patterns, True)
    return configs


def _header(card: str) -> dict[str, Any]:
    """The YAML between the card's first two lines of dashes."""
    lines = card.removeprefix("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return {}
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    if end is None:
        return {}
    try:
        header = "\n".join(lines[1:end])
        check_yaml(header)
        document = yaml.load(header, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise CardError(f"its card's header is no YAML that is read ({str(error).splitlines()[0]})") from None
    return document if isinstance(document, dict) else {}


def _patterns(config: str, files: Any) -> Patterns:
    """``data_files``: a pattern, a list of them (both are the split ``train``), or a list by split."""
    if isinstance(files, str):
        return {"train": [files]}
    if isinstance(files, list) and all(isinstance(item, str) for item in files):
        return {"train": files}
    by_split: dict[str, Sequence[str]] = {}
    for item in files if isinstance(files, list) else ():
        path = item.get("path") if isinstance(item, dict) else None
        paths = [path] if isinstance(path, str) else path
        if not isinstance(paths, list) or not all(isinstance(one, str) for one in paths) or "split" not in item:
            break
        split = str(item["split"])
        if split in by_split:
            raise CardError(f"its card's config {config!r} has the split {split!r} twice")
        by_split[split] = paths
    else:
        if by_split:
            return by_split
    raise CardError(f"its card's config {config!r} has data_files that are no patterns by split: {str(files)[:120]}")


def splits_of(config: Config, find: Find) -> Patterns:
    """The splits of a config, with the patterns of their files below the repository's root."""

    def below(pattern: str) -> str:
        return f"{config.folder}/{pattern}" if config.folder else pattern

    if config.patterns is not None:
        return {split: [below(one) for one in by_split] for split, by_split in config.patterns.items()}
    sharded = [_SHARDED_NAME.fullmatch(basename(path)) for path in data_files(below(_SHARDED), find)]
    names = {match[1] for match in sharded if match is not None}
    if names:
        return {name: [below(_SHARDED.replace("*", _literal(name), 1))] for name in sorted(names, key=_usual_first)}
    for bases in (_IN_FOLDER_NAME, _IN_FILE_NAME):
        usual = {
            split: [below(base.format(word)) for word in words for base in bases] for split, words in _KEYWORDS.items()
        }
        by_split = {
            split: patterns for split, patterns in usual.items() if any(data_files(one, find) for one in patterns)
        }
        if by_split:
            return by_split
    return {"train": [below("**")]} if data_files(below("**"), find) else {}


def _usual_first(split: str) -> tuple[int, str]:
    usual = list(_KEYWORDS)
    return (usual.index(split) if split in usual else len(usual), split)


def _literal(name: str) -> str:
    """A name as a pattern that matches it alone."""
    return re.sub(r"([*?[])", r"[\1]", name)


def data_files(pattern: str, find: Find) -> list[str]:
    """The files of a pattern that may be data. What is hidden counts only where the pattern names it."""
    wanted = basename(pattern)
    return [
        path
        for path in find(pattern)
        if (basename(path) not in _NO_DATA or basename(path) == wanted)
        and _ending(path)[0] not in _NO_DATA_ENDINGS
        and _hidden(path) == _hidden(pattern)
        and _special(path) == _special(pattern)
    ]


def _hidden(path: str) -> int:
    return sum(part.startswith(".") and set(part) != {"."} for part in path.split("/"))


def _special(path: str) -> int:
    return sum(part.startswith("__") for part in path.split("/")[:-1])


def _ending(path: str) -> tuple[str, str]:
    """A file's ending, and that of its compression."""
    parts = basename(path).lower().split(".")[1:]
    packed = parts.pop() if len(parts) > 1 and parts[-1] in COMPRESSED else ""
    return (parts[-1] if parts else "", packed)


def ending_of(path: str) -> str:
    """What a file's name ends with, in lower case: ``.csv``, ``.jsonl.gz``; ``no ending`` without one."""
    return "".join(f".{part}" for part in _ending(path) if part) or "no ending"


def files_of(patterns: Sequence[str], find: Find) -> list[str]:
    """The files of a split: pattern after pattern, each file once. Raises ``CardError`` for one that is not there."""
    paths_once: dict[str, None] = {}
    for pattern in patterns:
        paths = data_files(pattern, find)
        if not paths and not has_magic(pattern):
            raise CardError(f"its card names the file {pattern!r}, which it does not have")
        paths_once |= dict.fromkeys(paths)
    return list(paths_once)
