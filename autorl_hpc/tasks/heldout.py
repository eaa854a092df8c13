"""Held-out items of staged tasks: verify, load from the vault, and draw a part of the feedback split. Used by graders, and by
the scanner that searches workspaces for held-out items."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import reading
from autorl_hpc.files.layout import Root
from autorl_hpc.files.ledger import sha256_hex
from autorl_hpc.files.store import changed_since, read_manifest, verify_files
from autorl_hpc.records.exchange import StoreManifest
from autorl_hpc.records.run import FeedbackPart, Science, ids_sha256
from autorl_hpc.records.task import Recipe, SplitPin, TaskFile
from autorl_hpc.scoring.registry import READ_ANSWER
from autorl_hpc.states import Fault, Split
from autorl_hpc.tasks.folders import BadRow, read_items
from autorl_hpc.tasks.loader import Task
from autorl_hpc.tasks.smith import staged_pins

ITEMS_NAME = "items.jsonl"
MAX_ITEMS_BYTES = 1024 * 1024 * 1024
JUDGE_PROMPT, JUDGE_PROMPT_SHA256 = "judge_prompt", "judge_prompt_sha256"
"""Recipe options: a staged text file, and its hash."""


@dataclass(frozen=True)
class StagedTask:
    """The two manifests of a staged task."""

    store: StoreManifest
    vault: StoreManifest


def with_pins(root: Root, task: Task) -> Task:
    """Return the task with the pins of its splits; an rl-smith folder gets those of its staging. Raises AutorlError: an
    rl-smith folder is not staged, or its rows have changed."""
    return task if task.smith is None else replace(task, file=staged_pins(root, task.file, task.folder))


def verify_staged_task(root: Root, task: Task) -> StagedTask:
    """Check every staged file's hash against the manifests and the task's pins; return the manifests. Raises AutorlError:
    it is not staged, a file has changed, or an item is invalid."""
    task = with_pins(root, task)
    command = f"autorl-hpc stage {task.name}"
    store = read_manifest(root.task_store(task.name), name=f"task {task.name}", stage_command=command)
    vault = read_manifest(root.task_vault(task.name), name=f"held-out data of task {task.name}", stage_command=command)
    verify_files(root.task_store(task.name), store, command)
    verify_files(root.task_vault(task.name), vault, command)
    places = (root.task_store(task.name), store, task.file.train_files)
    for folder, manifest, pins in (places, (root.task_vault(task.name), vault, vault_pins(task))):
        staged = {file.path: file.sha256 for file in manifest.files}
        changed = next((name for name, digest in pins.items() if staged.get(name) != digest), None)
        if changed is not None:
            what = f"{changed} of task {task.name} was staged by another version of the task"
            raise changed_since(what, folder, f"put the original back or run: {command} --again")
    check_items(task, root.task_vault(task.name))
    return StagedTask(store, vault)


def check_items(task: Task, folder: Path, made_by: Path | None = None) -> None:
    """Check each held-out item below `folder`, before anything is queued. Raises AutorlError: the first row that is not an item
    or repeats an id, with file (`made_by`, if given) and line; or the number of items differs from the pin."""
    question = any(recipe.max_steps is None for recipe in task.file.recipes)
    answer = any(recipe.scorer in READ_ANSWER for recipe in task.file.recipes)
    own = task.folder / "task.yaml"
    pins = [(f"splits.{split}", split, pin) for split, pin in task.file.splits.items()]
    for key, default, pin in [*pins, *([("paper", "paper", task.file.paper)] if task.file.paper else [])]:
        name = f"{pin.folder or default}/{ITEMS_NAME}"
        path = folder / name
        if not path.is_file():
            what = f"key `{key}` pins {name}, and there is no such file: is it among `vault_files`?"
            again = f"correct the key, and run: autorl-hpc stage {task.name} --again"
            raise AutorlError(what, where=own, next_step=again)
        try:
            rows = read_items(reading.read_bytes(path, max_bytes=MAX_ITEMS_BYTES), question=question, answer=answer)
        except BadRow as error:
            form = "each line is one JSON object with an `id` of its own"
            raise AutorlError(
                f"{name} of task {task.name}: {error}",
                where=made_by or path,
                next_step=f"correct what makes it, pin it anew (bin/pin-task) and stage it again: {form}",
            ) from None
        if len(rows) != pin.n:
            what = f"key `{key}.n` is {pin.n}, {name} holds {len(rows)} items"
            raise AutorlError(what, where=own, next_step="pin it anew: bin/pin-task prints it")


def vault_names(task: Task) -> list[str]:
    """Return paths of the held-out files, relative to the task's vault folder: items, files for the grader's environment, and
    recipes' worked examples."""
    of_recipes = [name for recipe in task.file.recipes for name in recipe_files(recipe)]
    return sorted({*vault_pins(task), *of_recipes})


def recipe_files(recipe: Recipe) -> dict[str, str]:
    """Return the held-out files of one recipe with their hashes: worked examples and the judge's prompt."""
    found = {} if recipe.shots_file is None else {recipe.shots_file: recipe.shots_sha256 or ""}
    if JUDGE_PROMPT in recipe.options:
        found[str(recipe.options[JUDGE_PROMPT])] = str(recipe.options.get(JUDGE_PROMPT_SHA256, ""))
    return found


def vault_pins(task: Task) -> dict[str, str]:
    """Return the hashes of the held-out files that every staging of the task has."""
    items = {f"{split}/{ITEMS_NAME}": pin.sha256 for split, pin in task.file.splits.items()}
    return {**items, **task.file.vault_files}


@dataclass(frozen=True)
class Item:
    """One held-out item."""

    id: str
    question: str
    answer: str
    data: dict[str, Any] = field(default_factory=dict)  # all other fields of the row
    raw: dict[str, Any] = field(default_factory=dict)  # those of the above that are not text in the row


def load_items(root: Root, task: str, split: str, pin: SplitPin) -> list[Item]:
    """Load the items of a split after checking their file's hash against the run's pin. Raises AutorlError: not staged,
    changed after staging, or a row is not an item."""
    path = root.task_vault(task) / (pin.folder or split) / "items.jsonl"
    data = _read_pinned(path, pin.sha256, task)
    try:
        return [item_of(row) for row in read_items(data)]
    except BadRow as error:
        what = f"held-out items of task {task}, {split} split: {error}"
        advice = "correct the task, stage it again and launch under another name; no checkpoint is to blame"
        raise AutorlError(what, where=path, fault=Fault.GRADER, next_step=advice, exit_code=Exit.FAILED) from None


def item_of(row: dict[str, Any]) -> Item:
    """Return a row as an item."""
    own: dict[str, Any] = {name: row[name] for name in ("id", "question", "answer") if name in row}
    rest = {name: value for name, value in row.items() if name not in own}
    raw = {name: value for name, value in own.items() if not isinstance(value, str)}
    return Item(str(row["id"]), _text(own.get("question", "")), _text(own.get("answer", "")), rest, raw)


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def load_shots(root: Root, task: str, recipe: Recipe) -> list[dict[str, str]]:
    """Return the recipe's worked examples as chat messages, or none. A message that holds `{question}` is left out: it is
    the file's template for the question, which the recipe's prompt replaces."""
    if recipe.shots_file is None:
        return []
    path = root.task_vault(task) / recipe.shots_file
    value: Any = json.loads(_read_pinned(path, recipe.shots_sha256 or "", task))
    shots = [{"role": str(m["role"]), "content": str(m["content"])} for m in value["messages"]]
    return [shot for shot in shots if "{question}" not in shot["content"]]


def load_judge_prompt(root: Root, task: str, recipe: Recipe) -> str:
    """Return the text of the judge's prompt, "" if the recipe names no file. Raises AutorlError: not staged, or changed
    after staging."""
    if JUDGE_PROMPT not in recipe.options:
        return ""
    path = root.task_vault(task) / str(recipe.options[JUDGE_PROMPT])
    return _read_pinned(path, str(recipe.options.get(JUDGE_PROMPT_SHA256, "")), task).decode("utf-8")


def _read_pinned(path: Path, sha256: str, task: str) -> bytes:
    command = f"autorl-hpc stage {task}"
    try:
        data = reading.read_bytes(path, max_bytes=MAX_ITEMS_BYTES)
    except (OSError, ValueError) as error:
        what = f"held-out data of task {task} can't be read: {error}"
        raise AutorlError(what, where=path, fault=Fault.CLUSTER, next_step=f"run: {command}") from None
    if sha256_hex(data) != sha256:
        what = f"held-out data of task {task} were changed after staging"
        raise changed_since(what, path, f"put the original back or run: {command} --again")
    return data


# --- part of the feedback split: drawn once by a seed, the same for every submission and the base model
# Clustered items are drawn by whole clusters; a stratified split is drawn by strata in their proportions. Items are ordered by
# hashes: the same on every machine, and a larger part contains the smaller one (except for rounding of proportions).


def draw(items: Sequence[Item], wanted: int, seed: int, task: TaskFile) -> list[Item]:
    """Return the part in the order of the split, with at least `wanted` items, because the last cluster is whole too.
    `items`: the whole split. `wanted`: number of items; all items if there are not more."""
    if wanted >= len(items):
        return list(items)
    if task.cluster_field is not None:
        chosen = _by_clusters(items, wanted, seed, task.cluster_field)
    elif task.stratum_field is not None:
        chosen = _by_strata(items, wanted, seed, task.stratum_field)
    else:
        chosen = set(_in_order((item.id for item in items), seed)[:wanted])
    return [item for item in items if item.id in chosen]


def _by_clusters(items: Sequence[Item], wanted: int, seed: int, field: str) -> set[str]:
    members: dict[str, list[str]] = defaultdict(list)
    for item in items:  # one without a cluster is a cluster of its own
        members[str(item.data[field]) if field in item.data else f"item {item.id}"].append(item.id)
    chosen: set[str] = set()
    for cluster in _in_order(members, seed):
        if len(chosen) < wanted:
            chosen.update(members[cluster])
    return chosen


def _by_strata(items: Sequence[Item], wanted: int, seed: int, field: str) -> set[str]:
    """Draw each stratum's share by largest remainder, in integers, so that rounding is the same on every machine."""
    members: dict[str, list[str]] = defaultdict(list)
    for item in items:
        members[str(item.data.get(field))].append(item.id)
    shares = {name: divmod(len(ids) * wanted, len(items)) for name, ids in members.items()}
    left = wanted - sum(whole for whole, _ in shares.values())
    fullest = sorted(shares, key=lambda name: (-shares[name][1], name))[:left]
    return {
        item for name, ids in members.items() for item in _in_order(ids, seed)[: shares[name][0] + (name in fullest)]
    }


def _in_order(names: Iterable[str], seed: int) -> list[str]:
    return sorted(names, key=lambda name: hashlib.sha256(f"feedback-part-1\0{seed}\0{name}".encode()).digest())


def pin_part(items: Sequence[Item], wanted: int, seed: int, task: TaskFile) -> FeedbackPart | None:
    """Return the part for the run's record; None if the whole split is used."""
    drawn = draw(items, wanted, seed, task)
    if len(drawn) == len(items):
        return None
    return FeedbackPart(items=wanted, seed=seed, n=len(drawn), sha256=ids_sha256(item.id for item in drawn))


def asked_items(root: Root, science: Science, split: Split, task: TaskFile) -> list[Item]:
    """Return the held-out items of a split for a run's models. Raises AutorlError: see `load_items`; or the part drawn here
    differs from the one drawn at launch."""
    items = load_items(root, science.task, split, science.splits[split])
    part = science.part(split)
    if part is None:
        return items
    drawn = draw(items, part.items, part.seed, task)
    if ids_sha256(item.id for item in drawn) != part.sha256:
        what = f"of the {split} split of task {science.task} another part is drawn here than the run's record names"
        advice = "grade with the code of the launch"
        raise AutorlError(what, fault=Fault.GRADER, next_step=advice, exit_code=Exit.FAILED)
    return drawn
