"""From rows to tokens: the tokeniser's definition, the engine that runs it, and the documents it makes."""

from tokenloom_server.tokenizer.boundary import begin_of_text_id, end_of_text_id
from tokenloom_server.tokenizer.choose import (
    CHECK_ONE_IN,
    EngineChoice,
    EngineCost,
    EngineRecord,
    choose_engine,
    load_engine,
    other_engine,
)
from tokenloom_server.tokenizer.definition import (
    AddedToken,
    TokenizerDefinition,
    find_tokenizer,
    id_dtype,
    tokenizer_files,
)
from tokenloom_server.tokenizer.documents import DocumentEncoder, Documents
from tokenloom_server.tokenizer.engine import Encoded, Engine, SpecialTokensInText
from tokenloom_server.tokenizer.masked import MaskedEncoder

__all__ = [
    "CHECK_ONE_IN",
    "AddedToken",
    "DocumentEncoder",
    "Documents",
    "Encoded",
    "Engine",
    "EngineChoice",
    "EngineCost",
    "EngineRecord",
    "MaskedEncoder",
    "SpecialTokensInText",
    "TokenizerDefinition",
    "begin_of_text_id",
    "choose_engine",
    "end_of_text_id",
    "find_tokenizer",
    "id_dtype",
    "load_engine",
    "other_engine",
    "tokenizer_files",
]
