"""Makes a small invented world, its corpus of 60 documents, and questions that take several searches. Nothing is downloaded.

There are three regions, one a split: what an agent finds in the training corpus answers no held-out question. Graders search
all three at once. Every name is one word or two that occur nowhere else, and every choice is by position, so the files are the
same on every machine.

Kinds of questions: one answer over two facts (founder -> birthplace, firm -> river) or three (founder -> birthplace -> river),
and sets (firms of a river's town, people born in a mayor's town).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.rollouts.search.backends import CORPUS, Document, write_corpus
from autorl_hpc.rollouts.search.matching import SET, SINGLE

SPLITS = ("train", "feedback", "report")
TOWNS_A_REGION, PEOPLE_A_TOWN, FIRMS_A_TOWN = 4, 2, 2
ITEMS_A_SPLIT = {"birthplace": 2, "river_of_firm": 1, "river_of_birthplace": 2, "firms": 3, "natives": 2}
"""Ten, half of them sets; in the benchmark it is two thirds."""


def _words(text: str) -> list[str]:
    return text.split()


TOWNS = _words("Orlen Dunfeld Tarvik Melsby Quarne Ostrick Beldam Fenwold Garrick Ulmere Stavern Yarrow")
RIVERS = _words("Tesh Varna Loom Idris Kell Aune Braska Onder Sorn Pell Wyre Zeva")
FIRST = _words(
    "Mara Ivo Selma Tobin Greta Anselm Livia Corin Hedda Ruben Petra Magnus Edda Silas Norah Viggo Tilda Oskar Wilma Jonas "
    "Freda Lasse Berit Emil"
)
LAST = _words(
    "Veld Karst Brandt Ashlow Finch Molder Rask Tolliver Quist Hale Norden Pike Sandoz Thorn Ulrik Voss Wick Yates Zoll Adair "
    "Birk Crane Dahl Eames"
)
WORKS = _words("weaver miller painter glazier printer tanner baker cooper")
FIRMS = _words(
    "Brell Cordis Dorn Elvan Fessel Gault Hobb Ister Jarl Kestrel Lorne Mundt Nettle Opal Prisk Rudd Spindle Trask Umber Vance "
    "Wexel Yolk Zander Arden"
)
TRADES = _words("Mills Glassworks Press Tannery Bakery Barrels Looms Paints")


class Town(NamedTuple):
    """A town on a river."""

    name: str
    river: str
    mayor: str


class Person(NamedTuple):
    """Somebody who was born in a town."""

    name: str
    work: str
    town: Town


class Firm(NamedTuple):
    """A firm in a town, founded by somebody who was mostly born elsewhere."""

    name: str
    town: Town
    founder: Person
    year: int


class Region(NamedTuple):
    """What one split asks about."""

    towns: tuple[Town, ...]
    people: tuple[Person, ...]
    firms: tuple[Firm, ...]


def region(number: int) -> Region:
    """The region of a split."""
    size = TOWNS_A_REGION
    names = [f"{FIRST[n]} {LAST[n]}" for n in range(number * size * PEOPLE_A_TOWN, (number + 1) * size * PEOPLE_A_TOWN)]
    towns = tuple(
        Town(TOWNS[number * size + n], RIVERS[number * size + n], names[(PEOPLE_A_TOWN * n + 3) % len(names)])
        for n in range(size)
    )
    people = tuple(
        Person(name, WORKS[(n + number) % len(WORKS)], towns[n // PEOPLE_A_TOWN]) for n, name in enumerate(names)
    )
    firms = tuple(
        Firm(
            f"{FIRMS[number * size * FIRMS_A_TOWN + n]} {TRADES[(n + 2 * number) % len(TRADES)]}",
            towns[n // FIRMS_A_TOWN],
            people[(3 * n + 5 + number) % len(people)],
            1890 + (17 * n + 29 * number) % 100,
        )
        for n in range(size * FIRMS_A_TOWN)
    )
    return Region(towns, people, firms)


def documents(place: Region) -> Iterator[Document]:
    """The region's texts: one a town, a person and a firm."""
    for town in place.towns:
        yield _document(town.name, f"Town on the river {town.river}. Its mayor is {town.mayor}.")
    for person in place.people:
        yield _document(person.name, f"{person.work.capitalize()}, born in {person.town.name}.")
    for firm in place.firms:
        yield _document(
            firm.name, f"Firm with its seat in {firm.town.name}, founded by {firm.founder.name} in {firm.year}."
        )


def _document(title: str, text: str) -> Document:
    return Document(title, f"mini:{title.replace(' ', '-').lower()}", text)


def items(split: str) -> list[dict[str, Any]]:
    """The questions of a split, each with its answer and the actions that find it."""
    place = region(SPLITS.index(split))
    rows: list[dict[str, Any]] = []
    for kind, count in ITEMS_A_SPLIT.items():
        candidates = sorted(_questions(place, kind), key=lambda row: hashlib.sha256(row["question"].encode()).digest())
        rows += candidates[:count]
    return [{"id": f"mini-{split}-{number:02d}", **row} for number, row in enumerate(rows, start=1)]


def _questions(place: Region, kind: str) -> Iterator[dict[str, Any]]:
    for firm in place.firms:
        home, founder = firm.founder.town, firm.founder.name
        if kind == "birthplace" and home != firm.town:
            yield _row(
                kind, f"In which town was the founder of {firm.name} born?", [home.name], [firm.name, f"{founder} born"]
            )
        if kind == "river_of_firm":
            question = f"On which river lies the seat of {firm.name}?"
            yield _row(kind, question, [firm.town.river], [firm.name, f"town {firm.town.name} river"])
        if kind == "river_of_birthplace" and home != firm.town:
            question = f"On which river was the founder of {firm.name} born?"
            yield _row(kind, question, [home.river], [firm.name, f"{founder} born", f"town {home.name} river"])
    for town in place.towns:
        if kind == "firms":
            names = [firm.name for firm in place.firms if firm.town == town]
            question = f"Which firms have their seat on the river {town.river}?"
            yield _row(kind, question, names, [f"town river {town.river}", f"firm seat {town.name}"])
        if kind == "natives":
            names = [person.name for person in place.people if person.town == town]
            question = f"Who was born in the town whose mayor is {town.mayor}?"
            yield _row(kind, question, names, [f"town mayor {town.mayor}", f"born {town.name}"])


def _row(kind: str, question: str, answers: list[str], searches: list[str]) -> dict[str, Any]:
    answer = ", ".join(answers)
    return {
        "question": question,
        "answer": answer,
        "answer_type": SINGLE if len(answers) == 1 else SET,
        "problem_category": kind,
        "walkthrough": [*(f"search[{words}]" for words in searches), f"answer[{answer}]"],
    }


def prepare(source: Path | None, out: Path) -> None:
    """Writes train/, feedback/, report/ and the graders' corpus.jsonl under `out`; `source` is not used."""
    del source
    regions = [region(number) for number in range(len(SPLITS))]
    write_corpus(out / "train" / CORPUS, list(documents(regions[0])))
    write_corpus(out / CORPUS, [document for place in regions for document in documents(place)])
    for split in SPLITS:
        path = out / split / ("train.jsonl" if split == "train" else "items.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in items(split)), encoding="ascii")
