"""The environment in which jobs are submitted and start."""

from __future__ import annotations

import os

from autorl_hpc.agents import PATH_VARIABLE as AGENTS_PATH
from autorl_hpc.agents import load_agent
from autorl_hpc.cluster.commands import without_scheduler
from autorl_hpc.cluster.site import HABITS
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.secrets import without_secrets
from autorl_hpc.records.run import ExperimentRecord
from autorl_hpc.tasks.loader import PATH_VARIABLE as TASKS_PATH

OF_A_JOB = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "TMPDIR")
"""What Slurm sets for a job besides SLURM_*."""


def job_environment(experiment: ExperimentDir, record: ExperimentRecord) -> dict[str, str]:
    """This environment with the frozen code in it, and without what a surrounding job left; of secrets only those that the
    experiment's agents name."""
    outer = without_scheduler(os.environ)
    env = without_secrets(outer)  # other processes of the user can read what a job has in its environment
    env.update({name: outer[name] for name in _named_secrets(experiment, record) if name in outer})
    for name in HABITS.values():
        if name in os.environ:  # sbatch would put it above the script: the script says it where the profile doesn't
            env[f"AUTORL_{name}"] = os.environ[name]
    for name in (AGENTS_PATH, TASKS_PATH):  # the user's own folders were frozen with the rest
        env.pop(name, None)
    if "SLURM_JOB_ID" in os.environ:  # of the surrounding job alone
        for name in OF_A_JOB:
            env.pop(name, None)
    env["PYTHONPATH"] = str((experiment.code / record.code_hash).resolve())
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # compiled code would lie in the frozen folder, where no hash covers it
    env["AUTORL_ROOT"] = record.root
    if record.cluster is None:  # on a cluster the scheduler says which GPUs a job has
        env["AUTORL_CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    return env


def _named_secrets(experiment: ExperimentDir, record: ExperimentRecord) -> set[str]:
    frozen = experiment.code / record.code_hash / "templates" / "agents"
    folders = [frozen] if frozen.is_dir() else None  # nothing is frozen yet in a dry run
    return {name for agent in record.spec.matrix.agent for name in load_agent(agent, folders).file.secrets}
