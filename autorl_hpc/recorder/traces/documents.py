"""Follows trajectories: JSON documents that a program writes anew after each step, read again when they changed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from autorl_hpc.files.masking import masked
from autorl_hpc.recorder.traces import mini, openhands, places
from autorl_hpc.recorder.traces.formats import read_document
from autorl_hpc.recorder.traces.told import Told, name, parsed
from autorl_hpc.records.names import printable

MAX_DOCUMENT_BYTES = 24 * 1024 * 1024
"""Two hundred steps make some 10 MB; to parse this much takes a second and, at worst, 600 MB."""

SEARCH_EVERY_S = 10.0
SEARCH_SHARE = 0.0005
LATEST_SEARCH_S = 120.0
"""A search that took 20 ms, among thousands of files, comes again after 40 s; it is a share of a core."""

COST_FACTOR = 50
"""A document that took a second to read is read again after 50: its growth must not cost more than 2 % of a core."""


class Found(NamedTuple):
    """One thing that a document tells."""

    source: str
    format: str
    offset: int
    told: Told


@dataclass
class Followed:
    """What is known of one document: messages that were told, of which session."""

    session: str | None = None
    messages: int = 0
    totals: tuple[Told, ...] = ()
    state: tuple[int, ...] | None = None
    not_before: float = 0.0
    too_large: bool = field(default=False)


class Documents:
    """All trajectories of a workspace.

    Args:
        only: the agent's format; one that writes no documents means that none are looked for.
        known: by source, what a recorder before this one has told.
    """

    def __init__(self, workspace: Path, only: str | None, known: dict[str, Followed]) -> None:
        self.workspace = workspace
        self.only = only
        self.known = known
        self.wanted = only in (None, mini.FORMAT, openhands.FORMAT)
        self._places: list[places.Parts] = []
        self._next_search = 0.0

    def look(self, *, last: bool = False) -> Iterator[Found]:
        """What was added. `last`: nothing is put off."""
        if not self.wanted:
            return
        if last or time.monotonic() >= self._next_search:
            self._search()
        for parts in self._places:
            source = source_of(parts)
            followed = self.known.setdefault(source, Followed())
            if last or time.monotonic() >= followed.not_before:
                yield from self._read(parts, source, followed)

    def _search(self) -> None:
        used = time.thread_time()
        self._places = places.trajectories(self.workspace)
        pause_s = (time.thread_time() - used) / SEARCH_SHARE
        self._next_search = time.monotonic() + min(LATEST_SEARCH_S, max(SEARCH_EVERY_S, pause_s))

    def _read(self, parts: places.Parts, source: str, followed: Followed) -> Iterator[Found]:
        began = time.monotonic()
        read = places.read_whole(self.workspace, parts, followed.state, MAX_DOCUMENT_BYTES)
        if read is None:
            return
        state, data = read
        followed.too_large = data is None
        value = parsed(data.decode("utf-8", "replace")) if data is not None else None
        document = read_document(value, self.only)
        ended = time.monotonic()
        followed.not_before = ended + COST_FACTOR * (ended - began)
        followed.state = state
        if document is None:
            return  # half-written, or none of ours: it is read again when it has changed
        if (document.session is not None and document.session != followed.session) or followed.messages > len(
            document.messages
        ):
            followed.session, followed.messages, followed.totals = document.session or _made_up(data), 0, ()
            yield Found(source, document.format, 0, Told("session", session=followed.session))
        for number, message in enumerate(document.messages[followed.messages :], followed.messages):
            for told in document.read(message) if isinstance(message, dict) else ():
                yield Found(source, document.format, number, _of(told, followed.session))
        followed.messages = len(document.messages)
        totals = tuple(document.totals)
        if totals != followed.totals:
            followed.totals = totals
            for told in totals:
                yield Found(source, document.format, max(0, followed.messages - 1), _of(told, followed.session))


def source_of(parts: places.Parts) -> str:
    """How a file is named in records: relative to the workspace, escaped."""
    return printable(masked("/".join(parts)))[:300]


def _of(told: Told, session: str | None) -> Told:
    return told if told.session is not None or session is None else replace(told, session=session)


def _made_up(data: bytes | None) -> str | None:
    return name(hashlib.sha256(data or b"").hexdigest()[:16])
