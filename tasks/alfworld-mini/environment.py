"""A household in ALFWorld's manner, in plain Python: the same words, so that the same prompts and engines are tried on it.

One hand, some receptacles, some of them closed; a task is to put a thing somewhere, or to clean it first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autorl_hpc.rollouts.environment import Step, Transcript

NOTHING = "Nothing happens."

SHOWN_TURNS = 4
"""Of the history: the shipped tiny model knows 512 positions, and a household can be won without looking further back."""


class Dialogue:
    """The task and the latest turns, in the form of ReAct's prompt for ALFWorld."""

    def prompt(self, transcript: Transcript) -> str:
        """Plain text that ends where the next action begins."""
        latest = transcript.turns[-SHOWN_TURNS:]
        return f"{transcript.first}\n>" + "".join(f" {action}\n{observation}\n>" for action, observation in latest)

    def action(self, completion: str) -> str:
        """The completion without white space around it."""
        return completion.strip()


class Environment:
    """One household after the other. A goal holds `receptacles` (name: openable, things), `question`, `thing`, `target`, and
    `clean`."""

    def __init__(self) -> None:
        self._things: dict[str, list[str]] = {}
        self._closed: set[str] = set()
        self._openable: set[str] = set()
        self._goal: Mapping[str, Any] = {}
        self._place = ""
        self._hand: str | None = None
        self._clean: set[str] = set()
        self._rules = [
            (r"go to (?P<where>.+)", self._go),
            (r"open (?P<where>.+)", self._open),
            (r"close (?P<where>.+)", self._close),
            (r"take (?P<what>.+) from (?P<where>.+)", self._take),
            (r"(?:move (?P<what>.+) to|put (?P<same>.+) in/on) (?P<where>.+)", self._move),
            (r"clean (?P<what>.+) with (?P<where>.+)", self._wash),
            (r"examine (?P<where>.+)", self._examine),
            (r"inventory", self._inventory),
            (r"look", self._look),
        ]

    def reset(self, goal: Mapping[str, Any], seed: int) -> str:
        """Begins in the middle of the room; nothing is drawn at random."""
        self._goal = goal
        self._things = {name: list(what["things"]) for name, what in goal["receptacles"].items()}
        self._openable = {name for name, what in goal["receptacles"].items() if what["openable"]}
        self._closed, self._place, self._hand, self._clean = set(self._openable), "", None, set()
        return f"{self._look()}\nYour task is to: {goal['question']}"

    def step(self, action: str) -> Step:
        """One command in ALFWorld's words."""
        observation = "OK." if action.startswith("think:") else self._do(action.strip())
        won = self._won()
        return Step(observation, won, float(won))

    def close(self) -> None:
        """Nothing to give back."""

    def _do(self, command: str) -> str:
        for pattern, act in self._rules:
            if found := re.fullmatch(pattern, command):
                return act(**{k: v for k, v in found.groupdict().items() if v is not None})
        return NOTHING

    def _won(self) -> bool:
        thing = self._goal["thing"]
        there = {
            what
            for where, things in self._things.items()
            if where.startswith(self._goal["target"] + " ")
            for what in things
            if what.startswith(thing + " ")
        }
        return bool(there & self._clean if self._goal["clean"] else there)

    def _seen(self, where: str) -> str:
        if where in self._closed:
            return f"The {where} is closed."
        things = _listed(self._things[where])
        return (
            f"The {where} is open. In it, you see {things}."
            if where in self._openable
            else f"On the {where}, you see {things}."
        )

    def _go(self, where: str) -> str:
        if where not in self._things or where == self._place:
            return NOTHING
        self._place = where
        return f"You arrive at {where}. {self._seen(where)}"

    def _open(self, where: str) -> str:
        if where != self._place or where not in self._closed:
            return NOTHING
        self._closed.discard(where)
        return f"You open the {where}. {self._seen(where)}"

    def _close(self, where: str) -> str:
        if where != self._place or where not in self._openable - self._closed:
            return NOTHING
        self._closed.add(where)
        return f"You close the {where}."

    def _take(self, what: str, where: str) -> str:
        if where != self._place or where in self._closed or self._hand or what not in self._things[where]:
            return NOTHING
        self._things[where].remove(what)
        self._hand = what
        return f"You pick up the {what} from the {where}."

    def _move(self, where: str, what: str = "", same: str = "") -> str:
        what = what or same
        if where != self._place or where in self._closed or what != self._hand:
            return NOTHING
        self._things[where].append(what)
        self._hand = None
        return f"You move the {what} to the {where}."

    def _wash(self, what: str, where: str) -> str:
        if where != self._place or not where.startswith("sinkbasin ") or what != self._hand:
            return NOTHING
        self._clean.add(what)
        return f"You clean the {what} using the {where}."

    def _examine(self, where: str) -> str:
        return self._seen(where) if where == self._place else NOTHING

    def _inventory(self) -> str:
        return f"You are carrying: a {self._hand}." if self._hand else "You are not carrying anything."

    def _look(self) -> str:
        if self._place:
            return f"You are facing the {self._place}. Next to it, you see nothing."
        return f"You are in the middle of a room. Looking quickly around you, you see {_listed(list(self._things))}."


def _listed(names: list[str]) -> str:
    with_articles = [f"a {name}" for name in names]
    if len(with_articles) < 2:
        return "".join(with_articles) or "nothing"
    return f"{', '.join(with_articles[:-1])}, and {with_articles[-1]}"
