"""Command line, clock, loading and saving of the scripted trainers, and the options that follow from the hardware.

Heavy modules are imported inside the functions that need them. All of this folder is copied into `code/` of a workspace.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SMALL_PARAMETERS = 10_000_000  # below it a model is a toy that wants large steps and needs few of them
CHECKPOINTED_PARAMETERS = 400_000_000  # above it activations are computed again instead of kept
RATES = ((SMALL_PARAMETERS, 3e-4, 1.5e-4), (500_000_000, 3e-4, 2e-5), (3_000_000_000, 2e-5, 2e-6))
"""Up to so many parameters: learning rates of supervised training and of RL, full weights."""
LARGEST_RATES = (1e-5, 1e-6)
WARMUP_SHARE = 0.05  # of a supervised training
LAST_RATE = 0.05  # of its learning rate, at the end
LORA_FACTOR = 10.0  # LoRA wants larger steps than full weights do
LORA_RANK = 32
KEEP_S = 120.0  # at least so often what training needs to go on is written, where an interruption must not cost more
RESERVE_SHARE, RESERVE_MAX_S = 0.1, 180.0  # of the time left: kept for saving and submitting; its upper end
WEIGHTS = (".safetensors", ".bin", ".gguf", ".index.json", ".py")
"""Endings of files beside the tokenizer's that a checkpoint doesn't take over from its base."""


def arguments(description: str, **extra: Mapping[str, Any]) -> argparse.Namespace:
    """The command line of a trainer: where from, where to, which share of the time left it may use; and further
    options by name, with their arguments for argparse."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to start from")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint to write")
    parser.add_argument("--share", type=float, default=0.8, help="share of the time left that training may use")
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters, and merge them at the end")
    for name, options in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser.parse_args()


def read_meta(workspace: Path) -> dict[str, Any]:
    """`run_meta.json` of the workspace."""
    meta: dict[str, Any] = json.loads((workspace / "run_meta.json").read_text(encoding="utf-8"))
    return meta


def seconds_left(workspace: Path, meta: Mapping[str, Any]) -> float:
    """What `./time` says of the wall clock; the whole budget where it cannot be asked."""
    try:
        said = subprocess.run(["./time"], cwd=workspace, capture_output=True, timeout=60, check=True)
        return float(json.loads(said.stdout)["left_s"])
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, KeyError) as error:
        print(f"./time did not answer ({error!r}); planning with the whole budget", flush=True)
        return float(meta["timeout_s"])


def deadline(workspace: Path, meta: Mapping[str, Any], share: float) -> float:
    """The moment, on the monotonic clock, when a share of the time left, less the reserve, is used."""
    left_s = seconds_left(workspace, meta)
    return time.monotonic() + share * (left_s - min(RESERVE_MAX_S, RESERVE_SHARE * left_s))


def processes() -> int:
    """How many processes `accelerate launch` started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def seed() -> int:
    """The run's."""
    return int(os.environ.get("AUTORL_SEED", "0"))


def load(folder: Path, *, lora: bool = False) -> tuple[Any, Any]:
    """Model and tokenizer, ready to train: float32, since small steps vanish in bfloat16 (DeepSpeed keeps its own float32
    copy and makes bfloat16 of these); with `lora` the frozen weights are bfloat16 on a GPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    half = lora and torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if half else torch.float32)
    return model, tokenizer


def lora_config() -> Any:
    """Adapters on all linear layers but the head."""
    from peft import LoraConfig

    return LoraConfig(
        r=LORA_RANK, lora_alpha=2 * LORA_RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def count(model: Any) -> int:
    """Parameters of a model, also where ZeRO-3 has taken them apart."""
    return sum(int(getattr(parameter, "ds_numel", 0) or parameter.numel()) for parameter in model.parameters())


def is_small(model: Any) -> bool:
    """Whether a model is a toy; see `SMALL_PARAMETERS`."""
    return count(model) < SMALL_PARAMETERS


def rates(model: Any, *, lora: bool = False) -> tuple[float, float]:
    """Learning rates of supervised training and of RL."""
    number = count(model)
    supervised, rl = next(((a, b) for most, a, b in RATES if number < most), LARGEST_RATES)
    factor = LORA_FACTOR if lora else 1.0
    return supervised * factor, rl * factor


def rate_at(done: float) -> float:
    """Share of the learning rate where a share of the training is done: up, and down along a cosine.

    >>> [round(rate_at(done), 2) for done in (0.0, 0.025, 0.05, 0.525, 1.0)]
    [0.0, 0.5, 1.0, 0.53, 0.05]
    """
    if done < WARMUP_SHARE:
        return done / WARMUP_SHARE
    angle = math.pi * min(1.0, (done - WARMUP_SHARE) / (1.0 - WARMUP_SHARE))
    return LAST_RATE + (1.0 - LAST_RATE) * (1.0 + math.cos(angle)) / 2.0


def options(model: Any) -> dict[str, Any]:
    """Options of a trl config that depend on where it runs and how large the model is, or are the same for all."""
    import torch

    gpu = torch.cuda.is_available()
    return {
        "seed": seed(),
        "use_cpu": not gpu,
        "bf16": gpu and not is_small(model) and torch.cuda.is_bf16_supported(),
        "dataloader_pin_memory": gpu,
        # trl's default costs 2.4 times as long at 135M
        "gradient_checkpointing": count(model) > CHECKPOINTED_PARAMETERS,
        "report_to": "none",
        "save_strategy": "no",  # by the clock instead; see `clock_callback`
        "save_total_limit": 1,
        "disable_tqdm": True,
        "logging_steps": 10,
    }


def agreed(value: bool, device: Any) -> bool:
    """Whether any process says so: all of them stop, or save, at the same step."""
    return largest(float(value), device) > 0


def largest(value: float, device: Any) -> float:
    """Of all processes' values."""
    import torch
    import torch.distributed as dist

    told = torch.tensor(value, device=device, dtype=torch.float32)
    if processes() > 1 and dist.is_initialized():
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told.item())


class Busy:
    """How much of the time some kernel ran on this process's GPU, by NVML, asked twice a second."""

    def __init__(self) -> None:
        import torch

        self._seen: list[float] = []
        if torch.cuda.is_available():
            threading.Thread(target=self._look, args=(torch.cuda.utilization,), name="busy", daemon=True).start()

    def _look(self, utilization: Callable[[], int]) -> None:
        with contextlib.suppress(Exception):  # no NVML: nothing is told
            while True:
                self._seen.append(utilization() / 100)
                time.sleep(0.5)

    def told(self) -> dict[str, float]:
        """The share since the last call, as a figure of a log line; none where nothing was seen."""
        seen, self._seen[:] = list(self._seen), []
        return {"gpu_busy": round(sum(seen) / len(seen), 2)} if seen else {}


def clock_callback(moment: float, *, keep: bool, early: Callable[[], None] | None = None) -> Any:
    """A callback of trl's trainers: it ends training at a moment of the monotonic clock, has the state written every `KEEP_S` seconds if
    `keep`, and calls `early` once, when a third of the time is used."""
    from transformers import TrainerCallback

    class ByTheClock(TrainerCallback):
        def __init__(self) -> None:
            self.begun = self.kept = time.monotonic()
            self.early, self.busy = early, Busy()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            logs |= self.busy.told()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            now = time.monotonic()
            if agreed(now > moment, args.device):
                print(f"time is up after step {state.global_step}", flush=True)
                control.should_training_stop = True
            elif self.early is not None and agreed(now > self.begun + (moment - self.begun) / 3, args.device):
                call, self.early = self.early, None
                call()
            if keep and agreed(now > self.kept + KEEP_S, args.device):
                control.should_save = True
                self.kept = time.monotonic()
            return control

    return ByTheClock()


def last_state(folder: Path) -> str | None:
    """The newest whole state that a trainer of trl has written below a folder: `trainer_state.json` comes last."""
    found = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if _is_json(path)]
    if not found:
        return None
    newest = max(found, key=lambda path: int(path.name.rpartition("-")[2]))
    print(f"going on from {newest}", flush=True)
    return str(newest)


def _is_json(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def save(accelerator: Any, model: Any, base: Path, out: Path, *, lora: bool = False) -> None:
    """Writes the checkpoint: safetensors in the base's dtype, its config and its tokenizer files. All processes call it.

    Written beside and renamed: a folder with that name is whole. `Trainer.save_model` would add a pickle of its arguments,
    which no checkpoint needs and graders refuse. `model` was loaded from the folder `base`; with `lora` it is peft's, whose adapters are
    merged into the base's weights.
    """
    import torch

    state = accelerator.get_state_dict(model)  # gathers what ZeRO-3 has taken apart
    if accelerator.is_main_process:
        stored = json.loads((base / "config.json").read_text(encoding="utf-8"))
        dtype = getattr(torch, stored.get("dtype") or stored.get("torch_dtype") or "float32")
        partial = out.with_name(out.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        plain = accelerator.unwrap_model(model)
        if lora:
            _save_merged(plain, state, base, partial, dtype)
        else:
            plain.save_pretrained(partial, state_dict=_as_stored(state, dtype))
        for source in base.iterdir():
            if source.is_file() and not source.name.endswith(WEIGHTS):
                shutil.copyfile(source, partial / source.name)
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)
    accelerator.wait_for_everyone()


def _as_stored(state: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The tensors in a dtype; one that stands under two names, as a tied head does, stays one."""
    made: dict[tuple[int, Any], Any] = {}
    stored = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in made:
            made[key] = tensor.detach().to(dtype).cpu()
        stored[name] = made[key]
    return stored


def _save_merged(plain: Any, state: Mapping[str, Any], base: Path, out: Path, dtype: Any) -> None:
    """Merges on the CPU into the base's own weights, in float32: the trained model is left as it is."""
    import torch
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    adapters = {name: tensor.float().cpu() for name, tensor in get_peft_model_state_dict(plain, state).items()}
    fresh = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora_config())
    set_peft_model_state_dict(fresh, adapters)
    fresh.merge_and_unload().to(dtype).save_pretrained(out)


def finish(accelerator: Any, out: Path) -> None:
    """The end of a training: marks the stage as finished, so that it is not done again, and ends the processes.

    Several of them end without destructors: that of gloo, with Python's lock held, waits for a thread which may wait for that lock
    (torch 2.13), and a finished training would stand still until the budget is used up.
    """
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        done(out)
    if accelerator.num_processes > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    accelerator.end_training()


def done(out: Path) -> None:
    """Marks a stage as finished: it is not done again after an interruption."""
    out.with_name(out.name + ".done").touch()


def submit(workspace: Path, folder: Path, note: str) -> None:
    """Submits a checkpoint and returns when it is accepted or refused; what the answer is stands in the log."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        name = str(folder.resolve().relative_to(workspace.resolve()))
        told = ["python3", "./submit", name, "--note", note, "--timeout", "300"]
        said = subprocess.run(told, cwd=workspace, capture_output=True, text=True, timeout=330, check=False)
        print(f"submitted {name}: {' '.join(said.stdout.split())[:500]}", flush=True)
