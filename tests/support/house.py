"""The house in numbers: how large the code is and how it is divided, against its ceilings and its limits.

``make house`` prints them. A *limit* is where a number is to come to; its *ceiling* in ``tests/house.json`` is where it
is now and what the work that is under way may add, which it may not rise above. ``make house LOWER=1`` brings the
ceilings down to the present numbers, or to the limits.
Size is counted in tokens of Python, so that neither denser lines nor smaller files make anything look smaller.
Modules and functions that are over a limit for a good reason stand in ``tests/house.json`` by name, with the reason.
"""

from __future__ import annotations

import ast
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from support.architecture import LAYERS
from support.source_tree import CLIENT, PACKAGE_FOLDERS, SERVER, Module, Tree, read_tree
from support.words import old_words, vague_names

ROOT = Path(__file__).resolve().parents[2]
#: What Python's tokeniser gives beside what a reader has to understand: layout and comments.
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
FILE = ROOT / "tests" / "house.json"
#: Statements, code lines of 100 columns, and lines of a class; the last are tokens of a module.
MOST_STATEMENTS, LONG_FUNCTION, LONG_CLASS, LARGE_MODULE = 50, 80, 400, 4_000
#: Where each number is to come to.
LIMITS = {
    "loose modules of the server": 4,
    "rows of the layer table": 17,
    "packages of the server": 19,
    "tokens of code": 365_000,
    "tokens of the service": 270_000,
    "tokens of tests": 440_000,
    "bytes of README.md": 10_240,
    "lines of ARCHITECTURE.md": 200,
    "parameters of RemoteDataset": 14,
    "modules of code": 360,
    f"functions over {MOST_STATEMENTS} statements": 0,
    f"functions over {LONG_FUNCTION} code lines": 0,
    f"classes over {LONG_CLASS} lines": 0,
    f"modules over {LARGE_MODULE} tokens": 0,
    "circles of imports": 0,
    "imports of a package's own root": 0,
    "old words": 0,
    "vague names": 0,
}


def measure(root: Path = ROOT) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Each number by its name; and of those that count faults, which these are, without the exceptions."""
    project = read_tree(root)
    tree = Tree(
        {name: m for name, m in project.modules.items() if "_pb2" not in name}, project.others
    )
    server = root / PACKAGE_FOLDERS[SERVER] / SERVER
    code = {
        module.name: _code_lines(root / module.path, module.syntax)
        for module in tree.modules.values()
    }
    statements, lines = {}, {}
    for module in tree.modules.values():
        for name, node in _functions(module):
            statements[name] = sum(isinstance(below, ast.stmt) for below in ast.walk(node)) - 1
            lines[name] = sum(
                n in code[module.name] for n in range(node.lineno, (node.end_lineno or 0) + 1)
            )
    sizes = {str(m.path): tokens_of(root / m.path) for m in tree.modules.values()}
    faults = {
        f"functions over {MOST_STATEMENTS} statements": [
            name for name, n in statements.items() if n > MOST_STATEMENTS
        ],
        f"functions over {LONG_FUNCTION} code lines": [
            name for name, n in lines.items() if n > LONG_FUNCTION
        ],
        f"classes over {LONG_CLASS} lines": [
            f"{module.name}.{node.name}"
            for module in tree.modules.values()
            for node in ast.walk(module.syntax)
            if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= LONG_CLASS
        ],
        f"modules over {LARGE_MODULE} tokens": [
            path for path, size in sizes.items() if size > LARGE_MODULE
        ],
        "circles of imports": [" <-> ".join(circle) for circle in _circles(_graph(tree))],
        "imports of a package's own root": list(_own_roots(tree)),
        "old words": list(old_words(tree, root)),
        "vague names": list(vague_names(tree)),
    }
    excepted = exceptions()
    faults = {
        name: [fault for fault in found if fault not in excepted.get(name, {})]
        for name, found in faults.items()
    }
    numbers = {
        "loose modules of the server": len(list(server.glob("*.py"))),
        "rows of the layer table": len(LAYERS[SERVER]),
        "packages of the server": len({path.parent for path in server.glob("*/*.py")}),
        "modules of code": len(tree.modules),
        "tokens of code": sum(sizes.values()),
        "tokens of the service": sum(sizes[str(m.path)] for m in tree.of(SERVER)),
        "tokens of tests": sum(map(tokens_of, (root / "tests").rglob("*.py"))),
        "bytes of README.md": len((root / "README.md").read_bytes()),
        "lines of ARCHITECTURE.md": len((root / "ARCHITECTURE.md").read_bytes().splitlines()),
        "parameters of RemoteDataset": _parameters(tree, "RemoteDataset"),
    }
    return numbers | {name: len(found) for name, found in faults.items()}, faults


def tokens_of(path: Path) -> int:
    """How many tokens of Python a module has: its comments, docstrings and layout left out."""
    syntax = ast.parse(path.read_bytes(), str(path))
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(syntax)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in _LAYOUT]
    return sum(token.type != tokenize.STRING or token.start not in docstrings for token in tokens)


def tokens_by_package(root: Path = ROOT) -> Counter[str]:
    """Tokens of each distribution, and of each folder of the server's, the client's and the tests'."""
    counts: Counter[str] = Counter()
    for module in read_tree(root).modules.values():
        if "_pb2" not in module.name:
            tokens = tokens_of(root / module.path)
            counts[module.package] += tokens
            counts[".".join(module.name.split(".")[:-1][:2])] += (
                tokens if module.name.count(".") > 1 else 0
            )
    for path in (root / "tests").rglob("*.py"):
        tokens = tokens_of(path)
        folder = path.relative_to(root).parts[1:-1][:1]
        counts["tests"] += tokens
        counts[".".join(("tests", *folder))] += tokens if folder else 0
    return +counts


def ceilings() -> dict[str, int]:
    return dict(json.loads(FILE.read_text(encoding="utf-8"))["ceilings"])


def exceptions() -> dict[str, dict[str, str]]:
    """By the name of a number: what is not counted, each with its reason."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))["exceptions"])


def _code_lines(path: Path, syntax: ast.Module) -> set[int]:
    """The numbers of the lines that hold code: no blanks, no comments, no docstrings."""
    numbered = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    lines = {
        number for number, line in numbered if line.strip() and not line.lstrip().startswith("#")
    }
    for node in ast.walk(syntax):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def _functions(module: Module) -> Iterator[tuple[str, ast.stmt]]:
    """Each function of a module, those in classes and in functions, too: its dotted name, and its syntax."""
    waiting: list[tuple[str, ast.AST]] = [(module.name, module.syntax)]
    while waiting:
        within, parent = waiting.pop()
        for node in ast.iter_child_nodes(parent):
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            name = f"{within}.{node.name}" if named else within
            waiting.append((name, node))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def _parameters(tree: Tree, name: str) -> int:
    """Of a class of the client's: how many its constructor has, the instance left out."""
    for module in tree.of(CLIENT):
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.ClassDef) and node.name == name:
                (init,) = (
                    f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"
                )
                return len([*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs]) - 1
    raise LookupError(name)


def _on_import(module: Module) -> Iterator[str]:
    """The names that a module imports when it is imported itself."""
    waiting: list[ast.stmt] = list(module.syntax.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (name for name, line in module.imports if line == node.lineno)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
            ]


def _graph(tree: Tree) -> dict[str, set[str]]:
    return {
        module.name: {other.name for name in _on_import(module) if (other := tree.resolve(name))}
        - {module.name}
        for module in tree.modules.values()
    }


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules each of which imports all others of its group in the end."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reach = {name: reached(name) for name in graph}
    circles = {
        tuple(sorted(m for m in graph if m in reach[name] and name in reach[m])) for name in graph
    }
    return sorted([*circle] for circle in circles if circle)


def _own_roots(tree: Tree) -> Iterator[str]:
    """Imports, inside functions too, of the root of a package that the module itself lies in."""
    for module in tree.modules.values():
        own = module.name.rpartition(".")[0]
        for name, line in module.imports:
            other = tree.resolve(name)
            if other and other.name == f"{own}.__init__" and other is not module and own.count("."):
                yield module.at(line)


def _print(rows: Iterable[tuple[str, int, int, int]], faults: dict[str, list[str]]) -> None:
    print(f"{'':34}{'now':>8}{'ceiling':>9}{'limit':>8}")
    for name, number, ceiling, limit in rows:
        print(f"{name:34}{number:8,}{ceiling:9,}{limit:8,}{'  to do' if number > limit else ''}")
    print("\ntokens of:")
    for package, tokens in sorted(tokens_by_package().items()):
        print(f"    {package:40}{tokens:8,}")
    for name, found in faults.items():
        print(f"\n{name}:", *found, sep="\n    ")


if __name__ == "__main__":
    numbers, found = measure()
    if "--lower" in sys.argv:
        lowered = {
            name: max(LIMITS[name], min(numbers[name], ceiling))
            for name, ceiling in ceilings().items()
        }
        text = json.dumps(
            {"ceilings": lowered, "exceptions": exceptions()}, indent=2, ensure_ascii=False
        )
        FILE.write_text(f"{text}\n", encoding="utf-8")
    _print(
        [(name, numbers[name], ceilings()[name], limit) for name, limit in LIMITS.items()], found
    )
