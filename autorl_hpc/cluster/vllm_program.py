"""Other programs, asked so that they can't hang who asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Literal

from autorl_hpc.files.redact import without_secrets
from autorl_hpc.records.cluster import ClusterProfile


@dataclass(frozen=True)
class ProgramAnswer:
    """What a program said.

    Attributes:
        code: its exit code; None: it gave no answer in time, or could not be started.
        missing: it is not on this host.
    """

    code: int | None
    out: str
    err: str
    missing: bool = False

    def last_words(self, most: int) -> str:
        """The last line that holds anything, of what went to standard output if there is one; at most so many characters."""
        lines = [line.strip() for line in f"{self.err}\n{self.out}".splitlines() if line.strip()]
        return (lines[-1] if lines else "")[:most]


def ask(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    limit_s: float,
    folder: str | Path | None = None,
    given: str = "",
) -> ProgramAnswer:
    """Runs a program to its end, at most so many seconds, with `given` on its standard input."""
    try:
        done = subprocess.run(
            list(argv),
            env=dict(env),
            cwd=folder,
            stdin=None if given else subprocess.DEVNULL,
            input=given or None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ProgramAnswer(None, "", f"no answer within {limit_s:.0f} s")
    except OSError as error:
        return ProgramAnswer(None, "", error.strerror or str(error), missing=isinstance(error, FileNotFoundError))
    return ProgramAnswer(done.returncode, done.stdout, done.stderr)


# Where vLLM is: the program that serves drivers, and the Python beside it, which runs the engine of graders.

PROGRAM_VARIABLE = "AUTORL_VLLM"
"""Names the program `vllm`, before the profile and PATH."""

PYTHON_LIMIT_S = 60.0
"""For a Python that says whether it has vLLM: nothing of it is loaded."""

WORDS_CHARS = 200

INSTALL = f"install vllm in the graders' environment, or name the program `vllm` of another one: `vllm:` of the cluster's profile, or ${PROGRAM_VARIABLE}"
TRY = "try one short run first"
ABSENT = 86
"""By which the question says no: a Python that can't start ends with 1, the shell's word for what is not there is 127."""

ASKED = f"import importlib.util, sys; sys.exit({ABSENT} if importlib.util.find_spec('vllm') is None else 0)"


@dataclass(frozen=True)
class VllmOnHost:
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


@dataclass(frozen=True)
class VllmReply:
    """What a Python says of vLLM; `has` is None where it gave no answer, for the reason that `words` are."""

    python: str
    has: bool | None
    words: str = ""


def look_for_engine(profile: ClusterProfile | None, environ: Mapping[str, str], doubt: str = "") -> VllmOnHost:
    """Whether graders would find a Python with vLLM, by the rules of grading/engines/interpreter.py.

    Args:
        profile: the cluster's; None: graders run on this host.
        environ: of jobs, after the profile's modules and setup.
        doubt: what of it could not be found out.
    """
    if profile is not None and profile.container is not None:
        return VllmOnHost("note", "vLLM must be in the image that jobs run in, which is not looked into")
    named = environ.get(PROGRAM_VARIABLE) or (profile.vllm if profile is not None else None)
    given = profile.python if profile is not None else None
    wanted, own = (_filled_in(each, environ) for each in (named or "vllm", given or sys.executable))
    if unknown := next((each for each in (wanted, own) if "$" in each), None):
        return VllmOnHost("note", f"{unknown} is known in jobs alone, so vLLM is not looked for", TRY)
    asked = [] if named else [_ask(own, environ)]
    program = None if asked and asked[0].has else shutil.which(wanted, path=environ.get("PATH", os.defpath))
    beside = None if program is None else python_beside(program)
    if program is not None and (beside or own) not in {each.python for each in asked}:
        asked.append(_ask(beside or own, environ))
    if asked and asked[-1].has:
        return VllmOnHost("ok", asked[-1].python)
    if silent := next((each for each in asked if each.has is None), None):
        return VllmOnHost("note", f"{silent.python} does not say whether it has vLLM: {silent.words}", TRY)
    if program is not None:
        words = f"{asked[-1].python}, {'beside' if beside else 'with no other beside'} {program}, has no vLLM"
    else:
        words = f"`{wanted}` is not here" if named else "no Python with vLLM is on the PATH of jobs"
    if profile is not None and (profile.modules or profile.setup):
        why = doubt or "the profile's `modules` and `setup` may bring one on the nodes"
        return VllmOnHost("note", f"{words}; {why}", f"{TRY}; {INSTALL}")
    return VllmOnHost("problem", words, INSTALL)


def _filled_in(path: str, environ: Mapping[str, str]) -> str:
    return Template(os.path.expanduser(path)).safe_substitute(environ)


def _ask(python: str, environ: Mapping[str, str]) -> VllmReply:
    answer = ask([python, "-c", ASKED], env=without_secrets(environ), limit_s=PYTHON_LIMIT_S, folder="/")
    if answer.code in (0, ABSENT):
        return VllmReply(python, answer.code == 0)
    return VllmReply(python, None, answer.last_words(WORDS_CHARS) or f"exit code {answer.code}")
