"""Finds and reads cluster profiles: jobs/clusters/<name>.yaml."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.share import share
from autorl_hpc.files.yaml import read_yaml
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.cluster import ClusterProfile

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
