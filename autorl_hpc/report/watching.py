"""`report --watch`: the report brought up to date again and again while runs go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autorl_hpc.errors import AutorlError
from autorl_hpc.report.refresh import Options, Refreshed, refresh

Say = Callable[[str], None]


def watch_report(
    paths: list[Path],
    out: Path | None,
    options: Options,
    every_s: int,
    say: Say,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Refreshes until every run is over, or until ctrl-C; then the page stops loading itself again, and this returns.

    A tree that can't be read for a while is said and looked at again.

    Args:
        say: takes one line for each refresh.
        pause: waits so many seconds.

    Raises:
        AutorlError: at the first look there is nothing to report on, or the report can't be written.
    """
    going_on = replace(options, reload_s=every_s)
    try:
        done = refresh(paths, out, going_on)
        say(f"report: {done.index}")
        say(_line(done))
        going_on = replace(going_on, fresh=False)
        while done.live:
            pause(every_s)
            try:
                done = refresh(paths, out, going_on)
                say(_line(done))
            except AutorlError as error:
                say(f"{_now()}  not refreshed: {error.what}; looked at again in {every_s} s")
    except KeyboardInterrupt:
        say("no longer watched; the same command goes on")
    refresh(paths, out, replace(going_on, fresh=False, reload_s=None))


def _line(done: Refreshed) -> str:
    """One refresh in one line."""
    read = f"{done.read} read again" if done.changed else "nothing changed"
    left_out = f", {done.left_out} things left out" if done.left_out else ""
    return f"{_now()}  {done.runs} runs, {done.live} not over, {read}{left_out}"


def _now() -> str:
    return time.strftime("%H:%M:%S")
