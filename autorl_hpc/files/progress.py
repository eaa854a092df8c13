"""Progress bars with rate and remaining time, on a terminal alone and for what takes longer than 3 s."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

SHOW_AFTER_S = 3.0
_ONE = threading.Lock()  # of several bars, in threads or one in another, the first is shown
T = TypeVar("T")


@contextmanager
def bar(what: str, total: float | None, *, in_bytes: bool = True) -> Iterator[Callable[[float], None]]:
    """Yield a function that advances a bar by an amount, in bytes or in things. `total`: None if it is unknown."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    began, done, shown = time.monotonic(), 0.0, None

    def advance(amount: float) -> None:
        nonlocal done, shown
        done += amount
        if shown is not None:
            shown.update(shown.task_ids[0], completed=done)
        elif time.monotonic() - began > SHOW_AFTER_S and _ONE.acquire(blocking=False):
            shown = _progress(in_bytes)
            shown.add_task(what, total=total, completed=done)
            shown.start()

    try:
        yield advance
    finally:
        if shown is not None:
            shown.stop()
            _ONE.release()


def _progress(in_bytes: bool) -> Any:
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            return Text("" if task.speed is None else f"{task.speed:.1f}/s")

    counts: Any = (progress.DownloadColumn(), progress.TransferSpeedColumn())
    counts = counts if in_bytes else (progress.MofNCompleteColumn(), Rate())
    columns = (progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), *counts)
    return progress.Progress(*columns, progress.TimeRemainingColumn(), console=Console(stderr=True), transient=True)


def tracked(things: Sequence[T], what: str) -> Iterator[T]:
    """Yield things behind a bar."""
    with bar(what, len(things), in_bytes=False) as advance:
        for thing in things:
            yield thing
            advance(1)


class Counted:
    """A binary file whose reads advance a bar."""

    def __init__(self, file: IO[bytes], advance: Callable[[float], None]) -> None:
        self._file, self._advance = file, advance

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._advance(len(data))
        return data


def copy(source: Path, target: Path) -> None:
    """Copy a file's content behind a bar."""
    with (
        bar(f"copying {source.name}", source.stat().st_size) as advance,
        open(source, "rb") as given,
        open(target, "wb") as made,
    ):
        shutil.copyfileobj(Counted(given, advance), made, 1 << 22)
