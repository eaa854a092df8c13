"""Where vLLM is: the program that serves drivers, and the Python beside it, which runs the engine of graders."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autorl_hpc.cluster.commands import without_secrets
from autorl_hpc.cluster.programs import ask
from autorl_hpc.records.cluster import ClusterProfile

PROGRAM_VARIABLE = "AUTORL_VLLM"
"""Names the program `vllm`, before the profile and PATH."""

PYTHON_LIMIT_S = 60.0
"""For a Python that says whether it has vLLM: nothing of it is loaded."""

INSTALL = f"install vllm in the graders' environment, or name the program `vllm` of another one: `vllm:` of the cluster's profile, or ${PROGRAM_VARIABLE}"
ASKED = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


@dataclass(frozen=True)
class Seen:
    """What this host tells of the engine of graders.

    Attributes:
        state: `problem`: no grader would start; `note`: it can't be told from here.
        value: in words.
        do_this: what helps.
    """

    state: Literal["ok", "note", "problem"]
    value: str
    do_this: str = ""


def python_beside(program: str) -> str | None:
    """The Python in the folder of what a program is a link to, or of the program itself."""
    for folder in (Path(program).resolve().parent, Path(program).parent):
        for name in ("python3", "python"):
            if os.access(folder / name, os.X_OK):
                return str(folder / name)
    return None


def look_for_engine(profile: ClusterProfile | None, path: str, environ: Mapping[str, str] = os.environ) -> Seen:
    """Whether graders would find a Python with vLLM, by the rules of grading/engines/interpreter.py.

    Args:
        profile: the cluster's; None: graders run on this host.
        path: PATH of jobs.
        environ: from which jobs are submitted.
    """
    if profile is not None and profile.container is not None:
        return Seen("note", "vLLM must be in the image that jobs run in, which is not looked into")
    named = environ.get(PROGRAM_VARIABLE) or (profile.vllm if profile is not None else None)
    given = profile.python if profile is not None else None
    wanted, own = (os.path.expandvars(os.path.expanduser(each)) for each in (named or "vllm", given or sys.executable))
    if unknown := next((each for each in (wanted, own) if "$" in each), None):
        return Seen("note", f"{unknown} is known in jobs alone, so vLLM is not looked for", "try one short run first")
    env = {**without_secrets(environ), "PATH": path}
    env.pop("PYTHONPATH", None)  # of jobs it is the frozen code alone
    if not named and _has_vllm(own, env):
        return Seen("ok", own)
    program = shutil.which(wanted, path=path)
    beside = None if program is None else python_beside(program)
    if program is None:
        return Seen(
            "problem", f"`{wanted}` is not here" if named else "no Python with vLLM is on the PATH of jobs", INSTALL
        )
    python = beside or own
    if _has_vllm(python, env):
        return Seen("ok", python)
    return Seen(
        "problem", f"{python}, {'beside' if beside else 'with no other beside'} {program}, has no vLLM", INSTALL
    )


def _has_vllm(python: str, env: Mapping[str, str]) -> bool:
    return ask([python, "-c", ASKED], env=env, limit_s=PYTHON_LIMIT_S, folder="/").code == 0
