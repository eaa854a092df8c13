"""Writes the splits of `alpacaeval-mini`: a few plain instructions with reference answers, made from nothing.

Ten things by five kinds of instruction; an order by hash parts them, so the files are the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

TRAIN_ITEMS, FEEDBACK_ITEMS = 12, 12
"""Of the fifty; the rest is the report split."""
GAMED = [[-1.0, 0.64], [1.0, 0.23]]
"""Of every item: length difference and preference of the reference told to be verbose, and concise. Made up, the preferences
after alpacaeval's means; without such rows a judge that goes by length makes the length-controlled win rate of junk high."""
OWN_PROMPTS = ("judge_discrete.txt", "judge_logprob.txt")


class Thing(NamedTuple):
    """What is known of a thing."""

    name: str
    definition: str
    uses: tuple[str, str]
    reason: str
    words: tuple[str, str, str]


THINGS = (
    Thing("bread", "Bread is a baked dough of flour and water.", ("toast", "sandwiches"), "it feeds many people cheaply", ("warm", "plain", "filling")),
    Thing("rain", "Rain is water that falls from clouds in drops.", ("watering fields", "filling rivers"), "nothing grows without water", ("wet", "grey", "soft")),
    Thing("a map", "A map is a drawing of a place seen from above.", ("finding a way", "planning a trip"), "it shows what lies beyond the next corner", ("flat", "exact", "folded")),
    Thing("a bicycle", "A bicycle is a vehicle with two wheels that its rider drives.", ("short trips", "exercise"), "it needs no fuel", ("light", "quick", "quiet")),
    Thing("a library", "A library is a place that lends books.", ("reading", "studying"), "it opens knowledge to everyone", ("calm", "open", "full")),
    Thing("a candle", "A candle is a stick of wax with a wick that burns.", ("light without power", "a quiet evening"), "it gives light when nothing else does", ("dim", "warm", "small")),
    Thing("a bridge", "A bridge is a structure that carries a way over a gap.", ("crossing a river", "joining two towns"), "it turns hours of travel into minutes", ("long", "strong", "high")),
    Thing("honey", "Honey is a sweet food that bees make from nectar.", ("tea", "baking"), "it keeps for years", ("sweet", "thick", "golden")),
    Thing("a clock", "A clock is a device that shows the time.", ("meeting on time", "boiling eggs"), "people can agree on a moment by it", ("round", "steady", "loud")),
    Thing("a garden", "A garden is a piece of ground where plants are grown.", ("vegetables", "resting outside"), "it brings food and peace to a home", ("green", "sunny", "muddy")),
)  # fmt: skip


def items() -> list[dict[str, Any]]:
    """All fifty, in the order in which they are dealt out."""
    made = []
    for thing in THINGS:
        name, (first, second) = thing.name, thing.uses
        made += [
            (f"What is {name}?", thing.definition),
            (f"Name two things that {name} is good for.", f"{name.capitalize()} is good for {first} and {second}."),
            (f"Explain in one sentence why {name} matters.", f"{name.capitalize()} matters because {thing.reason}."),
            (f"Write a short note to a friend about {name}.", f"Hello! I thought of {name} today: {thing.reason}."),
            (f"List three words that describe {name}.", f"{name.capitalize()}: {', '.join(thing.words)}."),
        ]
    made.sort(key=lambda pair: hashlib.sha256(f"alpacaeval-mini-1\0{pair[0]}".encode()).digest())
    return [
        {"id": f"alpacaeval-mini-{number:02d}", "question": question, "answer": answer, "gamed": GAMED}
        for number, (question, answer) in enumerate(made)
    ]


def without_gamed(row: dict[str, Any]) -> dict[str, Any]:
    """A row for training."""
    return {name: value for name, value in row.items() if name != "gamed"}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines with sorted keys: the same rows give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8")


def prepare(source: Path | None, out: Path) -> None:
    """Writes train/, feedback/, report/ and the judge's prompts under `out`; `source` is not used."""
    del source
    rows = items()
    for name, first, end in (
        ("train/train.jsonl", 0, TRAIN_ITEMS),
        ("feedback/items.jsonl", TRAIN_ITEMS, TRAIN_ITEMS + FEEDBACK_ITEMS),
        ("report/items.jsonl", TRAIN_ITEMS + FEEDBACK_ITEMS, len(rows)),
    ):
        held_out = name != "train/train.jsonl"
        write_rows(out / name, [row if held_out else without_gamed(row) for row in rows[first:end]])
    for prompt in OWN_PROMPTS:
        shutil.copyfile(Path(__file__).resolve().parent / prompt, out / prompt)
