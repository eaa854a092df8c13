"""The smallest gain that each split of a task can show, before anything is measured."""

from __future__ import annotations

from collections import Counter
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root
from autorl_hpc.records.run import Science
from autorl_hpc.scoring.stats import smallest_visible_gain, visible_of_clusters
from autorl_hpc.states import Split
from autorl_hpc.tasks.loader import load_task
from autorl_hpc.tasks.parts import asked_items


def visible_gains(root: Root, science: Science) -> dict[str, dict[str, Any]]:
    """Of each split: items, clusters (null: items are independent, or their clusters are not known), the number of independent
    items that they count for, and the smallest visible gain in points (null: none that is possible)."""
    return {str(split): _of_split(root, science, Split(split)) for split in science.splits}


def _of_split(root: Root, science: Science, split: Split) -> dict[str, Any]:
    sizes, asked = _cluster_sizes(root, science, split), science.asked(split)
    counted = visible_of_clusters(sizes) if sizes else asked
    gain = smallest_visible_gain(counted)
    return {
        "items": asked,
        "clusters": len(sizes) if sizes else None,
        "independent_items": counted,
        "points": None if gain is None else round(gain, 1),
    }


def _cluster_sizes(root: Root, science: Science, split: Split) -> list[int]:
    """Sizes of the clusters; empty where items are independent, or are not readable here: then nothing is known of them."""
    task = load_task(science.task).file
    field = task.cluster_field
    if field is None:
        return []
    try:
        items = asked_items(root, science, split, task)
    except AutorlError:
        return []
    named = Counter(str(item.data.get(field, f"item {item.id}")) for item in items)
    return list(named.values()) if len(named) < len(items) else []


def visible_line(task: str, splits: dict[str, dict[str, Any]]) -> str:
    """The same for people, one line a task."""
    told = ", ".join(f"{split} {_words(facts)}" for split, facts in splits.items())
    return f"smallest gain that one run on {task} can show (80 % power): {told}"


def _words(facts: dict[str, Any]) -> str:
    shown = "none (too few items)" if facts["points"] is None else f"{facts['points']} points"
    if facts["clusters"] is None:
        return shown
    return (
        f"{shown} ({facts['items']} items in {facts['clusters']} clusters show as much as {facts['independent_items']})"
    )
