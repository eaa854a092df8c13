"""How far a long step is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]
Shown = Callable[[int, int | None], None]
"""Called with the bytes that are done, and those of the whole where known."""

LINE_EVERY_S = 15.0
"""In a log: often enough to see that it goes on, seldom enough for a download of hours."""


def in_words(size_bytes: float) -> str:
    """`4.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


@contextmanager
def progress(name: str, say: Say) -> Iterator[Shown]:
    """Shows the progress of the step `name`."""
    if sys.stderr.isatty():
        with _bar(name) as shown:
            yield shown
    else:
        yield _lines(name, say)


def _lines(name: str, say: Say) -> Shown:
    last = time.monotonic()

    def shown(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            share = f" of {in_words(total)} ({100 * done // total} %)" if total else ""
            say(f"{name}: {in_words(done)}{share}")

    return shown


@contextmanager
def _bar(name: str) -> Iterator[Shown]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(row, completed=done, total=total)
