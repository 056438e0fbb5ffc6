"""Words that the project no longer uses, and names that do not say what a value is: where they still stand.

``docs/glossary.md`` defines the words that hold. A word here was replaced by one of those; it would be a second word
for one thing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.source_tree import Tree

#: Of each old word: the one that holds. Written as in text; plurals are meant, too.
REPLACED = {
    "behind": "after",
    "told": "recorded, reported, or what it is",
    "whence": "from where",
    "Course": "Timeline",
    "Stretch": "TimelineSegment",
    "Tally": "RowCounts",
    "tallies": "row counts",
    "fates": "row_status",
    "Opener": "JoinHandler",
    "Regime": "MixWeights",
    "Passage": "RowRange",
    "Traffic": "IoStats",
    "Patience": "RetryPolicy",
    "leash": "parent death",
    "ramp": "batch schedule",
}
#: Where an old word is the field's own: a server behind a proxy.
STANDARD = re.compile(
    r"behind (?:a|an|the|its|another) (?:reverse |TLS |load )?(?:proxy|balancer|network|firewall|ingress)",
    re.I,
)
#: Local names that say nothing of their value.
VAGUE = frozenset({"found", "told", "had", "at", "way", "given", "asked", "what"})

_OLD = re.compile("|".join(rf"(?<![\w-]){word}s?(?![\w-])" for word in REPLACED))
_TEXTS = (
    "*.md",
    "docs/**/*.md",
    "proto/**/*.proto",
    "server/**/*.html",
    "server/**/*.js",
    "server/**/*.lua",
    "examples/**/*.py",
)


def old_words(tree: Tree, root: Path) -> Iterator[str]:
    """Each place at which a replaced word stands: in the packages' code, their comments, the docs, the wire "
    "contract."""
    paths = {root / module.path for module in tree.modules.values()}
    paths |= {
        path for pattern in _TEXTS for path in root.glob(pattern) if path.name != "CHANGELOG.md"
    }
    for path in sorted(paths):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for match in _OLD.finditer(STANDARD.sub("", line)):
                word = REPLACED.get(match[0]) or REPLACED[match[0][:-1]]
                yield f"{path.relative_to(root)}:{number}: {match[0]!r}; say {word}"


def vague_names(tree: Tree) -> Iterator[str]:
    """Each local variable whose name does not say what its value is."""
    for module in tree.modules.values():
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
                yield f"{module.at(node.lineno)}: {node.id}"
