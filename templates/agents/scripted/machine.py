"""Command line, clock, loading and saving of the scripted trainers, and the options that follow from the hardware.

Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself. Heavy modules are
imported inside the functions that need them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SMALL_PARAMETERS = 10_000_000
"""Below it a model is a toy that wants large steps and needs few of them."""
FLOAT32_BYTES_A_PARAMETER = 16
"""Weights, gradients and AdamW's two moments in float32."""
MEMORY_SHARE = 0.6
"""Of a GPU's memory that those may take; the rest is for activations and generation."""
TOKENIZER_SUFFIXES = (".json", ".txt", ".jinja", ".model")
"""Files beside the weights that a checkpoint takes over from its base as they are."""


def arguments(description: str) -> argparse.Namespace:
    """The command line of a trainer: where from, where to, which share of the time left it may use."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to start from")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint to write")
    parser.add_argument("--share", type=float, default=0.8, help="share of the time left that training may use")
    return parser.parse_args()


def read_meta(workspace: Path) -> dict[str, Any]:
    """`run_meta.json` of the workspace."""
    meta: dict[str, Any] = json.loads((workspace / "run_meta.json").read_text(encoding="utf-8"))
    return meta


def seconds_left(workspace: Path, meta: Mapping[str, Any]) -> float:
    """What `./time` says, as a number or under a key with "left" in it; the whole budget where it cannot be asked."""
    try:
        said = subprocess.run(["./time"], cwd=workspace, capture_output=True, timeout=60, check=True)
        answer = json.loads(said.stdout)
        if isinstance(answer, dict):
            answer = next(value for key, value in answer.items() if "left" in key)
        return float(answer)
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, StopIteration) as error:
        print(f"./time did not answer ({error!r}); planning with the whole budget", flush=True)
        return float(meta["timeout_s"])


def deadline(workspace: Path, meta: Mapping[str, Any], share: float) -> float:
    """The moment, on the monotonic clock, when a share of the time left is used."""
    return time.monotonic() + share * seconds_left(workspace, meta)


def processes() -> int:
    """How many processes `accelerate launch` started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def load(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer, ready to train: float32 where the memory allows it, since small steps vanish in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    dtype = torch.float32
    if torch.cuda.is_available():
        # Models large enough for this to matter are stored with two bytes a parameter.
        parameters = sum(path.stat().st_size for path in folder.glob("*.safetensors")) // 2
        memory_bytes = torch.cuda.get_device_properties(0).total_memory
        if parameters * FLOAT32_BYTES_A_PARAMETER > MEMORY_SHARE * memory_bytes:
            dtype = torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), tokenizer


def is_small(model: Any) -> bool:
    """Whether a model is a toy; see `SMALL_PARAMETERS`."""
    return bool(sum(parameter.numel() for parameter in model.parameters()) < SMALL_PARAMETERS)


def options(small: bool) -> dict[str, Any]:
    """Options of a trl config that depend on where it runs and how large the model is, or are the same for all."""
    import torch

    gpu = torch.cuda.is_available()
    return {
        "seed": int(os.environ.get("AUTORL_SEED", "0")),
        "use_cpu": not gpu,
        "bf16": gpu and not small and torch.cuda.is_bf16_supported(),
        "dataloader_pin_memory": gpu,
        "gradient_checkpointing": not small,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 10,
    }


def stop_at(moment: float) -> Any:
    """A callback that ends training at a moment of the monotonic clock, on all processes at the same step."""
    import torch
    import torch.distributed as dist
    from transformers import TrainerCallback

    class StopAtDeadline(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            late = torch.tensor(float(time.monotonic() > moment), device=args.device)
            if dist.is_initialized():
                dist.all_reduce(late, op=dist.ReduceOp.MAX)
            if late.item() > 0:
                print(f"time is up after step {state.global_step}", flush=True)
                control.should_training_stop = True
            return control

    return StopAtDeadline()


def save(trainer: Any, base: Path, out: Path) -> None:
    """Writes the checkpoint from the main process: safetensors in the base's dtype, its config and its tokenizer files.

    Written beside and renamed, then marked with `<out>.done`: a folder with a mark is whole. `Trainer.save_model` would
    add a pickle of its arguments, which no checkpoint needs and graders refuse.
    """
    import torch

    if not trainer.accelerator.is_main_process:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    stored = json.loads((base / "config.json").read_text(encoding="utf-8"))
    model.to(getattr(torch, stored.get("dtype") or stored.get("torch_dtype") or "float32"))
    partial = out.with_name(out.name + ".partial")
    for leftover in (partial, out):
        shutil.rmtree(leftover, ignore_errors=True)
    model.save_pretrained(partial)
    for source in base.iterdir():
        if source.suffix in TOKENIZER_SUFFIXES and source.name != "config.json" and ".index." not in source.name:
            shutil.copyfile(source, partial / source.name)
    partial.rename(out)
    out.with_name(out.name + ".done").touch()
