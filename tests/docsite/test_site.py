"""What the site is made of: links that work in both places, a navigation from the index, nothing from another host.

`make docs` builds the whole of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docsite.nav import nav_of
from docsite.offline import loads_from_elsewhere
from docsite.repository import HOST, ROOT, links_of_site


@pytest.mark.parametrize(
    ("page", "target", "on_site"),
    [
        ("forks.md", "revisions.md#limits", "revisions.md#limits"),
        ("sources/hf.md", "../../THREAT_MODEL.md#who", "../threat-model.md#who"),
        ("contributing.md", "docs/sources/plugins.md", "sources/plugins.md"),
        ("architecture.md", "THREAT_MODEL.md", "threat-model.md"),
        ("README.md", "../examples/ddp.py", f"{HOST}/blob/main/examples/ddp.py"),
        ("integrations/slurm.md", "../../examples/slurm", f"{HOST}/tree/main/examples/slurm"),
        # MkDocs reports what leads nowhere, as it stands on the page.
        ("README.md", "../examples/none.py", "../examples/none.py"),
        ("README.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("README.md", "#start", "#start"),
    ],
)
def test_a_link_that_works_in_the_repository_works_on_the_site(
    page: str, target: str, on_site: str
) -> None:
    assert links_of_site(f"[`text`]({target}).", page) == f"[`text`]({on_site})."


def test_code_is_no_link() -> None:
    text = "`[a](../Makefile)`\n\n```python\nrow[0](../Makefile)\n```\n"
    assert links_of_site(text, "README.md") == text


def test_the_navigation_is_the_index() -> None:
    index = """# Documentation

Read [this first](start.md).

## Start

- [quick start](start.md): from nothing
- [The code](../ARCHITECTURE.md), and [again](start.md#end)

## How-to

### In your framework

| [jax.md](integrations/jax.md) | [a file](../examples/ddp.py) |

### Nothing

## Glossary

[Glossary](glossary.md)
"""
    assert nav_of(index) == [
        "README.md",
        {"Start": [{"Quick start": "start.md"}, {"The code": "architecture.md"}]},
        {"How-to": [{"In your framework": ["integrations/jax.md"]}]},
        {"Glossary": "glossary.md"},
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://cdn.example/a.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//fonts.example/a.css">'),
        ("a.html", '<img src="a.png" srcset="https://cdn.example/a.png">'),
        ("a.html", "<style>@import 'https://fonts.example/a.css';</style>"),
        ("a.css", "@font-face { src: url(https://fonts.example/a.woff2) }"),
        ("a.svg", '<svg><image href="https://cdn.example/a.png"/></svg>'),
    ],
)
def test_what_is_loaded_from_another_host_is_a_fault(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert [fault for fault in loads_from_elsewhere(tmp_path) if fault.startswith(f"{name}: ")]


def test_what_a_reader_follows_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://example.org">there</a><script src="a.js"></script>'
    )
    (tmp_path / "a.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg"><use href="#a"/></svg>'
    )
    (tmp_path / "a.css").write_text(
        "a { background: url(data:image/svg+xml;charset=utf-8,http://www.w3.org/) }"
    )
    assert list(loads_from_elsewhere(tmp_path)) == []


def test_the_command_of_the_makefile_fails_at_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    for name in ("Makefile", "mkdocs.yml", "docsite", "client", "proto"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "forks.md").open("a") as page:
        page.write("\n[nowhere](running.md#no-such-heading)\n")

    # The make that runs pytest hands its flags down.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-C", str(tmp_path), "docs", f"VENV={sys.prefix}", "-o", "install"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "'#no-such-heading'" in done.stderr
    assert "Aborted with 1 warnings" in done.stderr + done.stdout
