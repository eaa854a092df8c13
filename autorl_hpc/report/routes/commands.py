"""Read command lines and shell scripts: the scripts, notebooks, modules and trainers' programs that they run (`follow`)."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple

from autorl_hpc.report.format import clean
from autorl_hpc.report.routes import trainers as known
from autorl_hpc.report.routes.trainers import words_of
from autorl_hpc.states import Route

PYTHON, SHELL = (".py", ".pyw", ".ipynb"), (".sh", ".bash", ".slurm", ".sbatch")
CONFIG = (".yaml", ".yml", ".json", ".toml")
NOT_THERE = "starts a program that is not in the code"
# A longer command line contains a program's text; its beginning is enough
MAX_CHARS, MAX_LINES, MAX_DEPTH, MAX_COMMANDS = 20_000, 2_000, 6, 200
SHELLS = words_of("bash sh zsh dash source . sbatch")
LAUNCHERS = words_of("accelerate accelerate-launch torchrun deepspeed")
PROGRAMS = words_of("trl llamafactory-cli axolotl tune swift mergekit-yaml mergekit-multi cp rsync openrlhf")
# Programs that start another one. What stands between is theirs: options, a container's image, an environment.
WRAPPERS = words_of(
    "nohup time env sudo setsid exec command stdbuf nice timeout srun ionice taskset then do else ! { uv poetry pdm rye pixi conda "
    "mamba ray apptainer singularity docker podman enroot xvfb-run numactl"
)

_LAUNCH_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_PYTHON = re.compile(r"^(python|pypy|ipython)[\d.]*$")
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=|^[^($]+\)$")  # A variable, or a pattern of `case`
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_FUNCTION = re.compile(r"^\s*(?:function\s+)?[\w-]+\s*\(\)")
# `-c` with a text that is not quoted, as a process's arguments stand in a recorded command line
_INLINE = re.compile(
    r"(?:^|[\s;&|])(?:\S*/)?(python[\d.]*|bash|sh)((?:\s+-[A-Za-z]+)*?)\s+-\w*c\s+(?=[^'\"\s$])(.*)", re.S
)


class Command(NamedTuple):
    """What one command runs. `target`: path of a script or notebook, name of a module or program, text of an inline program."""

    kind: Literal["script", "module", "inline", "shell", "program", "other"]
    target: str
    args: tuple[str, ...] = ()


class Ran(NamedTuple):
    """One command of a text: its line, and whether it certainly runs."""

    line: int
    command: Command
    sure: bool = True


@lru_cache(maxsize=512)
def commands_in(text: str, depth: int = 0) -> tuple[Ran, ...]:
    """Return the commands of a shell text or of a process's command line. Cached, because agents repeat commands.

    Commands inside `if`, `case`, `while` or a function are not sure.
    """
    text = text.replace("\0", " ")
    if (found := _INLINE.search(text[:MAX_CHARS])) is not None and found.start() == 0:
        inner = found[3].replace("\\n", "\n")
        return tuple(_inner(found[1], inner, depth)) if depth < MAX_DEPTH else ()
    return tuple(_commands(text, depth))


def _inner(program: str, text: str, depth: int) -> Iterator[Ran]:
    """Yield what `python -c TEXT`, `bash -c TEXT` or a here-document runs."""
    if program.startswith(("python", "pypy", "ipython")):
        yield Ran(0, Command("inline", text[:MAX_CHARS]))
    elif depth < MAX_DEPTH:
        yield from commands_in(text, depth + 1)


def _commands(text: str, depth: int) -> Iterator[Ran]:
    held, nesting, functions = "", 0, 0
    lines = iter(enumerate(text.split("\n")[:MAX_LINES], start=1))
    for number, part in lines:
        if part.endswith("\\") and len(held) < MAX_CHARS:
            held += part[:-1] + " "
            continue
        line, held = held + part, ""
        while _open_quote(line) and len(line) < MAX_CHARS and (more := next(lines, None)) is not None:
            line += "\n" + more[1]
        body: list[str] = []
        if (heredoc := _HEREDOC.search(line)) is not None:
            for _, each in lines:
                if each.strip() == heredoc[1]:
                    break
                body.append(each)
            line = line[: heredoc.start()] + line[heredoc.end() :]
        functions += (begins := _FUNCTION.match(line)) is not None
        words: list[str] = []
        for word in [*_split(line[begins.end() if begins else 0 :]), ";"]:
            if word.strip(";&|"):
                words.append(word)
            elif words:
                nesting += words[0] in ("if", "case", "while", "until")
                sure = nesting == 0 and functions == 0
                yield from (
                    Ran(number, each.command, sure and each.sure) for each in _understood(words, "\n".join(body), depth)
                )
                nesting = max(0, nesting - (words[0] in ("fi", "esac")))
                functions = max(0, functions - (words[0] == "}"))
                words = []


def _open_quote(line: str) -> bool:
    return (line.count("'") % 2 == 1 and '"' not in line) or (line.count('"') % 2 == 1 and "'" not in line)


def _split(line: str) -> list[str]:
    """Split a line as a shell does, or at spaces if a quote is not closed."""
    line = re.sub(r"\d*>&\d?", " ", line[:MAX_CHARS])
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        return list(lexer)
    except ValueError:
        return line.split()


def _is_program(word: str) -> bool:
    name = posixpath.basename(word)
    return bool(_PYTHON.match(name)) or name in LAUNCHERS | PROGRAMS | SHELLS | {"jupyter", "papermill"}


def _understood(words: Sequence[str], body: str, depth: int) -> Iterator[Ran]:
    rest = list(words)
    while rest and (_ASSIGNMENT.match(rest[0]) or posixpath.basename(rest[0]) in WRAPPERS):
        wrapper = posixpath.basename(rest.pop(0)) in WRAPPERS
        places = [n for n, w in enumerate(rest) if _is_program(w) or w.endswith((".py", ".sh"))]
        known = iter([n for n in places if rest[n] not in PROGRAMS][:1] or places)  # `uv run --with trl python ...`
        rest = rest[next(known, 0) :] if wrapper else rest
    if not rest:
        return
    name, args = posixpath.basename(rest[0]), tuple(rest[1:])
    if name in SHELLS:
        for at, word in enumerate(args):
            if name not in (".", "source") and re.match(r"^-\w*c$", word):
                yield from _inner(name, " ".join(args[at + 1 : at + 2]), depth)
                return
            if not word.startswith("-"):
                yield Ran(0, Command("shell", word, args[at + 1 :]))
                return
        yield from _inner(name, body, depth)
    else:
        yield Ran(0, _command(name, rest[0], args, body))


def _command(name: str, word: str, args: tuple[str, ...], body: str) -> Command:
    if _PYTHON.match(name):
        return _python(args, body)
    if name in LAUNCHERS:
        return _launched(args)
    notebook = next((a for a in args if a.endswith(".ipynb")), None)
    if notebook and (name == "papermill" or (name.startswith("jupyter") and "--execute" in args)):
        return Command("script", notebook, args)
    if name in PROGRAMS:
        return Command("program", name, args)
    if word.endswith((".py", ".sh", ".bash")):
        return Command("script" if word.endswith(".py") else "shell", word, args)
    return Command("other", name, args)


def _python(args: tuple[str, ...], body: str) -> Command:
    at = 0
    while at < len(args):
        word, rest = args[at], args[at + 1 :]
        if word == "-m" and rest:
            if rest[0] in _LAUNCH_MODULES:
                return _launched(rest[1:])
            if rest[0] in ("jupyter", "nbconvert", "papermill"):
                return _command("jupyter" if rest[0] == "nbconvert" else rest[0], "", rest[1:], "")
            return Command("program", "trl", rest[1:]) if rest[0] == "trl.cli" else Command("module", rest[0], rest[1:])
        if word == "-c":
            return Command("inline", " ".join(rest[:1]), rest[1:])
        if not word.startswith("-"):
            return Command("script", word, rest)
        at += 2 if word in ("-X", "-W") else 1
    return Command("inline", body) if body else Command("other", "python")


def _launched(args: tuple[str, ...]) -> Command:
    """Return what a launcher starts: the first script, or the module after -m."""
    for at, word in enumerate(args):
        if word in ("-m", "--module") and at + 1 < len(args):
            return Command("module", args[at + 1], args[at + 2 :])
        if word.endswith(".py"):
            return Command("script", word, args[at + 1 :])
    return Command("other", "launch")


def options(args: Sequence[str]) -> dict[str, str]:
    """Return options by name: `--a b`, `--a=b`, `a.b=c` (Hydra); a flag alone is "true". Dashes become underscores."""
    found: dict[str, str] = {}
    for at, word in enumerate(args):
        name, equals, value = word.lstrip("-+").partition("=")
        if word.startswith("-") and not re.match(r"^-[\d.]", word):
            follows = args[at + 1] if at + 1 < len(args) else "-"
            is_value = not follows.startswith("-") or re.match(r"^-[\d.]", follows) is not None
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


# --- trainers' programs: their options, and configurations by flat keys; aliases and anchors are not resolved

_LINE = re.compile(r"[\"']?([\w.\-]{1,120})[\"']?\s*[:=]\s*(\"[^\"\\\n]{0,300}\"|[^\s,{}\[][^,\n]{0,300})")
Key = tuple[str, str, str]  # name, value and place of a setting


class Asked(NamedTuple):
    """What a trainer's program is asked for. `route` None: it trains no policy."""

    route: Route | None
    why: str
    where: str
    line: int
    sure: bool
    settings: Sequence[Key] = ()
    config: str | None = None


def _items(text: str, path: str) -> list[Key]:
    """Return the keys of a configuration without their parents."""
    numbered = [(n, line[:2_000]) for n, line in enumerate(text.split("\n")[:2_000], start=1)]
    lines = [(n, line) for n, line in numbered if not line.lstrip().startswith("#")]
    found = [(m[1], re.split(r"\s#", m[2])[0], n) for n, line in lines for m in islice(_LINE.finditer(line), 200)]
    return [(key.rsplit(".", 1)[-1], value.strip().strip("'\"").strip(), f"{path}:{n}") for key, value, n in found]


def _by_keys(keys: Mapping[str, str]) -> tuple[Route | None, str] | None:
    """Return what options or keys of a configuration ask for; None if they are no known trainer's."""
    if "merge_method" in keys and keys.keys() & {"model", "dtype", "base_model"}:
        return Route.AVERAGING, "mergekit"
    for name, value in keys.items():
        if name.endswith(("adv_estimator", "advantage_estimator")):
            return known.ESTIMATORS.get(value.lower(), Route.UNKNOWN), "advantage estimator"
    if (stage := keys.get("stage")) and keys.keys() & {"finetuning_type", "template", "dataset"}:
        route = None if stage == "rm" else known.RECIPE_WORDS.get(stage, Route.UNKNOWN)
        return Route.PREFERENCE if keys.get("pref_loss") in known.RELATIVES_OF_DPO else route, "LLaMA-Factory"
    if "base_model" in keys and keys.keys() & {"sequence_len", "micro_batch_size", "adapter", "rl"}:
        return known.RECIPE_WORDS.get(keys.get("rl", "sft").lower(), Route.UNKNOWN), "axolotl"
    return None


def _asked(command: Command, files: Mapping[str, str], where: str, line: int, sure: bool) -> Asked | None:
    """Return what a trainer's program is asked for; None if the command is none."""
    given, name, word = options(command.args), command.target, (*command.args, "")[0]
    path = next((p for a in command.args if a.endswith(CONFIG) and (p := matching(a, files)) is not None), None)
    items = _items(files[path], path) if path else []
    asked = _by_keys({**{key: value for key, value, _ in reversed(items)}, **given})
    is_module = command.kind == "module" and name.startswith(known.TRAINER_MODULES)
    merges = command.kind == "program" and name.startswith("mergekit")
    trains = command.kind == "program" and word in ("sft", "pt", "rlhf", "run", "train", *known.TRL_WORDS)
    if not (is_module or merges or trains):
        return None
    told = name if is_module else " ".join((given.get("rlhf_type") or given.get("stage") or word, *command.args[1:2]))
    words = re.split(r"[._/]", told)
    route = next((known.RECIPE_WORDS[w] for each in words for w in each.split() if w in known.RECIPE_WORDS), None)
    if asked and (route in (None, Route.PPO) or name.startswith(("axolotl", "llamafactory"))):
        route = asked[0]
    if route is Route.DPO and given.get("loss_type") in known.RELATIVES_OF_DPO:
        route = Route.PREFERENCE
    route = route or (Route.SFT if name == "tune" or is_module else Route.UNKNOWN)
    final = Route.AVERAGING if merges else None if {"rm", "reward"} & set(words) else route
    keys = [*((key, value, where) for key, value in given.items()), *items]
    return Asked(final, f"{name} {word}".strip(), where, line, sure, keys, path)


# --- from command lines to files


@dataclass
class Followed:
    """What command lines run of some files.

    Attributes:
        files: with inline programs.
        scripts: Python programs, and whether they are sure to run.
        ordered: the command lines run some of the files; if not, `scripts` are those that no other file names.
    """

    files: dict[str, str]
    scripts: dict[str, bool] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    used: dict[str, None] = field(default_factory=dict)
    ordered: bool = False

    @property
    def settings(self) -> Iterator[Key]:
        return (key for each in self.asked for key in each.settings)


def follow(files: dict[str, str], lines: Sequence[str]) -> Followed:
    """Return what command lines run of `files` (text by path)."""
    found, done = Followed(files), set[Command]()

    def run(command: Command, place: str, line: int, sure: bool, depth: int = 0) -> bool:
        if depth > MAX_DEPTH or command in done or len(done) > MAX_COMMANDS:
            return command in done
        path, where = _path(command, files, place), clean(place, 160) or ""
        if (asked := _asked(command, files, where, line, sure)) is not None:
            found.asked.append(asked)
            found.used |= dict.fromkeys(p for p in (place, asked.config) if p is not None and p in files)
        elif path is None:
            if place in files and any(word.endswith(PYTHON) for word in (command.target, *command.args)):
                found.asked.append(Asked(Route.UNKNOWN, NOT_THERE, where, line, sure))
            return False
        elif path.endswith(PYTHON):
            found.scripts[path] = sure or found.scripts.get(path, False)
        else:
            found.used[path] = None
            for each in commands_in(files[path]):
                run(each.command, path, each.line, sure and each.sure, depth + 1)
        done.add(command)
        return True

    ran = [run(each.command, line, each.line, each.sure) for line in lines for each in commands_in(line)]
    found.ordered = any(ran)
    for path in () if found.ordered else _roots(files):
        run(Command("shell" if path.endswith(SHELL) else "script", path), path, 0, True)
    return found


def _path(command: Command, files: dict[str, str], place: str) -> str | None:
    if command.kind == "inline" and re.search(r"train|backward", command.target):
        files[path := f"inline-{len(files)}.py"] = command.target
        return path
    if command.kind == "module":
        names = [command.target.replace(".", "/") + end for end in (".py", "/__main__.py")]
        return next((found for name in names if (found := matching(name, files)) is not None), None)
    is_file = command.kind in ("script", "shell")
    return matching(command.target, files, posixpath.dirname(place)) if is_file else None


def _roots(files: Mapping[str, str]) -> list[str]:
    """Return the scripts that no other file names."""
    scripts = [path for path in files if path.endswith((*PYTHON, *SHELL))]
    named = re.compile(r"([\w-]{1,80})\.(?:py|sh|bash)\b|(?:from|import) (.{1,200})")
    words = {p: {w for m in named.finditer(files[p]) for w in re.split(r"\W+", m[1] or m[2])} for p in scripts}
    stems = {p: posixpath.basename(p.removesuffix("/__init__.py")).rsplit(".", 1)[0] for p in scripts}
    free = [p for p in scripts if not any(stems[p] in words[other] for other in scripts if other != p)]
    return sorted(free or scripts, key=lambda path: (path.count("/"), path))
