"""Where the programs of agents must lie: on the PATH of jobs, and among what the sandbox shows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.cluster.programs import ask
from autorl_hpc.cluster.wording import module_lines
from autorl_hpc.files.secrets import without_secrets
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.sandbox.plan import below, program_folders, software

SETUP_LIMIT_S = 60.0
"""Modules on a busy file server take seconds."""

MOST_LINKS = 40
SETS_PATH = re.compile(
    r"\b(PATH|PYTHONPATH|LD_LIBRARY_PATH|MODULEPATH|AUTORL_VLLM)="
    r"|^\s*(source|\.)\s|\b(module|ml|conda|mamba|micromamba|spack)\b"
)
"""Lines of a profile's `setup` that may change what programs are found. The others may copy or start things, and are for jobs alone."""


@dataclass(frozen=True)
class Where:
    """Where agents will run, as far as this host can tell.

    Attributes:
        path: PATH of their processes.
        shown: what a sandbox lets them read; None: everything.
        image: they run in an image, whose programs are not those of this host.
        doubt: what could not be found out.
        environ: of jobs, after the profile's modules and those lines of its `setup` that say where programs are, without secrets.
    """

    path: str
    shown: tuple[str, ...] | None
    image: bool = False
    doubt: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


def where_agents_run(
    profile: ClusterProfile | None,
    readable: Sequence[str] = (),
    *,
    level: str = "auto",
    image: bool = False,
    venv: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Where:
    """What this host tells of it.

    Args:
        profile: the cluster's; None: agents run on this host.
        readable: the experiment's `sandbox.readable`.
        level: the experiment's `sandbox.level`.
        image: the experiment's environment is an image.
        venv: of the experiment's environment.
    """
    of_jobs, doubt = _of_jobs(None if profile is None or profile.container is not None else profile, environ)
    path = of_jobs["PATH"]
    outer = {**environ, "PATH": path}
    prefixes = [sys.prefix, sys.base_prefix]
    if venv is not None:
        prefixes += [str(venv), str(Path(os.path.realpath(venv / "bin" / "python")).parent.parent)]
    shown = [*software(prefixes, outer), *readable]
    first = venv / "bin" if venv is not None else Path(sys.executable).parent
    every = os.pathsep.join([str(first), path, *program_folders(readable)])
    in_image = image or (profile is not None and profile.container is not None)
    return Where(every, None if level == "none" else tuple(shown), in_image, doubt, of_jobs)


def _of_jobs(profile: ClusterProfile | None, environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Variables after the profile's modules, and those lines of its `setup` that say where programs are; by doing it here. And what
    could not be found out."""
    # Of PYTHONPATH a job begins with the frozen code alone; what modules and setup add comes after it.
    bare = {"PATH": os.defpath, **without_secrets(environ), "PYTHONPATH": ""}
    lines = (
        [] if profile is None else [*module_lines(profile), *(line for line in profile.setup if SETS_PATH.search(line))]
    )
    found, doubt = bare, ""
    if lines:
        script = "\n".join([*lines, "printf '\\0'", "exec /usr/bin/env -0"])  # what was not exported, jobs don't get
        answer = ask(["bash", "-c", script], env=bare, limit_s=SETUP_LIMIT_S)
        pairs = (each.split("=", 1) for each in answer.out.split("\0")[1:] if "=" in each)
        told = without_secrets(dict(pairs))
        if answer.code == 0 and told.get("PATH"):
            found = told
        else:
            doubt = "the profile's `modules` and `setup` don't run here, so its PATH of jobs is not known"
    return {name: value for name, value in found.items() if value or name != "PYTHONPATH"}, doubt


def find_program(name: str, where: Where) -> str | None:
    """The path of a program as an agent's PATH finds it; None: it doesn't."""
    return shutil.which(name, path=where.path)


def hidden_part(program: str, shown: Sequence[str] | None) -> str | None:
    """What of a program the sandbox would hide: itself, what it is a link to, or what runs it; None: nothing.

    Args:
        program: absolute.
    """
    if shown is None:
        return None
    for path in _chain(program):
        if not any(below(path, folder) for folder in shown):
            return path
    return None


def _chain(program: str) -> list[str]:
    """A program, what it links to, link by link, and the same of the interpreter that its first line names."""
    found = _links(program)
    interpreter = _interpreter(found[-1])
    return found + (_links(interpreter) if interpreter is not None else [])


def _links(path: str) -> list[str]:
    found = [os.path.normpath(path)]
    while os.path.islink(found[-1]) and len(found) < MOST_LINKS:
        found.append(os.path.normpath(os.path.join(os.path.dirname(found[-1]), os.readlink(found[-1]))))
    return found


def _interpreter(program: str) -> str | None:
    """`#!/a/python` names one; what `#!/usr/bin/env node` finds hangs on PATH, and shows when the program is run."""
    try:
        with open(program, "rb") as file:
            line = file.readline(1024)
    except OSError:
        return None
    if not line.startswith(b"#!"):
        return None
    words = shlex.split(line[2:].decode(errors="replace"))
    return words[0] if words and words[0].startswith("/") and os.path.exists(words[0]) else None
