"""The metrics, by the tables that make them."""

from __future__ import annotations

from tokenloom_server.api.metrics import TABLES

from docsite.reference.markdown import entries

#: What all metrics of a run are labelled by; its page says so once.
_OF_RUN = ("run", "stream")


def metrics() -> str:
    """A list of all metrics with their labels, but those of every run's."""
    rows = (
        (
            f"`{metric.name}`",
            ", ".join(f"`{label}`" for label in (*_own(labels), *metric.labels)),
            metric.help,
        )
        for labels, level in TABLES
        for metric in level
    )
    return entries(rows)


def _own(labels: tuple[str, ...]) -> tuple[str, ...]:
    return labels[len(_OF_RUN) :] if labels[: len(_OF_RUN)] == _OF_RUN else labels
