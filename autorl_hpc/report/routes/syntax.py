"""Take a plain look at a script's syntax tree (`Program`): trainer classes with literal arguments, words of own loops.

Nothing is executed or imported. Names are matched as text, values are literals, and conditions are open unless constant.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from autorl_hpc.report.routes.trainers import OPTIMIZERS, REWARD_TRAINERS, TRAINER_CLASSES, key_of, route_of_trainer, trainer_class
from autorl_hpc.states import Route

MAX_CHARS, MAX_PARTS = 400_000, 50_000
TRAINER, OWN_LOOP = 0.95, 0.8
"""Confidence in a trainer and in an own loop."""


@dataclass(frozen=True)
class Training:
    """One training in the code. `route` None: it trains no policy."""

    route: Route | None
    why: str
    path: str
    line: int = 0
    sure: bool = True
    confidence: float = TRAINER
    model: object = None
    samples: bool = False
    """Whether the program draws samples by a call that the observer sees."""


# --- one file


def _last(node: ast.AST) -> str:
    return str(getattr(node, "attr", "") or getattr(node, "id", ""))


def _said(node: ast.AST) -> str:
    """Return a node's own word: a name, an attribute, an argument or a text."""
    found = _last(node) or getattr(node, "arg", None) or getattr(node, "value", "")
    return found[:200] if isinstance(found, str) else ""


class Parsed:
    """One file: its imports, functions and classes by name, and constants. `tree` None: not read."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.tree = path, None
        try:
            if path.endswith(".ipynb"):
                cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
                text = re.sub(r"^\s*[!%].*", "", "\n".join("".join(c["source"]) for c in cells), flags=re.M)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tree = ast.parse(text) if len(text) <= MAX_CHARS else None
        except (SyntaxError, ValueError, KeyError, TypeError, RecursionError, MemoryError):
            pass
        self.imports: dict[str, str] = {}
        self.defined: defaultdict[str, list[Any]] = defaultdict(list)
        self.constants: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.tree) if self.tree else ():
            if isinstance(node, ast.Import):
                self.imports |= {a.asname or a.name: a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                at = node.module or ""
                self.imports |= {a.asname or a.name.replace("*", at): f"{at}.{a.name}".lstrip(".") for a in node.names}
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.defined[node.name].append(node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self.constants.setdefault(_last(target), []).append(node.value)

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
            node = found[0] if len(found := self.constants.get(node.id, ())) == 1 else None
        if isinstance(node, ast.Constant | ast.List | ast.Tuple | ast.UnaryOp) and len(list(islice(ast.walk(node), 99))) < 99:
            try:
                return ast.literal_eval(node)
            except (ValueError, TypeError):
                return None
        return None


parsed = lru_cache(maxsize=64)(Parsed)


class Place(NamedTuple):
    """A part of a statement that may run; `sure`: no open condition is around it."""

    node: Any
    file: Parsed
    sure: bool
    unit: ast.AST
    """The function, or the statement of the module, that holds it."""


# --- what may run of a script and of the files that it imports

_GUARD = re.compile(r"exists|is_?file|is_?dir|main_process|rank")
"""Conditions for resuming or for one process of several: what they guard counts as run."""


class Program:
    """The live parts of a script and the files that it imports: functions that nothing live names are dead."""

    def __init__(self, path: str, files: Mapping[str, Parsed], sure: bool, args: Sequence[str] = ()) -> None:
        self.path, self.files, self.args = path, files, args
        self.reached: dict[str, Parsed] = {}
        self.parts: list[Place] = []
        self.defined: defaultdict[str, list[tuple[Parsed, Any]]] = defaultdict(list)
        self._used: dict[str, bool] = {}  # names in live code, and whether one is surely called
        self._enter(files[path], sure)
        entered: set[int] = set()
        while found := self._next(entered):
            file, owner, is_sure = found
            entered.add(id(owner))
            methods = [n for n in owner.body if getattr(n, "name", "") in ("__init__", "__call__", "forward")]
            for unit in methods if isinstance(owner, ast.ClassDef) else [owner]:
                self._live(unit.body, file, is_sure, unit)
        self.calls = [part for part in self.parts if isinstance(part.node, ast.Call)]

    def _enter(self, file: Parsed, sure: bool) -> None:
        if file.path not in self.reached and file.tree is not None:
            self.reached[file.path] = file
            for name, known in file.defined.items():
                self.defined[name] += [(file, one) for one in known]
            self._live(file.tree.body, file, sure, None)

    def _next(self, entered: set[int]) -> tuple[Parsed, Any, bool] | None:
        later = None
        for name, called in reversed(self._used.items()):
            known = self.defined.get(name, [])
            sure = called and len(known) == 1
            for file, one in known if sure or later is None else ():
                if id(one) not in entered:
                    if sure:
                        return file, one, True
                    later = later or (file, one, False)
        return later

    def _live(self, body: list[ast.stmt], file: Parsed, sure: bool, unit: ast.AST | None) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            own = unit or node
            self._parts(Place(node, file, sure, own))
            called = getattr(getattr(node, "value", None), "func", node)
            ends = isinstance(node, ast.Return | ast.Raise) or bool(re.match(r"_?exit$|execv|execl", _last(called)))
            if isinstance(node, ast.If | ast.While):
                known = self._decided(node.test, file)
                words = " ".join(map(_said, islice(ast.walk(node.test), 99)))
                plain = known is not None or isinstance(node, ast.While) or bool(_GUARD.search(words))
                main = "__name__" in words
                for arm, dead in ((node.body, False), (node.orelse, True)):
                    if known is not dead:
                        self._live(arm, file, sure and plain, unit if main else own)
                if known is not False and isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return):
                    ends, sure = known is True, sure and plain
            else:
                for name in ("body", "orelse", "finalbody"):
                    self._live(getattr(node, name, []), file, sure, own)
                for arm in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
                    self._live(arm.body, file, False, own)
            if ends:
                return

    def _decided(self, test: ast.expr, file: Parsed) -> bool | None:
        if isinstance(test, ast.Compare) and getattr(test.left, "id", "") == "__name__":
            return file.path == self.path
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return None if (inner := self._decided(test.operand, file)) is None else not inner
        known = file.literal(test)
        return bool(known) if isinstance(known, int) else None

    def _parts(self, place: Place) -> None:
        node, at = place.node, getattr(place.node, "module", "") or ""
        if isinstance(node, ast.Import | ast.ImportFrom):
            found = [at, *(f"{at}.{a.name}".lstrip(".") for a in node.names)]
            ends = [f"/{name.replace('.', '/')}{end}" for name in found if name for end in (".py", "/__init__.py")]
            for read in [f for end in ends for path, f in self.files.items() if f"/{path}".endswith(end)]:
                self._enter(read, place.sure)
        callees: set[int] = set()
        waiting: list[ast.AST] = [node]
        while waiting and len(self.parts) < MAX_PARTS:
            part = waiting.pop()
            inner = ast.iter_child_nodes(part)
            waiting += [c for c in inner if not isinstance(c, ast.stmt | ast.ExceptHandler | ast.match_case)]
            self.parts.append(place._replace(node=part))
            callees |= {id(part.func)} if isinstance(part, ast.Call) else set()
            if name := _last(part):
                self._used[name] = (place.sure and id(part) in callees) or self._used.get(name, False)

    def called(self, *wanted: str) -> list[Place]:
        """Return the live calls of functions and methods of these names."""
        return [call for call in self.calls if _last(call.node.func) in wanted]

    def around(self, place: Place) -> list[ast.AST]:
        """Return the live parts of the unit that holds a place, and of the functions that it calls."""
        units, waiting = dict[int, ast.AST](), [place.unit]
        while waiting:
            unit = waiting.pop()
            if id(unit) not in units:
                units[id(unit)] = unit
                found = {_last(part.node) for part in self.parts if part.unit is unit}
                waiting += [one for name in found for _, one in self.defined.get(name, ())]
        return [part.node for part in self.parts if id(part.unit) in units]


# --- words of own loops

_CALLS = {
    "ce": "cross_entropy CrossEntropyLoss nll_loss NLLLoss fused_linear_cross_entropy",
    "logp": "log_softmax gather logsumexp selective_log_softmax log_prob take_along_dim",
    "kl": "kl_div KLDivLoss",
    "logsigmoid": "logsigmoid LogSigmoid softplus",
    "exp": "exp",
    "square": "mse_loss MSELoss smooth_l1_loss",
    "group": "whiten",
}
_BY_CALL = {name: signal for signal, called in _CALLS.items() for name in called.split()}
_WORDS = {
    "reward": re.compile(r"reward|advantage|\badv|_adv|returns|\bret\b|score|baseline", re.I),
    "pair": re.compile(r"chosen|reject|winner|loser|preferred", re.I),
    "reference": re.compile(r"\bref|_ref|reference|frozen", re.I),
    "teacher": re.compile(r"teacher", re.I),
    "odds": re.compile(r"odds|\bkto|_kto|desirable", re.I),
    "value": re.compile(r"value_?(loss|head|fn|pred|clip|model)|\bvf|critic|v_head|\bgae", re.I),
}
_SAMPLING, _ELSEWHERE = ("generate", "chat"), ("completions.create", "messages.create")


def _signals(nodes: Sequence[ast.AST]) -> Iterator[str]:
    def has(node: ast.AST, pattern: str | re.Pattern[str]) -> bool:
        return any(re.search(pattern, _said(n)) for n in islice(ast.walk(node), 60))

    for node in nodes:
        word = _said(node)[:60]
        yield from (signal for signal, pattern in _WORDS.items() if word and pattern.search(word))
        if isinstance(node, ast.Call):
            yield _BY_CALL.get(_last(node.func), "")
            yield "ce" if any(k.arg == "labels" for k in node.keywords) else ""
            yield "generate" if _last(node.func) in _SAMPLING else ""
            numbers = [n.value for n in islice(ast.walk(node), 40) if isinstance(n, ast.Constant) and isinstance(n.value, int | float)]
            around = sum(n == 1 for n in numbers) > 1 or any(0.5 <= n < 1 for n in numbers) and any(1 < n <= 2 for n in numbers)
            yield "clip" if _last(node.func) in ("clamp", "clip") and around else ""
        elif getattr(node, "attr", "") == "loss" and _last(node.value) != "self":
            yield "ce"
        elif isinstance(node, ast.BinOp):
            difference = any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub) for n in islice(ast.walk(node.left), 20))
            if isinstance(node.op, ast.Div):
                yield "group" if has(node.right, r"std|sigma") else "leave one out" if difference else ""
            elif isinstance(node.op, ast.Sub):
                yield "baseline" if has(node.right, r"mean|baseline|\bbase\b|running|\bmu\b") else ""
            elif isinstance(node.op, ast.Pow):
                yield "square" if difference else ""
            elif isinstance(node.op, ast.Mult):
                yield "weighted" if any(has(side, _WORDS["reward"]) for side in (node.left, node.right)) else ""


def route_of_loss(nodes: Sequence[ast.AST]) -> tuple[Route, str]:
    """Return the route of an own loop by its words and operations, and why; `unknown` if undecided.

    Formulas: DPO Rafailov et al. 2023 (7); ORPO Hong et al. 2024 (7); IPO Azar et al. 2023 (17); PPO Schulman et al. 2017 (7);
    GRPO Shao et al. 2024 (3); RLOO Ahmadian et al. 2024 (7).
    """
    has = set(_signals(nodes))
    if "logsigmoid" in has and "weighted" not in has:
        if not has & {"logp", "ce"}:
            return Route.UNKNOWN, "log-sigmoid of scores: perhaps of a reward model"
        if "odds" in has:
            return Route.PREFERENCE, "log-sigmoid of odds or of a margin to a reference point (ORPO, KTO)"
        named = Route.DPO if "reference" in has else Route.PREFERENCE if "pair" in has else Route.UNKNOWN
        return named, "log-sigmoid of a margin"
    if has >= {"pair", "square", "reference"} and "weighted" not in has:
        return Route.PREFERENCE, "squared margin between chosen and rejected (IPO)"
    if has >= {"clip", "exp"}:
        if has >= {"value", "square"}:
            return Route.PPO, "clipped ratio with a value loss (PPO)"
        return (Route.GRPO if has & {"group", "baseline"} else Route.RL), "clipped ratio"
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

_MODEL_NAME = re.compile(r"(^|_)(model|policy|actor|net|critic|lm|student|teacher|ref|reference|m)\d?$", re.I)
_CHECK = re.compile(r"correct|right|solv|reward|score|verif|answer|gold|match|pass|judge|accept|extract|maj", re.I)
_EVALUATES = re.compile(r"eval|valid|test|accuracy|demo|preview|bench", re.I)
_SETTERS = frozenset("SamplingParams GenerationConfig LoraConfig generate DataLoader dict get_peft_model".split())
_OPAQUE = frozenset(
    "exec eval import_module snapshot_download hf_hub_download save_file load_state_dict merge_and_unload add_ mul_ lerp_ copy_ "
    "normal_ copytree save_pretrained save_model".split()
)
"""Calls that bring or change weights in a way that a plain look can't tell."""


def trainings(program: Program) -> list[Training]:
    """Return the trainers that are run, and own loops."""
    if program.files[program.path].tree is None:
        return [Training(Route.UNKNOWN, "not read: too long, or no Python 3", program.path)]
    made = [found for call in program.calls if (found := _trainer(program, call)) is not None]
    verbs = ("train", "fit", "step") if any("PPOTrainer" in each.why for each in made) else ("train", "fit")
    runs = [p for p in program.parts if getattr(p.node, "attr", "") in verbs and not _MODEL_NAME.search(_last(p.node.value))]
    sure = any(run.sure for run in runs) and len(runs) >= len({each.route for each in made})
    made = [replace(each, sure=each.sure and sure) for each in made if runs]
    return made + [_loop(program, call) for call in program.called("backward")]


def _bases(program: Program, name: str, file: Parsed) -> Iterator[tuple[str, Any]]:
    """Yield the full names of a class and of its bases, as far as the code has them, with the agent's own class or None."""
    for _ in range(6):
        last = name.rsplit(".", 1)[-1]
        own = next(((f, n) for f, n in program.defined.get(last, ()) if isinstance(n, ast.ClassDef)), None)
        yield name if own is None else f"__main__.{last}", own
        if own is None or not own[1].bases:
            return
        name = own[0].full(own[1].bases[0])


def _trainer(program: Program, call: Place) -> Training | None:
    chain = list(_bases(program, call.file.full(call.node.func), call.file))
    modules = {full.split(".", 1)[0] for file in program.reached.values() for full in file.imports.values()}
    full = [name if "." in name else f"{package}.{name}" for name, _ in chain for package in sorted(modules)]
    name = trainer_class([name for name, _ in chain] + [n for n in full if n.rsplit(".", 1)[-1] in TRAINER_CLASSES])
    if name is None:
        return None
    keys = {"args", "config"}
    given = dict(settings_of(program, call))
    for made in program.called("dict"):  # unpacked into a configuration
        given |= dict(settings_of(program, made))
    for key in [k.value for k in call.node.keywords if k.arg in keys]:
        configs = [c for c in program.calls if c.node is key or (_last(key) and _assigned(program, _last(key)) is c.node)]
        given |= {name: value for config in configs for name, value in settings_of(program, config)}
    route, why = route_of_trainer(name, given), name
    if 0 in (given.get("learning_rate"), given.get("max_steps"), given.get("num_train_epochs")):
        route, why = Route.UNKNOWN, f"{name}, set to learn nothing"
    losses = [n for _, own in chain if own for n in own[1].body if re.search("loss|training_step", getattr(n, "name", ""))]
    if losses:
        loss, words = route_of_loss([part for each in losses for part in ast.walk(each)])
        if not (loss in (Route.SFT, Route.UNKNOWN) and any(_last(n) == "super" for each in losses for n in ast.walk(each))):
            route, why = loss, f"{name} whose loss is {words}"
    model = next((call.file.literal(v) for v in [k.value for k in call.node.keywords if k.arg == "model"] + call.node.args[:1]), None)
    return Training(route, why, call.file.path, call.node.lineno, call.sure, model=model)


def _assigned(program: Program, name: str) -> ast.AST | None:
    found = [value for file in program.reached.values() for value in file.constants.get(name, ())]
    return found[0] if len(found) == 1 else None


def _loop(program: Program, call: Place) -> Training:
    route, why = route_of_loss(program.around(call))
    if not program.called("step"):
        route, why = Route.UNKNOWN, "no step of an optimizer"
    samples = bool(program.called(*_SAMPLING))
    return Training(route, f"own loop: {why}", call.file.path, call.node.lineno, call.sure, OWN_LOOP, samples=samples)


def samplings(program: Program) -> list[Place]:
    """Return the live calls that ask a model for text, but for those of an evaluation."""
    asks = [c for c in program.calls if _last(c.node.func) in _SAMPLING or c.file.full(c.node.func).endswith(_ELSEWHERE)]
    return [c for c in asks if not _EVALUATES.search(getattr(c.unit, "name", ""))]


def checks(program: Program) -> bool:
    """Return whether a condition looks like a check of answers."""
    tests = [p.node.test if isinstance(p.node, ast.If) else p.node for p in program.parts if isinstance(p.node, ast.If | ast.comprehension)]
    tests = [t for test in tests for t in (test.ifs if isinstance(test, ast.comprehension) else [test])]
    return any(_CHECK.search(_said(n)) for test in tests for n in islice(ast.walk(test), 99))


def models(program: Program) -> set[object]:
    """Return the literal names of the models that are loaded; None among them: one is no literal."""
    loaded = [c for c in program.called("LLM", "from_pretrained", "pipeline") if "Tokenizer" not in c.file.full(c.node.func)]
    return {c.file.literal((c.node.args or [k.value for k in c.node.keywords if k.arg == "model"] or [None])[0]) for c in loaded}


def opaque(program: Program) -> list[Place]:
    """Return calls that may bring or change weights, and a `train` that nothing is seen to run."""
    found = [c for c in program.calls if _last(c.node.func) in _OPAQUE]
    nodes = [(f, n) for f in program.reached.values() for n in ast.walk(f.tree or ast.Module([], [])) if isinstance(n, ast.Attribute)]
    idle = [(f, n) for f, n in nodes if n.attr in ("train", "backward") and not _MODEL_NAME.search(_last(n.value))]
    return found + [Place(n, f, False, n) for f, n in idle]


def settings_of(program: Program, call: Place) -> Iterator[tuple[str, Any]]:
    """Yield the key settings that a call is given as literals."""
    given = [(k.arg, k.value) for k in call.node.keywords if k.arg]
    given += [(k, v) for k, v in zip(["lr"], call.node.args[1:2], strict=False) if _last(call.node.func) in OPTIMIZERS]
    for word, expr in given:
        if key_of(word) is not None and (value := call.file.literal(expr)) is not None:
            yield word, value


def settings_in(program: Program) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, place) of the key settings that live code gives to trainers, optimizers and samplers as literals."""
    for part in program.parts:
        if isinstance(part.node, ast.Call):
            last = _last(part.node.func)
            known = last in OPTIMIZERS or last in _SETTERS or last.endswith("TrainingArguments")
            if known or last in TRAINER_CLASSES or last.removesuffix("Config") + "Trainer" in TRAINER_CLASSES:
                for name, value in settings_of(program, part):
                    yield name, str(value), f"{part.file.path}:{part.node.lineno}"
        elif isinstance(part.node, ast.Assign) and isinstance(part.node.value, ast.Constant):
            for target in part.node.targets:
                yield _last(target), str(part.node.value.value), f"{part.file.path}:{part.node.lineno}"
