"""The queue of an experiment: entries, claims with generations, heartbeats, trouble notes, and a run's events.jsonl.

An entry's name says what a grader needs to choose: `b1-...` a baseline on the feedback split, `f-<run>--<n>` a submission,
`c-<run>` a closing, `b2-...` a baseline on the report split, `p-<run>--<n>` a fingerprint.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.ledger import now_text
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.exchange import Claim, Heartbeat, QueueEntry, Trouble
from autorl_hpc.states import QueueKind, Split

SUFFIX = ".json"


def entry_name(entry: QueueEntry) -> str:
    if entry.kind is QueueKind.BASELINE:
        number = 1 if entry.split is Split.FEEDBACK else 2
        return f"b{number}-{entry.task}-{entry.base_model.replace('/', '+')}-{entry.recipe_hash[:8]}"
    if entry.kind is QueueKind.FEEDBACK:
        return f"f-{entry.run_id}--{entry.submission_id:06d}"
    if entry.kind is QueueKind.FINGERPRINT:
        return f"p-{entry.run_id}--{entry.submission_id:06d}"
    return f"c-{entry.run_id}"


def put(queue: Path, entry: QueueEntry) -> None:
    """Put an entry into the queue. An existing entry of that name is the same work."""
    atomic.publish_bytes(queue / f"{entry_name(entry)}{SUFFIX}", entry.canonical() + b"\n")


def waiting(queue: Path) -> list[str]:
    """Return the sorted names of the entries (or notes) in a folder, without suffix, from one listing."""
    return [name[: -len(SUFFIX)] for name in reading.list_names(queue) if name.endswith(SUFFIX)]


def is_waited_for(name: str) -> bool:
    """Return whether a running agent waits for this entry; such entries come first."""
    return name.startswith(("b1-", "f-"))


def run_of(name: str) -> str:
    return name.partition("-")[2].partition("--")[0]


def number_of(name: str) -> int:
    """Return the submission number in an entry's name, or 0 if it has none."""
    number = name.rpartition("--")[2]
    return int(number) if number.isascii() and number.isdecimal() else 0


# --- claims with generations, and heartbeats judged by the reader's own clock
#
# A claim is a file `<entry>.g<generation>` made by link. The highest generation owns the entry. A heartbeat is a counter in a file; a
# reader that sees no change for `stale_after_s` of its own monotonic time takes the entry over. An owner that was only slow does
# no harm: the ledger takes one score.

_CLAIM_NAME = re.compile(r"^(?P<entry>.+)\.g(?P<generation>\d{4,})$")


class HeartbeatWatch:
    """Remember when, by this process's clock, each grader's counter last changed."""

    def __init__(self, folder: Path, stale_after_s: float) -> None:
        self.folder = folder
        self.stale_after_s = stale_after_s
        self._seen: dict[str, tuple[int, float]] = {}

    def is_stale(self, grader: str) -> bool:
        """Return whether the grader's counter has not changed for `stale_after_s`, or it says that it ended."""
        raw = _fields(self.folder / f"{grader}.json")
        counter = raw.get("counter")
        if raw.get("state") == "ended":
            return True
        now = time.monotonic()
        known = self._seen.get(grader)
        # An unreadable heartbeat is neither a sign of life nor of death: the time since the last change goes on.
        if known is None or (isinstance(counter, int) and known[0] != counter):
            self._seen[grader] = (counter if isinstance(counter, int) else -1, now)
            return False
        return now - known[1] > self.stale_after_s


class Claims:
    """Take and release claims in an experiment's claims folder, as one grader."""

    def __init__(self, folder: Path, grader: str, host: str, watch: HeartbeatWatch) -> None:
        self.folder = folder
        self.grader = grader
        self.host = host
        self.watch = watch
        self._unreadable_since: dict[Path, float] = {}

    def current(self) -> dict[str, int]:
        return claimed_entries(self.folder)

    def take(self, entry: str, current: dict[str, int]) -> int | None:
        """Claim `entry` and return the generation, or None while a living grader has it."""
        held = current.get(entry, 0)
        if held and not self._may_take_over(self._path(entry, held)):
            return None
        claim = Claim(entry=entry, generation=held + 1, grader=self.grader, host=self.host, pid=os.getpid())
        if atomic.publish_bytes(self._path(entry, claim.generation), claim.canonical() + b"\n"):
            return claim.generation
        return None

    def _may_take_over(self, claim: Path) -> bool:
        """Return whether the owner of the newest claim is this grader, or gives no sign of life."""
        try:
            raw = reading.read_json(claim)
        except FileNotFoundError:
            return False  # dropped since the listing: done, or free in the next listing
        except (OSError, ValueError):
            raw = None
        holder = raw.get("grader") if isinstance(raw, dict) else None
        if isinstance(holder, str):
            self._unreadable_since.pop(claim, None)
            return holder == self.grader or self.watch.is_stale(holder)
        # The owner is unknown: maybe one bad read, or damage, which must not block the entry for ever.
        since = self._unreadable_since.setdefault(claim, time.monotonic())
        return time.monotonic() - since > self.watch.stale_after_s

    def holds(self, entry: str, generation: int) -> bool:
        """Return whether this grader still owns that claim. The file is read too: generations restart after a claim was dropped."""
        return self.current().get(entry) == generation and self._is_own(entry, generation)

    def give_back(self, entry: str, generation: int) -> None:
        """Drop a claim, unless it is no longer this grader's."""
        if self.holds(entry, generation):
            drop(self.folder, entry, generation)

    def drop_own(self) -> None:
        """Drop all claims of this grader, also one taken just before a signal."""
        for entry, generation in self.current().items():
            if self._is_own(entry, generation):
                drop(self.folder, entry, generation)

    def drop(self, entry: str) -> None:
        """Remove every generation of a claim whose work is done."""
        drop(self.folder, entry)

    def _is_own(self, entry: str, generation: int) -> bool:
        return _fields(self._path(entry, generation)).get("grader") == self.grader

    def _path(self, entry: str, generation: int) -> Path:
        return self.folder / f"{entry}.g{generation:04d}"


def _fields(path: Path) -> dict[str, Any]:
    raw = reading.read_json_or_none(path)
    return raw if isinstance(raw, dict) else {}


def drop(folder: Path, entry: str, up_to: int | None = None) -> None:
    """Remove all generations of a claim, or those up to one; the newest last."""
    for name, claimed, generation in _claims(folder):
        if claimed == entry and (up_to is None or generation <= up_to):
            atomic.unlink_quietly(folder / name)


def claimed_entries(folder: Path) -> dict[str, int]:
    """Return the highest generation of each claimed entry."""
    highest: dict[str, int] = {}
    for _, entry, generation in _claims(folder):
        highest[entry] = max(generation, highest.get(entry, 0))
    return highest


def _claims(folder: Path) -> list[tuple[str, str, int]]:
    matches = [_CLAIM_NAME.match(name) for name in reading.list_names(folder)]
    return [(match[0], match["entry"], int(match["generation"])) for match in matches if match]


def write_heartbeat(folder: Path, beat: Heartbeat) -> None:
    atomic.write_bytes(folder / f"{beat.grader}.json", beat.canonical() + b"\n")


# --- trouble notes on failed entries outlive graders: the next one goes on with the waiting time, and `status` shows them

MAX_CHARS = 1000


def read_trouble(folder: Path, entry: str) -> Trouble | None:
    """Return the note on an entry, or None if there is none that can be read."""
    path = folder / f"{entry}{SUFFIX}"
    try:
        return parse_record(Trouble, reading.read_json(path), path)
    except (AutorlError, OSError, ValueError):
        return None


def read_troubles(folder: Path) -> list[Trouble]:
    return [trouble for name in waiting(folder) if (trouble := read_trouble(folder, name)) is not None]


def write_trouble(folder: Path, trouble: Trouble) -> None:
    """Replace the note. A failure is ignored, because the log has the same text."""
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        atomic.write_bytes(folder / f"{trouble.entry}{SUFFIX}", trouble.canonical() + b"\n")


def drop_trouble(folder: Path, entry: str) -> None:
    atomic.unlink_quietly(folder / f"{entry}{SUFFIX}")


# --- logs/events.jsonl: what happened in a run, for people and for the report; no score is read from it


def append_event(path: Path, kind: str, **fields: Any) -> None:
    """Append one line. A failure is ignored, because losing an event does no harm."""
    line = json.dumps({"at": now_text(), "event": kind, **fields}, ensure_ascii=False, default=str) + "\n"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            file.write(line.encode("utf-8", "backslashreplace"))
