"""The architecture is a test: who may import whom, what nobody may import, and that every module is used.

``support/architecture.py`` holds the rules. The project keeps each, and each is shown to fail on a small tree
that breaks it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from support import private_parts
from support.architecture import (
    EDGES,
    ENTRY_POINTS,
    LAYERS,
    ONLY,
    PURE,
    RULES,
    USES_CLIENT_AND_TORCH,
    Rule,
    circles,
    code_in_data,
    coordinated,
    crossings,
    dead,
    edges,
    import_time_work,
    impure,
    private,
    thread_kinds,
    undeclared,
    unplaced,
    upward,
    watched_over,
)
from support.source_tree import PACKAGE_FOLDERS, SERVER, TOOLS, Tree, read_tree
from tokenloom_tools import moving

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def project() -> Tree:
    return read_tree(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_the_rule(rule: Rule, project: Tree) -> None:
    faults = list(rule(project))

    assert not faults, f"{rule.__doc__}\n" + "\n".join(faults)


def test_what_is_not_public_of_other_packages_stands_in_the_table(project: Tree) -> None:
    private = {
        name: {part for part in parts.names if "._" in f".{part}"}
        for name, parts in private_parts.TABLE.items()
    }
    undocumented = {
        (name, part)
        for name, parts in private_parts.TABLE.items()
        for part in parts.names - private[name]
    }
    imported = {
        (module.name, target) for module in project.modules.values() for target, _ in module.imports
    }

    assert private_parts.used(project) == {name: parts for name, parts in private.items() if parts}
    assert undocumented <= imported


def test_releases_that_nobody_has_looked_at_are_refused() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = {line for extra in extras["optional-dependencies"].values() for line in extra}
    asked = {f"{package}<{before}" for _, package, before in moving.LIBRARIES.values()}

    assert asked == {"litdata<0.3", "mosaicml-streaming<0.14"}
    assert "uvicorn>=0.30,<0.55" in bounds


def test_private_parts_are_found_however_they_are_used(tmp_path: Path) -> None:
    folder = tmp_path / "server" / "tokenloom_server" / "storage"
    folder.mkdir(parents=True)
    (folder / "here.py").write_text(
        "from library import Base, _imported\n"
        "from library._inside import shown\n"
        "class Ours(Base):\n"
        "    def __init__(self):\n"
        "        self._own, self.text = 1, 'library._in_a_text'\n"
        "    def _overridden(self):\n"
        "        return super()._overridden(), self._own\n"
        "def asked(other):\n"
        "    return other._asked, other._replace(), other.__dict__, Ours()._own\n",
        encoding="utf-8",
    )

    assert private_parts.used(read_tree(tmp_path)) == {
        "tokenloom_server.storage.here": {
            *("_asked", "_imported", "_overridden"),
            *("library._in_a_text", "library._inside.shown"),
        }
    }


def test_all_packages_were_read(project: Tree) -> None:
    assert {module.package for module in project.modules.values()} == set(PACKAGE_FOLDERS)
    assert all(entry in project.modules for entry in ENTRY_POINTS)


def test_the_tables_name_nothing_that_is_not_there(project: Tree) -> None:
    units = {module.qualified_unit for module in project.modules.values()}
    names = {
        ".".join(module.name.split(".")[:n])
        for module in project.modules.values()
        for n in (2, 3, 4)
    }
    placed = {
        f"{package}.{name}" for package, rows in LAYERS.items() for row in rows for name in row
    }

    assert placed - units == set(), "remove these from LAYERS"
    assert {*ONLY, *PURE, USES_CLIENT_AND_TORCH}.union(
        *(owners for _, owners in EDGES)
    ) - names == set()


# --- And each rule can fail --------------------------------------------------------------------------------------

GOOD = {
    "client/tokenloom/__init__.py": "from tokenloom.datasets import RemoteDataset\n__all__ = ['RemoteDataset']",
    "client/tokenloom/datasets.py": "import numpy\nfrom tokenloom.connection import call",
    "client/tokenloom/connection.py": "import grpc\nfrom tokenloom_proto import dataloader_pb2, seal",
    "proto/tokenloom_proto/__init__.py": "",
    "proto/tokenloom_proto/seal.py": "import hashlib",
    "proto/tokenloom_proto/dataloader_pb2.py": "DESCRIPTOR = add_serialized_file(b'')",
    "server/tokenloom_server/__init__.py": "",
    "server/tokenloom_tools/__main__.py": (
        "def main():\n    from tokenloom_tools.cli import app\n    app()\nif __name__ == '__main__':\n    main()"
    ),
    "server/tokenloom_tools/cli/__init__.py": (
        "import typer\nfrom tokenloom_tools.cli import serve\napp = typer.Typer()\napp.add_typer(serve.app)"
    ),
    "server/tokenloom_tools/cli/serve.py": (
        "import typer\nfrom tokenloom_server.order.steps import samples\n"
        "from tokenloom_server.api.server import Server\napp = typer.Typer()\n@app.command()\ndef serve(): ..."
    ),
    "server/tokenloom_tools/demo/__init__.py": "",
    "server/tokenloom_tools/demo/trainer.py": "import torch\nimport tokenloom",
    "server/tokenloom_server/errors.py": "class TokenloomError(Exception): ...",
    **{f"server/tokenloom_server/{package}/__init__.py": "" for package in ("api", "order", "run")},
    "server/tokenloom_server/api/server.py": (
        "from tokenloom_server.run.generation import Run\nfrom tokenloom_server.api import grpc\nclass Server: ..."
    ),
    "server/tokenloom_server/api/grpc.py": "import grpc\nfrom tokenloom_proto import dataloader_pb2",
    "server/tokenloom_server/order/steps.py": "from tokenloom_server.sources import base",
    "server/tokenloom_server/run/generation.py": (
        "import re\nfrom tokenloom_server.order.steps import samples\nNAME = re.compile('a')\nTABLE = {'a': 1}\n"
        "def read():\n    local = {}\n    local['b'] = TABLE['a']\n    return local"
    ),
    "server/tokenloom_server/sources/__init__.py": "",
    "server/tokenloom_server/sources/base.py": (
        "import yaml\nfrom ..errors import TokenloomError\nclass Loader(yaml.SafeLoader): ...\n"
        "def read(text):\n    return yaml.load(text, Loader=Loader), torch.load(text, weights_only=True)"
    ),
    "examples/train.py": "import numpy as np\nnp.load('a', allow_pickle=False)\nmodel.eval()",
    "tests/test_pages.py": "import numpy as np\nnp.save('forged', [], allow_pickle=True)",
}

SERVER_FILE = "server/tokenloom_server/"
RUN_FILE = "server/tokenloom_server/run/generation.py"
TOOLS_FILE = "server/tokenloom_tools/"
BROKEN: tuple[tuple[Rule, str, str, str], ...] = (
    (
        private,
        TOOLS_FILE + "cli/serve.py",
        "from tokenloom_server.run.generation import Run",
        "tokenloom_server.run.generation, which is not in PUBLIC",
    ),
    (
        crossings,
        SERVER_FILE + "order/steps.py",
        "from tokenloom_tools.cli import serve",
        "tokenloom_server imports tokenloom_tools",
    ),
    (unplaced, SERVER_FILE + "helpers.py", "", "'helpers' has no place"),
    (unplaced, "client/tokenloom/helpers.py", "", "'helpers' has no place"),
    (
        upward,
        SERVER_FILE + "errors.py",
        "from tokenloom_server.run.generation import Run",
        "errors imports run",
    ),
    (
        upward,
        SERVER_FILE + "errors.py",
        "def f():\n    import tokenloom_server.run.generation",
        "errors imports run",
    ),
    (upward, SERVER_FILE + "errors.py", "from . import run", "errors imports run"),
    (upward, SERVER_FILE + "errors.py", "from .run import Run", "errors imports run"),
    (upward, SERVER_FILE + "sources/base.py", "from ..run import Run", "sources imports run"),
    (
        upward,
        SERVER_FILE + "ledger/base.py",
        "from tokenloom_server.sources import base",
        "ledger imports sources",
    ),
    (upward, RUN_FILE, "from tokenloom_server.api import grpc", "run imports api"),
    (upward, RUN_FILE, "from tokenloom_server.sources import base", "run.slots'] only"),
    (
        circles,
        SERVER_FILE + "order/steps.py",
        "from tokenloom_server.run import generation",
        "run.generation → tokenloom_server.order.steps",
    ),
    (
        upward,
        "client/tokenloom/connection.py",
        "import tokenloom.datasets",
        "connection imports datasets",
    ),
    (
        crossings,
        "client/tokenloom/datasets.py",
        "from tokenloom_server import errors",
        "they meet only in",
    ),
    (crossings, TOOLS_FILE + "cli/serve.py", "import tokenloom", "they meet only in"),
    (
        crossings,
        "proto/tokenloom_proto/seal.py",
        "from tokenloom import dataset",
        "they meet only in",
    ),
    (undeclared, "client/tokenloom/datasets.py", "def f():\n    import pyarrow", "imports pyarrow"),
    (undeclared, RUN_FILE, "import pandas", "imports pandas"),
    (edges, RUN_FILE, "from torch import nn", "imports torch.nn"),
    (edges, "client/tokenloom/connection.py", "import torch", "imports torch,"),
    (edges, RUN_FILE, "import grpc", "imports grpc"),
    (
        edges,
        TOOLS_FILE + "cli/serve.py",
        "from tokenloom_proto import dataloader_pb2",
        "servers only",
    ),
    (
        edges,
        "client/tokenloom/datasets.py",
        "from tokenloom_proto.dataloader_pb2 import Base",
        "for tokenloom.conn",
    ),
    (
        edges,
        TOOLS_FILE + "cli/serve.py",
        "from fastapi import FastAPI",
        "tokenloom_tools.routes only",
    ),
    (edges, TOOLS_FILE + "cli/serve.py", "import redis", "ledger only"),
    (edges, RUN_FILE, "import typer", "cli only"),
    *(
        (impure, f"{SERVER_FILE}{unit}.py", f"import {name}", f" imports {name};")
        for unit, name in (
            *(
                ("run/generation", "time"),
                ("order/pipeline", "socket"),
                ("mixing/new", "threading"),
                ("packing/new", "redis.client"),
            ),
            *(("mixing/new", "numpy.random"), ("mixing/new", "random")),
        )
    ),
    (impure, RUN_FILE, "from time import monotonic", "run.generation imports time.monotonic"),
    *(
        (code_in_data, TOOLS_FILE + "cli/serve.py", f"import {name}", f"imports {name}")
        for name in ("pickle", "marshal", "shelve", "dill", "cloudpickle")
    ),
    (
        code_in_data,
        "client/tokenloom/datasets.py",
        "from pickle import loads",
        "imports pickle.loads",
    ),
    (code_in_data, "examples/train.py", "import pickle", "imports pickle"),
    (
        code_in_data,
        "tests/test_it.py",
        "import torch\ntorch.load('a')",
        "without weights_only=True",
    ),
    (
        code_in_data,
        "examples/train.py",
        "torch.load('a', weights_only=False)",
        "without weights_only=True",
    ),
    (code_in_data, "examples/train.py", "exec('a')", "exec executes text"),
    (code_in_data, "examples/train.py", "def f(a):\n    return eval(a)", "eval executes text"),
    (code_in_data, "examples/train.py", "import builtins\nbuiltins.exec('a')", "executes text"),
    (code_in_data, "examples/train.py", "import builtins\nbuiltins.eval('a')", "executes text"),
    (code_in_data, "examples/train.py", "yaml.load('a')", "without a safe Loader"),
    (
        code_in_data,
        "examples/train.py",
        "yaml.load('a', Loader=yaml.Loader)",
        "without a safe Loader",
    ),
    (code_in_data, "examples/train.py", "yaml.load('a', yaml.FullLoader)", "without a safe Loader"),
    (
        code_in_data,
        "examples/train.py",
        "class L(yaml.Loader): ...\nyaml.load('a', L)",
        "without a safe Loader",
    ),
    (code_in_data, "examples/train.py", "yaml.unsafe_load('a')", "is not safe"),
    (code_in_data, "examples/train.py", "np.load('a', allow_pickle=True)", "allow_pickle"),
    (code_in_data, "examples/train.py", "dist.broadcast_object_list([])", "pickles"),
    (code_in_data, "examples/train.py", "subprocess.run('a', shell=True)", "starts a shell"),
    *(
        (coordinated, TOOLS_FILE + "cli/serve.py", text, says)
        for text, says in (
            (
                "def f(coordinator):\n    with coordinator._lock: ...",
                "coordinator._lock is its own",
            ),
            (
                "def f(served):\n    served.coordinator.one_lock.acquire()",
                "coordinator.one_lock is",
            ),
            (
                "class A:\n    def f(self):\n        self._coordinator.epoch = 3",
                "epoch of _coordinator is written",
            ),
            ("def f(coordinator):\n    coordinator.count += 1", "count of coordinator is written"),
            (
                "def f(task):\n    task.active.generation.committed = 3",
                "committed of active is written",
            ),
        )
    ),
    *(
        (
            coordinated,
            SERVER_FILE + "run/attempts.py",
            f"class A:\n    def f(self):\n        {text}",
            says,
        )
        for text, says in (
            ("self._present._loss", "_present._loss is its own"),
            ("self._head.uid = ''", "uid of _head is written"),
        )
    ),
    *(
        (watched_over, RUN_FILE, text, "nobody watches over")
        for text in (
            "def f():\n    threading.Thread(target=read).start()",
            "def f():\n    return ThreadPoolExecutor(1)",
            "class A(threading.Thread): ...",
        )
    ),
    (dead, SERVER_FILE + "tokenizer.py", "", "tokenizer.py: nothing imports it"),
    (dead, SERVER_FILE + "sources/txt.py", "", "txt.py: nothing imports it"),
    (dead, "client/tokenloom/scheduler.py", "", "scheduler.py: nothing imports it"),
    (import_time_work, RUN_FILE, "import os\nHOME = os.environ['HOME']", "environment is read"),
    (import_time_work, RUN_FILE, "HOME = read()", "read() runs on import"),
    (import_time_work, RUN_FILE, "class A:\n    a = connect()", "connect() runs on import"),
    (import_time_work, RUN_FILE, "Thread(target=print)", "Thread() runs on import"),
    (import_time_work, RUN_FILE, "LOCK = threading.Lock()", "Lock() runs on import"),
    (import_time_work, RUN_FILE, "for a in 'ab':\n    A = a", "a for statement runs on import"),
    (import_time_work, RUN_FILE, "cache = {}", "cache is a mutable global"),
    (import_time_work, RUN_FILE, "cache: dict[str, int] = dict()", "cache is a mutable global"),
    (import_time_work, RUN_FILE, "A = {}\ndef f():\n    A['b'] = 1", "the constant A is changed"),
    (import_time_work, RUN_FILE, "A = []\ndef f():\n    A.append(1)", "the constant A is changed"),
    (import_time_work, RUN_FILE, "A = 1\ndef f():\n    global A\n    A = 2", "global A"),
)


def write_tree(root: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_tree(root)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_tree_keeps_the_rule(rule: Rule, tmp_path: Path) -> None:
    assert list(rule(write_tree(tmp_path, GOOD))) == []


@pytest.mark.parametrize(("rule", "path", "text", "fault"), BROKEN)
def test_a_tree_that_breaks_the_rule_is_caught(
    rule: Rule, path: str, text: str, fault: str, tmp_path: Path
) -> None:
    faults = list(rule(write_tree(tmp_path, GOOD | {path: text})))

    assert len(faults) == 1
    assert path in faults[0]
    assert fault in faults[0]


def test_each_rule_is_shown_to_fail() -> None:
    assert {rule for rule, *_ in BROKEN} == set(RULES)


# --- The page that describes it ------------------------------------------------------------------------------------

PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
LEDGER = (ROOT / SERVER_FILE / "ledger" / "__init__.py").read_text(encoding="utf-8")


def test_the_page_lists_the_packages_from_the_ground_up() -> None:
    listed = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)
    rows = [
        {name for name in row if (ROOT / SERVER_FILE / name).is_dir()} for row in LAYERS[SERVER]
    ]  # no upper floors

    assert sorted(listed) == sorted(set.union(*rows))
    assert [next(i for i, row in enumerate(rows) if name in row) for name in listed] == sorted(
        i for i, row in enumerate(rows) for _ in row
    )


def test_each_way_on_the_page_runs_along_imports(project: Tree) -> None:
    needs = {
        module.name: {
            other.name for target, _ in module.imports if (other := project.resolve(target))
        }
        for module in project.of(SERVER)
    }
    ways = [
        re.findall(r"^([a-z_.]+) {2,}", block, re.MULTILINE)
        for block in re.findall(r"```text\n(.*?)```", PAGE, re.S)
    ]

    assert len(ways) == 5
    for way in ways:
        for one, other in pairwise(f"{SERVER}.{name}" for name in way):
            linked = other in needs[one] or one in needs[other]
            assert linked, f"ARCHITECTURE.md: {one} and {other} do not know each other"


def test_the_ledger_lists_who_writes_what(project: Tree) -> None:
    listed, calls = {}, {}
    for commands, writers in re.findall(r"^\| ([A-Z][\w, ]+) \| (.*?) \|", LEDGER, re.MULTILINE):
        listed[commands] = set(re.findall(r"``([a-z_]+(?:\.[a-z_]+)?)``", writers))
    for module in project.of(SERVER, TOOLS):
        if module.qualified_unit != f"{SERVER}.ledger":
            functions = [
                node.func for node in ast.walk(module.syntax) if isinstance(node, ast.Call)
            ]
            calls[module.name.partition(".")[2]] = {
                ast.unparse(each).rpartition(".")[2] for each in functions
            }
    names = {
        commands: {*commands.replace("Create", "create_run").split(", ")} for commands in listed
    }
    commands = ast.parse(
        (ROOT / SERVER_FILE / "ledger" / "commands.py").read_text(encoding="utf-8")
    ).body
    known = {node.name for node in commands if isinstance(node, ast.ClassDef)} - {
        "Command",
        "LeaderCommand",
    }

    assert {command for row in listed for command in row.split(", ")} == known
    assert listed == {
        row: {name for name, own in calls.items() if own & names[row]} for row in listed
    }


def test_the_page_says_of_each_thread_what_it_meets(project: Tree) -> None:
    listed = re.findall(r"^\| ((?:`[a-z-]+`(?:, )?)+) \|", PAGE, re.MULTILINE)

    assert {kind for row in listed for kind in re.findall(r"[a-z-]+", row)} == thread_kinds(project)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", PAGE))))
def test_each_path_on_the_page_is_there(path: str) -> None:
    assert any(
        (start / path).exists()
        for start in (ROOT, ROOT / SERVER_FILE, ROOT / TOOLS_FILE, ROOT / "client" / "tokenloom")
    )
