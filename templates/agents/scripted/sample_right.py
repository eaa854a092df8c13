"""Rejection sampling: answers to training questions, or episodes of training goals, of which only the right ones are kept.

Run as `python code/sample_right.py --model MODEL --out output/kept-1`; train_sft.py trains on what it writes, `rows.jsonl` or
parts of episodes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import episodes
import machine
import rewards
import texts
from batches import Spoken, merged
from sampler import Sampler
from sampler_vllm import open_vllm, vllm_is_there
from words import Words, ends_of

TEMPERATURE = 1.0
COPIES, KEPT = 8, 2  # answers to each question, and different right ones that are kept
BATCH_QUESTIONS, BATCH_GOALS = 64, 32
MOST_GOALS = 1000


def sampler_of(folder: Path, recipe: dict[str, Any]) -> Any:
    """The model of a folder, ready to sample, on the first GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if gpu else torch.float32)
    words = Words(AutoTokenizer.from_pretrained(folder), ends_of(model), recipe.get("stop") or [])
    new_tokens = int(recipe["max_new_tokens"])
    if vllm_is_there() and not machine.is_small(model):
        limit = int(model.config.max_position_embeddings)
        sampler = open_vllm(folder, words, max_new_tokens=new_tokens, max_tokens=limit, seed=machine.seed())
        if sampler is not None:
            return sampler
    return Sampler(model.to("cuda" if gpu else "cpu"), words, max_new_tokens=new_tokens)


def prompt_ids(sampler: Any, recipe: dict[str, Any], question: str) -> list[int]:
    """A question as the grader asks it, in token ids."""
    return list(sampler.encode(texts.prompt_text(recipe, question, sampler.words.tokenizer)))


def right_answers(
    sampler: Any, rows: list[dict[str, Any]], recipe: dict[str, Any], until: float
) -> list[dict[str, str]]:
    """Right sampled answers to the questions, different ones, the shortest first."""
    kept: list[dict[str, str]] = []
    for start in range(0, len(rows), BATCH_QUESTIONS):
        if time.monotonic() > until:
            break
        part = [row for row in rows[start : start + BATCH_QUESTIONS] for _ in range(COPIES)]
        answers = sampler.generate([prompt_ids(sampler, recipe, row["question"]) for row in part])
        said = [str(answer.text) for answer in answers]
        right = rewards.right(said, [rewards.gold_of(row) for row in part])
        for place in range(0, len(part), COPIES):
            good = {said[n] for n in range(place, place + COPIES) if right[n] == 1.0 and not answers[n].truncated}
            kept += [{"question": part[place]["question"], "answer": text} for text in sorted(good, key=len)[:KEPT]]
    return kept


def won_episodes(
    sampler: Any, goals: list[Any], pool: Any, recipe: dict[str, Any], limit: int, until: float
) -> list[Any]:
    """Token sequences of episodes with the full reward, at most `KEPT` a goal, the shortest first."""
    kept: list[Any] = []
    for start in range(0, len(goals), BATCH_GOALS):
        if time.monotonic() > until:
            break
        part = goals[start : start + BATCH_GOALS]
        for goal, group in zip(part, episodes.play(sampler, part, COPIES, pool, recipe), strict=True):
            good = sorted((episode for episode in group if episode.reward == 1.0), key=lambda episode: episode.steps)
            for episode in good[:KEPT]:
                spoken = [Spoken(one.prompt, one.ids, one.logps) for one in episode.completions]
                kept.append((str(goal["id"]), merged(spoken, limit)))
    return kept


def main() -> None:
    """Samples until the time is up, and writes what was right."""
    given = machine.arguments("rejection sampling", round={"type": int, "default": 1})
    workspace = Path(os.environ["WORKSPACE"])
    meta = machine.read_meta(workspace)
    until = machine.deadline(workspace, meta, given.share)
    recipe = meta["recipe"]
    given.out.mkdir(parents=True, exist_ok=True)
    sampler = sampler_of(given.model, recipe)
    sampler.begin(machine.seed() * 1000 + given.round, TEMPERATURE)
    if episodes.interactive(meta):
        from autorl_rollouts.pool import Pool
        from collect import rows_of, write_part

        source = episodes.source_of(workspace, meta)
        goals, _ = episodes.chosen(source, MOST_GOALS, 0, machine.seed())
        from transformers import AutoConfig

        limit = int(AutoConfig.from_pretrained(given.model).max_position_embeddings)
        with Pool(source, episodes.workers_here(1)) as pool:
            kept = won_episodes(sampler, goals, pool, recipe, limit, until)
        write_part(
            given.out / "kept.jsonl.gz", [row for goal, sequences in kept for row in rows_of(goal, 1.0, sequences)]
        )
    else:
        rows = texts.read_rows(Path(os.environ["DATA_PATH"]) / "train.jsonl")
        rows = [row for row in rows if rewards.kind_of(row) and not texts.held_out(row)]
        if not rows:
            sys.exit(
                f"no training row of {meta['task']} tells a right answer: nothing can be rejected; use the agent sft"
            )
        kept = right_answers(sampler, rows, recipe, until)
        lines = "".join(json.dumps(row) + "\n" for row in kept)
        (given.out / "rows.jsonl").write_text(lines, encoding="utf-8")
    print(json.dumps({"kept": len(kept)}), flush=True)
    if not kept:
        sys.exit("the model got nothing right: there is nothing to train on; begin with supervised training")
    machine.done(given.out)


if __name__ == "__main__":
    main()
