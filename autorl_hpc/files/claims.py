"""Claims with generations, and heartbeats judged by the reader's own clock.

A claim is a file `<entry>.g<generation>` made by link. The highest generation holds the entry. A grader's heartbeat is
a counter in a file; a reader that sees no change for `stale_after_s` of its own monotonic time takes the entry over
with the next generation. Nothing is decided by any other host's clock, nor by mtime. A holder that was only slow does
no harm: the ledger takes one score.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from autorl_hpc.files import atomic, reading
from autorl_hpc.records.exchange import Claim, Heartbeat

_CLAIM_NAME = re.compile(r"^(?P<entry>.+)\.g(?P<generation>\d{4,})$")


class HeartbeatWatch:
    """Remembers when, by this process's clock, each grader's counter last changed."""

    def __init__(self, folder: Path, stale_after_s: float) -> None:
        self.folder = folder
        self.stale_after_s = stale_after_s
        self._seen: dict[str, tuple[int, float]] = {}

    def is_stale(self, grader: str) -> bool:
        """True once the grader's counter has not changed for `stale_after_s`, or it said that it ended."""
        raw = reading.read_json_or_none(self.folder / f"{grader}.json")
        counter = raw.get("counter") if isinstance(raw, dict) else None
        if isinstance(raw, dict) and raw.get("state") == "ended":
            return True
        now = time.monotonic()
        known = self._seen.get(grader)
        # A heartbeat that can't be read is no sign of life, and none of death: the time goes on from the last one.
        if known is None or (isinstance(counter, int) and known[0] != counter):
            self._seen[grader] = (counter if isinstance(counter, int) else -1, now)
            return False
        return now - known[1] > self.stale_after_s


class Claims:
    """The claims folder of an experiment, as one grader uses it."""

    def __init__(self, folder: Path, grader: str, host: str, watch: HeartbeatWatch) -> None:
        self.folder = folder
        self.grader = grader
        self.host = host
        self.watch = watch
        self._unreadable_since: dict[Path, float] = {}

    def current(self) -> dict[str, int]:
        """Highest generation by entry, from one listing."""
        return claimed_entries(self.folder)

    def take(self, entry: str, current: dict[str, int]) -> int | None:
        """Claims `entry` and returns the generation, or None while a living grader holds it."""
        held = current.get(entry, 0)
        if held and not self._may_take_over(self._path(entry, held)):
            return None
        claim = Claim(entry=entry, generation=held + 1, grader=self.grader, host=self.host, pid=os.getpid())
        if atomic.publish_bytes(self._path(entry, claim.generation), claim.canonical() + b"\n"):
            return claim.generation
        return None

    def _may_take_over(self, claim: Path) -> bool:
        """Whether the holder of the newest claim is this grader, or gives no sign of life."""
        try:
            raw = reading.read_json(claim)
        except FileNotFoundError:
            return False  # dropped since the listing: the work is done, or the next listing shows it free
        except (OSError, ValueError):
            raw = None
        holder = raw.get("grader") if isinstance(raw, dict) else None
        if isinstance(holder, str):
            self._unreadable_since.pop(claim, None)
            return holder == self.grader or self.watch.is_stale(holder)
        # Who holds it can't be told: it may be one bad read, or damage that must not hold the entry for ever.
        since = self._unreadable_since.setdefault(claim, time.monotonic())
        return time.monotonic() - since > self.watch.stale_after_s

    def holds(self, entry: str, generation: int) -> bool:
        """Whether the claim of that generation is this grader's, and no one has taken the entry over since. Generations begin at 1
        again once a claim was dropped: so the file is asked, too."""
        return self.current().get(entry) == generation and self._is_own(entry, generation)

    def give_back(self, entry: str, generation: int) -> None:
        """Drops a claim, unless it is no longer this grader's."""
        if self.holds(entry, generation):
            drop(self.folder, entry, generation)

    def drop_own(self) -> None:
        """Gives back whatever this grader holds: a signal may come between a claim and the note of it."""
        for entry, generation in self.current().items():
            if self._is_own(entry, generation):
                drop(self.folder, entry, generation)

    def drop(self, entry: str) -> None:
        """Removes every generation of a claim whose work is done."""
        drop(self.folder, entry)

    def _is_own(self, entry: str, generation: int) -> bool:
        raw = reading.read_json_or_none(self._path(entry, generation))
        return isinstance(raw, dict) and raw.get("grader") == self.grader

    def _path(self, entry: str, generation: int) -> Path:
        return self.folder / f"{entry}.g{generation:04d}"


def drop(folder: Path, entry: str, up_to: int | None = None) -> None:
    """Removes the generations of a claim, all of them or up to one. The newest comes last: until then it holds the entry."""
    for name in reading.list_names(folder):
        match = _CLAIM_NAME.match(name)
        if match and match["entry"] == entry and (up_to is None or int(match["generation"]) <= up_to):
            atomic.unlink_quietly(folder / name)


def claimed_entries(folder: Path) -> dict[str, int]:
    """Highest generation of each claimed entry."""
    highest: dict[str, int] = {}
    for name in reading.list_names(folder):
        match = _CLAIM_NAME.match(name)
        if match:
            highest[match["entry"]] = max(int(match["generation"]), highest.get(match["entry"], 0))
    return highest


def write_heartbeat(folder: Path, beat: Heartbeat) -> None:
    """Replaces the grader's heartbeat file. Not fsynced twice over: it is rewritten every second."""
    atomic.write_bytes(folder / f"{beat.grader}.json", beat.canonical() + b"\n")
