"""Whether a statement averages weights: arithmetic over two state dicts by one key, or a library's call for it."""

from __future__ import annotations

import ast
from itertools import islice

from autorl_hpc.report.routes.flow import called
from autorl_hpc.report.routes.kinds import Func
from autorl_hpc.report.routes.scopes import Scope
from autorl_hpc.report.routes.values import Values
from autorl_hpc.report.routes.words import words

_LOADED = ("state_dict", "load_file", "safetensors", "safe_open", "torch.load", "named_parameters", "parameters()")
_IN_PLACE = frozenset({"add_", "mul_", "sub_", "div_", "copy_", "normal_", "lerp_"})
_PARAMETERS = frozenset({"parameters", "named_parameters", "state_dict"})
_LIBRARY = frozenset({"add_weighted_adapter", "update_parameters", "run_merge", "AveragedModel"})


def averaging(node: ast.stmt, scope: Scope, values: Values) -> str | None:
    """Why a statement averages weights; None: it doesn't."""
    near = list(islice(ast.walk(node), 400))
    for each in near:
        if isinstance(each, ast.Call):
            name = called(each, scope, values)
            if name in _LIBRARY and name != "AveragedModel":
                return f"weights are averaged by `{name}`"
    if not isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)):
        return None
    if not any(word in scope.source.text for word in _LOADED):
        return None
    if any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.MatMult) for each in near):
        return None  # B @ A: an adapter that is merged
    if _side_by_side(node, scope) or any(_by_key(each, scope) or _mixed(each, scope, values) for each in near):
        return "weights of several models are added up, tensor by tensor"
    return None


def _by_key(node: ast.AST, scope: Scope) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return len(_dicts(node)) >= 2
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        target = _key(node.target)
        return target is not None and bool({d for d, k in _dicts(node.value) if k == target[1]} - {target[0]})
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "lerp":
            return len(_dicts(node)) >= 2
        if name in ("add_", "lerp_") and isinstance(node.func, ast.Attribute) and _key(_changed(node)) is not None:
            return not any(isinstance(n, ast.Attribute) and n.attr.startswith("rand") for n in ast.walk(node))
        if name in ("stack", "sum", "mean") and node.args:
            inner = node.args[0]
            if isinstance(inner, (ast.ListComp, ast.GeneratorExp)):
                over = {n.id for n in ast.walk(inner.generators[0].target) if isinstance(n, ast.Name)}
                return any(d in over for d, _ in _dicts(inner.elt)) and _of_weights(inner, scope)
            if isinstance(inner, (ast.List, ast.Tuple)):
                return len(_dicts(inner)) >= 2
    return False


def _changed(node: ast.AST) -> ast.AST:
    """What a chain of calls works on: `a` of `a.mul_(0.5).add_(b)`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return node


def _side_by_side(node: ast.stmt, scope: Scope) -> bool:
    """`p.data = (p.data + q.data) / 2` in a loop over the parameters of two models."""
    target: ast.AST
    if isinstance(node, ast.Assign):
        target = node.targets[0]
    elif isinstance(node, ast.AugAssign):
        target = node.target
    else:
        target = _changed(node.value) if isinstance(node, ast.Expr) else node
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
    near = list(islice(ast.walk(node), 200))
    added = isinstance(node, ast.AugAssign) or any(
        (isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add))
        or (isinstance(n, ast.Attribute) and n.attr in ("add_", "lerp_", "lerp"))
        for n in near
    )
    if not added or not isinstance(target, ast.Name):
        return False
    others = {n.id for n in near if isinstance(n, ast.Name)} - {target.id}
    for bound in scope.names.get(target.id, [])[:4]:
        walked = sum(isinstance(n, ast.Attribute) and n.attr in _PARAMETERS for n in islice(ast.walk(bound.expr), 50))
        if bound.how == "part" and walked >= 2:
            return any(b.expr is bound.expr for name in others for b in scope.names.get(name, []))
    return False


def _mixed(node: ast.AST, scope: Scope, values: Values) -> bool:
    """A function of this code that adds its arguments up, given tensors of two dictionaries by one key."""
    if not isinstance(node, ast.Call) or len(_dicts(node)) < 2:
        return False
    for target in values.of(node.func, scope):
        if isinstance(target, Func):
            inner = values.scopes.function(target.node, target.parent)
            sums = [n for each in inner.returns[:6] for n in islice(ast.walk(each), 200) if isinstance(n, ast.BinOp)]
            if any(isinstance(n.op, ast.Add) for n in sums):
                return True
    return False


def _of_weights(inner: ast.ListComp | ast.GeneratorExp, scope: Scope) -> bool:
    """Whether what is iterated are state dicts and not rows of data."""
    text = words(inner.generators[0].iter)
    if any(w in text for w in ("state", "sd", "weights", "models", "params", "ckpt", "checkpoint", "soup")):
        return True
    names = [n.id for n in ast.walk(inner.generators[0].iter) if isinstance(n, ast.Name)]
    bound = [b.expr for name in names for b in scope.names.get(name, [])[:4]]
    return any(w in words(b) for b in bound for w in ("state_dict", "load_file", "torch"))


def _dicts(node: ast.AST) -> set[tuple[str, str]]:
    """Dictionaries that are read by a variable key: name and key. What is only counted (`len(rows[n])`) is no weight."""
    near = list(islice(ast.walk(node), 200))
    counted = {id(each) for call in near if _counts(call) for each in ast.walk(call)}
    found = [_key(each) for each in near if id(each) not in counted]
    pairs = {pair for pair in found if pair is not None}
    keys = {key for _, key in pairs}
    if len(keys) == 1:
        return pairs
    return {p for p in pairs if sum(q[1] == p[1] for q in pairs) >= 2}


def _counts(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def _key(node: ast.AST) -> tuple[str, str] | None:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
        base = node.value
        if isinstance(base, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
            return words(base)[:80], node.slice.id
    return None


def changes_weights(node: ast.Expr | ast.AugAssign, scope: Scope) -> bool:
    """Whether a statement changes parameters in place, with no loss: noise, scaling, editing."""
    if isinstance(node, ast.AugAssign):
        target: ast.expr = node.target
    elif (
        isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in _IN_PLACE
    ):
        target = node.value.func.value
    else:
        return False
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
    if not isinstance(target, ast.Name):
        return False
    bound = [b.expr for b in scope.names.get(target.id, [])[:4]]
    return any(isinstance(n, ast.Attribute) and n.attr in _PARAMETERS for b in bound for n in islice(ast.walk(b), 50))
