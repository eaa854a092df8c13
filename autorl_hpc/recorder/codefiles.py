"""What is kept of one file of an agent's code, and how little of it has to be read again at the next look.

A file is read again when its size, times or inode are others. Times are coarse, and a file server's clock is not ours: a
file that was read soon after it changed is read once more when it has rested for SURE_S of our own clock.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from dataclasses import dataclass, field
from typing import Any

from autorl_hpc.files.code_history import BY_HASH, Pointer
from autorl_hpc.files.gitobjects import FILE, LINK, PROGRAM, Files, object_id
from autorl_hpc.recorder.codewalk import SURE_S, TEXT_TURNS, TURNS, Met, Tally, is_source

MAX_TEXT_BYTES = 1 << 20
"""Larger files are kept by hash."""

MAX_TEXTS_BYTES = 32 << 20
"""Of all texts in one revision."""

BINARY_LOOK_BYTES = 8000
"""A zero byte in the first 8,000 makes a file binary, as in git (xdiff-interface.c)."""

HASH_AT_ONCE_BYTES = 8 << 20
MAX_HASHED_BYTES = 256 << 20
"""Beyond it only size and time are kept: checkpoints have hashes of their own when they are submitted."""

SLICE_BYTES = 16 << 20
"""Of large files that are hashed in one look: about 0.03 s."""

CHUNK_BYTES = 1 << 20
RESTLESS_CHANGES = 20
"""So many changes, each within RESTLESS_GAP_S of the last, make a file restless: a log. Never one that looks like source, whatever it
costs: a minute in which nobody looks is enough to train with something else. How often it is committed is bounded anyway."""

RESTLESS_GAP_S = 10.0
RESTLESS_EVERY_S = 60.0
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Not blocking: a FIFO that takes a file's place between look and open must hold nobody."""

Identity = tuple[int, int, int, int, int, int]
"""Device, inode, mode, size, mtime, ctime."""


def _identity(status: os.stat_result) -> Identity:
    return (
        status.st_dev,
        status.st_ino,
        status.st_mode,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


@dataclass(slots=True)
class _Known:
    """What the last looks learned of a file. Times are of the own monotonic clock."""

    identity: Identity
    seen_s: float
    mode: int = FILE
    entry: str = ""
    pointer: Pointer | None = None
    sure: bool = False
    changed_s: float = 0.0
    read_s: float = 0.0
    streak: int = 0
    hashing: Any = None
    hashed_bytes: int = 0
    text_bytes: int = 0

    @property
    def restless(self) -> bool:
        return self.streak >= RESTLESS_CHANGES


@dataclass
class CodeFiles:
    """Gathers the files of look after look.

    Attributes:
        files: of the present look, as a commit will hold them.
        fresh: content that has been read and not yet written to code.git, by object id.
    """

    files: Files = field(default_factory=dict)
    fresh: dict[str, bytes] = field(default_factory=dict)
    by_hash: int = 0
    _known: dict[bytes, _Known] = field(default_factory=dict)
    _met: dict[bytes, _Known] = field(default_factory=dict)
    _exact: bool = False
    _dear: bool = False
    _texts_bytes: int = 0
    _slice_left: int = 0
    _now: float = 0.0

    def begin(self, *, exact: bool, dear: bool) -> None:
        """A look begins. `exact`: everything that may have changed unseen is read again. `dear`: looks cost more than their share."""
        self._dear = dear
        self.files, self.by_hash, self._met = {}, 0, {}
        self._exact, self._texts_bytes, self._slice_left, self._now = exact, 0, SLICE_BYTES, time.monotonic()

    def end(self) -> None:
        """A look has ended: what it did not meet is forgotten."""
        self._known = self._met
        if not self.fresh:
            return
        needed = {known.entry for known in self._met.values()}
        self.fresh = {entry: data for entry, data in self.fresh.items() if entry in needed}

    def kept(self) -> dict[str, list[str]]:
        """Names of the files of the last look, by folder."""
        found: dict[str, list[str]] = {}
        for path in self._known:
            folder, _, name = os.fsdecode(path).rpartition("/")
            found.setdefault(folder, []).append(name)
        return found

    def add(self, met: Met, tally: Tally) -> None:
        """Takes a file into this look; one that went away is passed over."""
        try:
            known = self._looked_at(met, met.status, tally) if met.status is not None else self._known.get(met.path)
        except FileNotFoundError:
            return
        except OSError:
            tally.files += 1
            tally.say("files that could not be read")
            return
        if known is None:
            return
        if known.pointer is None and (self._texts_bytes + known.text_bytes) > MAX_TEXTS_BYTES:
            tally.files += 1
            return
        self._met[met.path] = known
        self._texts_bytes += known.text_bytes
        if known.pointer is not None:
            self.by_hash += 1
            if known.pointer.note is not None:
                tally.say(f"files by size alone, {known.pointer.note}")
        self.files[met.path if known.pointer is None else BY_HASH + met.path] = (known.mode, known.entry)

    def turns(self, path: bytes) -> int:
        """By one look in how many a file that doesn't look like source may be looked at. What is not known for sure never waits."""
        known = self._known.get(path)
        if known is None or not known.sure or _waits_for_hash(known):
            return 1
        return TURNS if known.pointer is not None else TEXT_TURNS if self._dear else 1

    def _looked_at(self, met: Met, status: os.stat_result, tally: Tally) -> _Known | None:
        return self._link(met, status) if stat.S_ISLNK(status.st_mode) else self._file(met, status, tally)

    def _link(self, met: Met, status: os.stat_result) -> _Known:
        known = _Known(_identity(status), self._now, LINK)
        known.entry = self._keep(os.fsencode(os.readlink(met.name, dir_fd=met.folder_fd)))
        return known

    def _file(self, met: Met, status: os.stat_result, tally: Tally) -> _Known | None:
        known, identity = self._known.get(met.path), _identity(status)
        if known is None or known.mode == LINK:
            return self._read(met, status, _Known(identity, self._now, changed_s=-RESTLESS_GAP_S), tally)
        if known.identity == identity:
            if known.hashing is not None or _waits_for_hash(known):
                return self._hash_on(met, known)
            rested = self._now - known.seen_s >= SURE_S
            return known if known.sure or not (rested or self._exact) else self._read(met, status, known, tally)
        if known.restless and not (self._exact or is_source(met.name)) and self._now - known.read_s < RESTLESS_EVERY_S:
            tally.missed.add("files that never rest are read once a minute")
            return known
        close = self._now - known.changed_s < (RESTLESS_EVERY_S + RESTLESS_GAP_S if known.restless else RESTLESS_GAP_S)
        streak = known.streak + 1 if close else 0
        return self._read(met, status, _Known(identity, self._now, changed_s=self._now, streak=streak), tally)

    def _read(self, met: Met, status: os.stat_result, known: _Known, tally: Tally) -> _Known | None:
        if status.st_size <= MAX_TEXT_BYTES and self._texts_bytes + status.st_size > MAX_TEXTS_BYTES:
            tally.files += 1
            return None
        fd = os.open(met.name, FILE_FLAGS, dir_fd=met.folder_fd)
        try:
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                return None
            known.mode = PROGRAM if before.st_mode & stat.S_IXUSR else FILE
            known.read_s = self._now
            if before.st_size > MAX_TEXT_BYTES:
                self._read_large(fd, known, before)
            else:
                self._read_small(fd, known)
            same = _identity(os.fstat(fd)) == _identity(before) == known.identity
        finally:
            os.close(fd)
        # What it was before it was read stands for what was read: if that is past, the next look sees another identity.
        if known.identity != _identity(before):
            known.identity, known.seen_s = _identity(before), self._now
        known.sure = same and self._now - known.seen_s >= SURE_S
        return known

    def _read_small(self, fd: int, known: _Known) -> None:
        data = _read_at_most(fd, MAX_TEXT_BYTES)
        known.pointer, known.hashing, known.text_bytes = None, None, 0
        if b"\0" in data[:BINARY_LOOK_BYTES]:
            self._point(known, Pointer("binary", len(data), hashlib.sha256(data).hexdigest()))
        else:
            known.entry = self._keep(data)
            known.text_bytes = len(data)

    def _read_large(self, fd: int, known: _Known, before: os.stat_result) -> None:
        if before.st_size > self._slice_left and _identity(before) == known.identity and known.pointer is not None:
            return  # what was learned of it stands; to be sure of it must wait for its turn
        known.hashing, known.text_bytes = None, 0
        digest, note = None, "for they have not rested yet"
        if before.st_size > MAX_HASHED_BYTES:
            note = f"for they are larger than {MAX_HASHED_BYTES >> 20} MiB"
        elif before.st_size <= min(HASH_AT_ONCE_BYTES, self._slice_left):
            hasher, done = hashlib.sha256(), 0
            while done < before.st_size and (chunk := os.read(fd, CHUNK_BYTES)):
                hasher.update(chunk)
                done += len(chunk)
            self._slice_left -= done
            if _identity(os.fstat(fd)) == _identity(before):
                digest = hasher.hexdigest()
        size = before.st_size
        pointer = Pointer("large", size, digest) if digest else Pointer("large", size, note=note)
        self._point(known, pointer, before.st_mtime_ns)

    def _hash_on(self, met: Met, known: _Known) -> _Known | None:
        """Hashes a further slice of a large file that rests."""
        if self._now - known.seen_s < SURE_S or self._slice_left <= 0:
            return known
        fd = os.open(met.name, FILE_FLAGS, dir_fd=met.folder_fd)
        try:
            if _identity(os.fstat(fd)) != known.identity:
                return known  # the next look sees what it has become
            if known.hashing is None:
                known.hashing, known.hashed_bytes = hashlib.sha256(), 0
            os.lseek(fd, known.hashed_bytes, os.SEEK_SET)
            size = known.identity[3]
            while known.hashed_bytes < size and self._slice_left > 0 and (chunk := os.read(fd, CHUNK_BYTES)):
                known.hashing.update(chunk)
                known.hashed_bytes += len(chunk)
                self._slice_left -= len(chunk)
            if known.hashed_bytes == size and _identity(os.fstat(fd)) == known.identity:
                self._point(known, Pointer("large", size, known.hashing.hexdigest()))
                known.hashing, known.sure = None, True
        finally:
            os.close(fd)
        return known

    def _point(self, known: _Known, pointer: Pointer, mtime_ns: int | None = None) -> None:
        known.pointer = pointer
        known.entry = self._keep(pointer.data(None if pointer.sha256 else mtime_ns))

    def _keep(self, data: bytes) -> str:
        entry = object_id("blob", data)
        self.fresh[entry] = data
        return entry


def _waits_for_hash(known: _Known) -> bool:
    return (
        known.pointer is not None
        and known.pointer.why == "large"
        and known.pointer.sha256 is None
        and known.identity[3] <= MAX_HASHED_BYTES
    )


def _read_at_most(fd: int, most: int) -> bytes:
    """What is there, up to `most` bytes: a file may grow while it is read."""
    parts, left = [], most
    while left > 0 and (part := os.read(fd, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
