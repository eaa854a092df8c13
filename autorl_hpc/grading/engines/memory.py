"""How much memory this process may use: on a cluster less than the machine has. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from autorl_hpc.rollouts.cores import CGROUPS, own_folders

OWN = Path("/proc/self/cgroup")
LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Of both versions of control groups."""


def usable_bytes(cgroups: Path = CGROUPS, own: Path = OWN, environ: Mapping[str, str] = os.environ) -> int:
    """The least of the machine's memory, of what each cgroup that this process is in may use, and of the job's on this node."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in own_folders("memory", cgroups, own):
        for name in LIMITS:
            try:
                found.append(int((folder / name).read_text(encoding="ascii")))
            except (OSError, ValueError):  # not there, or `max`
                continue
    each_cpu, cpus = _number(environ, "SLURM_MEM_PER_CPU"), _number(environ, "SLURM_CPUS_ON_NODE")
    found += [mib * 2**20 for mib in (_number(environ, "SLURM_MEM_PER_NODE"), each_cpu * cpus)]
    return min(size for size in found if size > 0)


def _number(environ: Mapping[str, str], name: str) -> int:
    """0 where it is not there or no number; Slurm's own 0 is all of the node."""
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else 0
