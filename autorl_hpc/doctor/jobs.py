"""Jobs of the doctor's own: seen by their names, and always taken back, also on ctrl-C, a kill, or a closed terminal."""

from __future__ import annotations

import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from autorl_hpc.cluster import commands, look
from autorl_hpc.doctor.filesystem import copy_pair
from autorl_hpc.doctor.submission import Request, cancel
from autorl_hpc.records.cluster import SeenJob
from autorl_hpc.states import JobState, job_state

GONE_S = 15.0
"""Jobs that are cancelled end within KillWait; the folder is theirs until then."""

PREFIX = "autorl-doctor-"
HIDDEN = f".{PREFIX}"


def _new_name() -> str:
    return PREFIX + secrets.token_hex(4)


@dataclass
class Job:
    """One job.

    Attributes:
        side: a or b, of the pair.
        seen: as the scheduler last told it.
    """

    side: str
    request: Request
    name: str = field(default_factory=_new_name)
    seen: SeenJob | None = None

    def look(self) -> JobState:
        """Asks the scheduler once; UNKNOWN where it doesn't answer now, or doesn't know the job yet."""
        try:
            found = look.jobs([self.name])
        except commands.SchedulerError:
            return JobState.UNKNOWN
        if not found:
            return JobState.GONE if self.seen else JobState.UNKNOWN
        self.seen = found[-1]
        return job_state(self.seen.state)

    @property
    def node(self) -> str:
        return (self.seen.nodes if self.seen else None) or "its node"

    @property
    def reason(self) -> str:
        """Why it waits."""
        return (self.seen.reason if self.seen else None) or "no reason told"

    @property
    def end(self) -> str:
        """How it ended."""
        if self.seen is None:
            return "unknown to the scheduler"
        told = look.with_exit_codes([self.seen], self.seen.job_id)[0]
        return f"{told.state}, exit code {told.exit_code or 'not told'}"


@contextmanager
def probe_folder(place: Path) -> Iterator[Path]:
    """A hidden folder below `place` with the pair's scripts; it goes at the end.

    Raises:
        OSError: it can't be made.
    """
    folder = place / (HIDDEN + secrets.token_hex(4))
    try:
        folder.mkdir(mode=0o700)
        copy_pair(folder)
        yield folder
    finally:
        with _undisturbed():
            remove(folder)


def remove(folder: Path) -> None:
    """Removes a folder, patiently: on NFS a file that a job still holds open stays under another name for a while."""
    for _ in range(30):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


@contextmanager
def taken_back(jobs: list[Job]) -> Iterator[None]:
    """Cancels every job of the list at the end, and waits until none can write any more."""
    try:
        yield
    finally:
        with _undisturbed():
            for job in jobs:
                try:
                    cancel(job.name)
                except commands.SchedulerError:
                    continue  # it ends by itself: its time is short
            deadline = time.monotonic() + GONE_S
            while time.monotonic() < deadline and any(_may_write(job) for job in jobs):
                time.sleep(0.2)


def _may_write(job: Job) -> bool:
    state = job.look()
    return job.seen is not None and not state.over


@contextmanager
def endings() -> Iterator[None]:
    """A closed terminal or a kill ends this process as ctrl-C does: by an exception, so that jobs are taken back."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled((signal.SIGTERM, signal.SIGHUP), end):
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    """While jobs are taken back, a second ctrl-C has to wait for some seconds."""
    with _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN):
        yield


@contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: signal._HANDLER) -> Iterator[None]:
    before = {}
    for number in numbers:
        try:
            before[number] = signal.signal(number, handler)
        except ValueError:  # not the main thread: nothing to be done
            continue
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
