"""What MkDocs calls while it builds the site (``hooks`` of mkdocs.yml)."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docsite.dialect import as_python_markdown
from docsite.nav import INDEX, nav_of
from docsite.offline import loads_from_elsewhere
from docsite.reference import commands, python, rest, wire
from docsite.repository import OUTSIDE, ROOT, links_of_site

#: The logo: that of the server's page.
ICON = ROOT / "server" / "tokenloom_server" / "api" / "page" / "icon.svg"

#: What stands on the site in place of ``<!-- site: NAME -->``.
PARTS = {
    "contract": wire.contract,
    "options": commands.every_option,
    "python": python.names,
    "routes": rest.routes,
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = nav_of((Path(config.docs_dir) / INDEX).read_text(encoding="utf-8"))
    config.watch.extend(str(ROOT / path) for path in OUTSIDE)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, config.theme["logo"], abs_src_path=str(ICON)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    whole = re.sub(
        r"^<!-- site: (\w+) -->$", lambda part: PARTS[part[1]](), markdown, flags=re.MULTILINE
    )
    return links_of_site(as_python_markdown(whole), page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    """Raises ``PluginError`` where a reader without a network would miss something."""
    if elsewhere := list(loads_from_elsewhere(Path(config.site_dir))):
        raise PluginError(
            "the site would load from other hosts; keep a copy in docs/:\n" + "\n".join(elsewhere)
        )
