"""What the site says of the program is what the program says of itself."""

from __future__ import annotations

import re

import tokenloom
from support.capabilities import commands as cli_commands
from support.catalog import CATALOG
from tokenloom_proto import dataloader_pb2
from tokenloom_server.config.mixture_file import mixture_schema

from docsite.dialect import as_python_markdown
from docsite.reference import commands, mixture_file, python, rest, wire
from docsite.reference.markdown import entries, prose, table


def test_every_command_has_its_section_with_every_option() -> None:
    sections = dict(
        re.findall(
            r"^## (tokenloom.*)\n((?:.|\n)*?)(?=^## |\Z)", commands.every_option(), re.MULTILINE
        )
    )
    for path, command in cli_commands():
        if not getattr(command, "commands", {}):
            names = [
                name
                for option in command.params
                for name in option.opts
                if name.startswith("--") and not getattr(option, "hidden", False)
            ]
            assert [name for name in names if name not in sections[path]] == [], path
    assert "control token" in sections["tokenloom token"]


def test_every_field_of_the_mixture_file_is_in_the_list_of_its_section() -> None:
    definitions = mixture_schema(CATALOG)["$defs"]
    tables = "".join(make() for make in mixture_file.tables().values())
    rows = re.findall(r"^- `(\w+)` \(", tables, re.MULTILINE)
    sections = [section for section in definitions.values() if "properties" in section]
    assert sum(len(section["properties"]) for section in sections) + len(
        mixture_schema(CATALOG)["properties"]
    ) == len(rows)


def test_every_message_of_the_wire_is_there_with_its_comment() -> None:
    headings = re.findall(r"^### (\w+)$", wire.contract(), re.MULTILINE)
    file = dataloader_pb2.DESCRIPTOR
    assert sorted(headings) == sorted(
        [*file.services_by_name, *file.message_types_by_name, *file.enum_types_by_name]
    )
    assert (
        "### Progress\n\n```protobuf\n// Sent when there is something to report" in wire.contract()
    )


def test_every_object_that_a_route_names_has_its_section() -> None:
    text = rest.routes()
    headings = {heading.lower() for heading in re.findall(r"^### (\w+)$", text, re.MULTILINE)}
    named = set(re.findall(r"\]\(#(\w+)\)", text))
    assert len(named) > 40
    assert named <= headings


def test_every_public_name_of_the_client_is_there_but_errors() -> None:
    named = set(re.findall(r"^::: tokenloom\.(\w+)$", python.names(), re.MULTILINE))
    errors = {name for name in tokenloom.__all__ if name in tokenloom._errors.__all__}
    assert named == set(tokenloom.__all__) - errors - {"ServerUnavailable"}


def test_texts_of_the_program_become_markdown() -> None:
    assert (
        prose("See ``docs/rows.md#bad-rows``, or ``a``.")
        == "See [Bad rows](rows.md#bad-rows), or `a`."
    )
    assert table(["a"], [["`x|y`\n  z"]]) == "| a |\n| --- |\n| `x\\|y` z |\n"
    assert entries([("`a`", "1", "x\n  y"), ("`b`", "", "z")]) == "- `a` (1): x y\n- `b`: z\n"
    assert (
        as_python_markdown("<!-- a -->\n| `x\\|y` \\| z |\n") == "<!-- a -->\n\n| `x|y` \\| z |\n"
    )
