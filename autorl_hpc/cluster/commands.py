"""Slurm's clients, called so that they can't hang the suite and don't obey a surrounding job's variables."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

from autorl_hpc.cluster.programs import ask
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.states import Fault

TIMEOUT_S = 30.0
"""A client waits 9 s for a controller that is gone (measured); a busy controller may take longer."""

PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SCONTROL_", "SACCT_", "SINFO_", "SCANCEL_")
"""Variables that change what a client does or prints, or that a surrounding job left behind."""

KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
"""Where the cluster is."""


class SchedulerError(AutorlError):
    """A client failed, or is not here. `what` holds the scheduler's own words."""


def without_scheduler(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what belongs to a surrounding job or to a person's habits of printing."""
    return {name: value for name, value in env.items() if not name.startswith(PREFIXES) or name in KEPT}


def available() -> bool:
    """Whether this host has Slurm's clients."""
    return all(shutil.which(name) is not None for name in ("sbatch", "squeue", "scancel", "scontrol"))


def run(argv: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> str:
    """What a client prints.

    Raises:
        SchedulerError: it is not here, failed, or did not answer in time.
    """
    env = {**without_scheduler(os.environ), "LC_ALL": "C", "SLURM_TIME_FORMAT": "%Y-%m-%dT%H:%M:%S"}
    answer = ask(argv, env=env, limit_s=timeout_s)
    if answer.missing:
        raise SchedulerError(
            f"there is no {argv[0]} on this host",
            fault=Fault.CLUSTER,
            next_step="run this on a login node of the cluster, or use `--cluster local`",
            exit_code=Exit.ENVIRONMENT,
        )
    if answer.code != 0:
        raise failed(argv[0], answer.err or answer.out)
    return answer.out


def failed(client: str, words: str) -> SchedulerError:
    """The scheduler's refusal, in its own words."""
    lines = [line.strip() for line in words.strip().splitlines() if line.strip()]
    return SchedulerError(
        f"{client}: {' | '.join(lines)[:1000] or 'it failed without a word'}",
        fault=Fault.CLUSTER,
        next_step=_advice(words),
        exit_code=Exit.ENVIRONMENT,
    )


ADVICE = (
    ("invalid account", "set `account` in the cluster's profile to one of yours: sacctmgr show assoc user=$USER"),
    ("invalid partition", "set `partition` in the cluster's profile to one that sinfo shows"),
    ("not permitted to use this partition", "set `partition` in the cluster's profile to one that you may use"),
    ("invalid qos", "set `qos` in the cluster's profile to one that your account has"),
    ("invalid feature", "set `constraint` in the cluster's profile to features that sinfo -o %f shows"),
    ("reservation is invalid", "set `reservation` in the profile to one that scontrol show reservation lists"),
    ("requested node configuration is not available", "ask for fewer GPUs, CPUs or less memory than one node has"),
    ("more processors requested than permitted", "ask for fewer CPUs than one node has"),
    ("memory specification", "ask for less memory than one node has"),
    ("invalid generic resource", "set `gpu_wording` and `gpu_type` in the profile as sinfo -o %G shows them"),
    ("requested time limit is invalid", "set `limits: {max_time: ...}` in the profile to what the partition allows"),
    ("invalid job array", "set `limits: {max_array_size: N}` in the profile to what scontrol show config says"),
    # Before a refusal by policy, the limit that was met stands in a line of its own.
    ("maxwall", "set `limits: {max_time: ...}` in the profile to MaxWall of your qos or account"),
    ("submitjob", "wait until some of your jobs have ended, or launch fewer runs at once"),
    ("maxjobs", "wait until some of your jobs have ended, or launch fewer runs at once"),
    ("maxgres", "ask for fewer GPUs a job: your qos or account has a limit"),
    ("pertres", "ask for fewer GPUs, CPUs or less memory a job: your qos or account has a limit"),
    ("job violates accounting/qos policy", "your account's limits forbid it: fewer jobs, shorter, or another qos"),
    ("unable to contact slurm controller", "the scheduler is down: the same command again, later"),
    ("socket timed out", "the scheduler is busy or down: the same command again, later"),
    (
        "establish a configuration source",
        "this host has no slurm.conf: go to a login node of the cluster, or set SLURM_CONF",
    ),
)
"""What sbatch is known to say, and what helps."""


def _advice(words: str) -> str:
    said = words.lower()
    return next((advice for part, advice in ADVICE if part in said), "see the scheduler's words")
