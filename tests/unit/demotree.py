"""A made-up experiment for looking at a merged report: agents, drivers, tasks, modes, seeds, failures. Deterministic.

No number in it was measured. Ledgers are real ones, by treemaker; what the recorder would have told is put on top.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from treemaker import Tree, TreeRun, sha

from autorl_hpc.files.layout import RunDir
from autorl_hpc.records.entries import DriverUse
from autorl_hpc.records.experiment import Budget
from autorl_hpc.records.task import SplitPin
from autorl_hpc.report import charts, leaderboard, pages, report
from autorl_hpc.report.routes import mode_kept
from autorl_hpc.report.run_story.resources import reference_metrics
from autorl_hpc.report.story_records import Failure, Iteration, ResourcesUsed, RouteTold, Story
from autorl_hpc.report.summary import MergedReport, RunSummary
from autorl_hpc.states import EndedBy, FailureKind, Fault, Network, Route, Split

TASKS = {"gsm8k": 0.42, "alfworld": 0.08, "webshop": 0.30}
"""Of each task, the share of items that the made-up base model solves."""

AGENTS: dict[tuple[str, str], tuple[float, float]] = {
    ("claude-code", "driver-a"): (0.24, 0.06),
    ("claude-code", "driver-b"): (0.15, 0.08),
    ("codex", "driver-c"): (0.19, 0.10),
    ("opencode", "driver-c"): (0.08, 0.05),
    ("mini", "driver-b"): (0.03, 0.04),
}
"""Of each agent with its driver, mean and spread of the share of items that it gains."""

MODES = {"claude-code": ("free", "sft-only", "rl-only")}
N_FEEDBACK, N_REPORT = 60, 150
SIZES = {Split.FEEDBACK: N_FEEDBACK, Split.REPORT: N_REPORT}
BUDGET_S = 12 * 3600.0
BUDGET = Budget(wall_clock_s=BUDGET_S, gpu_hours=24, tokens=20_000_000, cost_usd=60, max_submissions=12)
GPUS = 1.6
"""In use on average: two, for the most part of the time."""
ROUTES = {"free": Route.SFT_RL, "sft-only": Route.SFT, "rl-only": Route.GRPO}
FAILURES = (FailureKind.EARLY_CODING, FailureKind.REWARD_OR_DATA, FailureKind.TRAINING_COLLAPSE, FailureKind.NO_GAIN)


def demo(path: Path, *, seeds: int = 5, sandbox: str = "landlock", tasks: int = 3, agents: int = 5) -> Tree:
    """Writes the experiment below `path`, of the first so many tasks and agents."""
    tree = Tree(path, n_feedback=N_FEEDBACK, n_report=N_REPORT, sandbox=sandbox, network=Network.DRIVER)
    for task, share in list(TASKS.items())[:tasks]:
        draw = random.Random(task)
        tree.base_solved[Split.FEEDBACK] = _solved(draw, N_FEEDBACK, share)
        tree.base_solved[Split.REPORT] = _solved(draw, N_REPORT, share)
        for (agent, driver), (gain, spread) in list(AGENTS.items())[:agents]:
            for mode in MODES.get(agent, ("free",)):
                for seed in range(seeds):
                    splits = {str(s): SplitPin(n=n, sha256=sha(f"{task}-{s}")) for s, n in SIZES.items()}
                    who = {"agent": agent, "driver": driver, "mode": mode, "seed": seed}
                    science = {"splits": splits, "task": task, **who}
                    _run(tree, science, share, gain - 0.05 * (mode == "sft-only"), spread)
    return tree


def report_on(tree: Tree) -> MergedReport:
    """The merged report of a demo tree, with made-up stories."""
    plain = report.build([tree.path])
    merged = leaderboard.assemble([with_story(run) for run in plain.runs], plain.experiments, plain.left_out)
    return merged.model_copy(update={"run_folders": plain.run_folders, "default_out": plain.default_out})


def write_all(merged: MergedReport, out: Path | None = None, *, figures: bool = False) -> Path:
    """Write the pages of all runs and the merged report; return the path of index.html."""
    out = (out or Path(merged.default_out)).absolute()
    homes = map(Path, merged.run_folders)
    folders = [pages.write_run(run, RunDir(home), out) for run, home in zip(merged.runs, homes, strict=True)]
    return pages.write_merged(merged, folders, out, figures=charts.write_figures(merged, out) if figures else None)


def _run(tree: Tree, science: dict[str, Any], share: float, gain: float, spread: float) -> TreeRun:
    draw = random.Random("-".join(str(science[name]) for name in ("task", "agent", "driver", "mode", "seed")))
    run = tree.run(**science, budget=BUDGET).start()
    fate = draw.random()
    if fate < 0.04:
        run.seal(900.0, EndedBy.CRASHED, None, fault=Fault.CLUSTER, **_used(run, 900.0))
        return run.close(selected_by="infrastructure", report=None, fault=Fault.CLUSTER, reason="node lost")
    if fate < 0.10:
        end_s = draw.uniform(3000, BUDGET_S)
        return run.seal(
            end_s, exit_code=1, fault=Fault.AGENT, reason="no submission", **_used(run, end_s, exit_codes=(0, 1))
        ).close()
    goal = min(0.97, max(0.0, share + draw.gauss(gain, spread)))
    count = draw.randrange(3, 11)
    at = 0.0
    for number in range(1, count + 1):
        at += draw.uniform(0.4, 1.0) * BUDGET_S / (count + 1)
        if draw.random() < 0.12:
            run.refuse(at, "no config.json")
            continue
        level = share + (goal - share) * (1 - math.exp(-2.2 * number / count)) + draw.gauss(0, 0.02)
        run.submit(at, _solved(draw, N_FEEDBACK, level))
    ended = EndedBy.BUDGET if draw.random() < 0.5 else EndedBy.AGENT_EXIT
    end_s = BUDGET_S if ended is EndedBy.BUDGET else min(BUDGET_S, at + 1200.0)
    run.seal(end_s, ended, **_used(run, end_s))
    return run.close(_solved(draw, N_REPORT, goal))


def _used(run: TreeRun, end_s: float, exit_codes: tuple[int | None, ...] = (0,)) -> dict[str, Any]:
    """What the gateway counted until the run's end, and its GPU-hours; for each start of the agent an exit code."""
    hours = end_s / 3600
    use = DriverUse(**_tokens(run.record.run_id, hours), calls=int(40 * hours), refused=int(hours) % 3)
    told = {"gpu_hours": round(GPUS * hours, 3), "driver": use, "exit_codes": exit_codes}
    return told | {"reprompts": len(exit_codes) - 1}


def _rate(run_id: str) -> float:
    """Tokens an hour."""
    return random.Random(run_id).uniform(0.4e6, 1.6e6)


def _tokens(run_id: str, hours: float) -> dict[str, Any]:
    all_in_all = _rate(run_id) * hours
    shares = {"tokens_in": 0.9, "tokens_out": 0.1, "tokens_cached": 0.63}
    return {"cost_usd": round(3e-6 * all_in_all, 2), **{key: int(x * all_in_all) for key, x in shares.items()}}


def _solved(draw: random.Random, n: int, share: float) -> list[float]:
    """About `share` of n items, the first ones mostly, so that two models solve much the same ones."""
    edge = share * n
    return [1.0 if i + draw.gauss(0, n / 12) < edge else 0.0 for i in range(n)]


def with_story(run: RunSummary) -> RunSummary:
    """A run with what a recorder might have told."""
    draw = random.Random(run.run_id)
    planned = ROUTES[run.mode]
    executed = planned if draw.random() < 0.6 else Route.SFT
    hours = run.elapsed_s / 3600
    rate = _rate(run.run_id)
    iterations = []
    before_s = 0.0
    for point in run.trajectory:
        used = point.elapsed_s / 3600
        same = {name: getattr(point, name) for name in ("submission_id", "status", "score", "elapsed_s")}
        spent = {
            "tokens": int(rate * used),
            "cost_usd": round(3e-6 * rate * used, 4),
            "gpu_hours": round(GPUS * used, 4),
        }
        route = RouteTold(planned=planned, executed=executed)
        iterations.append(Iteration(**same, **spent, duration_s=point.elapsed_s - before_s, route=route))
        before_s = point.elapsed_s
    helped = run.improvement is not None and (run.improvement.low or 0.0) > 0
    kind = FailureKind.INFRASTRUCTURE if run.excluded == "infrastructure" else draw.choice(FAILURES)
    kind = FailureKind.NO_SUBMISSION if not run.trajectory and run.excluded is None else kind
    gpus = {"gpu_hours": round(GPUS * hours, 3), "gpus": "2", "gpu_model": "NVIDIA H100 80GB HBM3"}
    calls = {"driver_calls": int(40 * hours), "calls_refused": int(hours) % 3, "calls_failed": 0, "tokens_estimated": 0}
    tools = {
        "tool_calls": int(35 * hours),
        "tool_failures": int(3 * hours),
        "gpu_use": round(draw.uniform(0.3, 0.9), 3),
    }
    told = {**_tokens(run.run_id, hours), "tokens_from": "gateway", "cost_from": "gateway"}
    resources = ResourcesUsed.model_validate({**gpus, **told, **calls, **tools})
    story = Story(
        route=RouteTold(planned=planned, executed=executed if run.trajectory else Route.NONE),
        mode_kept=mode_kept(run.mode, executed) if run.trajectory else None,
        metrics=reference_metrics(
            run.trajectory,
            base_score=run.baseline_feedback.score if run.baseline_feedback else None,
            elapsed_s=run.elapsed_s,
            allowed_s=run.budget_s,
            ended=True,
            refused_unrecorded=0,
        ),
        iterations=tuple(iterations),
        failure=None if helped else Failure(kind=kind),
        resources=resources,
    )
    return run.model_copy(update={"story": story})


def many(runs: tuple[RunSummary, ...], count: int) -> list[RunSummary]:
    """`count` runs by repeating with other seeds: for sizes, not for numbers."""
    found = []
    for number in range(count):
        run = runs[number % len(runs)]
        turn = number // len(runs)
        run_id = f"{run.run_id[:-8]}{sha(f'{run.run_id}{turn}')[:8]}"
        found.append(run.model_copy(update={"seed": run.seed + 100 * turn, "run_id": run_id}))
    return found
