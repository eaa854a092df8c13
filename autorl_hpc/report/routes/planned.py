"""Decide the planned route (`planned`) of an agent's code from commands, shell scripts and syntax trees; `unknown` if unsure."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

from autorl_hpc.records.recorded import ProcessSeen, TraceEvent
from autorl_hpc.report.format import clean
from autorl_hpc.report.routes import configs
from autorl_hpc.report.routes.commands import Command, command_of, commands_in, matching, seen, words_of
from autorl_hpc.report.routes.script import MAX_FLOW, CodePlace, Look, Script, last_name, look_at, said
from autorl_hpc.report.routes.trainers import (
    API_CLIENTS,
    GENERATE,
    LOSS_TYPES_OF_RELATIVES,
    NO_POLICY_TRAINERS,
    OWN_LOSS,
    PREFERENCE,
    RL,
    SUPERVISED,
    TRAINER_CLASSES,
    TRAINER_PACKAGES,
    route_of_loss,
)
from autorl_hpc.report.story_records import EvidenceLine
from autorl_hpc.states import Route

Commanded = ProcessSeen | TraceEvent
"""An observed command line: of a process, or of a tool call in a trace."""


@dataclass(frozen=True)
class Alternative:
    """Another route that the code may take."""

    route: Route
    why: str


@dataclass(frozen=True)
class Planned:
    """The route that code plans.

    Attributes:
        confidence: an ordered scale from 0 to 1, not a probability.
        scripts: files that the finding is based on, in the order in which they run.
    """

    route: Route
    evidence: tuple[EvidenceLine, ...] = ()
    confidence: float = 0.0
    alternatives: tuple[Alternative, ...] = ()
    scripts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Executed:
    """The route that was executed."""

    route: Route
    evidence: tuple[EvidenceLine, ...] = ()
    disputed: bool = False
    """Whether the logs show another kind of training than confident code analysis."""


TRAINER, OWN_LOOP = 0.95, 0.8
"""Confidence in a finding; lower under an open condition."""


@dataclass
class Training:
    """A training in a script, or by a trainer's program."""

    route: Route | None
    """None: it trains no policy."""
    why: str
    path: str
    line: int
    sure: bool = True
    confidence: float = TRAINER
    model: object = None
    """Literal name of the model that training starts from."""
    script: Script | None = None
    data: Sequence[CodePlace] = ()
    """What the rows come from."""


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


_MODEL_NAME = re.compile(r"(^|_)(model|policy|actor|net|critic|lm|student|teacher|ref|reference|m)\d?$", re.I)
_CHECK = re.compile(r"correct|right|solv|reward|score|verif|answer|gold|match|pass|judge|accept|extract|maj", re.I)
_STAGE = re.compile(r"(stage|step|phase|part)[_-]?\d|^\d+[_-]|^stage_", re.I)
_COMMON = frozenset(("train.jsonl", "train.json", "test.jsonl", "config.json"))
"""File names that many scripts use, so that they don't show that one reads what another wrote."""

_WRITERS = ("open", "write", "writelines", "dump", "to_json", "to_parquet", "to_csv", "write_text", "save_to_disk")
_UNSEEN = words_of(
    "exec eval import_module snapshot_download hf_hub_download save_file load_state_dict merge_and_unload add_ mul_ lerp_ "
    "copy_ normal_ copytree save_pretrained save_model"
)
"""Calls that bring or change weights in a way that a plain look can't tell."""


def planned(files: Mapping[str, str | bytes], entry_points: Sequence[str] = ()) -> Planned:
    """Return the route that the code in `files` (text by path) plans; observed command lines decide what ran.

    Never raises, whatever `files` contain. The same input gives the same result.
    """
    done = follow(files, entry_points)
    found = [made for script in done.scripts.values() for made in _trainings(script)] + done.asked
    for made in found:
        if made.route is Route.SFT and made.script is not None:
            _by_samples(made, done)
    trainings = [made for made in found if made.route is not None]
    route, rests_on, confidence, alternatives = _decided(trainings or done.others or _without_training(done), done)
    if route is Route.NONE:
        rests_on = found
        if not found and not done.scripts:
            route, confidence = Route.UNKNOWN, 0.0
    lines = [(made, _line(done.files.get(made.path, ""), made.line)) for made in rests_on[:6]]
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
    )


def _line(text: str, number: int) -> str:
    lines = text.split("\n", number)
    return lines[number - 1].strip()[:160] if 1 <= number <= len(lines) else ""


def _decided(
    found: Sequence[Training], done: Followed
) -> tuple[Route, Sequence[Training], float, tuple[Alternative, ...]]:
    """Return the route, the trainings that it is based on, the confidence, and alternatives."""
    routes = {made.route for made in found}
    if not found:
        return Route.NONE, [], 0.6, ()
    sure = all(made.sure for made in found)
    least = min(made.confidence for made in found) * (1.0 if sure else 0.7)
    if len(routes) == 1:
        return (route := found[0].route or Route.NONE), found, 0.0 if route is Route.UNKNOWN else least, ()
    others = tuple(
        Alternative(m.route, f"{m.path}:{m.line}, {m.why}") for m in found if m.route and m.route is not Route.UNKNOWN
    )
    if sure and not routes & {Route.UNKNOWN, Route.COPY, Route.AVERAGING} and _joined(found, done):
        rl, preference = [m for m in found if m.route in RL], [m for m in found if m.route in PREFERENCE]
        best = rl or preference
        if rl and not preference and (supervised := [m for m in found if m.route in SUPERVISED]):
            models = {m.model for m in rl}
            if not models & {m.model for m in supervised} - {None} or None in models:
                return Route.SFT_RL, found, least, ()
        elif best and len({m.route for m in best}) == 1:
            route = best[0].route or Route.UNKNOWN
            return route, best, 0.7 * least, tuple(a for a in others if a.route is not route)
    return Route.UNKNOWN, found, 0.0, tuple(dict.fromkeys(others))[:6]


def _joined(found: Sequence[Training], done: Followed) -> bool:
    """Return whether trainings are stages of one plan: by one script or command, an observed order, or names of stages."""
    paths = {m.path for m in found}
    return len(paths) == 1 or done.ordered or sum(bool(_STAGE.search(posixpath.basename(path))) for path in paths) > 1


# --- the trainings of a script


def _trainings(script: Script) -> list[Training]:
    """Return the trainers that are run, and hand-written loops."""
    if script.looks[script.path].tree is None:
        return [Training(Route.UNKNOWN, "not read: too long, or no Python 3", script.path, 0)]
    made = [training for call in script.calls if (training := _trainer(script, call)) is not None]
    names = ("train", "step") if any("PPOTrainer" in training.why for training in made) else ("train",)
    runs = [
        place
        for place in script.named
        if getattr(place.node, "attr", "") in names and not _MODEL_NAME.search(last_name(place.node.value))
    ]
    routes = {training.route for training in made}
    for training in made:
        training.sure &= any(run.sure for run in runs) and len({(r.look.path, r.node.lineno) for r in runs}) >= len(
            routes
        )
    return (made if runs else []) + [_loop(script, call) for call in script.called("backward")]


def _class(script: Script, name: str, depth: int = 0) -> tuple[Route | None, str, list[CodePlace]] | None:
    """Return route and name of a trainer's class, and the methods that compute a loss of its own; None if it is not a trainer."""
    for look in script.reached.values():
        if (local := look.classes.get(name)) is not None and depth < 5:
            bases = (look.name_of(base).rsplit(".", 1)[-1] for base in local.bases)
            told = next((told for base in bases if base != name and (told := _class(script, base, depth + 1))), None)
            own = [n for n in local.body if isinstance(n, ast.FunctionDef) and n.name in OWN_LOSS]
            places = [CodePlace(node, look, node.name) for node in own]
            return (told[0], f"{name}, which is a {told[1]}", places or told[2]) if told else None
    imported = {full.split(".", 1)[0] for look in script.reached.values() for full in look.imports.values()}
    if not imported & TRAINER_PACKAGES or name not in {*TRAINER_CLASSES, *NO_POLICY_TRAINERS}:
        return None
    return TRAINER_CLASSES.get(name), name, []


def _trainer(script: Script, call: CodePlace) -> Training | None:
    told = _class(script, call.look.name_of(call.node.func).rsplit(".", 1)[-1])
    if told is None:
        return None
    route, why, own = told
    made = Training(route, why, call.look.path, call.node.lineno, call.sure, model=_model(script, call), script=script)
    parts = {k.arg: call.part(k.value) for k in call.node.keywords}
    made.data = [parts["train_dataset"]] if "train_dataset" in parts else []
    if own:
        nodes, _ = script.flow(own, wide=True)
        loss, words = route_of_loss([place.node for place in nodes])
        if not (loss in (Route.SFT, Route.UNKNOWN) and any(last_name(place.node) == "super" for place in nodes)):
            made.route, made.why = loss, f"{why}, whose loss is {words}"
    settings, _ = script.flow([p for name, p in parts.items() if name in ("args", "config")] or [call])
    literals = ((k.arg, n.look.literal(k.value)) for n in settings for k in getattr(n.node, "keywords", ()))
    given = {name: value for name, value in literals if value is not None and value is not False}
    is_odd = 0 in (given.get("learning_rate"), given.get("max_steps"), given.get("num_train_epochs"))
    if is_odd or (route is Route.SFT and "ForSequenceClassification" in call.look.text):
        made.route, made.why = Route.UNKNOWN, f"{made.why}, set to learn nothing, or of a reward model"
    if route is Route.DPO and given.get("loss_type", "sigmoid") != "sigmoid":
        made.route = Route.PREFERENCE if given["loss_type"] in LOSS_TYPES_OF_RELATIVES else Route.UNKNOWN
    return made


def _loop(script: Script, call: CodePlace) -> Training:
    """Return what a hand-written loop learns, judging by what flows into its loss."""
    parts = [call.part(each) for each in [*call.node.args, getattr(call.node.func, "value", call.node)]]
    nodes, _ = script.flow(parts, wide=True)
    route, why = route_of_loss([place.node for place in nodes])
    if not script.called("step") or len(nodes) >= MAX_FLOW:
        route, why = Route.UNKNOWN, "no step of an optimiser, or too much to be told"
    made = Training(route, f"own loop: {why}", call.look.path, call.node.lineno, call.sure, OWN_LOOP, script=script)
    made.data = parts
    return made


def _model(script: Script, call: CodePlace) -> object:
    """Return the literal name of the model that a call receives or that was loaded for it; None if unknown."""
    named = [k.value for k in call.node.keywords if k.arg in ("model", "pretrained_model_name_or_path")]
    given = [*named, *call.node.args[:1]][:1]
    for _ in range(3):
        if not given or isinstance(known := call.look.literal(given[0]), str):
            return known if given else None
        origins = script.origins(call.part(given[0])) if isinstance(given[0], ast.Name) else []
        loaded = origins[0].node if len(origins) == 1 else None
        given = loaded.args[:1] if isinstance(loaded, ast.Call) else []
    return None


# --- supervised training: where its rows come from


def _by_samples(made: Training, done: Followed) -> None:
    """Refine supervised training by the origin of its rows: samples in this script, or a file that a script wrote from samples."""
    assert made.script is not None
    nodes, tests = made.script.flow(made.data)
    asks = [place for place in nodes if _is_sampling(place)]
    models: set[object] = {made.model}
    place = ""
    for script in done.scripts.values() if not asks else ():
        writes = [call for call in script.called(*_WRITERS) if last_name(call.node.func) != "open" or _is_writing(call)]
        written, tests = script.flow([call.part(a) for call in writes for a in [call.node.func, *call.node.args]])
        named = [call for call in writes if last_name(call.node.func) not in ("write", "writelines")]
        places, _ = script.flow([call.part(a) for call in named for a in [call.node.func, *call.node.args]])
        if _file_names(nodes) & _file_names(places) and any(map(_is_sampling, script.calls)):
            asks = [place for place in written if _is_sampling(place)]
            tests += [test for call in writes for test in call.tests]
            loaded = [
                call for call in script.called("LLM", "from_pretrained") if "Tokenizer" not in said(call.node.func)
            ]
            models = {_model(script, call) for call in loaded}
            place = f" of {script.path}"
            if asks:
                break
            made.route, made.why = Route.UNKNOWN, f"{made.why}, on a file{place}, which samples"
    if not asks:
        if made.confidence == OWN_LOOP and made.script.called(*GENERATE):
            made.route, made.why = Route.UNKNOWN, f"{made.why}, beside samples of a model"
        return
    checked = any(_CHECK.search(said(test)) for test in tests)
    other = made.model is not None and None not in models and made.model not in models
    made.route = Route.REJECTION_SAMPLING if checked and not other else Route.UNKNOWN
    if other or any(map(_is_elsewhere, asks)):
        made.route = Route.DISTILLATION
    made.why += f", on samples{place}" if place else ", on samples that a check kept" if checked else ", on samples"


def _is_sampling(place: CodePlace) -> bool:
    """Return whether a call asks a model for text."""
    return isinstance(place.node, ast.Call) and (
        last_name(place.node.func) in GENERATE
        or place.look.name_of(place.node.func).endswith(("completions.create", "messages.create"))
    )


def _is_elsewhere(place: CodePlace) -> bool:
    """Return whether a sampling call asks a service on another host."""
    roots = {name.split(".")[0] for name in (*place.look.imports.values(), *place.look.imports)}
    local = re.search(r"localhost|127\.0\.0\.1|0\.0\.0\.0", place.look.text)
    return last_name(place.node.func) == "create" and bool(roots & API_CLIENTS) and not local


def _is_writing(call: CodePlace) -> bool:
    modes: list[Any] = [*call.node.args[1:2], *(k.value for k in call.node.keywords if k.arg == "mode")]
    return any(isinstance(m, ast.Constant) and str(m.value)[:1] in ("w", "a", "x") for m in modes)


def _file_names(places: Sequence[CodePlace]) -> set[str]:
    texts = (p.node.value for p in places if isinstance(p.node, ast.Constant) and isinstance(p.node.value, str))
    return {posixpath.basename(t.rstrip("/")) for t in texts if len(t) < 300 and re.search(r"\w[/.]\w", t)} - _COMMON


def _without_training(done: Followed) -> list[Training]:
    """Return what in scripts without training may bring or change weights: a call, or a `train` that nothing is seen to run."""
    found = []
    for script in done.scripts.values():
        found += [(call.look, call.node) for call in script.calls if last_name(call.node.func) in _UNSEEN]
        for look in script.reached.values():
            named = [node for node in ast.walk(look.tree or ast.Module([], [])) if isinstance(node, ast.Attribute)]
            named = [node for node in named if node.attr in ("train", "backward")]
            found += [(look, node) for node in named if not _MODEL_NAME.search(last_name(node.value))]
    return [Training(Route.UNKNOWN, "not known what it does", look.path, node.lineno) for look, node in found]
