"""``tokenloom`` and ``python -m tokenloom_tools``."""

from __future__ import annotations

import gc
import os
import sys


def main() -> None:
    """Runs the command line; says what to install where the server's packages, or a newer Python, are missing."""
    # The client runs on older ones, so the wheel may be installed there.
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(
            f"tokenloom: the server needs Python 3.11 or newer; this is {sys.version.split()[0]}"
        )
    # Or pydantic looks for plugins in every package that is installed, at each start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # What imports make stays, and to search through it for garbage takes 5 % of a start.
    gc.disable()
    try:
        if sys.argv[1:2] == ["serve"]:
            from tokenloom_proto.threads import name_for_kernel

            name_for_kernel(
                "tokenloom"
            )  # before there are threads: those of libraries are called as who makes them is
            # Trainers wait for it: what the other commands import is not imported for it. It enables the search once
            # it has imported and opened all that it needs.
            from tokenloom_tools.cli.serve import app
        else:
            from tokenloom_tools.cli.app import app

            gc.enable()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tokenloom_"):
            raise
        sys.exit(
            f"tokenloom: the command needs the server's packages, and {error.name!r} is not installed.\n"
            "Install them with: pip install 'tokenloom[server]'\n"
            "(A training job needs only the client: from tokenloom import RemoteDataset.)"
        )
    app()


if __name__ == "__main__":
    main()
