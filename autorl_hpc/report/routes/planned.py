"""Decide the planned route (`planned`) of an agent's code from commands, shell scripts and syntax trees; `unknown` if unsure."""

from __future__ import annotations

import ast
import hashlib
import posixpath
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from autorl_hpc.report.format import clean
from autorl_hpc.report.routes import configs
from autorl_hpc.report.routes.commands import Command, command_of, commands_in, matching, seen, words_of
from autorl_hpc.report.routes.look import Look, base_names, called, look_at, receiver, said
from autorl_hpc.report.routes.route import Alternative, Planned, Training
from autorl_hpc.report.routes.script import CHECK, MODEL_NAME, CodePlace, Script, is_elsewhere, is_sampling
from autorl_hpc.report.routes.trainers import PREFERENCE, RL, SUPERVISED
from autorl_hpc.report.story_records import EvidenceLine
from autorl_hpc.states import Route

PYTHON, SHELL = (".py", ".pyw", ".ipynb"), (".sh", ".bash", ".slurm", ".sbatch")
MAX_FILES, MAX_FILE_CHARS, MAX_ALL_CHARS, MAX_CACHED = 400, 400_000, 4_000_000, 256
MAX_COMMANDS, MAX_SCRIPTS = 200, 60
_LAST = "last followed"
"""Key of the last result in a caller's cache; all other keys are digests."""

_STORED_MODEL = re.compile(r"MODEL_PATH|models?\b|\bbase\b", re.I)
_STAGE = re.compile(r"(stage|step|phase|part)[_-]?\d|^\d+[_-]|^stage_", re.I)
_NO_START = words_of("print open Path exists copy copy2 add_argument info join read_text write_text")
_WRITERS = words_of("open to_json to_parquet to_csv write_text save_to_disk dump")
_CONTENT = words_of("write writelines dump to_json to_parquet to_csv write_text save_to_disk")
_OPAQUE = words_of("exec eval import_module snapshot_download hf_hub_download")
_WEIGHTS = words_of("save_file load_state_dict merge_and_unload add_ mul_ lerp_ copy_ normal_")


@dataclass
class Followed:
    """Everything that the command lines run."""

    files: Mapping[str, str]
    looks: Mapping[str, Look]
    scripts: dict[str, Script] = field(default_factory=dict)
    trainings: list[Training] = field(default_factory=list)
    others: list[Training] = field(default_factory=list)
    """Without training: copies, averages, and changes of weights of unknown kind."""
    commands: list[tuple[Command, str]] = field(default_factory=list)
    """Command lines of trainers' programs, with their places."""
    used: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ordered: bool = True
    """Whether the scripts ran in this order; else it is the order of their names."""
    _done: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)

    def run(self, command: Command, place: str, line: int, sure: bool = True, depth: int = 0) -> bool:
        """Follow one command; return False if it runs nothing of this code."""
        if depth > 8 or len(self.scripts) >= MAX_SCRIPTS:
            return False
        if command.kind == "shell-text":
            ran = [self.run(c, place, line, sure and s, depth + 1) for _, c, s in commands_in(command.target)]
            return any(ran)
        asked = configs.asked_by_command(command, self.files)
        if asked is not None:
            self.commands.append((command, f"{place}:{line}" if line else place))
            self.used |= dict.fromkeys([p for p in (place, asked.path) if p is not None and p in self.files])
            made = Training(asked.route, asked.why, place, line, sure)
            (self.others if asked.route is Route.AVERAGING else self.trainings).append(made)
            return True
        if command.kind == "program" and command.target in ("cp", "rsync"):
            words = [word for word in command.args if not word.startswith("-")]
            if len(words) > 1 and len(words) < len(command.args) and _STORED_MODEL.search(" ".join(words[:-1])):
                self.others.append(Training(Route.COPY, f"`{command.target}` of a folder", place, line, sure))
                return True
            return False
        path = self._path(command, place)
        if path is None:
            names_one = command.kind == "other" and any(word.endswith(PYTHON) for word in command.args)
            if (names_one or command.kind in ("script", "inline")) and place in self.files:
                self.others.append(Training(Route.UNKNOWN, "starts a program that is not in the code", place, line))
            return False
        if (path, command.args) not in self._done:
            self._done.add((path, command.args))
            self.used.setdefault(path)
            if path.endswith(SHELL):
                for number, each, is_sure in commands_in(self.files[path]):
                    self.run(each, path, number, sure and is_sure, depth + 1)
            else:
                self._script(path, command, sure, depth)
        return True

    def _path(self, command: Command, place: str) -> str | None:
        target = command.target
        if command.kind == "module":
            base = target.replace(".", "/")
            return next((p for e in (".py", "/__main__.py") if (p := matching(base + e, self.looks)) is not None), None)
        return matching(target, self.files, posixpath.dirname(place)) if command.kind in ("script", "shell") else None

    def _script(self, path: str, command: Command, sure: bool, depth: int) -> None:
        if path not in self.looks:
            return
        script = self.scripts[path] = Script(path, self.looks, command.args)
        if self.looks[path].tree is None:
            self.others.append(Training(Route.UNKNOWN, self.looks[path].note or "", path, 0))
        first = len(self.trainings)
        for made in script.trainings():
            made.sure = made.sure and sure
            self.trainings.append(made)
        self.used |= dict.fromkeys(script.reached)
        for started, at, is_sure in self._started(script):
            self.run(started, path, at, sure and is_sure, depth + 1)
        if all(made.route is None for made in self.trainings[first:]):
            self.others += _without_training(script)

    def _started(self, script: Script) -> list[tuple[Command, int, bool]]:
        """Return the programs that a script starts, as far as its calls name them."""
        found = []
        for place in script.calls:
            call = place.node
            if called(call) in _NO_START:
                continue
            given = [n for a in [*call.args, *call.keywords] for n in islice(ast.walk(a), 40)]
            texts = [n.value for n in given if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            words = " ".join(text for text in texts if len(text) < 2_000)
            target = next((w for w in words.split() if w.endswith((*PYTHON, *SHELL))), None)
            if target is not None and matching(target, self.files) is not None:
                command = Command("shell" if target.endswith(SHELL) else "script", target, command_of(words).args)
            elif (command := command_of(words)).kind not in ("program", "module", "script"):
                continue
            found.append((command, call.lineno, place.sure))
        return found


def _without_training(script: Script) -> list[Training]:
    """Return what a script without training does to weights: a copy, or a change of unknown kind."""
    found: list[Training] = []

    def add(route: Route, why: str, look: Look, node: Any) -> None:
        found.append(Training(route, why, look.path, node.lineno, confidence=0.8))

    for call in script.calls:
        name = called(call.node)
        if name in _OPAQUE | _WEIGHTS:
            add(Route.UNKNOWN, f"`{name}`: not known what it brings", call.look, call.node)
        elif name == "copytree" and _STORED_MODEL.search(_origin_of(script, call)):
            add(Route.COPY, "a model's folder is copied", call.look, call.node)
        elif name in ("save_pretrained", "save_model") and "AutoModelForCausalLM" in _origin_of(script, call):
            add(Route.COPY, "a model is saved that nothing trained", call.look, call.node)
    for look in script.reached.values():
        for node in ast.walk(look.tree) if look.tree is not None else ():
            is_training = isinstance(node, ast.Attribute) and node.attr in ("train", "backward")
            if is_training and not MODEL_NAME.search(receiver(node)):
                add(Route.UNKNOWN, "a training that nothing is seen to run", look, node)
    return found


def _origin_of(script: Script, call: CodePlace) -> str:
    """Return the names and strings that flow into what is copied or saved."""
    parts, _ = script.flow([call.part(a) for a in [*call.node.args[:1], getattr(call.node.func, "value", call.node)]])
    return " ".join(str(getattr(p.node, "value", getattr(p.node, "id", ""))) for p in parts)


# --- the result


def planned(
    files: Mapping[str, str | bytes], entry_points: Sequence[str] = (), cache: MutableMapping[str, Any] | None = None
) -> Planned:
    """Return the route that the code in `files` (text by path) plans; observed command lines decide what ran.

    Never raises, whatever `files` contain. The same input gives the same result.
    """
    done = follow(files, entry_points, cache)
    trainings = [t for t in done.trainings if t.route is not None]
    if not trainings and not done.others and not done.scripts:
        asked = [
            a for p, t in done.files.items() if p.endswith(configs.ENDINGS) if (a := configs.asked_by_config(t, p))
        ]
        trainings = [
            Training(a.route, f"{a.why}; nothing runs it", a.path or "", 0, confidence=0.4) for a in asked if a.route
        ]
    route, rests_on, confidence, alternatives = _decided(trainings or done.others, done)
    if route is Route.NONE and len(trainings) < len(done.trainings):
        rests_on = done.trainings
    lines = [
        (t, _line(done.looks[t.path].text if t.path in done.looks else done.files.get(t.path, ""), t.line))
        for t in rests_on[:6]
    ]
    return Planned(
        route=route,
        evidence=tuple(
            EvidenceLine(
                where=clean(f"{t.path}:{t.line}" if t.line else t.path, 200) or "",
                says=clean(f"{says} [{t.why}]".strip(), 240) or "",
            )
            for t, says in lines
        ),
        confidence=round(confidence, 2),
        alternatives=alternatives,
        scripts=tuple(done.used),
        notes=tuple(done.notes[:50]),
    )


def _line(text: str, number: int) -> str:
    lines = text.split("\n", number)
    return lines[number - 1].strip()[:160] if 1 <= number <= len(lines) else ""


def _decided(found: Sequence[Training], done: Followed) -> tuple[Route, list[Training], float, tuple[Alternative, ...]]:
    """Return the route, the trainings that it is based on, the confidence, and alternatives."""
    for made in found:
        if made.route is Route.SFT:
            _by_samples(made, done)
    routes = list(dict.fromkeys(made.route for made in found if made.route is not None))
    if not routes:
        return (Route.NONE if len(done.scripts) < MAX_SCRIPTS else Route.UNKNOWN), [], 0.6, ()
    sure = all(made.sure for made in found)
    least = min(made.confidence for made in found) * (1.0 if sure else 0.7)
    if len(routes) == 1:
        return routes[0], list(found), least if routes[0] is not Route.UNKNOWN else 0.0, ()
    others = [
        Alternative(m.route, f"{m.path}:{m.line}, {m.why}") for m in found if m.route not in (None, Route.UNKNOWN)
    ]
    if sure and not {Route.UNKNOWN, Route.COPY, Route.AVERAGING} & set(routes) and _joined(found, done):
        rl, preference = [m for m in found if m.route in RL], [m for m in found if m.route in PREFERENCE]
        supervised = [m for m in found if m.route in SUPERVISED]
        best = rl or preference
        if rl and supervised and not preference:
            same = {m.model for m in rl} & {m.model for m in supervised} - {None}
            if not same or None in {m.model for m in rl}:
                return Route.SFT_RL, list(found), least, ()
        elif best and len(kinds := {m.route for m in best}) == 1 and (route := kinds.pop()) is not None:
            return route, best, 0.7 * least, tuple(a for a in others if a.route is not route)
    return Route.UNKNOWN, list(found), 0.0, tuple(dict.fromkeys(others))[:6]


def _joined(found: Sequence[Training], done: Followed) -> bool:
    """Return whether trainings are stages of one plan: by one script or command, an observed order, or names of stages."""
    paths = {m.path for m in found}
    names = [posixpath.basename(path) for path in paths]
    return len(paths) == 1 or done.ordered or sum(_STAGE.search(name) is not None for name in names) > 1


def _by_samples(made: Training, done: Followed) -> None:
    """Refine supervised training on a file that a script of this code wrote from samples."""
    for script in done.scripts.values() if made.reads else ():
        if not made.reads & _written(script):
            continue
        writes = [call for name in _CONTENT for call in script.by_name[name]]
        nodes, tests = script.flow([call.part(a) for call in writes for a in [call.node.func, *call.node.args]])
        tests += [test for call in writes for test in call.tests]
        asks = [node for node in nodes if is_sampling(node)]
        if not asks and any(map(is_sampling, script.calls)):
            made.route, made.why = Route.UNKNOWN, f"{made.why}, on a file of {script.path}, which samples"
        if not asks:
            continue
        loaded = [call for name in ("LLM", "from_pretrained") for call in script.by_name[name]]
        models = {script.model(call) for call in loaded if "Tokenizer" not in said(call.node.func)}
        checks = any(CHECK.search(said(test)) for test in tests)
        other = made.model is not None and None not in models and made.model not in models
        made.route = Route.REJECTION_SAMPLING if checks and not other else Route.UNKNOWN
        made.route = Route.DISTILLATION if other or any(map(is_elsewhere, asks)) else made.route
        made.why += f", on samples of {script.path}"
        return


def _written(script: Script) -> set[str]:
    """Return base names of the files that a script may write."""
    calls = [c for name in _WRITERS for c in script.by_name[name] if name != "open" or _is_writing(c.node)]
    nodes, _ = script.flow([call.part(a) for call in calls for a in [call.node.func, *call.node.args]])
    return base_names([n.node for n in nodes])


def _is_writing(call: ast.Call) -> bool:
    modes = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
    return any(isinstance(m, ast.Constant) and str(m.value)[:1] in ("w", "a", "x") for m in modes)


def follow(
    files: Mapping[str, str | bytes], entry_points: Sequence[str], cache: MutableMapping[str, Any] | None
) -> Followed:
    """Read files and follow command lines. The last result is cached, because settings are computed after the route."""
    lines = list(dict.fromkeys(entry_points))[-MAX_COMMANDS:]
    texts, notes = _texts(files)
    digests = {
        path: hashlib.sha256(f"{path}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()
        for path, text in texts.items()
    }
    question = (tuple(digests.values()), tuple(lines))
    if cache is not None and (kept := cache.get(_LAST)) is not None and kept[0] == question:
        return kept[1]  # type: ignore[no-any-return]
    looks: dict[str, Look] = {}
    for path, text in texts.items():
        if path.endswith(PYTHON):
            looks[path] = (cache or {}).get(digests[path]) or look_at(path, text)
            if cache is not None:
                while len(cache) >= MAX_CACHED:
                    cache.pop(next(iter(cache)))
                cache[digests[path]] = looks[path]
    done = Followed(texts, looks, notes=notes + [f"{p}: {look.note}" for p, look in looks.items() if look.note])
    ran = [done.run(command, "command line", 0) for line in lines for command in seen(line)]
    if not any(ran):
        roots = _roots(texts, looks)
        done.ordered = len(roots) == 1
        for path in roots:
            done.run(Command("shell" if path.endswith(SHELL) else "script", path), path, 0)
    if cache is not None:
        cache[_LAST] = (question, done)
    return done


def _texts(files: Mapping[str, str | bytes]) -> tuple[dict[str, str], list[str]]:
    """Return the texts of relevant files, those near the root first, and notes on what was left out."""
    found: dict[str, str] = {}
    notes: list[str] = []
    left = MAX_ALL_CHARS
    known = sorted(
        (p for p in files if p.endswith((*PYTHON, *SHELL, *configs.ENDINGS))), key=lambda p: (p.count("/"), p)
    )
    for path in known[:MAX_FILES]:
        if len(raw := files[path]) > min(MAX_FILE_CHARS, left):
            notes.append(f"{path}: {len(raw):,} characters, not read")
            continue
        left -= len(raw)
        found[path] = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    if len(known) > MAX_FILES:
        notes.append(f"{len(known) - MAX_FILES} more files were not read")
    return found, notes


def _roots(texts: Mapping[str, str], looks: Mapping[str, Look]) -> list[str]:
    """Return the scripts that no other file names or imports; all scripts if there are none."""
    scripts = [path for path in texts if path.endswith((*PYTHON, *SHELL))]
    words = {path: set(re.findall(r"[\w.-]+", text)) for path, text in texts.items() if path in scripts}
    imported = {path: look.imported for path, look in looks.items()}
    named = set()
    for path in scripts:
        base = posixpath.basename(path)
        stem = base.rsplit(".", 1)[0] if base != "__init__.py" else posixpath.basename(posixpath.dirname(path))
        if any(p != path and (base in words[p] or stem in imported.get(p, ())) for p in scripts):
            named.add(path)
    return sorted(set(scripts) - named or scripts, key=lambda path: (path.count("/"), path))
