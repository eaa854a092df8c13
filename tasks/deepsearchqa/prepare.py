"""Makes DeepSearchQA's splits from the official file.

The order is numpy's `default_rng(42).permutation(900)`, which is what `datasets` shuffles by with seed 42: of it, [0:100] is for
training, [100:300] the report split, [300:500] the feedback split. So the training questions are the reference's (AutoRL-Bench),
and its held-out questions, which it shows scores of, are the report split here.
"""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

from autorl_hpc.rollouts.search.matching import SET, SINGLE

OFFICIAL_FILE = "DSQA-full.csv"
OFFICIAL_PROMPT = "judge_prompt_official.txt"
OWN_PROMPT = "judge.txt"
CORPUS = "corpus.jsonl"
COLUMNS = ("problem", "problem_category", "answer", "answer_type")
ROWS = 900
SEED = 42
SPLITS = {"train": (0, 100), "report": (100, 300), "feedback": (300, 500)}
"""Places in the permutation; [500:900] is not used."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """The official file's rows, in order.

    Raises:
        ValueError: a column is missing, a row is cut off, a field is empty, or an answer type is unknown.
    """
    rows: list[dict[str, str]] = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"{path.name} has no column `{missing[0]}`")
            for number, row in enumerate(reader):
                if None in row or None in row.values():
                    raise ValueError(f"{path.name}, row {number}: it has more or fewer fields than there are columns")
                empty = [name for name in COLUMNS if not row[name].strip()]
                if empty:
                    raise ValueError(f"{path.name}, row {number}: `{empty[0]}` is empty")
                if row["answer_type"].strip() not in (SINGLE, SET):
                    raise ValueError(f"{path.name}, row {number}: answer type {row['answer_type']!r:.40} is not known")
                rows.append({name: row[name].strip() for name in COLUMNS})
        except csv.Error as error:
            raise ValueError(f"{path.name}, line {reader.line_num}: {error}") from None
    return rows


def item(number: int, row: dict[str, str]) -> dict[str, Any]:
    """A row as an item; its id is its place in the official file."""
    return {
        "id": f"dsqa-{number:03d}",
        "question": row["problem"],
        "answer": row["answer"],
        "answer_type": row["answer_type"],
        "problem_category": row["problem_category"],
    }


def split_numbers() -> dict[str, list[int]]:
    """Which rows make which split, in order."""
    import numpy as np

    order = np.random.default_rng(SEED).permutation(ROWS)
    return {split: [int(number) for number in order[start:end]] for split, (start, end) in SPLITS.items()}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines with sorted keys, so that the same rows give the same bytes; in ASCII, so that no character of a question is
    taken for a line's end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="ascii")


def prepare(source: Path | None, out: Path) -> None:
    """Writes train/train.jsonl, feedback/items.jsonl, report/items.jsonl and the judge's prompts under `out`; and, where `source`
    holds a corpus.jsonl to search in, that one for graders and for agents."""
    if source is None:
        raise ValueError("deepsearchqa is made from the official file")
    rows = read_rows(source / OFFICIAL_FILE)
    if len(rows) != ROWS:
        raise ValueError(f"{OFFICIAL_FILE} has {len(rows)} rows, the official file has {ROWS}")
    for split, numbers in split_numbers().items():
        name = "train.jsonl" if split == "train" else "items.jsonl"
        write_rows(out / split / name, [item(number, rows[number]) for number in numbers])
    shutil.copyfile(Path(__file__).resolve().parent / OWN_PROMPT, out / OWN_PROMPT)
    if (source / OFFICIAL_PROMPT).is_file():
        shutil.copyfile(source / OFFICIAL_PROMPT, out / OFFICIAL_PROMPT)
    if (source / CORPUS).is_file():
        shutil.copyfile(source / CORPUS, out / CORPUS)
        shutil.copyfile(source / CORPUS, out / "train" / CORPUS)
