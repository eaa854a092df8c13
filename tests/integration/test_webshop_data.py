"""WebShop's real data: goals, splits, rewards, what agents get. Skips by name without them."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import needs
import pytest

from autorl_hpc.files.layout import Root
from autorl_hpc.rollouts.webshop import Environment, reward
from autorl_hpc.rollouts.webshop.catalogue import Product, read
from autorl_hpc.rollouts.webshop.reward import Goal, from_row, generate
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.loader import load_task

Row = dict[str, Any]


def rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def unzipped(path: Path) -> list[Row]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).split(b"\n") if line]


@pytest.fixture(scope="module")
def source(data: Path) -> Path:
    folder = data / "webshop"
    if not folder.is_dir():
        needs.skip("data", "the real data of webshop are not here: set AUTORL_TEST_DATA to a folder with webshop/")
    return folder


@pytest.fixture(scope="module")
def root(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Root:
    made = Root(tmp_path_factory.mktemp("webshop"))
    stage_task(made, load_task("webshop"), source)
    return made


@pytest.fixture(scope="module")
def vault(root: Root) -> Path:
    return root.task_vault("webshop")


@pytest.fixture(scope="module")
def train(root: Root) -> Path:
    return root.task_train("webshop")


@pytest.fixture(scope="module")
def products(vault: Path) -> dict[str, Product]:
    return dict(read(vault / "catalogue.jsonl").products)


@pytest.fixture(scope="module")
def all_goals(products: dict[str, Product]) -> list[Goal]:
    return generate(products.values())


@pytest.fixture(scope="module")
def held_out(vault: Path) -> list[Row]:
    return [row for split in ("feedback", "report") for row in rows(vault / split / "items.jsonl")]


def buy(shop: Environment, row: Row, query: str) -> float:
    """Searches, pages on to the goal's product, chooses the goal's options, buys."""
    shop.reset(row, 0)
    shop.step(f"search[{query.replace('[', '').replace(']', '')}]")  # an action ends at a bracket
    while row["product"].lower() not in shop.page.links:
        assert shop.page.links, f"{row['product']} is not found by {query!r}"
        shop.step("click[next >]")
    shop.step(f"click[{row['product']}]")
    for value in row["options"].values():
        shop.step(f"click[{value}]")
    step = shop.step("click[buy now]")
    assert step.done
    return step.reward


# --- goals and splits ---


def test_6910_goals_of_415_products(all_goals: list[Goal]) -> None:
    assert len(all_goals) == 6910
    counts = Counter(goal.product for goal in all_goals)
    assert len(counts) == 415 and counts.most_common(2) == [("B07HRFSNL4", 558), ("B07S7HDC88", 312)]
    assert [goal.session for goal in all_goals] == list(range(6910))
    assert all(goal.wanted and goal.instruction.startswith("Find me ") for goal in all_goals)


def test_the_products_are_the_original_s(source: Path, products: dict[str, Product]) -> None:
    """As its own loader and indexer made them."""
    documents = {row["id"]: row["contents"] for row in unzipped(source / "documents_1k.jsonl.gz")}
    assert {asin: product.document for asin, product in products.items()} == documents
    for original in unzipped(source / "products_1000.processed.jsonl.gz"):
        product = products[original["asin"]]
        assert product.price_text == original["Price"] and list(product.attributes or ()) == original["Attributes"]
        assert {name: list(values) for name, values in product.options.items()} == original["options"]
        assert list(product.options) == list(original["options"])
        assert list(product.features) == original["BulletPoints"] and product.query == original["query"]
        low, high = sorted((original["pricing"][0], original["pricing"][-1]))  # one range stands upside down
        assert low <= product.price <= high


def test_splits(vault: Path, train: Path, all_goals: list[Goal], products: dict[str, Product]) -> None:
    made = {"train": rows(train / "goals.jsonl")}
    made |= {split: rows(vault / split / "items.jsonl") for split in ("feedback", "report", "paper")}
    numbers = {split: {row["product"] for row in part} for split, part in made.items()}
    assert {split: (len(part), len(numbers[split])) for split, part in made.items()} == {
        "train": (1669, 255),
        "feedback": (149, 60),
        "report": (369, 100),
        "paper": (100, 56),
    }
    assert (
        not numbers["train"] & (numbers["feedback"] | numbers["report"]) and not numbers["feedback"] & numbers["report"]
    )
    assert numbers["paper"] <= numbers["report"], "what the paper's protocol asks can't be trained on either"
    wishes = {split: {products[number].instruction for number in part} for split, part in numbers.items()}
    assert not wishes["train"] & (wishes["feedback"] | wishes["report"]) and not wishes["feedback"] & wishes["report"]
    for split in ("feedback", "report"):
        assert max(Counter(row["product"] for row in made[split]).values()) == 5
        assert len({(row["product"], row["question"]) for row in made[split]}) == len(made[split])
    by_session = {goal.session: goal for goal in all_goals}
    assert [row["session"] for row in made["paper"]] == list(range(100))
    for part in made.values():
        assert len({row["id"] for row in part}) == len(part)
        assert all(from_row(row) == by_session[row["session"]] for row in part)


def test_agents_get_nothing_of_the_held_out_wishes(vault: Path, train: Path, products: dict[str, Product]) -> None:
    items = [row for split in ("feedback", "report", "paper") for row in rows(vault / split / "items.jsonl")]
    numbers = {row["product"] for row in items}
    assert len(numbers) == 160
    catalogue = {row["asin"]: row for row in rows(train / "catalogue.jsonl")}
    assert len(catalogue) == 1000
    secret = {"attributes", "instruction", "wanted"}
    assert all(not secret & set(catalogue[number]) for number in numbers)
    assert sum("attributes" in row for row in catalogue.values()) == 840
    everything = b"".join(path.read_bytes() for path in sorted(train.iterdir()) if path.name != "MANIFEST.json")
    for number in numbers:
        instruction = json.dumps(products[number].instruction).encode()[1:-1]
        assert instruction not in everything, number
        listed = json.dumps(list(products[number].attributes or ())).encode()
        mine = json.dumps(catalogue[number], sort_keys=True).encode()
        assert listed == b"[]" or listed not in mine, number
    for row in items:
        assert json.dumps(row["question"]).encode()[1:-1] not in everything
    assert {path.name for path in train.iterdir()} <= {"catalogue.jsonl", "goals.jsonl", "MANIFEST.json"}


# --- rewards ---


def test_a_buyer_that_follows_the_goal_gets_the_full_reward(vault: Path, held_out: list[Row]) -> None:
    options = dict(load_task("webshop").file.recipes[0].options)
    shop = Environment(vault, held_out=True, options=options)
    for row in held_out:
        assert buy(shop, row, shop.catalogue[row["product"]].title) == 1.0, row


OFFICIAL = ("1_12", "1_13", "1_15", "1_17", "1_18", "1_21", "1_23", "1_6", "1_7")


@pytest.mark.parametrize("name", OFFICIAL)
def test_rewards_of_people_s_recorded_episodes(source: Path, name: str) -> None:
    """Their products are not among the 1,000, so type and attributes are taken from the record; the rest is computed."""
    last = json.loads((source / "human_traj_sample" / f"20220427_{name}.jsonl").read_text().splitlines()[-1])
    goal, info, bought = last["goal"], last["reward_info"], last["content"]
    kind = reward.type_score(
        query_match=info["query_match"], category_match=info["category_match"], title=info["title_score"]
    )
    assert kind == info["r_type"]
    options = reward.options_found(bought["options"].values(), goal["goal_options"])
    if goal["goal_options"]:
        assert options / len(goal["goal_options"]) == info["r_option"]
    price = bought["price"] <= goal["price_upper"]
    assert price == info["r_price"]
    attributes = round(info["r_att"] * len(goal["attributes"]))
    wanted = len(goal["attributes"]) + len(goal["goal_options"])
    assert reward.combine(kind, attributes + options + price, wanted) == last["reward"]
