"""The seal of a snapshot: canonical JSON with a checksum over everything else.

Client and server both seal (the client without a network, the server on request), and the two texts
must be equal to the byte; so the rule stands here, once. For clients in other languages, it is:

* the document is a JSON object; its text has sorted keys, no spaces, and no escapes but JSON's own;
* ``checksum`` is ``"sha256:"`` and the hexadecimal SHA-256 of that text without ``checksum``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"
SNAPSHOT_FORMAT = "tokenloom/snapshot"
SNAPSHOT_VERSION = 2


def canonical(document: Any) -> str:
    """The one JSON text of a document, or of a value in one: sorted keys, no spaces, plain UTF-8, no NaN."""
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def seal(document: Mapping[str, Any]) -> str:
    """Returns the canonical text of ``document`` with its checksum added."""
    return seal_texts({key: canonical(value) for key, value in document.items()})


def seal_texts(document: Mapping[str, str]) -> str:
    """As ``seal``, of a document whose values are canonical texts already: a large one is not read to be written."""
    body = {key: text for key, text in document.items() if key != CHECKSUM}
    return _joined(body | {CHECKSUM: canonical(_checksum(_joined(body)))})


def checksum(body: Mapping[str, Any]) -> str:
    """The checksum of a document that has none yet."""
    return _checksum(canonical(body))


def strict_json(text: str | bytes) -> Any:
    """Reads JSON that means one thing to every reader: no key twice, no NaN, no infinity.

    Raises ``ValueError``, and ``RecursionError`` for what lies too deep.
    """
    return json.loads(
        text, object_pairs_hook=_unique_keys, parse_float=_finite, parse_constant=_refuse_number
    )


def unseal(text: str | bytes) -> dict[str, Any]:
    """Reads a sealed document back.

    Raises ``ValueError``, with what was found and what was expected, when the text is not a JSON
    object, when it names a key twice, or when its checksum is missing or differs.
    """
    try:
        document = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a snapshot is a JSON object, but this does not parse: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"a snapshot is a JSON object, but this is a {type(document).__name__}")
    recorded = document.pop(CHECKSUM, None)
    expected = checksum(document)
    if recorded != expected:
        raise ValueError(
            f"the snapshot's checksum is {recorded!r}, but its content gives {expected!r}: it was changed or cut"
        )
    return document


def _joined(texts: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{canonical(key)}:{texts[key]}" for key in sorted(texts)) + "}"


def _checksum(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise ValueError(f"the key {json.dumps(key)[:100]} is there twice")
        document[key] = value
    return document


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse_number(digits[:40])


def _refuse_number(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON; numbers are finite here")
