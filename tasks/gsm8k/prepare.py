"""Makes GSM8K's splits from the two official files.

The feedback split is 500 questions carved out of the official train file, by the index file splits/feedback.json; the
questions of the few-shot prompt are left out of the training data. The official test file is the report split.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHOTS_FILE = "opencompass_4shot.json"


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of an official file, in order."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines with sorted keys, so that the same rows give the same bytes; in ASCII, so that no character of a question
    is taken for a line's end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8")


def prepare(source: Path | None, out: Path) -> None:
    """Writes train/train.jsonl, feedback/items.jsonl and report/items.jsonl under `out`, and the few-shot file if it is there."""
    if source is None:
        raise ValueError("gsm8k is made from the official files")
    here = Path(__file__).resolve().parent
    index = json.loads((here / "splits" / "feedback.json").read_text(encoding="utf-8"))
    feedback, left_out = set(index["feedback"]), set(index["left_out"])
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for number, row in enumerate(read_rows(source / "train.jsonl")):
        item = {"id": f"gsm8k-train-{number:04d}", "question": row["question"], "answer": row["answer"]}
        if number in feedback:
            held_out.append(item)
        elif number not in left_out:
            train.append(item)
    test = [
        {"id": f"gsm8k-test-{number:04d}", "question": row["question"], "answer": row["answer"]}
        for number, row in enumerate(read_rows(source / "test.jsonl"))
    ]
    write_rows(out / "train" / "train.jsonl", train)
    write_rows(out / "feedback" / "items.jsonl", held_out)
    write_rows(out / "report" / "items.jsonl", test)
    if (source / SHOTS_FILE).is_file():
        (out / SHOTS_FILE).write_bytes((source / SHOTS_FILE).read_bytes())
