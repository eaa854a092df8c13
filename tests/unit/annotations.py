"""Published annotations of AlpacaEval 2.0, as pairs for the length-controlled win rate."""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from autorl_hpc.scoring.length_control import JudgedPair

COMPLETE = (
    "FuseChat-Llama-3.1-8B-Instruct",
    "FuseChat-Llama-3.2-1B-Instruct",
    "gpt-3.5-turbo-1106",
    "claude-2.1_concise",
    "vicuna-13b-v1.5",
    "vicuna-7b-v1.5",
    "alpaca-7b",
    "gemma-2b-it",
    "NullModel",
)
"""Models with an annotation of each of the 805 instructions."""


@cache
def rows(data: Path, model: str) -> list[dict[str, Any]]:
    """A model's annotations, in the order of the instructions."""
    path = data / "alpacaeval" / "annotations" / f"{model}.json.gz"
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))
    return found


@cache
def leaderboard(data: Path) -> dict[str, dict[str, str]]:
    """The published figures by model."""
    path = data / "alpacaeval" / "leaderboard_weighted_gpt4_turbo.csv"
    with open(path, encoding="utf-8", newline="") as file:
        return {row[""]: row for row in csv.DictReader(file)}


@cache
def pairs(data: Path, model: str) -> tuple[JudgedPair, ...]:
    """What the judge said of a model, with difficulties and gamed rows."""
    folder = data / "alpacaeval"
    with open(folder / "instruction_difficulty.recovered.csv", encoding="utf-8", newline="") as file:
        difficulty = [float(row["instruction_difficulty"]) for row in csv.DictReader(file)]
    gamed: dict[int, list[tuple[float, float]]] = defaultdict(list)
    with open(folder / "df_gamed.surrogate.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            gamed[int(row["index"])].append((float(row["std_delta_len"]), float(row["preference"])))
    return tuple(
        JudgedPair((row["preference"] or 1.5) - 1, row["len_1"], row["len_2"], difficulty[number], tuple(gamed[number]))
        for number, row in enumerate(rows(data, model))
    )
