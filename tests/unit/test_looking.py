"""Watches in threads: one that fails or hangs stops no other, and is told of without a flood."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
from helpers import PATIENCE_S, wait_for

from autorl_hpc.recorder.run_recorder import Elapsed, Looker
from autorl_hpc.recorder.watch import Moment


class Seen:
    """A watch that notes when it is looked at, and fails or waits when it is told to."""

    def __init__(self, name: str = "seen") -> None:
        self.name, self.every_s = name, 0.02
        self.looks: list[Moment] = []
        self.closed = 0
        self.fails = False
        self.gate = threading.Event()
        self.gate.set()

    def look(self, now: Moment) -> None:
        self.looks.append(now)
        self.gate.wait()
        if self.fails:
            raise ValueError("bad\nline \x1b[2J")

    def close(self, now: Moment) -> None:
        self.closed += 1
        if self.fails:
            raise OSError("not closed")


def troubles(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "events.jsonl"


def looker(watch: Seen, events: Path) -> Looker:
    made = Looker(watch.name, lambda: watch, Elapsed(5.0, time.monotonic(), 30.0), 2, events)
    made.start()
    return made


def test_a_watch_is_looked_at_again_and_again_and_closed_once(events: Path) -> None:
    watch = Seen()
    made = looker(watch, events)
    wait_for(lambda: len(watch.looks) > 5)
    made.end()
    made.join(PATIENCE_S)
    assert watch.closed == 1 and made.closed_well and troubles(events) == []
    elapsed = [moment.elapsed_s for moment in watch.looks]
    assert elapsed == sorted(elapsed) and 5.0 <= elapsed[0] < 5.0 + PATIENCE_S and watch.looks[0].attempt == 2


@pytest.mark.parametrize(("took_s", "rest_s"), [(0.001, 0.5), (0.1, 2.0), (10.0, 30.0)])
def test_a_long_look_is_followed_by_a_long_rest(events: Path, took_s: float, rest_s: float) -> None:
    """Whatever lies in a workspace, no watch takes more than a twentieth of a core; but one look in 30 s there is."""
    now = [0.0]
    watch = Seen()
    watch.every_s = 0.5
    cast(Any, watch).look = lambda _: now.__setitem__(0, now[0] + took_s)
    clock = Elapsed(0.0, 0.0, 30.0, lambda: now[0])
    made = Looker(watch.name, lambda: watch, clock, 1, events, lambda: now[0])
    assert made.look_once() == pytest.approx(rest_s)


def test_failures_are_told_of_once_a_minute_and_the_pauses_grow(events: Path) -> None:
    now = [0.0]
    watch = Seen()
    watch.fails = True
    made = Looker(watch.name, lambda: watch, Elapsed(0.0, time.monotonic(), 30.0), 1, events, lambda: now[0])
    assert [made.look_once() for _ in range(8)] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    (event,) = troubles(events)
    assert event["watch"] == "seen" and event["message"] == "ValueError: bad\\nline \\x1b[2J"
    now[0] += 61.0
    made.look_once()
    assert troubles(events)[-1]["unsaid_before"] == 7
    watch.fails = False
    assert made.look_once() < 2.0
    watch.fails = True
    assert made.look_once() == 2.0  # a look that went well begins the pauses anew


def test_one_that_hangs_or_can_t_be_made_stops_no_other(events: Path) -> None:
    hanging, good = Seen("hanging"), Seen("good")
    hanging.gate.clear()

    def make() -> Seen:
        raise PermissionError("no such device")

    unmade = Looker("unmade", make, Elapsed(0.0, time.monotonic(), 30.0), 1, events)
    unmade.start()
    lookers = [looker(hanging, events), looker(good, events), unmade]
    wait_for(lambda: len(good.looks) > 20 and troubles(events), "looks of the good one, and the other one's trouble")
    lookers[1].end()
    lookers[1].join(PATIENCE_S)  # in a look it may be for as long as the machine likes
    for each in lookers:
        each.hangs(0.1)
    told = {e["watch"]: e["message"] for e in troubles(events)}
    assert told.keys() == {"hanging", "unmade"}
    assert told["hanging"].startswith("a look has been going on for") and "PermissionError" in told["unmade"]
    for each in lookers:
        each.end()
    unmade.join(PATIENCE_S)
    assert good.closed == 1 and not unmade.is_alive() and lookers[0].is_alive()
    hanging.gate.set()


def test_elapsed_counts_no_suspension_and_never_goes_back() -> None:
    now = [50.0]
    clock = Elapsed(100.0, 48.0, 30.0, lambda: now[0])
    assert clock.tick() == 102.0  # since it was told
    now[0] += 20.0
    assert clock.tick() == 122.0
    now[0] += 31.0
    assert clock.tick() == 122.0  # a suspension
    clock.set(130.0)
    now[0] += 1.0
    assert clock.tick() == 131.0
    clock.set(10.0)
    assert clock.tick() == 131.0
