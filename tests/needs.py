"""Say what a test needs that a machine may lack. A skip without such a word fails under `--require` (tests/conftest.py)."""

from __future__ import annotations

from typing import NoReturn

import pytest

NEEDS = {
    "alfworld": "TextWorld and Fast Downward: pip install 'autorl-hpc[alfworld]'",
    "apptainer": "the stand-in for apptainer, which is made of bwrap",
    "bwrap": "bubblewrap, and user namespaces that work",
    "chromium": "chromium",
    "cores": "more than one core",
    "data": "the tasks' real data: set AUTORL_TEST_DATA",
    "exports": "inspect_ai, trackio and wandb: pip install 'autorl-hpc[inspect,trackio,wandb]'",
    "fuse": "fuse3, /dev/fuse and mount namespaces (root)",
    "git": "git",
    "harnesses": "inspect_ai and lm_eval: pip install 'autorl-hpc[inspect,lm-eval]'",
    "gpu": "a GPU that CUDA can use, and what is measured on it",
    "kernel": "a feature of newer or other kernels",
    "landlock": "Landlock",
    "mount": "permission to mount in a namespace of its own (root)",
    "namespaces": "namespaces of processes and mounts",
    "npm": "npm or pip with a network, or agents' programs installed before",
    "openssl": "openssl",
    "python": "a Python of this version that other users may run",
    "root": "root",
    "slurm": "Slurm's sandbox: root and Debian's packages (bin/slurm-sandbox)",
    "vllm": "vLLM",
    "zero": "deepspeed",
}
"""The words that `bin/test --require` knows."""

PREFIX = "needs "


def reason(need: str, why: str) -> str:
    """Return the reason of a skip, from which `need_of` reads the need again."""
    assert need in NEEDS, f"{need} is no need that tests/needs.py knows"
    return f"{PREFIX}{need}: {why}"


def skip(need: str, why: str) -> NoReturn:
    """Skip the test or the module that runs."""
    pytest.skip(reason(need, why), allow_module_level=True)


def needs(need: str, present: bool, why: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where `present` is false."""
    return pytest.mark.skipif(not present, reason=reason(need, why))


def need_of(text: str) -> str | None:
    """Return the need that a skip's reason names; None for a skip that names none."""
    word, _, _ = text.removeprefix("Skipped: ").removeprefix(PREFIX).partition(":")
    return word if f"{PREFIX}{word}:" in text and word in NEEDS else None
