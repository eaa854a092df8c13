"""The experts' own learner and trl's `GRPOTrainer`, from one SFT start on ALFWorld, for equal seconds; then both play unseen games."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpubench.figures import Figures
from gpubench.usage import Usage
from gpubench.world import World

PROGRAM = Path(__file__).with_name("learning.py")
MARK = "FIGURE "
GOALS = 480
"""Games that the expert plays for the start."""
BATCHES = 30
"""Of supervised training: a start that is no good yet, so that RL has something to show."""
SIDES = ("trl", "ours")
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}  # fmt: skip
"""vLLM in trl's own process, without the sampler that is compiled for two minutes first."""


def measure(world: World, figures: Figures) -> None:
    """Demonstrations, the start, both sides, and what each checkpoint wins."""
    from experts import Workplace

    options = world.options
    assert options.data is not None, "gpu-learners needs --data"
    place = Workplace(options.work / "learners", "alfworld", "sft-grpo-online", source=options.data / "alfworld", left_s=(1e6,))  # fmt: skip
    shutil.rmtree(place.model)
    shutil.copytree(options.base or world.base, place.model)
    for path in (place.path / ".agent" / "scripted").rglob("*.py"):  # as lib.sh does
        shutil.copy(path, place.path / "code")
    env = {**os.environ, **place.env, **ALONE, "OMP_NUM_THREADS": "8", "LEARNER_DATA": str(options.data / "alfworld")}
    env["PYTHONPATH"] = os.pathsep.join(
        [place.env["PYTHONPATH"], str(place.path / "code"), os.environ.get("PYTHONPATH", "")]
    )
    out = place.path / "output"

    def run(name: str, *arguments: object) -> list[dict[str, Any]]:
        """Runs a program of the workspace's and shows what it tells."""
        command = [sys.executable, *map(str, arguments)]
        told: list[dict[str, Any]] = []
        begun = time.monotonic()
        tail: list[str] = []
        with subprocess.Popen(command, cwd=place.path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                tail = [*tail[-60:], line.rstrip()]
                if line.startswith(MARK):
                    told.append({**json.loads(line[len(MARK) :]), "now": time.monotonic()})
                    figures.say(f"{name}: {line[len(MARK) :].strip()}")
        if process.returncode:
            figures.say(f"{name} ended with {process.returncode}: " + "\n".join(tail))
        figures.say(f"{name}: {time.monotonic() - begun:.1f} s; {tail[-1][-300:] if tail else ''}")
        return told

    if options.traces is not None:
        shutil.copytree(options.traces, out / "traces")
    else:
        run("demonstrations", "code/collect.py", "--model", place.model, "--out", "output/traces", "--goals", GOALS)
    arguments = ["--model", place.model, "--out", "output/sft", "--traces", "output/traces", "--steps", BATCHES]
    run("SFT", "code/train_episodes.py", *arguments)
    for side in SIDES:
        with Usage() as usage:
            begun = time.monotonic()
            told = run(side, PROGRAM, side, "output/sft", f"output/{side}", options.seconds)
        _show(figures, side, told, usage, begun)
    made = [f"output/{name}" for name in ("sft", *SIDES) if (out / name).is_dir()]
    won = {one["checkpoint"]: one for one in run("play", PROGRAM, "play", *made) if "won" in one}
    for name, one in won.items():
        figures.show(f"unseen games won: {name}", 100 * one["won"] / one["of"], "%", note=f"{one['won']:.0f} of {one['of']}")  # fmt: skip


def _show(figures: Figures, side: str, told: Sequence[dict[str, Any]], usage: Usage, begun: float) -> None:
    """The figures of one side."""
    if not told:
        figures.missing(f"{side}: all", "it did not end its first iteration")
        return
    began = told[0]["now"] - told[0]["iteration_s"]
    figures.show(f"{side}: from its process's start to its first iteration", began - begun, "s")
    figures.show(f"{side}: iterations", len(told), "", note=f"in {told[-1]['at_s']} s")
    for name, unit in (("iteration_s", "s"), ("rollout_s", "s"), ("learn_s", "s")):
        figures.show(f"{side}: {name}", [one[name] for one in told], unit)
    total = {name: sum(one[name] for one in told) for name in ("generated", "sequence_tokens", "weighted_tokens", "rollout_s", "learn_s")}  # fmt: skip
    figures.show(f"{side}: sampled tokens a second of rollouts", total["generated"] / total["rollout_s"], "tokens/s")
    figures.show(f"{side}: tokens of sequences learned from, a second of learning", total["sequence_tokens"] / total["learn_s"], "tokens/s")  # fmt: skip
    figures.show(f"{side}: sampled tokens with an advantage, a second of learning", total["weighted_tokens"] / total["learn_s"], "tokens/s")  # fmt: skip
    for word, part in (("first", told[:2]), ("last", told[-2:])):
        figures.show(f"{side}: mean reward of the {word} two iterations", statistics.mean(one["reward"] for one in part), "")  # fmt: skip
    share = usage.share(began, told[-1]["now"])
    if share is not None:
        figures.show(f"{side}: GPU busy, by NVML", 100 * share, "%")
    figures.show(f"{side}: most memory held by torch", max(one["peak_gib"] for one in told), "GiB")
