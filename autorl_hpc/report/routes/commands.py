"""Parse command lines and shell scripts: the script, module or trainer program that they run, and its arguments."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["script", "module", "inline", "shell", "shell-text", "program", "other"]

MAX_COMMAND_CHARS = 20_000
"""A longer command line contains a program's text; its beginning is enough."""

MAX_LINES = 2_000
"""Lines read of a shell script."""


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text, as a set."""
    return frozenset(text.split())


WRAPPERS = words_of("nohup time env sudo setsid exec command stdbuf nice timeout srun ionice taskset then do else ! {")
LAUNCHERS = words_of("accelerate torchrun deepspeed accelerate-launch")
PROGRAMS = words_of("trl llamafactory-cli axolotl tune swift mergekit-yaml mergekit-multi cp rsync openrlhf")
SHELLS = words_of("bash sh zsh dash source .")
_LAUNCH_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_OPENS = words_of("if case while until")
_PYTHON = re.compile(r"^(python|pypy|ipython)[\d.]*$")
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)")
_FUNCTION = re.compile(r"^\s*(?:function\s+)?[\w-]+\s*\(\)")
_NUMBER = re.compile(r"^-?[\d.]+[smhd]?$")


@dataclass(frozen=True)
class Command:
    """What one command line runs."""

    kind: Kind
    target: str
    """Path of a script, name of a module or program, or the text of an inline program."""
    args: tuple[str, ...] = ()


@lru_cache(maxsize=256)
def command_of(line: str) -> Command:
    """Parse the command line of a process. Cached, because agents repeat commands."""
    return _understood(_split(line))


def _split(line: str, punctuation: bool = False) -> list[str]:
    """Split a line as a shell does, or at spaces if a quote is not closed."""
    line = line[:MAX_COMMAND_CHARS].replace("\0", " ")
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|" if punctuation else False)
    lexer.whitespace_split, lexer.commenters = True, "#" if punctuation else ""
    try:
        return list(lexer)
    except ValueError:
        return line.split()


def commands_in(text: str) -> Iterator[tuple[int, Command, bool]]:
    """Yield (line, command, sure) for each simple command of a shell text; `sure` tells whether it certainly runs.

    Commands inside `if`, `case`, `while` or a function are not sure. Here-documents and loop heads are skipped.
    """
    ends, held, depth, functions = "", "", 0, 0
    for number, part in enumerate(text.split("\n")[:MAX_LINES], start=1):
        if ends:
            ends = "" if part.strip() == ends else ends
        elif part.endswith("\\") and len(held) < MAX_COMMAND_CHARS:
            held += part[:-1] + " "
        else:
            line, held = held + part, ""
            functions += (begins := _FUNCTION.match(line)) is not None
            words: list[str] = []
            for word in [*_split(line[begins.end() if begins else 0 :], punctuation=True), ";"]:
                if word.strip(";&|"):
                    words.append(word)
                elif words:
                    depth += words[0] in _OPENS
                    yield number, _understood(words), depth == 0 and functions == 0
                    depth = max(0, depth - (words[0] in ("fi", "esac")))
                    functions = max(0, functions - (words[0] == "}"))
                    words = []
            if (match := _HEREDOC.search(line)) is not None:
                ends = match[1]


def seen(line: str) -> list[Command]:
    """Return the commands of a line, from a process or from an agent's shell call: `cd code && python train.py`."""
    if not re.search(r"[;&|]", line):
        return [command_of(line)]
    command = command_of(line)
    return [command] if command.kind == "inline" else [each for _, each, _ in commands_in(line)]


def _understood(words: Sequence[str]) -> Command:
    """Parse words into a command, skipping wrappers such as `nohup`."""
    rest = list(words)
    for _ in range(12):
        name = posixpath.basename(rest[0]) if rest else ""
        if _ASSIGNMENT.match(name) or re.match(r"^[^($]+\)$", name):  # the second matches a `case` pattern
            rest = rest[1:]
        elif name in WRAPPERS:
            rest = _after_options(rest[1:])
        elif name in ("uv", "poetry", "pdm", "rye", "conda", "mamba") and rest[1:2] == ["run"]:
            known = (n for n, w in enumerate(rest) if n > 1 and (_is_python(w) or w in LAUNCHERS | PROGRAMS | SHELLS))
            rest = rest[next(known, 2) :]
        elif name == "ray" and "--" in rest:
            rest = rest[rest.index("--") + 1 :]
        else:
            return _named(name, rest) if rest else Command("other", "")
    return Command("other", "")


def _is_python(word: str) -> bool:
    return _PYTHON.match(posixpath.basename(word)) is not None


def _after_options(words: list[str]) -> list[str]:
    while words and (words[0].startswith("-") or _NUMBER.match(words[0])):
        words = words[1:]
    return words


def _named(name: str, words: list[str]) -> Command:
    args = tuple(words[1:])
    if _is_python(name):
        return _python(words[1:])
    if name in LAUNCHERS:
        return _launched(words[1:])
    if name in PROGRAMS:
        return Command("program", name, args)
    if name in SHELLS or name == "sbatch":
        for at, word in enumerate(args):
            if name in SHELLS and re.match(r"^-\w*c", word):
                return Command("shell-text", " ".join(args[at + 1 : at + 2]))
            if not word.startswith("-"):
                return Command("shell", word, args[at + 1 :])
    if words[0].endswith((".py", ".sh", ".bash")):
        return Command("script" if words[0].endswith(".py") else "shell", words[0], args)
    return Command("other", name, args)


def _python(words: list[str]) -> Command:
    while words:
        word, rest = words[0], tuple(words[2:])
        if word == "-m" and len(words) > 1:
            if words[1] in _LAUNCH_MODULES:
                return _launched(words[2:])
            return Command("program", "trl", rest) if words[1] == "trl.cli" else Command("module", words[1], rest)
        if word == "-c":
            return Command("inline", " ".join(words[1:2]), rest)
        if not word.startswith("-"):
            return Command("script", word, tuple(words[1:]))
        words = words[2 if word in ("-X", "-W") else 1 :]
    return Command("other", "python")


def _launched(words: list[str]) -> Command:
    """Return what a launcher starts: the first script, or the module after -m."""
    for at, word in enumerate(words):
        if word in ("-m", "--module") and at + 1 < len(words):
            return Command("module", words[at + 1], tuple(words[at + 2 :]))
        if word.endswith(".py"):
            return Command("script", word, tuple(words[at + 1 :]))
    return Command("other", "launch")


def options(args: Sequence[str]) -> dict[str, str]:
    """Return options by name: `--a b`, `--a=b`, `a.b=c` (Hydra); a flag alone is "true". Dashes become underscores."""
    found: dict[str, str] = {}
    for at, word in enumerate(args):
        name, equals, value = word.lstrip("-+").partition("=")
        if word.startswith("-") and not _NUMBER.match(word):
            follows = args[at + 1] if at + 1 < len(args) else "-"
            is_value = not follows.startswith("-") or _NUMBER.match(follows) is not None
            found[name.replace("-", "_")] = value if equals else follows if is_value else "true"
        elif equals and re.match(r"^[A-Za-z_][\w.]*$", name):
            found[name] = value
    return found


def matching(path: str, files: Mapping[str, object], beside: str = "") -> str | None:
    """Return the file of a revision that a command's path refers to: the one with the longest common ending."""
    wanted = posixpath.normpath(path.replace("\\", "/"))
    for exact in (posixpath.normpath(posixpath.join(beside, wanted)), wanted):
        if exact in files:
            return exact
    parts = wanted.strip("/").split("/")
    return next((e for n in range(1, len(parts)) if (e := "/".join(parts[n:])) in files), None)
