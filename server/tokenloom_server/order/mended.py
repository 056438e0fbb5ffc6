"""What later order versions mended in the ones before them, and which runs that touches.

Where versions pack, mix or balance by other rules, this release has the rules of each, and a run goes on under its own.
What rows give (ids, loss masks, which of them are bad) is made by the newest rule alone: a run or a state of an earlier
version is refused where a source may give something else by it, and goes on where none does.
"""

from __future__ import annotations

from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.tokenizer.definition import TokenizerDefinition

#: Versions that differ in nothing but what was mended: a state of one is a state of the other.
_SAME_RULES = {2, 3}


def mended_since(version: int, source: SourceConfig) -> str | None:
    """What rows of a source give otherwise than under an order version; None where they give the same.

    Version 3: where the assistant's part of a conversation begins or ends within the tokens of a character, or with
    tokens that have no character of their own, the loss mask counts each of these. What Arrow's type says is JSON
    within a conversation is read as what it says, without its quotes. A message that lacks a key which the template
    asks for, and of which it reads its role at most, is a bad row.
    """
    if version < 3 and source.is_chat:
        return "the loss masks of conversations (template: chat) count all tokens of a character since version 3"
    return None


def refusal(config: RunConfig, version: int, tokenizer: TokenizerDefinition | None = None) -> str | None:
    """Why this release cannot go on with a run of an order version, and what to do; None where it can."""
    differences = {source.name: mended_since(version, source) for _, source in config.named_sources()}
    if version < 3 and tokenizer is not None and tokenizer.has_more_tokens:
        differences["tokenizer"] = "tokens that stand beside its tokenizer.json are its own since version 3"
    for name, difference in differences.items():
        if difference is not None:
            return (
                f"{name}: {difference}, and this release has no other rule: serve the run with the Tokenloom "
                f"release that wrote order version {version}, or begin a new run under another name, without "
                "order_version"
            )
    return None


def is_same_order(config: RunConfig, version: int, other: int) -> bool:
    """Whether a run has the same order under two versions."""
    if version == other:
        return True
    return {version, other} <= _SAME_RULES and refusal(config, min(version, other)) is None
