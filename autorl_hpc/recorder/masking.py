"""Command lines as they are kept: secrets masked, control characters escaped, only their beginning."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from autorl_hpc.files.masking import MASK, masked, masked_options

MAX_COMMAND_CHARS = 400


def command_text(argv: Sequence[str]) -> str:
    """A command line, at most MAX_COMMAND_CHARS characters, printable, with what looks like a secret masked.

    A secret with an innocent name and no known form stays: it stood in /proc for every user of the node.
    """
    shown, before = [], ""
    for part in argv:
        is_value = not part.startswith("-") and (_announces_secret(before, part) or _names_secret(before, part))
        shown.append(MASK if is_value else _quoted(masked(part)))  # masked first: quoting would hide where a value ends
        before = part
    return cut(printable(masked_options(" ".join(shown))), MAX_COMMAND_CHARS)


def _announces_secret(option: str, value: str) -> bool:
    """Whether the word after this option is a secret."""
    probe = f"{option} a:b" if ":" in value else f"{option} ab"  # curl's -u takes a name, or name:password
    return option.startswith("-") and not set(option) & set(" =") and masked(probe) != probe


def _names_secret(name: str, value: str) -> bool:
    """Whether a word is the name of a secret variable and the next one its value."""
    return name.isupper() and masked(f"{name} {value}") == f"{name} {MASK}"


def printable(text: str) -> str:
    """`text` with control, direction and unpaired characters escaped, as Python writes them."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def cut(text: str, limit: int) -> str:
    """The beginning of `text`."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _quoted(part: str) -> str:
    return part if part and not set(part) & set(" \t\n'\"") else shlex.quote(part)
