"""Which ids end and begin a document: configured, named beside the tokeniser, or known by name."""

from __future__ import annotations

from tokenloom_server.errors import TokenizerError
from tokenloom_server.tokenizer.definition import TokenizerDefinition, known_ids

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
        f"{option} is on, but {fault}; set {field} in the mixture file{_special_tokens(definition)}"
    )


def _special_tokens(definition: TokenizerDefinition | None) -> str:
    if definition is None:
        return ""
    special = [
        f"{token.content!r} = {token.id}" for token in definition.added_tokens if token.special
    ]
    more = ", …" if len(special) > _LISTED_TOKENS else ""
    return f" (special tokens of {definition.name!r}: {', '.join(special[:_LISTED_TOKENS]) or 'none'}{more})"
