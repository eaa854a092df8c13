"""A run's clock on disk, written by two threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.files import atomic
from autorl_hpc.records.experiment import Budget
from autorl_hpc.supervise.budget import BudgetClock, read_clock

HELD_S = 1.0
"""How long the first write is held: the second one has that time to come before it."""


def test_an_older_state_is_never_written_over_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clock.json"
    clock = BudgetClock(path, Budget(wall_clock_s=100.0), 1)
    first, second, write = threading.Event(), threading.Event(), atomic.write_bytes

    def slowly(*arguments: Any) -> None:
        if not first.is_set():
            first.set()
            second.wait(HELD_S)
        write(*arguments)

    monkeypatch.setattr(atomic, "write_bytes", slowly)
    ticking = threading.Thread(target=clock.persist)
    ticking.start()
    first.wait()
    clock.note(reprompts=1)
    clock.persist()
    second.set()
    ticking.join()
    found = read_clock(path)
    assert found is not None and (found.counter, found.progress.reprompts) == (2, 1)
