"""What the tokeniser classes of transformers make of a folder, beyond its files: the server's table of them.

``python -m tests.support.tokenizer_classes`` writes it anew, from the installed transformers.
"""

from __future__ import annotations

import inspect
import json
import struct
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenloom_server.tokenizer import classes as server

FILE = Path(server.__file__).with_name("classes.json")

#: Arguments that take a flag, but no part of what makes ids: they are for decoding, or for other tasks.
_OTHER_FLAGS = frozenset(
    {
        "clean_up_tokenization_spaces",
        "use_default_system_prompt",
        "predict_timestamps",
        "trim_offsets",
    }
)
#: A map of characters without a rule, as ``Precompiled`` reads it: its size, and a table of 256 empty units.
_CHARSMAP = struct.pack("<I", 1024) + bytes(1024)
_CHARSMAP_FLAG = "_spm_precompiled_charsmap"
_UNKNOWN = "<unknown>"


def table() -> dict[str, Any]:
    """Which class a model has, and what each class builds by its flags, as ``classes.json`` holds it."""
    import transformers
    from transformers.models.auto import tokenization_auto as auto

    named = {str(name) for name in auto.TOKENIZER_MAPPING_NAMES.values() if name}
    named |= {
        name
        for name in dir(transformers)
        if name.removesuffix("Fast").endswith(("Tokenizer", "Backend"))
    }
    classes = {name.removesuffix("Fast"): _class(name) for name in sorted(named, key=_fast_first)}
    return {
        "models": {
            kind: name.removesuffix("Fast")
            for kind, name in sorted(auto.TOKENIZER_MAPPING_NAMES.items())
            if name
        },
        "mistaken": sorted(auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS),
        "names": auto.MODEL_IDS_TO_TOKENIZERS_BACKEND,
        "classes": dict(sorted(classes.items())),
    }


def text() -> str:
    """The table with a line for each class."""
    whole = table()
    lines = [
        f"{json.dumps(name)}: {json.dumps(each, sort_keys=True)}"
        for name, each in whole.pop("classes").items()
    ]
    head = json.dumps(whole, sort_keys=True).removesuffix("}")
    return head + ', "classes": {\n' + ",\n".join(lines) + "\n}}\n"


def _fast_first(name: str) -> tuple[bool, str]:
    return not name.endswith("Fast"), name


def _class(name: str) -> dict[str, Any] | None:
    """None: it does not read ``tokenizer.json``. Without ``forms``: it takes the file as it is."""
    from transformers import TokenizersBackend
    from transformers.models.auto import tokenization_auto as auto

    found = auto.tokenizer_class_from_name(name)
    if found is not None and found.__name__ == "PythonBackend":
        found = TokenizersBackend
    # Stand-ins for classes of packages that are missing are of a type of their own.
    if type(found) is not type or not issubclass(found, TokenizersBackend):
        return None
    parameters = dict(inspect.signature(found.__init__).parameters)
    tokens = {key: each.default for key, each in parameters.items() if _is_token(key, each.default)}
    described: dict[str, Any] = {"tokens": tokens} if tokens else {}
    if found is TokenizersBackend or "__init__" not in found.__dict__:
        return described
    flags = _flags(parameters)
    try:
        forms = {
            values: _form(found, dict(zip(flags, values, strict=True)))
            for values in product(*flags.values())
        }
        made, stripping = found(), found(eos_token=AddedToken(_UNKNOWN, lstrip=True, special=True))
    except (TypeError, ValueError, ImportError, KeyError):
        return None
    described["tokens"] = {
        key: token if isinstance(token, str) else {"__type": "AddedToken", **token.__getstate__()}
        for key, token in made._special_tokens_map.items()
        if token is not None
    }
    adds = {str(token) for token in made.added_tokens_decoder.values()} - set(
        map(str, made._special_tokens_map.values())
    )
    if adds:
        described["adds"] = sorted(adds)
    if not any(
        token.lstrip
        for token in stripping.added_tokens_decoder.values()
        if token.content == _UNKNOWN
    ):
        described["resets"] = True
    return described | _by_deciding_flags(flags, forms)


def _is_token(key: str, default: Any) -> bool:
    return key.endswith("_token") and isinstance(default, str | AddedToken)


def _flags(parameters: dict[str, inspect.Parameter]) -> dict[str, list[Any]]:
    """The values of each flag that may decide what is built, the default first."""
    flags: dict[str, list[Any]] = {}
    for key, each in parameters.items():
        if key == _CHARSMAP_FLAG:
            flags[key] = [False, True]
        elif isinstance(each.default, bool) or key in (
            "strip_accents",
            "add_prefix_space",
            "keep_accents",
        ):
            flags[key] = (
                [] if key in _OTHER_FLAGS else [each.default, *({True, False} - {each.default})]
            )
    return {key: values for key, values in sorted(flags.items()) if values}


def _form(found: Any, flags: dict[str, Any]) -> dict[str, Any]:
    given = dict(flags)
    if _CHARSMAP_FLAG in given:
        given[_CHARSMAP_FLAG] = _CHARSMAP if given[_CHARSMAP_FLAG] else None
    if "unk_token" in inspect.signature(found.__init__).parameters:
        given["unk_token"] = _UNKNOWN
    backend = found(**given)._tokenizer
    return server.form(backend, json.loads(backend.to_str())["model"])


def _by_deciding_flags(
    flags: dict[str, list[Any]], forms: dict[tuple[Any, ...], dict[str, Any]]
) -> dict[str, Any]:
    """Without the flags that make no difference. ``flags``: the others, with their defaults."""
    kept = dict(flags)
    for key in flags:
        place = list(kept).index(key)
        without: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for values, form in forms.items():
            without.setdefault(values[:place] + values[place + 1 :], []).append(form)
        if all(form == several[0] for several in without.values() for form in several):
            forms = {values: several[0] for values, several in without.items()}
            del kept[key]
    return {
        "flags": {key: values[0] for key, values in kept.items()},
        "forms": {json.dumps(values): form for values, form in forms.items()},
    }


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
