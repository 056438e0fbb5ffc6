"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.table import Table


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str] = ("source",),
    title: str | None = None,
) -> Table:
    """Numbers stand at the right of their column; the columns ``left`` hold text. Long cells are folded, not cut."""
    made = Table(title=title, title_justify="left")
    for heading in headings:
        made.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
