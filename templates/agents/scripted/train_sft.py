"""Supervised fine-tuning by trl: on demonstrations, on training rows, on kept samples (`--rows`), or on kept episodes (`--traces`).
An expert's episodes are learned by `train_episodes.py`.

Run as `accelerate launch --num_processes 1 code/train_sft.py --model MODEL --out output/sft`.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import machine
import texts

BATCH = 32
SMALL_STEPS = 30
LARGE_STEPS, LARGE_EPOCHS = 600, 3
DEVICE_BATCH, LARGEST_DEVICE_BATCH = 16, 4  # rows a device handles at once: below 500M parameters, above
MAX_LENGTH = 1024
TRACE_BATCH = 16
SMALL_TRACE_STEPS = 60


def question_rows(data: Path, given: Path | None) -> list[dict[str, Any]]:
    """Rows with question and answer, without those that validate: the given ones, else demonstrations, else training rows."""
    demonstrations = data / "demonstrations.jsonl"
    rows = texts.read_rows(given or (demonstrations if demonstrations.exists() else data / "train.jsonl"))
    return [row for row in rows if not texts.held_out(row)] or rows


def as_text(rows: list[dict[str, Any]], recipe: dict[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Prompts with what the model should write."""
    return [
        {
            "prompt": texts.prompt_text(recipe, row["question"], tokenizer),
            "completion": texts.completion_text(recipe, row["question"], row["answer"], tokenizer),
        }
        for row in rows
    ]


def as_tokens(folder: Path) -> list[dict[str, Any]]:
    """Episodes cut into tokens; the loss is on the player's own."""
    from collect import read_traces

    traces = read_traces(folder)
    return [{"input_ids": one.ids.tolist(), "completion_mask": one.own.astype(int).tolist()} for one in traces]


def main() -> None:
    """Trains and saves; see `machine.arguments` for the command line."""
    path: dict[str, Any] = {"type": Path, "default": None}
    chosen = machine.arguments("SFT with trl", rows=path, traces=path, steps={"type": int, "default": None})
    workspace, data = Path(os.environ["WORKSPACE"]), Path(os.environ["DATA_PATH"])
    meta = machine.read_meta(workspace)
    deadline = machine.deadline(workspace, meta, chosen.share)

    from datasets import Dataset
    from torch.optim.lr_scheduler import LambdaLR
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    begun = time.monotonic()

    class Timed(SFTTrainer):  # type: ignore[misc]
        """Its learning rate is at its end with the steps or with the time, whichever is used up first."""

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            def share(step: int) -> float:
                used = (time.monotonic() - begun) / max(1.0, deadline - begun)
                late = 0.0 if small else machine.largest(used, self.args.device)
                return machine.rate_at(max((step + 1) / num_training_steps, late))

            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, share)
            return self.lr_scheduler

    model, tokenizer = machine.load(chosen.model, lora=chosen.lora)
    small = machine.is_small(model)
    if chosen.traces:
        rows, whole = as_tokens(chosen.traces), TRACE_BATCH
        length, few = model.config.max_position_embeddings, SMALL_TRACE_STEPS
    else:
        rows, whole = as_text(question_rows(data, chosen.rows), meta["recipe"], tokenizer), BATCH
        length, few = min(MAX_LENGTH, model.config.max_position_embeddings), SMALL_STEPS
    few_rows = DEVICE_BATCH if machine.count(model) < 500_000_000 else LARGEST_DEVICE_BATCH
    batch = max(1, min(whole // machine.processes(), whole if small else few_rows))
    steps = chosen.steps or (few if small else min(LARGE_STEPS, math.ceil(LARGE_EPOCHS * len(rows) / whole)))
    trainer = Timed(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        peft_config=machine.lora_config() if chosen.lora else None,
        callbacks=[machine.clock_callback(deadline, keep=not small)],
        args=SFTConfig(
            output_dir=str(workspace / "output" / f"log-{chosen.out.name}"),
            max_steps=steps,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=max(1, whole // (batch * machine.processes())),
            learning_rate=machine.rates(model, lora=chosen.lora)[0],
            max_length=length,
            **machine.options(model),
        ),
    )
    trainer.train(resume_from_checkpoint=machine.last_state(Path(trainer.args.output_dir)))
    machine.save(trainer.accelerator, trainer.model_wrapped, chosen.model, chosen.out, lora=chosen.lora)
    machine.finish(trainer.accelerator, chosen.out)


if __name__ == "__main__":
    main()
