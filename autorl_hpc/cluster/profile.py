"""Finds and reads cluster profiles: jobs/clusters/<name>.yaml."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.slurm import duration_s
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import share
from autorl_hpc.files.reading import read_yaml
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.cluster import ClusterProfile, JobKind
from autorl_hpc.states import Fault

PATH_VARIABLE = "AUTORL_CLUSTERS_PATH"
SUFFIX = ".yaml"


def profile_folders() -> list[Path]:
    """Where profiles are looked for: $AUTORL_CLUSTERS_PATH, jobs/clusters/ here, those that ship."""
    extra = [Path(part).absolute() for part in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if part]
    return [*extra, Path("jobs/clusters").absolute(), share("jobs") / "clusters"]


def profile_names() -> list[str]:
    """Names of all profiles that can be found."""
    return sorted({path.stem for folder in profile_folders() for path in folder.glob(f"*{SUFFIX}")})


def profile_path(name: str) -> Path:
    """The file of the profile of that name, or that file.

    Raises:
        AutorlError: there is no profile of that name.
    """
    if name.endswith(SUFFIX) or os.sep in name:
        path: Path | None = Path(name).absolute()
    else:
        path = next((f / f"{name}{SUFFIX}" for f in profile_folders() if (f / f"{name}{SUFFIX}").is_file()), None)
    if path is None:
        near = get_close_matches(name, profile_names(), n=1)
        raise AutorlError(
            f"there is no cluster profile `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""),
            where=share("jobs") / "clusters",
            next_step=f"choose one of: {', '.join(profile_names())}; or put yours into jobs/clusters/ or ${PATH_VARIABLE}",
        )
    return path


def load_profile(name: str) -> ClusterProfile:
    """The profile of that name, or in that file.

    Raises:
        AutorlError: there is none, or it is wrong; the field is named.
    """
    path = profile_path(name)
    value = read_yaml(path)
    profile = parse_record(ClusterProfile, value, path, next_step="see docs/clusters.md for every field")
    if profile.name != path.stem:
        raise AutorlError(
            f"field `name`: the profile in {path.name} calls itself `{profile.name}`",
            where=path,
            next_step=f"name it {path.stem}, as its file",
        )
    return profile


def scratch_folder(profile: ClusterProfile, where: str | Path) -> Path | None:
    """The folder of the workspaces, its variables filled in now: each attempt of a run must find the same one.

    Raises:
        AutorlError: a variable is not set here, or the path is not absolute.
    """
    if profile.scratch is None:
        return None
    path = os.path.expanduser(os.path.expandvars(profile.scratch))
    unset = re.search(r"\$\{?(\w+)", path)
    if unset:
        raise AutorlError(
            f"field `scratch`: ${unset[1]} is not set on this host",
            where=where,
            next_step="use a variable of the login node, or a path: a workspace must lie where every node finds it again "
            "(a job's own $TMPDIR is gone when the job is put back in line)",
            exit_code=Exit.USAGE,
        )
    if not os.path.isabs(path):
        raise AutorlError(
            f"field `scratch`: {path} is no absolute path", where=where, next_step="begin it with / or a variable"
        )
    return Path(path)


# What a Slurm site allows, as it tells itself.

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
    pairs = (line.partition("=") for line in slurm.run(["scontrol", "show", "config"]).splitlines())
    return {key.strip(): value.strip() for key, sign, value in pairs if sign}


def max_array_size() -> int:
    """MaxArraySize of the cluster."""
    value = config().get("MaxArraySize", "")
    return int(value) if value.isdigit() and int(value) > 0 else DEFAULT_MAX_ARRAY_SIZE


def partitions() -> dict[str, tuple[float | None, bool]]:
    """Each partition's longest time (None: no limit) and whether it is the default."""
    found: dict[str, tuple[float | None, bool]] = {}
    for line in slurm.run(["scontrol", "--oneliner", "show", "partition"]).splitlines():
        name = re.search(r"PartitionName=(\S+)", line)
        limit = re.search(r"\bMaxTime=(\S+)", line)
        if name:
            found[name[1]] = (duration_s(limit[1]) if limit else None, " Default=YES" in line)
    return found


# How a profile's wording becomes lines of bash and options of sbatch: the same for real jobs and the doctor's.


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
