"""The project's Python files, read from the disk and never imported: which modules there are, and who imports what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

CLIENT, SERVER, TOOLS, PROTO = "tokenloom", "tokenloom_server", "tokenloom_tools", "tokenloom_proto"
PACKAGE_FOLDERS = {CLIENT: "client", SERVER: "server", TOOLS: "server", PROTO: "proto"}
#: Folders of a room that have a row of their own in the table, above it.
FLOORS = ("workers.cluster",)
#: Beside the packages. Nothing that this project holds may teach a user to load a pickle.
OTHER_PYTHON = ("tests", "examples", "benchmarks", "docker", "docs")


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
        """The name that the tables know: the module, or the folder that it lies in, or that folder's upper floor."""
        names = self.name.split(".")[1:]
        return next(
            (floor for floor in FLOORS if ".".join(names).startswith(f"{floor}.")), names[0]
        )

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
    """All modules of the four packages, and the other Python files beside them."""

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
