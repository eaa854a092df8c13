"""Supervised fine-tuning on the task's demonstrations, or on its training rows where there are none.

Run as `accelerate launch --num_processes 1 code/train_sft.py --model MODEL --out output/sft`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import machine
import texts

BATCH = 32
SMALL_STEPS, SMALL_RATE, SMALL_WARMUP = 30, 3e-4, 5
LARGE_STEPS, LARGE_RATE, LARGE_EPOCHS = 500, 2e-5, 2
LARGE_DEVICE_BATCH = 4
MAX_LENGTH = 1024


def main() -> None:
    """Trains and saves; see `machine.arguments` for the command line."""
    chosen = machine.arguments("SFT with trl")
    workspace, data = Path(os.environ["WORKSPACE"]), Path(os.environ["DATA_PATH"])
    meta = machine.read_meta(workspace)
    deadline = machine.deadline(workspace, meta, chosen.share)

    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    model, tokenizer = machine.load(chosen.model)
    small = machine.is_small(model)
    demonstrations = data / "demonstrations.jsonl"
    rows = texts.read_rows(demonstrations if demonstrations.exists() else data / "train.jsonl")
    recipe = meta["recipe"]
    dataset = Dataset.from_list(
        [
            {
                "prompt": texts.prompt_text(recipe, row["question"], tokenizer),
                "completion": texts.completion_text(recipe, row["question"], row["answer"], tokenizer),
            }
            for row in rows
        ]
    )
    batch = max(1, min(BATCH // machine.processes(), BATCH if small else LARGE_DEVICE_BATCH))
    steps = SMALL_STEPS if small else min(LARGE_STEPS, math.ceil(LARGE_EPOCHS * len(rows) / BATCH))
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=dataset,
        callbacks=[machine.stop_at(deadline)],
        args=SFTConfig(
            output_dir=str(workspace / "output" / "log-sft"),
            max_steps=steps,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=max(1, BATCH // (batch * machine.processes())),
            learning_rate=SMALL_RATE if small else LARGE_RATE,
            lr_scheduler_type="cosine",
            warmup_steps=SMALL_WARMUP if small else steps // 20,
            max_length=min(MAX_LENGTH, model.config.max_position_embeddings),
            **machine.options(small),
        ),
    )
    trainer.train()
    machine.save(trainer, chosen.model, chosen.out)


if __name__ == "__main__":
    main()
