"""Progress bars with rate and remaining time, on a terminal alone and for what takes longer than 3 s."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if task.speed is None else f"{task.speed:.1f}/s")

    columns: Any = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(), Rate())
    name = TextColumn("{task.description}", markup=False)
    shown = Progress(name, BarColumn(), *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task, began = shown.add_task(what, total=total), time.monotonic()

    def advance(amount: float) -> None:
        shown.advance(task, amount)
        late = time.monotonic() - began > SHOW_AFTER_S
        if late and not shown.live.is_started and _ONE.acquire(blocking=False):
            shown.start()

    try:
        yield advance
    finally:
        if shown.live.is_started:
            shown.stop()
            _ONE.release()


def tracked(things: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yield `total` things behind a bar."""
    with bar(what, total, in_bytes=False) as advance:
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
