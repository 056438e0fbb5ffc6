"""Parts of other packages that are not public, and that are used here because there is no public way: each is in
``TABLE``, with its bound, and what says loudly that it is gone."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from support.source_tree import PACKAGE_FOLDERS, Module, Tree

#: Public in spite of their names: by the docs of the standard library.
_PUBLIC = frozenset({"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"})
#: A dotted name with a private part, as a text.
_DOTTED = re.compile(r"[a-z]+(\.\w+)*\._\w+(\.\w+)*")


class Part(NamedTuple):
    package: str
    names: frozenset[str]
    bound: str
    """Which releases are refused; empty where a trainer chooses them, and the weekly test of the newest looks."""
    is_missed_by: str
    """What says that it is gone."""


TABLE = {
    "tokenloom.connection.topology": Part(
        "torch", frozenset({"_get_default_store"}), "", "the import, at the Join of a group"
    ),
    "tokenloom.datasets.tensors": Part(
        "torch",
        frozenset({"torch.utils.data._utils.fetch"}),
        "",
        "a test alone: without it, a DataLoader that stacks whole batches is not refused",
    ),
    "tokenloom.integrations.transformers": Part(
        "transformers",
        frozenset(
            {
                "_get_num_items_in_batch",
                "_get_output_dir",
                "_loss_shifts_labels",
                "_save_checkpoint",
                "_save_rng_state",
            }
        ),
        "",
        "TokenloomMixin._require, of what Trainer has to have called; of the other two an AttributeError",
    ),
    "tokenloom_server.api.rest.uvicorn_server": Part(
        "uvicorn",
        frozenset({"uvicorn.protocols.http.h11_impl.H11Protocol"}),
        "uvicorn<0.55",
        "Http, which is not made: REST answers nothing, and the log says why",
    ),
    "tokenloom_tools.moving": Part(
        "litdata and mosaicml-streaming",
        frozenset(
            {
                *("_DistributedEnv", "_WorkerEnv", "_canonical_plans", "_create_cache"),
                *("_create_shuffler", "_resume"),
            }
        ),
        "LIBRARIES",
        "it refuses another release, and turns what is missing into an error that names the library",
    ),
}


def used(tree: Tree) -> dict[str, set[str]]:
    """By module, the private parts of others that it uses: modules and names that it imports, attributes that nothing
    of ours has, methods that it overrides, and dotted names in texts."""
    modules = [module for module in tree.modules.values() if "_pb2" not in module.name]
    definers = Counter(name for module in modules for name in set(_defined(module)))
    parts = defaultdict[str, set[str]](set)
    for module in modules:
        defined = set(_defined(module))
        for name, of_super in _private_names(module):
            # What a class of one module overrides is of a class of another one, or of another package.
            own = definers[name] - (of_super and name in defined)
            if not own and name not in _PUBLIC:
                parts[module.name].add(name)
    return parts


def _defined(module: Module) -> Iterator[str]:
    for node in ast.walk(module.syntax):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def _private_names(module: Module) -> Iterator[tuple[str, bool]]:
    """The names, and whether each is asked of ``super()``."""
    for target, _ in module.imports:
        first, *others = target.split(".")
        if first not in PACKAGE_FOLDERS and any(part[:1] == "_" != part[1:2] for part in others):
            inside = any(part[:1] == "_" for part in others[:-1])
            yield (target if inside else others[-1]), False
    for node in ast.walk(module.syntax):
        if isinstance(node, ast.Attribute) and node.attr[:1] == "_" != node.attr[1:2]:
            is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            yield node.attr, is_super
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _DOTTED.fullmatch(node.value)
            and node.value.split(".")[0] not in PACKAGE_FOLDERS
        ):
            yield node.value, False
