"""How many CPU cores this process may use: on a cluster fewer than the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the cores that the scheduler may run this process on, or fewer if a cgroup's CPU quota is smaller."""
    quotas = [_quota(folder) for folder in own_folders("cpu", cgroups, own)]
    return max(1, min(len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in quotas if quota), 1 << 20))


def own_folders(controller: str, cgroups: Path, own: Path) -> list[Path]:
    """Return the folders of the cgroups with that controller (v1 and v2) that this process is in, up to the root."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError):
        return []
    found = []
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        root = cgroups / controllers if controllers else cgroups
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / path.lstrip("/")
        for each in (folder, *folder.parents):
            found.append(each)
            if each == root:
                break
    return found


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            given, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            given = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        return int(given) / int(period) if given.strip() != "max" and int(given) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
