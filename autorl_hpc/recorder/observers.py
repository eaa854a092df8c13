"""The watches over what an agent does, in the order in which they are looked at and closed."""

from __future__ import annotations

from collections.abc import Mapping
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
) -> list[Watch]:
    """Watches over the agent's output, use, processes and trainings.

    Args:
        keeper_pid: whose descendants are the agent's.
        mark: of the agent's processes, in their environment.
        environment: of the job: which GPUs are the agent's.
    """
    table = ProcessTable(keeper_pid, mark)
    sweep = Sweep(workspace)
    return [
        OutputStamps(agent_log, run.agent_times),
        Usage(table, sweep, NvmlGpus(environment), run.recorded("usage")),
        Processes(table, run.recorded("processes"), run.events),
        sweep,
        Trainings(agent_log, sweep, run.recorded("training"), run.events),
    ]
