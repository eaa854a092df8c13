"""Writes a WebShop task's files: an agent's catalogue and goals, the held-out goals, and the grader's full catalogue."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.rollouts.webshop.catalogue import CATALOGUE_NAME, Product
from autorl_hpc.rollouts.webshop.reward import Goal, reward

GOALS_NAME = "goals.jsonl"
ITEMS_NAME = "items.jsonl"


def write_task(
    out: Path,
    products: Sequence[Product],
    train: Iterable[Goal],
    held_out: Mapping[str, Iterable[Goal]],
    withheld: Collection[str],
    prefix: str,
) -> None:
    """Write everything under `out`.

    Args:
        train: goals for agents.
        held_out: goals by split; a goal may be in two.
        withheld: ids of products whose attributes and instructions agents don't get.
        prefix: of the goals' ids.
    """
    _write(out / "train" / CATALOGUE_NAME, (p.row(withheld=p.asin in withheld) for p in products))
    _write(out / "train" / GOALS_NAME, (_item(goal, prefix) for goal in train))
    for split, goals in held_out.items():
        _write(out / split / ITEMS_NAME, (_item(goal, prefix) for goal in goals))
    _write(out / CATALOGUE_NAME, (p.row() for p in products))


def attainable(goal: Goal, product: Product) -> bool:
    """Return whether buying the goal's own product with its own options gives reward 1.

    Odd cases in the original's comparison of options keep some goals below 1 even for the perfect purchase.
    """
    return reward(product, goal.options.values(), goal, product).value == 1.0


def groups(products: Iterable[Product]) -> list[list[Product]]:
    """Group products with equal instructions, which must stay together; in a fixed, shuffled order."""
    found: dict[str, list[Product]] = defaultdict(list)
    for product in products:
        found[product.instruction or product.asin].append(product)
    return sorted(found.values(), key=lambda group: rank(min(product.asin for product in group)))


def at_most(goals: Iterable[Goal], count: int) -> list[Goal]:
    """Return at most `count` different goals of each product, chosen by hash, in order of sessions."""
    chosen: list[Goal] = []
    taken: dict[str, set[str]] = defaultdict(set)
    for goal in sorted(goals, key=lambda goal: (rank(goal.instruction), goal.session)):
        if len(taken[goal.product]) < count and goal.instruction not in taken[goal.product]:
            taken[goal.product].add(goal.instruction)
            chosen.append(goal)
    return sorted(chosen, key=lambda goal: goal.session)


def rank(key: str) -> str:
    """Return the hash of a key, for a fixed, shuffled order."""
    return hashlib.sha256(key.encode()).hexdigest()


def _item(goal: Goal, prefix: str) -> dict[str, Any]:
    return goal.row(f"{prefix}-{goal.session:04d}")


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines in ASCII with sorted keys, so that equal rows give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8", newline="\n")
