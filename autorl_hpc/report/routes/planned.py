"""Decide the planned route (`planned`) of an agent's code from what its command lines run; `unknown` if unsure."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autorl_hpc.report.format import clean
from autorl_hpc.report.routes.commands import Command, commands_in, matching, options
from autorl_hpc.report.routes.syntax import (
    OWN_LOOP,
    Parsed,
    Program,
    Training,
    checks,
    models,
    opaque,
    parsed,
    samplings,
    settings_in,
    trainings,
)
from autorl_hpc.report.routes.trainers import (
    ESTIMATORS,
    PREFERENCE,
    RECIPE_WORDS,
    RELATIVES_OF_DPO,
    RL,
    SUPERVISED,
    TRAINER_MODULES,
    key_of,
)
from autorl_hpc.report.story_records import EvidenceLine, Setting
from autorl_hpc.states import Route

PYTHON, SHELL = (".py", ".pyw", ".ipynb"), (".sh", ".bash", ".slurm", ".sbatch")
CONFIG = (".yaml", ".yml", ".json", ".toml")
MAX_PROGRAMS, MAX_COMMANDS, MAX_ITEMS, MAX_DEPTH, MAX_SETTINGS = 60, 200, 2_000, 8, 60
UNSTARTED = 0.4
"""Confidence in a configuration that nothing is seen to start."""


@dataclass(frozen=True)
class Planned:
    """The route that code plans.

    Attributes:
        confidence: an ordered scale from 0 to 1, not a probability.
        alternatives: other routes that the code may take.
        scripts: files that run, in their order.
        trainings: all that were found.
        settings: literal values that trainers, optimizers and samplers are given.
    """

    route: Route
    evidence: tuple[EvidenceLine, ...] = ()
    confidence: float = 0.0
    alternatives: tuple[Route, ...] = ()
    scripts: tuple[str, ...] = ()
    trainings: tuple[Training, ...] = ()
    settings: tuple[Setting, ...] = ()


# --- trainers' programs and their configurations, by flat keys; aliases and anchors are not resolved

_LINE = re.compile(r"^\s*(?:- +)?[\"']?([\w.\-]{1,120})[\"']?\s*[:=]\s*(\S.{0,300}?)\s*,?$")
_JSON = re.compile(r"\"([^\"\\\n]{1,120})\"\s*:\s*(\"[^\"\\\n]{0,300}\"|[-+\w.]{1,40})")


def _items(text: str, path: str) -> list[tuple[str, str, int]]:
    """Return (key, value, line) of a configuration, without parent keys."""
    found: list[tuple[str, str, int]] = []
    for number, line in enumerate(text.split("\n")[: 10 * MAX_ITEMS], start=1):
        if path.endswith(".json"):
            found += [(m[1], m[2].strip('"'), number) for m in _JSON.finditer(line[:20_000])]
        elif len(line) <= 2_000 and not line.lstrip().startswith("#") and (m := _LINE.match(line)):
            found.append((m[1].rsplit(".", 1)[-1], re.split(r"\s#", m[2])[0].strip().strip("'\""), number))
    return found[:MAX_ITEMS]


def _asked(keys: Mapping[str, str]) -> tuple[Route | None, str] | None:
    """Return what options or keys of a configuration ask for; None if they are no known trainer's."""
    if "merge_method" in keys and keys.keys() & {"model", "dtype", "base_model"}:
        return Route.AVERAGING, "mergekit"
    estimator = next((v for k, v in keys.items() if k.endswith(("adv_estimator", "advantage_estimator"))), None)
    if estimator is not None:
        return ESTIMATORS.get(estimator.lower(), Route.UNKNOWN), "advantage estimator"
    if keys.get("stage") == "rm":
        return None, "a reward model"
    if keys.get("stage") in RECIPE_WORDS and keys.keys() & {"finetuning_type", "template", "dataset"}:
        route = RECIPE_WORDS[keys["stage"]]
        return Route.PREFERENCE if keys.get("pref_loss") in RELATIVES_OF_DPO else route, "LLaMA-Factory"
    if "base_model" in keys and keys.keys() & {"sequence_len", "micro_batch_size", "adapter", "rl"}:
        return RECIPE_WORDS.get(keys.get("rl", "sft").lower(), Route.UNKNOWN), "axolotl"
    return None


def asked_by(command: Command, files: Mapping[str, str]) -> tuple[Route | None, str, str | None] | None:
    """Return route, reason and configuration of a trainer's program; None if the command is none."""
    given, name, word = options(command.args), command.target, (*command.args, "")[0]
    path = next((p for a in command.args if a.endswith(CONFIG) and (p := matching(a, files)) is not None), None)
    asked = _asked({**{k: v for k, v, _ in reversed(_items(files[path], path) if path else [])}, **given})
    if command.kind == "module" and name.startswith(TRAINER_MODULES):
        words = re.split(r"[._]", name)
        route = next((RECIPE_WORDS[w] for w in words if w in RECIPE_WORDS), Route.SFT)
        if "rm" in words or "reward" in words:
            return None, name, path
        refines = route is Route.PPO or name.startswith("axolotl")
        return (asked[0] if refines and asked else route), name, path
    if name.startswith("mergekit") and command.kind == "program":
        return Route.AVERAGING, name, path
    if command.kind != "program" or name in ("cp", "rsync"):
        return None
    if name in ("llamafactory-cli", "axolotl"):
        asked = asked or (RECIPE_WORDS.get(given.get("stage", ""), Route.UNKNOWN), name)
        return (asked[0], f"{name}: {asked[1]}", path) if word == "train" else None
    if name == "trl" and word == "reward":
        return None, "trl reward", path
    if name == "trl" and word == "dpo" and given.get("loss_type") in RELATIVES_OF_DPO:
        return Route.PREFERENCE, "trl dpo", path
    recipe = {"swift": given.get("rlhf_type", word), "tune": "_".join(command.args[1:2])}.get(name, word)
    route = next((RECIPE_WORDS[w] for w in re.split(r"[_/.]", recipe) if w in RECIPE_WORDS), None)
    if name == "tune" and word == "run":
        return route or Route.SFT, "torchtune", path
    return (route, f"{name} {word}", path) if route and name != "tune" else None


# --- what command lines run

_STORED_MODEL = re.compile(r"MODEL_PATH|models?\b|\bbase\b", re.I)
_NO_START = frozenset("print open Path exists copy copy2 add_argument info join read_text write_text".split())


class Followed:
    """Everything that command lines run, or, if they run nothing of this code, the scripts that no other file names."""

    def __init__(self, files: Mapping[str, str], lines: Sequence[str]) -> None:
        self.files = dict(files)
        self.parsed = {path: parsed(path, text) for path, text in files.items() if path.endswith(PYTHON)}
        self.programs: dict[str, Program] = {}
        self.asked: list[Training] = []
        self.others: list[Training] = []  # copies, averages, programs that are not in the code
        self.options: list[tuple[str, str, str]] = []
        self.used: dict[str, None] = {}
        self._done: set[Command] = set()
        ran = [self._run(each.command, line, each.line, each.sure) for line in lines for each in commands_in(line)]
        self.ordered = any(ran)
        if not self.ordered:
            for path in self._roots():
                self._run(Command("shell" if path.endswith(SHELL) else "script", path), path, 0, True)
        if not (self.programs or self.asked or self.others):
            told = [(path, _asked(dict((k, v) for k, v, _ in _items(t, path)))) for path, t in files.items() if path.endswith(CONFIG)]
            found = [Training(a[0], f"{a[1]}; nothing runs it", path, 0, True, UNSTARTED) for path, a in told if a and a[0]]
            self.asked += found
            self.used |= dict.fromkeys(each.path for each in found)

    def _run(self, command: Command, place: str, line: int, sure: bool, depth: int = 0) -> bool:
        if depth > MAX_DEPTH or len(self.programs) >= MAX_PROGRAMS or command in self._done:
            return command in self._done
        where = clean(place, 160) or ""
        asked = asked_by(command, self.files)
        if asked is not None:
            self._done.add(command)
            made = Training(asked[0], asked[1], where, line, sure)
            (self.others if asked[0] is Route.AVERAGING else self.asked).append(made)
            self.options += [(name, value, where) for name, value in options(command.args).items()]
            self.used |= dict.fromkeys(p for p in (place, asked[2]) if p is not None and p in self.files)
            return True
        if command.target in ("cp", "rsync") and command.kind == "program":
            words = [word for word in command.args if not word.startswith("-")]
            copies = 1 < len(words) < len(command.args) and _STORED_MODEL.search(" ".join(words[:-1])) is not None
            self.others += [Training(Route.COPY, f"`{command.target}` of a folder", where, line, sure, 0.8)] * copies
            return copies
        path = self._path(command, place)
        if path is None:
            unread = command.kind in ("script", "other") and any(w.endswith(PYTHON) for w in (command.target, *command.args))
            if unread and place in self.files:
                self.others.append(Training(Route.UNKNOWN, "starts a program that is not in the code", where, line))
            return False
        self._done.add(command)
        self.used.setdefault(path)
        if path.endswith(SHELL):
            for each in commands_in(self.files[path]):
                self._run(each.command, path, each.line, sure and each.sure, depth + 1)
        elif path in self.parsed:
            program = self.programs[path] = Program(path, self.parsed, sure)
            self.used |= dict.fromkeys(program.reached)
            for started, at, is_sure in self._started(program):
                self._run(started, path, at, sure and is_sure, depth + 1)
        return True

    def _path(self, command: Command, place: str) -> str | None:
        if command.kind == "inline":
            self.files[path := f"inline-{len(self.programs)}.py"] = command.target
            self.parsed[path] = parsed(path, command.target)
            return path if re.search(r"train|backward|Trainer", command.target) else None
        if command.kind == "module":
            base = command.target.replace(".", "/")
            return next((p for e in (".py", "/__main__.py") if (p := matching(base + e, self.parsed)) is not None), None)
        return matching(command.target, self.files, posixpath.dirname(place)) if command.kind in ("script", "shell") else None

    def _started(self, program: Program) -> Iterator[tuple[Command, int, bool]]:
        """Yield the programs that a script starts, as far as its calls name them."""
        for call in program.calls:
            texts = [n.value for n in ast.walk(call.node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            words = " ".join(text for text in texts[:40] if len(text) < 2_000)
            if call.node.func and getattr(call.node.func, "attr", getattr(call.node.func, "id", "")) in _NO_START:
                continue
            target = next((w for w in words.split() if w.endswith((*PYTHON, *SHELL)) and matching(w, self.files)), "")
            found = [each.command for each in commands_in(words) if each.command.kind in ("program", "module")]
            if target:
                found = [Command("shell" if target.endswith(SHELL) else "script", target)]
            yield from ((command, call.node.lineno, call.sure) for command in found[:4])

    def _roots(self) -> list[str]:
        scripts = [path for path in self.files if path.endswith((*PYTHON, *SHELL))]
        words = {path: set(re.findall(r"[\w.-]+|\w+(?=\.)", self.files[path])) for path in scripts}
        imports = {p: " ".join(re.findall(r"^\s*(?:from|import)\s(.+)", self.files[p], re.M)) for p in scripts}
        named = set()
        for path in scripts:
            base = posixpath.basename(path)
            stem = posixpath.basename(posixpath.dirname(path)) if base == "__init__.py" else base.rsplit(".", 1)[0]
            if any(o != path and (base in words[o] or re.search(rf"\b{re.escape(stem)}\b", imports[o])) for o in scripts):
                named.add(path)
        return sorted(set(scripts) - named or scripts, key=lambda path: (path.count("/"), path))


@lru_cache(maxsize=16)
def _planned(files: tuple[tuple[str, str], ...], lines: tuple[str, ...]) -> Planned:
    done = Followed(dict(files), lines)
    found = [_by_samples(made, program, done) for program in done.programs.values() for made in trainings(program)]
    found += done.asked
    policies = [made for made in found if made.route is not None]
    hidden = [
        Training(Route.UNKNOWN, "not known what it does", place.file.path, place.node.lineno)
        for program in done.programs.values()
        for place in (() if policies or done.others else opaque(program))
    ]
    chosen = policies or done.others or hidden
    route, confidence, alternatives = _decided(chosen, done)
    if route is Route.NONE and not found and not done.programs:
        route, confidence = Route.UNKNOWN, 0.0
    return Planned(
        route=route,
        evidence=tuple(_evidence(made, done.files.get(made.path, "")) for made in (chosen or found)[:6]),
        confidence=round(confidence, 2),
        alternatives=alternatives,
        scripts=tuple(done.used),
        trainings=tuple(found),
        settings=_settings(done),
    )


def planned(files: Mapping[str, str | bytes], entry_points: Sequence[str] = ()) -> Planned:
    """Return the route that the code in `files` (text by path) plans; observed command lines decide what ran.

    Never raises, whatever `files` contain. The same input gives the same result.
    """
    known = {path: raw for path, raw in sorted(files.items()) if path.endswith((*PYTHON, *SHELL, *CONFIG))}
    texts = tuple((p, r if isinstance(r, str) else r.decode("utf-8", "replace")) for p, r in known.items())
    return _planned(texts, tuple(dict.fromkeys(entry_points))[-MAX_COMMANDS:])


def _evidence(made: Training, text: str) -> EvidenceLine:
    lines = text.split("\n", made.line)
    says = lines[made.line - 1].strip()[:160] if 1 <= made.line <= len(lines) else ""
    where = f"{made.path}:{made.line}" if made.line else made.path
    return EvidenceLine(where=clean(where, 200) or "", says=clean(f"{says} [{made.why}]".strip(), 240) or "")


_STAGE = re.compile(r"(stage|step|phase|part)[_-]?\d|^\d+[_-]|^stage_", re.I)


def _decided(found: Sequence[Training], done: Followed) -> tuple[Route, float, tuple[Route, ...]]:
    """Return the route, the confidence, and alternatives."""
    routes = list(dict.fromkeys(made.route for made in found if made.route))
    if not found:
        return Route.NONE, 0.6, ()
    sure = all(made.sure for made in found)
    least = min(made.confidence for made in found) * (1.0 if sure else 0.7)
    if len(routes) == 1:
        return routes[0], 0.0 if routes[0] is Route.UNKNOWN else least, ()
    paths = {made.path for made in found}
    joined = len(paths) == 1 or done.ordered or sum(bool(_STAGE.search(posixpath.basename(path))) for path in paths) > 1
    if sure and joined and not set(routes) & {Route.UNKNOWN, Route.COPY, Route.AVERAGING}:
        rl, preference, supervised = ([m for m in found if m.route in kind] for kind in (RL, PREFERENCE, SUPERVISED))
        if rl and supervised and not preference:
            of_rl = {made.model for made in rl}
            if not of_rl & {made.model for made in supervised} - {None} or None in of_rl:
                return Route.SFT_RL, least, ()
        elif len({made.route for made in rl or preference}) == 1 and (best := (rl or preference)[0].route):
            return best, 0.7 * least, tuple(route for route in routes if route is not best)
    return Route.UNKNOWN, 0.0, tuple(route for route in routes if route is not Route.UNKNOWN)[:6]


def _by_samples(made: Training, program: Program, done: Followed) -> Training:
    """Refine supervised training by the origin of its rows: samples in this program, or a file that another one wrote."""
    if made.route is not Route.SFT:
        return made
    asks, source, where = samplings(program), program, ""
    if not asks:
        own = _file_names(program)
        others = [p for p in done.programs.values() if p is not program and samplings(p) and _file_names(p) & own]
        if not others:
            return made
        source, where = others[0], f" of {others[0].path}"
        asks = samplings(source)
    elsewhere = any(not call.file.full(call.node.func).endswith(("generate", "chat")) for call in asks)
    local = any(re.search(r"localhost|127\.0\.0\.1|0\.0\.0\.0", done.files[path]) for path in source.reached)
    known = models(source) if source is not program else {made.model}
    other = made.model is not None and None not in known and made.model not in known
    plain = checks(source) and (source is not program or made.confidence > OWN_LOOP)
    route = Route.REJECTION_SAMPLING if plain else Route.UNKNOWN
    if (elsewhere and not local) or other:
        route = Route.DISTILLATION
    return replace(made, route=route, why=f"{made.why}, beside samples{where}")


def _file_names(program: Program) -> set[str]:
    texts = (p.node.value for p in program.parts if isinstance(p.node, ast.Constant) and isinstance(p.node.value, str))
    names = {posixpath.basename(t.rstrip("/")) for t in texts if len(t) < 300}
    return {name for name in names if re.search(r"\w\.(jsonl?|csv|parquet|txt)$", name)} - {"train.jsonl", "train.json", "test.jsonl"}


def _settings(done: Followed) -> tuple[Setting, ...]:
    """Return the key settings, sorted by the list of key settings, then by place."""
    found = list(done.options)
    for path in [path for path in done.used if path.endswith(CONFIG)]:
        found += [(key, value, f"{path}:{line}") for key, value, line in _items(done.files[path], path)]
    found += [each for program in done.programs.values() for each in settings_in(program)]
    known = [(order, *each) for each in dict.fromkeys(found) if each[1] and (order := key_of(each[0])) is not None]
    return tuple(
        Setting(name=clean(name, 80) or "", value=clean(value, 120) or "", where=clean(where, 200) or "")
        for _, name, value, where in sorted(known, key=lambda one: (one[0], one[3]))[:MAX_SETTINGS]
    )
