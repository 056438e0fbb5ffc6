"""Which class transformers makes of a tokeniser's folder, and whether it encodes as the ``tokenizer.json`` alone does.

Most classes build a tokeniser of their own around the file's vocabulary. ``classes.json`` says what each builds; it is
written from transformers 5.24 by ``tests/support/tokenizer_classes.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenloom_server.errors import TokenizerError
from tokenloom_server.tokenizer.files import CONFIG_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: The class that takes the file as it is. Its other names have no ``forms`` in the table, nor has one it does not know.
_AS_IT_IS = "TokenizersBackend"


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        Path(__file__).with_name("classes.json").read_text(encoding="utf-8")
    )
    return table


def class_of(
    name: str, content: str, config: Mapping[str, Any], model: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The class that ``AutoTokenizer`` takes, by a ``tokenizer_config.json`` and the model's ``config.json``, and what
    the table says of it.

    Raises ``TokenizerError`` for code in the folder, which nobody runs, and where it reads no ``tokenizer.json``.
    """
    table, kind = _table(), model.get("model_type")
    named = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix(
        "Fast"
    )
    registered = table["models"].get(kind)
    is_mistaken = not {kind, model.get("model_name")}.isdisjoint(table["mistaken"])
    code, chosen = config.get("auto_map"), named or registered
    if code.get("AutoTokenizer") if isinstance(code, dict) else code:
        if not (is_mistaken or registered or named in table["classes"]):
            raise refusal(name, named, "is code in the folder (auto_map)")
    elif named == "LlamaTokenizer" and not is_mistaken and '"ByteLevel"' in content:
        chosen = _AS_IT_IS
    elif registered == _AS_IT_IS or is_mistaken:
        chosen = registered or named
    if any(fnmatchcase(name.partition("@")[0].lower(), pattern) for pattern in table["names"]):
        chosen = _AS_IT_IS
    described = table["classes"].get(chosen, {})
    if described is None:
        raise refusal(name, chosen, f"does not read {TOKENIZER_FILE}")
    return chosen, described


def built(
    described: Mapping[str, Any], config: Mapping[str, Any], found: Mapping[str, Any], unknown: str
) -> Any:
    """What a class builds in the place of the ``found`` form of a file, by a ``tokenizer_config.json`` and the content
    of its ``unk_token``."""
    # Whether the file has a map of characters is no field, but decides what is built, too.
    config = {**config, "_spm_precompiled_charsmap": "Precompiled" in json.dumps(found)}
    values = json.dumps([config.get(flag, default) for flag, default in described["flags"].items()])
    form = json.dumps(described["forms"].get(values))
    return json.loads(form.replace('"<unknown>"', json.dumps(unknown)))


def form(tokenizer: Tokenizer, model: Mapping[str, Any]) -> dict[str, Any]:
    """What decides ids beside the vocabulary and the added tokens. ``model``: that of its ``tokenizer.json``."""
    parts: dict[str, Any] = {}
    for part in ("normalizer", "pre_tokenizer"):
        component = getattr(tokenizer, part)
        parts[part] = (
            None
            if component is None
            else json.loads(component.__getstate__(), object_hook=_deciding)
        )
    plain = {
        key: value for key, value in model.items() if value not in (None, "") and value is not False
    }
    plain |= {"type": type(tokenizer.model).__name__, "vocab": None, "merges": None}
    return {**parts, "model": plain}


def same(found: dict[str, Any], built: dict[str, Any] | None, model: Mapping[str, Any]) -> bool:
    """Whether two forms give the same ids with the vocabulary of ``model``."""
    if built is None:
        return False
    # With a piece for each byte, BPE finds nothing unknown.
    is_bytewise = (
        found["model"]["type"] == "BPE"
        and "byte_fallback" in found["model"]
        and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    )
    unused = {"unk_token": None, "fuse_unk": None} if is_bytewise else {}
    return found | {"model": found["model"] | unused} == built | {"model": built["model"] | unused}


def refusal(name: str, class_name: str, why: str) -> TokenizerError:
    """That a class gives other ids than the file, by its name."""
    return TokenizerError(
        f"tokenizer {name!r}: its tokenizer_class {class_name!r} {why}, so the ids of transformers would differ from "
        f"those of {TOKENIZER_FILE}; for the file's, set tokenizer_class to 'PreTrainedTokenizerFast' in {CONFIG_FILE} "
        "and remove auto_map there; for the class's, save what it builds in another folder, "
        "AutoTokenizer.from_pretrained(…).save_pretrained(…), and do the same there"
    )


def _deciding(component: dict[str, Any]) -> dict[str, Any]:
    """Without what is for offsets alone, and what classes take from the file."""
    return {
        key: value
        for key, value in component.items()
        if key not in ("trim_offsets", "precompiled_charsmap")
    }
