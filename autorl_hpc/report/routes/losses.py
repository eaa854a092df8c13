"""What a loss of an own training loop is, by the operations that flow into it; names only where operations don't tell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from autorl_hpc.report.routes.flow import Flow, called, generates
from autorl_hpc.report.routes.scopes import Scope
from autorl_hpc.report.routes.values import Values
from autorl_hpc.states import Route

_CE = frozenset({"cross_entropy", "CrossEntropyLoss", "nll_loss", "NLLLoss", "fused_linear_cross_entropy"})
_LOG_PROBABILITY = frozenset(
    {"log_softmax", "gather", "logsumexp", "selective_log_softmax", "log_prob", "take_along_dim"}
)
_WORDS = {
    "reward": re.compile(r"reward|advantage|\badv|_adv|return_|returns|\bret\b|score|baseline|\bgain", re.I),
    "pair": re.compile(r"chosen|reject|winner|loser|preferred|_win|_los|\bpos_|\bneg_|_w\b|_l\b", re.I),
    "reference": re.compile(r"\bref|_ref|reference|\bpi0|frozen", re.I),
    "teacher": re.compile(r"teacher|expert_logits", re.I),
    "odds": re.compile(r"odds", re.I),
    "kto": re.compile(r"\bkto|_kto|desirable", re.I),
    "value": re.compile(
        r"value_?(loss|head|fn|pred|clip)|\bvf|critic|v_head|\bgae|values_pred|new_values|value_model", re.I
    ),
}


@dataclass
class Signals:
    """What was found in the flow into a loss: word and the line where it was met first."""

    lines: dict[str, tuple[str, int]] = field(default_factory=dict)

    def __contains__(self, word: str) -> bool:
        return word in self.lines

    def add(self, word: str, node: ast.AST, scope: Scope) -> None:
        self.lines.setdefault(word, (scope.source.path, getattr(node, "lineno", 0)))


def signals(made: Flow, values: Values) -> Signals:
    """The operations and words in a flow."""
    found = Signals()
    for node, scope in made.nodes:
        if isinstance(node, ast.Call):
            _call(node, scope, values, found)
        elif isinstance(node, ast.BinOp):
            _operation(node, scope, found)
        elif isinstance(node, ast.Attribute) and node.attr == "loss" and not _is_self(node.value):
            found.add("ce", node, scope)
        word = _word(node)
        if word:
            for kind, pattern in _WORDS.items():
                if kind not in found and pattern.search(word):
                    found.add(kind, node, scope)
    return found


def _call(node: ast.Call, scope: Scope, values: Values, found: Signals) -> None:
    name = called(node, scope, values)
    if name in _CE or any(k.arg == "labels" for k in node.keywords):
        found.add("ce", node, scope)
    if name in _LOG_PROBABILITY:
        found.add("logp", node, scope)
    if name in ("kl_div", "KLDivLoss"):
        found.add("kl", node, scope)
    if name in ("logsigmoid", "LogSigmoid", "softplus"):
        found.add("logsigmoid", node, scope)
    if name == "log" and any(
        isinstance(a, ast.Call) and called(a, scope, values) in ("sigmoid", "Sigmoid") for a in _inner(node)
    ):
        found.add("logsigmoid", node, scope)
    if name == "sigmoid":
        found.add("sigmoid", node, scope)
    if name == "exp":
        found.add("exp", node, scope)
    if name in ("clamp", "clip") and _around_one(node):
        found.add("clip", node, scope)
    if name in ("mse_loss", "MSELoss", "smooth_l1_loss"):
        found.add("mse", node, scope)
    if name == "whiten":
        found.add("group", node, scope)
    if generates(node, scope, values):
        found.add("generate", node, scope)


def _inner(node: ast.Call) -> list[ast.expr]:
    inner = list(node.args)
    if isinstance(node.func, ast.Attribute):
        inner.append(node.func.value)
    return [*inner, *(each.left for each in inner if isinstance(each, ast.BinOp))]


def _around_one(node: ast.Call) -> bool:
    """`clamp(x, 1 - e, 1 + e)` or `clamp(x, 0.8, 1.2)`."""
    bounds = [*node.args, *(k.value for k in node.keywords)]
    sums = [b for b in bounds if isinstance(b, ast.BinOp) and isinstance(b.op, (ast.Add, ast.Sub)) and _is_one(b.left)]
    numbers = [b.value for b in bounds if isinstance(b, ast.Constant) and isinstance(b.value, float)]
    return len(sums) >= 2 or (any(0.5 <= n < 1 for n in numbers) and any(1 < n <= 2 for n in numbers))


def _is_one(expr: ast.expr) -> bool:
    return isinstance(expr, ast.Constant) and expr.value in (1, 1.0)


def _operation(node: ast.BinOp, scope: Scope, found: Signals) -> None:
    if (
        isinstance(node.op, ast.Div)
        and _is_centred(node.left, scope)
        and _mentions(node.right, ("std", "stdev", "pstdev"), scope)
    ):
        found.add("group", node, scope)
    elif isinstance(node.op, ast.Sub) and _mentions(node.right, ("mean", "fmean"), scope):
        found.add("baseline", node, scope)
    elif (
        isinstance(node.op, ast.Div)
        and isinstance(node.left, ast.BinOp)
        and isinstance(node.left.op, ast.Sub)
        and _less_one(node.right)
    ):
        found.add("baseline", node, scope)  # leave one out: (sum - r) / (n - 1)
    elif isinstance(node.op, ast.Mult):
        found.add("product", node, scope)
        sides = [n for side in (node.left, node.right) for n in _near(side)]
        if any(_WORDS["reward"].search(_word(n)) for n in sides if _word(n)):
            found.add("weighted", node, scope)
    elif isinstance(node.op, ast.Pow) and isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Sub):
        found.add("square", node, scope)


def _is_centred(expr: ast.expr, scope: Scope) -> bool:
    """`x - mean`, by itself or behind a name."""
    candidates: list[ast.expr] = [expr]
    if isinstance(expr, ast.Name):
        candidates += [bound.expr for bound in scope.names.get(expr.id, [])[:6]]
    return any(
        isinstance(c, ast.BinOp) and isinstance(c.op, ast.Sub) and _mentions(c.right, ("mean", "fmean"), scope)
        for c in candidates
    )


def _mentions(expr: ast.expr, words: tuple[str, ...], scope: Scope, depth: int = 0) -> bool:
    """Whether `mean` (say) is called in an expression, or in what its names are bound to."""
    for node in _near(expr):
        word = _word(node)
        if word in words or (isinstance(node, ast.Name) and any(w in node.id.lower() for w in words)):
            return True
        if words[0] == "mean" and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_share(node):
            return True
        if depth < 2 and isinstance(node, ast.Name):
            for bound in scope.names.get(node.id, [])[:6]:
                if _mentions(bound.expr, words, scope, depth + 1):
                    return True
    return False


def _near(expr: ast.AST) -> Iterator[ast.AST]:
    """The first nodes of an expression: one of thousands of terms is no formula."""
    return islice(ast.walk(expr), 200)


def _is_share(node: ast.BinOp) -> bool:
    """`sum(x) / len(x)`."""
    return (
        isinstance(node.left, ast.Call)
        and isinstance(node.left.func, ast.Name)
        and node.left.func.id == "sum"
        and isinstance(node.right, ast.Call)
    )


def _less_one(expr: ast.expr) -> bool:
    return isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Sub) and _is_one(expr.right)


def _word(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value[:40]
    return node.arg or "" if isinstance(node, ast.keyword) else ""


def _is_self(expr: ast.expr) -> bool:
    return isinstance(expr, ast.Name) and expr.id == "self"


def route_of(found: Signals) -> tuple[Route, str, str] | None:
    """Route, the signal that it rests on, and why in words; None: nothing tells.

    Formulas: DPO Rafailov et al. 2023 (7); ORPO Hong et al. 2024 (7); IPO Azar et al. 2023 (17); PPO Schulman et al. 2017 (7);
    GRPO Shao et al. 2024 (3); RLOO Ahmadian et al. 2024 (7).
    """
    has = found.__contains__
    if has("logsigmoid") or (has("sigmoid") and has("kto")):
        word = "logsigmoid" if has("logsigmoid") else "sigmoid"
        if has("odds"):
            return Route.PREFERENCE, word, "log-sigmoid of an odds ratio (ORPO)"
        if has("kto"):
            return Route.PREFERENCE, word, "sigmoid of a margin to a reference point (KTO)"
        if has("pair") or not has("weighted"):
            if has("reference"):
                return Route.DPO, word, "log-sigmoid of a margin between policy and reference (DPO)"
            return Route.PREFERENCE, word, "log-sigmoid of a margin without a reference (SimPO, CPO)"
    if has("pair") and has("square") and has("reference"):
        return Route.PREFERENCE, "square", "squared margin between chosen and rejected (IPO)"
    if has("clip") and has("exp"):
        if has("value") and (has("mse") or has("square")):
            return Route.PPO, "clip", "clipped ratio with a value loss (PPO)"
        if has("group") or has("baseline"):
            return Route.GRPO, "clip", "clipped ratio with rewards relative to their group (GRPO)"
        return Route.RL, "clip", "clipped ratio, no value loss and no group"
    if has("weighted") and (has("logp") or has("ce")):
        if has("value") and (has("mse") or has("square")):
            return Route.RL, "weighted", "log-probabilities times advantages with a value loss (actor-critic)"
        if has("group"):
            return Route.GRPO, "group", "log-probabilities times rewards normalised in their group (GRPO)"
        return Route.RL, "weighted", "log-probabilities times rewards (REINFORCE, RLOO)"
    if has("group") and has("product") and has("generate"):
        return Route.GRPO, "group", "log-probabilities times normalised figures of samples (GRPO)"
    if has("baseline") and has("product") and has("generate"):
        return Route.RL, "baseline", "log-probabilities times centred figures of samples"
    if has("kl") and (has("teacher") or not has("ce")):
        return Route.DISTILLATION, "kl", "divergence to another model's logits"
    if has("ce"):
        return Route.SFT, "ce", "cross-entropy on labels"
    if has("logp"):
        return Route.SFT, "logp", "log-probabilities of given text"
    return None
