"""Which ids end and begin a document: configured, named beside the tokeniser, or known by name."""

from __future__ import annotations

from tokenloom_server.errors import TokenizerError
from tokenloom_server.tokenizer.definition import NamedToken, TokenizerDefinition

#: The first group of which the tokeniser has a member decides; two members of one group are ambiguous.
#: Ends of a document come before ends of a chat turn, which some files carry as well.
END_OF_TEXT_NAMES: tuple[tuple[str, ...], ...] = (
    ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|eos|>", "[EOS]"),
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"),
)
BEGIN_OF_TEXT_NAMES: tuple[tuple[str, ...], ...] = (
    ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "<｜begin▁of▁sentence｜>", "<|bos|>", "[BOS]"),
)

_LISTED_TOKENS = 24


def end_of_text_id(definition: TokenizerDefinition | None, configured: int | None, *, needed: bool) -> int | None:
    """The id that ends a document, or None where there is none and it is not ``needed``.

    ``configured`` is the mixture file's ``end_of_text_id``. Raises ``TokenizerError``, listing the
    special tokens, when the id is outside the vocabulary, or needed and missing or ambiguous.
    """
    named = definition.end_of_text if definition else None
    return _resolve(
        definition, configured, named, END_OF_TEXT_NAMES, ("end_of_text_id", "add_eot", "eos_token"), needed
    )


def begin_of_text_id(definition: TokenizerDefinition | None, configured: int | None, *, needed: bool) -> int | None:
    """The id that begins a document; as ``end_of_text_id``."""
    named = definition.begin_of_text if definition else None
    names = ("begin_of_text_id", "add_bos", "bos_token")
    return _resolve(definition, configured, named, BEGIN_OF_TEXT_NAMES, names, needed)


def _resolve(
    definition: TokenizerDefinition | None,
    configured: int | None,
    named: NamedToken | None,
    groups: tuple[tuple[str, ...], ...],
    words: tuple[str, str, str],
    needed: bool,
) -> int | None:
    field, option, config_key = words
    if configured is not None:
        if definition is not None and configured >= definition.vocab_size:
            raise TokenizerError(f"{field}: {configured} is not below the vocabulary size {definition.vocab_size}")
        return configured
    if definition is None:
        fault = "there is no tokeniser to find it in"
    elif named is not None:
        if named.id is not None:
            return named.id
        fault = f"tokenizer_config.json names {named.content!r} as {config_key}, which the vocabulary does not have"
    else:
        # Some vocabularies hold HTML's <s> and </s> beside their own; those are not special.
        ids = {token.content: token.id for token in definition.added_tokens if token.special}
        for group in groups:
            known_names = [name for name in group if name in ids]
            if len(known_names) == 1:
                return ids[known_names[0]]
            if known_names:
                fault = f"the tokeniser has {' and '.join(map(repr, known_names))}, and nothing says which is meant"
                break
        else:
            fault = "the tokeniser has no special token by a known name"
    if not needed:
        return None
    raise TokenizerError(f"{option} is on, but {fault}; set {field} in the mixture file{_special_tokens(definition)}")


def _special_tokens(definition: TokenizerDefinition | None) -> str:
    if definition is None:
        return ""
    special = [f"{token.content!r} = {token.id}" for token in definition.added_tokens if token.special]
    more = ", …" if len(special) > _LISTED_TOKENS else ""
    return f" (special tokens of {definition.name!r}: {', '.join(special[:_LISTED_TOKENS]) or 'none'}{more})"
