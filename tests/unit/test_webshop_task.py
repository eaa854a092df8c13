"""The shop's tasks: their recipes, their splits, and what agents get of the shop."""

from __future__ import annotations

import ast
from pathlib import Path

import minishop
import pytest
from minishop import rows

from autorl_hpc.rollouts.webshop import shop_environment
from autorl_hpc.rollouts.webshop.shop_environment import Environment
from autorl_hpc.tasks.loader import load_task

root, vault, train, shop, wishes = minishop.root, minishop.vault, minishop.train, minishop.shop, minishop.wishes


@pytest.mark.parametrize("name", ["webshop", "webshop-mini"])
def test_the_recipes_hold_the_dialogue_s_words(name: str) -> None:
    """So that a changed prompt is another recipe hash."""
    task = load_task(name)
    module = ast.parse((task.folder / "environment.py").read_text(encoding="utf-8"))
    own = {n.targets[0].id: n.value.value for n in module.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)}  # type: ignore[attr-defined]  # fmt: skip
    for recipe in task.file.recipes:
        assert recipe.prompt == own.get("PROMPT", shop_environment.PROMPT)
        assert recipe.system == (None if "PROMPT" in own else shop_environment.SYSTEM)
        assert recipe.options["catalogue"] == task.file.vault_files["catalogue.jsonl"]
        assert (recipe.scorer, recipe.scorer_version) == ("episodes", "1")
    assert [recipe.options["threshold"] for recipe in task.file.recipes][:2] in ([1.0, 0.5], [1.0])


def test_splits_share_no_product(vault: Path, train: Path) -> None:
    parts_ = [rows(train / "goals.jsonl"), *(rows(vault / split / "items.jsonl") for split in ("feedback", "report"))]
    products = [{row["product"] for row in part} for part in parts_]
    assert [len(part) for part in products] == [15, 6, 9]
    assert len(set().union(*products)) == 30


def test_agents_get_no_attribute_and_no_wish_of_held_out_products(vault: Path, train: Path) -> None:
    held_out = [row for split in ("feedback", "report") for row in rows(vault / split / "items.jsonl")]
    numbers = {row["product"] for row in held_out}
    for row in rows(train / "catalogue.jsonl"):
        told = {"attributes", "instruction", "wanted"} & set(row)
        assert told == (set() if row["asin"] in numbers else {"attributes", "instruction", "wanted"})
    everything = b"".join(path.read_bytes() for path in train.iterdir())
    for row in held_out:
        assert row["question"].encode() not in everything
    assert (vault / "catalogue.jsonl").is_file() and not list(train.rglob("items.jsonl"))


def test_a_changed_catalogue_is_not_graded_with(vault: Path, tmp_path: Path) -> None:
    options = dict(load_task("webshop-mini").file.recipes[0].options)
    Environment(vault, held_out=True, options=options)
    (tmp_path / "catalogue.jsonl").write_bytes((vault / "catalogue.jsonl").read_bytes() + b"\n")
    with pytest.raises(ValueError, match="the recipe pins"):
        Environment(tmp_path, held_out=True, options=options)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "catalogue.jsonl").write_text('{"asin": "x"}\n')
    with pytest.raises(ValueError, match="is no catalogue"):
        Environment(tmp_path / "2", held_out=True)
    with pytest.raises(OSError):
        Environment(tmp_path / "3", held_out=True)
