"""The file of ``--tokens``: named tokens, each with a scope, its runs and perhaps an end. It holds digests alone."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field, ValidationError, model_validator
from tokenloom_proto.credentials import read_secret

from tokenloom_server.api.auth import Scope, Token
from tokenloom_server.api.watched_files import WatchedFiles
from tokenloom_server.config.base import Section
from tokenloom_server.config.faults import explain
from tokenloom_server.errors import ConfigError, NotFound, reason
from tokenloom_server.storage.file import draft_of, write_whole

#: A file of so many bytes has tens of thousands of tokens.
MAX_BYTES = 2**22


_Run = Annotated[str, Field(pattern=r"^[A-Za-z0-9._*?-]{1,128}$")]


class StoredToken(Section):
    """A token as the file has it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scope: Literal["read", "train", "control", "admin"]
    runs: Annotated[tuple[_Run, ...], Field(min_length=1)] = ("*",)
    expires: AwareDatetime | None = None


class TokensDocument(Section):
    """The file's content."""

    tokens: list[StoredToken]

    @model_validator(mode="after")
    def _each_once(self) -> TokensDocument:
        for field in ("name", "sha256"):
            values = Counter(getattr(token, field) for token in self.tokens)
            if twice := [value for value, times in values.items() if times > 1]:
                raise ValueError(f"two tokens have the {field} {twice[0]}; each has its own")
        return self


def watched_tokens(file: Path) -> WatchedFiles[Mapping[bytes, Token]]:
    """The tokens by digest. Raises ``ConfigError`` naming the file and the field."""

    def read() -> Mapping[bytes, Token]:
        digests = {bytes.fromhex(each.sha256): each for each in read_document(file).tokens}
        return {
            d: Token(t.name, Scope[t.scope.upper()], t.runs, t.expires, d)
            for d, t in digests.items()
        }

    return WatchedFiles(f"--tokens {file}", [file], read)


def read_document(file: Path) -> TokensDocument:
    """Raises ``ConfigError``."""
    try:
        content = read_secret(f"the file of tokens {str(file)!r}", file, MAX_BYTES)
        return TokensDocument.model_validate_json(content)
    except ValidationError as error:
        raise ConfigError(explain(error, f"--tokens {file}")) from None
    except ValueError as error:
        raise ConfigError(f"--tokens: {error}") from None


@contextmanager
def changing(file: Path) -> Iterator[list[Any]]:
    """The tokens of a file (of one which is not there yet: none), written back, whole, with what is changed of them.
    One command at a time. Raises ``ConfigError``."""
    try:
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            tokens: list[Any] = read_document(file).tokens if file.exists() else []
            yield tokens
            document = TokensDocument.model_validate({"tokens": tokens})
            draft_of(file).unlink(missing_ok=True)
            draft_of(file).touch(mode=0o600)
            write_whole(file, document.model_dump_json(indent=2, exclude_none=True) + "\n")
        finally:
            os.close(folder)
    except ValidationError as error:
        raise ConfigError(explain(error, f"--tokens {file}")) from None
    except OSError as error:
        raise ConfigError(f"--tokens {file}: cannot be written ({reason(error)})") from None


def create(file: Path, name: str, scope: str, runs: list[str], expires: datetime | None) -> str:
    """Adds a token, and returns its text, which nobody has afterwards but who asked. Raises ``ConfigError``."""
    text = secrets.token_hex(32)
    digest = hashlib.sha256(text.encode()).hexdigest()
    with changing(file) as tokens:
        tokens.append(
            {
                "name": name,
                "sha256": digest,
                "scope": scope,
                "runs": tuple(runs),
                "expires": expires,
            }
        )
    return text


def revoke(file: Path, name: str) -> None:
    """Takes a token out of the file. Raises ``ConfigError``, ``NotFound``."""
    with changing(file) as tokens:
        names = [token.name for token in tokens]
        if name not in names:
            raise NotFound(f"{file} has no token {name!r}; it has: {', '.join(names) or 'none'}")
        del tokens[names.index(name)]
