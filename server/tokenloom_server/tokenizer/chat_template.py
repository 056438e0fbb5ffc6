"""A tokeniser's chat template, as it is found beside the tokeniser."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenloom_proto.seal import canonical

from tokenloom_server.errors import TokenizerError
from tokenloom_server.tokenizer.files import CHAT_FILE, CONFIG_FILE, TOKENIZER_FILE


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template's Jinja text, and the special tokens that it may name, such as ``bos_token``."""

    text: str
    special_tokens: Mapping[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides the text of a conversation."""
        fields = {"text": self.text, "special_tokens": dict(self.special_tokens)}
        return hashlib.sha256(canonical(fields).encode()).hexdigest()


def find_chat_template(
    name: str, path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate:
    """The template beside a ``tokenizer.json``: ``chat_template.jinja``, else that of its ``tokenizer_config.json``.

    Raises ``TokenizerError`` where there is none, or more than one.
    """
    file, text = path.with_name(CHAT_FILE), config.get("chat_template")
    # A file of another name may stand beside a template that is not its own.
    if path.name == TOKENIZER_FILE and file.is_file():
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{file}: cannot be read ({error}); expected a Jinja template in UTF-8") from None
    if not isinstance(text, str):
        several = " (there are several: put the one that is meant into that file)" if text else ""
        raise TokenizerError(
            f"tokenizer {name!r}: a source has template: chat, but {path.parent} has no {CHAT_FILE}, and no one "
            f"chat_template in a {CONFIG_FILE}{several}; put it there, or name a tokeniser that has a chat template"
        )
    return ChatTemplate(text, special_tokens)
