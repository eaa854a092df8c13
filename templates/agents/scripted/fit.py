"""Which of the accelerate configurations a model needs on the GPUs that are there, by their memory.

`python fit.py MODEL_FOLDER GPUS` prints the configuration's name, `lora` or `full`, and how many of the GPUs torch sees; what it
doesn't see is said on stderr and not used.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

MEMORY_SHARE = 0.6  # of a GPU, for weights, gradients and AdamW; the rest is for activations, rollouts and their cache
PLAIN_BYTES = 4 + 4 + 8 + 2  # a parameter: float32 weight, gradient, AdamW's two moments; bfloat16 copy that samples
HALF_BYTES, SHARED_BYTES = 2, 2 + 4 + 8
"""A parameter under DeepSpeed: its bfloat16 weight; gradient, float32 weight and moments, which ZeRO-2 splits among GPUs.
ZeRO-3 splits the first, too."""
SAMPLER_BYTES = 2
FORCED = "EXPERT_ACCELERATE"  # variable that names a configuration, whatever the memory is
NAMES = ("cpu", "one-gpu", "multi-gpu", "zero2", "zero3")


class Fit(NamedTuple):
    """How to launch: the name of a file in accelerate/, and whether adapters are trained in place of all weights."""

    config: str
    lora: bool


def fit(parameters: int, memory_bytes: int, gpus: int, deepspeed: bool) -> Fit:
    """The first that fits: plain, ZeRO-2, ZeRO-3, LoRA. Without GPUs nothing else than `cpu` is there.

    >>> fit(135_000_000, 80 << 30, 1, False), fit(7_000_000_000, 80 << 30, 4, True), fit(7_000_000_000, 80 << 30, 1, True)
    (Fit(config='one-gpu', lora=False), Fit(config='zero2', lora=False), Fit(config='one-gpu', lora=True))
    """
    if gpus == 0:
        return Fit("cpu", False)
    plain = "multi-gpu" if gpus > 1 else "one-gpu"
    room = MEMORY_SHARE * memory_bytes / parameters
    if room >= PLAIN_BYTES:
        return Fit(plain, False)
    if gpus > 1 and deepspeed:
        if room >= HALF_BYTES + SAMPLER_BYTES + SHARED_BYTES / gpus:
            return Fit("zero2", False)
        if room >= SAMPLER_BYTES + (HALF_BYTES + SHARED_BYTES) / gpus:
            return Fit("zero3", False)
    return Fit(plain, True)


def parameters_of(folder: Path) -> int:
    """Parameters in a folder of safetensors, by their headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def memory_of_gpus() -> int:
    """Bytes of the smallest GPU that is visible."""
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    try:
        asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        if visible:
            asked.append(f"--id={','.join(visible)}")
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
        return min(int(line) for line in said.split() if line) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        import torch

        return min(torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count()))


def seen_by_torch(granted: int) -> int:
    """How many of the GPUs that were granted torch sees; if fewer, why is said."""
    import torch

    seen = min(granted, torch.cuda.device_count())
    if seen < granted:
        built = torch.version.cuda or torch.version.hip
        why = f"is built for {built}" if built else "is built without CUDA"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        where = "on the CPU" if not seen else f"on {seen}"
        words = f"torch {torch.__version__} sees {seen} of {granted} GPUs granted (CUDA_VISIBLE_DEVICES {visible}): it {why}; training {where}"
        print(words, file=sys.stderr, flush=True)
    return seen


def main() -> None:
    """Prints what `lib.sh` launches with."""
    folder, granted = Path(sys.argv[1]), int(sys.argv[2])
    gpus = seen_by_torch(granted) if granted else 0
    forced = os.environ.get(FORCED)
    if forced:
        if forced not in NAMES:
            sys.exit(f"{FORCED}={forced}: choose one of {', '.join(NAMES)}")
        chosen = Fit(forced, False)
    else:
        there = importlib.util.find_spec("deepspeed") is not None
        chosen = fit(parameters_of(folder), memory_of_gpus() if gpus else 0, gpus, there)
    print(chosen.config, "lora" if chosen.lora else "full", gpus)


if __name__ == "__main__":
    main()
