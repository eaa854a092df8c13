"""Take a plain look at an agent's code (`planned`): trainer classes with literal arguments, words of own loops, a model's samples.
Nothing is executed, names are matched as text, conditions are open; what that does not decide is `unknown`."""

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

from autorl_hpc.report.format import clean
from autorl_hpc.report.routes import trainers as known
from autorl_hpc.report.routes.commands import CONFIG, MAX_COMMANDS, NOT_THERE, PYTHON, SHELL, follow
from autorl_hpc.report.story_records import EvidenceLine, Setting
from autorl_hpc.states import Route

MAX_CHARS, MAX_PARTS, MAX_FLOW, MAX_SETTINGS = 400_000, 50_000, 500, 60
TRAINER, OWN_LOOP = 0.95, 0.8  # confidence in each; 0.7 times that where it is not sure to run
_MODEL = re.compile(r"(^|_)(model|policy|actor|net|critic|lm|student|teacher|ref\w*|m|opt\w*|sched\w*)\d?$", re.I)
_CHECK = re.compile(r"correct|right|solv|reward|score|verif|answer|gold|match|pass|judge|accept|extract|maj", re.I)
_EVALUATES = re.compile(r"eval|valid|test|accuracy|demo|preview|bench|baseline", re.I)
_WRITES = re.compile(r"(^| )(w|wt|a|wb|write\w*|dump\w*|to_json|to_csv|to_parquet|save_to_disk)( |$)")
_SAMPLING, _ELSEWHERE = ("generate", "chat", "pipeline"), ("completions.create", "messages.create")
# words of what may bring or change weights, or run another program, in a way that a plain look can't tell
_OPAQUE = re.compile(
    r"(exec|eval|import_module|snapshot_download|hf_hub_download|save_file|load_state_dict|merge_and_unload|copytree|save_pretrained"
    r"|save_model|(add|sub|mul|lerp|copy|normal)_|system|execv\w*|execl\w*|run|Popen|check_call|call|train|backward)$"
)
_LEAVES = re.compile(r"_?exit$|execv|execl")
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_OPEN = ast.If | ast.IfExp | ast.Match | ast.ExceptHandler | ast.Lambda | ast.Dict


@dataclass(frozen=True)
class Training:
    """One training in the code. `route` None: of no policy; `loss`: what the loss alone says, if `route` is by the rows, too."""

    route: Route | None
    why: str
    path: str
    line: int = 0
    sure: bool = True
    confidence: float = TRAINER
    samples: bool = False
    loss: Route | None = None


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


def _last(node: ast.AST) -> str:
    return str(getattr(node, "attr", "") or getattr(node, "id", ""))


def _words(node: ast.AST) -> str:
    told = (_last(n) or getattr(n, "arg", None) or getattr(n, "value", "") for n in islice(ast.walk(node), 99))
    return " ".join(each[:200] for each in told if isinstance(each, str))


class CodePart(NamedTuple):
    """A part of the code. `unit`: its function, of a module's statement its line; `sure`: no open condition is around it."""

    node: Any
    file: Parsed
    unit: str
    sure: bool


class Parsed:
    """One file: imports, classes, the values that names are bound to, its parts, and the text of each unit."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
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
                tree = ast.parse(text if len(text) <= MAX_CHARS else "too long")
            for node in ast.walk(tree):
                self._bind(node)
            self._look(tree)
        except (SyntaxError, ValueError, KeyError, TypeError, RecursionError, MemoryError):
            pass

    def _bind(self, node: Any) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            at = getattr(node, "module", "") or ""
            for each in node.names:
                self.imports[each.asname or each.name.replace("*", at)] = f"{at}.{each.name}".strip(".")
        elif isinstance(node, ast.ClassDef):
            self.classes[node.name] = node
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("append", "extend", "add"):
            self.bound[_last(node.func.value)] += node.args  # type: ignore[attr-defined]
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.For | ast.comprehension):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in (n for n in ast.walk(target) if isinstance(n, ast.Name)):
                    if isinstance(name.ctx, ast.Store) or name is getattr(target, "value", None):
                        self.bound[name.id].append(node.iter if hasattr(node, "iter") else node.value)

    def _look(self, tree: ast.Module) -> None:
        waiting: list[tuple[Any, str, bool]] = [(tree, "", True)]
        while waiting and len(self.parts) < MAX_PARTS:
            node, unit, sure = waiting.pop()
            is_main = isinstance(node, ast.If) and "__main__" in _words(node.test)
            if isinstance(node, ast.ClassDef):
                unit = node.name
            elif node is not tree and (not unit or isinstance(node, _FUNCTION)):
                own = getattr(node, "name", f"{self.path}:{'__main__' if is_main else node.lineno}")
                unit, sure = unit if own in ("__init__", "__call__", "forward") else own, True
            self.parts.append(CodePart(node, self, unit, sure))
            for _, value in ast.iter_fields(node):
                inner = sure and (is_main or not isinstance(node, _OPEN))
                parts = value if isinstance(value, list) else [value]
                for part in (each for each in parts if isinstance(each, ast.AST)):
                    waiting.append((part, unit, inner))
                    inner = inner and not (isinstance(part, ast.If) and isinstance(part.body[-1], ast.Return))
                    called = getattr(getattr(part, "value", None), "func", None)
                    if isinstance(part, ast.Return | ast.Raise) or (called and _LEAVES.match(_last(called))):
                        break  # what stands behind it never runs

    def full(self, node: ast.AST) -> str:
        """Return the full name of `a.b.c` according to the imports."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute) and len(parts) < 9:
            parts, node = [node.attr, *parts], node.value
        first = getattr(node, "id", "")
        return ".".join([self.imports.get(first, first), *parts])

    def given(self, call: ast.Call) -> dict[str, tuple[Any, int]]:
        """Return the key settings that a call is given as literals (as they are, or by a name that is bound once), with their lines."""
        found = dict[str, tuple[Any, int]]()
        words = [word for word in call.keywords if known.key_of(word.arg or "") is not None]
        for name, node in ((word.arg, word.value) for word in words):
            values = self.bound.get(node.id, []) if isinstance(node, ast.Name) else [node]
            value = values[0] if len(values) == 1 else None
            if isinstance(value, ast.Constant):
                found[name or ""] = value.value, node.lineno
            elif isinstance(value, ast.List) and all(isinstance(each, ast.Constant) for each in value.elts):
                found[name or ""] = [each.value for each in value.elts[:50]], node.lineno  # type: ignore[attr-defined]
        return found


parsed = lru_cache(maxsize=64)(Parsed)


class LiveCode:
    """What may run of a script and of the files that it imports: functions that nothing live names are left out."""

    def __init__(self, path: str, files: Mapping[str, Parsed], sure: bool = True) -> None:
        self.files: dict[str, Parsed] = {}
        waiting = [path]
        while waiting:
            if (at := waiting.pop()) not in self.files:
                file = self.files[at] = files[at]
                full = {part for each in file.imports.values() for part in (each, each.rpartition(".")[0])} - {""}
                ends = tuple(f"/{name.replace('.', '/')}{end}" for name in full for end in (".py", "/__init__.py"))
                waiting += [other for other in files if f"/{other}".endswith(ends)]
        self.path, self.parts, self.units = path, list[CodePart](), defaultdict[str, list[CodePart]](list)
        every = [part for file in self.files.values() for part in file.parts]
        called = defaultdict[str, bool](bool, {_last(p.node): False for p in every})
        for part in every:
            if isinstance(part.node, ast.Call):
                called[_last(part.node.func)] |= part.sure
        for part in every:
            self.units[part.unit].append(part)
            is_top = ":" in part.unit and (":__main__" not in part.unit or part.unit == f"{path}:__main__")
            if is_top or part.unit in called:
                self.parts.append(part._replace(sure=part.sure and sure and (is_top or called[part.unit])))
        self.calls = [part for part in self.parts if isinstance(part.node, ast.Call)]
        asks = [c for c in self.calls if c.file.full(c.node.func).endswith(_ELSEWHERE)] + self.called(*_SAMPLING)
        self.samples = [c for c in asks if not _EVALUATES.search(f"{c.unit.rpartition(':')[0] or c.unit} {path}")]

    def called(self, *wanted: str) -> list[CodePart]:
        """Return the calls of functions and methods of these names."""
        return [call for call in self.calls if _last(call.node.func) in wanted]

    def flow(self, file: Parsed, start: Sequence[ast.AST]) -> list[ast.AST]:
        """Return what flows into expressions: values that names are bound to, and functions that are called."""
        found, done = [(file, node) for node in start], set[tuple[str, str]]()
        for at, node in found:
            for part in islice(ast.walk(node), MAX_PARTS):
                name = _last(part.func) if isinstance(part, ast.Call) else getattr(part, "id", "")
                if name and (at.path, name) not in done and len(found) < MAX_FLOW:
                    done.add((at.path, name))
                    found += [(at, value) for value in at.bound.get(name, ())]
                    inside = self.units.get(name, ()) if isinstance(part, ast.Call) else ()
                    found += [(p.file, p.node) for p in inside if isinstance(p.node, _FUNCTION)]
        return [node for _, node in found]


_REWARD = r"\w*(?:reward|advantage|adv\b|returns|score|baseline)\w*"
_SIGNALS = {
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
    "pair": r"chosen|reject|winner|loser|preferred|better|worse|\b(?:good|bad|pos|neg|win|lose)\b",
    "reference": r"\bref|_ref|reference|frozen",
    "teacher": r"teacher",
    "odds": r"odds|\bkto|_kto|desirable",
    "value": r"value_?(?:loss|head|fn|pred|clip|model)|\bvf|critic|v_head|\bgae",
    "generate": r"\b(?:generate|chat)\(",
}
_LOSSES = (
    # all of these, one of these, none of these; the first row that holds is the route: Rafailov et al. 2023 (7), Hong et al. 2024 (7), Azar et al. 2023 (17)
    ("logsigmoid odds", "logp ce", "weighted", Route.PREFERENCE, "log-sigmoid of odds or of a margin (ORPO, KTO)"),
    ("logsigmoid reference", "logp ce", "weighted", Route.DPO, "log-sigmoid of a margin to a reference"),
    ("logsigmoid pair", "logp ce", "weighted", Route.PREFERENCE, "log-sigmoid of a margin"),
    ("logsigmoid", "logp ce", "weighted", Route.UNKNOWN, "log-sigmoid of a margin"),
    ("pair square reference", "", "weighted", Route.PREFERENCE, "squared margin between chosen and rejected (IPO)"),
    # Schulman et al. 2017 (7), Shao et al. 2024 (3), Ahmadian et al. 2024 (7)
    ("clip ratio value square", "", "", Route.PPO, "clipped ratio with a value loss (PPO)"),
    ("clip ratio", "group centred", "", Route.GRPO, "clipped ratio, rewards less their group's mean (GRPO)"),
    ("clip ratio", "", "", Route.RL, "clipped ratio"),
    ("kl teacher", "", "", Route.DISTILLATION, "divergence to a teacher's logits"),
    ("group weighted", "logp ce", "", Route.GRPO, "log-probabilities times rewards normalised in their group (GRPO)"),
    ("group generate", "logp ce", "", Route.GRPO, "log-probabilities times rewards normalised in their group (GRPO)"),
    ("weighted", "logp ce", "", Route.RL, "log-probabilities times rewards"),
    ("group", "logp ce", "", Route.RL, "log-probabilities times rewards"),
    ("ce", "", "kl clip logsigmoid pair", Route.SFT, "cross-entropy on labels"),
)


def route_of_loss(nodes: Sequence[ast.AST]) -> tuple[Route, str]:
    """Return the route of an own loop by its words and operations, and why; `unknown` if undecided."""
    try:
        text = "\n".join(map(ast.unparse, nodes))[:MAX_CHARS]
    except (RecursionError, ValueError):
        text = ""
    has = {signal for signal, pattern in _SIGNALS.items() if re.search(pattern, text, re.I)}
    for every, one, none, route, says in _LOSSES:
        if has.issuperset(every.split()) and (not one or has & {*one.split()}) and not has & {*none.split()}:
            return route, says
    return Route.UNKNOWN, "nothing that is known"


def _trainer(program: LiveCode, call: CodePart) -> Training | None:
    names, losses, name = list[str](), list[ast.stmt](), call.file.full(call.node.func)
    for _ in range(6):  # up the bases of the agent's own classes
        last = name.rsplit(".", 1)[-1]
        names.append(name)
        file = next((f for f in program.files.values() if last in f.classes), None)
        if file is None:
            imported = {full.split(".", 1)[0] for each in program.files.values() for full in each.imports.values()}
            names += [f"{package}.{name}" for package in sorted(imported) if "." not in name]
            break
        own = file.classes[last]
        losses += [node for node in own.body if re.search("loss|training_step", getattr(node, "name", ""))]
        name = file.full(own.bases[0]) if own.bases else ""
    if (trainer := known.trainer_class(names)) is None:
        return None
    configs = [c for c in program.calls if re.search(r"(Config|Arguments|^dict)$", _last(c.node.func))]
    values = {name: value for c in [call, *configs] for name, (value, _) in c.file.given(c.node).items()}
    route, why = known.route_of_trainer(trainer, values), trainer
    if 0 in (values.get("learning_rate"), values.get("max_steps"), values.get("num_train_epochs")):
        route, why = Route.UNKNOWN, f"{trainer}, set to learn nothing"
    if losses:
        loss, words = route_of_loss(losses)
        asks_base = any(_last(part) == "super" for node in losses for part in ast.walk(node))
        if loss not in (Route.SFT, Route.UNKNOWN) or not asks_base:
            route, why = loss, f"{trainer} whose loss is {words}"
    return Training(route, why, call.file.path, call.node.lineno, call.sure)


def trainings(program: LiveCode, programs: Sequence[LiveCode]) -> Iterator[Training]:
    """Yield the trainers that are run, and own loops."""
    if not program.files[program.path].parts:
        yield Training(Route.UNKNOWN, "not read: too long, or no Python 3", program.path)
    made = [(call, each) for call in program.calls if (each := _trainer(program, call)) is not None]
    verbs = [p for p in program.parts if getattr(p.node, "attr", "") in ("train", "fit", "step")]
    runs = [part for part in verbs if not _MODEL.search(_last(part.node.value))]
    sure = any(run.sure for run in runs) and len(runs) >= len({each.route for _, each in made})
    found = [(call, replace(each, sure=each.sure and sure)) for call, each in made if runs]
    for call in program.called("backward"):
        stepped = program.called("step")
        loss = route_of_loss(program.flow(call.file, [call.node])) if stepped else (Route.UNKNOWN, "no step")
        where = (call.file.path, call.node.lineno, call.sure, OWN_LOOP, bool(program.called(*_SAMPLING)))
        found.append((call, Training(loss[0], f"own loop: {loss[1]}", *where)))
    yield from (_by_samples(each, call, program, programs) for call, each in found)


def _by_samples(made: Training, call: CodePart, program: LiveCode, programs: Sequence[LiveCode]) -> Training:
    if made.route is not Route.SFT or not any(each.samples for each in programs):
        return made
    rows = [k.value for k in call.node.keywords if k.arg == "train_dataset"]
    nodes = program.flow(call.file, rows or [call.node])
    own, names = {id(part) for node in nodes for part in ast.walk(node)}, _file_names(nodes)
    makers = [p for p in programs if p is not program and p.samples and not p.called("train", "backward")]
    makers = [p for p in makers if any(_WRITES.search(_words(call.node)) for call in p.calls)]
    beside = [p for p in makers if names & _file_names([x.node for x in p.parts if isinstance(x.node, ast.Constant)])]
    sources = [program] if any(id(ask.node) in own for ask in program.samples) else beside
    if not sources:
        return made
    parts = sources[0].parts
    tests = [test for p in parts for test in getattr(p.node, "ifs", [getattr(p.node, "test", None)]) if test]
    local = any(re.search(r"localhost|127\.0\.0\.1|0\.0\.0\.0", str(getattr(p.node, "value", ""))) for p in parts)
    elsewhere = any(_last(ask.node.func) not in _SAMPLING for ask in sources[0].samples) and not local
    apart = sources[0] is not program or made.confidence > OWN_LOOP
    plain = apart and any(_CHECK.search(_words(test)) for test in tests)
    route = Route.DISTILLATION if elsewhere else Route.REJECTION_SAMPLING if plain else Route.UNKNOWN
    return replace(made, route=route, loss=Route.SFT, why=f"{made.why}, on samples of {sources[0].path}")


def _file_names(nodes: Sequence[ast.AST]) -> set[str]:
    texts = [str(n.value)[:300] for node in nodes for n in ast.walk(node) if isinstance(n, ast.Constant)]
    found = {name for text in texts for name in re.findall(r"[\w-]+\.(?:jsonl?|csv|parquet|txt)\b", text)}
    return {name for name in found if not re.search(r"^(train|test)\.|meta|config|index|state|score", name)}


def _settings_in(program: LiveCode) -> Iterator[tuple[str, str, str]]:
    for part in program.parts:
        last = _last(part.node.func) if isinstance(part.node, ast.Call) else ""
        if last in known.SETTERS or last.endswith(("Trainer", "Config", "Arguments")):
            given = part.file.given(part.node)
            yield from ((name, str(value), f"{part.file.path}:{line}") for name, (value, line) in given.items())
        elif isinstance(part.node, ast.Assign) and isinstance(part.node.value, ast.Constant):
            where, value = f"{part.file.path}:{part.node.lineno}", str(part.node.value.value)
            yield from ((_last(target), value, where) for target in part.node.targets)


def planned(files: Mapping[str, str | bytes], entry_points: Sequence[str] = ()) -> Planned:
    """Return the route that the code in `files` (text by path) plans; observed command lines decide what ran. Never raises."""
    kept = {path: raw for path, raw in sorted(files.items()) if path.endswith((*PYTHON, *SHELL, *CONFIG))}
    texts = tuple((p, r if isinstance(r, str) else r.decode("utf-8", "replace")) for p, r in kept.items())
    return _planned(texts, tuple(dict.fromkeys(entry_points))[-MAX_COMMANDS:])


@lru_cache(maxsize=16)
def _planned(files: tuple[tuple[str, str], ...], lines: tuple[str, ...]) -> Planned:
    done = follow(dict(files), lines)
    read = {path: parsed(path, text) for path, text in done.files.items() if path.endswith(PYTHON)}
    programs = [LiveCode(path, read, sure) for path, sure in done.scripts.items()]
    found = [made for program in programs for made in trainings(program, programs)]
    found += [Training(each.route, each.why, each.where, each.line, each.sure) for each in done.asked]
    opaque = [
        Training(Route.UNKNOWN, "not known what it does", part.file.path, part.node.lineno)
        for part in (part for program in programs for file in program.files.values() for part in file.parts)
        if _OPAQUE.match(_last(part.node)) and not _MODEL.search(_last(getattr(part.node, "value", part.node)))
    ]
    policies = [made for made in found if made.route is not None]
    chosen = [m for m in policies if m.route is not Route.AVERAGING and m.why != NOT_THERE] or policies or opaque
    route, confidence, alternatives = _decided(chosen, done.ordered, bool(found or programs))
    told = [*done.settings, *(each for program in programs for each in _settings_in(program))]
    keys = {(known.key_of(name), where, name, value) for name, value, where in told if value}
    shown = sorted((key for key in keys if key[0] is not None), key=str)[:MAX_SETTINGS]
    settings = tuple(Setting(name=name, value=value, where=where) for _, where, name, value in shown)
    scripts = tuple(dict.fromkeys([*done.used, *(at for each in programs for at in each.files)]))
    why = [_evidence(made, done.files.get(made.path, "")) for made in (chosen or found)[:6]]
    return Planned(route, tuple(why), round(confidence, 2), alternatives, scripts, tuple(found), settings)


def _evidence(made: Training, text: str) -> EvidenceLine:
    said = "".join(text.split("\n", made.line)[made.line - 1 : made.line]).strip()[:160] if made.line else ""
    where = clean(f"{made.path}:{made.line}" if made.line else made.path, 200) or ""
    return EvidenceLine(where=where, says=clean(f"{said} [{made.why}]".strip(), 240) or "")


def _decided(found: Sequence[Training], ordered: bool, some: bool) -> tuple[Route, float, tuple[Route, ...]]:
    if not found:
        return (Route.NONE, 0.6, ()) if some else (Route.UNKNOWN, 0.0, ())
    routes = list(dict.fromkeys(made.route for made in found if made.route))
    sure, route = all(made.sure for made in found), routes[0] if len(routes) == 1 else known.joined_route(routes)
    others = () if route is Route.SFT_RL else tuple(each for each in routes if each is not route)
    joined = sure and (ordered or len({made.path for made in found}) == 1) and not set(routes) & set(known.UNTRAINED)
    if route is not Route.UNKNOWN and (len(routes) == 1 or (joined and len(others) < 2)):
        return route, min(made.confidence for made in found) * (1.0 if sure and not others else 0.7), others
    return Route.UNKNOWN, 0.0, tuple(each for each in routes if each is not Route.UNKNOWN)[:6]
