"""What an experiment's `drivers.NAME.tools` allows beyond plain generation, and how a refusal of it is worded.

An entry is the name of a hosted tool (`web_search` stands for `web_search_20250305` and `web_search_preview` too), of a field of the request
(`plugins`), of a kind of content, or `remote_urls`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from autorl_hpc.gateway.refusals import Refusal

REMOTE_URLS = "remote_urls"

_VERSION = re.compile(r"(?:_preview|_tool_result|_call|_options|_mode|_toolset|_?\d[\d_]*)+\Z")
"""What providers append to a tool's name."""


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


class Allowed:
    """The names that are allowed."""

    def __init__(self, tools: Iterable[str]) -> None:
        self._names = {_plain(name) for name in tools}

    def __bool__(self) -> bool:
        return bool(self._names)

    def __contains__(self, name: str) -> bool:
        plain = _plain(name)
        return plain in self._names or _VERSION.sub("", plain) in self._names

    def need(self, name: str, what: str) -> None:
        """
        Raises:
            Refusal: `name` is not allowed.
        """
        if name not in self:
            raise refused(name, what)


def refused(name: str, what: str) -> Refusal:
    """The one wording of it. `name` is the client's: shortened, and quoted as Python does."""
    return Refusal(
        403,
        "hosted_tool",
        f"{what} {name[:80]!r} is not allowed in this run: the driver may generate text and call the agent's own tools, and reaches nothing "
        "else. Send the request without it",
    )


def _plain(name: str) -> str:
    """`googleSearch`, `google_search` and `Google_Search` are one."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[:200]).lower().replace("-", "_")
