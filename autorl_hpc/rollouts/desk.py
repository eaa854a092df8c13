"""Which worker takes which call. An episode can be begun by any worker, and goes on where it was begun.

Beginnings wait in one line for whichever worker is free first, so a slow worker gets fewer of them. A goal that a worker has
played before goes to this one again, unless it has much more to do than others: what it has parsed stays parsed. Each worker
takes the oldest call that it may. One that is stuck, or hosts an episode whose steps are slow, gets no more beginnings; `held_up`
names the episodes that wait for others there, to be moved away.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SLOW_S = 1.0
"""A step that takes longer is slow: hundreds of times a usual one. Others that wait behind it are better off elsewhere."""

SLOW_BEGINNING_S = 10.0
"""The same of a beginning, in which games are translated and data read."""

LEAD = 4
"""Episodes that the worker which knows a goal may have more than another one that is free: a beginning anew costs some ten
steps, waiting in a line of five costs more."""

KNOWN_GOALS = 8192
"""Whose workers are remembered."""

LOOK_AGAIN_S = 0.25
"""How soon a free worker looks again at beginnings that are another's, who may get stuck."""


class Call(NamedTuple):
    """What a worker is to do.

    Attributes:
        ticket: counts up over all calls.
        slot: the episode's, by the caller's count.
        request: for the worker's process, which counts its own slots.
    """

    ticket: int
    slot: int
    request: Mapping[str, Any]


class _Beginning(NamedTuple):
    ticket: int
    slot: int
    goal: Mapping[str, Any]
    seed: int

    @property
    def key(self) -> str:
        return str(self.goal.get("id", ""))


@dataclass
class _Place:
    """A worker as the desk sees it."""

    wake: threading.Condition
    calls: deque[Call] = field(default_factory=deque)
    hosted: dict[int, int] = field(default_factory=dict)  # its process's slot by the caller's
    free: list[int] = field(default_factory=list)  # slots of its process that hosted an episode once
    slow: set[int] = field(default_factory=set)  # the caller's slots
    at: Call | None = None
    since: float = 0.0
    dozes: bool = False  # until it is woken: there was nothing to look at again


class Desk:
    """The calls of one pool. Safe for threads."""

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._places = [_Place(threading.Condition(self._lock)) for _ in range(workers)]
        self._beginnings: dict[int, _Beginning] = {}  # by slot, oldest first
        self._where: dict[int, int] = {}  # worker by slot
        self._knows: dict[str, int] = {}  # worker by goal
        self._tickets = 0
        self._ended = False

    def begin(self, slot: int, goal: Mapping[str, Any], seed: int) -> int:
        """A beginning in a slot; what was there is given up. Returns its ticket."""
        with self._lock:
            self._release(slot)
            beginning = _Beginning(self._ticket(), slot, goal, seed)
            self._beginnings[slot] = beginning
            knows = self._knows.get(beginning.key)
            anyone = knows is None or self._places[knows].at is not None or bool(self._places[knows].slow)
            for number, place in enumerate(self._places):
                if place.at is None and (anyone or knows == number or place.dozes):
                    place.wake.notify()
            return beginning.ticket

    def act(self, slot: int, request: Mapping[str, Any]) -> int:
        """A step of the episode in a slot. One of an episode that is lost by now is dropped: that it is lost is being told."""
        with self._lock:
            ticket, number = self._ticket(), self._where.get(slot)
            if number is not None:
                place = self._places[number]
                place.calls.append(Call(ticket, slot, {"slot": place.hosted[slot], **request}))
                place.wake.notify()
            return ticket

    def release(self, slot: int) -> None:
        """The episode in a slot is over or given up; its calls that are not begun are dropped."""
        with self._lock:
            self._release(slot)

    def take(self, number: int) -> Call | None:
        """The next call for a worker, when there is one; None: the desk is closed."""
        place = self._places[number]
        with self._lock:
            while not self._ended:
                call = self._next(number, place)
                if call is not None:
                    place.at, place.since = call, time.monotonic()
                    return call
                place.dozes = not self._beginnings
                place.wake.wait(None if place.dozes else LOOK_AGAIN_S)
                place.dozes = False
            return None

    def done(self, number: int) -> None:
        """The worker's call was answered."""
        with self._lock:
            place = self._places[number]
            call, took_s = place.at, time.monotonic() - place.since
            place.at = None
            if call is not None and call.slot in place.hosted and "goal" not in call.request:
                (place.slow.add if took_s > SLOW_S else place.slow.discard)(call.slot)

    def lose(self, number: int) -> tuple[int, ...]:
        """The worker's process is gone; the slots of the episodes that went with it."""
        with self._lock:
            place = self._places[number]
            lost = tuple(place.hosted)
            for slot in lost:
                self._release(slot)
            place.at, place.free = None, []
            self._knows = {key: knows for key, knows in self._knows.items() if knows != number}
            return lost

    def worker_of(self, slot: int) -> int | None:
        """The number of the worker that hosts a slot's episode, None before it is begun."""
        return self._where.get(slot)

    def held_up(self) -> list[int]:
        """Slots whose calls wait behind slow ones of others, where some worker is free of such."""
        with self._lock:
            now = time.monotonic()
            slow = [bool(self._slow_here(place, now)) for place in self._places]
            if all(slow):
                return []
            found = []
            for place in self._places:
                if culprits := self._slow_here(place, now):
                    found += [call.slot for call in place.calls if call.slot not in culprits]
            return found

    def close(self) -> None:
        """No more calls; those that wait for one are told."""
        with self._lock:
            self._ended = True
            for place in self._places:
                place.wake.notify_all()

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _release(self, slot: int) -> None:
        self._beginnings.pop(slot, None)
        number = self._where.pop(slot, None)
        if number is None:
            return
        place = self._places[number]
        place.free.append(place.hosted.pop(slot))
        place.slow.discard(slot)
        if any(call.slot == slot for call in place.calls):
            place.calls = deque(call for call in place.calls if call.slot != slot)

    def _next(self, number: int, place: _Place) -> Call | None:
        own = place.calls[0] if place.calls else None
        for beginning in self._beginnings.values():
            if own is not None and own.ticket < beginning.ticket:
                break
            if self._suits(beginning, number):
                return self._host(beginning, number, place)
        return place.calls.popleft() if own is not None else None

    def _suits(self, beginning: _Beginning, number: int) -> bool:
        place, now = self._places[number], time.monotonic()
        if place.slow and not all(other.slow for other in self._places):
            return False
        knows = self._knows.get(beginning.key)
        if knows is None or knows == number:
            return True
        other = self._places[knows]
        return len(other.hosted) > len(place.hosted) + LEAD or bool(self._slow_here(other, now))

    def _host(self, beginning: _Beginning, number: int, place: _Place) -> Call:
        del self._beginnings[beginning.slot]
        own = place.free.pop() if place.free else len(place.hosted)
        place.hosted[beginning.slot] = own
        self._where[beginning.slot] = number
        self._knows.pop(beginning.key, None)
        self._knows[beginning.key] = number
        if len(self._knows) > KNOWN_GOALS:
            del self._knows[next(iter(self._knows))]
        if self._beginnings and len(place.hosted) > LEAD:  # others may take from what this one knows
            for other in self._places:
                if other.at is None and other is not place:
                    other.wake.notify()
        request = {"slot": own, "goal": dict(beginning.goal), "seed": beginning.seed}
        return Call(beginning.ticket, beginning.slot, request)

    def _slow_here(self, place: _Place, now: float) -> set[int]:
        """The slots that hold others up on this worker."""
        found = set(place.slow)
        if place.at is not None:
            limit_s = SLOW_BEGINNING_S if "goal" in place.at.request else SLOW_S
            if now - place.since > limit_s:
                found.add(place.at.slot)
        return found
