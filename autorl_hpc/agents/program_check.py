"""Check an agent's program on this host: it is found, visible in the sandbox, and of a version known to work."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from autorl_hpc.agents.definition import UNTESTED, Agent, AgentFile
from autorl_hpc.cluster.profile import module_lines
from autorl_hpc.cluster.vllm_program import ask
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.redact import without_secrets
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.experiment import SandboxSpec
from autorl_hpc.sandbox.prove import choose
from autorl_hpc.sandbox.sandbox_plan import (
    SandboxPlan,
    below,
    carried,
    devices,
    outermost,
    program_folders,
    software,
    take_own,
    with_carried,
)
from autorl_hpc.states import Network

# --- where programs must be: on the PATH of jobs, and visible in the sandbox

SETUP_LIMIT_S = 60.0  # loading modules from a busy file server takes seconds
MOST_LINKS = 40
SETS_PATH = re.compile(
    r"\b(PATH|PYTHONPATH|LD_LIBRARY_PATH|MODULEPATH|AUTORL_VLLM)="
    r"|^\s*(source|\.)\s|\b(module|ml|conda|mamba|micromamba|spack)\b"
    r"|^\s*export(\s+[A-Z][A-Z0-9_]*=[\w.,:/^-]*)+\s*$"
)
"""Lines of a profile's `setup` that may change which programs are found, and plain exports. Others may copy or start things; only jobs run them."""


@dataclass(frozen=True)
class Where:
    """Where agents will run, as far as this host can tell."""

    path: str  # PATH of their processes
    shown: tuple[str, ...] | None  # paths that a sandbox lets them read; None for everything
    image: bool = False  # they run in an image, whose programs differ from this host's
    doubt: str = ""  # what could not be found out
    environ: Mapping[str, str] = field(default_factory=dict)
    """Of jobs, after the profile's modules and the `setup` lines that match SETS_PATH, without secrets."""


def where_agents_run(
    profile: ClusterProfile | None,
    readable: Sequence[str] = (),
    *,
    level: str = "auto",
    image: bool = False,
    venv: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Where:
    """Return where agents will run, by the profile (None: on this host) and the experiment's sandbox and environment (image or venv)."""
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
    """Run the profile's modules and the `setup` lines that match SETS_PATH here; return the variables, and what could not be
    found out."""
    # a job's PYTHONPATH starts with only the frozen code; modules and setup append to it.
    found, doubt = {"PATH": os.defpath, **without_secrets(environ), "PYTHONPATH": ""}, ""
    lines = [] if profile is None else [*module_lines(profile), *filter(SETS_PATH.search, profile.setup)]
    if lines:
        script = "\n".join([*lines, "printf '\\0'", "exec /usr/bin/env -0"])  # jobs get only exported variables
        answer = ask(["bash", "-c", script], env=found, limit_s=SETUP_LIMIT_S)
        told = without_secrets(dict(each.split("=", 1) for each in answer.out.split("\0")[1:] if "=" in each))
        if answer.code == 0 and told.get("PATH"):
            found = told
        else:
            doubt = "the profile's `modules` and `setup` don't run here, so its PATH of jobs is not known"
    return {name: value for name, value in found.items() if value or name != "PYTHONPATH"}, doubt


def hidden_part(program: str, shown: Sequence[str] | None) -> str | None:
    """Return the part of a program (an absolute path) that the sandbox hides: itself, a link target or its interpreter; None if nothing is."""
    return next(
        (p for p in _needed(program) if shown is not None and not any(below(p, folder) for folder in shown)), None
    )


def _needed(program: str) -> list[str]:
    """Return a program, what it is a link to, and its interpreter. What `#!/usr/bin/env node` finds shows when it runs."""
    paths = _links(program)
    with contextlib.suppress(OSError), open(paths[-1], "rb") as file:
        line = file.readline(1024)
        words = shlex.split(line[2:].decode(errors="replace")) if line.startswith(b"#!") else []
        if words and words[0].startswith("/") and os.path.exists(words[0]):
            paths += _links(words[0])
    return paths


def _links(path: str) -> list[str]:
    found = [os.path.normpath(path)]
    while os.path.islink(found[-1]) and len(found) < MOST_LINKS:
        found.append(os.path.normpath(os.path.join(os.path.dirname(found[-1]), os.readlink(found[-1]))))
    return found


# --- whether torch sees the GPUs that a job is given

TORCH_SAYS = (
    "import torch; print(torch.cuda.device_count(), torch.__version__, torch.version.cuda or torch.version.hip)"
)
TORCH_LIMIT_S = 120.0  # an import from a cold file server


def unseen_gpus(said: str, granted: int, *, here: bool = True) -> str | None:
    """Return why torch can't use the GPUs of a job, by what it answers to `TORCH_SAYS`; None if it can or doesn't answer.
    `here`: it was asked in a job with GPUs; elsewhere only its build tells."""
    words = said.split()
    if granted == 0 or len(words) != 3 or not words[0].isdigit():
        return None
    if words[2] == "None":
        return f"torch {words[1]} is built without CUDA: it sees none of {granted} GPU{'s' if granted > 1 else ''}"
    if here and int(words[0]) < granted:
        return f"torch {words[1]} for {words[2]} sees {words[0]} of {granted} GPU{'s' if granted > 1 else ''}: look at the node's driver"
    return None


def look_at_torch(agents: Sequence[Agent], where: Where, granted: int, hidden: Sequence[Path] = ()) -> list[Looked]:
    """Return notes on agents whose jobs ask for GPUs, while the torch that they would use here can't use any. Where a definition
    sets variables, torch is asked with them, in a sandbox that hides the home and `hidden`."""
    python = shutil.which("python3", path=where.path)
    if granted == 0 or where.image or python is None:
        return []
    command, found = [python, "-s", "-c", TORCH_SAYS], []
    plain = functools.cache(lambda: ask(command, env=where.environ, limit_s=TORCH_LIMIT_S).out)
    for agent in agents:
        if not agent.file.env:
            said = plain()
        else:
            with tempfile.TemporaryDirectory(prefix="autorl-check-") as place, contextlib.suppress(AutorlError):
                said = ""
                said = _confined(agent, where, where.environ, hidden, place, python)(command)[1]
        if why := unseen_gpus(said, granted, here=False):
            advice = "install a torch that is built for the nodes' GPUs, or ask for none"
            found.append(Looked(agent.name, "note", why, advice))
    return found


PROGRAM_LIMIT_S = 300.0  # hundreds of megabytes on a cold file server; openhands takes 9 s of CPU for its version

VERSION = re.compile(r"\d+(?:\.\d+)+[\w.+-]*")
MOST_WORDS = 400

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Looked:
    """A finding. `problem`: a run with this agent would fail; `note`: it may."""

    agent: str
    state: State
    value: str
    do_this: str = ""


def has_checks(file: AgentFile) -> bool:
    return bool(file.program or file.check or file.secrets)


def look(
    agent: Agent, where: Where, environ: Mapping[str, str] = os.environ, hidden: Sequence[Path] = ()
) -> list[Looked]:
    """Return the findings on one agent, up to the first problem. What its definition names runs in a sandbox of this host that
    hides the home and `hidden`, such as the root."""
    found: list[Looked] = []
    for state, value, do_this in _looks(agent, where, environ, hidden):
        found.append(Looked(agent.name, state, value, do_this))
        if state == "problem":
            break
    return found


def _looks(
    agent: Agent, where: Where, environ: Mapping[str, str], hidden: Sequence[Path]
) -> Iterator[tuple[State, str, str]]:
    file = agent.file
    for name in file.secrets:
        if not environ.get(name):
            yield "note", f"{name} is not set", f"export {name}, if it needs it"
    if where.image:
        if file.program:
            words = f"{file.program[0]} must be in the image that agents run in, which is not looked into"
            yield "note", words, _install(file)
        return
    if where.doubt and file.program:
        yield "note", where.doubt, "see that its lines run on this host too"
    program = shutil.which(file.program[0], path=where.path) if file.program else None
    hidden_at = None if program is None else hidden_part(program, where.shown)
    if file.program and program is None:
        yield "problem", f"{file.program[0]} is not on the PATH of jobs", _install(file)
    elif hidden_at is not None:
        leads = "" if hidden_at == program else f", to which {program} leads"
        words = f"the sandbox hides {hidden_at}{leads}: agents see system folders, those of PATH, and lib beside them"
        yield "problem", words, f"{_install(file)}; or name its folder in `sandbox.readable`"
    elif file.program or file.check:
        with tempfile.TemporaryDirectory(prefix="autorl-check-") as place:
            try:
                run = _confined(agent, where, environ, hidden, place, program)
            except AutorlError as error:
                words = f"its program and check can't be tried here: no sandbox works on this host ({error.what})"
                yield "note", words[:MOST_WORDS], "try one short run first"
                return
            if program is not None:
                yield _version(file, program, where, run)
            if file.check is not None:
                code, said = run(["bash", str(agent.folder.resolve() / file.check)])
                if code != 0:
                    yield "problem", said or f"{file.check} failed without a word", _install(file)


Run = Callable[[Sequence[str]], tuple[int | None, str]]
"""Runs a command; returns its exit code (None if it could not start or gave no answer) and its last words."""


def _confined(
    agent: Agent, where: Where, environ: Mapping[str, str], hidden: Sequence[Path], place: str, program: str | None
) -> Run:
    """Return how commands run with the definition's variables in the strongest sandbox of this host, without a network. Raises
    AutorlError: none works."""
    for name in ("home", "tmp"):
        os.mkdir(f"{place}/{name}")
    env = {**agent.file.env, **without_secrets(environ), "PATH": where.path}
    env |= {"HOME": f"{place}/home", "TMPDIR": f"{place}/tmp"}
    own = take_own(env, agent.file.env)
    shown = where.shown
    if shown is None:  # agents will see everything; here the program must do with what it obviously needs
        paths = [] if program is None else _needed(program)
        shown = (*software([sys.prefix, sys.base_prefix], env), *{os.path.dirname(path) for path in paths})
    secret = {str(path) for folder in (*hidden, Path.home()) for path in (folder, folder.resolve())}
    plan = SandboxPlan(
        workspace=place,
        tmp=f"{place}/tmp",
        readable=tuple(path for path in (*shown, str(agent.folder.resolve())) if os.path.lexists(path)),
        hidden=tuple(outermost(secret)),
        devices=tuple(devices()),
    )
    chosen = choose(SandboxSpec(level="auto", network=Network.NONE), plan, env, wanted=Network.NONE)

    def run(command: Sequence[str]) -> tuple[int | None, str]:
        argv = chosen.level.argv(chosen.plan, with_carried(command))
        answer = ask(argv, env={**env, **carried(own)}, limit_s=PROGRAM_LIMIT_S, folder="/")
        return answer.code, answer.last_words(MOST_WORDS)

    return run


def _version(file: AgentFile, path: str, where: Where, run: Run) -> tuple[State, str, str]:
    code, said = run([path, *file.program[1:]])
    if code != 0:
        state: State = "note" if where.shown is None else "problem"
        advice = f"run it by hand with an empty HOME; {_install(file)}"
        return state, f"{' '.join(file.program)} doesn't run: {said}", advice
    version = VERSION.search(said)
    told = version.group() if version else said
    if told in file.versions:
        return "ok", f"{path}, version {told}, known to work", ""
    untested = file.versions == (UNTESTED,)
    known = "no version of it was tested" if untested else f"known to work: {', '.join(file.versions)}"
    return "note", f"{path}, version {told}; {known}", "try one short run first"


def _install(file: AgentFile) -> str:
    how = f": {file.install}" if file.install else ""
    return f"install it where all nodes and the sandbox see it{how}"
