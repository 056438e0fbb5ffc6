"""A plan as a picture: stacked shares over tokens, as SVG or PNG."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Literal

from tokenloom_server.core.numbers import short
from tokenloom_server.errors import ConfigError

if TYPE_CHECKING:
    from tokenloom_server.planning.plan import RunPlan

#: Sources with an entry of their own; the others, with the fewest tokens, are stacked as one.
SHOWN_SOURCES = 19
_WIDTH_IN, _HEIGHT_IN, _DPI = 10.0, 5.0, 144
_OTHERS = "#9aa0a6"
_FEW_COLOURS, _MANY_COLOURS = "tab10", "tab20"

#: Where the reader's colours are dark, black on white becomes white on black, and hues stay. (Of SVG: a PNG has none.)
_IN_THE_DARK = (
    b"<style>@media (prefers-color-scheme: dark) "
    b"{ :root { color-scheme: dark; filter: invert(0.9) hue-rotate(180deg) } }</style>"
)

Format = Literal["svg", "png"]


def draw(plan: RunPlan, form: Format) -> bytes:
    """The picture's file. The same plan gives the same bytes with one release of matplotlib.

    Raises ``ConfigError`` where matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, PercentFormatter
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed; pip install 'tokenloom[plot]', or take the plan as a "
            "table or as JSON"
        ) from None
    # Of its own, and not of the process: several may be drawn at once.
    figure = Figure((_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    axes = figure.add_subplot()
    edges = [plan.from_tokens, *(segment.until_tokens for segment in plan.segments)]
    below = [0.0] * len(edges)
    colours = matplotlib.colormaps[_FEW_COLOURS if len(plan.sources) <= 10 else _MANY_COLOURS]
    for i, (name, shares) in enumerate(_layers(plan)):
        # As steps: what a segment has, it has up to its end.
        stacked = [
            share + under
            for share, under in zip([*shares, shares[-1] if shares else 0.0], below, strict=True)
        ]
        axes.fill_between(
            edges, below, stacked, step="post", label=_literal(name), linewidth=0,
            color=colours(i % colours.N) if name != _rest_name(plan) else _OTHERS,
        )  # fmt: skip
        below = stacked
    for tokens in sorted({ending.tokens for ending in plan.endings} - {plan.until_tokens}):
        axes.axvline(tokens, color="white", linewidth=0.8)
    axes.set_xlim(edges[0], max(edges[-1], edges[0] + 1))
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda tokens, _: re.sub(r"\.0+(?=[KMBT])", "", short(tokens)))
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("tokens of the run")
    axes.set_ylabel("share of the real tokens" if plan.count == "real" else "share of the tokens")
    extent = "ends at" if plan.ends else "up to"
    axes.set_title(
        _literal(f"run {plan.run}: {extent} {short(plan.until_tokens)} tokens"), loc="left"
    )
    figure.legend(loc="outside right upper", frameon=False, reverse=True, fontsize="small")
    file = io.BytesIO()
    # No date and no random ids: the same plan is the same file.
    with matplotlib.rc_context({"svg.hashsalt": "tokenloom", "svg.fonttype": "none"}):
        metadata: dict[str, Any] = {"Date": None} if form == "svg" else {}
        figure.savefig(file, format=form, dpi=_DPI, metadata=metadata)
    return file.getvalue().replace(b"<defs>", _IN_THE_DARK + b"<defs>", 1)


def _layers(plan: RunPlan) -> list[tuple[str, list[float]]]:
    """Names with their shares by segment, in the order of the mixture file; the smallest as one after them."""
    by_size = sorted(plan.sources, key=lambda source: -source.tokens)
    shown = {source.id for source in by_size[:SHOWN_SOURCES]}
    layers = [
        (source.alias, [segment.shares[source.id] for segment in plan.segments])
        for source in plan.sources
        if source.id in shown
    ]
    if len(plan.sources) > SHOWN_SOURCES:
        rest = [source.id for source in plan.sources if source.id not in shown]
        layers.append(
            (_rest_name(plan), [sum(segment.shares[i] for i in rest) for segment in plan.segments])
        )
    return layers


def _rest_name(plan: RunPlan) -> str:
    return f"{len(plan.sources) - SHOWN_SOURCES} others"


def _literal(text: str) -> str:
    """Names come from mixture files: a dollar sign begins no formula, an underscore hides no entry."""
    return text.replace("$", r"\$") if not text.startswith("_") else f" {text}".replace("$", r"\$")
