"""The watches over what an agent does. Each may be made and looked at in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder.gpus import NvmlGpus
from autorl_hpc.recorder.output import OutputStamps
from autorl_hpc.recorder.processes import Processes
from autorl_hpc.recorder.sweep import Sweep
from autorl_hpc.recorder.table import ProcessTable
from autorl_hpc.recorder.trainings import Trainings
from autorl_hpc.recorder.usage import Usage
from autorl_hpc.recorder.watch import Watch


def observers(
    run: RunDir, workspace: Path, agent_log: Path, keeper_pid: int, mark: str, environment: Mapping[str, str]
) -> dict[str, Callable[[], Watch]]:
    """By name, what makes the watches over the agent's output, use, processes and trainings; nothing is opened before.

    Args:
        keeper_pid: whose descendants are the agent's.
        mark: of the agent's processes, in their environment.
        environment: of the job: which GPUs are the agent's.
    """
    table = ProcessTable(keeper_pid, mark)
    sweep = Sweep(workspace, run.events)
    return {
        "output": lambda: OutputStamps(agent_log, run.agent_times),
        "usage": lambda: Usage(table, sweep, NvmlGpus(environment), run.recorded("usage")),
        "processes": lambda: Processes(table, run.recorded("processes"), run.events),
        "workspace": lambda: sweep,
        "trainings": lambda: Trainings(agent_log, sweep, run.recorded("training"), run.events),
    }
