"""Whether this machine has what an exported run was scored with: task, splits, recipe, scorer, base model."""

from __future__ import annotations

import json
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.checkpoint import tensors_of
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import verify_model
from autorl_hpc.launch.judge import JUDGE_PARAMETERS
from autorl_hpc.records.evidence import EvidenceManifest
from autorl_hpc.records.experiment import JudgeSpec
from autorl_hpc.records.run import RunRecord
from autorl_hpc.records.task import Recipe
from autorl_hpc.scoring.judges import JUDGE_MODEL
from autorl_hpc.scoring.registry import scorer
from autorl_hpc.states import Protocol, Split
from autorl_hpc.tasks.loader import load_task
from autorl_hpc.tasks.own_files import with_scorer_hash
from autorl_hpc.tasks.staged import verify_staged_task, with_pins

WIDEST_BYTES = 4
"""Of one value: checkpoints may be stored in float32 whatever the base model is stored in."""

HEADERS_BYTES = 128 * 1024 * 1024


def weights_allowed(root: Root, manifest: EvidenceManifest) -> int:
    """The most bytes that the weights of a checkpoint of this base model can have; a tied head may lie there twice.

    Raises:
        AutorlError: the base model is not staged here, or is another one.
    """
    staged = verify_model(root, manifest.base_model)
    if staged.content_hash != manifest.base_model_content_hash:
        raise AutorlError(
            f"the base model {manifest.base_model} that is staged here has other weights than the one of the run",
            where=root.model(manifest.base_model),
            next_step=f"stage the revision with content hash {manifest.base_model_content_hash}",
        )
    sizes = [_values(tensor.shape) for tensor in tensors_of(root.model(manifest.base_model))]
    return WIDEST_BYTES * (sum(sizes) + max(sizes, default=0)) + HEADERS_BYTES


def _values(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def check_task(root: Root, record: RunRecord) -> list[str]:
    """Checks that the run was asked what this machine's task asks; returns what is worth saying.

    Raises:
        AutorlError: task, split, recipe or scorer is another one here, or nothing is staged.
    """
    science = record.science
    task = with_pins(root, load_task(science.task))
    verify_staged_task(root, task)
    local = task.file.splits["report"]
    if science.protocol is Protocol.PAPER and task.file.paper is not None:
        local = task.file.paper
    if science.splits.get(Split.REPORT) != local:
        raise _other("report split", task.folder / "task.yaml", "held-out items")
    recipe = with_scorer_hash(task.recipe(science.recipe.name), task.folder)
    if _unjudged(science.recipe, recipe) != recipe:
        raise _other(f"recipe {recipe.name}", task.folder / "task.yaml", "prompt, limits, scorer or options")
    if record.recipe_hash != science.recipe.hash():
        raise AutorlError("run.json names a recipe_hash that its recipe doesn't have", exit_code=Exit.FAILED)
    scorer(recipe.scorer, recipe.scorer_version, science.task)
    notes = []
    if task.hash() != record.task_hash:
        notes.append("the task's folder differs from the one that ran, in files that decide neither items nor recipe")
    if science.recipe.judge != "none":
        notes.append(
            f"outcomes come of the judge {science.recipe.options.get(JUDGE_MODEL)}, as the run's recipe names it"
        )
    return notes


def _unjudged(recipe: Recipe, local: Recipe) -> Recipe:
    """The run's recipe without the judge that its launch wrote into it."""
    if local.judge == "none":
        return recipe
    written = {JUDGE_MODEL, JUDGE_PARAMETERS} - set(local.options)
    options = {name: value for name, value in recipe.options.items() if name not in written}
    return recipe.model_copy(update={"options": options})


def _other(what: str, where: Path, differs: str) -> AutorlError:
    return AutorlError(
        f"the run's {what} is not the one of the task here: other {differs}",
        where=where,
        next_step="use the version of autorl-hpc, and of the task, that the run was launched with",
    )


def judge_spec(recipe: Recipe, url: str | None, key: Path | None) -> JudgeSpec | None:
    """The judge that the recipe names, at an address of this machine's user: a bundle's own is never asked.

    Raises:
        AutorlError: one is needed, and no address was given.
    """
    if recipe.judge == "none" or recipe.options.get(JUDGE_MODEL) == JudgeSpec.BUILTIN:
        return None
    if url is None:
        raise AutorlError(
            f"this run's answers are judged by {recipe.options.get(JUDGE_MODEL)}",
            next_step="say where it answers: --judge-url http://HOST:PORT/v1, with --judge-key FILE where it wants a key",
        )
    given = recipe.options.get(JUDGE_PARAMETERS, "{}")
    try:
        return JudgeSpec(
            url=url,
            model=str(recipe.options.get(JUDGE_MODEL)),
            key_file=None if key is None else str(key.absolute()),
            parameters=json.loads(str(given)),
        )
    except (ValueError, RecursionError) as error:
        raise AutorlError(f"the judge can't be asked: {error}", next_step="correct --judge-url") from None


def check_shapes(root: Root, base_model: str, weights: Path, not_in_hash: tuple[str, ...]) -> str | None:
    """What is wrong with the names and shapes of the weights, None if they are the base model's.

    Raises:
        Refused: a file is no safetensors file.
    """
    wanted = {tensor.name: tensor.shape for tensor in tensors_of(root.model(base_model))}
    for tensor in tensors_of(weights):
        if tensor.name in not_in_hash and tensor.name not in wanted:
            continue  # a copy of a tied tensor: the engine compares it
        if wanted.get(tensor.name) != tensor.shape:
            return f"tensor {tensor.name[:100]!r} has not the shape that the base model's has"
    return None
