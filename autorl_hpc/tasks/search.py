"""Which search back ends a task can name. Its environment's file is parsed, not run."""

from __future__ import annotations

import ast
from pathlib import Path

from autorl_hpc.errors import AutorlError
from autorl_hpc.records.task import Recipe
from autorl_hpc.rollouts.search.backend import BACKENDS

ROOM = "autorl_hpc.rollouts.search"


def check_search_name(recipe: Recipe, tree: ast.Module, where: Path) -> None:
    """The option `search` names a back end of the package, or one that the environment's file adds.

    An environment that does not use the package's search may mean anything by that option.

    Args:
        tree: of the environment's file.

    Raises:
        AutorlError: there is none of that name.
    """
    name = str(recipe.options.get("search", ""))
    if not name or name in BACKENDS or not _uses_room(tree):
        return
    added = _added(tree)
    if added is None or name in added:
        return
    raise AutorlError(
        f"field `recipes.{recipe.name}.options.search`: there is no search back end `{name}`",
        where=where,
        next_step=f"choose one of: {', '.join(sorted({*BACKENDS, *added}))}; or add it in the environment's file: "
        'BACKENDS["name"] = make',
    )


def _uses_room(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(name == ROOM or name.startswith(f"{ROOM}.") for name in names):
            return True
    return False


def _added(tree: ast.Module) -> set[str] | None:
    """Names that the file adds; None where they can't be read off it."""
    found: set[str] = set()
    uses = sum(isinstance(node, (ast.Name, ast.Attribute)) and _is_table(node) for node in ast.walk(tree))
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if isinstance(target, ast.Subscript) and _is_table(target.value):
                uses -= 1
                if not (isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)):
                    return None
                found.add(target.slice.value)
    return None if uses else found


def _is_table(node: ast.expr) -> bool:
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)) == "BACKENDS"
