"""Checks a task folder before anything is queued. Runs none of its code; the code is only parsed."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from autorl_hpc.errors import AutorlError
from autorl_hpc.records.task import Recipe
from autorl_hpc.scoring.registry import OF_EPISODES, SCORERS, scorer, wrong_option
from autorl_hpc.tasks.folders import OWN_SCORER, code_files, scorer_file
from autorl_hpc.tasks.loader import Task, check_search_name

SPLITS = ("feedback", "report")
ENVIRONMENT_TIMEOUT = "environment_timeout_s"
"""Recipe option: limit in seconds of one call of environment and dialogue."""
EVALUATE, DIALOGUE = "evaluate", "Dialogue"
ARGUMENTS = "(question, model_answer, reference, **kw)"
PAGE = "docs/adding-a-task.md shows one"


def check_task(task: Task) -> None:
    """Check everything that a task folder needs in addition to a readable task.yaml.

    Raises:
        AutorlError: the first missing or wrong thing, with file and field.
    """
    own = task.folder / "task.yaml"
    if task.smith is None:
        for split in SPLITS:
            if split not in task.file.splits:
                raise AutorlError(
                    f"field `splits.{split}`: this field is missing",
                    where=own,
                    next_step="pin it: bin/pin-task prints it",
                )
        if not (task.folder / "description.md").is_file():
            raise AutorlError(
                f"task {task.name} has no description.md",
                where=task.folder / "description.md",
                next_step="write what the data are and how answers are scored: agents read it",
            )
    else:
        own = task.folder / "config.yaml"
    _ = task.description  # checks that the description can be read
    if task.file.environment is not None:
        _check_environment(task, own)
    for recipe in task.file.recipes:
        _check_recipe(task, recipe, own)
    if task.file.unit == "cluster" and task.file.cluster_field is None:
        raise AutorlError(
            "field `unit` is cluster, and no `cluster_field` says which field of an item names its cluster",
            where=own,
            next_step="set `cluster_field`, or `unit: item`",
        )


def _check_recipe(task: Task, recipe: Recipe, where: Path) -> None:
    field = f"field `recipes.{recipe.name}"
    if recipe.max_steps is None and "{question}" not in recipe.prompt:
        raise AutorlError(
            f"{field}.prompt`: it does not hold {{question}}, so every item would be asked the same",
            where=where,
            next_step="put {question} where the item's question belongs",
        )
    if recipe.max_steps is not None and task.file.environment is None:
        raise AutorlError(
            f"{field}.max_steps`: the task has no environment to take steps in",
            where=where,
            next_step="set `environment`, or leave `max_steps` out",
        )
    if recipe.shots_file is not None and recipe.shots_sha256 is None:
        raise AutorlError(
            f"{field}.shots_sha256`: this field is missing beside shots_file", where=where, next_step="pin the file"
        )
    if recipe.scorer == OWN_SCORER:
        if recipe.max_steps is not None:
            raise AutorlError(
                f"{field}.scorer`: episodes are scored by their rewards",
                where=where,
                next_step='use `scorer: episodes` with `scorer_version: "1"`',
            )
        _check_options(task, recipe, where)
        _check_evaluate(task, recipe)
    else:
        _check_scorer(recipe, field, where)
        if (recipe.max_steps is not None) != (recipe.scorer in OF_EPISODES) and (
            recipe.max_steps is not None or recipe.scorer == "episodes"
        ):
            reads = "answers" if recipe.max_steps is not None else "episodes"
            raise AutorlError(
                f"{field}.scorer`: the scorer `{recipe.scorer}` reads {reads}, and "
                + (
                    "`max_steps` makes them episodes"
                    if recipe.max_steps is not None
                    else "without `max_steps` there are none"
                ),
                where=where,
                next_step='with `max_steps` use `scorer: episodes` and `scorer_version: "1"`; without, a scorer of answers',
            )
        _check_options(task, recipe, where)


def _check_options(task: Task, recipe: Recipe, where: Path) -> None:
    wrong = wrong_option(recipe)
    if wrong is not None:
        field = "options" if task.smith is not None else f"recipes.{recipe.name}.options"
        raise AutorlError(f"field `{field}.{wrong[0]}`: {wrong[1]}", where=where, next_step=f"correct it; {PAGE}")


def _check_scorer(recipe: Recipe, field: str, where: Path) -> None:
    if recipe.scorer not in SCORERS:
        known = [*SCORERS, OWN_SCORER]
        near = get_close_matches(recipe.scorer, known, n=1)
        raise AutorlError(
            f"{field}.scorer`: there is no scorer `{recipe.scorer}`" + (f"; did you mean `{near[0]}`?" if near else ""),
            where=where,
            next_step=f"choose one of: {', '.join(sorted(known))} (`{OWN_SCORER}`: the folder's own evaluate.py)",
        )
    try:
        scorer(recipe.scorer, recipe.scorer_version)
    except AutorlError as error:
        raise AutorlError(
            f"{field}.scorer_version`: {error.what}", where=where, next_step="correct the version"
        ) from None


def _check_evaluate(task: Task, recipe: Recipe) -> None:
    path = scorer_file(task.folder, recipe.options)
    if path.is_file() and os.path.relpath(path, task.folder) not in code_files(task.folder):
        raise AutorlError(
            f"{path.name} of task {task.name} is no file of its folder, which alone is frozen and hashed (a link, or a path that "
            "leads out of it)",
            where=path,
            next_step="put the file itself into the folder",
        )
    tree = _parsed(path, f"recipe {recipe.name} of task {task.name} has `scorer: {OWN_SCORER}`")
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == EVALUATE]
    if not found:
        if _names(tree) & {EVALUATE, "*"} and not _is_async(tree):
            return  # imported or created by a call; the first use shows whether it works
        raise AutorlError(
            f"{path.name} of task {task.name} has no function {EVALUATE}{ARGUMENTS}", where=path, next_step=PAGE
        )
    arguments = found[-1].args
    by_place = len(arguments.posonlyargs) + len(arguments.args)
    if by_place < 3 and arguments.vararg is None:
        raise AutorlError(
            f"{path.name} of task {task.name}: {EVALUATE} takes {by_place} arguments, it is called with three: "
            f"{EVALUATE}{ARGUMENTS}",
            where=f"{path}:{found[-1].lineno}",
            next_step="correct its first line",
        )


def _check_environment(task: Task, where: Path) -> None:
    file, _, name = (task.file.environment or "").partition(":")
    if all(recipe.max_steps is None for recipe in task.file.recipes):
        raise AutorlError(
            "field `environment`: no recipe has `max_steps`, so it would never be played",
            where=where,
            next_step="set `max_steps` in the recipe",
        )
    tree = _parsed(task.folder / file, f"field `environment` of task {task.name} names it")
    names = _names(tree)
    for wanted in (name, DIALOGUE):
        if wanted not in names and "*" not in names:
            near = get_close_matches(wanted, names, n=1)
            raise AutorlError(
                f"{file} of task {task.name} has no class {wanted}" + (f"; did you mean `{near[0]}`?" if near else ""),
                where=task.folder / file,
                next_step=PAGE,
            )
    for recipe in task.file.recipes:
        limit_s = recipe.options.get(ENVIRONMENT_TIMEOUT, 1)
        if isinstance(limit_s, (bool, str)) or limit_s <= 0:
            raise AutorlError(
                f"field `recipes.{recipe.name}.options.{ENVIRONMENT_TIMEOUT}`: {limit_s!r} is no number of seconds",
                where=where,
                next_step="give how long one call of the environment may take, or leave it out: 120",
            )
        check_search_name(recipe, tree, where)


def _parsed(path: Path, why: str) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=path.name)
    except FileNotFoundError:
        raise AutorlError(f"{path.name} is missing: {why}", where=path, next_step=PAGE) from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise AutorlError(
            f"{path.name} is no Python: {getattr(error, 'msg', error)}",
            where=f"{path}:{line}" if line else path,
            next_step="correct that line",
        ) from None


def _names(tree: ast.Module) -> set[str]:
    """Return the names that a module binds at top level; `*` for a star import."""
    return set(_bound(tree.body))


def _is_async(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.AsyncFunctionDef) and node.name == EVALUATE for node in tree.body)


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _bound(node.body)
            yield from _bound(node.orelse)
            for handler in getattr(node, "handlers", []):
                yield from _bound(handler.body)
