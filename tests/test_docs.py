"""The docs are a test: what is there is documented, and what is documented is there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest
import tokenloom
import yaml
from support.catalog import CATALOG, SOURCES
from tokenloom.connection import calls
from tokenloom_server.api import server as api_server
from tokenloom_server.api.grpc import endpoint
from tokenloom_server.api.grpc.endpoint import OPEN_CALLS, PEEK_CALLS, READ_CALLS
from tokenloom_server.api.grpc.rpc import MAX_REPORT_BYTES, MAX_REQUEST_BYTES, SMALL_REQUEST_BYTES
from tokenloom_server.api.grpc.server import MAX_CALLS
from tokenloom_server.api.rest.guard import MAX_BODY_BYTES
from tokenloom_server.api.rest.routes import MAX_PLANS
from tokenloom_server.api.rest.server import MAX_CONNECTIONS
from tokenloom_server.api.service import MAX_RUNS
from tokenloom_server.config import mixture_file as config
from tokenloom_server.order import size_estimates
from tokenloom_server.order.snapshot import MAX_BYTES as MAX_SNAPSHOT_BYTES
from tokenloom_server.planning import segments
from tokenloom_server.replay import peek as peeking
from tokenloom_server.run import losses, past
from tokenloom_server.run.join_call import MAX_STEP_BYTES, MAX_WORLD_SIZE
from tokenloom_server.run.past import MAX_PEEKS
from tokenloom_server.run.restore import MAX_SKIPPED_TOKENS
from tokenloom_server.run.revise import MAX_REVISIONS
from tokenloom_server.run.snapshots import MAX_SAVED_SNAPSHOTS
from tokenloom_tools import export
from tokenloom_tools import trace as tracing
from tokenloom_tools.cli.app import app as command_line
from tokenloom_tools.peek import SEARCH_S
from tokenloom_tools.prepare import shards
from tokenloom_tools.reports.documents import Status
from tokenloom_tools.reports.picture import SHOWN_SOURCES
from typer.main import get_command

from docsite.reference.tables import pages, written
from tests.support.doc_tables import TABLES, TOKENS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGES = (
    "proto/tokenloom_proto",
    "client/tokenloom",
    "server/tokenloom_server",
    "server/tokenloom_tools",
)
#: Every Markdown file that people read, by its path from the root.
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for folder in (ROOT, DOCS, ROOT / "tests" / "chaos")
    for path in sorted(folder.glob("**/*.md" if folder == DOCS else "*.md"))
}


def page(name: str) -> str:
    """The text of a page below docs/."""
    return PAGES[f"docs/{name}.md"]


def section(name: str, heading: str) -> str:
    """A page's part below one heading of the second level."""
    return page(name).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def outside_code(text: str) -> str:
    """A page without its blocks of code, where a bracket is no link and a hash no heading."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", outside_code(text), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (name := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(name)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_a_file_and_a_heading_of_it(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_code(PAGES[name])):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(PAGES[str(file.relative_to(ROOT))]), target


def test_what_the_code_names_of_the_docs_exists() -> None:
    places = ("server", "client", "proto", "examples", "docker", "Dockerfile", "docker-compose.yml")
    files = [
        file
        for place in places
        for file in (ROOT / place, *(ROOT / place).rglob("*"))
        if file.is_file()
    ]
    named = {
        (str(file.relative_to(ROOT)), page, anchor)
        for file in files
        if file.suffix in ("", ".py", ".js", ".html", ".yaml", ".yml", ".sh")
        for page, anchor in re.findall(
            r"\b((?:docs/)[\w/-]+\.md)(?:#([\w-]+))?", file.read_text(encoding="utf-8")
        )
    }
    assert named
    for file, page, anchor in named:
        assert page in PAGES, f"{file} names {page}"
        assert not anchor or anchor in anchors(PAGES[page]), f"{file} names {page}#{anchor}"


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/concepts/")])
def test_a_concept_is_short_and_has_a_picture_for_light_and_dark_pages(name: str) -> None:
    assert len(PAGES[name].split()) <= 500
    (description, picture) = re.findall(r"!\[([^]]+)\]\(\.\./(img/[\w-]+\.svg)\)", PAGES[name])[0]
    assert len(description) > 40
    assert "prefers-color-scheme: dark" in (DOCS / picture).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/")])
def test_a_page_begins_with_its_title_and_a_sentence_that_says_what_it_is_for(name: str) -> None:
    title, text = PAGES[name].split("\n", 1)
    assert re.match(r"# \S", title)
    assert re.match(r"\n[A-Z*`][^\n]+", text), "after the title comes a paragraph"


def test_every_source_scheme_is_on_the_page_of_the_mixture_file() -> None:
    assert all(
        f"`{form}`" in page("mixture-file")
        for form in (scheme.usage for scheme in SOURCES.schemes.values())
    )


@pytest.mark.parametrize("name", PAGES)
def test_every_mixture_file_that_a_page_shows_whole_is_valid(name: str) -> None:
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGES[name], re.DOTALL | re.MULTILINE):
        if text.startswith("run:"):
            assert config.parse(yaml.safe_load(text), where=name, catalog=CATALOG).run


@pytest.mark.parametrize("name", PAGES)
def test_the_python_of_a_page_names_what_the_client_exports(name: str) -> None:
    imported = re.findall(r"from tokenloom import ([\w, ]+)", PAGES[name])
    assert {each for line in imported for each in line.split(", ")} <= set(dir(tokenloom))


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_that_a_page_names_exist(name: str) -> None:
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert set(re.findall(r"(?:^    |`)make ([a-z-]+)", PAGES[name], re.MULTILINE)) <= targets
    named = set(re.findall(r"(?:^    (?:\$ )?|`)tokenloom ([a-z]+)", PAGES[name], re.MULTILINE))
    assert named <= set(get_command(command_line).commands)  # type: ignore[attr-defined]


def test_every_option_of_the_server_is_documented() -> None:
    serve = get_command(command_line).commands["serve"]  # type: ignore[attr-defined]
    names = {name for option in serve.params for name in option.opts if name.startswith("--")}
    where = page("options") + page("access") + section("mixture-file", "A mixture without a file")
    settings = {option.opts[0] for option in serve.params if getattr(option, "hidden", False)}
    shown = {name.removeprefix("--") if name in settings else name for name in names - {"--help"}}
    assert {name for name in shown if not re.search(rf"`{name}[ :`]", where)} == set()


def in_bytes(size: int) -> str:
    unit, name = next(
        (2**power, name) for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if size >> power
    )
    return f"{size // unit} {name}"


def bounds() -> dict[str, tuple[str, list[str]]]:
    """By what they are the bounds of: the text that names them, and each as it stands there."""
    chunk_tokens = inspect.signature(tokenloom.token_losses).parameters["chunk_tokens"].default
    aside = OPEN_CALLS + READ_CALLS + PEEK_CALLS
    counts = (
        aside,
        PEEK_CALLS,
        MAX_PEEKS,
        MAX_CALLS,
        MAX_WORLD_SIZE,
        MAX_RUNS,
        MAX_SAVED_SNAPSHOTS,
        MAX_REVISIONS,
    )
    sizes = (
        MAX_REQUEST_BYTES,
        MAX_BODY_BYTES,
        MAX_STEP_BYTES,
        MAX_SNAPSHOT_BYTES,
        SMALL_REQUEST_BYTES,
    )
    plan_sizes = (
        size_estimates.COUNTED_BYTES,
        size_estimates.READ_BYTES,
        size_estimates.ENCODED_BYTES,
    )
    plan_counts = (size_estimates.MOST_PLACES, SHOWN_SOURCES, segments.MAX_SEGMENTS)
    ahead = f"{past.AHEAD_SAMPLES:,} samples"
    return {
        "a server": (
            section("limits", "Bounds"),
            [
                *(f"{bound:,}" for bound in (*counts, MAX_CONNECTIONS)),
                *map(in_bytes, (*sizes, MAX_REPORT_BYTES)),
            ],
        ),
        "descriptors": (
            section("limits", "Descriptors"),
            [
                f"{api_server.MAX_OPEN_FILES:,} at",
                f"| {api_server.OWN} |",
                f"fewer than {api_server.MIN_OPEN_FILES}, or than {api_server.FIXED} and "
                f"{2 * api_server.FILES_PER_SOURCE} for each source",
                f"enough for {api_server.grpc_connections(1024)} ranks",
            ],
        ),
        "plans": (page("plans"), [*map(in_bytes, plan_sizes), *map(str, plan_counts)]),
        "plans at a time": (page("limits"), [f"| plans at a time over REST | {MAX_PLANS};"]),
        "a curve of losses": (
            section("losses", "Bounds"),
            [f"{number:,}" for number in (losses.MAX_POINTS, losses.MAX_CELLS, losses.MIN_POINTS)],
        ),
        "reports": (
            page("losses"),
            [f"{number:,} " for number in (losses.MAX_POINTS, calls.QUEUED, chunk_tokens)],
        ),
        "peeks": (
            section("inspecting", "Peek: the samples at an index"),
            [
                ahead,
                f"{past.MAX_PEEKS} per run",
                f"{peeking.REST_S:g} s",
                in_bytes(peeking.MAX_STEP_BYTES),
            ],
        ),
        "the command of peeks": (get_command(command_line).commands["peek"].help, [ahead]),  # type: ignore[attr-defined]
        "traces": (
            section("inspecting", "Trace: the documents of a sample"),
            [
                *(f"{tracing.MAX_TOKENS:,} tokens", f"{tracing.MAX_TEXT_TOKENS:,} with text"),
                *(f"{tracing.MAX_DOCUMENTS:,} documents", f"{tracing.MAX_FORWARD_S:g} s"),
                *(
                    f"the {past.MAX_PEEKS} peeks",
                    ahead,
                    *(f"`{status}`" for status in get_args(Status)),
                ),
            ],
        ),
        "prepared shards": (
            section("prepare", "Details"),
            [f"{bound:,}" for bound in (shards.BATCH_IDS, shards.BATCH_ROWS, shards.MAX_ROW_IDS)],
        ),
        "exports": (
            section("export", "Details"),
            [f" {export.BATCH_IDS:,} ", f"| {SEARCH_S:g} s "],
        ),
        "skips": (section("checkpoints", "Skip a bad range"), [f"{MAX_SKIPPED_TOKENS:,} tokens"]),
    }


@pytest.mark.parametrize("what", bounds())
def test_every_bound_is_on_its_page(what: str) -> None:
    text, named = bounds()[what]
    assert [
        bound for bound in named if not re.search(rf"(?<![\d,]){re.escape(bound)}(?!\d)", text)
    ] == []


def test_the_deadlines_of_reports_are_those_of_the_table() -> None:
    assert (calls.CALL_S, calls.PAUSE_S) == (5, 2)


def test_the_tables_that_come_from_the_code_are_those_of_the_code() -> None:
    named = pages()
    assert sorted(name for names in named.values() for name in names) == sorted(TABLES), (
        "each stands on one page"
    )
    for path in named:
        text = path.read_text(encoding="utf-8")
        assert written(text, TABLES) == text, f"{path.name}: 'make tables' writes it anew"


def test_every_rpc_is_on_the_page_of_access_with_its_token() -> None:
    table = section("access", "What each RPC asks for")
    rows = dict(
        re.findall(
            r"^\| ([^|]*`\w+`[^|]*) \| (none|reading|training|control|admin)\b", table, re.MULTILINE
        )
    )
    for method, rpc in endpoint.rpcs().items():
        name = method.rpartition("/")[2]
        assert [token for names, token in rows.items() if f"`{name}`" in names] == [
            TOKENS[rpc.scope]
        ], method


def test_every_setting_of_the_environment_is_documented() -> None:
    settings = section("access", "Settings")
    sources = [
        path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    ]
    variables = {name for text in sources for name in re.findall(r'"(TOKENLOOM_[A-Z_]+)"', text)}
    assert {"TOKENLOOM_TOKEN", "TOKENLOOM_TLS_CA", "TOKENLOOM_DATA_ROOTS"} <= variables
    elsewhere = {
        "TOKENLOOM_LEDGER",
        "TOKENLOOM_HEALTH",
        "TOKENLOOM_CACHE",
        "TOKENLOOM_CACHE_SIZE",
        "TOKENLOOM_",
    }
    elsewhere |= {
        "TOKENLOOM_DECOMPRESS_MIB",
        "TOKENLOOM_CONFIG",
        "TOKENLOOM_SERVE",
        "TOKENLOOM_SERVE_READERS",
    }
    assert {name for name in variables - elsewhere if f"`{name}`" not in settings} == set()


def test_examples_need_no_package_of_the_server() -> None:
    examples = sorted((ROOT / "examples").rglob("*.py"))
    assert len(examples) > 8
    assert not [
        path.name for path in examples if "tokenloom_server" in path.read_text(encoding="utf-8")
    ]
