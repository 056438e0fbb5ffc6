"""Errors that travel by name."""

from __future__ import annotations

import inspect

import tokenloom
import tokenloom_server.errors
from tokenloom_proto.errors import TokenloomError, named


def test_every_error_that_the_server_can_send_has_a_class_of_its_own() -> None:
    sent = inspect.getmembers(tokenloom_server.errors, inspect.isclass)

    for name, _ in sent:
        error = named(name, "the message")
        assert type(error).__name__ == name
        assert str(error) == "the message"
        assert getattr(tokenloom, name) is type(error)


def test_a_name_of_a_newer_server_is_kept_in_the_message() -> None:
    error = named("NeverHeardOf", "the message")

    assert type(error) is TokenloomError
    assert str(error) == "NeverHeardOf: the message"
