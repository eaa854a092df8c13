"""Claims: generations, staleness by the reader's own clock alone, one winner."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from autorl_hpc.files import queue
from autorl_hpc.files.queue import Claims, HeartbeatWatch, claimed_entries, write_heartbeat
from autorl_hpc.records.exchange import Heartbeat

STALE_S = 15.0
ENTRY = "f-run--000001"


class World:
    """A claims folder with its graders, and this process's clock, which goes when it is told to."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.claims, self.graders = path / "claims", path / "graders"
        self.claims.mkdir()
        self.graders.mkdir()

    def grader(self, name: str, stale_after_s: float = STALE_S) -> Claims:
        return Claims(self.claims, name, "host", HeartbeatWatch(self.graders, stale_after_s))

    def beat(self, name: str, counter: int, state: Literal["idle", "scoring", "ended"] = "scoring") -> None:
        write_heartbeat(self.graders, Heartbeat(grader=name, host="host", pid=1, counter=counter, state=state))

    def take(self, claims: Claims) -> int | None:
        return claims.take(ENTRY, claims.current())

    def later(self, seconds: float) -> None:
        self.now_s += seconds

    def names(self) -> list[str]:
        return sorted(os.listdir(self.claims))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_a_living_grader_keeps_its_claim(world: World) -> None:
    a, b = world.grader("a"), world.grader("b")
    world.take(a)
    for counter in range(8):  # twice as long as staleness takes
        world.beat("a", counter)
        assert world.take(b) is None
        world.later(STALE_S / 4)


def test_a_counter_that_stands_still_is_taken_over_with_the_next_generation(world: World) -> None:
    a, b = world.grader("a"), world.grader("b")
    world.take(a)
    world.beat("a", 7)
    assert world.take(b) is None, "the first look can't know how old the heartbeat is"
    world.later(STALE_S * 0.5)
    assert world.take(b) is None
    world.later(STALE_S * 0.7)
    assert world.take(b) == 2
    assert not a.holds(ENTRY, 1) and b.holds(ENTRY, 2)
    assert claimed_entries(world.claims) == {ENTRY: 2}


def test_a_counter_that_goes_back_is_a_sign_of_life(world: World) -> None:
    watch = HeartbeatWatch(world.graders, STALE_S)
    for counter in (100, 5, 4, 3):
        world.beat("a", counter)
        assert not watch.is_stale("a")
        world.later(STALE_S * 0.5)


def test_no_dead_grader_lives_by_a_heartbeat_that_is_missing_or_can_t_be_read(world: World) -> None:
    watch, path = HeartbeatWatch(world.graders, STALE_S), world.graders / "a.json"
    assert not watch.is_stale("never beat")
    world.beat("a", 1)
    beat = path.read_bytes()
    for damage in (b"{", b'{"counter": null}', None) * 8:  # now readable, now not: the counter itself never changes
        path.write_bytes(beat)
        watch.is_stale("a")
        path.unlink() if damage is None else path.write_bytes(damage)
        watch.is_stale("a")
        world.later(STALE_S / 20)
    assert watch.is_stale("a") and watch.is_stale("never beat")
    world.beat("never beat", 1)
    assert not watch.is_stale("never beat"), "it only started slowly"


def test_an_ended_grader_s_claim_is_taken_at_once(world: World) -> None:
    a, b = world.grader("a"), world.grader("b")
    world.take(a)
    world.beat("a", 3)
    assert world.take(b) is None
    world.beat("a", 4, "ended")
    assert world.take(b) == 2


def test_its_own_claim_is_taken_again_with_the_next_generation(world: World) -> None:
    a = world.grader("a")
    assert [world.take(a), world.take(a)] == [1, 2]


def test_the_newest_generation_holds_the_entry_until_it_is_dropped_too(world: World) -> None:
    """An older one left alone would look like the claim of a grader that may be dead: the entry would be taken over."""
    a = world.grader("a")
    assert [world.take(a) for _ in range(3)] == [1, 2, 3]
    held: list[int | None] = []
    watching = True

    def before_removal(event: str, _: object) -> None:
        if watching and event == "os.remove":
            held.append(claimed_entries(world.claims).get(ENTRY))

    sys.addaudithook(before_removal)
    try:
        a.drop(ENTRY)
    finally:
        watching = False
    assert held == [3, 3, 3]


def test_a_claim_that_can_t_be_read_is_held_for_a_while_and_not_for_ever(world: World) -> None:
    b = world.grader("b")
    (world.claims / f"{ENTRY}.g0001").write_bytes(b"")
    assert world.take(b) is None
    world.later(STALE_S * 1.2)
    assert world.take(b) == 2


def test_a_former_holder_gives_back_nothing_of_whoever_holds_the_same_generation_now(world: World) -> None:
    a, b = world.grader("a"), world.grader("b")
    assert world.take(a) == 1
    a.drop(ENTRY)
    assert world.take(b) == 1
    assert not a.holds(ENTRY, 1)
    a.give_back(ENTRY, 1)
    a.drop_own()
    assert b.holds(ENTRY, 1)
    b.give_back(ENTRY, 1)
    assert world.names() == [] and not b.holds(ENTRY, 1)
