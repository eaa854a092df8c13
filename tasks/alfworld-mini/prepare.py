"""Makes the households of alfworld-mini from nothing: no two splits share a thing that is to be put in the same kind of place.

No random numbers are drawn: every choice is an order by hash. Run `python prepare.py OUT` to write the files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

GOALS = 8
"""Of each split: a scoring takes seconds."""
THINGS = ("apple", "book", "cup", "fork", "key", "pen", "plate", "watch")
TARGETS = ("shelf", "desk", "drawer", "cabinet")
OPENABLE = ("drawer", "cabinet", "fridge")
HIDING_PLACES = ("desk 1", "shelf 2", "drawer 1", "drawer 2", "cabinet 1", "fridge 1")
ROOM = ("cabinet 1", "desk 1", "drawer 2", "drawer 1", "fridge 1", "shelf 2", "shelf 1", "sinkbasin 1")


def prepare(source: Path | None, out: Path) -> None:
    """Writes train/train.jsonl, feedback/items.jsonl and report/items.jsonl under `out`; `source` is not used."""
    del source
    pairs = sorted(itertools.product(THINGS, TARGETS), key=_rank)
    for number, (split, name) in enumerate([("train", "train"), ("feedback", "items"), ("report", "items")]):
        goals = [
            _goal(split, place, thing, target, clean=place % 2 == 1)
            for place, (thing, target) in enumerate(pairs[number * GOALS : (number + 1) * GOALS])
        ]
        path = out / split / f"{name}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(goal, sort_keys=True) + "\n" for goal in goals), encoding="utf-8")


def _goal(split: str, number: int, thing: str, target: str, *, clean: bool) -> dict[str, Any]:
    """A household in which one `thing` is hidden, with the plan that wins."""
    hidden = min((place for place in HIDING_PLACES if not place.startswith(target)), key=lambda p: _rank((thing, p)))
    others = [other for other in THINGS if other != thing]
    things = {
        place: [f"{other} 1" for other in others if min(ROOM, key=lambda p: _rank((split, number, other, p))) == place]
        for place in ROOM
    }
    things[hidden].append(f"{thing} 1")
    goal_place = min(place for place in ROOM if place.startswith(target))
    plan = [f"go to {hidden}", *_opening(hidden), f"take {thing} 1 from {hidden}"]
    if clean:
        plan += ["go to sinkbasin 1", f"clean {thing} 1 with sinkbasin 1"]
    plan += [f"go to {goal_place}", *_opening(goal_place), f"move {thing} 1 to {goal_place}"]
    some = f"a clean {thing}" if clean else f"some {thing}"
    return {
        "id": f"alfworld-mini-{split}-{number}",
        "question": f"put {some} {'in' if target in OPENABLE else 'on'} {target}.",
        "answer": "",
        "cluster": f"{thing}-{target}",
        "thing": thing,
        "target": target,
        "clean": clean,
        "receptacles": {place: {"openable": bool(_opening(place)), "things": things[place]} for place in ROOM},
        "walkthrough": plan,
    }


def _opening(place: str) -> list[str]:
    return [f"open {place}"] if place.startswith(OPENABLE) else []


def _rank(key: object) -> str:
    """A fixed, shuffled order."""
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


if __name__ == "__main__":
    prepare(None, Path(sys.argv[1]))
