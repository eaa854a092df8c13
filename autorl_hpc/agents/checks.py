"""Whether an agent's program is here, can be seen from its sandbox, and is of a version that is known to work."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autorl_hpc.agents.file import UNTESTED, AgentFile
from autorl_hpc.agents.folders import Agent
from autorl_hpc.agents.where import Where, find_program, hidden_part
from autorl_hpc.cluster.programs import ask
from autorl_hpc.files.secrets import without_secrets

PROGRAM_LIMIT_S = 300.0
"""Programs of hundreds of megabytes on a file server that has not read them yet, or on a crowded login node: openhands takes 9 s of
CPU to say its version."""

VERSION = re.compile(r"\d+(?:\.\d+)+[\w.+-]*")
MOST_WORDS = 400


@dataclass(frozen=True)
class Looked:
    """What was found.

    Attributes:
        state: `problem`: a run with this agent would fail; `note`: it may.
        value: in words.
        do_this: what helps.
    """

    agent: str
    state: Literal["ok", "note", "problem"]
    value: str
    do_this: str = ""


def has_checks(file: AgentFile) -> bool:
    """Whether there is anything to look at."""
    return bool(file.program or file.check or file.secrets)


def look(agent: Agent, where: Where, environ: Mapping[str, str] = os.environ) -> list[Looked]:
    """Everything about one agent; the first problem ends the looking."""
    found: list[Looked] = []
    for looked in _looks(agent, where, environ):
        found.append(looked)
        if looked.state == "problem":
            break
    return found


def _looks(agent: Agent, where: Where, environ: Mapping[str, str]) -> Iterator[Looked]:
    file = agent.file
    for name in file.secrets:
        if not environ.get(name):
            yield Looked(agent.name, "note", f"{name} is not set", f"export {name}, if it needs it")
    if where.image:
        if file.program:
            words = f"{file.program[0]} must be in the image that agents run in, which is not looked into"
            yield Looked(agent.name, "note", words, _install(file))
        return
    if where.doubt and file.program:
        yield Looked(agent.name, "note", where.doubt, "see that its lines run on this host too")
    with tempfile.TemporaryDirectory(prefix="autorl-check-") as home:
        env = {**file.env, **_environment(where, home, environ)}
        if file.program:
            yield from _program(agent, where, env)
        if file.check is not None:
            yield from _check(agent, env)


def _environment(where: Where, home: str, environ: Mapping[str, str]) -> dict[str, str]:
    """As an agent's: no secrets, an empty home."""
    return {**without_secrets(environ), "PATH": where.path, "HOME": home, "TMPDIR": home}


def _program(agent: Agent, where: Where, env: Mapping[str, str]) -> Iterator[Looked]:
    file = agent.file
    path = find_program(file.program[0], where)
    if path is None:
        yield Looked(agent.name, "problem", f"{file.program[0]} is not on the PATH of jobs", _install(file))
        return
    hidden = hidden_part(path, where.shown)
    if hidden is not None:
        leads = "" if hidden == path else f", to which {path} leads"
        words = f"the sandbox hides {hidden}{leads}: agents see system folders, those of PATH, and lib beside them"
        yield Looked(agent.name, "problem", words, f"{_install(file)}; or name its folder in `sandbox.readable`")
        return
    code, said = _run([path, *file.program[1:]], env)
    if code != 0:
        words = f"{' '.join(file.program)} doesn't run: {said}"
        yield Looked(agent.name, "problem", words, f"run it by hand with an empty HOME; {_install(file)}")
        return
    version = VERSION.search(said)
    told = version.group() if version else said
    if told in file.versions:
        yield Looked(agent.name, "ok", f"{path}, version {told}, known to work")
    elif file.versions == (UNTESTED,):
        yield Looked(
            agent.name, "note", f"{path}, version {told}; no version of it was tested", "try one short run first"
        )
    else:
        words = f"{path}, version {told}; known to work: {', '.join(file.versions)}"
        yield Looked(agent.name, "note", words, "try one short run first")


def _check(agent: Agent, env: Mapping[str, str]) -> Iterator[Looked]:
    code, said = _run(["bash", str(agent.folder / str(agent.file.check))], env)
    if code != 0:
        yield Looked(agent.name, "problem", said or f"{agent.file.check} failed without a word", _install(agent.file))


def _run(argv: Sequence[str], env: Mapping[str, str]) -> tuple[int | None, str]:
    """Exit code (None: it could not be started, or gave no answer), and the last words."""
    answer = ask(argv, env=env, limit_s=PROGRAM_LIMIT_S, folder=env["HOME"])
    return answer.code, answer.last_words(MOST_WORDS)


def _install(file: AgentFile) -> str:
    how = f": {file.install}" if file.install else ""
    return f"install it where all nodes and the sandbox see it{how}"
