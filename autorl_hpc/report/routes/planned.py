"""Decide the planned route (`planned`) of an agent's code: what its command lines run, and trainers' configurations.

`unknown` wherever that is not plain.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from autorl_hpc.report.format import clean
from autorl_hpc.report.routes import trainers as known
from autorl_hpc.report.routes.commands import Command, commands_in, matching, options
from autorl_hpc.report.routes.syntax import (
    LiveCode,
    Training,
    by_samples,
    opaque,
    parsed,
    settings_in,
    started,
    trainings,
)
from autorl_hpc.report.story_records import EvidenceLine, Setting
from autorl_hpc.states import Route

PYTHON, SHELL = (".py", ".pyw", ".ipynb"), (".sh", ".bash", ".slurm", ".sbatch")
CONFIG = (".yaml", ".yml", ".json", ".toml")
MAX_COMMANDS, MAX_DEPTH, MAX_SETTINGS = 200, 5, 60
UNSTARTED = 0.4
"""Confidence in a configuration that nothing is seen to start."""

_STAGE = re.compile(r"(stage|step|phase|part)[_-]?\d|^\d+[_-]|^stage_", re.I)


@dataclass(frozen=True)
class Planned:
    """The route that code plans, and what it rests on. `confidence` orders findings from 0 to 1 and is no probability."""

    route: Route
    evidence: tuple[EvidenceLine, ...] = ()
    confidence: float = 0.0
    alternatives: tuple[Route, ...] = ()
    scripts: tuple[str, ...] = ()
    trainings: tuple[Training, ...] = ()
    settings: tuple[Setting, ...] = ()


# --- trainers' programs and their configurations, by flat keys; aliases and anchors are not resolved

_LINE = re.compile(r"[\"']?([\w.\-]{1,120})[\"']?\s*[:=]\s*(\"[^\"\\\n]{0,300}\"|[^\s,{}\[][^,\n]{0,300})")


def _items(text: str, path: str) -> list[tuple[str, str, str]]:
    """Return (key, value, place) of a configuration, without parent keys."""
    lines = [
        (n, line[:2_000])
        for n, line in enumerate(text.split("\n")[:2_000], start=1)
        if not line.lstrip().startswith("#")
    ]
    found = [(m[1], re.split(r"\s#", m[2])[0], n) for n, line in lines for m in islice(_LINE.finditer(line), 200)]
    return [(key.rsplit(".", 1)[-1], value.strip().strip("'\"").strip(), f"{path}:{n}") for key, value, n in found]


def _asked_by_keys(keys: Mapping[str, str]) -> tuple[Route | None, str] | None:
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


def _asked_by(command: Command, files: Mapping[str, str]) -> tuple[Route | None, str, str | None] | None:
    """Return route, reason and configuration of a trainer's program; None if the command is none."""
    given, name, word = options(command.args), command.target, (*command.args, "")[0]
    path = next((p for a in command.args if a.endswith(CONFIG) and (p := matching(a, files)) is not None), None)
    asked = _asked_by_keys({**{k: v for k, v, _ in reversed(_items(files[path], path) if path else [])}, **given})
    is_module = command.kind == "module" and name.startswith(known.TRAINER_MODULES)
    if command.kind == "program" and name.startswith("mergekit"):
        return Route.AVERAGING, name, path
    if not is_module and (
        command.kind != "program" or word not in ("sft", "pt", "rlhf", "run", "train", *known.TRL_WORDS)
    ):
        return None
    words = re.split(
        r"[._/]",
        name if is_module else " ".join((given.get("rlhf_type") or given.get("stage") or word, *command.args[1:2])),
    )
    if {"rm", "reward"} & set(words):
        return None, name, path
    route = next((known.RECIPE_WORDS[w] for each in words for w in each.split() if w in known.RECIPE_WORDS), None)
    if asked and (route in (None, Route.PPO) or name.startswith(("axolotl", "llamafactory"))):
        route = asked[0]
    if route is Route.DPO and given.get("loss_type") in known.RELATIVES_OF_DPO:
        route = Route.PREFERENCE
    return route or (Route.SFT if name == "tune" or is_module else Route.UNKNOWN), f"{name} {word}".strip(), path


# --- what command lines run, and the decision


class _Followed:
    """Everything that command lines run, or, if they run nothing of this code, the scripts that no other file names."""

    def __init__(self, files: Mapping[str, str], lines: Sequence[str]) -> None:
        self.files = dict(files)
        self.parsed = {path: parsed(path, text) for path, text in files.items() if path.endswith(PYTHON)}
        self.programs: dict[str, LiveCode] = {}
        self.found: list[Training] = []
        self.settings: list[tuple[str, str, str]] = []
        self.used: dict[str, None] = {}
        self._done: set[Command] = set()
        ran = [self._run(each.command, line, each.line, each.sure) for line in lines for each in commands_in(line)]
        self.ordered = any(ran)
        for path in () if self.ordered else self._roots():
            self._run(Command("shell" if path.endswith(SHELL) else "script", path), path, 0, True)
        for path, text in () if self.programs or self.found else files.items():
            items = _items(text, path) if path.endswith(CONFIG) else []
            if (asked := _asked_by_keys({key: value for key, value, _ in items})) and asked[0]:
                self.found.append(Training(asked[0], f"{asked[1]}; nothing runs it", path, confidence=UNSTARTED))
                self.settings += items

    def _run(self, command: Command, place: str, line: int, sure: bool, depth: int = 0) -> bool:
        if depth > MAX_DEPTH or command in self._done or len(self._done) > MAX_COMMANDS:
            return command in self._done
        asked, path, where = _asked_by(command, self.files), self._path(command, place), clean(place, 160) or ""
        if asked is not None:
            self.found.append(Training(asked[0], asked[1], where, line, sure))
            self.settings += [(name, value, where) for name, value in options(command.args).items()]
            self.settings += _items(self.files[asked[2]], asked[2]) if asked[2] else []
            self.used |= dict.fromkeys(p for p in (place, asked[2]) if p is not None and p in self.files)
        elif path is None:
            if place in self.files and any(w.endswith(PYTHON) for w in (command.target, *command.args)):
                self.found.append(Training(Route.UNKNOWN, "starts a program that is not in the code", where, line))
            return False
        elif path in self.parsed:
            program = self.programs[path] = LiveCode(path, self.parsed, sure)
            self.used |= dict.fromkeys((path, *program.reached))
        else:
            self.used[path] = None
            for each in commands_in(self.files[path]):
                self._run(each.command, path, each.line, sure and each.sure, depth + 1)
        self._done.add(command)
        return True

    def _path(self, command: Command, place: str) -> str | None:
        if command.kind == "inline" and re.search(r"train|backward", command.target):
            self.files[path := f"inline-{len(self.programs)}.py"] = command.target
            self.parsed[path] = parsed(path, command.target)
            return path
        if command.kind == "module":
            base = command.target.replace(".", "/")
            return next(
                (p for e in (".py", "/__main__.py") if (p := matching(base + e, self.parsed)) is not None), None
            )
        return (
            matching(command.target, self.files, posixpath.dirname(place))
            if command.kind in ("script", "shell")
            else None
        )

    def _roots(self) -> list[str]:
        scripts = [path for path in self.files if path.endswith((*PYTHON, *SHELL))]
        words = {
            p: set(re.findall(r"[\w-]{1,80}\.(?:py|sh|bash)\b|(?:from|import) .{1,200}", self.files[p]))
            for p in scripts
        }
        named = set()
        for path in scripts:
            stem = posixpath.basename(path.removesuffix("/__init__.py")).rsplit(".", 1)[0]
            mention = re.compile(rf"\b{re.escape(stem)}\b")
            if any(other != path and any(map(mention.search, words[other])) for other in scripts):
                named.add(path)
        return sorted(set(scripts) - named or scripts, key=lambda path: (path.count("/"), path))


@lru_cache(maxsize=16)
def _planned(files: tuple[tuple[str, str], ...], lines: tuple[str, ...]) -> Planned:
    done = _Followed(dict(files), lines)
    programs = list(done.programs.values())
    found = [by_samples(made, program, programs) for program in programs for made in trainings(program)] + done.found
    for word, made in (each for program in programs for each in started(program)):
        other = matching(word, done.files) if word.endswith((*PYTHON, *SHELL)) else None
        found += [made] if other is not None and other not in done.used else []
    policies = [made for made in found if made.route is not None]
    trained = [
        made for made in policies if made.route not in (Route.COPY, Route.AVERAGING) and made.why[:6] != "starts"
    ]
    chosen = trained or policies or [made for program in programs for made in opaque(program)]
    route, confidence, alternatives = _decided(chosen, done.ordered)
    if route is Route.NONE and not found and not programs:
        route, confidence = Route.UNKNOWN, 0.0
    done.settings += [each for program in programs for each in settings_in(program)]
    ordered = sorted(
        {(known.key_of(s[0]), s[2], s[0], s[1]) for s in done.settings if s[1] and known.key_of(s[0]) is not None},
        key=str,
    )
    return Planned(
        route=route,
        evidence=tuple(_evidence(made, done.files.get(made.path, "")) for made in (chosen or found)[:6]),
        confidence=round(confidence, 2),
        alternatives=alternatives,
        scripts=tuple(done.used),
        trainings=tuple(found),
        settings=tuple(
            Setting(name=clean(name, 80) or "", value=clean(value, 120) or "", where=clean(where, 200) or "")
            for _, where, name, value in ordered[:MAX_SETTINGS]
        ),
    )


def planned(files: Mapping[str, str | bytes], entry_points: Sequence[str] = ()) -> Planned:
    """Return the route that the code in `files` (text by path) plans; observed command lines decide what ran.

    Never raises, whatever `files` contain. The same input gives the same result.
    """
    kept = {path: raw for path, raw in sorted(files.items()) if path.endswith((*PYTHON, *SHELL, *CONFIG))}
    texts = tuple((p, r if isinstance(r, str) else r.decode("utf-8", "replace")) for p, r in kept.items())
    return _planned(texts, tuple(dict.fromkeys(entry_points))[-MAX_COMMANDS:])


def _evidence(made: Training, text: str) -> EvidenceLine:
    lines = text.split("\n", made.line)
    says = lines[made.line - 1].strip()[:160] if 1 <= made.line <= len(lines) else ""
    where = f"{made.path}:{made.line}" if made.line else made.path
    return EvidenceLine(where=clean(where, 200) or "", says=clean(f"{says} [{made.why}]".strip(), 240) or "")


def _decided(found: Sequence[Training], ordered: bool) -> tuple[Route, float, tuple[Route, ...]]:
    """Return the route, the confidence, and alternatives."""
    routes = list(dict.fromkeys(made.route for made in found if made.route))
    if not found:
        return Route.NONE, 0.6, ()
    sure = all(made.sure for made in found)
    least = min(made.confidence for made in found) * (1.0 if sure else 0.7)
    if len(routes) == 1:
        return routes[0], 0.0 if routes[0] is Route.UNKNOWN else least, ()
    paths = {made.path for made in found}
    joined = len(paths) == 1 or ordered or sum(bool(_STAGE.search(posixpath.basename(path))) for path in paths) > 1
    route = known.joined_route(routes)
    if sure and joined and not set(routes) & set(known.UNTRAINED) and (route is Route.SFT_RL or len(routes) == 2):
        others = tuple(each for each in routes if each is not route)
        return route, least if route is Route.SFT_RL else 0.7 * least, () if route is Route.SFT_RL else others
    return Route.UNKNOWN, 0.0, tuple(each for each in routes if each is not Route.UNKNOWN)[:6]
