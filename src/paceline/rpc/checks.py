"""Checks of requests that every service makes alike, with the error that a caller can act on."""

from __future__ import annotations

from paceline.ids import check_name
from paceline.rpc import errors


def checked_name(value: str, what: str) -> str:
    """`value` when it is a safe name (see paceline.ids.check_name), else InvalidArgument."""
    try:
        return check_name(value, what)
    except ValueError as error:
        raise errors.InvalidArgument(str(error)) from error
