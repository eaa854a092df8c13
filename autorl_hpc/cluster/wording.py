"""How a profile's wording becomes lines of bash and options of sbatch: the same for real jobs and the doctor's."""

from __future__ import annotations

import re
import shlex

from autorl_hpc.records.cluster import ClusterProfile, JobKind


def with_variables(text: str) -> str:
    """`text` for the job's shell, which fills in $NAME and ${NAME}, takes ~/ for the home folder, and does nothing else."""
    if text.startswith("~/"):
        text = "$HOME" + text[1:]
    variable = r"\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*\})"
    quoted = re.sub(variable + r'|[\\"`$]', lambda m: m[0] if len(m[0]) > 1 else "\\" + m[0], text)
    return f'"{quoted}"'


def gpu_options(profile: ClusterProfile | None, kind: JobKind) -> dict[str, str]:
    """The option of sbatch that asks for a job's GPUs, with its value; none where none are asked for."""
    wording = profile.gpu_wording if profile else "gres"
    if not kind.gpus or wording == "none":
        return {}
    name = kind.gpu_type or (profile.gpu_type if profile else None)
    typed = ":".join(part for part in (name, str(kind.gpus)) if part)
    return {"gres": f"gpu:{typed}"} if wording == "gres" else {wording: typed}


def module_lines(profile: ClusterProfile | None) -> list[str]:
    """Bash that loads the profile's modules; batch scripts are no login shells and may not know `module`."""
    if profile is None or not profile.modules:
        return []
    names = [name for line in profile.modules for name in line.split()]
    return [
        "command -v module >/dev/null || source /etc/profile",
        *(f"module load {shlex.quote(name)}" for name in names),
    ]
