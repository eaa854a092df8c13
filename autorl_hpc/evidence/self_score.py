"""`./evaluate` in a workspace: an agent scores a checkpoint of its own on training rows with the grader's engine, recipe and scorer. Runs
with the agent's rights and Python; what it needs lies in `.suite/`; none of that is held out."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.files.reading import read_json
from autorl_hpc.grading.engines import make_engine
from autorl_hpc.grading.evaluate import prompt_tokens, samples
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.task import HARNESSES, Recipe
from autorl_hpc.rollouts.engine import Answer, ServingEngine
from autorl_hpc.scoring.harness import library
from autorl_hpc.scoring.outcome import Context
from autorl_hpc.scoring.own import OwnScorer
from autorl_hpc.scoring.registry import scorer
from autorl_hpc.scoring.stats import standard_error
from autorl_hpc.tasks.folders import OWN_SCORER, json_rows
from autorl_hpc.tasks.heldout import item_of

SUITE, RECIPE, TASK = ".suite", "recipe.json", "task"


def main(workspace: Path, arguments: list[str]) -> int:
    """Print the score of a checkpoint as JSON; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="./evaluate", description="Scores a checkpoint on training rows, as the grader does on others."
    )
    parser.add_argument("checkpoint", type=Path, help="a folder made by save_pretrained, such as output/v1")
    parser.add_argument("--items", type=int, default=200, help="training rows to ask (200)")
    parser.add_argument("--first", type=int, default=0, help="the row to begin with (0)")
    parser.add_argument("--rows", type=Path, help="another file of rows (data/train.jsonl)")
    given = parser.parse_args(arguments)
    try:
        found = _score(
            workspace, given.checkpoint, given.rows or workspace / "data" / "train.jsonl", given.first, given.items
        )
    except (AutorlError, OSError, ValueError) as error:
        print(json.dumps({"error": getattr(error, "what", str(error))}))
        return 1
    print(json.dumps(found))
    return 0


def _score(workspace: Path, checkpoint: Path, file: Path, first: int, count: int) -> dict[str, Any]:
    suite = workspace / SUITE
    recipe = parse_record(Recipe, read_json(suite / RECIPE), suite / RECIPE)
    rows = [{"id": str(number), **row} for number, row in json_rows(file.read_bytes())][first : first + count]
    if not rows or not all("question" in row and "answer" in row for row in rows):
        raise ValueError(f"{file}: rows with `question` and `answer` are needed")
    items = [item_of(row) for row in rows]
    engine = make_engine(GraderSpec(), Path(os.environ["MODEL_PATH"]), recipe.dtype, recipe.date)
    engine.load(checkpoint, folder_content_hash(checkpoint))
    context = Context(options=recipe.options, workers=os.cpu_count() or 1)
    answers = _answers(engine, recipe, items, workspace, context)
    own = recipe.scorer == OWN_SCORER
    rater = (
        OwnScorer("here", suite / TASK, recipe.scorer_version) if own else scorer(recipe.scorer, recipe.scorer_version)
    )
    outcomes = rater.score(items, [[one.text for one in drawn] for drawn in answers], context)
    values = [one.value for one in outcomes if one.value is not None]
    spread = standard_error(values, None)
    return {
        "score": 100 * sum(values) / len(values),
        "standard_error": None if spread is None else 100 * spread,
        "n": len(values),
        "rows": str(file),
        "metrics": rater.metrics(items, outcomes),
        "truncated": sum(one.truncated for drawn in answers for one in drawn),
    }


def _answers(
    engine: ServingEngine, recipe: Recipe, items: list[Any], workspace: Path, context: Context
) -> list[list[Answer]]:
    if recipe.scorer in HARNESSES:
        data = [item.data for item in items]
        found, _ = library(recipe.scorer).play(data, recipe, workspace / "data", engine, context, order=None)
        return [[answer] for answer in found]
    prompts = [prompt_tokens(engine, recipe, [], item.question) for item in items]
    return samples(engine, prompts, recipe, 0, None)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
