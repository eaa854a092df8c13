"""Cluster profiles (jobs/clusters/<name>.yaml): find and read them, query the site's limits, write bash lines and options."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.slurm import duration_s
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import share
from autorl_hpc.files.reading import read_yaml
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.cluster import ClusterProfile, JobKind
from autorl_hpc.states import Fault

PATH_VARIABLE = "AUTORL_CLUSTERS_PATH"
SUFFIX = ".yaml"


def profile_folders() -> list[Path]:
    """Return the folders with profiles: $AUTORL_CLUSTERS_PATH, jobs/clusters/ here, and the shipped ones."""
    extra = [Path(part).absolute() for part in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if part]
    return [*extra, Path("jobs/clusters").absolute(), share("jobs") / "clusters"]


def profile_names() -> list[str]:
    return sorted({path.stem for folder in profile_folders() for path in folder.glob(f"*{SUFFIX}")})


def profile_path(name: str) -> Path:
    """Return the file of a profile, by its name or path. Raises AutorlError if there is no profile of that name."""
    if name.endswith(SUFFIX) or os.sep in name:
        return Path(name).absolute()
    path = next((f / f"{name}{SUFFIX}" for f in profile_folders() if (f / f"{name}{SUFFIX}").is_file()), None)
    if path is None:
        advice = f"choose one of: {', '.join(profile_names())}; or put yours into jobs/clusters/ or ${PATH_VARIABLE}"
        where = share("jobs") / "clusters"
        raise AutorlError(f"there is no cluster profile `{name}`", where=where, next_step=advice)
    return path


def load_profile(name: str) -> ClusterProfile:
    """Read a profile, by its name or path. Raises AutorlError if there is none, or it is wrong; the error names the field."""
    path = profile_path(name)
    profile = parse_record(ClusterProfile, read_yaml(path), path, next_step="see docs/clusters.md for every field")
    if profile.name != path.stem:
        what = f"field `name`: the profile in {path.name} calls itself `{profile.name}`"
        raise AutorlError(what, where=path, next_step=f"name it {path.stem}, as its file")
    return profile


def scratch_folder(profile: ClusterProfile, where: str | Path) -> Path | None:
    """Return the folder for workspaces, its variables expanded here: every attempt must find the same one. Raises AutorlError."""
    if profile.scratch is None:
        return None
    path = os.path.expanduser(os.path.expandvars(profile.scratch))
    if unset := re.search(r"\$\{?(\w+)", path):
        advice = "use a variable of the login node, or a path: every node must find the workspace at the same path "
        advice += "(a job's own $TMPDIR is gone when the job is put back in line)"
        raise AutorlError(f"field `scratch`: ${unset[1]} is not set on this host", where=where, next_step=advice)
    if not os.path.isabs(path):
        what = f"field `scratch`: {path} is not an absolute path"
        raise AutorlError(what, where=where, next_step="begin it with / or a variable")
    return Path(path)


# --- limits of the Slurm site

DEFAULT_MAX_ARRAY_SIZE = 1001  # Slurm's own default, used if the site can't be queried
HABITS = {"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS"}
"""The user's sbatch defaults, used where the profile sets nothing. (sbatch itself gives them precedence over the script.)"""


def habit(option: str) -> str | None:
    """Return the user's default of a field; the submitting process has it under another name."""
    name = HABITS.get(option, "")
    value = os.environ.get(f"AUTORL_{name}") or os.environ.get(name)
    return value if value and value.isprintable() else None  # it becomes part of one script line


@dataclass(frozen=True)
class Site:
    """Limits of a site for planning jobs."""

    max_array_size: int = DEFAULT_MAX_ARRAY_SIZE  # one more than the highest index
    max_time_s: dict[str | None, float] = field(default_factory=dict)
    """Of one job, by partition name (None for the default partition); absent if no limit is known."""

    def limit_s(self, partition: str | None) -> float | None:
        """Return the longest job of a partition; of several (`a,b`) the shortest limit; None if unknown."""
        names = partition.split(",") if partition else [None]
        return min((self.max_time_s[name] for name in names if name in self.max_time_s), default=None)


def ask(profile: ClusterProfile) -> Site:
    """Query the scheduler's limits; the profile's own come first. Raises SchedulerError: no answer; AutorlError: no such partition."""
    told = config().get("MaxArraySize", "")
    size = profile.limits.max_array_size or (int(told) if told.isdigit() else 0) or DEFAULT_MAX_ARRAY_SIZE
    known = partitions()
    named = [kind.partition or profile.partition or "" for kind in (profile.agent, profile.grader, profile.report)]
    unknown = [name for part in named for name in part.split(",") if name and known and name not in known]
    if unknown:
        what, advice = f"this cluster has no partition `{unknown[0]}`", f"choose one of: {', '.join(known)}"
        raise AutorlError(f"field `partition`: {what}", where=profile.name, fault=Fault.CLUSTER, next_step=advice)
    times: dict[str | None, float] = {}
    for name, (limit_s, _) in known.items():
        bounds = [bound for bound in (limit_s, profile.limits.max_time) if bound is not None]
        times |= {name: min(bounds)} if bounds else {}
    default = habit("partition") or ",".join(name for name, (_, default) in known.items() if default)
    limit_s = Site(size, times).limit_s(default) if default else None  # jobs go there if the profile names none
    return Site(size, times if limit_s is None else {**times, None: limit_s})


def config() -> dict[str, str]:
    """Return the fields of `scontrol show config`."""
    pairs = (line.partition("=") for line in slurm.run(["scontrol", "show", "config"]).splitlines())
    return {key.strip(): value.strip() for key, sign, value in pairs if sign}


def partitions() -> dict[str, tuple[float | None, bool]]:
    """Return, by partition, the longest time in seconds (None for no limit) and whether it is the default."""
    text = slurm.run(["scontrol", "--oneliner", "show", "partition"])
    found = [words for words in map(slurm.key_values, text.splitlines()) if "PartitionName" in words]
    return {w["PartitionName"]: (duration_s(w.get("MaxTime", "")), w.get("Default") == "YES") for w in found}


# --- bash lines and sbatch options of a profile, for real jobs and for the doctor's


def with_variables(text: str) -> str:
    """Quote `text` for the job's shell, which expands $NAME, ${NAME} and a leading ~/, and nothing else."""
    if text.startswith("~/"):
        text = "$HOME" + text[1:]
    variable = r"\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*\})"
    quoted = re.sub(variable + r'|[\\"`$]', lambda m: m[0] if len(m[0]) > 1 else "\\" + m[0], text)
    return f'"{quoted}"'


def python_command(profile: ClusterProfile, folders: Iterable[str]) -> str:
    """Return the Python of jobs as bash words; a container's with these folders bound. The profile's $VARS are expanded in the job."""
    if profile.container is None:
        return with_variables(profile.python) if profile.python else shlex.quote(sys.executable)
    container = profile.container
    options = shlex.join([*container.options, *(f"--bind={folder}" for folder in folders)])
    return f"{container.runtime} exec {options} {with_variables(container.image)} {shlex.quote(container.python)}"


def gpu_options(profile: ClusterProfile, kind: JobKind) -> dict[str, str]:
    """Return the sbatch option for a job's GPUs with its value; empty if it has none."""
    wording = profile.gpu_wording
    if not kind.gpus or wording == "none":
        return {}
    typed = ":".join(part for part in (kind.gpu_type or profile.gpu_type, str(kind.gpus)) if part)
    return {"gres": f"gpu:{typed}"} if wording == "gres" else {wording: typed}


def module_lines(profile: ClusterProfile | None) -> list[str]:
    """Return bash lines that load the profile's modules. Batch scripts are no login shells and may not know `module`."""
    if profile is None or not profile.modules:
        return []
    names = [name for line in profile.modules for name in line.split()]
    return [
        "command -v module >/dev/null || source /etc/profile",
        *(f"module load {shlex.quote(name)}" for name in names),
    ]
