"""``CAPABILITIES.txt`` says what the code can do now; a line that goes is taken from users, on purpose or not."""

from __future__ import annotations

from support.capabilities import FILE, capabilities


def test_the_list_of_capabilities_is_the_codes() -> None:
    written, present = FILE.read_text(encoding="utf-8").splitlines(), capabilities().splitlines()

    gone, new = sorted({*written} - {*present}), sorted({*present} - {*written})
    assert (gone, new) == ([], []), (
        "run 'make capabilities', and name the lines that went in the commit's message"
    )
    assert written == present
