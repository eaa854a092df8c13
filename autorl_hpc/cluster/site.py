"""What a Slurm site allows, as it tells itself."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from autorl_hpc.cluster import commands
from autorl_hpc.cluster.look import duration_s
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.states import Fault

DEFAULT_MAX_ARRAY_SIZE = 1001
"""Slurm's own default: where nothing can be asked, nothing larger is risked."""

HABITS = {"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS"}
"""A user's own defaults of sbatch, which stand where the profile says nothing. sbatch itself would put them above the script."""


def habit(field: str) -> str | None:
    """The user's own default of a field; in the submitting process it stands under another name."""
    name = HABITS.get(field, "")
    value = os.environ.get(f"AUTORL_{name}") or os.environ.get(name)
    return value if value and value.isprintable() else None  # it goes into one line of a script


@dataclass(frozen=True)
class Site:
    """What counts for emitting jobs.

    Attributes:
        max_array_size: one more than the highest index.
        max_time_s: of one job, by partition name (None: the default partition); absent: no limit is known.
    """

    max_array_size: int = DEFAULT_MAX_ARRAY_SIZE
    max_time_s: dict[str | None, float] | None = None

    def limit_s(self, partition: str | None) -> float | None:
        """The longest job of a partition (of several, `a,b`: the shortest of theirs)."""
        times = self.max_time_s or {}
        found = [times[name] for name in (partition or "").split(",") if name in times] if partition else []
        if partition is None and None in times:
            found = [times[None]]
        return min(found, default=None)


def ask(profile: ClusterProfile) -> Site:
    """Asks the scheduler; the profile's own limits stand above what it says.

    Raises:
        SchedulerError: it doesn't answer.
        AutorlError: the profile names a partition that is not there.
    """
    size = profile.limits.max_array_size or max_array_size()
    times: dict[str | None, float] = {}
    known = partitions()
    for kind in (profile.agent, profile.grader, profile.report):
        for name in (kind.partition or profile.partition or "").split(","):
            if name and known and name not in known:
                raise AutorlError(
                    f"field `partition`: this cluster has no partition `{name}`",
                    where=profile.name,
                    fault=Fault.CLUSTER,
                    next_step=f"choose one of: {', '.join(known)}",
                    exit_code=Exit.USAGE,
                )
    for name, (limit_s, default) in known.items():
        bounds = [bound for bound in (limit_s, profile.limits.max_time) if bound is not None]
        if bounds:
            times[name] = min(bounds)
            if default:
                times[None] = times[name]
    own = habit("partition")
    if own:  # where the profile names none, jobs go there
        times.pop(None, None)
        limit_s = Site(size, times).limit_s(own)
        if limit_s is not None:
            times[None] = limit_s
    return Site(size, times)


def config() -> dict[str, str]:
    """`scontrol show config`."""
    pairs = (line.partition("=") for line in commands.run(["scontrol", "show", "config"]).splitlines())
    return {key.strip(): value.strip() for key, sign, value in pairs if sign}


def max_array_size() -> int:
    """MaxArraySize of the cluster."""
    value = config().get("MaxArraySize", "")
    return int(value) if value.isdigit() and int(value) > 0 else DEFAULT_MAX_ARRAY_SIZE


def partitions() -> dict[str, tuple[float | None, bool]]:
    """Each partition's longest time (None: no limit) and whether it is the default."""
    found: dict[str, tuple[float | None, bool]] = {}
    for line in commands.run(["scontrol", "--oneliner", "show", "partition"]).splitlines():
        name = re.search(r"PartitionName=(\S+)", line)
        limit = re.search(r"\bMaxTime=(\S+)", line)
        if name:
            found[name[1]] = (duration_s(limit[1]) if limit else None, " Default=YES" in line)
    return found
