"""The engines that turn text into ids: gigatoken (Rust, Arrow buffers), tokenizers (the reference), bytes; and from ids
back to text, for people."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.errors import TokenizerError
from tokenloom_server.tokenizer.definition import TokenizerDefinition, find_tokenizer
from tokenloom_server.tokenizer.files import BYTES_TOKENIZER

SpecialTokensInText = Literal["text", "parse"]
Ids = npt.NDArray[np.unsignedinteger[Any]]
Ends = npt.NDArray[np.int64]

#: gigatoken 0.10 remembers every distinct word for ever (up to ten times the text's bytes where no
#: word repeats). Renewing it costs under 0.1 s, so it is done where the process has grown by the first
#: figure, looked at each time the second has been encoded; without a figure for the process, by the third.
RENEW_AFTER_GROWTH_BYTES = 512 << 20
_LOOK_EVERY_BYTES = 64 << 20
_RENEW_BLINDLY_BYTES = 512 << 20

#: Up to so many texts in a call, an object for each costs less than the 0.3 ms that an awkward array takes.
_FEW_TEXTS = 1000


class Encoded(NamedTuple):
    """Ids of consecutive texts: ``values`` (unsigned, [tokens]); text i ends before ``ends[i]`` (int64, [texts])."""

    values: Ids
    ends: Ends


class Engine(Protocol):
    """How is text turned into ids? Whole columns in and flat arrays out, since a call per row would cost more
    than the work in it. One thread uses an engine at a time: a second one would only wait for the first.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """What else decides the ids beside the tokeniser's file; recorded with the run."""

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        """Ids of each text, without any begin- or end-of-text id. ``texts`` has no nulls and is valid UTF-8.

        Raises ``TokenizerError`` when the engine fails.
        """


class BytesEngine:
    """Ids are the bytes of UTF-8. No string is special."""

    name = "bytes"
    version = "1"

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        offsets, characters = text_buffers(texts)
        return Encoded(characters[offsets[0] : offsets[-1]], offsets[1:] - offsets[0])


class TokenizersEngine:
    """Hugging Face ``tokenizers``: the reference that the other engine must equal."""

    name: ClassVar[str] = "tokenizers"

    def __init__(
        self, definition: TokenizerDefinition, special_tokens_in_text: SpecialTokensInText
    ) -> None:
        import tokenizers

        self.version = installed_version("tokenizers")
        self._tokenizer = tokenizers.Tokenizer.from_str(definition.content)
        self._tokenizer.encode_special_tokens = special_tokens_in_text == "text"
        # Files saved by a trainer often carry both; here a document is encoded whole.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        rows = texts.to_pylist()
        call = self._tokenizer.encode_batch_fast
        encodings = _guarded(self.name, "encode", lambda: call(rows, add_special_tokens=False))
        return ragged([encoding.ids for encoding in encodings])

    def encode_one(self, text: str) -> list[int]:
        """Ids of one text, on the calling thread alone."""
        call = self._tokenizer.encode
        ids: list[int] = _guarded(
            self.name, "encode", lambda: call(text, add_special_tokens=False)
        ).ids
        return ids

    def encode_spans(
        self, texts: list[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[Encoded, npt.NDArray[np.uint8]]:
        """Ids of each text, and for each id 1 where it lies in one of the text's ``spans`` (from which character to
        before which), else 0.

        A token lies in a span if it starts before the span's end and ends after its begin: so do all tokens of a
        character, one that reaches over an edge, and one without characters of its own between the edges but not at
        them. transformers says the same since 5.24; earlier ones lose the last tokens of a span's last character.
        """
        call = self._tokenizer.encode_batch
        encodings = _guarded(self.name, "encode", lambda: call(texts, add_special_tokens=False))
        encoded = ragged([encoding.ids for encoding in encodings])
        # As if the texts stood one after the other, with a character between them that is in no token.
        shifts = np.cumsum([0, *(len(text) + 1 for text in texts[:-1])], dtype=np.int64)[
            : len(texts)
        ]
        flat = chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in encodings))
        offsets = np.fromiter(flat, np.int64, 2 * len(encoded.values)).reshape(-1, 2)
        offsets += np.repeat(shifts, np.diff(encoded.ends, prepend=0))[:, None]
        edges = [
            (shift + begin, shift + end)
            for shift, of_text in zip(shifts.tolist(), spans, strict=True)
            for begin, end in of_text
        ]
        begins, ends = np.sort(np.array(edges, np.int64).reshape(-1, 2), axis=0).T
        # A token lies in those spans that begin before it ends, without those that end before it starts.
        inside = begins.searchsorted(offsets[:, 1]) > ends.searchsorted(offsets[:, 0], side="right")
        return encoded, inside.view(np.uint8)

    def character_of(self, text: str, position: int) -> int:
        """Where in ``text`` the token at ``position`` begins; the text's length after the last token."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return int(offsets[position][0]) if position < len(offsets) else len(text)


class GigatokenEngine:
    """``gigatoken``: reads Arrow's buffers and writes one flat array, with the GIL released in between."""

    name: ClassVar[str] = "gigatoken"

    def __init__(
        self, definition: TokenizerDefinition, special_tokens_in_text: SpecialTokensInText
    ) -> None:
        self.version = installed_version("gigatoken")
        self._content = _for_gigatoken(definition.content, special_tokens_in_text)
        self._backend = self._load()
        self._bytes_since_look = 0
        self._resident_at_load = _resident_bytes()

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        offsets, characters = text_buffers(texts)
        self._renew_if_grown(int(offsets[-1] - offsets[0]))
        # Bytes, not strings: there is nothing to decode then. gigatoken trusts them to be UTF-8.
        inputs = (
            texts.view(pa.large_binary()).to_pylist()
            if len(texts) <= _FEW_TEXTS
            else _awkward(offsets, characters)
        )
        result = _guarded(
            self.name, "encode", lambda: self._backend.encode_batch(inputs, parallel=False)
        ).layout
        return Encoded(result.content.data, result.offsets.data[1:])

    def _load(self) -> Any:
        def load() -> Any:
            import gigatoken

            return gigatoken.Tokenizer.from_json(self._content).backend

        return _guarded(self.name, "load this tokeniser", load)

    def _renew_if_grown(self, size: int) -> None:
        self._bytes_since_look += size
        if self._bytes_since_look < _LOOK_EVERY_BYTES:
            return
        resident, before = _resident_bytes(), self._resident_at_load
        if resident is None or before is None:
            renew = self._bytes_since_look >= _RENEW_BLINDLY_BYTES
        else:
            renew = resident - before >= RENEW_AFTER_GROWTH_BYTES
            self._bytes_since_look = 0
        if renew:
            self._backend = self._load()
            self._bytes_since_look = 0
            self._resident_at_load = _resident_bytes()


def installed_version(package: str) -> str:
    """The version of an installed package; ``none`` where it is missing."""
    try:
        return package_version(package)
    except PackageNotFoundError:
        return "none"


def text_buffers(texts: pa.LargeStringArray) -> tuple[Ends, npt.NDArray[np.uint8]]:
    """A column's own memory: offsets (int64, [texts + 1], into the characters) and characters (uint8)."""
    _, offsets, characters = texts.buffers()
    if offsets is None:
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    flat = np.empty(0, np.uint8) if characters is None else np.frombuffer(characters, np.uint8)
    return np.frombuffer(offsets, np.int64, len(texts) + 1, texts.offset * 8), flat


def _awkward(offsets: Ends, characters: npt.NDArray[np.uint8]) -> Any:
    """Texts where they lie, as the kind of array that gigatoken takes them in."""
    import awkward as ak  # type: ignore[import-untyped]

    content = ak.contents.NumpyArray(characters, parameters={"__array__": "byte"})
    return ak.Array(
        ak.contents.ListOffsetArray(
            ak.index.Index64(offsets), content, parameters={"__array__": "bytestring"}
        )
    )


def ragged(rows: list[list[int]]) -> Encoded:
    """Lists of ids as one flat array (uint32) and its ends."""
    ends = np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), dtype=np.int64)
    count = int(ends[-1]) if rows else 0
    return Encoded(np.fromiter(chain.from_iterable(rows), np.uint32, count), ends)


def _for_gigatoken(content: str, special_tokens_in_text: SpecialTokensInText) -> str:
    document = json.loads(content)
    # What stands around a document is Tokenloom's to add and to cut.
    document |= {"post_processor": None, "truncation": None, "padding": None}
    if special_tokens_in_text == "text":
        # gigatoken has no switch for this; a string that is no added token is plain text.
        document["added_tokens"] = [
            token for token in document.get("added_tokens") or [] if not token.get("special")
        ]
    return json.dumps(document, ensure_ascii=False)


def _guarded(package: str, action: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        # A panic in Rust is no Exception; left alone it would end its thread in silence.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).split("\n", 1)[0]
        raise TokenizerError(
            f"{package} {installed_version(package)} cannot {action}: {reason}"
        ) from None


def _resident_bytes() -> int | None:
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return None
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


#: Ids to text. Special tokens are shown; what is no whole character becomes U+FFFD.
Decode: TypeAlias = Callable[[Sequence[int]], str]

_BYTES = 256
_REPLACEMENT = "\ufffd".encode()


def load_decoder(tokenizer_json: str) -> Decode:
    """The decoder of a ``tokenizer.json``. Raises ``TokenizerError`` where this machine cannot read it."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:
        raise TokenizerError(
            f"the run's tokenizer.json is not supported by tokenizers {tokenizers.__version__} here ({error}); "
            "install the version that its server has"
        ) from None
    decode: Decode = partial(tokenizer.decode, skip_special_tokens=False)
    return decode


def bytes_decoder() -> Decode:
    """The decoder of the `bytes` tokeniser."""
    tokens = {
        token.id: token.content.encode()
        for token in find_tokenizer(BYTES_TOKENIZER, Path()).added_tokens
    }
    tokens |= {byte: bytes((byte,)) for byte in range(_BYTES)}
    return lambda ids: b"".join(tokens.get(i, _REPLACEMENT) for i in ids).decode("utf-8", "replace")
