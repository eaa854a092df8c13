"""The small shop as it is staged: its folders, an environment, the goals, a buyer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.files.layout import Root
from autorl_hpc.rollouts.webshop.shop_environment import Environment
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.loader import load_task

Row = dict[str, Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    made = Root(tmp_path_factory.mktemp("mini"))
    stage_task(made, load_task("webshop-mini"), None)
    return made


@pytest.fixture(scope="module")
def vault(root: Root) -> Path:
    return root.task_vault("webshop-mini")


@pytest.fixture(scope="module")
def train(root: Root) -> Path:
    return root.task_train("webshop-mini")


@pytest.fixture
def shop(vault: Path) -> Environment:
    return Environment(vault, held_out=True)


def rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


@pytest.fixture(scope="module")
def wishes(vault: Path, train: Path) -> list[Row]:
    """Every goal of the task."""
    files = (vault / "feedback" / "items.jsonl", vault / "report" / "items.jsonl", train / "goals.jsonl")
    return [row for file in files for row in rows(file)]


def wish(wishes: list[Row], product: str, *values: str) -> Row:
    """The goal for a product with these option values."""
    return next(row for row in wishes if row["product"] == product and set(row["options"].values()) == set(values))


def buy(shop: Environment, goal: Mapping[str, Any], product: str, *options: str) -> float:
    """Finds a product by its title, chooses and buys."""
    shop.reset(goal, 0)
    shop.step(f"search[{shop.catalogue[product].title}]")
    while product.lower() not in shop.page.links:
        assert shop.page.links, f"{product} was not found"
        shop.step("click[next >]")
    shop.step(f"click[{product}]")
    for value in options:
        shop.step(f"click[{value}]")
    step = shop.step("click[Buy Now]")
    assert step.done
    return step.reward
