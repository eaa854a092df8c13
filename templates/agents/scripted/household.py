"""An expert for ALFWorld's households that knows no more than a player: it reads what the game says, and searches.

The walkthroughs of the training games go straight to things that nobody has seen yet, which can't be imitated. This expert
looks where such things mostly lie, by counts over the walkthroughs, and does what the task asks when it has found them.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

THING = re.compile(r"\ban? ([a-z]+ \d+)")
NOTHING = "Nothing happens."
LAMP = "desklamp"
PLACING = {"move": r"(.+) to (.+)", "put": r"(.+) in/on (.+)"}
"""What puts something down: the games' way, and that of the examples, which may be taken for it."""
TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
_ANY, _THERE = r"(?:an? |the |some )?", r" (?:in/on|in|on) (?:an? |the |some )?(?P<target>\w+)"
_TASKS = (
    (rf"(?:examine|look at) {_ANY}(?P<thing>\w+) (?:with|under) {_ANY}desklamp", "look"),
    (rf"(?:put two|find two) (?P<thing>\w+)(?: and put them)?{_THERE}", "two"),
    (rf"(?P<verb>clean|heat|cool) {_ANY}(?P<thing>\w+) and put (?:it|them){_THERE}", "verb"),
    (rf"put {_ANY}(?P<state>clean|hot|cool|cold) (?P<thing>\w+){_THERE}", "state"),
    (rf"(?:put|find) {_ANY}(?P<thing>\w+)(?: and put (?:it|them))?{_THERE}", "put"),
)
TASKS = tuple((re.compile(words), kind) for words, kind in _TASKS)
"""How the games word their tasks; the first that fits counts."""
STATES = {"clean": "clean", "hot": "heat", "cool": "cool", "cold": "cool"}

Prior = Mapping[str, Mapping[str, int]]
"""How often a kind of thing was found in or on a kind of receptacle."""


@dataclass(frozen=True)
class Task:
    """What a household asks for: `count` things of a kind, treated by `verb`, at a receptacle of the kind `target`."""

    thing: str
    target: str | None
    verb: str | None = None
    count: int = 1


def task_of(question: str) -> Task | None:
    """The task in the game's words; None where they are not known.

    >>> task_of("put a hot apple in fridge.")
    Task(thing='apple', target='fridge', verb='heat', count=1)
    """
    text = question.lower()
    for pattern, kind in TASKS:
        if found := pattern.search(text):
            groups = found.groupdict()
            verb = groups.get("verb") or STATES.get(groups.get("state") or "")
            return Task(groups["thing"], groups.get("target"), verb, 2 if kind == "two" else 1)
    return None


def prior_of(goals: Iterable[Mapping[str, Any]]) -> Prior:
    """Where things lay in the training games, by their walkthroughs."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for goal in goals:
        place = ""
        for action in goal["walkthrough"]:
            if action.startswith("go to "):
                place = _kind(action[6:])
            elif found := re.fullmatch(r"take (\w+) \d+ from (\w+) \d+", action):
                counts[found[1]][found[2]] += 1
            elif action.startswith(f"use {LAMP}"):
                counts[LAMP][place] += 1
    return counts


@dataclass
class _Room:
    """What the transcript has told so far.

    Attributes:
        failed: what did nothing where the player stands now.
        origin: where things were taken from.
        refused: what would have put something where it can't be.
    """

    places: list[str]
    place: str = ""
    hand: str | None = None
    seen: dict[str, list[str]] = field(default_factory=dict)
    shut: set[str] = field(default_factory=set)
    treated: set[str] = field(default_factory=set)
    placed: set[str] = field(default_factory=set)
    failed: Counter[str] = field(default_factory=Counter)
    origin: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)


class Expert:
    """Chooses an action from what a player has been told; it remembers nothing between calls."""

    def __init__(self, prior: Prior) -> None:
        self._prior = prior

    def act(self, goal: Mapping[str, Any], first: str, turns: Sequence[tuple[str, str]]) -> str | None:
        """The next action behind the game's first text and the turns, actions with what followed; None at its wit's end."""
        task = task_of(str(goal["question"]))
        if task is None:
            return None
        room = _read(first, turns, task)
        action = self._wanted(task, room)
        return None if action is None or room.failed[action] > 1 else action

    def stray(self, first: str, draw: random.Random) -> str | None:
        """A step aside: to some receptacle of the room."""
        places = _read(first, [], None).places
        return f"go to {draw.choice(places)}" if places else None

    def _wanted(self, task: Task, room: _Room) -> str | None:
        if room.hand is None or _kind(room.hand) != task.thing:
            return self._fetch(task.thing, room)
        if task.verb and room.hand not in room.treated:
            tool = _nearest(TOOLS[task.verb], room)
            return tool and _at(tool, room, f"{task.verb} {room.hand} with {tool}", open_it=False)
        if task.target is None:
            lamp = next(
                ((thing, where) for where, things in room.seen.items() for thing in things if _kind(thing) == LAMP),
                None,
            )
            return _at(lamp[1], room, f"use {lamp[0]}") if lamp else self._look_for(LAMP, room)
        target = next(iter(sorted({place for _, place in _placements(room)} & set(room.places))), None) or _nearest(
            task.target, room
        )
        return target and _at(target, room, f"move {room.hand} to {target}")

    def _fetch(self, kind: str, room: _Room) -> str | None:
        for where, things in room.seen.items():
            for thing in things:
                if _kind(thing) == kind and thing not in room.placed:
                    if room.hand is not None:  # there is one hand
                        return self._put_away(room.hand, room)
                    return _at(where, room, f"take {thing} from {where}")
        return self._look_for(kind, room)

    def _put_away(self, thing: str, room: _Room) -> str | None:
        """Back to where it was, else to where such things mostly lie: not all places take all things."""
        counts = self._prior.get(_kind(thing), {})
        places = sorted(room.places, key=lambda place: -counts.get(_kind(place), 0))
        for place in [place for place in [room.origin.get(thing)] if place] + places:
            action = f"move {thing} to {place}"
            if action not in room.refused:
                return _at(place, room, action)
        return None

    def _look_for(self, kind: str, room: _Room) -> str | None:
        """The next receptacle to look into: where such things mostly lie, each kind's share split among its receptacles."""
        if room.place in room.shut:
            return f"open {room.place}"
        if room.place and room.place not in room.seen:
            return f"examine {room.place}"
        left = [place for place in room.places if place not in room.seen]
        if not left:
            return None
        counts = self._prior.get(kind, {})
        of_kind = Counter(_kind(place) for place in room.places)

        def rank(place: str) -> tuple[float, str, int]:
            name = _kind(place)
            return (-counts.get(name, 0) / of_kind[name], name, _number(place))

        return f"go to {min(left, key=rank)}"


def _read(first: str, turns: Sequence[tuple[str, str]], task: Task | None) -> _Room:
    room = _Room(
        sorted(
            set(THING.findall(first.split("Your task is to", maxsplit=1)[0])),
            key=lambda place: (_kind(place), _number(place)),
        )
    )
    for action, observation in turns:
        if observation.strip() == NOTHING:
            room.failed[action] += 1
            if action.startswith("go to "):  # of two receptacles at one spot: the player stands before it already
                room.place = action[6:]
            elif action.startswith("move ") and action.endswith(f" to {room.place}") and room.place not in room.shut:
                room.refused.add(action)
            continue
        _take_in(room, action, observation, task)
    return room


def _take_in(room: _Room, action: str, observation: str, task: Task | None) -> None:
    verb, _, rest = action.partition(" ")
    if action.startswith("go to "):
        room.place = action[6:]
        room.failed.clear()
    if verb in ("go", "open", "examine"):
        if f"{room.place} is closed" in observation:
            room.shut.add(room.place)
            return
        room.shut.discard(room.place)
        if "you see" in observation:
            room.seen[room.place] = THING.findall(observation.split("you see", 1)[1])
        elif verb == "go":
            room.seen.setdefault(room.place, [])
    elif found := re.fullmatch(r"(.+) from (.+)", rest) if verb == "take" else None:
        room.hand, room.origin[found[1]] = found[1], found[2]
        room.placed.discard(found[1])
        if found[1] in room.seen.get(found[2], []):
            room.seen[found[2]].remove(found[1])
    elif found := re.fullmatch(PLACING[verb], rest) if verb in PLACING else None:
        room.hand = None
        room.seen.setdefault(found[2], []).append(found[1])
        done = task is not None and (task.verb is None or found[1] in room.treated)
        if task is not None and done and _kind(found[1]) == task.thing and _kind(found[2]) == task.target:
            room.placed.add(found[1])
    elif verb in TOOLS and room.hand:
        room.treated.add(room.hand)


def _placements(room: _Room) -> list[tuple[str, str]]:
    """Things put down so far with their places: the second of two goes to the first."""
    return [(thing, where) for where, things in room.seen.items() for thing in things if thing in room.placed]


def _nearest(kind: str, room: _Room) -> str | None:
    """The receptacle of a kind that is used: where the player stands, else the first by number that did not fail."""
    places = [place for place in room.places if _kind(place) == kind]
    return room.place if room.place in places else next(iter(places), None)


def _at(place: str, room: _Room, action: str, *, open_it: bool = True) -> str:
    """The action, or what must be done before it at that place."""
    if room.place != place:
        return f"go to {place}"
    if open_it and place in room.shut:
        return f"open {place}"
    return action


def _kind(name: str) -> str:
    return name.rpartition(" ")[0]


def _number(name: str) -> int:
    return int(name.rpartition(" ")[2])
