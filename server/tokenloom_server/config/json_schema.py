"""The JSON Schema of the mixture file, made of its models: what editors complete by, and find faults with."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from tokenloom_server.config import base, source, stream
from tokenloom_server.config.catalog import Catalog
from tokenloom_server.config.mixture_file import GIVEN_BY_THE_SERVER
from tokenloom_server.config.run import RunConfig

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
