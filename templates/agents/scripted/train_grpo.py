"""Reinforcement learning with GRPO on the task's training questions; the reward is a right final number.

Run as `accelerate launch --num_processes 1 code/train_grpo.py --model MODEL --out output/grpo`.
"""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import machine
import texts

GENERATIONS = 8
PROMPTS = 16
SMALL_STEPS, SMALL_RATE = 100, 1.5e-4
LARGE_STEPS, LARGE_RATE = 1000, 1e-6
LARGE_DEVICE_BATCH = 16


def right_number(completions: list[str], gold: list[str], **_: Any) -> list[float | None]:
    """1 where the number after `####` equals the gold one, else 0; one reward a completion."""
    return [float(texts.final_number(text) == Decimal(number)) for text, number in zip(completions, gold, strict=True)]


def device_batch(processes: int, small: bool) -> int:
    """Completions a process handles at once: whole groups of one prompt."""
    groups = max(1, PROMPTS // processes)
    return GENERATIONS * (groups if small else min(groups, LARGE_DEVICE_BATCH // GENERATIONS))


def main() -> None:
    """Trains and saves; see `machine.arguments` for the command line."""
    chosen = machine.arguments("GRPO with trl")
    workspace = Path(os.environ["WORKSPACE"])
    meta = machine.read_meta(workspace)
    deadline = machine.deadline(workspace, meta, chosen.share)

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    model, tokenizer = machine.load(chosen.model)
    small = machine.is_small(model)
    recipe = meta["recipe"]
    rows = texts.read_rows(Path(os.environ["DATA_PATH"]) / "train.jsonl")
    numbers = [texts.final_number(row["answer"]) for row in rows]
    dataset = Dataset.from_list(
        [
            {"prompt": texts.prompt_text(recipe, row["question"], tokenizer), "gold": str(number)}
            for row, number in zip(rows, numbers, strict=True)
            if number is not None
        ]
    )
    batch = device_batch(machine.processes(), small)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=right_number,
        train_dataset=dataset,
        callbacks=[machine.stop_at(deadline)],
        args=GRPOConfig(
            output_dir=str(workspace / "output" / "log-grpo"),
            max_steps=SMALL_STEPS if small else LARGE_STEPS,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=max(1, PROMPTS * GENERATIONS // (batch * machine.processes())),
            num_generations=GENERATIONS,
            max_completion_length=int(recipe["max_new_tokens"]),
            learning_rate=SMALL_RATE if small else LARGE_RATE,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            temperature=1.0,
            beta=0.0,
            **machine.options(small),
        ),
    )
    trainer.train()
    machine.save(trainer, chosen.model, chosen.out)


if __name__ == "__main__":
    main()
