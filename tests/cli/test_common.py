"""What commands print and log: hostile names are shown, never obeyed."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
from rich.tree import Tree
from support.hostile import TEXTS, is_shown_as_it_is
from tokenloom_tools.cli.output import LineFormatter, console, print_json, say
from tokenloom_tools.reports.terminal import table


@pytest.mark.parametrize("text", TEXTS)
def test_a_terminal_shows_names_and_never_obeys_them(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say(f"source {text}")
    out = console()
    out.print(table(("source", "tokens"), [(text, "1")], title=text))
    tree = Tree(text)
    tree.add(text)
    out.print(tree)
    out.rule(text)
    assert is_shown_as_it_is(capsys.readouterr().out, lines=True)


def test_a_table_with_escaped_names_is_as_straight_as_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console().print(table(("source", "tokens"), [("\x1b[2Jwiki", "1"), ("code", "2")]))
    lines = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "\\u001b[2Jwiki" in lines[3]


@pytest.mark.parametrize("text", TEXTS)
def test_printed_json_is_the_same_document(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"alias": text})
    printed = capsys.readouterr().out
    assert is_shown_as_it_is(printed, lines=True) and printed.count("\n") == 1
    assert json.loads(printed) == {"alias": text}


@pytest.mark.parametrize("text", TEXTS)
def test_a_log_record_is_one_line_and_its_traceback_is_shown_as_it_is(text: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("%(levelname)-7s %(message)s"))
    try:
        raise RuntimeError(text)
    except RuntimeError:
        record = logging.LogRecord(
            "x", logging.INFO, __file__, 1, "run %s: %s", (text, text), sys.exc_info()
        )
    handler.emit(record)
    first, *traceback = stream.getvalue().splitlines()
    assert first.startswith("INFO    run ") and "Traceback" in traceback[0]
    assert is_shown_as_it_is(stream.getvalue(), lines=True)
