"""Run a program with a time limit, and look for vLLM: the program that serves drivers and the Python of graders' engines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Literal

from autorl_hpc.errors import visible
from autorl_hpc.files.redact import without_secrets
from autorl_hpc.records.cluster import ClusterProfile


@dataclass(frozen=True)
class ProgramAnswer:
    """A program's output, and its exit code: None if it did not answer in time or could not be started."""

    code: int | None
    out: str
    err: str
    missing: bool = False

    def last_words(self, most: int) -> str:
        """Return the last non-empty line, of standard output if there is any, cut to `most` characters."""
        lines = [line.strip() for line in f"{self.err}\n{self.out}".splitlines() if line.strip()]
        return visible(lines[-1] if lines else "")[:most]


def ask(
    argv: Sequence[str], *, env: Mapping[str, str], limit_s: float, folder: str | Path | None = None, given: str = ""
) -> ProgramAnswer:
    """Run a program for at most `limit_s` seconds, with `given` on its standard input."""
    options: dict[str, Any] = {"env": dict(env), "cwd": folder, "input": given, "timeout": limit_s}
    try:
        done = subprocess.run(list(argv), capture_output=True, text=True, errors="replace", check=False, **options)
    except subprocess.TimeoutExpired:
        return ProgramAnswer(None, "", f"no answer within {limit_s:.0f} s")
    except OSError as error:
        return ProgramAnswer(None, "", error.strerror or str(error), missing=isinstance(error, FileNotFoundError))
    return ProgramAnswer(done.returncode, done.stdout, done.stderr)


# --- where vLLM is

PROGRAM_VARIABLE = "AUTORL_VLLM"  # path of the program `vllm`; takes precedence over the profile and PATH
PYTHON_LIMIT_S = 60.0  # for a Python to say whether it has vLLM, without importing it
WORDS_CHARS = 200

INSTALL = f"install vllm in the graders' environment, or name the program `vllm` of another one: `vllm:` of the cluster's profile, or ${PROGRAM_VARIABLE}"
TRY = "try one short run first"
ABSENT = 86  # exit code for "no vLLM": a Python that can't start exits with 1, a shell that doesn't find it with 127
ASKED = f"import importlib.util, sys; sys.exit({ABSENT} if importlib.util.find_spec('vllm') is None else 0)"


@dataclass(frozen=True)
class VllmOnHost:
    """What this host shows of the graders' engine. `problem`: no grader would start; `note`: unknown from here."""

    state: Literal["ok", "note", "problem"]
    value: str
    do_this: str = ""


def python_beside(program: str) -> str | None:
    """Return the Python in the folder of the program's link target, or of the program itself."""
    for folder in (Path(program).resolve().parent, Path(program).parent):
        for name in ("python3", "python"):
            if os.access(folder / name, os.X_OK):
                return str(folder / name)
    return None


def look_for_engine(profile: ClusterProfile | None, environ: Mapping[str, str], doubt: str = "") -> VllmOnHost:
    """Return whether graders would find a Python with vLLM. `environ`: of jobs, after modules and setup; `doubt`: what is unknown of it."""
    if profile is not None and profile.container is not None:
        return VllmOnHost("note", "vLLM must be in the image that jobs run in, which is not looked into")
    named = environ.get(PROGRAM_VARIABLE) or (profile.vllm if profile is not None else None)
    given = profile.python if profile is not None else None
    places = (named or "vllm", given or sys.executable)
    wanted, own = (Template(os.path.expanduser(place)).safe_substitute(environ) for place in places)
    if unknown := next((each for each in (wanted, own) if "$" in each), None):
        return VllmOnHost("note", f"{unknown} is known in jobs alone, so vLLM is not looked for", TRY)
    asked: dict[str, ProgramAnswer] = {}

    def has_vllm(python: str) -> bool:
        command, env = [python, "-c", ASKED], without_secrets(environ)
        asked[python] = asked.get(python) or ask(command, env=env, limit_s=PYTHON_LIMIT_S, folder="/")
        return asked[python].code == 0

    if not named and has_vllm(own):
        return VllmOnHost("ok", own)
    if (program := shutil.which(wanted, path=environ.get("PATH", os.defpath))) is not None:
        python = python_beside(program) or own
        if has_vllm(python):
            return VllmOnHost("ok", python)
    for each, answer in asked.items():
        if answer.code != ABSENT:
            said = answer.last_words(WORDS_CHARS) or f"exit code {answer.code}"
            return VllmOnHost("note", f"{each} does not say whether it has vLLM: {said}", TRY)
    if program is not None:
        words = f"{python}, which is the Python of {program}, has no vLLM"
    else:
        words = f"`{wanted}` is not here" if named else "no Python with vLLM is on the PATH of jobs"
    if profile is not None and (profile.modules or profile.setup):
        why = doubt or "the profile's `modules` and `setup` may bring one on the nodes"
        return VllmOnHost("note", f"{words}; {why}", f"{TRY}; {INSTALL}")
    return VllmOnHost("problem", words, INSTALL)
