"""Small real trainings: which route a report finds for each from what was observed, logged and run, and which settings.

`--tier all` runs each of code/*.py on the tiny model under the observer. The default tier replays what such runs recorded
(recorded/*.json); `OBSERVED_RUNS=write` with `--tier all` records them again.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.numpy import load_file, save_file

from autorl_hpc.recorder.trainings import Points, Trainings
from autorl_hpc.recorder.usage import Sweep
from autorl_hpc.recorder.watch import Moment
from autorl_hpc.records.entries import Fingerprint
from autorl_hpc.records.recorded import ObservedFact, ProcessSeen, TrainingPoint
from autorl_hpc.report.routes import executed, planned, settings, steps_observed
from autorl_hpc.states import Route

HERE = Path(__file__).parent
CODE, RECORDED = HERE / "code", HERE / "recorded"
TINY = HERE.parents[1] / "templates" / "models" / "tiny"
OBSERVER = HERE.parents[1] / "autorl_hpc" / "recorder" / "observer"
LIMIT_S = 600.0


class Run(NamedTuple):
    """What a reader says of a run: its route, the command lines, the submitted folder ("": none), and what is seen of steps.

    Of a killed process the last block of steps is lost: 2 of its 3.
    """

    route: str
    commands: tuple[str, ...]
    checkpoint: str = "output/v1"
    steps: int | None = 4
    rate: str | None = None


def script(route: str, name: str, checkpoint: str = "output/v1", steps: int | None = 4, rate: str | None = None) -> Run:
    """A run of one script."""
    return Run(route, (f"python code/{name}.py",), checkpoint, steps, rate)


INLINE = "import sys; sys.path.insert(0, 'code'); import own_sft  # trains"
RUNS = {
    "trainer_plain": script("sft", "trainer_plain", rate="0.0001"),
    "sft_trl": script("sft", "sft_trl", rate="0.0002"),
    "sft_lora_merged": Run("sft", ("python code/sft_lora.py", "python code/merge_lora.py"), rate="0.001"),
    "own_lora": script("sft", "own_lora", steps=5, rate="0.001"),
    "own_sft": script("sft", "own_sft", steps=6, rate="0.0003"),
    "own_sft_evaluated": script("sft", "own_sft_evaluated", steps=6, rate="0.0003"),
    "inline_sft": Run("sft", (f'python -c "{INLINE}"',), steps=6, rate="0.0003"),
    "accelerated": Run("sft", ("accelerate launch --cpu --num_processes 1 code/accelerated.py",), rate="0.0002"),
    "torchrun_sft": Run("sft", ("torchrun --nproc_per_node 2 code/distributed.py",), rate="0.0002"),
    "by_option": script("sft", "by_option"),
    "baseline_then_sft": script("sft", "baseline_then_sft"),
    "sft_watch": script("sft", "sft_watch"),
    "claimed_grpo_class": script("sft", "claimed_grpo_class"),
    "claimed_grpo_log": script("sft", "train_grpo_claimed", rate="0.0001"),
    "crash_in_the_middle": script("sft", "crash_in_the_middle", "", 8, "0.001"),
    "killed": script("sft", "killed", "", 2),
    "dpo_trl": script("dpo", "dpo_trl", rate="1e-05"),
    "own_dpo": script("dpo", "own_dpo", rate="1e-05"),
    "dpo_ipo": script("preference", "dpo_ipo"),
    "kto_trl": script("preference", "kto_trl"),
    "orpo_trl": script("preference", "orpo_trl"),
    "grpo_trl": script("grpo", "grpo_trl", rate="1e-05"),
    "grpo_subclass": script("grpo", "grpo_subclass"),
    "own_grpo": script("grpo", "own_grpo", steps=8, rate="1e-05"),
    "own_ppo": script("ppo", "own_ppo", steps=8, rate="1e-05"),
    "rloo_trl": script("rl", "rloo_trl"),
    "own_rloo": script("rl", "own_rloo", steps=5, rate="1e-05"),
    "online_dpo_trl": script("rl", "online_dpo_trl"),
    "reinforce": script("rl", "reinforce", steps=5, rate="1e-05"),
    "rl_rounds": Run("rl", ("bash code/rl_rounds.sh",), "output/v2", 6, "1e-05"),
    "own_trainer_class": script("rl", "own_trainer_class", rate="1e-05"),
    "sft_then_grpo": Run(
        "sft+rl", ("python code/own_sft_to.py output/a 1e-4", "python code/grpo_on.py output/a"), steps=8
    ),
    "sft_then_reinforce": script("sft+rl", "sft_then_reinforce", steps=8, rate="0.0001"),
    "best_of_n": script("rejection-sampling", "best_of_n"),
    "best_of_n_two": Run(
        "rejection-sampling", ("python code/sample_kept.py", "python code/train_kept.py"), rate="0.0001"
    ),
    "pipe_rs": script("rejection-sampling", "pipe_rs"),
    "iterative_sft": script("rejection-sampling", "iterative_sft", steps=8),
    "expert_iteration": script("rejection-sampling", "expert_iteration", steps=9, rate="0.0001"),
    "gkd_trl": script("distillation", "gkd_trl"),
    "distill_logits": script("distillation", "distill_logits", steps=5, rate="0.0001"),
    "distill_outputs": script("distillation", "distill_outputs"),
    "kd_two": Run("distillation", ("python code/teach.py", "python code/learn_kd.py")),
    "average": Run(
        "model-averaging",
        (
            "python code/own_sft_to.py output/a 1e-4",
            "python code/own_sft_to.py output/b 1e-3",
            "python code/average.py",
        ),
        steps=8,
    ),
    "copy_base": script("copy", "copy_base", steps=None),
    "saved_again": script("copy", "saved_again", steps=None),
    "no_rate": Run("copy", ("python code/own_sft_to.py output/v1 0.0",), steps=None),
    "evaluated": script("none", "evaluated", "", None),
    "reward_model": script("none", "reward_model", "", 4),
    "crash_before": script("none", "crash_before", "", None),
}


def files() -> dict[str, str]:
    """The code of all runs, as an agent has many scripts side by side."""
    return {path.name: path.read_text() for path in sorted(CODE.glob("*.[ps][yh]"))}


def teacher(folder: Path) -> None:
    """A teacher's weights: other ones than the base model's, of the same shape."""
    shutil.copytree(TINY, folder)
    tensors = {name: value * 1.01 for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def record(run: Run, folder: Path) -> dict[str, Any]:
    """Run it for real under the observer, and return what a recorder would have."""
    shutil.copytree(CODE, folder / "code", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(TINY, folder / "models" / "base")
    teacher(folder / "models" / "teacher")
    env = os.environ | {"WORKSPACE": str(folder), "MODEL_PATH": str(folder / "models" / "base")}
    env |= {"PYTHONPATH": str(OBSERVER), "AUTORL_OBSERVED": str(folder / ".observed"), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"TRL_EXPERIMENTAL_SILENCE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    begun, commands = time.time(), []
    with (folder / "agent.log").open("w") as log:
        for line in run.commands:
            seen = {"elapsed_s": round(time.time() - begun, 1), "at": "x", "pid": 1, "parent": 0, "what": "began"}
            commands.append({**seen, "began_s": 0.0, "command": " ".join(shlex.split(line))})
            subprocess.run(shlex.split(line), cwd=folder, env=env, stdout=log, stderr=log, timeout=LIMIT_S, check=False)
    points = folder / "points"
    Trainings(
        folder / "agent.log", Sweep(folder, slice_s=LIMIT_S), Points(points), folder / "events", LIMIT_S, LIMIT_S
    ).close(Moment(0.0, "x", 1))
    facts = [json.loads(line) for each in folder.glob(".observed/*.jsonl") for line in each.read_text().splitlines()]
    made = {
        "facts": [
            {**fact, "elapsed_s": round(max(0.0, fact["at_s"] - begun), 1), "at": "x"}
            for fact in sorted(facts, key=lambda fact: fact["at_s"])
        ],
        "points": [json.loads(line) for line in points.read_text().splitlines()] if points.exists() else [],
        "commands": commands,
        "fingerprint": print_of(folder, run.checkpoint),
    }
    text = json.dumps(made).replace(str(folder), "/w").replace(str(HERE.parents[1]), "/repo")
    told: dict[str, Any] = json.loads(text)
    return told


def print_of(folder: Path, checkpoint: str) -> dict[str, Any] | None:
    """What a fingerprint says of a checkpoint beside the base model."""
    if not checkpoint or not (folder / checkpoint / "model.safetensors").is_file():
        return None
    new, base = (load_file(path / "model.safetensors") for path in (folder / checkpoint, TINY))
    delta = sum(float(((new[n] - base[n]) ** 2).sum()) for n in base) / sum(float((base[n] ** 2).sum()) for n in base)
    flags = ["untrained_copy"] if delta < 1e-12 else []
    return {"submission_id": 1, "content_hash": "ab" * 32, "relative_delta": round(delta**0.5, 6), "flags": flags}


def told(run: Run, recorded: dict[str, Any]) -> tuple[Route, str | None, int | None, dict[str, str]]:
    """Route, source, steps and settings, as a report finds them."""
    facts = [ObservedFact.model_validate(fact) for fact in recorded["facts"]]
    points = [TrainingPoint.model_validate(point) for point in recorded["points"]]
    commands = [ProcessSeen.model_validate(command) for command in recorded["commands"]]
    fingerprint = recorded["fingerprint"] and Fingerprint.model_validate(recorded["fingerprint"])
    plan = planned(files(), [command.command for command in commands])
    done = executed(
        points,
        commands,
        fingerprint,
        plan,
        observed=facts,
        checkpoint=run.checkpoint or None,
        submitted=bool(run.checkpoint),
    )
    return done.route, done.source, steps_observed(facts), {s.name: s.value for s in settings(facts, points, plan)}


def wrong(run: Run, route: Route, steps: int | None, keys: dict[str, str]) -> list[str]:
    """What is told wrongly; an unknown route is not."""
    found = [] if route in (run.route, Route.UNKNOWN) else [f"route {route}"]
    found += [] if steps == run.steps else [f"steps {steps}"]
    rate = keys.get("learning_rate")
    return found + ([] if run.rate is None or rate == run.rate else [f"learning rate {rate}"])


def test_routes_of_recorded_runs() -> None:
    """At least 95 % of the routes are told, none is wrong, and steps and learning rates are values. It prints the table of
    docs/benchmarks.md. Recorded by trl 1.16, transformers 5.24, peft 0.21, torch 2.13."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    bad: dict[str, list[str]] = {}
    for name, run in RUNS.items():
        recorded = json.loads((RECORDED / f"{name}.json").read_text())
        route, source, steps, keys = told(run, recorded)
        table[run.route][str(route)] += 1
        table[run.route]["of which observed"] += source == "observed"
        if mistakes := wrong(run, route, steps, keys):
            bad[name] = mistakes
    print("| what it was | runs | told as | by observed facts |", "|---|--:|---|--:|", sep="\n")
    for name, counted in table.items():
        seen = counted.pop("of which observed")
        print(f"| {name} | {counted.total()} | {', '.join(f'{r} {n}' for r, n in counted.items())} | {seen} |")
    right = sum(counted[name] for name, counted in table.items())
    assert not bad and right >= 0.95 * len(RUNS), (right, bad)


def test_the_recordings_are_small() -> None:
    assert sum(path.stat().st_size for path in RECORDED.iterdir()) < 400_000
    assert {path.stem for path in RECORDED.iterdir()} == set(RUNS)


@pytest.mark.soak
@pytest.mark.parametrize("name", RUNS)
def test_a_real_run_is_told(name: str, tmp_path: Path) -> None:
    recorded = record(RUNS[name], tmp_path)
    if os.environ.get("OBSERVED_RUNS") == "write":
        (RECORDED / f"{name}.json").write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    route, _, steps, keys = told(RUNS[name], recorded)
    assert not wrong(RUNS[name], route, steps, keys), (tmp_path / "agent.log").read_text()[-3000:]
