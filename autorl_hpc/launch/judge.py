"""A run's judge: found in the experiment, checked, and written into the recipe, whose hash then names it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from autorl_hpc.errors import AutorlError
from autorl_hpc.records.canonical import canonical_json
from autorl_hpc.records.experiment import ExperimentSpec, JudgeSpec
from autorl_hpc.records.task import Recipe
from autorl_hpc.scoring.judges import JUDGE_MODEL, JUDGE_REVISION, read_key

JUDGE_PARAMETERS: Final = "judge_parameters"
"""The option that holds the further parameters of requests. Address and key are not in the recipe: the same model behind another
address is the same judge to compare by, if `judge.revision` says the same; its answers are kept apart all the same."""

ENDPOINT: Final = "`judge: {url: http://HOST:PORT/v1, model: NAME}`, with `key_file` where the endpoint wants a key"
TOY: Final = f"; to try things out without one: `judge: {{url: {JudgeSpec.BUILTIN}}}`"


def with_judge(recipe: Recipe, task: str, spec: ExperimentSpec, where: Path) -> Recipe:
    """The recipe with its judge: the experiment's, else the one that the task names itself.

    Raises:
        AutorlError: it asks a judge and there is none, or the judge's key can't be read.
    """
    if recipe.judge == "none":
        return recipe
    judge = spec.judge
    toy = JUDGE_MODEL in recipe.options and recipe.options[JUDGE_MODEL] == JudgeSpec.BUILTIN
    if recipe.judge == "json" and (judge.url == JudgeSpec.BUILTIN if judge else toy):
        raise AutorlError(
            f"field `judge`: {JudgeSpec.BUILTIN} writes no JSON, and task {task} needs a judge that does (recipe {recipe.name})",
            where=where,
            next_step=f"name a judge model: {ENDPOINT}",
        )
    if judge is None:
        if JUDGE_MODEL in recipe.options:
            return recipe
        raise AutorlError(
            f"field `judge` is missing: task {task} asks a judge model (recipe {recipe.name}, {recipe.judge})",
            where=where,
            next_step=f"add {ENDPOINT}" + ("" if recipe.judge == "json" else TOY),
        )
    try:
        read_key(judge)
    except AutorlError as error:
        raise AutorlError(f"{error.what} ({error.where})", where=where, next_step=error.next_step) from None
    filled_in = (JUDGE_PARAMETERS, JUDGE_REVISION)
    options = {name: value for name, value in recipe.options.items() if name not in filled_in}
    options[JUDGE_MODEL] = judge.name
    if judge.revision is not None:
        options[JUDGE_REVISION] = judge.revision
    if judge.parameters:
        options[JUDGE_PARAMETERS] = canonical_json(judge.parameters).decode()
    return recipe.model_copy(update={"options": options})
