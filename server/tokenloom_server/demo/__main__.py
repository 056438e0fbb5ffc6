"""``python -m tokenloom_server.demo``: the demonstration, or one of its processes by name."""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """Starts what the first argument names; the whole demonstration without one."""
    role, rest = (arguments[0], arguments[1:]) if arguments else ("demo", [])
    # Imported here, so that no process loads what only another one needs: torch takes seconds.
    if role == "demo" and not rest:
        from tokenloom_server.demo.main import run_demo

        return run_demo()
    if role == "trainer":
        from tokenloom_server.demo import trainer

        trainer.main(rest)
        return 0
    if role == "reader":
        from tokenloom_server.demo import reader

        reader.main(rest)
        return 0
    print(f"expected nothing, 'trainer' or 'reader', found {role!r}; see also: tokenloom demo --help", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
