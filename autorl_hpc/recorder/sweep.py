"""Walks the workspace again and again, a little at a time: for its size on the disk, and for those who look for files in it.

One walk serves all. It takes what the other watches leave of a share of a core, however large the
workspace is; a larger one takes longer.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autorl_hpc.files.below import DIR_FLAGS, open_below
from autorl_hpc.recorder.pace import Leavings, Pace
from autorl_hpc.recorder.watch import Moment

LOOK_S = 1.0
SLICE_S = 0.004
"""CPU seconds of one look at most; nobody but this thread waits for it."""

WHOLE_SHARE = 0.008
"""Of a core, for all of the recorder: the walk has what the other watches leave."""

LEAST_SHARE, MOST_SHARE = 0.0005, 0.004
WINDOW_S = 30.0
BURST_S = 0.02
SLOWEST_S = 20.0

PAUSE_S = 10.0
"""From the end of one walk to the start of the next."""

TICK = 32
"""Entries between two looks at the clock."""

FOLDER_AT_ONCE = 2000
"""Entries of one folder before others have their turn: a folder of a million must not hide its neighbours."""

MAX_OPEN = 32
"""Folders half walked, each with a descriptor."""

MAX_WAITING = 200_000
"""Folders that are still to be walked; beyond, some are left out and the size is not known."""

MAX_DEPTH = 64
MAX_LINKED = 200_000
"""Files with several names that are told apart."""

Parts = tuple[str, ...]
Visitor = Callable[[Parts, os.stat_result], None]


class Sweep:
    """The walk, as a watch. Visitors are called in its thread; its figures may be read in any."""

    name = "workspace"

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.every_s = LOOK_S
        self.visitors: list[Visitor] = []
        self.disk_bytes: int | None = None
        self.files = 0
        self.walks = 0
        self._steps: Iterator[None] | None = None
        self._leavings: Leavings | None = None
        self._pace: Pace | None = None

    def look(self, now: Moment) -> None:
        """Walks on, for SLICE_S at most."""
        if self._leavings is None or self._pace is None:  # here, for they ask for the CPU time of this thread
            self._leavings = Leavings(WHOLE_SHARE, LEAST_SHARE, MOST_SHARE, WINDOW_S)
            self._pace = Pace(LEAST_SHARE, BURST_S, LOOK_S, SLOWEST_S)
        self._pace.share = self._leavings.share()
        self._pace.begin()
        done = True
        try:
            done = self._walk_on(time.thread_time() + SLICE_S)
        finally:
            pause_s = self._pace.end()
            if done:
                self._steps = None
            self.every_s = max(pause_s, PAUSE_S) if done else pause_s

    def _walk_on(self, until_s: float) -> bool:
        """Whether the walk is done; if not, this thread's CPU time has come to `until_s`."""
        if self._steps is None:
            self._steps = self._walk()
        return all(time.thread_time() < until_s for _ in self._steps)

    def close(self, now: Moment) -> None:
        """Lets go. A last whole walk could take long."""
        self._steps = None

    def show(self, visitor: Visitor, deadline: float) -> None:
        """Shows what lies in the workspace now to one visitor, in the caller's thread, as far as the time reaches. Raises OSError."""
        walk = _Walk(self.workspace, [visitor])
        try:
            for _ in walk.steps():
                if time.monotonic() >= deadline:
                    return
        finally:
            walk.close()

    def _walk(self) -> Iterator[None]:
        """Raises OSError if the workspace itself can't be opened."""
        walk = _Walk(self.workspace, self.visitors)
        try:
            yield from walk.steps()
        finally:
            walk.close()
        self.disk_bytes = walk.disk_bytes if walk.whole else None
        self.files, self.walks = walk.files, self.walks + 1


class _Walk:
    """One walk, in breadth: what lies near the top is seen first."""

    def __init__(self, workspace: Path, visitors: list[Visitor]) -> None:
        self.root_fd = os.open(workspace, DIR_FLAGS)
        self.device = os.fstat(self.root_fd).st_dev
        self.visitors = visitors
        self.disk_bytes = self.files = 0
        self.whole = True
        self._waiting: deque[Parts] = deque([()])
        self._open: deque[tuple[Parts, int, Any]] = deque()
        self._linked: set[tuple[int, int]] = set()

    def close(self) -> None:
        """Closes all folders."""
        for _, fd, entries in self._open:
            entries.close()
            os.close(fd)
        os.close(self.root_fd)

    def steps(self) -> Iterator[None]:
        """Yields every few entries."""
        while self._waiting or self._open:
            if self._waiting and len(self._open) < MAX_OPEN:
                self._enter(self._waiting.popleft())
            if self._open:
                yield from self._go_on(*self._open.popleft())

    def _enter(self, parts: Parts) -> None:
        try:
            fd = open_below(self.root_fd, parts, DIR_FLAGS)
        except FileNotFoundError:
            return
        except OSError:
            self.whole = False  # closed by its owner, or a link by now
            return
        try:
            self._open.append((parts, fd, os.scandir(fd)))
        except OSError:
            os.close(fd)
            self.whole = False

    def _go_on(self, parts: Parts, fd: int, entries: Any) -> Iterator[None]:
        self._open.appendleft((parts, fd, entries))  # where `close` finds it
        try:
            for number in range(1, FOLDER_AT_ONCE + 1):
                entry = next(entries, None)
                if entry is None:
                    break
                self._meet(parts, entry)
                if number % TICK == 0:
                    yield
            else:
                self._open.rotate(-1)
                return
        except OSError:
            self.whole = False
        self._open.popleft()
        entries.close()
        os.close(fd)
        yield

    def _meet(self, parts: Parts, entry: os.DirEntry[str]) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        if status.st_dev != self.device:
            return
        here = (*parts, entry.name)
        if stat.S_ISDIR(status.st_mode):
            self._put_off(here)
        elif status.st_nlink > 1 and len(self._linked) < MAX_LINKED:
            if (status.st_dev, status.st_ino) in self._linked:
                return
            self._linked.add((status.st_dev, status.st_ino))
        self.disk_bytes += status.st_blocks * 512
        self.files += 1
        if stat.S_ISREG(status.st_mode):
            for visit in self.visitors:
                visit(here, status)

    def _put_off(self, folder: Parts) -> None:
        if len(folder) > MAX_DEPTH or len(self._waiting) >= MAX_WAITING:
            self.whole = False
        else:
            self._waiting.append(folder)
