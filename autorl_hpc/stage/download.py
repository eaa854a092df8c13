"""Fetches one file: goes on where it broke off, hashes while it writes, and leaves under the file's name only what is whole.

The unfinished file lies beside its place as `.tmp-NAME.part`, and is kept for the next try; `.tmp-NAME.part.json` says which
version of the file it is a part of.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.hashing import CHUNK_BYTES
from autorl_hpc.stage.progress import Say, Shown, in_words, progress
from autorl_hpc.stage.sources import Address
from autorl_hpc.stage.space import check_space
from autorl_hpc.stage.web import OutOfRange, Passing, Web, chunks, range_start, range_total
from autorl_hpc.stage.work import alone
from autorl_hpc.states import Fault


@dataclass(frozen=True)
class Pin:
    """What is known of a file beforehand.

    Attributes:
        git_sha1: the blob's name in git, sha1 over `blob SIZE\\0` and the data; needs `size_bytes`.
    """

    sha256: str | None = None
    git_sha1: str | None = None
    size_bytes: int | None = None

    @property
    def hashed(self) -> bool:
        return self.sha256 is not None or self.git_sha1 is not None


@dataclass(frozen=True)
class Patience:
    """How a download bears failures.

    Attributes:
        tries: in a row without `WORTH_BYTES` of new data.
        no_way_tries: where the host was never reached: a node without network should say so soon.
        timeout_s: without a byte.
        first_pause_s, longest_pause_s: between tries; doubled each time.
        longest_wait_s: that a server may ask for by Retry-After; the Hub's limits are counted over five minutes.
    """

    tries: int = 6
    no_way_tries: int = 2
    timeout_s: float = 30.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    longest_wait_s: float = 330.0


NO_PIN = Pin()
PATIENCE = Patience()
WORTH_BYTES = 1024 * 1024
"""A connection that brought as much counts as a new beginning: long downloads may break as often as they like."""


@dataclass(frozen=True)
class Fetched:
    """A file that came in whole."""

    sha256: str
    size_bytes: int


def fetch(
    address: Address, target: Path, pin: Pin = NO_PIN, *, say: Say = lambda _: None, patience: Patience = PATIENCE
) -> Fetched:
    """Downloads `address` to `target`, whose folder must exist. A file that is there is taken if it is the pinned one.

    Raises:
        NoNetwork: the host can't be reached from here.
        AutorlError: it is not there, not the pinned file, too large for the disk, or broke off too often.
    """
    try:
        if pin.hashed and target.is_file():
            there = Hashes(pin)
            there.update_from(target)
            if there.differs_from(pin) is None:
                return Fetched(there.sha256, there.size_bytes)
        unfinished = target.with_name(f"{atomic.TEMPORARY_PREFIX}{target.name}.part")
        with alone(unfinished, "downloading this file") as fd, progress(target.name, say) as shown:
            download = Download(address, target, pin, unfinished, fd, say, shown, patience)
            try:
                return download.run()
            except BaseException:
                if not os.fstat(fd).st_size:  # nothing to go on with
                    download.discard()
                raise
    except OSError as error:
        raise from_os_error(error, f"downloading {target.name}", error.filename or target) from error


class Hashes:
    """The hashes of a growing file."""

    def __init__(self, pin: Pin = NO_PIN) -> None:
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % (pin.size_bytes or 0), usedforsecurity=False)
        self.size_bytes = 0

    def update(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        self._git.update(data)
        self.size_bytes += len(data)

    def update_from(self, path: Path) -> None:
        with open(path, "rb") as file:
            while data := file.read(CHUNK_BYTES):
                self.update(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def differs_from(self, pin: Pin) -> str | None:
        """In words, with both hashes; None: it is the pinned file."""
        if pin.size_bytes is not None and self.size_bytes != pin.size_bytes:
            return f"has {self.size_bytes} bytes, expected are {pin.size_bytes}"
        for kind, made, wanted in (
            ("sha256", self.sha256, pin.sha256),
            ("git hash", self._git.hexdigest(), pin.git_sha1),
        ):
            if wanted is not None and made != wanted:
                return f"has {kind} {made}, expected is {wanted}"
        return None


class Download:
    """One file on its way in; `run` is to be read top to bottom."""

    def __init__(
        self,
        address: Address,
        target: Path,
        pin: Pin,
        part: Path,
        fd: int,
        say: Say,
        shown: Shown,
        patience: Patience,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.address, self.target, self.pin, self.part, self.fd = address, target, pin, part, fd
        self.say, self.shown, self.patience, self._sleep = say, shown, patience, sleep
        self.web = Web(address, patience.timeout_s)
        self.notes = part.with_name(part.name + ".json")
        self.total = pin.size_bytes
        self.hashes = Hashes(pin)
        self._answered = False
        self._joined = False  # of parts that came by more than one answer

    def run(self) -> Fetched:
        """See `fetch`."""
        self.hashes.update_from(self.part)
        if self.hashes.size_bytes:
            self._joined = True
            self.say(f"{self.target.name}: going on at {in_words(self.hashes.size_bytes)}")
        self._patiently()
        wrong = self.hashes.differs_from(self.pin)
        if wrong is not None and self._joined:
            self.say(f"{self.target.name}: the parts don't make the whole; from the start")
            self._from_the_start()
            self._joined = False
            self._patiently()
            wrong = self.hashes.differs_from(self.pin)
        if wrong is not None:
            self.discard()
            raise AutorlError(
                f"{self.target.name} as it was downloaded {wrong}: altered, or another version of it",
                where=self.address.shown,
                next_step="look for it at its source under the pinned revision; a proxy or mirror on the way may alter files",
                exit_code=Exit.FAILED,
            )
        os.fsync(self.fd)
        os.replace(self.part, self.target)
        atomic.fsync_directory(self.target.parent)
        atomic.unlink_quietly(self.notes)
        return Fetched(self.hashes.sha256, self.hashes.size_bytes)

    def _patiently(self) -> None:
        failures, pause_s = 0, self.patience.first_pause_s
        if self.pin.hashed and self.hashes.size_bytes == self.pin.size_bytes:
            return  # it was whole already
        if self.pin.size_bytes is not None and self.hashes.size_bytes >= self.pin.size_bytes:
            self._from_the_start()
        while True:
            before = self.hashes.size_bytes
            try:
                self._once()
                return
            except OutOfRange as error:
                if error.total_bytes == before and before:
                    return
                self._from_the_start()
                trouble = Passing("the server has no more of it")
            except Passing as error:
                trouble = error
            if self.hashes.size_bytes - before >= WORTH_BYTES:
                failures, pause_s = 0, self.patience.first_pause_s
            failures += 1
            self._give_up_if(failures, trouble)
            wait_s = max(pause_s, trouble.wait_s or 0.0)
            self.say(f"{self.target.name}: {trouble}; again in {wait_s:.0f} s")
            self._sleep(wait_s)
            pause_s = min(2 * pause_s, self.patience.longest_pause_s)

    def _give_up_if(self, failures: int, trouble: Passing) -> None:
        if trouble.no_way and not self._answered:
            if failures >= self.patience.no_way_tries:
                raise self.web.no_network(str(trouble))
            return
        wait_s = trouble.wait_s or 0.0
        if failures < self.patience.tries and wait_s <= self.patience.longest_wait_s:
            return
        asks = f" and asks to wait {wait_s:.0f} s" if wait_s else ""
        raise AutorlError(
            f"{self.target.name} could not be downloaded: {trouble}{asks} ({failures} tries)",
            where=self.address.shown,
            fault=Fault.CLUSTER,
            next_step="run the same command again, later if need be: it goes on where it stopped",
            exit_code=Exit.ENVIRONMENT,
        )

    def _once(self) -> None:
        """One request, to the end of the file.

        Raises:
            Passing, OutOfRange, AutorlError: see `Web`.
        """
        have = self.hashes.size_bytes
        with self.web.open(self._range(have)) as response:
            self._answered = True
            length = response.headers.get("Content-Length", "")
            length_bytes = int(length) if length.isascii() and length.isdigit() else None
            if response.status == 206 and have:
                span = response.headers.get("Content-Range", "")
                if range_start(span) != have:
                    self._from_the_start()
                    raise Passing("the server goes on at another place than it was asked for")
                self._joined = True
                total = range_total(span) or (None if length_bytes is None else have + length_bytes)
            else:
                if have:
                    self.say(f"{self.target.name}: the server gives it whole or not at all; from the start")
                    self._from_the_start()
                total = length_bytes
            self._expect(total)
            etag = response.headers.get("ETag", "")
            if not self.hashes.size_bytes:
                atomic.write_json(self.notes, {"url": self.address.url.partition("?")[0], "etag": etag})
            for data in chunks(response):
                self._add(data)
        if self.total is not None and self.hashes.size_bytes < self.total:
            raise Passing(f"the connection broke off at {self.hashes.size_bytes} of {self.total} bytes")

    def _range(self, have: int) -> dict[str, str]:
        """The headers that ask for the rest alone; without a hash to check the whole by, only under the server's own tag."""
        if not have:
            return {}
        notes: Any = reading.read_json_or_none(self.notes)
        known = isinstance(notes, dict) and notes.get("url") == self.address.url.partition("?")[0]
        etag = str(notes.get("etag") or "") if known else ""
        if etag.startswith('"') and etag.endswith('"') and etag.isprintable():  # a weak tag promises no equal bytes
            return {"Range": f"bytes={have}-", "If-Range": etag}
        return {"Range": f"bytes={have}-"} if self.pin.hashed else {}

    def _expect(self, total: int | None) -> None:
        """The size that the server announces, against what is known and what the disk has room for."""
        if self.pin.size_bytes is not None and total is not None and total != self.pin.size_bytes:
            self.discard()
            raise AutorlError(
                f"the server has {total} bytes of {self.target.name}, expected are {self.pin.size_bytes}",
                where=self.address.shown,
                next_step="look for it at its source under the pinned revision; a proxy or mirror on the way may alter files",
                exit_code=Exit.FAILED,
            )
        self.total = total if self.pin.size_bytes is None else self.pin.size_bytes
        if self.total is not None:
            check_space(self.part.parent, self.total - self.hashes.size_bytes, self.target.name)

    def _add(self, data: bytes) -> None:
        if self.total is not None and self.hashes.size_bytes + len(data) > self.total:
            self._from_the_start()
            raise Passing(f"the server sends more than the {self.total} bytes of the file")
        view = memoryview(data)
        place = self.hashes.size_bytes
        while view:
            written = os.pwrite(self.fd, view, place)
            self.hashes.update(view[:written])
            place, view = place + written, view[written:]
        self.shown(self.hashes.size_bytes, self.total)

    def _from_the_start(self) -> None:
        os.ftruncate(self.fd, 0)
        self.hashes = Hashes(self.pin)

    def discard(self) -> None:
        atomic.unlink_quietly(self.part)
        atomic.unlink_quietly(self.notes)
