"""The shop: its tasks' recipes and splits, pages, actions, search and dialogue, and rewards by hand on the catalogue that the package
makes. It is staged once."""

from __future__ import annotations

import ast
import itertools
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.files.layout import Root
from autorl_hpc.rollouts.environment import Transcript, Turn
from autorl_hpc.rollouts.webshop import reward, shop_environment
from autorl_hpc.rollouts.webshop.shop_environment import Environment, ShopIndex, parse, parts, tokens
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


# --- pages and actions ---


def test_the_way_through_the_pages(shop: Environment, wishes: list[Row]) -> None:
    row = wish(wishes, "HAT5", "small", "red")
    question = row["question"]
    text, actions = parts(shop.reset(row, 0))
    assert text == f"WebShop [SEP] Instruction: [SEP] {question} [SEP] Search" and actions == ["search[<your query>]"]
    text, actions = parts(shop.step("search[Fleece]").observation)
    head = f"Instruction: [SEP] {question} [SEP] Back to Search"
    found = "SCARF4 [SEP] Fleece Scarf [SEP] $13.0 to $17.0 [SEP] HAT5 [SEP] Fleece Hat [SEP] $18.0"
    assert text == f"{head} [SEP] Page 1 (Total results: 2) [SEP] Next > [SEP] {found}"
    assert actions == ["click[back to search]", "click[next >]", "click[scarf4]", "click[hat5]"]
    text, actions = parts(shop.step("click[Next >]").observation)
    assert text == f"{head} [SEP] Page 2 (Total results: 2) [SEP] < Prev [SEP] Next >"
    shop.step("click[< Prev]")
    item, actions = parts(shop.step("click[HAT5]").observation)
    assert item == (
        f"{head} [SEP] < Prev [SEP] size [SEP] small [SEP] large [SEP] color [SEP] red [SEP] blue [SEP] green [SEP] Fleece Hat "
        "[SEP] Price: $18.0 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert actions == [
        f"click[{name}]"
        for name in ("back to search", "< prev", "description", "features", "reviews", "buy now", "small", "large", "red", "blue", "green")
    ]  # fmt: skip
    assert parts(shop.step("click[small]").observation) == (item, actions)
    text, actions = parts(shop.step("click[Features]").observation)
    assert text == f"{head} [SEP] < Prev [SEP] It is warm." and actions == ["click[back to search]", "click[< prev]"]
    assert parts(shop.step("click[< prev]").observation)[0] == item
    assert parts(shop.step("click[description]").observation)[0] == f"{head} [SEP] < Prev [SEP] For running."
    shop.step("click[< prev]")
    assert parts(shop.step("click[reviews]").observation)[0] == f"{head} [SEP] < Prev"
    shop.step("click[< prev]")
    shop.step("click[red]")
    step = shop.step("click[buy now]")
    assert step.done and step.reward == 1.0  # the size was kept over the sub-pages
    assert 'HAT5 [SEP] options [SEP] {"color": "red", "size": "small"} [SEP]' in step.observation
    assert "Your score (min 0.0, max 1.0) [SEP] 1.0 [SEP]" in step.observation and parts(step.observation)[1] == []
    assert shop.step("click[back to search]") == step, "after the purchase nothing changes"


INVALID = (
    "", " ", "buy now", "click", "click[]", "click[", "click]", "click[buy now", "CLICK[hat5]", "Click[hat5]", " click[hat5]",
    "click[hat5 ]", "click[ hat5]", "click[hat99]", "click[search]", "click[attributes]", "click[click[hat5]]", "[hat5]",
    "search", "search[]", "Search[hat]", "search [hat]", "buy[hat5]", "click[a][b]", "click[hat\n5]", "think: hat5",
    "click[\x00]", "click[\ud800]", "click[\uff48\uff41\uff545]", "x" * 100_000, "click[" + "[" * 10_000, "{question}", "%s", "\\",
)  # fmt: skip


@pytest.mark.parametrize("action", INVALID, ids=lambda text: ascii(text[:30]))
def test_what_is_no_action_changes_nothing(shop: Environment, wishes: list[Row], action: str) -> None:
    shop.reset(wishes[0], 0)
    before = shop.step("search[Fleece]")
    assert "click[hat5]" in before.observation
    assert shop.step(action) == before


def test_actions_are_parsed_as_by_the_original_s_expression() -> None:
    for text in map("".join, itertools.product("a[]\n", repeat=6)):
        match = re.match(r"(.+)\[(.+)\]", text)
        assert parse(text) == (match.groups() if match else ("", "")), text
    begun = time.process_time()
    assert parse("click[" + "[" * 1_000_000) == ("", "")
    assert time.process_time() - begun < 10


# --- search ---


def test_ranking() -> None:
    index = ShopIndex(
        {"b": "red shoe shoe", "a": "red shoe shoe", "c": "red hat", "d": "blue hat for a very long winter evening"}
    )
    assert index.search("shoes") == ("a", "b")  # equal scores in order of ids
    assert index.search("hats") == ("c", "d")  # the shorter one first
    assert index.search("red hats")[0] == "c" and len(index.search("red hats")) == 4
    assert index.search("the of") == () and index.search("") == ()
    assert ShopIndex({}).search("red") == ()
    assert len(ShopIndex({str(n): "hat" for n in range(80)}).search("hat")) == 50


# --- dialogue ---


def test_the_prompt_repeats_five_exchanges(shop: Environment, wishes: list[Row]) -> None:
    row = {**wishes[0], "question": "a {actions} wish"}
    transcript = Transcript(row, shop.reset(row, 0))
    for number in range(7):
        transcript.turns.append(Turn(f"search[{number}]", shop.step(f"search[{number}]").observation))
    system, user = shop_environment.Dialogue().prompt(transcript)
    assert (system["role"], user["role"]) == ("system", "user") and system["content"] == shop_environment.SYSTEM
    content = user["content"]
    assert "Wish: a {actions} wish\n" in content, "a wish is not taken for a field of the prompt"
    assert [n for n in range(1, 10) if f"\nObservation {n}: " in content] == [3, 4, 5, 6, 7, 8]
    assert content.count("Available actions:") == 1 and content.endswith("Action 8:")
    third = content.index("Observation 3: ")
    assert content.index("Action 3: search[2]") > third, "an action stands under the page that it was done on"
    first = shop_environment.Dialogue().prompt(Transcript(row, shop.reset(row, 0)))[1]["content"]
    assert first.endswith("Search\nAction 1:") and "  search[<your query>]\n" in first


@pytest.mark.parametrize(
    ("completion", "action"),
    [
        ("search[red shoes]", "search[red shoes]"), (" click[Buy Now] ", "click[Buy Now]"),
        ("Action: click[buy now]", "click[buy now]"),
        ("Action:click[buy now]\nObservation 2: ...", "click[buy now]"), ("choose[b0]", "click[b0]"),
        ("Action: choose[b0]", "click[b0]"), ("", ""), ("\n\nclick[a]", "click[a]"),
        ("I would click[a]", "I would click[a]"),
    ],
)  # fmt: skip
def test_actions_of_completions(completion: str, action: str) -> None:
    assert shop_environment.Dialogue().action(completion) == action


def test_terms() -> None:
    assert tokens("The Cat's toys, and it's 1,000.5 U.S. dollars!") == ["cat", "toi", "1,000.5", "u.", "dollar"]
    assert tokens("description:solid X-Large men\u2019s") == ["description:solid", "x", "larg", "men"]
    assert tokens("a an the") == [] and tokens("Äpfel naïve") == ["äpfel", "naïv"]


# --- rewards ---


EPISODES = [
    # goal's product, its options, bought, options chosen, reward = type * (attributes + options + price) / (wanted + 1)
    ("HAT1", ("small", "red"), "HAT1", ("small", "red"), 1.0),  # (2 + 2 + 1) / 5
    ("HAT1", ("small", "red"), "HAT1", ("red",), 0.8),  # (2 + 1 + 1) / 5
    ("HAT1", ("small", "red"), "HAT1", ("large", "red"), 0.8),  # the same with a wrong size
    ("HAT1", ("small", "red"), "HAT1", ("blue", "small", "red"), 1.0),  # the last colour counts
    ("HAT1", ("small", "red"), "HAT1", (), 0.6),  # (2 + 0 + 1) / 5
    (
        "HAT1",
        ("small", "red"),
        "HAT3",
        ("small", "red"),
        0.8,
    ),  # warm, not hand wash; 34.21 of 50 dollars: (1 + 2 + 1) / 5
    ("HAT1", ("small", "red"), "SCARF1", ("red",), 0.6),  # two categories shared; warm: (1 + 1 + 1) / 5
    ("HAT1", ("small", "red"), "LAMP3", (), 0.2),  # `wool`, 1 of 2 nouns: the type is right; the price alone: 1 / 5
    ("HAT1", ("small", "red"), "LAMP4", (), 0.0),  # the same for 120 of 50 dollars: 0 / 5
    ("HAT1", ("small", "red"), "MUG1", ("red",), 0.0),  # no noun in common: type 0
    ("SCARF3", ("green",), "SCARF2", ("green",), 0.5),  # soft; 48 of 30 dollars: (1 + 1 + 0) / 4
    ("SCARF3", ("green",), "SCARF2", (), 0.25),  # (1 + 0 + 0) / 4
    ("LAMP2", ("large",), "LAMP5", ("large",), 0.5),  # eco friendly; 985 of 50 dollars: (1 + 1 + 0) / 4
    ("TEA3", (), "TEA3", (), 1.0),  # (2 + 0 + 1) / 3
    ("TEA3", (), "TEA2", (), 0.666667),  # fair trade: (1 + 0 + 1) / 3
    ("TEA3", (), "TEA1", (), 0.333333),  # the price alone: 1 / 3
    ("SOAP4", ("rose",), "SOAP3", ("rose",), 0.75),  # cruelty free: (1 + 1 + 1) / 4
    ("LAMP4", ("small",), "SCARF1", ("red",), 0.25),  # `wool`, 1 of 8 nouns: type 0.5; hand made: 0.5 * (1 + 0 + 1) / 4
    ("LAMP4", ("small",), "HAT1", ("small",), 0.25),  # 0.5 * (0 + 1 + 1) / 4
    ("LAMP3", ("large",), "SCARF1", ("red",), 0.025),  # `wool`, 1 of 13 nouns: type 0.1; the price: 0.1 * 1 / 4
]


@pytest.mark.parametrize(("product", "options", "bought", "chosen", "expected"), EPISODES)
def test_rewards_of_hand_made_episodes(
    shop: Environment,
    wishes: list[Row],
    product: str,
    options: tuple[str, ...],
    bought: str,
    chosen: tuple[str, ...],
    expected: float,
) -> None:
    assert round(buy(shop, wish(wishes, product, *options), bought, *chosen), 6) == expected


@pytest.mark.parametrize(
    ("query", "category", "title", "expected"),
    [
        (True, True, 1.0, 1.0), (True, False, 0.1, 1.0), (False, True, 0.15, 1.0), (False, False, 0.21, 1.0),
        (False, False, 0.2, 0.5), (False, False, 0.1, 0.5), (True, True, 0.09, 0.1), (False, False, 0.05, 0.1),
        (True, True, 0.0, 0.0),
    ],
)  # fmt: skip
def test_the_type_of_a_product(query: bool, category: bool, title: float, expected: float) -> None:
    assert reward.type_score(query_match=query, category_match=category, title=title) == expected


@pytest.mark.parametrize(
    ("bought", "wanted", "expected"),
    [
        (["wool", "hat"], ["wool", "hat"], 1.0),
        (["hat"], ["hat", "hat", "wool"], 1 / 3),  # repetitions count below the line alone
        (["hat", "hat"], ["hat", "wool"], 0.5),
        ([], ["hat"], 0.0),
        (["hat"], [], 0.2),
    ],
)
def test_shared_nouns(bought: list[str], wanted: list[str], expected: float) -> None:
    assert reward.title_score(bought, wanted) == expected


@pytest.mark.parametrize(
    ("chosen", "wanted", "found"),
    [
        ([], {"color": "red"}, 0), (["red"], {"color": "red"}, 1),
        (["dark red"], {"color": "red"}, 0),  # the first colour's name in it is "dark"
        (["ruby red"], {"color": "red"}, 1),
        (["cool powder snow"], ["powder snow"], 1),  # values alone, as in goals that people wrote
        (["tan titanium"], {"color": "tan titanium"}, 1),
        (["titanium"], {"color": "titanium"}, 0),  # "tan" is in it: a perfect choice that isn't seen
        (["titanium"], ["titanium"], 1), (["8"], {"size": "8"}, 1),
        (["8.5"], {"size": "8"}, 0),  # "8" and "8 5": 50 of 100
        (["10"], {"size": "8"}, 0), (["size 10"], {"size": "8"}, 0),  # "size 10" and "size 8": 77 of 100
        (["xx-large"], {"size": "x-large"}, 0),  # "large xx" and "large size x": 80 of 100
        (["café"], {"flavor": "caf"}, 1),  # é is dropped
        (["---"], {"size": "---"}, 0), ([""], {"size": ""}, 0), (["x", "x"], {"size": "x", "color": "x"}, 2),
    ],
)  # fmt: skip
def test_options(chosen: list[str], wanted: dict[str, str] | list[str], found: int) -> None:
    assert reward.options_found(chosen, wanted) == found


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("essential oils", "essential oil", True), ("tea tree oil", "tea tree", True),
        ("hand wash", "machine wash", False), ("HAND-WASH", "hand wash", True),
        ("a_b", "a b", False),  # an underscore is part of a word
        ("", "", True), ("!!!", "???", False), ("\xa0", "x", False),
        ("abcdefghijklmnopqrst", "abcdefghijklmnopqrsu", True), ("abcdef", "abcdeg", False),  # 83
        ("abcdefg", "abcdefh", True),  # 85.7 is rounded to 86
        ("abcdefghijklm nopqrst", "vvv abcdefghijklm", True),
    ],
)  # fmt: skip
def test_similar_strings(one: str, other: str, same: bool) -> None:
    assert reward.similar(one, other) == same


# --- goals and prices ---


def test_limits_of_goals(wishes: list[Row], shop: Environment) -> None:
    for row in wishes:
        price, limit = shop.catalogue[row["product"]].price, row["price_upper"]
        if limit == reward.NO_LIMIT:
            assert price >= 980 and "price lower" not in row["question"]
        else:
            assert price < limit <= 10 * (price // 10 + 4) and limit > 10 * (price // 10 + 1)
            assert row["question"].endswith(f", and price lower than {limit:.2f} dollars")
