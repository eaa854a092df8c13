"""How many GPUs this job has: what GPU-hours count, used or not."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

NAMED_BY = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""A step's before its job's: with `placement: step` the grader has one of the job's GPUs."""
NONE = frozenset({"", "-1", "none", "void", "NoDevFiles"})
_SPAN = re.compile(r"(\d+)-(\d+)")
_DEVICE = re.compile(r"nvidia\d+")


def _count(part: str) -> int:
    span = _SPAN.fullmatch(part)
    return int(part not in NONE) if span is None else int(span[2]) - int(span[1]) + 1


def gpus_of_job(outer: Mapping[str, str] = os.environ, devices: str = "/dev") -> int:
    """GPUs by the first variable that is set; else what the node shows, where no scheduler says anything."""
    for name in NAMED_BY:
        if name in outer:
            return sum(_count(part.strip()) for part in set(outer[name].split(",")))
    try:
        return sum(1 for name in os.listdir(devices) if _DEVICE.fullmatch(name))
    except OSError:
        return 0
