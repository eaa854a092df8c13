"""A run's ledger: hash-chained entries, one file each, committed by `link` to the next number; and the heads of ledgers.

Only one writer can win a number; a loser reads and decides again. What may exist only once is written by `append(..., unless=...)`:
the condition is tested against the whole chain before the entry's number, so nothing can slip in between.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.faults import is_cluster_error
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.processes import host_name, job_id
from autorl_hpc.records import readable_json
from autorl_hpc.records.base import NewerVersion, Strict, damaged, parse_record
from autorl_hpc.records.entries import BODIES, Entry, Writer
from autorl_hpc.records.exchange import Heads, RunHead
from autorl_hpc.states import EntryKind

_ENTRY_NAME = re.compile(r"^[0-9]{6}\.json$")
MAX_APPEND_TRIES = 10_000  # each failed try means that another writer won the number


def now_text() -> str:
    """Return the wall-clock time in UTC as ISO text, for people."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds")


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Linked:
    """An entry with its typed body and the sha256 that the next entry links to."""

    entry: Entry
    body: Any
    sha256: str

    @property
    def kind(self) -> EntryKind:
        return self.entry.kind

    @property
    def at(self) -> str:
        return self.entry.at

    @property
    def writer(self) -> Writer:
        return self.entry.writer


class Ledger:
    """Read and append to the ledger of one run. Entries never change, so only new ones are opened. Thread-safe."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._lock = threading.RLock()
        self._entries: list[Linked] = []
        self._genesis: str | None = None

    def genesis(self) -> str:
        """Return the hash that the first entry links to: the sha256 of run.json."""
        if self._genesis is None:
            self._genesis = sha256_hex(reading.read_bytes(self.run.record))
        return self._genesis

    def head(self) -> str:
        """Return the hash of the last entry read, or the genesis if there is none."""
        return self._entries[-1].sha256 if self._entries else self.genesis()

    def read(self) -> Sequence[Linked]:
        """Return all entries, including new ones. Raises AutorlError: an entry is missing, altered or out of order (those before it
        remain in `entries`); OSError: the file system failed; try again."""
        with self._lock:
            return self._read()

    def _read(self) -> Sequence[Linked]:
        listing = reading.list_names(self.run.ledger)
        # Entries read before are skipped: a ledger with thousands of entries is listed many times a second.
        new = [name for name in listing[bisect_right(listing, self._name(0)) :] if _ENTRY_NAME.match(name)]
        if not new and not self._entries:
            with contextlib.suppress(OSError, ValueError):
                for line in filter(None, reading.read_bytes(self.run.sealed_ledger).split(b"\n")):
                    self._take(line + b"\n", self.run.sealed_ledger)
            return self._entries
        known = set(new)
        while (name := self._name(1)) in known:
            path = self.run.ledger / name
            try:
                data = reading.read_listed(path)
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and is_cluster_error(error):
                    raise  # try again later: this says nothing about the entry
                raise damaged(f"ledger entry {name} can't be read: {error}", path) from error
            self._take(data, path)
        beyond = [name for name in new if name > self._name(0)]
        if beyond:
            missing = self._name(1)
            if missing in reading.list_names(self.run.ledger):  # linked after our listing began
                return self._read()
            raise damaged(f"ledger entry {missing} is missing, though {beyond[0]} is there", self.run.ledger / missing)
        return self._entries

    def _name(self, after: int) -> str:
        return f"{len(self._entries) + after:06d}.json"

    @property
    def entries(self) -> Sequence[Linked]:
        """The entries that the last `read` saw."""
        return self._entries

    def append(
        self, kind: EntryKind, body: Strict, *, role: str, unless: Callable[[Sequence[Linked]], bool] | None = None
    ) -> Linked | None:
        """Commit one entry at the end of the chain and return it, or None if `unless` is true of the chain. Raises OSError:
        the file system failed; as far as can be seen, nothing was committed; AutorlError: the chain before it is damaged."""
        if not isinstance(body, BODIES[kind]):
            raise TypeError(f"{kind} takes a {BODIES[kind].__name__}")
        writer = Writer(role=role, host=host_name(), pid=os.getpid(), job_id=job_id())
        facts: dict[str, Any] = {"kind": kind, "body": body.model_dump(mode="json"), "writer": writer}
        with self._lock:
            for _ in range(MAX_APPEND_TRIES):
                entries = self._read()
                if unless is not None and unless(entries):
                    return None
                entry = Entry(seq=len(entries) + 1, prev=self.head(), at=now_text(), **facts)
                path, data = self.run.ledger / f"{entry.seq:06d}.json", entry.canonical() + b"\n"
                if atomic.publish_bytes(path, data):
                    self._take(
                        data, path
                    )  # not read back: a failure here would wrongly report that nothing was committed
                    return self._entries[-1]
        raise RuntimeError(f"no number of the ledger {self.run.ledger} could be won")

    def seal_file(self) -> None:
        """Write ledger.jsonl, one entry per line: a copy for readers that want one file."""
        lines = b"".join(reading.read_bytes(self.run.ledger / f"{linked.entry.seq:06d}.json") for linked in self.read())
        atomic.write_bytes(self.run.sealed_ledger, lines)

    def _take(self, data: bytes, path: Path) -> None:
        seq = len(self._entries) + 1
        try:
            entry = parse_record(Entry, json.loads(data), path)
            body = parse_record(BODIES[entry.kind], entry.body, path)
        except NewerVersion as error:
            raise NewerVersion(f"ledger entry {seq:06d}: {error.what}", where=path, next_step=error.next_step) from None
        except (ValueError, RecursionError, AutorlError) as error:
            what = error.what if isinstance(error, AutorlError) else str(error)
            raise damaged(f"ledger entry {seq:06d} is damaged: {what}", path) from None
        if entry.seq != seq:
            raise damaged(f"ledger entry {seq:06d} calls itself number {entry.seq}: the order was changed", path)
        if entry.prev != self.head():
            before = "run.json" if seq == 1 else f"entry {seq - 1:06d}"
            raise damaged(f"the chain breaks before ledger entry {seq:06d}: {before} or this entry was altered", path)
        if entry.canonical() + b"\n" != data:
            raise damaged(f"ledger entry {seq:06d} is not written as this suite writes it: it was altered", path)
        self._entries.append(Linked(entry, body, sha256_hex(data)))


# --- heads, which should also be stored outside the account that owns the runs


def run_head(run: RunDir) -> RunHead:
    """Return the head of the run's ledger. Raises AutorlError, OSError: see `Ledger.read`."""
    ledger = Ledger(run)
    ledger.read()
    return RunHead(run_id=run.run_id, entries=len(ledger.entries), head=ledger.head())


def heads_of(experiment: ExperimentDir, runs: Iterable[RunHead]) -> Heads:
    return Heads(experiment=experiment.path.absolute().name, runs=tuple(sorted(runs, key=lambda head: head.run_id)))


def in_words(head: RunHead) -> str:
    """Return one line for logs and terminals."""
    return f"head of {head.run_id} after {head.entries} entries: {head.head}"


def write_heads(experiment: ExperimentDir, heads: Heads) -> None:
    atomic.write_bytes(experiment.heads, readable_json(heads.model_dump(mode="json")))


def read_heads(experiment: ExperimentDir) -> Heads | None:
    """Read heads.json; None if it does not exist. Raises AutorlError, ValueError, OSError: it can't be read."""
    try:
        return parse_record(Heads, reading.read_json(experiment.heads), experiment.heads)
    except FileNotFoundError:
        return None
