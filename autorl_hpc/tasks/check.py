"""Checks a task folder before anything is queued. Runs none of its code; the code is only parsed."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from autorl_hpc.errors import AutorlError, did_you_mean
from autorl_hpc.records.task import Recipe
from autorl_hpc.scoring.registry import OF_EPISODES, SCORERS, scorer, wrong_option
from autorl_hpc.tasks.folders import OWN_SCORER, code_files, scorer_file
from autorl_hpc.tasks.loader import Task, check_search_name

SPLITS = ("feedback", "report")
ENVIRONMENT_TIMEOUT = "environment_timeout_s"  # Recipe option: limit in seconds of one call of environment and dialogue
EVALUATE, DIALOGUE = "evaluate", "Dialogue"
ARGUMENTS = "(question, model_answer, reference, **kw)"
PAGE = "docs/adding-a-task.md shows one"
Problem = tuple[Path | str, str, str]  # Where it is, what is wrong, and what to do about it


def check_task(task: Task) -> None:
    """Check everything that a task folder needs in addition to a readable task.yaml. Raises AutorlError: the first missing
    or wrong thing, with file and field."""
    for where, what, next_step in _problems(task):
        raise AutorlError(what, where=where, next_step=next_step)


def _problems(task: Task) -> Iterator[Problem]:
    own, file = task.folder / ("task.yaml" if task.smith is None else "config.yaml"), task.file
    if task.smith is None:
        for split in SPLITS:
            if split not in file.splits:
                yield own, f"field `splits.{split}`: this field is missing", "pin it: bin/pin-task prints it"
        description = task.folder / "description.md"
        if not description.is_file():
            advice = "write what the data are and how answers are scored: agents read it"
            yield description, f"task {task.name} has no description.md", advice
    _ = task.description  # checks that it can be read
    if file.environment is not None:
        yield from _environment(task, own)
    for recipe in file.recipes:
        yield from _recipe(task, recipe, own)
    if file.unit == "cluster" and file.cluster_field is None:
        what = "field `unit` is cluster, and no `cluster_field` says which field of an item names its cluster"
        yield own, what, "set `cluster_field`, or `unit: item`"


def _recipe(task: Task, recipe: Recipe, where: Path) -> Iterator[Problem]:
    field, played = f"field `recipes.{recipe.name}", recipe.max_steps is not None
    if not played and "{question}" not in recipe.prompt:
        what = f"{field}.prompt`: it does not hold {{question}}, so every item would be asked the same"
        yield where, what, "put {question} where the item's question belongs"
    if played and task.file.environment is None:
        what = f"{field}.max_steps`: the task has no environment to take steps in"
        yield where, what, "set `environment`, or leave `max_steps` out"
    if recipe.shots_file is not None and recipe.shots_sha256 is None:
        yield where, f"{field}.shots_sha256`: this field is missing beside shots_file", "pin the file"
    if recipe.scorer != OWN_SCORER:
        yield from _scorer(recipe, field, where)
        if played != (recipe.scorer in OF_EPISODES) and (played or recipe.scorer == "episodes"):
            reads = "answers, and `max_steps` makes them episodes"
            reads = reads if played else "episodes, and without `max_steps` there are none"
            what = f"{field}.scorer`: the scorer `{recipe.scorer}` reads {reads}"
            advice = 'with `max_steps` use `scorer: episodes` and `scorer_version: "1"`; without, a scorer of answers'
            yield where, what, advice
    elif played:
        advice = 'use `scorer: episodes` with `scorer_version: "1"`'
        yield where, f"{field}.scorer`: episodes are scored by their rewards", advice
    wrong = wrong_option(recipe)
    if wrong is not None:
        options = "options" if task.smith is not None else f"recipes.{recipe.name}.options"
        yield where, f"field `{options}.{wrong[0]}`: {wrong[1]}", f"correct it; {PAGE}"
    if recipe.scorer == OWN_SCORER:
        yield from _evaluate(task, recipe)


def _scorer(recipe: Recipe, field: str, where: Path) -> Iterator[Problem]:
    if recipe.scorer not in SCORERS:
        known = [*SCORERS, OWN_SCORER]
        what = f"{field}.scorer`: there is no scorer `{recipe.scorer}`{did_you_mean(recipe.scorer, known)}"
        advice = f"choose one of: {', '.join(sorted(known))} (`{OWN_SCORER}`: the folder's own evaluate.py)"
        yield where, what, advice
    try:
        scorer(recipe.scorer, recipe.scorer_version)
    except AutorlError as error:
        yield where, f"{field}.scorer_version`: {error.what}", "correct the version"


def _evaluate(task: Task, recipe: Recipe) -> Iterator[Problem]:
    path = scorer_file(task.folder, recipe.options)
    name = f"{path.name} of task {task.name}"
    if path.is_file() and os.path.relpath(path, task.folder) not in code_files(task.folder):
        why = "which alone is frozen and hashed (a link, or a path that leads out of it)"
        yield path, f"{name} is not a file of its folder, {why}", "put the file itself into the folder"
    tree = _parsed(path, f"recipe {recipe.name} of task {task.name} has `scorer: {OWN_SCORER}`")
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == EVALUATE]
    if not found:
        is_async = any(isinstance(node, ast.AsyncFunctionDef) and node.name == EVALUATE for node in tree.body)
        if is_async or not set(_bound(tree.body)) & {EVALUATE, "*"}:
            yield path, f"{name} has no function {EVALUATE}{ARGUMENTS}", PAGE
        return  # imported or created by a call; the first use shows whether it works
    arguments = found[-1].args
    by_place = len(arguments.posonlyargs) + len(arguments.args)
    if by_place < 3 and arguments.vararg is None:
        what = f"{name}: {EVALUATE} takes {by_place} arguments, it is called with three: {EVALUATE}{ARGUMENTS}"
        yield f"{path}:{found[-1].lineno}", what, "correct its first line"


def _environment(task: Task, where: Path) -> Iterator[Problem]:
    file, _, name = (task.file.environment or "").partition(":")
    if all(recipe.max_steps is None for recipe in task.file.recipes):
        what = "field `environment`: no recipe has `max_steps`, so it would never be played"
        yield where, what, "set `max_steps` in the recipe"
    tree = _parsed(task.folder / file, f"field `environment` of task {task.name} names it")
    names = set(_bound(tree.body))
    for wanted in (name, DIALOGUE):
        if wanted not in names and "*" not in names:
            yield (
                task.folder / file,
                f"{file} of task {task.name} has no class {wanted}{did_you_mean(wanted, names)}",
                PAGE,
            )
    for recipe in task.file.recipes:
        limit_s = recipe.options.get(ENVIRONMENT_TIMEOUT, 1)
        if isinstance(limit_s, (bool, str)) or limit_s <= 0:
            field = f"field `recipes.{recipe.name}.options.{ENVIRONMENT_TIMEOUT}`"
            advice = "give how long one call of the environment may take, or leave it out: 120"
            yield where, f"{field}: {limit_s!r} is not a number of seconds", advice
        check_search_name(recipe, (task.folder / file).read_text(encoding="utf-8", errors="replace"), where)


def _parsed(path: Path, why: str) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=path.name)
    except FileNotFoundError:
        raise AutorlError(f"{path.name} is missing: {why}", where=path, next_step=PAGE) from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        what = f"{path.name} is no Python: {getattr(error, 'msg', error)}"
        advice = "correct that line"
        raise AutorlError(what, where=f"{path}:{line}" if line else path, next_step=advice) from None


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
