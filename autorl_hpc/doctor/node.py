"""What a job sees on its node; runs there under the Python that jobs use.

    python -m autorl_hpc.doctor.node OUT.json GPUS FOLDER ...

Imports nothing but the standard library before it has looked whether the rest is there.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

from autorl_hpc.doctor import host, storage
from autorl_hpc.doctor.finding import Check, Finding, examine, ok, problem

NAMES = ("root", "scratch")
"""Of the folders that are given, in their order."""


def folder_seen(name: str, path: Path) -> Finding:
    """A folder of the suite, from the node."""
    if not path.is_dir():
        so_what = "jobs find nothing of what they need, or make a workspace that nobody else sees"
        return problem(name, f"{path} is not on this node", so_what, "give a folder that all nodes share")
    if not os.access(path, os.W_OK | os.X_OK):
        value = f"{path} may not be written to from this node"
        return problem(name, value, "jobs can't record anything", "mount it for writing")
    mount = storage.mount_of(path)
    return ok(name, f"{path} is there ({mount.told if mount else 'unknown kind'})")


def checks(asked: int, folders: list[Path]) -> list[Check]:
    """What is looked at in a job."""
    env = os.environ
    return [
        Check("Python", host.python),
        Check("GPUs", lambda: host.check_gpus(env, asked), 40.0),
        *(Check(name, partial(folder_seen, name, path)) for name, path in zip(NAMES, folders, strict=False)),
        Check("temporary folders", lambda: storage.temporaries(env)),
        Check("memory and CPUs", host.memory),
        Check("open files", host.open_files),
        Check("control groups", host.control_groups),
        Check("sandbox", lambda: host.check_sandbox()[1:], 60.0),
        Check("offline", lambda: host.offline(env)),
        Check("packages", host.imports, 60.0),
    ]


def main(out: str, asked: str, *folders: str) -> int:
    """Writes the findings, whole, by rename."""
    found = examine("", checks(int(asked), [Path(folder) for folder in folders]))
    temporary = f"{out}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump([finding.as_json() for finding in found], file)
    os.rename(temporary, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
