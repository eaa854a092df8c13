"""Graders' order on simulated queues: fair between runs, nobody starves, engines are seldom changed; and the waits of entries
that fail."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autorl_hpc.files.queue import is_waited_for, read_trouble, run_of
from autorl_hpc.grading.schedule import (
    CLOSING_EVERY,
    CLOSINGS_FIRST_S,
    ENGINE_PATIENCE_S,
    Backoff,
    Order,
)
from autorl_hpc.records.exchange import Trouble
from autorl_hpc.states import Fault

ENGINE_START_S = 45.0


def entry(run: str, number: int) -> str:
    return f"f-{run}--{number:06d}"


def group_of(name: str) -> str:
    """The simulation's runs are called `<group>.<anything>`."""
    return run_of(name).split(".")[0]


@dataclass
class SimulatedGrader:
    order: Order
    free_at: float = 0.0
    warm: str | None = None
    working_on: str | None = None
    changes: int = 0


@dataclass
class Simulation:
    """A queue, its graders, and a clock that jumps from event to event."""

    graders: int = 1
    costs: Callable[[str], float] = lambda name: 2.0
    now: float = 0.0
    queue: dict[str, float] = field(default_factory=dict)
    arrivals: list[tuple[float, str]] = field(default_factory=list)
    waits: dict[str, float] = field(default_factory=dict)
    served: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.crew = [
            SimulatedGrader(Order(group_of=group_of, salt=str(i), clock=lambda: self.now)) for i in range(self.graders)
        ]

    def run(self, until_s: float = 1e9) -> None:
        self.arrivals.sort()
        while self.now < until_s:
            self._arrive()
            for grader in self.crew:
                if grader.free_at <= self.now:
                    self._next(grader)
            times = [g.free_at for g in self.crew if g.free_at > self.now] + [at for at, _ in self.arrivals[:1]]
            if not times:
                return
            self.now = min(times)

    def _arrive(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now:
            at, name = self.arrivals.pop(0)
            self.queue[name] = at

    def _next(self, grader: SimulatedGrader) -> None:
        if grader.working_on is not None:
            self.queue.pop(grader.working_on)
            grader.working_on = None
        claimed = {g.working_on: 1 for g in self.crew if g.working_on is not None}
        for name in grader.order.sort(list(self.queue), claimed, grader.warm):
            if name in claimed:
                continue
            grader.working_on = name
            self.waits[name] = self.now - self.queue[name]
            self.served.append(name)
            grader.order.began(name)
            change = grader.warm != group_of(name)
            if change:
                grader.warm, grader.changes = group_of(name), grader.changes + 1
            grader.free_at = self.now + self.costs(name) + (ENGINE_START_S if change else 0.0)
            return


def test_a_run_with_many_submissions_does_not_keep_the_others_waiting() -> None:
    world = Simulation()
    world.arrivals = [(0.0, entry("g.flood", n)) for n in range(1, 51)]
    world.arrivals += [(1.0 + run, entry(f"g.run{run}", 1)) for run in range(5)]
    world.run()
    assert len(world.served) == 55
    assert max(wait for name, wait in world.waits.items() if "flood" not in name) < ENGINE_START_S + 12 * 2.0


@pytest.mark.parametrize("graders", [1, 3])
def test_100_submissions_of_20_runs_on_two_tasks(graders: int) -> None:
    """All queued at once; both tasks by one engine, then by one each."""
    for groups in ("a", "ab"):
        world = Simulation(graders, costs=lambda name: 1.5)
        world.arrivals = [
            (0.0, entry(f"{groups[run % len(groups)]}.{run}", n)) for run in range(20) for n in range(1, 6)
        ]
        world.run()
        assert sorted(world.served) == sorted(world.waits) and len(world.served) == 100
        waits = list(world.waits.values())
        assert max(waits) / statistics.median(waits) < 3
        assert sum(grader.changes for grader in world.crew) <= graders + len(groups), "who is idle helps others once"
        first = [
            statistics.mean(w for name, w in world.waits.items() if run_of(name) == f"{groups[0]}.{r}") for r in (0, 18)
        ]
        assert max(first) < 1.5 * min(first), "runs of one task wait alike"


@pytest.mark.parametrize("seed", range(2))
def test_nobody_starves_while_more_comes_than_can_be_served(seed: int) -> None:
    """Three engines' entries, closings, fingerprints and baselines under an overload of two hours: all of them go on."""
    rng = random.Random(seed)
    world = Simulation(costs=lambda name: 12.0)
    for run in range(12):
        group = "aab"[run % 3] if run < 11 else "c"
        world.arrivals += [(rng.uniform(0, 7200), entry(f"{group}.{run}", n)) for n in range(1, 81)]
        world.arrivals += [(3600.0, f"b2-{group}.{run}-x")]
    world.arrivals += [(1800.0 + 60 * run, f"c-{'ab'[run % 2]}.ended{run}") for run in range(10)]
    world.run(7200.0)
    assert len(world.queue) > 200, "an overload"
    closings = [wait for name, wait in world.waits.items() if name.startswith("c-")]
    assert len(closings) == 10 and max(closings) < 1500
    assert {name[0] for name in world.served} == {"f", "c", "b"}
    counts = [sum(run_of(name) == f"{'aab'[run % 3]}.{run}" for name in world.served) for run in (0, 3, 6, 9)]
    assert max(counts) - min(counts) <= 2, "runs of one engine are served alike"
    served_c = [name for name in world.served if group_of(name) == "c" and name.startswith("f-")]
    assert served_c, "the one run of its engine is served, too"
    changes = sum(grader.changes for grader in world.crew)
    assert changes * ENGINE_START_S < 0.45 * world.now


def test_an_engine_is_kept_until_somebody_has_waited_too_long_for_another() -> None:
    world = Simulation(costs=lambda name: 3.0)
    world.arrivals = [(3.0 * n, entry("a.run", n)) for n in range(1, 200)] + [(10.0, entry("b.run", 1))]
    world.run(600.0)
    assert ENGINE_PATIENCE_S < world.waits[entry("b.run", 1)] <= ENGINE_PATIENCE_S + 6 * 3.0 + ENGINE_START_S
    assert world.crew[0].changes == 3, "to b once, and back"


def test_closings_come_first_until_a_submission_waits_too_long_and_then_take_turns() -> None:
    now = [0.0]
    order = Order(clock=lambda: now[0])
    names = [*(entry("g.run", n) for n in range(1, 9)), "c-g.ended", "c-g.other"]
    assert order.sort(names)[0] == "c-g.ended"
    order.began("c-g.ended")
    now[0] = CLOSINGS_FIRST_S + 1
    names.remove("c-g.ended")
    taken = []
    for _ in range(CLOSING_EVERY):
        name = order.sort(names)[0]
        order.began(name)
        names.remove(name)
        taken.append(name)
    assert [is_waited_for(name) for name in taken] == [True] * (CLOSING_EVERY - 1) + [False]


def test_a_closing_waits_for_its_run_s_scores_and_fingerprints_which_come_first() -> None:
    order = Order()
    names = ["c-g.ended", entry("g.ended", 4), "p-g.other--000001", "p-g.ended--000003", "b2-g-x", entry("g.other", 2)]
    first = order.sort(names)
    assert "c-g.ended" not in first and first[:2] == ["p-g.ended--000003", "p-g.other--000001"]
    assert first[-1] == "b2-g-x"
    assert "c-g.ended" in order.sort(["c-g.ended", entry("g.other", 2)])


# --- waits of entries that fail

ENTRY = "f-run--000001"


class Clock:
    """The time that graders see."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_next_grader_waits_as_long_as_the_last_one_would_have(tmp_path: Path) -> None:
    waits, clock = [], Clock()
    for number in range(6):  # each grader tries once and leaves
        backoff, begun = Backoff(tmp_path / "troubles", f"grader-{number}", clock, most_s=50.0), clock.now
        while backoff.waits(ENTRY, 0):
            clock.now += 1.0
        waits.append(clock.now - begun)
        backoff.failed(ENTRY, "no key", Fault.GRADER)
        assert backoff.waits(ENTRY, 0)
    assert waits == [0.0, 5.0, 10.0, 20.0, 40.0, 50.0], "it leaves before it has tried, and the wait begins anew"
    note = read_trouble(tmp_path / "troubles", ENTRY)
    assert note == Trouble(entry=ENTRY, failures=6, fault=Fault.GRADER, problem="no key", grader="grader-5")
