"""The shell commands of the pages that people read, and what each page says of those that are not run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Every page, by its path from the root.
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "tests/**/*.md")
    for path in sorted(ROOT.glob(pattern))
}
#: What a command begins with in a block without a language. In a block with prompts, commands are what follows ``$``.
PROGRAMS = (
    *(
        "tokenloom",
        "python",
        "python3",
        "pip",
        "make",
        "pytest",
        "torchrun",
        "ray",
        "sbatch",
        "srun",
        "accelerate",
    ),
    *(
        "docker",
        "kubectl",
        "kind",
        "helm",
        "curl",
        "redis-cli",
        "promtool",
        "gh",
        "git",
        "hf",
        "aws",
        "wget",
        "jq",
    ),
    *(
        "sudo",
        "systemctl",
        "journalctl",
        "openssl",
        "export",
        "cat",
        "grep",
        "cp",
        "mv",
        "mkdir",
        "cd",
        "rm",
        "ls",
    ),
)
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:\S+/)?(?:{'|'.join(PROGRAMS)})(?: .*)?")
_PLACES = {"", "bash", "console", "sh", "shell"}


@dataclass(slots=True)
class Block:
    """A block of code: its lines, and the comment right before it that says why its commands are not run."""

    line: int
    mark: str
    language: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def commands(self) -> list[str]:
        """Each with its continuation lines."""
        if self.language not in _PLACES:
            return []
        lines = re.sub(r"\\\n\s*", "", "\n".join(self.lines)).splitlines()
        typed = [line[2:] for line in lines if line.startswith("$ ")]
        if typed or self.language:
            return typed or [line for line in lines if line and not line.startswith("#")]
        return [line for line in lines if _COMMAND.fullmatch(line)]


def blocks(text: str) -> list[Block]:
    """A page's blocks of code. A mark that stands before none is a block without lines."""
    found: list[Block] = []
    block, mark, fenced = Block(0, ""), "", False
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("```"):
            fenced = not fenced
            block, mark = (
                (Block(number, mark, line.strip()[3:]), "") if fenced else (Block(0, ""), "")
            )
            found += [block] if fenced else []
        elif fenced or (block.line and line.startswith("    ")):
            block.lines.append(line if fenced else line.strip())
        elif line.startswith("    "):
            block, mark = Block(number, mark, "", [line.strip()]), ""
            found.append(block)
        elif line:
            found += [Block(number, mark)] if mark else []
            named = re.fullmatch(r"<!-- ((?:not run: |run by ).+) -->", line)
            block, mark = Block(0, ""), named[1] if named else ""
    return found
