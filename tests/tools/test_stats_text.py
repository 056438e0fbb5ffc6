"""A run's stats as ``tokenloom stats`` prints them."""

from __future__ import annotations

import io

from rich.console import Console
from support.memory_service import readers_stats, report_stats, run_stats, source_stats
from tokenloom_server.reports.stats import RunStats
from tokenloom_tools.reports.terminal import print_stats

COUNTERS = {"samples": 602_816_352, "rows": 1_234_567_890, "tokens": 10**12}
LONG = run_stats(
    sources=[
        source_stats(
            i,
            alias=f"web-crawl-part-{i}",
            loss=2.3456,
            samples=602_816_352,
            rows=1_234_567_890,
            tokens=10**12,
        )
        for i in range(3)
    ],
    reported=report_stats(),
)


def printed(stats: RunStats, width: int) -> list[str]:
    out = io.StringIO()
    print_stats(Console(file=out, width=width), stats)
    return out.getvalue().splitlines()


def test_at_80_columns_no_cell_is_folded_also_with_losses() -> None:
    lines = printed(LONG, 80)
    assert max(map(len, lines)) <= 80
    for i in range(3):
        shares, counters = (line for line in lines if f"│ web-crawl-part-{i} " in line)
        assert [cell.strip() for cell in shares.split("│")[2:-1]] == [
            "50.00%",
            "50.00%",
            "50.00%",
            "50.00%",
            "2.3456",
        ]
        assert [cell.strip() for cell in counters.split("│")[2:-1]] == [
            "603M",
            "1.23B",
            "1.00T",
            "0.42",
            "2.83K",
        ]


def test_many_sources_are_shown_in_their_groups_and_each_where_that_is_asked_for() -> None:
    sources = [source_stats(i, group=f"node-{i % 30}", actual_share=1 / 60) for i in range(60)]
    lines = printed(run_stats(sources=sources), 160)
    rows = [line for line in lines if "node-" in line]
    assert len(rows) == 24 and "│ node-0 (2) " in rows[0] and "3.33%" in rows[0]
    assert any("│ 12 others " in line and "20.00%" in line for line in lines)
    assert "60 sources, in groups (--all shows each)" in lines
    assert "recent: of 4,800 samples" in lines
    out = io.StringIO()
    print_stats(Console(file=out, width=160), run_stats(sources=sources), every_source=True)
    assert "source-59" in out.getvalue() and "node-" not in out.getvalue()


def test_where_there_is_room_it_is_one_table_with_whole_numbers() -> None:
    lines = printed(LONG, 160)
    (row,) = (line for line in lines if "web-crawl-part-0" in line)
    assert {"602,816,352", "1,234,567,890", "1,000,000,000,000", "2.3456"} <= {
        cell.strip() for cell in row.split("│")
    }


def test_readers_have_a_line_for_each_source_and_node() -> None:
    work = "12 answers, 1,000,000 tokens, 41.5 ns of CPU per token"
    assert [
        line for line in printed(run_stats(readers=readers_stats()), 200) if "readers" in line
    ] == [
        f"readers of code: {work}, 5,000 rows ahead, asked again 3 times",
        f"readers on a-node: 4 CPUs, {work}",
    ]
    assert not any("readers" in line for line in printed(run_stats(), 200))
