"""Makes AlpacaEval's splits from the reference outputs, and its training data from the Alpaca rows.

The 805 instructions are parted 205 to 600, stratified by source: of each source the share of 205 that is its own (largest
remainders), in the order of a hash of the instruction. Each item carries what the length-controlled win rate needs beside the
judge's word: the instruction's difficulty, and length difference and preference of the two gamed reference models.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

FEEDBACK_ITEMS = 205
SPLIT_SEED = "alpacaeval-split-1"
OFFICIAL_PROMPT = "judge_prompt_alpaca_eval_clf.txt"
OWN_PROMPTS = ("judge_discrete.txt", "judge_logprob.txt")


def feedback_numbers(rows: list[dict[str, Any]]) -> set[int]:
    """Which rows of the reference outputs make the feedback split."""
    sources: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        sources[row["dataset"]].append(number)
    # Whole numbers alone, so that no rounding differs between machines.
    shares = {name: divmod(len(numbers) * FEEDBACK_ITEMS, len(rows)) for name, numbers in sources.items()}
    left = FEEDBACK_ITEMS - sum(whole for whole, _ in shares.values())
    fullest = sorted(shares, key=lambda name: (-shares[name][1], name))[:left]
    chosen: set[int] = set()
    for name, numbers in sources.items():
        ordered = sorted(
            numbers, key=lambda number: hashlib.sha256(f"{SPLIT_SEED}\0{rows[number]['instruction']}".encode()).digest()
        )
        chosen.update(ordered[: shares[name][0] + (name in fullest)])
    return chosen


def read_table(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines with sorted keys, so that the same rows give the same bytes; in ASCII, so that no character of a text is taken
    for a line's end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8")


def training_rows(path: Path) -> list[dict[str, str]]:
    """Alpaca's rows as question and answer; an input follows its instruction after a blank line."""
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).split(b"\n") if line]
    return [
        {
            "id": f"alpaca-{number:04d}",
            "question": "\n\n".join(part for part in (row["instruction"], row["input"]) if part),
            "answer": row["output"],
        }
        for number, row in enumerate(rows)
    ]


def prepare(source: Path | None, out: Path) -> None:
    """Writes train/train.jsonl, feedback/items.jsonl, report/items.jsonl and the judge's prompts under `out`."""
    if source is None:
        raise ValueError("alpacaeval is made from the public files")
    here = Path(__file__).resolve().parent
    reference = json.loads((source / "reference_gpt4_1106_preview.json").read_text(encoding="utf-8"))
    difficulty = {
        int(row["index"]): float(row["instruction_difficulty"])
        for row in read_table(source / "instruction_difficulty.recovered.csv")
    }
    gamed: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in read_table(source / "df_gamed.surrogate.csv"):
        gamed[int(row["index"])].append((float(row["std_delta_len"]), float(row["preference"])))
    items = [
        {
            "id": f"alpacaeval-{number:04d}",
            "question": row["instruction"],
            "answer": row["output"],
            "dataset": row["dataset"],
            "difficulty": difficulty[number],
            "gamed": gamed[number],
        }
        for number, row in enumerate(reference)
    ]
    chosen = feedback_numbers(reference)
    write_rows(out / "train" / "train.jsonl", training_rows(source / "alpaca_train_first1805.jsonl.gz"))
    write_rows(out / "feedback" / "items.jsonl", [item for number, item in enumerate(items) if number in chosen])
    write_rows(out / "report" / "items.jsonl", [item for number, item in enumerate(items) if number not in chosen])
    for name in OWN_PROMPTS:
        shutil.copyfile(here / name, out / name)
    if (source / OFFICIAL_PROMPT).is_file():
        shutil.copyfile(source / OFFICIAL_PROMPT, out / OFFICIAL_PROMPT)
