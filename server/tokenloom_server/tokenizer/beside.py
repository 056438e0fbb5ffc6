"""What stands beside a ``tokenizer.json`` and decides ids with it: tokens, their names, and the class that reads them.

The rules are those of ``AutoTokenizer`` of transformers 5.24, in its order, since that decides the ids of new tokens.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenloom_proto.files import read_file

from tokenloom_server.errors import TokenizerError, reason
from tokenloom_server.tokenizer import classes
from tokenloom_server.tokenizer.files import ADDED_FILE, CONFIG_FILE, MODEL_FILE, SPECIAL_FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: The keys that name a special token everywhere, in transformers' order.
NAMED = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA, _ADDITIONAL, _DECODER = (
    "extra_special_tokens",
    "additional_special_tokens",
    "added_tokens_decoder",
)
#: What these may be, beside null, and how an error says it.
_SHAPES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    _EXTRA: ("a list of tokens, or an object of tokens by name", (list, dict)),
    _ADDITIONAL: ("a list of tokens", (list,)),
    _DECODER: ("an object of tokens by id", (dict,)),
}


class Completed(NamedTuple):
    """A tokeniser with what stands beside its file."""

    tokenizer: Tokenizer
    added_tokens: list[dict[str, Any]] | None = None
    """As its ``tokenizer.json`` would hold them; None where it does hold them."""
    named: Mapping[str, str] = MappingProxyType({})
    """The special tokens that files name, by key."""
    special_tokens: Mapping[str, str] = MappingProxyType({})
    """These, and those that the class names where no file does."""


def complete(
    name: str, path: Path, content: str, document: dict[str, Any], plain: Tokenizer
) -> Completed:
    """The tokeniser of a file in its folder; ``plain``: that of the file alone, which may be changed.

    Raises ``TokenizerError``, naming the file or the class, for what cannot be read, and for what would give other ids.
    """
    from tokenizers import AddedToken, Tokenizer

    config = read(path, CONFIG_FILE)
    class_name, described = classes.class_of(name, content, config, read(path, MODEL_FILE))
    if config.get("split_special_tokens"):
        raise TokenizerError(
            f"tokenizer {name!r}: its {CONFIG_FILE} has split_special_tokens: true; remove it there, and set "
            "special_tokens_in_text: text in the mixture file, which is for that"
        )
    try:
        named, extra, adding = _tokens(path, dict(config), document)
        special = (
            dict.fromkeys(NAMED)
            | {key: _token(each) for key, each in described.get("tokens", {}).items()}
            | named
        )
        special = {key: token for key, token in special.items() if token is not None}
        for key, token in (
            *special.items(),
            *(("a further special token", each) for each in extra),
        ):
            if not isinstance(token, str | AddedToken):
                raise ValueError(
                    f"{key} is {token!r}, expected text, or an object with content and __type"
                )
        texts = {key: str(token) for key, token in special.items()}
        before, tokenizer = _added_tokens(plain), plain
        if "forms" in described:
            form = classes.form(plain, document["model"])
            built = classes.built(described, config, form, texts.get("unk_token", ""))
            if not classes.same(form, built, document["model"]):
                raise classes.refusal(
                    name, class_name, "builds another normalizer, pre_tokenizer or model"
                )
            tokenizer = Tokenizer.from_str(json.dumps({**document, "added_tokens": []}))
        known = {token["content"] for token in _added_tokens(tokenizer)} | set(map(str, adding))
        for token in (*special.values(), *extra):
            if str(token) not in known and token not in adding:
                adding.append(token)
        adding = [
            AddedToken(token, special=True) if isinstance(token, str) else token for token in adding
        ]
        for token in adding:
            token.special = token.special or str(token) in texts.values()
        if described.get("resets"):
            adding += [
                AddedToken(str(token), special=True) for token in (*special.values(), *extra)
            ]
        tokenizer.add_tokens(adding)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TokenizerError(
            f"tokenizer {name!r}: the tokens beside {path} are not as transformers saves them ({error}); mend them "
            "there, or take the files from where the tokeniser was published"
        ) from None
    added = _added_tokens(tokenizer)
    missing = set(described.get("adds", ())).difference(token["content"] for token in added)
    if missing:
        raise classes.refusal(name, class_name, f"adds tokens that no file has ({min(missing)!r})")
    files = {key: texts[key] for key, token in named.items() if token is not None}
    return Completed(tokenizer, None if added == before else added, files, texts)


def _tokens(
    path: Path, values: dict[str, Any], document: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """The special tokens by key, further ones, and all added tokens in the order of their ids. ``values``: of a
    ``tokenizer_config.json``."""
    from tokenizers import AddedToken

    extra, own = values.get(_EXTRA) or values.get(_ADDITIONAL, values.get(_EXTRA)), {}
    if isinstance(extra, dict):
        own, extra = extra, None
    if _DECODER in values:
        added = {int(number): AddedToken(**token) for number, token in values[_DECODER].items()}
    else:
        saved = {key: _token(value) for key, value in read(path, SPECIAL_FILE).items()}
        more = saved.get(_EXTRA, [])
        if isinstance(more, dict):
            own, extra = own | more, saved.get(_ADDITIONAL, ())
        elif more:
            extra = [*(extra or ()), *map(_token, more)]
        values |= saved
        # As it is written: what tokenizer_config.json names with its properties is not found by its text here.
        special = set(map(str, (*map(values.get, NAMED), *(extra or ()))))
        added = {
            number: AddedToken(text, normalized=text not in special, special=text in special)
            for text, number in read(path, ADDED_FILE).items()
        }
        for token in document.get("added_tokens") or ():
            added[token["id"]] = AddedToken(
                **{key: value for key, value in token.items() if key != "id"}
            )
    extra = values.get(_ADDITIONAL) if extra is None else extra
    named = {key: _token(value) for key, value in values.items() if key.endswith("_token")} | own
    # Some models have such as image_token; add_bos_token is none.
    named = {
        key: token
        for key, token in named.items()
        if key in NAMED or isinstance(token, str | AddedToken)
    }
    return (
        named,
        [_token(token) for token in extra or ()],
        [token for _, token in sorted(added.items())],
    )


def _token(value: Any) -> Any:
    """What is saved with the properties of a token, as a token; those without a type are special."""
    if not isinstance(value, dict) or "content" not in value:
        return value
    from tokenizers import AddedToken

    properties = {"special": "__type" not in value, **value}
    properties.pop("__type", None)
    return AddedToken(**properties)


def _added_tokens(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    tokens = sorted(tokenizer.get_added_tokens_decoder().items())
    return [{"id": number, **token.__getstate__()} for number, token in tokens]


def read(path: Path, beside: str) -> dict[str, Any]:
    """A file beside the tokeniser; empty where there is none."""
    path = path.with_name(beside)
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{path}: cannot be read ({reason(error)}); expected JSON, mend it or remove it"
        ) from None
    _check(path, "what it holds", value, "an object", (dict,))
    for key, (expected, kinds) in _SHAPES.items():
        if value.get(key) is not None:
            _check(path, key, value[key], expected, kinds)
    document: dict[str, Any] = value
    return document


def _check(path: Path, what: str, value: object, expected: str, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds):
        raise TokenizerError(
            f"{path}: {what} is {reprlib.repr(value)}; expected {expected}, mend it or remove it"
        )
