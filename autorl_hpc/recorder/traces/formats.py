"""Which format a line or a document is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from autorl_hpc.recorder.traces import claude_code, codex, gemini_cli, mini, opencode, openhands
from autorl_hpc.recorder.traces.told import Table, Told, name


class LineFormat(NamedTuple):
    """One that tells by lines."""

    name: str
    knows: Callable[[Table], bool]
    read: Callable[[Table], list[Told]]


LINE_FORMATS = tuple(
    LineFormat(each.FORMAT, each.knows, each.read)
    for each in (claude_code, opencode, gemini_cli, mini, codex, openhands)
)
"""In the order in which a line is tried: those that only their own fields show come first."""

FORMATS = tuple(each.name for each in LINE_FORMATS)


def read_line(value: Any, only: str | None = None) -> tuple[str, list[Told]] | None:
    """Format and content of a line that was parsed as JSON; None if no format, or not the one wanted, knows it."""
    if not isinstance(value, dict):
        return None
    for each in LINE_FORMATS:
        if only in (None, each.name) and each.knows(value):
            return each.name, each.read(value)
    return None


class Document(NamedTuple):
    """A document's messages in order, and what it says of the whole."""

    format: str
    session: str | None
    messages: list[Any]
    read: Callable[[Table], list[Told]]
    totals: list[Told]


def read_document(value: Any, only: str | None = None) -> Document | None:
    """A trajectory, or a state file."""
    if only in (None, mini.FORMAT) and mini.is_document(value):
        return Document(mini.FORMAT, mini.session(value), value["messages"], mini.read_message, mini.read_totals(value))
    if only not in (None, openhands.FORMAT):
        return None
    if openhands.is_state(value):
        return Document(openhands.FORMAT, None, [], openhands.read, openhands.read_state(value))
    if isinstance(value, list) and any(isinstance(each, dict) and openhands.knows(each) for each in value[:50]):
        first = next((each.get("timestamp") for each in value if isinstance(each, dict)), None)
        return Document(openhands.FORMAT, name(first), value, openhands.read, [])
    return None
