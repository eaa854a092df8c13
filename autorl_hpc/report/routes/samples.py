"""What is sampled from which model, and the names of files that flow into something."""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Iterable
from itertools import islice

from autorl_hpc.report.routes import trainers
from autorl_hpc.report.routes.events import Event, event
from autorl_hpc.report.routes.flow import Flow, filters, flow, generates
from autorl_hpc.report.routes.kinds import Const, Lib, Made
from autorl_hpc.report.routes.names import API_CLIENTS
from autorl_hpc.report.routes.scopes import Scope
from autorl_hpc.report.routes.shell import Arms
from autorl_hpc.report.routes.values import Values


def sampling(node: ast.Call, scope: Scope, arms: Arms, values: Values) -> Event:
    """What a call that generates asks, and whether of a model that is elsewhere."""
    made = event("generate", node, scope, arms, sampled=True)
    func = node.func
    receiver = func.value if isinstance(func, ast.Attribute) else func
    models: set[str] = set()
    for expr, where in islice(flow(receiver, scope, values).nodes, 400):
        if not isinstance(expr, ast.Call):
            continue
        for target in values.of(expr.func, where):
            if isinstance(target, Lib):
                made.elsewhere |= target.name.split(".", 1)[0] in API_CLIENTS and not _is_local(expr, where, values)
                if target.last in ("LLM", "from_pretrained", "pipeline", "AsyncLLM", "Engine", "LLMEngine"):
                    models |= trainers.models(expr, where, values)
    made.models = frozenset(models)
    return made


def _is_local(client: ast.Call, scope: Scope, values: Values) -> bool:
    """Whether a client's or a request's model runs on this node: `base_url="http://localhost:8000/v1"`."""
    root = client
    for _ in range(12):
        inner = root.func
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        made = [v.call for v in values.of(inner, scope) if isinstance(v, Made)]
        if any(k.arg in ("base_url", "api_base") for k in root.keywords) or not made:
            break
        root = made[0]
    urls = [values.text(k.value, scope) or "" for k in root.keywords if k.arg in ("base_url", "api_base")]
    return any(host in url for url in urls for host in ("localhost", "127.0.0.1", "0.0.0.0", "[::1]"))


def told_by_flow(made: Event, found: Flow, values: Values) -> None:
    """Which files flow into something, and whether samples do, and how these were kept."""
    made.reads |= paths(found, values)
    samples = [(n, s) for n, s in found.nodes if generates(n, s, values)]
    made.sampled = bool(samples)
    made.kept = made.sampled and filters(found, values) is not None
    for sample, where in samples[:5]:
        assert isinstance(sample, ast.Call)
        asked = sampling(sample, where, (), values)
        made.elsewhere |= asked.elsewhere
        if asked.models and made.models and not asked.models & made.models:
            made.elsewhere = True


def paths(found: Flow, values: Values) -> frozenset[str]:
    """Base names of files and folders named in a flow."""
    names: set[str] = set()
    for node, scope in islice(found.nodes, 2_000):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= base_names([node.value])
        elif isinstance(node, (ast.Attribute, ast.Name, ast.JoinedStr, ast.Call)):
            names |= base_names([v.value for v in values.of(node, scope) if isinstance(v, Const)])
    return frozenset(names)


def base_names(texts: Iterable[object]) -> set[str]:
    """Base names of those texts that look like paths."""
    found = set()
    for text in texts:
        if isinstance(text, str) and 2 < len(text) < 300 and "\n" not in text and ("/" in text or "." in text[1:]):
            name = posixpath.basename(text.rstrip("/"))
            if len(name) > 2 and not name.startswith("?"):
                found.add(name)
    return found
