"""Makes HumanEval's splits from the official file: problems 0-40 to train on, 41-81 feedback, 82-163 report."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

SOURCE_FILE = "HumanEval.jsonl.gz"
PROBLEMS = 164
TRAIN, FEEDBACK = range(41), range(41, 82)


def read_problems(path: Path) -> list[dict[str, str]]:
    """The problems, in the order of their numbers.

    Raises:
        ValueError: they are not HumanEval/0 to HumanEval/163, in order.
    """
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).split(b"\n") if line]
    if [row["task_id"] for row in rows] != [f"HumanEval/{number}" for number in range(PROBLEMS)]:
        raise ValueError(f"{path.name} does not hold HumanEval/0 to HumanEval/{PROBLEMS - 1} in order")
    return rows


def trained_on(row: dict[str, str]) -> dict[str, str]:
    """A problem as an agent gets it."""
    return {
        "task_id": row["task_id"],
        "question": row["prompt"],
        "answer": row["canonical_solution"],
        "entry_point": row["entry_point"],
        "test": row["test"],
    }


def held_out(row: dict[str, str]) -> dict[str, str]:
    """A problem as a grader gets it."""
    item = trained_on(row)
    return {"id": item.pop("task_id"), **item}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines with sorted keys, in ASCII: the same rows give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8")


def prepare(source: Path | None, out: Path) -> None:
    """Writes train/train.jsonl, feedback/items.jsonl and report/items.jsonl under `out`."""
    if source is None:
        raise ValueError("humaneval is made from the official file")
    rows = read_problems(source / SOURCE_FILE)
    write_rows(out / "train" / "train.jsonl", [trained_on(rows[n]) for n in TRAIN])
    write_rows(out / "feedback" / "items.jsonl", [held_out(rows[n]) for n in FEEDBACK])
    write_rows(out / "report" / "items.jsonl", [held_out(row) for row in rows[FEEDBACK.stop :]])
