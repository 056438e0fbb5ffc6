"""The metrics, by the tables that make them."""

from __future__ import annotations

from tokenloom_server.api import metric_tables

from docsite.reference.markdown import table


def metrics() -> str:
    """A table of all metrics with their labels."""
    rows = (
        (
            f"`{metric.name}`",
            ", ".join(f"`{label}`" for label in (*labels, *metric.labels)),
            metric.help,
        )
        for labels, level in metric_tables.TABLES
        for metric in level
    )
    return table(("metric", "labels", "meaning"), rows)
