"""Reinforcement learning with GRPO on the task's training questions; the reward is a right answer.

Run as `accelerate launch --num_processes 1 code/train_grpo.py --model MODEL --out output/grpo`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import machine
import rewards
import texts

GENERATIONS = 8
PROMPTS = 16
SMALL_STEPS, LARGE_STEPS = 100, 1000
LARGE_DEVICE_BATCH = 16


def right_answer(completions: list[str], gold: list[str], **_: Any) -> list[float]:
    """1 where an answer is right, else 0; one reward a completion."""
    return rewards.right(completions, gold)


def device_batch(processes: int, small: bool) -> int:
    """Completions a process handles at once: whole groups of one prompt."""
    groups = max(1, PROMPTS // processes)
    return GENERATIONS * (groups if small else min(groups, LARGE_DEVICE_BATCH // GENERATIONS))


def main() -> None:
    """Trains and saves; see `machine.arguments` for the command line."""
    chosen = machine.arguments("GRPO with trl", steps={"type": int, "default": None})
    workspace = Path(os.environ["WORKSPACE"])
    meta = machine.read_meta(workspace)
    deadline = machine.deadline(workspace, meta, chosen.share)
    recipe = meta["recipe"]
    rows = texts.read_rows(Path(os.environ["DATA_PATH"]) / "train.jsonl")
    rows = [row for row in rows if rewards.kind_of(row) and not texts.held_out(row)]
    if not rows:
        sys.exit(
            f"no training row of {meta['task']} tells a right answer: there is no reward for RL here; use the agent sft"
        )

    from datasets import Dataset
    from sampler_vllm import vllm_is_there
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    model, tokenizer = machine.load(chosen.model, lora=chosen.lora)
    small = machine.is_small(model)
    dataset = Dataset.from_list(
        [
            {"prompt": texts.prompt_text(recipe, row["question"], tokenizer), "gold": rewards.gold_of(row)}
            for row in rows
        ]
    )
    batch = device_batch(machine.processes(), small)
    by_vllm = vllm_is_there() and not small
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=right_answer,
        train_dataset=dataset,
        peft_config=machine.lora_config() if chosen.lora else None,
        callbacks=[
            machine.clock_callback(
                deadline, keep=not small, early=None if small else lambda: early(trainer, chosen, workspace)
            )
        ],
        args=GRPOConfig(
            output_dir=str(workspace / "output" / f"log-{chosen.out.name}"),
            max_steps=chosen.steps or (SMALL_STEPS if small else LARGE_STEPS),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=max(1, PROMPTS * GENERATIONS // (batch * machine.processes())),
            num_generations=GENERATIONS,
            max_completion_length=int(recipe["max_new_tokens"]),
            learning_rate=machine.rates(model, lora=chosen.lora)[1],
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            temperature=1.0,
            beta=0.0,
            use_vllm=by_vllm,
            vllm_mode="colocate",
            **machine.options(model),
        ),
    )
    trainer.train(resume_from_checkpoint=machine.last_state(Path(trainer.args.output_dir)))
    machine.save(trainer.accelerator, trainer.model_wrapped, chosen.model, chosen.out, lora=chosen.lora)
    machine.finish(trainer.accelerator, chosen.out)


def early(trainer: Any, chosen: Any, workspace: Path) -> None:
    """Saves and submits what a third of the time gave: something is scored, whatever comes later."""
    out = chosen.out.with_name(f"{chosen.out.name}-early")
    machine.save(trainer.accelerator, trainer.model_wrapped, chosen.model, out, lora=chosen.lora)
    if trainer.accelerator.is_main_process:
        machine.submit(workspace, out, f"early, step {trainer.state.global_step}")


if __name__ == "__main__":
    main()
