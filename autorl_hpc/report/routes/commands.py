"""One command line: which script, module or trainer's program it runs, and with which arguments."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["script", "module", "inline", "shell", "shell-text", "program", "other"]

_BETWEEN = frozenset({"&&", "||", ";", "|"})
"""Of a shell, between two commands. A process's own arguments hold none of them alone."""

MAX_COMMAND_CHARS = 20_000
"""A command line beyond it holds a program's text; its beginning says what it is."""

WRAPPERS = frozenset(
    {
        "nohup",
        "time",
        "env",
        "sudo",
        "setsid",
        "exec",
        "command",
        "stdbuf",
        "nice",
        "timeout",
        "srun",
        "ionice",
        "taskset",
    }
)
LAUNCHERS = frozenset({"accelerate", "torchrun", "deepspeed", "accelerate-launch"})
PROGRAMS = frozenset(
    {
        "trl",
        "llamafactory-cli",
        "axolotl",
        "tune",
        "swift",
        "mergekit-yaml",
        "mergekit-multi",
        "cp",
        "rsync",
        "openrlhf",
    }
)
SHELLS = frozenset({"bash", "sh", "zsh", "dash", "source", "."})
_PYTHON = re.compile(r"^(python|pypy|ipython)[\d.]*$")
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Command:
    """What one command line runs."""

    kind: Kind
    target: str
    """Path of a script, name of a module or program, or the text of an inline program."""
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


def split(line: str) -> list[str]:
    """Words of a command line as a shell splits it; by spaces where its quotes don't close."""
    line = line[:MAX_COMMAND_CHARS].replace("\0", " ")
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


@lru_cache(maxsize=256)
def command_of(line: str) -> Command:
    """The command that a line is. An agent runs the same one again and again."""
    return understood(split(line))


def seen(line: str) -> Command:
    """The command that a line is, as a process has it or as an agent gave it to a shell: `cd code && python train.py`."""
    words = split(line)
    if any(word in _BETWEEN or (word[-1:] == ";" and len(word) > 1) for word in words):
        return Command("shell-text", line[:MAX_COMMAND_CHARS])
    return understood(words)


def understood(words: Sequence[str]) -> Command:
    """The command that these words are, behind whatever wraps it."""
    rest = list(words)
    env: list[tuple[str, str]] = []
    for _ in range(12):
        rest = _unwrapped(rest, env)
        if not rest:
            return Command("other", "", env=tuple(env))
        name = posixpath.basename(rest[0])
        if name in ("uv", "poetry", "pdm", "rye") and rest[1:2] == ["run"]:
            rest = _after_options(rest[2:])
        elif name in ("conda", "mamba", "micromamba") and rest[1:2] == ["run"]:
            rest = _from_program(rest[2:])
        elif name == "ray" and "--" in rest:
            rest = rest[rest.index("--") + 1 :]
        else:
            return _told(name, rest, tuple(env))
    return Command("other", "", env=tuple(env))


def _unwrapped(words: list[str], env: list[tuple[str, str]]) -> list[str]:
    while words:
        name = posixpath.basename(words[0])
        if _ASSIGNMENT.match(words[0]):
            env.append(tuple(words[0].split("=", 1)))  # type: ignore[arg-type]
            words = words[1:]
        elif name in WRAPPERS:
            words = _after_options(words[1:], numbers=name in ("timeout", "nice", "ionice", "taskset"))
        else:
            return words
    return words


def _after_options(words: list[str], numbers: bool = False) -> list[str]:
    while words and (words[0].startswith("-") or (numbers and re.match(r"^[\d.]+[smhd]?$", words[0]))):
        words = words[1:]
    return words


def _from_program(words: list[str]) -> list[str]:
    """From the first word on that is a program or script; options before it may have values."""
    for at, word in enumerate(words):
        if _PYTHON.match(posixpath.basename(word)) or posixpath.basename(word) in LAUNCHERS | PROGRAMS | SHELLS:
            return words[at:]
    return []


def _told(name: str, words: list[str], env: tuple[tuple[str, str], ...]) -> Command:
    if _PYTHON.match(name):
        return _python(words[1:], env)
    if name in LAUNCHERS:
        return _launched(words[1:], env)
    if name in SHELLS:
        rest = words[1:]
        while rest and rest[0].startswith("-") and not rest[0].startswith("--"):
            if "c" in rest[0]:
                return Command("shell-text", " ".join(rest[1:2]), tuple(rest[2:]), env)
            rest = rest[1:]
        return Command("shell", rest[0], tuple(rest[1:]), env) if rest else Command("other", name, env=env)
    if name in PROGRAMS:
        return Command("program", name, tuple(words[1:]), env)
    if words[0].endswith(".py"):
        return Command("script", words[0], tuple(words[1:]), env)
    if words[0].endswith((".sh", ".bash")):
        return Command("shell", words[0], tuple(words[1:]), env)
    if name == "sbatch":
        rest = _after_options(words[1:])
        return Command("shell", rest[0], tuple(rest[1:]), env) if rest else Command("other", name, env=env)
    return Command("other", name, tuple(words[1:]), env)


def _python(words: list[str], env: tuple[tuple[str, str], ...]) -> Command:
    while words:
        word = words[0]
        if word == "-m":
            return _module(words[1:], env)
        if word == "-c":
            return Command("inline", " ".join(words[1:2]), tuple(words[2:]), env)
        if word in ("-X", "-W"):
            words = words[2:]
        elif word.startswith("-") and word != "-":
            words = words[1:]
        else:
            return Command("script", word, tuple(words[1:]), env)
    return Command("other", "python", env=env)


def _module(words: list[str], env: tuple[tuple[str, str], ...]) -> Command:
    if words and words[0] in ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"):
        return _launched(words[1:], env)
    if words and words[0] == "trl.cli":
        return Command("program", "trl", tuple(words[1:]), env)
    return Command("module", words[0], tuple(words[1:]), env) if words else Command("other", "python", env=env)


def _launched(words: list[str], env: tuple[tuple[str, str], ...]) -> Command:
    """What a launcher starts: the first script, or the module behind -m; a launcher's options have values unknown to us."""
    for at, word in enumerate(words):
        if word in ("-m", "--module") and at + 1 < len(words):
            return Command("module", words[at + 1], tuple(words[at + 2 :]), env)
        if word.endswith(".py"):
            return Command("script", word, tuple(words[at + 1 :]), env)
    return Command("other", "launch", env=env)


def options(args: Sequence[str]) -> dict[str, str]:
    """Options by name: `--a b`, `--a=b`, `a.b=c` (Hydra), a flag alone is "true". Dashes inside names become underscores."""
    found: dict[str, str] = {}
    at = 0
    while at < len(args):
        word = args[at]
        if word.startswith("-") and not re.match(r"^-[\d.]", word):
            name, equals, value = word.lstrip("-").partition("=")
            if not equals:
                follows = args[at + 1] if at + 1 < len(args) else "-"
                is_value = not follows.startswith("-") or re.match(r"^-[\d.]", follows) is not None
                value = follows if is_value else "true"
                at += is_value
            found[name.replace("-", "_")] = value
        elif re.match(r"^\+{0,2}[A-Za-z_][\w.]*=", word):
            name, _, value = word.lstrip("+").partition("=")
            found[name] = value
        at += 1
    return found


def positional(args: Sequence[str]) -> list[str]:
    """Words that are no option and no option's value."""
    found = []
    at = 0
    while at < len(args):
        if args[at].startswith("-"):
            at += 1 if "=" in args[at] or at + 1 >= len(args) or args[at + 1].startswith("-") else 2
            continue
        found.append(args[at])
        at += 1
    return found


def matching(path: str, files: Mapping[str, object], beside: str = "") -> str | None:
    """The file of a revision that a command's path means, by the longest common ending; `beside` is the caller's folder."""
    wanted = posixpath.normpath(path.replace("\\", "/"))
    near = posixpath.normpath(posixpath.join(beside, wanted)) if beside else wanted
    for exact in (near, wanted):
        if exact in files:
            return exact
    parts = wanted.strip("/").split("/")
    for start in range(1, len(parts)):
        if (ending := "/".join(parts[start:])) in files:
            return ending
    if wanted.startswith("/"):
        return None
    inside = sorted((f for f in files if f.endswith("/" + wanted.lstrip("./"))), key=lambda f: (f.count("/"), f))
    return inside[0] if inside else None
