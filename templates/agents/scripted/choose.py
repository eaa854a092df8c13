"""Which of some checkpoints is the best on the validation part: training rows, or goals, that no trainer saw.

Run as `python code/choose.py FOLDER...`; prints the best one's path last. A score that stands beside a checkpoint already is
not measured again. Where nothing can be validated the last folder is taken.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import episodes
import machine
import rewards
import texts
from sample_right import prompt_ids, sampler_of
from sampler_vllm import VllmSampler

MOST_QUESTIONS, MOST_GOALS = 500, 512


def samplers(recipe: dict[str, Any]) -> Callable[[Path], Any]:
    """Gives a sampler for one folder after the other: vLLM's is started once, and takes the other weights."""
    kept: list[VllmSampler] = []

    def of(folder: Path) -> Any:
        if kept:
            kept[0].update(folder)
            return kept[0]
        sampler = sampler_of(folder, recipe)
        kept.extend([sampler] if isinstance(sampler, VllmSampler) else [])
        return sampler

    return of


def score(folder: Path, meta: dict[str, Any], workspace: Path, of: Callable[[Path], Any]) -> float | None:
    """Mean reward of greedy answers on the validation part; None where nothing tells a good answer."""
    beside = folder.with_name(folder.name + ".score.json")
    if beside.is_file():
        return float(json.loads(beside.read_text(encoding="ascii"))["score"])
    recipe = meta["recipe"]
    if episodes.interactive(meta):
        from autorl_rollouts.pool import Pool

        source = episodes.source_of(workspace, meta)
        _, goals = episodes.chosen(source, 1, MOST_GOALS, machine.seed())
        with Pool(source, episodes.workers_here(1)) as pool:
            groups = episodes.play(of(folder), goals, 1, pool, recipe)
        found = [episode.reward or 0.0 for group in groups for episode in group]
    else:
        rows = texts.read_rows(Path(os.environ["DATA_PATH"]) / "train.jsonl")
        rows = [row for row in rows if rewards.kind_of(row) and texts.held_out(row)][:MOST_QUESTIONS]
        if not rows:
            return None
        sampler = of(folder)
        answers = sampler.generate([prompt_ids(sampler, recipe, row["question"]) for row in rows])
        found = rewards.right([str(answer.text) for answer in answers], [rewards.gold_of(row) for row in rows])
    value = sum(found) / len(found)
    beside.write_text(json.dumps({"score": value, "n": len(found)}), encoding="ascii")
    return value


def main() -> None:
    """Scores and prints."""
    workspace = Path(os.environ["WORKSPACE"])
    meta = machine.read_meta(workspace)
    folders = [Path(name) for name in sys.argv[1:] if (Path(name) / "config.json").is_file()]
    if len(folders) > 1:
        of = samplers(meta["recipe"])
        scores = [score(folder, meta, workspace, of) for folder in folders]
        for folder, value in zip(folders, scores, strict=True):
            told = "not known" if value is None else round(value, 4)
            print(f"{folder}: {told} on the validation part", file=sys.stderr)
        if None not in scores:  # of equal ones the later
            best = max(range(len(scores)), key=lambda place: (scores[place], place))
            folders.append(folders[best])
    if folders:
        print(folders[-1])


if __name__ == "__main__":
    main()
