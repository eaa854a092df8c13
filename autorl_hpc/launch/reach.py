"""What graders must reach to score an experiment's tasks, and where no real score is possible; said before anything is queued."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from autorl_hpc.errors import AutorlError
from autorl_hpc.records.experiment import ExperimentSpec, JudgeSpec
from autorl_hpc.records.task import Recipe
from autorl_hpc.rollouts.search import online
from autorl_hpc.scoring.judges import JUDGE_MODEL

if TYPE_CHECKING:
    from autorl_hpc.launch.expand import Cell


def check_search(recipe: Recipe, task: str, where: Path) -> None:
    """The recipe's search engine is named in full, and its key can be read.

    Raises:
        AutorlError: it isn't. No connection is tried: this may be a machine without one.
    """
    kind = recipe.options.get("search")
    if kind not in ("online", "replay"):
        return
    try:
        online.identity_of(recipe.options)
        if kind == "online" and "search_key_file" in recipe.options:
            online.read_key(Path(str(recipe.options["search_key_file"])).expanduser())
    except OSError as error:
        problem = f"the search engine's key can't be read: {error.strerror} ({recipe.options['search_key_file']})"
    except ValueError as error:
        problem = str(error)
    else:
        return
    raise AutorlError(
        f"field `matrix.task`: {task}, recipe {recipe.name}: {problem}",
        where=where,
        next_step="correct the option in the recipe, or the file with the key",
    )


def lines(spec: ExperimentSpec, cells: Sequence[Cell]) -> list[str]:
    """One sentence for each task that asks something beyond this package and its staged files; none for the others."""
    recipes = {cell.science.task: cell.science.recipe for cell in cells}
    return [
        f"{task}: {words}"
        for task, recipe in recipes.items()
        for words in (*_judge(recipe, spec), *_search(recipe))
        if words
    ]


def _judge(recipe: Recipe, spec: ExperimentSpec) -> list[str]:
    if recipe.judge == "none":
        return []
    name = str(recipe.options.get(JUDGE_MODEL, ""))
    if name == JudgeSpec.BUILTIN:
        return [f"{name} is a toy, no judge: these are no real scores"]
    host = "its endpoint" if spec.judge is None else urlsplit(spec.judge.url).netloc
    return [
        f"graders ask the judge {name} at {host}; where a node can't reach it nothing is scored, and submissions wait"
    ]


def _search(recipe: Recipe) -> list[str]:
    kind, date = recipe.options.get("search"), recipe.options.get("search_date", "no date")
    if kind == "online":
        host = urlsplit(str(recipe.options.get("search_url", ""))).hostname
        return [
            f"graders ask the search engine at {host} ({date}); where a node can't reach it nothing is scored, and "
            "submissions wait; no real score is possible offline"
        ]
    if kind == "replay":
        return [f"searches are replayed ({date}): a model that asks what was not recorded gets no score"]
    return []
