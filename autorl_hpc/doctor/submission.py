"""What the doctor's own jobs ask for and run: worded as the profile words real ones, submitted by one function."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.cluster import commands
from autorl_hpc.cluster.programs import ask
from autorl_hpc.cluster.site import habit
from autorl_hpc.cluster.wording import gpu_options, module_lines, with_variables
from autorl_hpc.files.secrets import without_secrets
from autorl_hpc.files.share import PACKAGE
from autorl_hpc.records.cluster import ClusterProfile, JobKind

SUBMIT_LIMIT_S = 60.0
SHORT_MINUTES = 8
"""Of a probe's job: what a pair may take at most, with a wait for its partner."""

OURS = {"job-name", "output", "error", "time", "array", "dependency", "comment", "signal", "mail-type", "mail-user"}
OURS |= {"parsable", "test-only", "wait", "requeue", "no-requeue", "hold", "begin", "open-mode", "chdir", "wrap"}
"""Options of a profile that a probe sets itself, or that would change what it is."""


@dataclass(frozen=True)
class Request:
    """What a job asks for.

    Attributes:
        kind: of the profile's jobs; its GPUs, CPUs and memory are asked for as they stand.
    """

    profile: ClusterProfile | None
    kind: JobKind
    minutes: int = SHORT_MINUTES
    exclude: str | None = None

    def options(self) -> list[str]:
        """For sbatch, without name and output."""
        profile, kind = self.profile, self.kind
        options = [f"--time={self.minutes}", "--no-requeue", "--open-mode=append"]
        for field in ("partition", "account", "qos", "constraint", "reservation"):
            value = getattr(kind, field) or (getattr(profile, field) if profile else None) or habit(field)
            options += [f"--{field}={value}"] if value else []
        options += [f"--cpus-per-task={kind.cpus}"] if kind.cpus else []
        options += [f"--mem={kind.memory}"] if kind.memory else []
        options += [f"--exclude={self.exclude}"] if self.exclude else []
        gpus = [f"--{name}={value}" for name, value in gpu_options(profile, kind).items()]
        return [*options, *gpus, *self._further()]

    def describe(self) -> str:
        """Such as `1 GPU, 1 CPU, 8 min in gpu`."""
        kind, profile = self.kind, self.profile
        where = kind.partition or (profile.partition if profile else None) or habit("partition")
        counts = [(kind.gpus, "GPU"), (kind.cpus, "CPU")]
        parts = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
        return ", ".join([*parts, f"{self.minutes} min"]) + f" in {where or 'the default partition'}"

    def _further(self) -> list[str]:
        given = {**(self.profile.sbatch if self.profile else {}), **self.kind.sbatch}
        kept = {name: value for name, value in given.items() if name not in OURS and value is not False}
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in kept.items()]


def sbatch(script: str, options: Sequence[str]) -> tuple[str, str]:
    """What sbatch prints and what it says beside that; the script is its input.

    Raises:
        SchedulerError: it refused, is not here, or did not answer.
    """
    env = without_secrets(commands.without_scheduler(os.environ))
    env.pop("PYTHONPATH", None)
    answer = ask(["sbatch", "--parsable", *options], env={**env, "LC_ALL": "C"}, limit_s=SUBMIT_LIMIT_S, given=script)
    if answer.code != 0:
        words = re.sub(r"(?m)^(sbatch: (error: )?|allocation failure: )", "", answer.err or answer.out)
        raise commands.failed("sbatch", words)
    return answer.out.strip(), answer.err.strip()


def script(profile: ClusterProfile | None, folder: Path, side: str, gpus: int, folders: Sequence[Path]) -> str:
    """The job of one side: a real job's modules, setup and Python; first what the node shows, beside it the pair."""
    place = shlex.quote(str(folder))
    lines = ["#!/bin/bash", *module_lines(profile)]
    lines += profile.setup if profile is not None else ()
    code = shlex.quote(str(PACKAGE.parent))
    if profile is not None and profile.container is None and (profile.modules or profile.setup):
        code += "${PYTHONPATH:+:$PYTHONPATH}"
    lines += [f"export PYTHONPATH={code} PYTHONDONTWRITEBYTECODE=1", f"cd {place} || exit"]
    seen = " ".join(shlex.quote(str(path)) for path in (folder.parent, *folders))
    lines += [
        f'run() {{ {_python(profile, [folder.parent, *folders])} "$@"; }}',
        f"run -c '' 2>python-{side}.log || {{ echo >fallback-{side}; run() {{ python3 \"$@\"; }}; }}",
        f"run -m autorl_hpc.doctor.node {place}/node-{side}.json {gpus} {seen} >node-{side}.log 2>&1 &",
        f"run pair.py {place} {side}",
    ]
    return "\n".join([*lines, "wait", ""])


def _python(profile: ClusterProfile | None, folders: Sequence[Path]) -> str:
    if profile is None or (profile.container is None and profile.python is None):
        return shlex.quote(sys.executable)
    if profile.container is None:
        return with_variables(profile.python or "")
    container = profile.container
    words = [*container.options, *(f"--bind={folder}" for folder in folders)]
    options = " ".join(shlex.quote(word) for word in words)
    return f"{container.runtime} exec {options} {with_variables(container.image)} {shlex.quote(container.python)}"


def cancel(name: str) -> None:
    """Whatever runs or waits under this name of ours: also a job whose number sbatch never told.

    Raises:
        SchedulerError: the scheduler doesn't answer.
    """
    commands.run(["scancel", f"--name={name}", f"--user={os.geteuid()}"])
