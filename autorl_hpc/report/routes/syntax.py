"""Take a plain look at Python code (`LiveCode`): trainer classes with literal arguments, words of own loops, samples of a model.

Nothing is executed or imported. Names are matched as text, values are literals, and conditions are open unless constant.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from autorl_hpc.report.routes import trainers as known
from autorl_hpc.states import Route

MAX_CHARS, MAX_PARTS = 400_000, 50_000
TRAINER, OWN_LOOP = 0.95, 0.8
"""Confidence in a trainer and in an own loop; lower under an open condition."""

_GUARD = re.compile(r"exists|is_?file|is_?dir|main_process|rank")
"""Conditions for resuming or for one process of several: what they guard counts as run."""
_MODEL = re.compile(r"(^|_)(model|policy|actor|net|critic|lm|student|teacher|ref|reference|m)\d?$", re.I)
_CHECK = re.compile(r"correct|right|solv|reward|score|verif|answer|gold|match|pass|judge|accept|extract|maj", re.I)
_EVALUATES = re.compile(r"eval|valid|test|accuracy|demo|preview|bench", re.I)
_STARTS = re.compile(r"(system|execv\w*|execl\w*|run|Popen|check_call|call)$")
_SAMPLING, _ELSEWHERE = ("generate", "chat"), ("completions.create", "messages.create")
_OPAQUE = re.compile(
    r"(exec|eval|import_module|snapshot_download|hf_hub_download|save_file|load_state_dict|merge_and_unload"
    r"|(add|mul|lerp|copy|normal)_|copytree|save_pretrained|save_model)$"
)
"""Calls that bring or change weights, or run another program, in a way that a plain look can't tell."""


@dataclass(frozen=True)
class Training:
    """One training in the code. `route` None: it trains no policy; `samples`: a model is asked for text in the same program."""

    route: Route | None
    why: str
    path: str
    line: int = 0
    sure: bool = True
    confidence: float = TRAINER
    samples: bool = False
    loss: Route | None = None
    """What the loss alone says, if `route` also rests on where the rows come from."""


# --- one file


def _last(node: ast.AST) -> str:
    return str(getattr(node, "attr", "") or getattr(node, "id", ""))


def _said(node: Any) -> str:
    """Return a node's own word: a name, an attribute, an argument or a text."""
    found = _last(node) or getattr(node, "arg", None) or getattr(node, "value", "")
    return found[:200] if isinstance(found, str) else ""


def _words(node: ast.AST) -> str:
    return " ".join(map(_said, islice(ast.walk(node), 99)))


_BUILTINS = frozenset(dir(builtins))
_BINDS = (ast.Assign, ast.AugAssign, ast.For, ast.comprehension)


class CodePart(NamedTuple):
    """A part of a statement that is not certainly skipped; `sure`: no open condition is around it."""

    node: Any
    file: Parsed
    unit: str
    """The function that holds it; for a statement of the module, its line."""
    sure: bool
    text: str = ""
    """Of a statement, without those in it."""


class Parsed:
    """One file: imports, classes, values that are bound, and the parts of its functions. `tree` None: not read."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.tree = path, None
        self.imports: dict[str, str] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.bound: defaultdict[str, list[ast.expr]] = defaultdict(list)
        self.parts: list[CodePart] = []
        try:
            if path.endswith(".ipynb"):
                cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
                text = re.sub(r"^\s*[!%].*", "", "\n".join("".join(c["source"]) for c in cells), flags=re.M)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tree = ast.parse(text) if len(text) <= MAX_CHARS else None
            for node in ast.walk(self.tree) if self.tree else ():
                if isinstance(node, ast.Import):
                    self.imports |= {a.asname or a.name: a.name for a in node.names}
                elif isinstance(node, ast.ImportFrom):
                    at = node.module or ""
                    self.imports |= {
                        a.asname or a.name.replace("*", at): f"{at}.{a.name}".strip(".") for a in node.names
                    }
                elif isinstance(node, ast.ClassDef):
                    self.classes[node.name] = node
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    if node.func.attr in ("append", "extend", "add"):
                        self.bound[_last(node.func.value)] += node.args
                elif (value := getattr(node, "iter", getattr(node, "value", None))) and isinstance(node, _BINDS):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for target in (name for each in targets for name in ast.walk(each)):
                        self.bound[getattr(target, "id", "")].append(value)
            self._live(self.tree.body if self.tree else [], None, True)
        except (SyntaxError, ValueError, KeyError, TypeError, RecursionError, MemoryError):
            self.tree = None

    def _live(self, body: list[ast.stmt], unit: str | None, sure: bool) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._live(node.body, node.name, True)
                continue
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    own = getattr(inner, "name", "") in ("__init__", "__call__", "forward", "")
                    self._live(getattr(inner, "body", []), node.name if own else inner.name, True)  # type: ignore[attr-defined]
                continue
            own_unit = unit or str(node.lineno)
            head = getattr(node, "test", getattr(node, "iter", None)) if hasattr(node, "body") else node
            self.parts.append(CodePart(node, self, own_unit, sure, ast.unparse(head) if head is not None else ""))
            waiting = list(ast.iter_child_nodes(node))
            while waiting and len(self.parts) < MAX_PARTS:
                part = waiting.pop()
                if not isinstance(part, ast.stmt | ast.ExceptHandler | ast.match_case):
                    self.parts.append(CodePart(part, self, own_unit, sure))
                    waiting += ast.iter_child_nodes(part)
            called = getattr(getattr(node, "value", None), "func", node)
            ends = isinstance(node, ast.Return | ast.Raise) or bool(re.match(r"_?exit$|execv|execl", _last(called)))
            if isinstance(node, ast.If | ast.While):
                decided, words = self._decided(node.test), _words(node.test)
                plain = decided is not None or isinstance(node, ast.While) or bool(_GUARD.search(words))
                plain |= "__main__" in words
                for arm, dead in ((node.body, False), (node.orelse, True)):
                    if decided is not dead:
                        self._live(arm, "__main__" if "__main__" in words else own_unit, sure and plain)
                if decided is not False and isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return):
                    ends, sure = decided is True, sure and plain
            else:
                for name in ("body", "orelse", "finalbody"):
                    self._live(getattr(node, name, []), own_unit, sure)
                for arm in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
                    self._live(arm.body, own_unit, False)
            if ends:
                return

    def _decided(self, test: ast.expr) -> bool | None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return None if (inner := self._decided(test.operand)) is None else not inner
        value = self.literal(test)
        return bool(value) if isinstance(value, int) else None

    def full(self, node: ast.AST) -> str:
        """Return the full name of `a.b.c` according to the imports."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute) and len(parts) < 9:
            parts, node = [node.attr, *parts], node.value
        first = getattr(node, "id", "")
        return ".".join([self.imports.get(first, first), *parts])

    def literal(self, node: ast.AST | None) -> Any:
        """Return the value of a literal, given as it is or by a name that is bound once; None for anything else."""
        if isinstance(node, ast.Name):
            node = self.bound[node.id][0] if len(self.bound.get(node.id, ())) == 1 else None
        if not isinstance(node, ast.Constant | ast.List | ast.Tuple | ast.UnaryOp) or len(_words(node)) > 500:
            return None
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError):
            return None


parsed = lru_cache(maxsize=64)(Parsed)


class LiveCode:
    """What may run of a script and of the files that it imports: functions that nothing live names are dead."""

    def __init__(self, path: str, files: Mapping[str, Parsed], sure: bool = True) -> None:
        self.path, waiting = path, [path]
        self.reached: dict[str, Parsed] = {}
        while waiting:
            if (at := waiting.pop()) not in self.reached:
                file = self.reached[at] = files[at]
                full = {part for each in file.imports.values() for part in (each, each.rpartition(".")[0])} - {""}
                ends = tuple(f"/{name.replace('.', '/')}{end}" for name in full for end in (".py", "/__init__.py"))
                waiting += [other for other in files if f"/{other}".endswith(ends)]
        units: defaultdict[str, list[CodePart]] = defaultdict(list)
        for file in self.reached.values():
            for part in file.parts:
                top = part.unit == "__main__" or part.unit.isdigit()
                units[f"{file.path}:{part.unit}" if top else part.unit].append(part)
        self.units = units
        live = {u: sure for u in units if ":" in u and (":__main__" not in u or u.startswith(f"{path}:"))}
        waiting = list(live)
        while waiting:
            unit = waiting.pop()
            callees = {_last(p.node.func): p.sure and live[unit] for p in units[unit] if isinstance(p.node, ast.Call)}
            for name in {_last(p.node) for p in units[unit]} - {""}:
                is_sure = callees.get(name, False)
                if name in units and (name not in live or (is_sure and not live[name])):
                    live[name] = is_sure
                    waiting.append(name)
        self.parts = [p._replace(sure=p.sure and is_sure) for unit, is_sure in live.items() for p in units[unit]]
        self.calls = [part for part in self.parts if isinstance(part.node, ast.Call)]
        asks = [c for c in self.calls if c.file.full(c.node.func).endswith(_ELSEWHERE)]
        asks += self.called(*_SAMPLING)
        self.samples = [c for c in asks if not _EVALUATES.search(c.unit) and not _EVALUATES.search(path)]

    def called(self, *wanted: str) -> list[CodePart]:
        """Return the live calls of functions and methods of these names."""
        return [call for call in self.calls if _last(call.node.func) in wanted]

    def around(self, place: CodePart) -> str:
        """Return the text of the unit that holds a place, and of the functions that it calls."""
        own = place.unit if place.unit in self.units else f"{place.file.path}:{place.unit}"
        found, waiting = dict[str, str](), [own]
        while waiting:
            if (unit := waiting.pop()) not in found and unit in self.units:
                found[unit] = "\n".join(part.text for part in self.units[unit] if part.text)
                waiting += {_last(p.node.func) for p in self.units[unit] if isinstance(p.node, ast.Call)} - {""}
        return "\n".join(found.values())


# --- words of own loops

_REWARD = r"\w*(?:reward|advantage|adv\b|returns|score|baseline)\w*"
_SIGNALS = {
    signal: re.compile(pattern, re.I)
    for signal, pattern in {
        "ce": r"cross_?entropy|nll_?loss|labels ?=|(?<!self)\.loss\b",
        "logp": r"log_softmax|gather\(|logsumexp|log_prob|take_along_dim",
        "kl": r"kl_?div",
        "logsigmoid": r"logsigmoid|softplus",
        "ratio": r"\bexp\(",
        "clip": r"cla?[mi]p\((?:\w+, )?(?:[^()]*\b1(?:\.0)? - .*\b1(?:\.0)? \+|[^()]*0\.[5-9]\d*, 1\.\d)",
        "square": r"mse_?loss|smooth_l1_loss|- [^\n]{1,200}\) ?\*\* ?2|square\(",
        "group": r"whiten|/ \(?\w*(?:\.|std|sigma)[\w.()]*(?:std|sigma)?[^\n]{0,30}(?:std|sigma|eps|1e-)|/ \(?\w*(?:std|sigma)",
        "centred": r"- (?:\w+\.)*\w*(?:mean|baseline|running|mu)\b",
        "weighted": rf"{_REWARD}[\w.()\[\], :-]*\)? \* |\* \(?{_REWARD}",
        "pair": r"chosen|reject|winner|loser|preferred",
        "reference": r"\bref|_ref|reference|frozen",
        "teacher": r"teacher",
        "odds": r"odds|\bkto|_kto|desirable",
        "value": r"value_?(?:loss|head|fn|pred|clip|model)|\bvf|critic|v_head|\bgae",
        "generate": r"\b(?:generate|chat)\(",
    }.items()
}


def route_of_loss(text: str) -> tuple[Route, str]:
    """Return the route of an own loop by its words and operations, and why; `unknown` if undecided.

    Formulas: DPO Rafailov et al. 2023 (7); ORPO Hong et al. 2024 (7); IPO Azar et al. 2023 (17); PPO Schulman et al. 2017 (7);
    GRPO Shao et al. 2024 (3); RLOO Ahmadian et al. 2024 (7).
    """
    has = {signal for signal, pattern in _SIGNALS.items() if pattern.search(text[:MAX_CHARS])}
    if "logsigmoid" in has and "weighted" not in has and has & {"logp", "ce"}:
        if "odds" in has:
            return Route.PREFERENCE, "log-sigmoid of odds or of a margin to a reference point (ORPO, KTO)"
        named = Route.DPO if "reference" in has else Route.PREFERENCE if "pair" in has else Route.UNKNOWN
        return named, "log-sigmoid of a margin"
    if has >= {"pair", "square", "reference"} and "weighted" not in has:
        return Route.PREFERENCE, "squared margin between chosen and rejected (IPO)"
    if has >= {"clip", "ratio"}:
        if has >= {"value", "square"}:
            return Route.PPO, "clipped ratio with a value loss (PPO)"
        return (Route.GRPO if has & {"group", "centred"} else Route.RL), "clipped ratio"
    if has >= {"kl", "teacher"}:
        return Route.DISTILLATION, "divergence to a teacher's logits"
    if has & {"weighted", "group"} and has & {"logp", "ce"}:
        if "group" in has and has & {"weighted", "generate"}:
            return Route.GRPO, "log-probabilities times rewards normalised in their group (GRPO)"
        return Route.RL, "log-probabilities times rewards"
    if "ce" in has and not has & {"kl", "clip", "logsigmoid", "pair"}:
        return Route.SFT, "cross-entropy on labels"
    return Route.UNKNOWN, "nothing that is known"


# --- the trainings of a program


def _trainer(program: LiveCode, call: CodePart) -> Training | None:
    names, losses, name = list[str](), list[str](), call.file.full(call.node.func)
    for _ in range(6):  # up the bases of the agent's own classes
        last = name.rsplit(".", 1)[-1]
        names.append(name)
        file = next((f for f in program.reached.values() if last in f.classes), None)
        if file is None:
            imported = {full.split(".", 1)[0] for each in program.reached.values() for full in each.imports.values()}
            names += [f"{package}.{name}" for package in sorted(imported) if "." not in name]
            break
        own = file.classes[last]
        losses += [ast.unparse(n) for n in own.body if re.search("loss|training_step", getattr(n, "name", ""))]
        name = file.full(own.bases[0]) if own.bases else ""
    trainer = known.trainer_class(names)
    if trainer is None:
        return None
    given = _given(call)
    config = [_last(k.value) for k in call.node.keywords if k.arg in ("args", "config")]
    for made in program.calls:
        is_config = any(k.value is made.node for k in call.node.keywords) or _last(made.node.func) == "dict"
        if is_config or any(made.node in made.file.bound.get(name, ()) for name in config if name):
            given |= _given(made)
    values = {name: value for name, (value, _) in given.items()}
    route, why = known.route_of_trainer(trainer, values), trainer
    if 0 in (values.get("learning_rate"), values.get("max_steps"), values.get("num_train_epochs")):
        route, why = Route.UNKNOWN, f"{trainer}, set to learn nothing"
    if losses:
        loss, words = route_of_loss("\n".join(losses))
        if loss not in (Route.SFT, Route.UNKNOWN) or "super()" not in "".join(losses):
            route, why = loss, f"{trainer} whose loss is {words}"
    return Training(route, why, call.file.path, call.node.lineno, call.sure)


def trainings(program: LiveCode) -> list[Training]:
    """Return the trainers that are run, and own loops."""
    if program.reached[program.path].tree is None:
        return [Training(Route.UNKNOWN, "not read: too long, or no Python 3", program.path)]
    made = [found for call in program.calls if (found := _trainer(program, call)) is not None]
    verbs = ("train", "fit", "step") if any("PPOTrainer" in each.why for each in made) else ("train", "fit")
    runs = [p for p in program.parts if getattr(p.node, "attr", "") in verbs and not _MODEL.search(_last(p.node.value))]
    sure = any(run.sure for run in runs) and len(runs) >= len({each.route for each in made})
    made = [replace(each, sure=each.sure and sure) for each in made if runs]
    for call in program.called("backward"):
        route, why = (
            route_of_loss(program.around(call)) if program.called("step") else (Route.UNKNOWN, "no optimizer step")
        )
        where = (call.file.path, call.node.lineno, call.sure, OWN_LOOP, bool(program.called(*_SAMPLING)))
        made.append(Training(route, f"own loop: {why}", *where))
    return made


def _given(call: CodePart) -> dict[str, tuple[Any, int]]:
    """Return the key settings that a call is given as literals, with their lines."""
    named = [(word.arg, word.value) for word in call.node.keywords if word.arg and known.key_of(word.arg) is not None]
    values = [(name, call.file.literal(value), value.lineno) for name, value in named]
    return {name: (value, line) for name, value, line in values if value is not None}


def settings_in(program: LiveCode) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, place) of the key settings that live code gives to trainers, optimizers and samplers as literals."""
    for part in program.parts:
        if isinstance(part.node, ast.Call):
            last = _last(part.node.func)
            trains = last in known.TRAINER_CLASSES or f"{last.removesuffix('Config')}Trainer" in known.TRAINER_CLASSES
            if trains or last in known.SETTERS or last.endswith("TrainingArguments"):
                for name, (value, line) in _given(part).items():
                    yield name, str(value), f"{part.file.path}:{line}"
        elif isinstance(part.node, ast.Assign) and isinstance(part.node.value, ast.Constant):
            where = f"{part.file.path}:{part.node.lineno}"
            yield from ((_last(target), str(part.node.value.value), where) for target in part.node.targets)


def by_samples(made: Training, program: LiveCode, programs: Sequence[LiveCode]) -> Training:
    """Refine supervised training whose rows come from a model's samples: in its program, or by a file of one beside it."""
    if made.route is not Route.SFT or not any(each.samples for each in programs):
        return made
    start = [c for c in program.calls if (c.file.path, c.node.lineno) == (made.path, made.line)]
    rows = [k.value for c in start for k in c.node.keywords if k.arg == "train_dataset"]
    nodes = _flow(program, start[0].file, rows or [start[0].node]) if start else []
    own, source = {id(node) for node in nodes}, program
    if not any(id(call.node) in own for call in program.samples):
        names = _file_names(nodes)
        beside = [
            p for p in programs if p is not program and p.samples and names & _file_names([x.node for x in p.parts])
        ]
        if not beside:
            return made
        source = beside[0]
    tests = [
        p.node.test if isinstance(p.node, ast.If) else p.node
        for p in source.parts
        if isinstance(p.node, ast.If | ast.comprehension)
    ]
    checked = any(_CHECK.search(_words(each)) for test in tests for each in getattr(test, "ifs", [test]))
    local = any(re.search(r"localhost|127\.0\.0\.1|0\.0\.0\.0", _said(p.node)) for p in source.parts)
    elsewhere = any(_last(call.node.func) not in _SAMPLING for call in source.samples) and not local
    plain = checked and (source is not program or made.confidence > OWN_LOOP)
    route = Route.DISTILLATION if elsewhere else Route.REJECTION_SAMPLING if plain else Route.UNKNOWN
    return replace(made, route=route, loss=Route.SFT, why=f"{made.why}, on samples of {source.path}")


def _flow(program: LiveCode, file: Parsed, start: list[ast.expr]) -> list[ast.AST]:
    """Return what flows into expressions by names that are bound and functions that are called."""
    waiting, done, nodes = [(file, node) for node in start], set[object](), list[ast.AST]()
    while waiting and len(nodes) < MAX_PARTS:
        file, node = waiting.pop()
        for part in ast.walk(node):
            nodes.append(part)
            name = _last(part.func) if isinstance(part, ast.Call) else getattr(part, "id", "")
            if name and name not in _BUILTINS and (file.path, name) not in done:
                done.add((file.path, name))
                waiting += [(file, value) for value in file.bound.get(name, ())]
                calls = program.units.get(name, ()) if isinstance(part, ast.Call) else ()
                waiting += [(p.file, p.node) for p in calls if not isinstance(p.node, ast.stmt)]
    return nodes


def _file_names(nodes: Sequence[ast.AST]) -> set[str]:
    texts = (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and len(n.value) < 300)
    found = {name for text in texts for name in re.findall(r"[\w-]+\.(?:jsonl?|csv|parquet|txt)\b", text)}
    return found - {"train.jsonl", "train.json", "test.jsonl"}


def opaque(program: LiveCode) -> list[Training]:
    """Return calls that may bring or change weights, and a `train` that nothing is seen to run."""
    nodes = [
        (c.file, c.node)
        for c in program.calls
        if _OPAQUE.match(_last(c.node.func)) or _STARTS.match(_last(c.node.func))
    ]
    for file in program.reached.values():
        named = [n for n in ast.walk(file.tree) if isinstance(n, ast.Attribute)] if file.tree else []
        nodes += [(file, n) for n in named if n.attr in ("train", "backward") and not _MODEL.search(_last(n.value))]
    return [Training(Route.UNKNOWN, "not known what it does", file.path, node.lineno) for file, node in nodes]


def started(program: LiveCode) -> Iterator[tuple[str, Training]]:
    """Yield the words of calls that start another program, each with what to say if it is a script that nobody followed."""
    for call in program.calls:
        if _STARTS.match(_last(call.node.func)):
            made = Training(Route.UNKNOWN, "runs another script", call.file.path, call.node.lineno, call.sure)
            yield from ((word, made) for word in _words(call.node).split())
