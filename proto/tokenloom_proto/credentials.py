"""Bearer tokens, as client and server read them: where one comes from, what it looks like, and where it may be sent.

A text that is no token is never quoted in an error: it may be one with a slip of the pen in it.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path

#: The variables that hold a token; with ``_FILE`` behind it, the variable that names a file with one.
CONTROL_VARIABLE = "TOKENLOOM_TOKEN"
READ_VARIABLE = "TOKENLOOM_READ_TOKEN"
#: Hosts, separated by commas, to which a token may be sent without TLS.
PLAINTEXT_VARIABLE = "TOKENLOOM_PLAINTEXT_HOSTS"

#: Nobody guesses that many characters, and no header has room for a token that is longer than the other bound.
MIN_CHARACTERS, MAX_CHARACTERS = 16, 1024

#: What may stand behind ``Bearer`` (RFC 6750, section 2.1).
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")

#: The permission bits of everybody but the file's owner.
_OTHERS = 0o077


def find_token(variable: str, environment: Mapping[str, str], file: Path | None = None) -> str | None:
    """The token of ``file``, of the environment's ``variable``, or of the file that ``variable_FILE`` names.

    None where there is none of these. Raises ``ValueError`` where there are two, or one that is no token.
    """
    text = environment.get(variable)
    named = environment.get(f"{variable}_FILE")
    if file is None and named is not None:
        file = Path(named)
    if text is not None and file is not None:
        raise ValueError(f"there are two tokens, one in {variable} and one in the file {str(file)!r}; keep one of them")
    if file is not None:
        return read_token(file)
    return None if text is None else check_token(text, variable)


def read_token(file: Path) -> str:
    """The token in a file that only its owner may read. Raises ``ValueError`` naming the file."""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode & 0o777
            content = opened.read(2 * MAX_CHARACTERS)
    except OSError as error:
        raise ValueError(f"the token file {str(file)!r} cannot be read ({error.strerror or error})") from None
    if mode & _OTHERS:
        raise ValueError(
            f"the token file {str(file)!r} has mode {mode:04o}, so others than its owner may use it; expected 0600: "
            f"chmod 600 {file}, and replace the token if somebody may have read it"
        )
    return check_token(content.decode("utf-8", "replace").strip(), f"the token file {str(file)!r}")


def check_token(token: str, where: str) -> str:
    """The token itself. Raises ``ValueError`` naming ``where`` it is from."""
    if not MIN_CHARACTERS <= len(token) <= MAX_CHARACTERS or not _TOKEN.fullmatch(token):
        found = f"{len(token)} characters" if token else "nothing"
        raise ValueError(
            f"{where} holds {found}; expected a token of {MIN_CHARACTERS} to {MAX_CHARACTERS} letters, digits and "
            "-._~+/ (make one: openssl rand -hex 32)"
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether a host, an IPv6 one with or without brackets, is this machine alone. No name is looked up."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_plaintext(host: str, environment: Mapping[str, str], remedy: str) -> None:
    """Raises ``ValueError`` unless a token may be sent to ``host`` without TLS: to this machine, and to hosts that
    ``TOKENLOOM_PLAINTEXT_HOSTS`` names. ``remedy`` says how to use TLS."""
    allowed = {name.strip().lower() for name in environment.get(PLAINTEXT_VARIABLE, "").split(",")}
    if not is_loopback(host) and host.strip("[]").lower() not in allowed:
        raise ValueError(
            f"the token would travel to {host} unencrypted, for everybody on the way to read: {remedy}; or, on a "
            f"network that is yours alone, allow it with {PLAINTEXT_VARIABLE}={host.strip('[]')}"
        )


def authorization(token: str) -> str:
    """The value of the header ``authorization``."""
    return f"Bearer {token}"
