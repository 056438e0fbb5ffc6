"""The mixture file: one YAML file, read and validated once; everything after it trusts the result."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from tokenloom_proto.files import read_file

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
