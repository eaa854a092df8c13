"""GPUs as a host shows them, and as a job is told which are its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from autorl_hpc.doctor.finding import Finding, note, ok, unknown, warning
from autorl_hpc.doctor.tools import Answer, ask

SMI_LIMIT_S = 30.0
"""A host with eight cards and no persistence daemon wakes them one by one."""

NOT_NUMBERS = "programs that take the names in CUDA_VISIBLE_DEVICES for numbers fail"


def cards() -> Finding:
    """What `nvidia-smi -L` lists."""
    return read_cards(ask(["nvidia-smi", "-L"], limit_s=SMI_LIMIT_S))


def read_cards(answer: Answer | None) -> Finding:
    """Names, how many of each, and MIG slices."""
    if answer is None:
        return ok("cards", "no nvidia-smi on this host")
    if answer.code != 0:
        so_what = "programs here will find no GPU"
        return unknown("cards", f"nvidia-smi fails: {answer.said}", so_what, "none is needed on a login node")
    names = Counter(re.findall(r"(?m)^GPU \d+: (.+?) \(UUID: \S+\)", answer.out))
    slices = Counter(re.findall(r"(?m)^\s+MIG (\S+)", answer.out))
    if not names:
        return ok("cards", "none") if not answer.out.strip() else unknown("cards", f"nvidia-smi says: {answer.said}")
    value = ", ".join(f"{count} x {name}" for name, count in names.items())
    if slices:
        value += "; MIG: " + ", ".join(f"{count} x {name}" for name, count in slices.items())
        so_what = "a slice has a part of the memory, and one process sees one slice"
        return note("cards", value, so_what, "ask for whole cards for models that need more (`gpu_type`)")
    return ok("cards", value)


def visible(environment: Mapping[str, str], asked: int | None = None) -> Finding:
    """The form of CUDA_VISIBLE_DEVICES.

    Args:
        asked: how many GPUs this process's job asked for; None: it is in no job.
    """
    name = "CUDA_VISIBLE_DEVICES"
    text = environment.get(name)
    if text is None:
        if not asked:
            return ok(name, "not set")
        so_what = "Slurm doesn't tell a job which GPUs are its own: jobs on one node use the same ones"
        return warning(
            name, f"not set, though the job asked for {asked}", so_what, "set `gpu_wording` as the site asks"
        )
    parts = [part for part in text.split(",") if part.strip()]
    forms = {_form(part.strip()) for part in parts}
    value = f"{text or 'empty: no GPU'}" + (f" (by {' and '.join(sorted(forms))})" if forms else "")
    if asked is not None and len(parts) != asked:
        so_what = f"the job asked for {asked}"
        return warning(name, value, so_what, "see `gpu_wording` and `gpu_type` of the cluster's profile")
    if forms - {"index"}:
        return note(name, value, NOT_NUMBERS, "look them up with nvidia-smi -L; agents get the variable as it is")
    return ok(name, value)


def _form(part: str) -> str:
    if part.isdigit():
        return "index"
    if part.startswith("MIG-"):
        return "MIG slice"
    return "UUID" if part.startswith("GPU-") else "unknown name"


def everything(environment: Mapping[str, str], asked: int | None = None) -> list[Finding]:
    """Of this host or job."""
    return [cards(), visible(environment, asked)]
