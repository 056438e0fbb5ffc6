"""Source schemes from outside the tree: a package that is not Tokenloom's is served, recorded, and refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.server_process import ServerProcess, run_module
from support.sources import rows_of
from support.timelines import revised
from support.trainer import World
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config.mixture_file import parse
from tokenloom_server.config.row_rules import RowRules
from tokenloom_server.config.stream import TRAIN
from tokenloom_server.errors import ConfigError, SourceChanged, SourceError
from tokenloom_server.ledger.open import open_ledger
from tokenloom_server.order.builder import create
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.catalog import SourceCatalog
from tokenloom_server.sources.open import open_source

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sources" / "plugins.md"
ALLOW = ("--allow-plugins", "acme")


class Package:
    """An installed package in a folder of its own: the module of the docs' page, and what pip would write beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        found = re.search(
            r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
        assert found is not None
        (folder / "acme_csv.py").write_text(found[1], encoding="utf-8")

    def install(
        self,
        version: str = "1.0",
        entry: str = "acme = acme_csv:AcmeScheme",
        name: str = "acme-csv",
    ) -> None:
        for older in self.folder.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(older)
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[tokenloom.sources]\n{entry}\n")


@pytest.fixture
def package(tmp_path: Path) -> Package:
    made = Package(tmp_path / "site")
    made.install()
    return made


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for file in range(2):
        rows = [f'{number % 3},"Row {number} of file {file}, as text"' for number in range(100)]
        (tmp_path / f"data/{file}.csv").write_text(
            "score,text\n" + "\n".join(rows) + "\n", encoding="utf-8"
        )
    document = {
        "run": "tables",
        "tokenizer": "bytes",
        "sequence_length": 32,
        "mixture": {
            "policy": "least_consumed",
            "children": [
                {"source": "acme:data/*.csv:text", "filter": "score >= 1", "shuffle": "shards"}
            ],
        },
    }
    path = tmp_path / "mixture.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def test_a_run_of_a_plugin_is_served_resumed_and_refused_at_another_version(
    package: Package, mixture: Path, tmp_path: Path
) -> None:
    environment = {"PYTHONPATH": str(package.folder)}
    server = ServerProcess(
        tmp_path / "server", mixture, options=(), flags=ALLOW, environment=environment
    )
    server.start()
    try:
        with World(server.url("tables")) as world:
            state = world.steps(7).state()
            rest = world.run().receipt.sequence()[7:]
        text = bytes(token for sample in rest[:4] for token in sample.ids if token < 256).decode()
        assert "of file 0, as text" in text or "of file 1, as text" in text
        server.kill()
        server.start()
        with World(server.url("tables"), state=state) as world:
            assert world.run().receipt.sequence(7) == rest
        server.kill()
        package.install("2.0")
        with pytest.raises(
            RuntimeError, match=r"comes from acme-csv 2\.0, but the run began with acme-csv 1\.0"
        ):
            server.start()
    finally:
        server.kill()
    ledger = open_ledger(server.ledger, tmp_path)
    stored = ledger.read_run("tables", TRAIN)
    ledger.close()
    assert stored is not None
    plugins = json.loads(stored.record)["manifest"]["plugins"]
    assert plugins == {"acme": {"distribution": "acme-csv", "version": "1.0"}}


def test_a_revision_that_names_one_records_it_and_is_refused_at_another_version(
    package: Package, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package.folder))
    (tmp_path / "a.txt").write_text("a line of text\n" * 50, encoding="utf-8")
    document = yaml.safe_load(mixture.read_text(encoding="utf-8"))
    added = document["mixture"]["children"][0]
    document["mixture"]["children"] = [{"source": "txt:a.txt:text"}]

    def begun() -> Timeline:
        return Timeline(
            create(parse(document, where="test", catalog=open_catalog(["acme"])), tmp_path, None)
        )

    timeline = revised(begun(), 4, add=[{"child": added}])
    content = json.loads(timeline.revisions[0].content)
    assert content["plugins"] == {"acme": {"distribution": "acme-csv", "version": "1.0"}}
    package.install("1.1")
    with pytest.raises(
        SourceChanged, match=r"comes from acme-csv 1\.1, but the run began with acme-csv 1\.0"
    ):
        begun().with_revisions(timeline.revisions)


def test_commands_load_it_where_option_or_environment_allow_it(
    package: Package, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(package.folder))
    refused = run_module("validate", mixture)
    assert refused.status == 2
    output = " ".join(refused.output.split())
    assert (
        "comes from the package acme-csv 1.0, whose code is not run unless you allow it: start with "
        in output
    )
    assert "--allow-plugins acme" in output
    assert run_module("validate", mixture, *ALLOW).status == 0
    monkeypatch.setenv("TOKENLOOM_ALLOW_PLUGINS", "acme")
    assert run_module("plan", mixture, "--json").status == 0


def test_one_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="no installed package brings the source scheme 'acme'; there is none"
    ):
        SourceCatalog(["acme"])
    with pytest.raises(
        ConfigError, match="the scheme is 'acme', expected one of parquet:GLOB:COLUMN"
    ):
        SourceCatalog().spec("acme:a.csv:text")


@pytest.mark.parametrize(
    ("install", "fault"),
    [
        (
            lambda p: p.install(entry="acme = acme_nowhere:AcmeScheme"),
            r"of acme-csv 1\.0 cannot be loaded \(ModuleNot",
        ),
        (
            lambda p: p.install(entry="acme = acme_csv:table_of"),
            r"expected a tokenloom_server\.sources\.scheme\.Scheme",
        ),
        (
            lambda p: p.install(entry="tsv = acme_csv:AcmeScheme"),
            "as the source scheme 'tsv', expected a .* of that name",
        ),
        (
            lambda p: p.install(entry="txt = acme_csv:AcmeScheme"),
            "'txt' is a scheme of Tokenloom's own",
        ),
        (
            lambda p: p.install(name="other-csv"),
            r"comes from .*-csv 1\.0 and from .*-csv 1\.0; uninstall one",
        ),
    ],
)
def test_one_that_cannot_be_meant_is_refused(
    package: Package,
    install: Callable[[Package], None],
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(package)
    monkeypatch.syspath_prepend(str(package.folder))
    name = re.search(
        r"^(\w+) =", next(package.folder.glob("acme*/entry_points.txt")).read_text(), re.MULTILINE
    )
    assert name is not None
    with pytest.raises(ConfigError, match=fault):
        SourceCatalog([name[1]])


TEXT = b"score,text\n1,a row of text\n"


def test_the_page_s_module_refuses_damaged_files_by_name_and_skips_bad_rows(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package.folder))
    spec = open_catalog(["acme"]).sources.spec("acme:a.csv:text")

    def opened(data: bytes, **rules: bool) -> Source:
        (tmp_path / "a.csv").write_bytes(data)
        return open_source(spec, tmp_path, rules=RowRules(**rules))

    for data, message in (
        (b"", "is no CSV file: Empty CSV file"),
        (TEXT + b"2,b,c\n", "is no CSV file: .*Expected 2 columns, got 3"),
        (b"score,text\n", "has no rows"),
        (b"score,body\n1,a\n", "has no column 'text'"),
    ):
        with pytest.raises(SourceError, match=rf"a\.csv.*{message}"):
            rows_of(opened(data, skip_bad=True))
    damaged = TEXT + b"2,\xff\n3,2.50\n"
    assert rows_of(opened(damaged, skip_bad=True)) == ["a row of text", "", "2.50"]
    with pytest.raises(SourceError, match=r"a\.csv.*row 1 .*UTF-8"):
        rows_of(opened(damaged))


def test_a_reader_that_opens_without_rows_is_refused_by_name(
    package: Package, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = package.folder / "acme_csv.py"
    module.write_text(
        re.sub(r".*_refuse_without_rows.*\n", "", module.read_text()), encoding="utf-8"
    )
    mixture.write_text(mixture.read_text().replace("score >= 1", 'text != "x"'), encoding="utf-8")
    for path in mixture.parent.glob("data/*.csv"):
        path.write_bytes(TEXT.partition(b"1")[0])
    monkeypatch.setenv("PYTHONPATH", str(package.folder))
    refused = run_module("plan", mixture, *ALLOW)
    assert refused.status == 2
    assert (
        "SourceError: source 'acme:data/*.csv:text' has no rows: its 2 files have none"
        in refused.output
    )
