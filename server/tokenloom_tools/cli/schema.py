"""``tokenloom schema``: what a mixture file may hold, for editors."""

from __future__ import annotations

import json

from tokenloom_tools.cli.common import print_document


def schema_text() -> str:
    """The JSON Schema of the mixture file, with the plugins that the environment allows."""
    from tokenloom_server.catalog import environment_catalog
    from tokenloom_server.config.mixture_file import mixture_schema

    return json.dumps(mixture_schema(environment_catalog()), indent=1)


def schema() -> None:
    """Print the JSON Schema of the mixture file, with which editors complete it and find mistakes.

    tokenloom schema > mixture.schema.json writes it; the first line of the mixture file is then
    "# yaml-language-server: $schema=mixture.schema.json".
    """
    print_document(schema_text())
