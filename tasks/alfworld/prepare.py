"""Makes ALFWorld's splits from the packed official games: valid_seen is the feedback split, valid_unseen the report split.

The train games stay packed as they come; grammar, domain and ReAct's examples go to both sides, as each plays on its own.
"""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path

from autorl_hpc.rollouts.source import load

SPLITS = {"feedback": "valid_seen", "report": "valid_unseen"}
TRAIN_FILE = "train.jsonl.xz"
SHARED_FILES = ("grammar.in_games.twl2", "pddl_domain.in_games.pddl", "react_prompts.json")


def prepare(source: Path | None, out: Path) -> None:
    """Writes train/, feedback/items.jsonl, report/items.jsonl and the grader's copies of the shared files under `out`."""
    if source is None:
        raise ValueError("alfworld is made from the official games")
    goal_of = load(Path(__file__).with_name("environment.py")).goal_of
    (out / "train").mkdir()
    shutil.copyfile(source / TRAIN_FILE, out / "train" / TRAIN_FILE)
    for name in SHARED_FILES:
        shutil.copyfile(source / name, out / "train" / name)
        shutil.copyfile(source / name, out / name)
    for split, packed in SPLITS.items():
        with lzma.open(source / f"{packed}.jsonl.xz", "rt", encoding="utf-8") as file:
            goals = sorted((goal_of(json.loads(line)) for line in file), key=lambda goal: str(goal["id"]))
        (out / split).mkdir()
        (out / split / "items.jsonl").write_text(
            "".join(json.dumps({**goal, "answer": ""}, sort_keys=True) + "\n" for goal in goals), encoding="utf-8"
        )
