"""Find what command lines run (`follow`): scripts of the agent's code, shell scripts, and trainers' programs."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from autorl_hpc.report.routes import configs
from autorl_hpc.report.routes.commands import Command, command_of, commands_in, matching, seen, words_of
from autorl_hpc.report.routes.route import Training
from autorl_hpc.report.routes.script import Look, Script, last_name, look_at
from autorl_hpc.states import Route

PYTHON, SHELL = (".py", ".pyw"), (".sh", ".bash", ".slurm", ".sbatch")
MAX_COMMANDS, MAX_SCRIPTS, MAX_DEPTH = 200, 60, 8

_STORED_MODEL = re.compile(r"MODEL_PATH|models?\b|\bbase\b", re.I)
_NO_START = words_of("print open Path exists copy copy2 add_argument info join read_text write_text")


@dataclass
class Followed:
    """Everything that the command lines run."""

    files: Mapping[str, str]
    looks: Mapping[str, Look]
    scripts: dict[str, Script] = field(default_factory=dict)
    asked: list[Training] = field(default_factory=list)
    """Trainings by trainers' programs."""
    others: list[Training] = field(default_factory=list)
    """Copies, averages, and programs that are not known."""
    commands: list[tuple[Command, str]] = field(default_factory=list)
    """Command lines of trainers' programs, with their places."""
    used: dict[str, None] = field(default_factory=dict)
    ordered: bool = True
    """Whether the scripts ran in this order; else it is the order of their names."""
    _done: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)

    def run(self, command: Command, place: str, line: int, sure: bool = True, depth: int = 0) -> bool:
        """Follow one command; return False if it runs nothing of this code."""
        if depth > MAX_DEPTH or len(self.scripts) >= MAX_SCRIPTS:
            return False
        if command.kind == "shell-text":
            each = [self.run(c, place, line, sure and s, depth + 1) for _, c, s in commands_in(command.target)]
            return any(each)
        asked = configs.asked_by_command(command, self.files)
        if asked is not None:
            self.commands.append((command, f"{place}:{line}" if line else place))
            self.used |= dict.fromkeys([p for p in (place, asked.path) if p is not None and p in self.files])
            made = Training(asked.route, asked.why, place, line, sure)
            (self.others if asked.route is Route.AVERAGING else self.asked).append(made)
            return True
        if command.kind == "program" and command.target in ("cp", "rsync"):
            words = [word for word in command.args if not word.startswith("-")]
            is_copy = len(words) > 1 and len(words) < len(command.args) and _STORED_MODEL.search(" ".join(words[:-1]))
            if is_copy:
                self.others.append(Training(Route.COPY, f"`{command.target}` of a folder", place, line, sure, 0.8))
            return bool(is_copy)
        path = self._path(command, place)
        if path is None:
            names_one = command.kind == "other" and any(word.endswith(PYTHON) for word in command.args)
            if (names_one or command.kind in ("script", "inline")) and place in self.files:
                self.others.append(Training(Route.UNKNOWN, "starts a program that is not in the code", place, line))
            return False
        if (path, command.args) in self._done:
            return True
        self._done.add((path, command.args))
        self.used.setdefault(path)
        if path.endswith(SHELL):
            for number, inner, is_sure in commands_in(self.files[path]):
                self.run(inner, path, number, sure and is_sure, depth + 1)
        elif path in self.looks:
            script = Script(path, self.looks, command.args, sure)
            self.scripts[path] = script
            self.used |= dict.fromkeys(script.reached)
            for started, at, is_sure in self._started(script):
                self.run(started, path, at, sure and is_sure, depth + 1)
        return True

    def _path(self, command: Command, place: str) -> str | None:
        target = command.target
        if command.kind == "module":
            base = target.replace(".", "/")
            return next((p for e in (".py", "/__main__.py") if (p := matching(base + e, self.looks)) is not None), None)
        return matching(target, self.files, posixpath.dirname(place)) if command.kind in ("script", "shell") else None

    def _started(self, script: Script) -> list[tuple[Command, int, bool]]:
        """Return the programs that a script starts, as far as its calls name them."""
        found = []
        for place in script.calls:
            call = place.node
            given = [n for a in [*call.args, *call.keywords] for n in islice(ast.walk(a), 40)]
            texts = [n.value for n in given if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            words = " ".join(text for text in texts if len(text) < 2_000)
            target = next((w for w in words.split() if w.endswith((*PYTHON, *SHELL))), "")
            command = command_of(words)
            if target and matching(target, self.files) is not None:
                command = Command("shell" if target.endswith(SHELL) else "script", target, command.args)
            if last_name(call.func) not in _NO_START and command.kind in ("program", "module", "script", "shell"):
                found.append((command, call.lineno, place.sure))
        return found


def follow(files: Mapping[str, str | bytes], entry_points: Sequence[str]) -> Followed:
    """Read files and follow command lines; without any that run something of the code, the scripts that no other file names."""
    ends = (*PYTHON, *SHELL, *configs.ENDINGS)
    known = tuple((path, raw) for path, raw in sorted(files.items()) if path.endswith(ends))
    return _follow(known, tuple(dict.fromkeys(entry_points))[-MAX_COMMANDS:])


@lru_cache(maxsize=2)
def _follow(files: tuple[tuple[str, str | bytes], ...], lines: tuple[str, ...]) -> Followed:
    """Follow command lines. The last results are cached, because settings are computed after the route."""
    texts = {path: raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw for path, raw in files}
    done = Followed(texts, {path: look_at(path, text) for path, text in texts.items() if path.endswith(PYTHON)})
    ran = [done.run(command, "command line", 0) for line in lines for command in seen(line)]
    if not any(ran):
        roots = _roots(texts)
        done.ordered = len(roots) == 1
        for path in roots:
            done.run(Command("shell" if path.endswith(SHELL) else "script", path), path, 0)
    if not done.scripts and not done.asked and not done.others:
        told = [
            asked
            for p, text in texts.items()
            if p.endswith(configs.ENDINGS) and (asked := configs.asked_by_config(text, p))
        ]
        done.asked += [
            Training(a.route, f"{a.why}; nothing runs it", a.path or "", 0, confidence=0.4) for a in told if a.route
        ]
    return done


def _roots(texts: Mapping[str, str]) -> list[str]:
    """Return the scripts that no other file names or imports; all scripts if there are none."""
    scripts = [path for path in texts if path.endswith((*PYTHON, *SHELL))]
    words = {path: set(re.findall(r"[\w.-]+", texts[path])) for path in scripts}
    imported = {
        path: {
            part
            for name in re.findall(r"^\s*(?:from|import)\s(.+)", texts[path], re.M)
            for part in re.findall(r"\w+", name)
        }
        for path in scripts
    }
    named = set()
    for path in scripts:
        base = posixpath.basename(path)
        stem = base.rsplit(".", 1)[0] if base != "__init__.py" else posixpath.basename(posixpath.dirname(path))
        if any(other != path and (base in words[other] or stem in imported[other]) for other in scripts):
            named.add(path)
    return sorted(set(scripts) - named or scripts, key=lambda path: (path.count("/"), path))
