"""A part of the feedback split, where a spec asks for one: drawn once by a seed, the same for every submission and the base model.

Items that come in clusters are drawn by whole clusters, and a split that was drawn by strata is drawn by them again, in their shares.
The order is that of hashes: the same on every machine, and a larger part holds the smaller one (but for the rounding of shares).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.records.run import FeedbackPart, Science, ids_sha256
from autorl_hpc.records.task import TaskFile
from autorl_hpc.states import Fault, Split
from autorl_hpc.tasks.heldout import Item, load_items


def draw(items: Sequence[Item], wanted: int, seed: int, task: TaskFile) -> list[Item]:
    """The part, in the order of the split. At least `wanted` items: the last cluster is whole, too.

    Args:
        items: the whole split.
        wanted: how many items; all of them, where there are not more.
    """
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
    for item in items:
        members[str(item.data.get(field, f"item {item.id}"))].append(item.id)
    chosen: set[str] = set()
    for cluster in _in_order(members, seed):
        if len(chosen) >= wanted:
            break
        chosen.update(members[cluster])
    return chosen


def _by_strata(items: Sequence[Item], wanted: int, seed: int, field: str) -> set[str]:
    """Of each stratum its share, by the largest remainder; in whole numbers, so that no rounding differs between machines."""
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
    """What the record of a run holds of its part; None where the whole split is asked."""
    drawn = draw(items, wanted, seed, task)
    if len(drawn) == len(items):
        return None
    return FeedbackPart(items=wanted, seed=seed, n=len(drawn), sha256=ids_sha256(item.id for item in drawn))


def asked_items(root: Root, science: Science, split: Split, task: TaskFile) -> list[Item]:
    """The held-out items that a run's models are asked on a split.

    Raises:
        AutorlError: see `load_items`; or the part that is drawn here is not the one that was drawn at the launch.
    """
    items = load_items(root, science.task, split, science.splits[split])
    part = science.part(split)
    if part is None:
        return items
    drawn = draw(items, part.items, part.seed, task)
    if ids_sha256(item.id for item in drawn) != part.sha256:
        raise AutorlError(
            f"of the {split} split of task {science.task} another part is drawn here than the run's record names",
            fault=Fault.GRADER,
            next_step="grade with the code of the launch",
            exit_code=Exit.FAILED,
        )
    return drawn
