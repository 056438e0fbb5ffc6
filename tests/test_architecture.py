"""The architecture is a test: who may import whom, what nobody may import, and that every module is used.

The modules are read from the disk and never imported. A new one fails here until it has its place in the
tables below; each rule is shown to fail on a small tree that breaks it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CLIENT, SERVER, PROTO = "tokenloom", "tokenloom_server", "tokenloom_proto"
PACKAGE_FOLDERS = {CLIENT: "client", SERVER: "server", PROTO: "proto"}

#: From the ground up. A module may import those of lower rows, and of its own name; nothing points up, and
#: neighbours in a row do not know each other. A name stands for a module or for a whole folder.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    SERVER: (
        ("__init__", "errors", "state", "hashing"),
        ("spec",),
        ("config", "stats"),
        ("sources",),
        ("tokenizer",),
        ("packing",),
        ("mixing",),
        ("pipeline",),
        ("ledger", "snapshot"),
        ("order", "run"),
        ("host",),
        ("history", "figures"),
        ("opening",),
        ("service",),
        ("metrics", "page"),
        ("grpc_service", "rest_api"),
        ("server", "remote", "demo"),
        ("cli",),
        ("__main__",),
    ),
    CLIENT: (
        ("errors",),
        ("address", "batch", "snapshot", "topology"),
        ("buffer",),
        ("connection",),
        ("dataset", "lr_scheduler"),
        ("__init__",),
    ),
    PROTO: (
        ("__init__", "seal", "dataloader_pb2"),
        ("dataloader_pb2_grpc",),
    ),
}

#: Stricter than the rows: all that these may import of their own package.
ONLY: dict[str, frozenset[str]] = {
    f"{SERVER}.errors": frozenset(),
    f"{SERVER}.state": frozenset(),
    f"{SERVER}.hashing": frozenset(),
    f"{SERVER}.spec": frozenset({"errors"}),
    f"{SERVER}.config": frozenset({"errors", "spec"}),
    f"{SERVER}.ledger": frozenset({"errors", "state"}),
    f"{SERVER}.run": frozenset({"errors", "hashing", "pipeline", "state"}),
}

#: A process starts here. Whatever cannot be reached from one of these is dead.
ENTRY_POINTS = (f"{CLIENT}.__init__", f"{SERVER}.__main__", f"{SERVER}.demo.__main__")

#: Client and server in one process: the demonstration is a user of both.
USES_CLIENT_AND_TORCH = f"{SERVER}.demo"

#: What lies at the edge stays there: these names may be imported by the units beside them only.
EDGES: tuple[tuple[tuple[str, ...], frozenset[str]], ...] = (
    (
        ("grpc", "grpc_health", "grpc_reflection", f"{PROTO}.dataloader_pb2", f"{PROTO}.dataloader_pb2_grpc"),
        frozenset({f"{SERVER}.grpc_service", f"{CLIENT}.connection", f"{PROTO}.dataloader_pb2_grpc"}),
    ),
    (("fastapi", "starlette", "uvicorn"), frozenset({f"{SERVER}.rest_api", f"{SERVER}.page"})),
    (("redis", "sqlite3"), frozenset({f"{SERVER}.ledger"})),
    (("gigatoken", "awkward"), frozenset({f"{SERVER}.tokenizer"})),
    (("typer",), frozenset({f"{SERVER}.cli"})),
)

#: A whole world of ranks, faults and restarts can be simulated in one process because these know no clock
#: and no other process, and the order is exact because none of them draws a random number of its own.
PURE = ("tokenizer", "packing", "mixing", "pipeline", "run")
IMPURE = (
    *("asyncio", "concurrent", "datetime", "multiprocessing", "queue", "select", "selectors", "signal", "socket"),
    *("subprocess", "threading", "time", "redis", "sqlite3", "random", "secrets", "uuid", "numpy.random"),
)

#: What may be imported of others, beside the standard library: the base dependencies for a trainer, and those of
#: the server extra (starlette is FastAPI's own foundation, awkward what gigatoken takes its text in). The demo
#: trains, so the server's list has torch; the rest of the server is kept from it by a rule of its own.
NEEDS = {
    PROTO: frozenset({"grpc", "google"}),
    CLIENT: frozenset({"grpc", "google", "numpy", "torch"}),
    SERVER: frozenset(
        {
            *("grpc", "grpc_health", "grpc_reflection", "google", "numpy"),
            *("awkward", "fastapi", "gigatoken", "prometheus_client", "pyarrow", "pydantic", "redis"),
            *("rich", "starlette", "tokenizers", "torch", "typer", "uvicorn", "xxhash", "yaml"),
        }
    ),
}

#: Loading data with these can execute it.
BANNED_IMPORTS = (
    *("pickle", "_pickle", "cPickle", "pickle5", "marshal", "shelve", "dill", "cloudpickle", "joblib"),
    *("numpy.lib.format.read_array", "pandas.read_pickle"),
)
BANNED_CALLS = {
    **dict.fromkeys(("exec", "eval", "builtins.eval", "__import__"), "executes text"),
    **dict.fromkeys(("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.load_all"), "is not safe"),
    **dict.fromkeys(("os.system", "os.popen"), "starts a shell"),
    **dict.fromkeys(
        (
            *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
            *("send_object_list", "recv_object_list", "read_pickle", "to_pickle"),
        ),
        "pickles",
    ),
}
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "yaml.BaseLoader"}
#: Beside the packages. Nothing that this project holds may teach a user to load a pickle.
OTHER_PYTHON = ("tests", "examples", "benchmarks", "docker", "docs")

#: What may be called while a module is imported: builders of constants. Anything in CapWords is one, but for these.
IMPORT_TIME_CALLS = frozenset(
    {
        *("compile", "dtype", "field", "files", "frozenset", "getLogger", "joinpath", "model_rebuild", "namedtuple"),
        *("tuple", "dict", "sorted", "range", "len", "min", "max", "bytes", "int", "float", "str", "encode", "join"),
        *("partial", "fromkeys", "version", "cast"),
    }
)
IMPORT_TIME_BANNED = re.compile(
    r"(Lock|RLock|Thread|Event|Condition|Semaphore|Queue|Executor|Redis|Connection|Session|Client|FastAPI|Server)$"
)
MUTATORS = frozenset(
    {
        *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft"),
        *("remove", "reverse", "setdefault", "sort", "update"),
    }
)


@dataclass(frozen=True)
class Module:
    """One source file: ``name`` is dotted, with ``.__init__`` where it is one."""

    name: str
    path: Path
    syntax: ast.Module

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def unit(self) -> str:
        """The name that the tables know: the module, or the folder that it lies in."""
        return self.name.split(".")[1]

    @property
    def qualified_unit(self) -> str:
        return f"{self.package}.{self.unit}"

    @cached_property
    def imports(self) -> tuple[tuple[str, int], ...]:
        """(dotted name, line) of each import, also those inside functions and for type checkers only."""
        found: list[tuple[str, int]] = []
        for node in ast.walk(self.syntax):
            if isinstance(node, ast.Import):
                found += [(alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = self.name.split(".")[: -node.level]
                    base = ".".join([*parents, *([base] if base else [])])
                found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
        return tuple(found)

    def at(self, line: int) -> str:
        return f"{self.path}:{line}"


@dataclass(frozen=True)
class Tree:
    """All modules of the three packages, and the other Python files beside them."""

    modules: dict[str, Module]
    others: tuple[Module, ...]

    @property
    def everything(self) -> Iterator[Module]:
        yield from self.modules.values()
        yield from self.others

    def of(self, *packages: str) -> Iterator[Module]:
        return (module for module in self.modules.values() if module.package in packages)

    def resolve(self, target: str) -> Module | None:
        """The module of ours that an import names; None for anything else."""
        parts = target.split(".")
        while parts:
            name = ".".join(parts)
            for candidate in (name, f"{name}.__init__"):
                if candidate in self.modules:
                    return self.modules[candidate]
            parts.pop()
        return None


def read_tree(root: Path) -> Tree:
    modules: dict[str, Module] = {}
    for package, folder in PACKAGE_FOLDERS.items():
        for path in sorted((root / folder / package).rglob("*.py")):
            name = ".".join(path.relative_to(root / folder).with_suffix("").parts)
            modules[name] = _parse(name, root, path)
    others = [
        _parse(".".join(path.relative_to(root).with_suffix("").parts), root, path)
        for folder in OTHER_PYTHON
        for path in sorted((root / folder).rglob("*.py"))
    ]
    return Tree(modules, tuple(others))


def _parse(name: str, root: Path, path: Path) -> Module:
    return Module(name, path.relative_to(root), ast.parse(path.read_text(encoding="utf-8")))


def _is(target: str, names: Iterable[str]) -> bool:
    """Whether an imported name is, or lies within, one of the names."""
    return any(target == name or target.startswith(f"{name}.") for name in names)


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` of an expression; what is not a name becomes an empty part."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


# --- The rules: each yields one line per fault -------------------------------------------------------------------


def unplaced(tree: Tree) -> Iterator[str]:
    """Every module has a place in the tables, on one row."""
    for package, rows in LAYERS.items():
        places = [name for row in rows for name in row]
        assert len(places) == len(set(places)), f"a name of {package} stands in two rows"
        for module in tree.of(package):
            if module.unit not in places:
                yield f"{module.path}: {module.unit!r} has no place in LAYERS[{package!r}]; give it one"


def upward(tree: Tree) -> Iterator[str]:
    """Nothing points up, and neighbours do not know each other."""
    rank = {f"{p}.{name}": i for p, rows in LAYERS.items() for i, row in enumerate(rows) for name in row}
    for module in tree.modules.values():
        for target, line in module.imports:
            other = tree.resolve(target)
            if other is None or other.package != module.package or other.unit == module.unit:
                continue
            below = rank.get(other.qualified_unit, -1) < rank.get(module.qualified_unit, sys.maxsize)
            allowed = ONLY.get(module.qualified_unit)
            if not below:
                yield f"{module.at(line)}: {module.unit} imports {other.unit}, which is not below it"
            elif allowed is not None and other.unit not in allowed | {"__init__"}:
                yield f"{module.at(line)}: {module.unit} imports {other.unit}; it may import {sorted(allowed)} only"


def crossings(tree: Tree) -> Iterator[str]:
    """Client and server meet only in the wire contract, and the contract knows neither."""
    forbidden = {CLIENT: (SERVER,), SERVER: (CLIENT,), PROTO: (CLIENT, SERVER)}
    for module in tree.modules.values():
        for target, line in module.imports:
            if module.qualified_unit != USES_CLIENT_AND_TORCH and _is(target, forbidden[module.package]):
                yield f"{module.at(line)}: {module.package} imports {target}; they meet only in {PROTO}"


def undeclared(tree: Tree) -> Iterator[str]:
    """The client needs the base dependencies and nothing of the server's; the server what its extra names."""
    for module in tree.modules.values():
        known = NEEDS[module.package] | sys.stdlib_module_names | set(PACKAGE_FOLDERS)
        for target, line in module.imports:
            top = target.partition(".")[0]
            if top not in known:
                yield f"{module.at(line)}: imports {top}, which is none of the dependencies of {module.package}"


def torch_in_server(tree: Tree) -> Iterator[str]:
    """The server runs without torch; its image has none."""
    for module in tree.of(SERVER):
        for target, line in module.imports:
            if module.qualified_unit != USES_CLIENT_AND_TORCH and _is(target, ("torch",)):
                yield f"{module.at(line)}: the server imports {target}; its image has no torch"


def edges(tree: Tree) -> Iterator[str]:
    """Wire types stop at grpc_service and at the client's connection, HTTP at REST, databases at the ledger."""
    for module in tree.modules.values():
        for names, owners in EDGES:
            for target, line in module.imports:
                if _is(target, names) and module.qualified_unit not in owners:
                    yield f"{module.at(line)}: imports {target}, which is for {', '.join(sorted(owners))} only"


def impure(tree: Tree) -> Iterator[str]:
    """No clock, no thread, no socket, no Redis and no chance where the order is decided."""
    for module in tree.of(SERVER):
        for target, line in module.imports:
            if module.unit in PURE and _is(target, IMPURE):
                yield f"{module.at(line)}: {module.unit} imports {target}; it is handed what it needs"


def code_in_data(tree: Tree) -> Iterator[str]:
    """Nothing on the wire, in a snapshot or in a data file can execute code."""
    for module in tree.everything:
        for target, line in module.imports:
            if _is(target, BANNED_IMPORTS) or target in BANNED_CALLS:
                yield f"{module.at(line)}: imports {target}, which can execute what it loads"
        safe = SAFE_LOADERS | _safe_loaders_of(module)
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.Call):
                reason = _dangerous(node, safe)
                if reason:
                    yield f"{module.at(node.lineno)}: {reason}"


def _safe_loaders_of(module: Module) -> set[str]:
    """Classes of a module that derive from a safe YAML loader."""
    classes = [node for node in module.syntax.body if isinstance(node, ast.ClassDef)]
    return {c.name for c in classes if c.bases and all(_dotted(base) in SAFE_LOADERS for base in c.bases)}


def _dangerous(call: ast.Call, safe_loaders: set[str]) -> str | None:
    name = _dotted(call.func)
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}

    def is_constant(argument: str, value: object) -> bool:
        node = arguments.get(argument)
        return isinstance(node, ast.Constant) and node.value is value

    short = name.rpartition(".")[2]
    reason = BANNED_CALLS.get(name) or (BANNED_CALLS.get(short) if "." in name and short != "eval" else None)
    if reason:
        return f"{name} {reason}"
    if name == "torch.load" and not is_constant("weights_only", True):
        return "torch.load without weights_only=True unpickles"
    if "allow_pickle" in arguments and short != "save" and not is_constant("allow_pickle", False):
        return f"{name} with allow_pickle unpickles"
    if "shell" in arguments and not is_constant("shell", False):
        return f"{name} starts a shell"
    if name == "yaml.load":
        loader = arguments.get("Loader") or (call.args[1] if len(call.args) > 1 else None)
        if loader is None or _dotted(loader) not in safe_loaders:
            return "yaml.load without a safe Loader builds any object"
    return None


def dead(tree: Tree) -> Iterator[str]:
    """Every module can be reached from a place where a process starts."""
    waiting = [name for name in ENTRY_POINTS if name in tree.modules]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        waiting += _parents(name, tree)
        waiting += [module.name for target, _ in tree.modules[name].imports if (module := tree.resolve(target))]
    for module in tree.modules.values():
        if module.name not in reached:
            yield f"{module.path}: nothing imports it; use it or remove it"


def _parents(name: str, tree: Tree) -> list[str]:
    """The ``__init__`` modules that run before a module does."""
    parts = name.split(".")
    inits = (".".join([*parts[:i], "__init__"]) for i in range(1, len(parts)))
    return [init for init in inits if init in tree.modules]


def import_time_work(tree: Tree) -> Iterator[str]:
    """An import defines things. It does no work, reads no environment, and leaves nothing that can change."""
    for module in tree.modules.values():
        if module.name.startswith(f"{PROTO}.dataloader_pb2"):
            continue  # generated
        constants = set()
        for statement in _import_time(module.syntax.body):
            yield from _works(module, statement)
            name = _mutable_global(statement)
            if name and not re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__all__", name):
                yield f"{module.at(statement.lineno)}: {name} is a mutable global; name a constant in CAPITALS"
            elif name:
                constants.add(name)
        yield from _changes(module, constants)


def _import_time(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run on import, class bodies included, function bodies and the main guard not."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test):
            continue
        if isinstance(statement, ast.ClassDef | ast.If | ast.Try | ast.With | ast.For | ast.While):
            yield from _import_time(statement.body + getattr(statement, "orelse", []))
            yield from _import_time([s for h in getattr(statement, "handlers", []) for s in h.body])
            if isinstance(statement, ast.With | ast.For | ast.While):
                yield statement
        else:
            yield statement


def _works(module: Module, statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.With | ast.For | ast.While):
        yield f"{module.at(statement.lineno)}: a {type(statement).__name__.lower()} statement runs on import"
        return
    for node in _outside_lambdas(statement):
        if isinstance(node, ast.Call):
            name = _dotted(node.func).rpartition(".")[2]
            builds = name[:1].isupper() or (name[:1] == "_" and name[1:2].isupper()) or name in IMPORT_TIME_CALLS
            if not builds or IMPORT_TIME_BANNED.search(name):
                yield f"{module.at(node.lineno)}: {_dotted(node.func) or 'a call'}() runs on import"
        elif isinstance(node, ast.Attribute) and _dotted(node) == "os.environ":
            yield f"{module.at(node.lineno)}: the environment is read on import"


def _outside_lambdas(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Lambda):
            yield from _outside_lambdas(child)


def _mutable_global(statement: ast.stmt) -> str | None:
    """The name that a statement binds to something mutable."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        name, value = statement.targets[0].id, statement.value
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
        name, value = statement.target.id, statement.value
    else:
        return None
    built = isinstance(value, ast.Call) and _dotted(value.func) in {"dict", "list", "set", "deque", "defaultdict"}
    literal = isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)
    return name if built or literal else None


def _changes(module: Module, constants: set[str]) -> Iterator[str]:
    """Where a constant of the module is changed after all, or a global is rebound."""
    for node in ast.walk(module.syntax):
        changed: list[ast.expr] = []
        if isinstance(node, ast.Global):
            yield f"{module.at(node.lineno)}: global {', '.join(node.names)}; give the state an owner"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed = [node.func.value]
        elif isinstance(node, ast.Assign | ast.Delete):
            changed = [target.value for target in node.targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            changed = [node.target.value if isinstance(node.target, ast.Subscript) else node.target]
        for target in changed:
            if isinstance(target, ast.Name) and target.id in constants:
                yield f"{module.at(target.lineno)}: the constant {target.id} is changed"


Rule = Callable[[Tree], Iterator[str]]
RULES: tuple[Rule, ...] = (
    *(unplaced, upward, crossings, undeclared, torch_in_server, edges, impure, code_in_data, dead),
    import_time_work,
)


# --- The project keeps them --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project() -> Tree:
    return read_tree(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_the_rule(rule: Rule, project: Tree) -> None:
    faults = list(rule(project))

    assert not faults, f"{rule.__doc__}\n" + "\n".join(faults)


def test_all_three_packages_were_read(project: Tree) -> None:
    assert {module.package for module in project.modules.values()} == set(PACKAGE_FOLDERS)
    assert all(entry in project.modules for entry in ENTRY_POINTS)


def test_the_tables_name_nothing_that_is_not_there(project: Tree) -> None:
    units = {module.qualified_unit for module in project.modules.values()}
    named = {f"{package}.{name}" for package, rows in LAYERS.items() for row in rows for name in row}

    assert named - units == set(), "remove these from LAYERS"
    assert {*ONLY, USES_CLIENT_AND_TORCH}.union(*(owners for _, owners in EDGES)) - units == set()


# --- And each rule can fail --------------------------------------------------------------------------------------

GOOD = {
    "client/tokenloom/__init__.py": "from tokenloom.dataset import RemoteDataset\n__all__ = ['RemoteDataset']",
    "client/tokenloom/dataset.py": "import torch\nfrom tokenloom.connection import call",
    "client/tokenloom/connection.py": "import grpc\nfrom tokenloom_proto import dataloader_pb2, seal",
    "proto/tokenloom_proto/__init__.py": "",
    "proto/tokenloom_proto/seal.py": "import hashlib",
    "proto/tokenloom_proto/dataloader_pb2.py": "DESCRIPTOR = add_serialized_file(b'')",
    "server/tokenloom_server/__init__.py": "",
    "server/tokenloom_server/__main__.py": (
        "def main():\n    from tokenloom_server.cli import app\n    app()\nif __name__ == '__main__':\n    main()"
    ),
    "server/tokenloom_server/cli.py": (
        "import typer\nfrom tokenloom_server.run import Run\nfrom tokenloom_server import grpc_service\n"
        "app = typer.Typer()\n@app.command()\ndef serve(): ..."
    ),
    "server/tokenloom_server/demo/__init__.py": "",
    "server/tokenloom_server/demo/__main__.py": "import torch\nimport tokenloom",
    "server/tokenloom_server/errors.py": "class TokenloomError(Exception): ...",
    "server/tokenloom_server/grpc_service.py": "import grpc\nfrom tokenloom_proto import dataloader_pb2",
    "server/tokenloom_server/pipeline.py": "from tokenloom_server.sources import base",
    "server/tokenloom_server/run.py": (
        "import re\nfrom tokenloom_server.pipeline import samples\nNAME = re.compile('a')\nTABLE = {'a': 1}\n"
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
BROKEN: tuple[tuple[Rule, str, str, str], ...] = (
    (unplaced, SERVER_FILE + "helpers.py", "", "'helpers' has no place"),
    (unplaced, "client/tokenloom/helpers.py", "", "'helpers' has no place"),
    (upward, SERVER_FILE + "errors.py", "from tokenloom_server.run import Run", "errors imports run"),
    (upward, SERVER_FILE + "errors.py", "def f():\n    import tokenloom_server.run", "errors imports run"),
    (upward, SERVER_FILE + "errors.py", "from . import run", "errors imports run"),
    (upward, SERVER_FILE + "errors.py", "from .run import Run", "errors imports run"),
    (upward, SERVER_FILE + "sources/base.py", "from ..run import Run", "sources imports run"),
    (upward, SERVER_FILE + "ledger/base.py", "from tokenloom_server.sources import base", "['errors', 'state'] only"),
    (upward, SERVER_FILE + "rest_api.py", "from tokenloom_server import grpc_service", "rest_api imports grpc_service"),
    (upward, "client/tokenloom/connection.py", "import tokenloom.dataset", "connection imports dataset"),
    (crossings, "client/tokenloom/dataset.py", "from tokenloom_server import errors", "they meet only in"),
    (crossings, SERVER_FILE + "cli.py", "import tokenloom", "they meet only in"),
    (crossings, "proto/tokenloom_proto/seal.py", "from tokenloom import dataset", "they meet only in"),
    (undeclared, "client/tokenloom/dataset.py", "def f():\n    import pyarrow", "imports pyarrow"),
    (undeclared, SERVER_FILE + "run.py", "import pandas", "imports pandas"),
    (torch_in_server, SERVER_FILE + "run.py", "from torch import nn", "imports torch.nn"),
    (edges, SERVER_FILE + "run.py", "import grpc", "imports grpc"),
    (edges, SERVER_FILE + "cli.py", "from tokenloom_proto import dataloader_pb2", "grpc_service only"),
    (edges, "client/tokenloom/dataset.py", "from tokenloom_proto.dataloader_pb2 import Base", "for tokenloom.conn"),
    (edges, SERVER_FILE + "cli.py", "from fastapi import FastAPI", "rest_api only"),
    (edges, SERVER_FILE + "cli.py", "import redis", "ledger only"),
    *(
        (impure, f"{SERVER_FILE}{unit}.py", f"import {name}", f" imports {name};")
        for unit, name in (
            *(("run", "time"), ("pipeline", "socket"), ("mixing/new", "threading"), ("packing/new", "redis.client")),
            *(("mixing/new", "numpy.random"), ("mixing/new", "random")),
        )
    ),
    (impure, SERVER_FILE + "run.py", "from time import monotonic", "run imports time.monotonic"),
    *(
        (code_in_data, SERVER_FILE + "cli.py", f"import {name}", f"imports {name}")
        for name in ("pickle", "marshal", "shelve", "dill", "cloudpickle")
    ),
    (code_in_data, "client/tokenloom/dataset.py", "from pickle import loads", "imports pickle.loads"),
    (code_in_data, "examples/train.py", "import pickle", "imports pickle"),
    (code_in_data, "tests/test_it.py", "import torch\ntorch.load('a')", "without weights_only=True"),
    (code_in_data, "examples/train.py", "torch.load('a', weights_only=False)", "without weights_only=True"),
    (code_in_data, "examples/train.py", "exec('a')", "exec executes text"),
    (code_in_data, "examples/train.py", "def f(a):\n    return eval(a)", "eval executes text"),
    (code_in_data, "examples/train.py", "import builtins\nbuiltins.exec('a')", "executes text"),
    (code_in_data, "examples/train.py", "import builtins\nbuiltins.eval('a')", "executes text"),
    (code_in_data, "examples/train.py", "yaml.load('a')", "without a safe Loader"),
    (code_in_data, "examples/train.py", "yaml.load('a', Loader=yaml.Loader)", "without a safe Loader"),
    (code_in_data, "examples/train.py", "yaml.load('a', yaml.FullLoader)", "without a safe Loader"),
    (code_in_data, "examples/train.py", "class L(yaml.Loader): ...\nyaml.load('a', L)", "without a safe Loader"),
    (code_in_data, "examples/train.py", "yaml.unsafe_load('a')", "is not safe"),
    (code_in_data, "examples/train.py", "np.load('a', allow_pickle=True)", "allow_pickle"),
    (code_in_data, "examples/train.py", "dist.broadcast_object_list([])", "pickles"),
    (code_in_data, "examples/train.py", "subprocess.run('a', shell=True)", "starts a shell"),
    (dead, SERVER_FILE + "tokenizer.py", "", "tokenizer.py: nothing imports it"),
    (dead, SERVER_FILE + "sources/txt.py", "", "txt.py: nothing imports it"),
    (dead, "client/tokenloom/scheduler.py", "", "scheduler.py: nothing imports it"),
    (import_time_work, SERVER_FILE + "run.py", "import os\nHOME = os.environ['HOME']", "environment is read"),
    (import_time_work, SERVER_FILE + "run.py", "HOME = read()", "read() runs on import"),
    (import_time_work, SERVER_FILE + "run.py", "class A:\n    a = connect()", "connect() runs on import"),
    (import_time_work, SERVER_FILE + "run.py", "Thread(target=print)", "Thread() runs on import"),
    (import_time_work, SERVER_FILE + "run.py", "LOCK = threading.Lock()", "Lock() runs on import"),
    (import_time_work, SERVER_FILE + "run.py", "for a in 'ab':\n    A = a", "a for statement runs on import"),
    (import_time_work, SERVER_FILE + "run.py", "cache = {}", "cache is a mutable global"),
    (import_time_work, SERVER_FILE + "run.py", "cache: dict[str, int] = dict()", "cache is a mutable global"),
    (import_time_work, SERVER_FILE + "run.py", "A = {}\ndef f():\n    A['b'] = 1", "the constant A is changed"),
    (import_time_work, SERVER_FILE + "run.py", "A = []\ndef f():\n    A.append(1)", "the constant A is changed"),
    (import_time_work, SERVER_FILE + "run.py", "A = 1\ndef f():\n    global A\n    A = 2", "global A"),
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
def test_a_tree_that_breaks_the_rule_is_caught(rule: Rule, path: str, text: str, fault: str, tmp_path: Path) -> None:
    faults = list(rule(write_tree(tmp_path, GOOD | {path: text})))

    assert len(faults) == 1
    assert path in faults[0]
    assert fault in faults[0]


def test_each_rule_is_shown_to_fail() -> None:
    assert {rule for rule, *_ in BROKEN} == set(RULES)
