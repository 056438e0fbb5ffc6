"""The mixture file: one YAML file, read and validated once; everything after it trusts the result."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from tokenloom_proto.files import read_file

from tokenloom_server.config import base, source, stream
from tokenloom_server.config.catalog import Catalog
from tokenloom_server.config.faults import explain
from tokenloom_server.config.node import too_small_limits
from tokenloom_server.config.run import RunConfig
from tokenloom_server.errors import ConfigError, reason
from tokenloom_server.storage.yaml_bounds import check_yaml

#: What stands in the tree of a run, and in no file.
GIVEN_BY_THE_SERVER = ("id", "presence")
#: Of a file; room for as many values as it may have.
MAX_BYTES = 2**24


def load(path: Path, catalog: Catalog) -> RunConfig:
    """Reads and validates a mixture file.

    Raises ``ConfigError`` with one line per fault: file, path of the field, what was found, what was expected.
    """
    try:
        text = read_file(path, MAX_BYTES).decode()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({reason(error)}); expected a mixture file"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    try:
        check_yaml(text)
        document = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path}: is not YAML: {error}".replace(' in "<unicode string>",', " at")
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path}: expected a mapping with run, mixture, …, found {type(document).__name__}"
        )
    return parse(document, where=str(path), catalog=catalog, text=text)


def parse(document: dict[str, Any], *, where: str, catalog: Catalog, text: str = "") -> RunConfig:
    """Validates a mixture that was read already, of this ``text``; ``where`` begins each line of an error. Raises
    ``ConfigError``."""
    try:
        config = RunConfig.model_validate(document, context=catalog)
    except ValidationError as error:
        raise ConfigError(explain(error, where, text=text)) from None
    keys = list(given_by_the_server(document, ""))
    if keys:
        raise ConfigError(
            "\n".join(
                f"{where}: {key}: unknown key; ids and presence are this server's" for key in keys
            )
        )
    shortest = min(
        [config.pick_tokens, *(phase.sequence_length or math.inf for phase in config.phases)]
    )
    mixtures = (*config.mixtures(), *config.stream_mixtures())
    small = [
        line
        for mixture, path in mixtures
        for line in too_small_limits(mixture, path, int(shortest))
    ]
    if small:
        raise ConfigError("\n".join(f"{where}: {line}" for line in small))
    return config


def given_by_the_server(value: object, path: str) -> Iterator[str]:
    """The paths of the keys of a document that only this server writes."""
    if isinstance(value, dict):
        yield from (f"{path}{key}" for key in GIVEN_BY_THE_SERVER if key in value)
        for key, below in value.items():
            yield from given_by_the_server(below, f"{path}{key}.")
    elif isinstance(value, list):
        for i, below in enumerate(value):
            yield from given_by_the_server(below, f"{path}{i}.")


class _UniqueKeyLoader(yaml.CSafeLoader):
    """A safe loader that refuses a key named twice, which YAML would silently resolve to the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # which the safe loader refuses
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice in one mapping", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep)


# The JSON Schema of the mixture file, made of its models: what editors complete by, and find faults with.


#: What a file may hold beside the type of a field, by the function that reads it.
_ALSO_READ: dict[Any, JsonSchemaValue] = {
    base.whole_number: {"type": "string", "pattern": r"^[0-9]+(\.[0-9]*)?([eE]\+?[0-9]+)?$"},
    base.epochs_number: {"const": "inf"},
    source.comparisons: {"type": "string"},
    stream.empty_as_mapping: {"type": "null"},
}


class _FileSchema(GenerateJsonSchema):
    """Of what is read from a file, which is more than what the models then hold."""

    def function_before_schema(self, schema: Any) -> JsonSchemaValue:
        held = super().function_before_schema(schema)
        more = _ALSO_READ.get(schema["function"]["function"])
        return held if more is None else {"anyOf": [held, more]}


def mixture_schema(catalog: Catalog) -> dict[str, Any]:
    """The schema (draft 2020-12) of a mixture file that is read against ``catalog``.

    What it refuses, ``tokenloom validate`` refuses. It knows names, types and bounds, and nothing that takes two fields
    or a file to decide.
    """
    schema = RunConfig.model_json_schema(schema_generator=_FileSchema)
    for model in (schema, *schema["$defs"].values()):
        for name in GIVEN_BY_THE_SERVER:
            model.get("properties", {}).pop(name, None)
    schema["properties"]["streams"]["additionalProperties"] = False
    # Whether they are missing depends on other fields.
    del schema["properties"]["sequence_length"]["default"]
    schema["required"].remove("mixture")
    in_streams = {"properties": {"streams": {"required": [stream.TRAIN]}}, "required": ["streams"]}
    schema["anyOf"] = [{"required": ["mixture"]}, in_streams]
    schema["$defs"]["NodeConfig"]["properties"]["policy"]["enum"] = list(catalog.policies)
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        **schema,
        "title": "Mixture file of Tokenloom",
    }
