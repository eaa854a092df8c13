"""`autorl-hpc init`: write a commented experiment and, for a Slurm cluster, a profile filled in from what the cluster says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from autorl_hpc.errors import AutorlError

SCHEMA_LINE = "# yaml-language-server: $schema={schema}\n"

EXPERIMENT = """\
# Fields: docs/experiments.md. Next: autorl-hpc stage {stage}; autorl-hpc launch {file} --dry-run
name: {name}
description: {what}
matrix:
  task: {task}            # autorl-hpc list tasks
  agent: {agent}          # autorl-hpc list agents; [a, b] compares two
  base_model: {model}     # autorl-hpc list models
  seed: [0, 1, 2]         # three runs are the least that gives an interval and a rank
budget:
  wall_clock: {budget}    # time the agent runs; queue time does not count
cluster: {cluster}        # local: this machine; else jobs/clusters/NAME.yaml
{driver}"""

DRIVER = """\
drivers:                  # the LLM that the agent calls: docs/drivers.md
  llm:
    kind: api             # or vllm: a model that a job of this experiment serves
    url: https://api.example.org/v1
    model: MODEL
    key_file: ~/.config/autorl-hpc/llm.key   # the key alone, chmod 600
"""

PROFILE = """\
# Fields: docs/clusters.md. Next: autorl-hpc doctor --cluster {name}
name: {name}
{partition}
# account: PROJECT        # sacctmgr show assoc user=$USER format=account,partition,qos
{gpus}
# modules: [cuda/12.4]    # loaded first in each job
# scratch: $SCRATCH/autorl  # workspaces; a folder that every node sees
{limit}
agent: {{gpus: {n_gpus}, cpus: 8, memory: 64G}}
grader: {{gpus: {n_gpus}, cpus: 8, memory: 64G}}
"""


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write (default: here).")] = Path("."),
    task: Annotated[str | None, typer.Option(help="A task: `autorl-hpc list tasks`.")] = None,
    agent: Annotated[str | None, typer.Option(help="An agent: `autorl-hpc list agents`.")] = None,
    model: Annotated[str | None, typer.Option(help="A base model, staged or ORG/NAME.")] = None,
    budget: Annotated[str | None, typer.Option(help="Time of the agent, such as 30m or 4h.")] = None,
    cluster: Annotated[str | None, typer.Option(help="`local`, or a name for this Slurm cluster's profile.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the experiment (default: TASK-AGENT).")] = None,
) -> None:
    """Write a commented experiment, and a profile of this cluster. Asks for what is not given, if there is a terminal.

    Example: autorl-hpc init --task gsm8k --agent sft-grpo --model SmolLM2-135M-Instruct --budget 4h --cluster mine
    """
    from autorl_hpc.agents.definition import agent_names, load_agent
    from autorl_hpc.cluster.profile import profile_names
    from autorl_hpc.files.reading import parse_yaml
    from autorl_hpc.records.base import parse_record
    from autorl_hpc.records.experiment import ExperimentSpec
    from autorl_hpc.tasks.loader import load_task, task_names

    task = load_task(_asked("task", task, task_names(), "arithmetic")).name
    chosen = load_agent(_asked("agent", agent, agent_names(), "sft"))
    model = _asked("base model", model, [], "autorl/tiny")
    budget = _asked("budget", budget, [], "30m")
    cluster = _asked("cluster", cluster, ["local", *profile_names()], "local")
    name = name or f"{task}-{chosen.name}"
    calls = chosen.file.driver is not None
    text = EXPERIMENT.format(
        **{"name": _scalar(name), "task": _scalar(task), "agent": _scalar(chosen.name), "model": _scalar(model)},
        **{"budget": budget, "cluster": _scalar(cluster)},
        what=f"{chosen.name} on {task}",
        stage=f"{task} {model}",
        file=f"jobs/{name}.yaml",
        driver=DRIVER if calls else "",
    )
    if calls:
        text = text.replace("  seed:", "  driver: llm\n  seed:")
    path = folder / "jobs" / f"{name}.yaml"
    parse_record(ExperimentSpec, parse_yaml(text.encode(), path), path, next_step="correct that option")
    _write(path, "ExperimentSpec", text)
    if cluster != "local" and cluster not in profile_names():
        _write(folder / "jobs" / "clusters" / f"{cluster}.yaml", "ClusterProfile", _profile(cluster))


def _scalar(text: str) -> str:
    """Return a text as YAML reads it again: `null` is an agent's name."""
    return json.dumps(text) if text.lower() in ("null", "true", "false", "yes", "no", "on", "off", "~") else text


def _asked(what: str, given: str | None, known: list[str], default: str) -> str:
    if given is not None:
        return given
    if not sys.stdin.isatty():
        return default
    if known:
        typer.echo(f"{what}: {', '.join(known)}", err=True)
    return str(typer.prompt(what, default=default, err=True))


def _profile(name: str) -> str:
    """Return a profile with the partition, limit and GPUs that Slurm names here; placeholders where it does not answer."""
    from autorl_hpc.cluster import slurm
    from autorl_hpc.cluster.profile import partitions

    partition, limit, gpus, n_gpus = "# partition: gpu", "# limits: {max_time: 24h}", "gpu_wording: gres", 1
    try:
        known = partitions()
        told = (line.split(maxsplit=1) for line in slurm.run(["sinfo", "--noheader", "-o", "%R %G"]).splitlines())
        kinds = {name: gres for name, each in told for gres in each.split(",") if gres.startswith("gpu")}
    except (AutorlError, OSError, ValueError):
        typer.echo("Slurm does not answer here: fill in partition and GPUs yourself", err=True)
        return PROFILE.format(name=name, partition=partition, limit=limit, gpus=gpus, n_gpus=n_gpus)
    with_gpus = [one for one in known if one in kinds]
    default = next((one for one, (_, first) in known.items() if first), next(iter(known), "gpu"))
    chosen = default if default in with_gpus or not with_gpus else with_gpus[0]
    partition = f"partition: {chosen}   # others: {', '.join(one for one in known if one != chosen) or 'none'}"
    parts = kinds.get(chosen, "").split("(")[0].split(":")
    if parts[0] != "gpu":
        gpus, n_gpus = "gpu_wording: none   # this partition names no GPUs", 0
    elif len(parts) == 3:  # gpu:TYPE:COUNT
        gpus += f"\n# gpu_type: {parts[1]}   # {parts[2]} a node"
    longest = known[chosen][0] if chosen in known else None
    limit = f"# longest job of {chosen}: {'no limit' if longest is None else f'{longest / 3600:g} h'}\n{limit}"
    return PROFILE.format(name=name, partition=partition, limit=limit, gpus=gpus, n_gpus=n_gpus)


def _write(path: Path, schema: str, text: str) -> None:
    from autorl_hpc.files.layout import share

    if path.exists():
        raise AutorlError("this file exists", where=path, next_step="choose another --name, or edit the file")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SCHEMA_LINE.format(schema=share("docs") / "schemas" / f"{schema}.json") + text, encoding="utf-8")
    typer.echo(str(path))
