"""What a tokeniser is: its file's content, its digest and its vocabulary, and which of its ids end and begin a
document. No engine runs it yet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenloom_proto.files import read_file
from tokenloom_proto.seal import canonical

from tokenloom_server.errors import TokenizerError, reason
from tokenloom_server.tokenizer import beside
from tokenloom_server.tokenizer.files import (
    BYTES_TOKENIZER,
    CHAT_FILE,
    CONFIG_FILE,
    CONVERT,
    TOKENIZER_FILE,
    tokenizer_file,
)

#: The special tokens of the `bytes` tokeniser; ids 0 to 255 are the bytes of UTF-8.
_BYTES_END_OF_TEXT = 256
_BYTES_BEGIN_OF_TEXT = 257

#: The names of tokens that end and begin a document, where no file says which they are. The first group of which the
#: tokeniser has a member decides; two members of one group are ambiguous. Ends of a document come before ends of a chat
#: turn, which some files carry as well.
KNOWN_NAMES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "eos_token": (
        (
            "<|endoftext|>",
            "<|end_of_text|>",
            "</s>",
            "<eos>",
            "<｜end▁of▁sentence｜>",
            "<|eos|>",
            "[EOS]",
        ),
        ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"),
    ),
    "bos_token": (
        (
            "<|begin_of_text|>",
            "<|startoftext|>",
            "<s>",
            "<bos>",
            "<｜begin▁of▁sentence｜>",
            "<|bos|>",
            "[BOS]",
        ),
    ),
}

#: Ids of a tokeniser at most, 4 Mi. Engines hold a table with 16 bytes for each, also for those without a token.
MAX_VOCABULARY = 2**22


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token with an id of its own beside the model's. Special ones are plain text unless asked for."""

    content: str
    id: int
    special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerDefinition:
    """A tokeniser as found on disk, or `bytes`."""

    name: str
    """As the mixture file writes it."""
    content: str
    """The text of ``tokenizer.json``, with the tokens that only stand beside it; empty for `bytes`."""
    digest: str
    """SHA-256 of everything here that decides ids: the file, the tokens and the end and begin named beside it, and
    where there is a chat template that and what it may name."""
    vocab_size: int
    """Greatest id + 1, added tokens included."""
    added_tokens: tuple[AddedToken, ...]
    """In id order."""
    named_ids: Mapping[str, int] = field(default_factory=dict)
    """The ids of ``eos_token`` and ``bos_token`` where a file beside it names them."""
    chat_template: str | None = None
    """The Jinja text of the chat template beside the file, where a source needs it."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """What a chat template may name, such as ``bos_token``, by the files beside it and its class."""

    @property
    def is_bytes(self) -> bool:
        return self.name == BYTES_TOKENIZER


def find_tokenizer(name: str, base_dir: Path, *, chat: bool = False) -> TokenizerDefinition:
    """Reads the tokeniser that a mixture file names: a path, which begins at ``base_dir``, or a name on the Hub; with
    ``chat``, its chat template, too.

    Raises ``TokenizerError``, naming the path, what was found and what to do, when there is no
    tokenizer.json, when `tokenizers` cannot read it, or when it encodes at random.
    """
    if name == BYTES_TOKENIZER:
        if chat:
            raise TokenizerError(
                "tokenizer 'bytes' has no chat template, which a source with template: chat needs; name one that has: "
                "a folder with tokenizer.json and chat_template.jinja, or a name on the Hub"
            )
        return _bytes_definition()
    path = tokenizer_file(name, base_dir)
    try:
        raw = read_file(path)
    except OSError as error:
        raise TokenizerError(
            f"tokenizer {name!r}: {path} cannot be read ({reason(error)})"
        ) from None
    content, document = _parse(name, path, raw)
    _refuse_random(name, path, document.get("model"))
    reference = _reference(name, path, content)
    # A file of another name may stand beside a config that is not its own.
    is_named = path.name == TOKENIZER_FILE
    config = beside.read(path, CONFIG_FILE) if is_named else {}
    whole = (
        beside.complete(name, path, content, document, reference)
        if is_named
        else beside.Completed(reference)
    )
    if whole.added_tokens is not None:
        content = json.dumps({**document, "added_tokens": whole.added_tokens})
    added = tuple(
        AddedToken(str(token.content), int(token_id), bool(token.special))
        for token_id, token in sorted(whole.tokenizer.get_added_tokens_decoder().items())
    )
    vocabulary, greatest = _vocabulary(name, path, whole.tokenizer)
    named_ids = {key: vocabulary[whole.named[key]] for key in KNOWN_NAMES if key in whole.named}
    template = _chat_template(name, path, config) if chat else None
    # The digest is what it was when tokenizer_config.json alone was read, where ids are what they were.
    before = _special_tokens(config)
    own = {
        key for key, number in named_ids.items() if [*known_ids(added, key).values()] != [number]
    }
    sealed = canonical({key: whole.named[key] for key in named_ids if key in before or key in own})
    if template is not None:
        used = {key: token for key, token in whole.special_tokens.items() if key in template}
        sealed += canonical({"chat_template": template, "special_tokens": before | used})
    if whole.added_tokens is not None:
        sealed += canonical({"added_tokens": whole.added_tokens})
    return TokenizerDefinition(
        name=name,
        content=content,
        digest=hashlib.sha256(hashlib.sha256(raw).digest() + sealed.encode()).hexdigest(),
        vocab_size=greatest + 1,
        added_tokens=added,
        named_ids=named_ids,
        chat_template=template,
        special_tokens=whole.special_tokens,
    )


def known_ids(added_tokens: Iterable[AddedToken], key: str) -> dict[str, int]:
    """The special tokens by a known name of an ``eos_token`` or ``bos_token``: several, where it is not clear which."""
    # Some vocabularies hold HTML's <s> and </s> beside their own; those are not special.
    ids = {token.content: token.id for token in added_tokens if token.special}
    groups = ({name: ids[name] for name in group if name in ids} for group in KNOWN_NAMES[key])
    return next(filter(None, groups), {})


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest of uint8, uint16 and uint32 that holds every id below ``vocab_size``.

    Raises ``TokenizerError`` when none does.
    """
    for dtype in (np.uint8, np.uint16, np.uint32):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise TokenizerError(
        f"a vocabulary of {vocab_size} ids does not fit the wire's widest type, uint32; expected at most {2**32}"
    )


def _bytes_definition() -> TokenizerDefinition:
    return TokenizerDefinition(
        name=BYTES_TOKENIZER,
        content="",
        digest=hashlib.sha256(b"tokenloom bytes 258").hexdigest(),
        vocab_size=258,
        added_tokens=(
            AddedToken("<|endoftext|>", _BYTES_END_OF_TEXT, True),
            AddedToken("<|begin_of_text|>", _BYTES_BEGIN_OF_TEXT, True),
        ),
    )


def _parse(name: str, path: Path, raw: bytes) -> tuple[str, dict[str, Any]]:
    try:
        content = raw.decode("utf-8")
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"tokenizer {name!r}: {path} is not JSON ({error}); expected a tokenizer.json. "
            f"Where it is another format (a sentencepiece or tiktoken model, a vocab.txt), {CONVERT}"
        ) from None
    if not isinstance(document, dict) or "model" not in document:
        raise TokenizerError(
            f"tokenizer {name!r}: {path} is JSON but has no 'model', so it is no tokenizer.json; {CONVERT}"
        )
    return content, document


def _reference(name: str, path: Path, content: str) -> Any:
    """A ``tokenizer.json`` as `tokenizers` reads it."""
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(content)
    except Exception as error:
        raise TokenizerError(
            f"tokenizer {name!r}: {path} is not supported by tokenizers {tokenizers.__version__} ({error}); "
            "expected a tokenizer.json of that version or an older one"
        ) from None


def _vocabulary(name: str, path: Path, tokenizer: Any) -> tuple[dict[str, int], int]:
    """The id of each token, added ones included, and the greatest of them."""
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise TokenizerError(
            f"tokenizer {name!r}: {path} has an empty vocabulary; train it, or name another"
        )
    if (greatest := max(vocabulary.values())) >= MAX_VOCABULARY:
        raise TokenizerError(
            f"tokenizer {name!r}: {path} has the id {greatest}; expected at most {MAX_VOCABULARY - 1}, since "
            "engines have room for each id up to the greatest: number its tokens without gaps"
        )
    return vocabulary, greatest


def _refuse_random(name: str, path: Path, model: object) -> None:
    # BPE dropout and unigram sampling give other ids at each call: no order could be repeated.
    for option in ("dropout", "alpha"):
        if isinstance(model, dict) and model.get(option):
            raise TokenizerError(
                f"tokenizer {name!r}: {path} has model.{option} = {model[option]}, which encodes at random; "
                "set it to null, so that a run can be repeated"
            )


def _text(path: Path) -> str:
    try:
        return read_file(path).decode()
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"{path}: cannot be read ({reason(error)}); mend it or remove it"
        ) from None


def _chat_template(name: str, path: Path, config: dict[str, Any]) -> str:
    """``chat_template.jinja`` beside a ``tokenizer.json``, else what its ``tokenizer_config.json`` has."""
    file, text = path.with_name(CHAT_FILE), config.get("chat_template")
    # A file of another name may stand beside a template that is not its own.
    if path.name == TOKENIZER_FILE and file.is_file():
        text = _text(file)
    if isinstance(text, str):
        return text
    several = " (there are several: put the one that is meant into that file)" if text else ""
    raise TokenizerError(
        f"tokenizer {name!r}: a source has template: chat, but {path.parent} has no {CHAT_FILE}, and no one "
        f"chat_template in a {CONFIG_FILE}{several}; put it there, or name a tokeniser that has a chat template"
    )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The tokens that a ``tokenizer_config.json`` names, by key."""
    tokens = {key: config.get(key) for key in beside.NAMED}
    tokens = {
        key: token.get("content") if isinstance(token, dict) else token
        for key, token in tokens.items()
    }
    return {key: token for key, token in tokens.items() if isinstance(token, str)}


_LISTED_TOKENS = 24


def end_of_text_id(
    definition: TokenizerDefinition | None, configured: int | None, *, needed: bool
) -> int | None:
    """The id that ends a document, or None where there is none and it is not ``needed``.

    ``configured`` is the mixture file's ``end_of_text_id``. Raises ``TokenizerError``, listing the
    special tokens, when the id is outside the vocabulary, or needed and missing or ambiguous.
    """
    return _resolve(definition, configured, ("end_of_text_id", "add_eot", "eos_token"), needed)


def begin_of_text_id(
    definition: TokenizerDefinition | None, configured: int | None, *, needed: bool
) -> int | None:
    """The id that begins a document; as ``end_of_text_id``."""
    return _resolve(definition, configured, ("begin_of_text_id", "add_bos", "bos_token"), needed)


def own_begin(definition: TokenizerDefinition) -> list[int]:
    """The ids that the tokeniser's own post-processor puts before a text, which Tokenloom never asks for."""
    if definition.is_bytes:
        return []
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(definition.content)
    tokenizer.no_truncation()
    marks: list[int] = tokenizer.encode("a").special_tokens_mask
    return tokenizer.encode("a").ids[: marks.index(0)] if 0 in marks else []


def _resolve(
    definition: TokenizerDefinition | None,
    configured: int | None,
    words: tuple[str, str, str],
    needed: bool,
) -> int | None:
    field, option, config_key = words
    if configured is not None:
        if definition is not None and configured >= definition.vocab_size:
            raise TokenizerError(
                f"{field}: {configured} is not below the vocabulary size {definition.vocab_size}"
            )
        return configured
    if definition is None:
        fault = "there is no tokeniser to find it in"
    elif config_key in definition.named_ids:
        return definition.named_ids[config_key]
    else:
        known = known_ids(definition.added_tokens, config_key)
        if len(known) == 1:
            return next(iter(known.values()))
        has = f"{' and '.join(map(repr, known))}, and nothing says which is meant" if known else ""
        fault = f"the tokeniser has {has or 'no special token by a known name'}"
    if not needed:
        return None
    raise TokenizerError(
        f"{option} is on, but {fault}; set {field} in the mixture file{_listed_tokens(definition)}"
    )


def _listed_tokens(definition: TokenizerDefinition | None) -> str:
    if definition is None:
        return ""
    special = [
        f"{token.content!r} = {token.id}" for token in definition.added_tokens if token.special
    ]
    more = ", …" if len(special) > _LISTED_TOKENS else ""
    return f" (special tokens of {definition.name!r}: {', '.join(special[:_LISTED_TOKENS]) or 'none'}{more})"
