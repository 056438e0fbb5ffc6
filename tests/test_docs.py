"""The docs are a test: what is there is documented, and what is documented is there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest
import tokenloom
import yaml
from tokenloom.connection import reporting
from tokenloom_server import errors
from tokenloom_server.api.auth import RPCS, Scope
from tokenloom_server.api.grpc.auth_interceptor import FIGURE_THREADS, OPEN_THREADS, PEEK_THREADS, REFUSAL_THREADS
from tokenloom_server.api.grpc.server import MAX_CALLS, MAX_REQUEST_BYTES
from tokenloom_server.api.grpc.servicer import MAX_REPORT_BYTES, SMALL_REQUEST_BYTES
from tokenloom_server.api.metrics import RANK_FIGURES, RUN_FIGURES, SOURCE_FIGURES
from tokenloom_server.api.rest.app import MAX_PLANS, create_app
from tokenloom_server.api.rest.guard import MAX_BODY_BYTES
from tokenloom_server.api.rest.http import MAX_CONNECTIONS
from tokenloom_server.api.service import MAX_RUNS, MAX_SAVED_SNAPSHOTS, MAX_SKIPPED_TOKENS, Runs
from tokenloom_server.cli import app as command_line
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.config.spec import SCHEMES
from tokenloom_server.order import size_estimates
from tokenloom_server.order.snapshot import MAX_BYTES as MAX_SNAPSHOT_BYTES
from tokenloom_server.planning import picture, segments
from tokenloom_server.prepare import shards
from tokenloom_server.replay import peek as peeking
from tokenloom_server.replay import trace as tracing
from tokenloom_server.replay.peek import MAX_PEEKS
from tokenloom_server.reports import trace as traced
from tokenloom_server.run import losses
from tokenloom_server.run.join import MAX_STEP_BYTES, MAX_WORLD_SIZE
from tokenloom_server.run.revise import MAX_REVISIONS
from tokenloom_server.tools import export, viewer
from typer.main import get_command

from tests.support.memory_service import MemoryService

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
PACKAGES = ("proto/tokenloom_proto", "client/tokenloom", "server/tokenloom_server")


def test_every_field_of_the_mixture_file_is_in_the_readme() -> None:
    section = README.split("## The mixture file")[1].split("\n## ")[0]
    documented = set(re.findall(r"`([a-z_]+)`", section))
    fields = {name for model in (RunConfig, NodeConfig, SourceConfig) for name in model.model_fields}
    # Ids are the server's, and presence is a revision's.
    assert fields - {"id", "presence"} <= documented


def test_every_source_scheme_is_in_the_readme() -> None:
    assert all(f"`{form}`" in README for form in SCHEMES.values())


def test_the_readmes_mixture_file_is_valid() -> None:
    text = README.split("```yaml\n")[1].split("```")[0]
    found = config.parse(yaml.safe_load(text), where="README.md")
    assert next(source.name for source in found.sources) == "code"


def test_the_readmes_python_names_what_the_client_exports() -> None:
    names = re.findall(r"from tokenloom import (\w+)", README)
    assert names
    assert all(hasattr(tokenloom, name) for name in names)


def test_the_commands_that_the_readme_names_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+)", README)) - {"one"} <= targets
    commands = get_command(command_line).commands  # type: ignore[attr-defined]
    assert set(re.findall(r"tokenloom (serve|validate|stats|demo|[a-z]+) (?:mixture|http|grpc)", README)) <= set(
        commands
    )


def test_every_error_is_in_the_reference_with_its_statuses() -> None:
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.TokenloomError) and kind is not errors.TokenloomError:
            assert f"| `{name}` | {kind.grpc_status} | {kind.http_status} |" in REFERENCE


def test_the_client_has_a_class_for_every_error_that_the_server_can_send() -> None:
    by_name = {kind.__name__ for kind in vars(tokenloom.errors).values() if inspect.isclass(kind)}
    sent = {
        name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.TokenloomError)
    }
    assert sent <= by_name


def test_the_bounds_of_plans_are_in_the_reference() -> None:
    section = REFERENCE.split("## Plans")[1].split("\n## ")[0]
    for size in (size_estimates.COUNTED_BYTES, size_estimates.READ_BYTES, size_estimates.ENCODED_BYTES):
        assert f"{size // 2**20} MiB" in section
    assert f"| plans at a time over REST | {MAX_PLANS};" in REFERENCE
    for number in (size_estimates.MOST_PLACES, picture.SHOWN_SOURCES, segments.MAX_SEGMENTS):
        assert f" {number} " in section


def test_the_bounds_of_reported_losses_are_in_the_docs() -> None:
    section = REFERENCE.split("## Losses")[1].split("\n## ")[0]
    for number in (losses.MAX_POINTS, losses.MAX_CELLS, losses.MIN_POINTS):
        assert f"{number:,} " in section or f"{number:,}." in section
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    for number in (
        losses.MAX_POINTS,
        reporting.QUEUED,
        inspect.signature(tokenloom.token_losses).parameters["chunk_tokens"].default,
    ):
        assert f"{number:,} " in page
    assert (reporting.CALL_S, reporting.PAUSE_S) == (5, 2), "as the table of deadlines says"


def test_the_bounds_of_peeks_are_in_the_reference() -> None:
    section = REFERENCE.split("## Peeks")[1].split("\n## ")[0]
    for bound in (f"{peeking.AHEAD_SAMPLES:,} samples", f"{peeking.MAX_PEEKS} per run", f"{peeking.REST_S:g} s"):
        assert bound in section
    assert f"{peeking.MAX_STEP_BYTES // 2**20} MiB" in section
    peek = get_command(command_line).commands["peek"]  # type: ignore[attr-defined]
    assert f"{peeking.AHEAD_SAMPLES:,} samples" in peek.help


def test_the_bounds_of_traces_are_in_the_reference() -> None:
    section = REFERENCE.split("## Traces")[1].split("\n## ")[0]
    for bound in (
        f"{tracing.MAX_TOKENS:,} tokens",
        f"{tracing.MAX_TEXT_TOKENS:,} with text",
        f"{tracing.MAX_DOCUMENTS:,} documents",
        f"{tracing.MAX_FORWARD_S:g} s",
        f"the {peeking.MAX_PEEKS} peeks",
        f"{peeking.AHEAD_SAMPLES:,} samples",
    ):
        assert bound in section
    assert all(f"`{status}`" in section for status in get_args(traced.Status))


def test_the_bounds_of_prepared_shards_and_exports_are_in_the_reference() -> None:
    section = REFERENCE.split("## Prepared shards")[1].split("\n## ")[0]
    assert all(f" {bound:,} " in section for bound in (shards.BATCH_IDS, shards.BATCH_ROWS, shards.MAX_ROW_IDS))
    section = REFERENCE.split("## Exports")[1].split("\n## ")[0]
    assert f" {export.BATCH_IDS:,} " in section
    assert f"| {viewer.PATIENCE_S:g} s " in section


def test_the_bound_of_skips_is_in_the_reference() -> None:
    assert f"{MAX_SKIPPED_TOKENS:,} tokens" in REFERENCE.split("## Skips")[1].split("\n## ")[0]


def test_every_metric_is_in_the_reference() -> None:
    for figure in (*RUN_FIGURES, *SOURCE_FIGURES, *RANK_FIGURES):
        assert f"| `{figure.name}` | {figure.meaning} |" in REFERENCE


def test_every_route_is_in_the_reference() -> None:
    app = create_app(MemoryService(), version="0")
    for path, operations in app.openapi()["paths"].items():
        for method in operations:
            assert f"| `{method.upper()} {path}` |" in REFERENCE


def test_every_rpc_is_in_the_reference_with_its_token() -> None:
    section = REFERENCE.split("## Tokens and TLS")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| ([^|]*`\w+`[^|]*) \| (none|reading|control)\b", section, re.MULTILINE))
    words = {Scope.OPEN: "none", Scope.READ: "reading", Scope.CONTROL: "control"}
    for method, scope in RPCS.items():
        name = method.rpartition("/")[2]
        assert [token for names, token in rows.items() if f"`{name}`" in names] == [words[scope]], method


def test_every_bound_is_in_the_reference() -> None:
    section = REFERENCE.split("| bound | |")[1].split("\n## ")[0]
    aside = REFUSAL_THREADS + OPEN_THREADS + FIGURE_THREADS + PEEK_THREADS
    for bound in (
        aside,
        PEEK_THREADS,
        MAX_PEEKS,
        MAX_CALLS,
        MAX_WORLD_SIZE,
        MAX_RUNS,
        MAX_SAVED_SNAPSHOTS,
        MAX_REVISIONS,
        MAX_CONNECTIONS,
    ):
        assert re.search(rf"[| ]{bound:,}\b", section), bound
    for size in (
        MAX_REQUEST_BYTES,
        MAX_BODY_BYTES,
        MAX_STEP_BYTES,
        MAX_SNAPSHOT_BYTES,
        SMALL_REQUEST_BYTES,
        MAX_REPORT_BYTES,
    ):
        unit, name = next((2**power, name) for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if size >> power)
        assert f"{size // unit} {name}" in section


def test_every_setting_of_the_entry_is_in_the_reference() -> None:
    section = REFERENCE.split("## Tokens and TLS")[1].split("\n## ")[0]
    sources = [path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    variables = {name for text in sources for name in re.findall(r'"(TOKENLOOM_[A-Z_]+)"', text)}
    assert {"TOKENLOOM_TOKEN", "TOKENLOOM_TLS_CA", "TOKENLOOM_DATA_ROOTS"} <= variables
    elsewhere = {"TOKENLOOM_LEDGER", "TOKENLOOM_"}
    assert {name for name in variables - elsewhere if f"`{name}`" not in section} == set()


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "THREAT_MODEL.md"),
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
    ],
)
def test_links_between_the_documents_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / name).parent / target).exists(), target


def test_the_service_behind_rest_is_the_one_that_the_server_has() -> None:
    assert all(hasattr(Runs, name) for name in ("names", "stats", "snapshot", "snapshots", "restore", "not_ready"))
