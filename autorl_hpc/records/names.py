"""The shapes of names and hashes that records share."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import StringConstraints

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""A task, agent, driver, mode, experiment or manifest: safe as a file name."""

MODEL_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?$"
ModelName = Annotated[str, StringConstraints(pattern=MODEL_NAME_PATTERN)]
"""`name` or `org/name`."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


_NO_PLAIN_ASCII = re.compile(r"[^ -~]")


def is_name(text: str) -> bool:
    """Whether `text` may stand as a file name of ours."""
    return re.fullmatch(NAME_PATTERN, text) is not None and ".." not in text


def printable(text: str) -> str:
    """`text` with everything escaped that is no plain character: it may go into JSON, a terminal and a page.

    File names, tensor names and notes are of an agent's making: they hold bytes that are no UTF-8, and terminal escapes.
    """
    return _NO_PLAIN_ASCII.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
