"""`launch --dry-run`: what an experiment would do and cost, without starting anything."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autorl_hpc.agents import load_agent
from autorl_hpc.agents.program_check import Looked
from autorl_hpc.cluster.vllm_program import VllmOnHost
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root
from autorl_hpc.launch import drivers, expand
from autorl_hpc.launch.plan import Plan, finding_lines, look_at_agents, look_at_engine, would_be
from autorl_hpc.records.run import Science
from autorl_hpc.scoring.stats import smallest_visible_gain, visible_of_clusters
from autorl_hpc.states import Split
from autorl_hpc.tasks.heldout import asked_items
from autorl_hpc.tasks.loader import load_task

# --- smallest visible gain of each split, before anything is measured


def visible_gains(root: Root, science: Science) -> dict[str, dict[str, Any]]:
    """Return for each split: items, clusters (null: independent or unknown), as many independent items, points (null: none visible)."""
    task, found = load_task(science.task, root=root).file, {}
    for split in map(Split, science.splits):
        try:
            items = asked_items(root, science, split, task) if task.cluster_field else []
        except AutorlError:
            items = []
        named = Counter(str(item.data.get(str(task.cluster_field), f"item {item.id}")) for item in items)
        sizes = list(named.values()) if len(named) < len(items) else []
        counted = visible_of_clusters(sizes) if sizes else science.asked(split)
        gain = smallest_visible_gain(counted)
        found[str(split)] = {
            "items": science.asked(split),
            "clusters": len(sizes) or None,
            "independent_items": counted,
            "points": None if gain is None else round(gain, 1),
        }
    return found


def visible_line(task: str, splits: dict[str, dict[str, Any]]) -> str:
    """Return the visible gains of a task as a line for people."""
    told = []
    for split, facts in splits.items():
        shown = "none (too few items)" if facts["points"] is None else f"{facts['points']} points"
        if facts["clusters"] is not None:
            shown += f" ({facts['items']} items in {facts['clusters']} clusters show as much as {facts['independent_items']})"
        told.append(f"{split} {shown}")
    return f"smallest gain that one run on {task} can show (80 % power): {', '.join(told)}"


ARTIFACTS_PER_RUN = 4  # estimate of the accepted checkpoints that a run stores at once, until it is closed
WORKSPACE_COPIES = 6  # estimate of checkpoints and optimizer states in a run's scratch, in sizes of the base model


def describe(plan: Plan, path: Path) -> dict[str, Any]:
    """Return the plan as data for people and programs. `path`: the experiment's file."""
    spec = plan.spec
    root = plan.root
    folders = {name: root.model(name).iterdir() for name in spec.matrix.base_model}
    sizes = {name: sum(path.stat().st_size for path in files if path.is_file()) for name, files in folders.items()}
    gpus = None if plan.cluster is None else plan.cluster.agent.resources(spec.resources.agent).gpus or 0
    states = {cell.run_id: "new" for cell in plan.new} | dict.fromkeys(plan.finished, "finished")
    hours = sum(cell.science.budget.wall_clock_s for cell in plan.cells) / 3600
    kept = min(ARTIFACTS_PER_RUN, spec.budget.max_submissions or ARTIFACTS_PER_RUN)
    visible = {
        task: visible_gains(root, next(cell.science for cell in plan.cells if cell.science.task == task))
        for task in spec.matrix.task
    }
    disk = sum(sizes[cell.science.base_model] * (kept + WORKSPACE_COPIES) for cell in plan.cells)
    least_hours = math.ceil(len(plan.cells) / spec.parallel) * spec.budget.wall_clock_s / 3600
    calls = Counter(cell.science.driver for cell in plan.cells)
    return {
        "experiment": str(plan.experiment.path),
        "protocol": str(spec.protocol),
        "runs": [{"run_id": cell.run_id, "state": states.get(cell.run_id, "to resume")} for cell in plan.cells],
        "cluster": plan.cluster.name if plan.cluster else "local",
        "jobs": _jobs(plan, path),
        "agent_hours": round(hours, 2),
        "wall_clock_hours_at_least": round(hours / min(spec.parallel, len(plan.cells)), 2),
        "agent_gpu_hours": None if gpus is None else round(hours * gpus, 2),
        "drivers": drivers.facts(spec, plan.cluster, calls, least_hours),
        "driver_notes": drivers.notes(spec),
        "disk_peak_bytes_estimate": disk,
        "max_submissions": spec.budget.max_submissions,
        "sandbox": {"level": spec.sandbox.level, "network": sorted({str(cell.science.network) for cell in plan.cells})},
        "agents_ask_for": {name: load_agent(name).asks_for() for name in spec.matrix.agent},
        "agents": [asdict(looked) for looked in look_at_agents(root, spec, plan.cells, plan.cluster)],
        "engine": None if (seen := look_at_engine(spec, plan.cluster)) is None else asdict(seen),
        "graders_need": expand.lines(spec, plan.cells),
        "smallest_visible_gain_points": {
            task: {split: facts["points"] for split, facts in splits.items()} for task, splits in visible.items()
        },
        "smallest_visible_gain": visible,
    }


def _jobs(plan: Plan, path: Path) -> list[dict[str, Any]]:
    """Return every script as sbatch will get it, except for job ids; on this machine the commands as submitit will start them."""
    if plan.cluster is not None:
        from autorl_hpc.launch.sbatch import dry_scripts

        return list(dry_scripts(plan.experiment, would_be(plan, path), plan.cluster))
    grader = plan.spec.grader
    rows: list[tuple[str, str, dict[str, int]]] = [
        ("agents", "array", {"at_once": plan.spec.parallel}),
        *((f"grader-{i}", "chain", {"chain": grader.chain}) for i in range(grader.count)),
        ("report", "report", {}),
    ]
    start = "python -m autorl_hpc job"
    return [{"role": role, "command": f"{start} {job} {plan.experiment.path}", **more} for role, job, more in rows]


def as_text(facts: dict[str, Any]) -> str:
    """Return the description as text for people."""
    lines = [f"experiment {facts['experiment']}, protocol {facts['protocol']}, {len(facts['runs'])} runs"]
    lines += [f"  {row['state']:<9}  {row['run_id']}" for row in facts["runs"]]
    lines.append("jobs")
    for row in facts["jobs"]:
        if "command" in row:
            lines.append(f"  {row['role']:<9}  {row['command']}")
        else:
            lines += ["", f"----- {row['name']}", row["script"].rstrip()]
    if facts["cluster"] != "local":
        lines += ["", f"{len(facts['jobs'])} calls of sbatch on cluster {facts['cluster']}"]
    most, least = facts["agent_hours"], facts["wall_clock_hours_at_least"]
    lines.append(f"agents use at most {most} h of wall clock, at least {least} h from start to end")
    if facts["agent_gpu_hours"]:
        lines.append(f"agents' jobs use at most {facts['agent_gpu_hours']} GPU-hours of these budgets")
    lines += [*drivers.lines(facts["drivers"]), *facts["driver_notes"]]
    lines.append(f"disk peak about {facts['disk_peak_bytes_estimate'] / 2**30:.2f} GiB (estimate)")
    level, network = facts["sandbox"]["level"], ", ".join(facts["sandbox"]["network"])
    strongest = "the strongest sandbox that works on their node" if level == "auto" else f"sandbox level {level}"
    lines.append(f"agents run in {strongest}, network: {network}")
    if facts["max_submissions"] is not None:
        lines.append(f"at most {facts['max_submissions']} checkpoints of different content are accepted in each run")
    for task, splits in facts["smallest_visible_gain"].items():
        lines.append(visible_line(task, splits))
    lines += [f"agent {name} {'; '.join(asked)}" for name, asked in facts["agents_ask_for"].items() if asked]
    engine = None if facts["engine"] is None else VllmOnHost(**facts["engine"])
    lines += finding_lines([Looked(**row) for row in facts["agents"]], engine)
    lines += facts["graders_need"]
    lines.append("nothing was started")
    return "\n".join(lines)
