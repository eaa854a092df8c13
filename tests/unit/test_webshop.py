"""The shop, on the catalogue that the package makes: rewards by hand, pages, actions, search, and what agents don't get."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root
from autorl_hpc.rollouts.environment import Transcript, Turn
from autorl_hpc.rollouts.source import Source
from autorl_hpc.rollouts.webshop import dialogue, goals, pages, reward
from autorl_hpc.rollouts.webshop.catalogue import Product, price_of, prices
from autorl_hpc.rollouts.webshop.environment import Environment, parse, parts
from autorl_hpc.rollouts.webshop.search import Index, rounded_length, tokens
from autorl_hpc.rollouts.webshop.splits import at_most, attainable, groups
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.loader import load_task
from autorl_hpc.tasks.staged import verify_staged_task

REPO = Path(__file__).resolve().parents[2]
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
    shop.step(f"search[{shop.shop.catalogue[product].title}]")
    while product.lower() not in shop.page.links:
        assert shop.page.links, f"{product} was not found"
        shop.step("click[next >]")
    shop.step(f"click[{product}]")
    for value in options:
        shop.step(f"click[{value}]")
    step = shop.step("click[Buy Now]")
    assert step.done
    return step.reward


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


def test_a_buyer_that_follows_the_goal_gets_the_full_reward_everywhere(shop: Environment, wishes: list[Row]) -> None:
    assert len(wishes) == 90
    for row in wishes:
        assert buy(shop, row, row["product"], *row["options"].values()) == 1.0, row
        assert attainable(goals.from_row(row), shop.shop.catalogue[row["product"]])


def test_who_does_nothing_gets_nothing(shop: Environment, wishes: list[Row]) -> None:
    for row in wishes:
        first = shop.reset(row, 0)
        for _ in range(10):
            step = shop.step("")
            assert (step.observation, step.done, step.reward) == (first, False, 0.0)


@pytest.mark.parametrize(
    ("query", "category", "title", "expected"),
    [
        (True, True, 1.0, 1.0),
        (True, False, 0.1, 1.0),
        (False, True, 0.15, 1.0),
        (False, False, 0.21, 1.0),
        (False, False, 0.2, 0.5),
        (False, False, 0.1, 0.5),
        (True, True, 0.09, 0.1),
        (False, False, 0.05, 0.1),
        (True, True, 0.0, 0.0),
    ],
)
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
        ([], {"color": "red"}, 0),
        (["red"], {"color": "red"}, 1),
        (["dark red"], {"color": "red"}, 0),  # the first colour's name in it is "dark"
        (["ruby red"], {"color": "red"}, 1),
        (["cool powder snow"], ["powder snow"], 1),  # values alone, as in goals that people wrote
        (["tan titanium"], {"color": "tan titanium"}, 1),
        (["titanium"], {"color": "titanium"}, 0),  # "tan" is in it: a perfect choice that isn't seen
        (["titanium"], ["titanium"], 1),
        (["8"], {"size": "8"}, 1),
        (["8.5"], {"size": "8"}, 0),  # "8" and "8 5": 50 of 100
        (["10"], {"size": "8"}, 0),
        (["size 10"], {"size": "8"}, 0),  # "size 10" and "size 8": 77 of 100
        (["xx-large"], {"size": "x-large"}, 0),  # "large xx" and "large size x": 80 of 100
        (["café"], {"flavor": "caf"}, 1),  # é is dropped
        (["---"], {"size": "---"}, 0),
        ([""], {"size": ""}, 0),
        (["x", "x"], {"size": "x", "color": "x"}, 2),
    ],
)
def test_options(chosen: list[str], wanted: dict[str, str] | list[str], found: int) -> None:
    assert reward.options_found(chosen, wanted) == found


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("essential oils", "essential oil", True),
        ("tea tree oil", "tea tree", True),
        ("hand wash", "machine wash", False),
        ("HAND-WASH", "hand wash", True),
        ("a_b", "a b", False),  # an underscore is part of a word
        ("", "", True),
        ("!!!", "???", False),
        ("\xa0", "x", False),
        ("abcdefghijklmnopqrst", "abcdefghijklmnopqrsu", True),
        ("abcdef", "abcdeg", False),  # 83
        ("abcdefg", "abcdefh", True),  # 85.7 is rounded to 86
        ("abcdefghijklm nopqrst", "vvv abcdefghijklm", True),
    ],
)
def test_similar_strings(one: str, other: str, same: bool) -> None:
    assert reward.similar(one, other) == same


def test_attributes_are_found_in_texts(shop: Environment) -> None:
    product = shop.shop.catalogue["TEA1"]
    bare = Product(**{**{name: getattr(product, name) for name in product.__dataclass_fields__}, "attributes": None})
    assert reward.attributes_found(bare, ("caffeine free", "non gmo")) == 1  # "Caffeine free." is in the description


# --- goals and prices ---


def test_prices_and_limits() -> None:
    assert prices("$17.49 - $1,018.49") == (17.49, 1018.49)
    assert prices("") == prices(None) == (100.0,)
    with pytest.raises(ValueError, match="no price"):
        prices("for free")
    assert price_of("A", (3.0,)) == 3.0
    drawn = [price_of(f"A{n}", (10.0, 20.0)) for n in range(200)]
    assert drawn == [price_of(f"A{n}", (10.0, 20.0)) for n in range(200)]
    assert all(10 <= price < 20 for price in drawn) and len(set(drawn)) == 200 and 14 < sum(drawn) / 200 < 16


def test_limits_of_goals(wishes: list[Row], shop: Environment) -> None:
    for row in wishes:
        price, limit = shop.shop.catalogue[row["product"]].price, row["price_upper"]
        if limit == goals.NO_LIMIT:
            assert price >= 980 and "price lower" not in row["question"]
        else:
            assert price < limit <= 10 * (price // 10 + 4) and limit > 10 * (price // 10 + 1)
            assert row["question"].endswith(f", and price lower than {limit:.2f} dollars")


def test_a_goal_s_words(wishes: list[Row]) -> None:
    row = wish(wishes, "HAT5", "small", "red")
    assert row["question"] == (
        "Find me warm, machine wash hats with color: red, and size: small, and price lower than 50.00 dollars"
    )
    assert wish(wishes, "LAMP5", "large")["question"] == "Find me hand made, eco friendly lamps with size: large"


def test_at_most_some_goals_a_product(wishes: list[Row]) -> None:
    made = [goals.from_row(row) for row in wishes]
    chosen = at_most([*made, *made], 2)
    assert len(chosen) == len({goal.instruction for goal in chosen}) == 25 * 2 + 5
    assert chosen == at_most(reversed(made), 2)


def test_products_with_one_instruction_stay_together(shop: Environment) -> None:
    products = list(shop.shop.catalogue.products.values())
    twins = [p for p in products if p.asin.startswith("TEA")]
    same = [
        Product(**{**{n: getattr(p, n) for n in p.__dataclass_fields__}, "instruction": "Find me tea"}) for p in twins
    ]
    assert [len(group) for group in groups(same)] == [5]
    assert [len(group) for group in groups(products)] == [1] * 30


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


def test_options_are_forgotten_on_the_way_back(shop: Environment, wishes: list[Row]) -> None:
    row = wish(wishes, "HAT5", "small", "red")
    for way in (["click[< prev]"], ["click[back to search]", "search[Fleece Hat]"], ["search[Fleece Hat]"]):
        shop.reset(row, 0)
        for action in ("search[Fleece Hat]", "click[hat5]", "click[small]", "click[red]", *way, "click[hat5]"):
            shop.step(action)
        assert shop.step("click[buy now]").reward == 0.6, way


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


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("search[Red Shoes]", ("search", "red shoes")),
        ("click[< Prev]", ("click", "< prev")),
        ("click[a] and more", ("click", "a")),  # what follows the bracket is not looked at
        ("search[a [b] c]", ("search[a ", "b] c")),
        ("no action", ("", "")),
    ],
)
def test_parsing_of_actions(action: str, expected: tuple[str, str]) -> None:
    assert parse(action) == expected


def test_actions_are_parsed_as_by_the_original_s_expression() -> None:
    for text in map("".join, itertools.product("a[]\n", repeat=6)):
        match = re.match(r"(.+)\[(.+)\]", text)
        assert parse(text) == (match.groups() if match else ("", "")), text
    begun = time.process_time()
    assert parse("click[" + "[" * 1_000_000) == ("", "")
    assert time.process_time() - begun < 10


QUERIES = ("the", "!?", "zzzz", " ", "'", "<r>", "<q> hats", "\ud800", "wool " * 5000, "﷽", "hat\x00", "caf\xe9")


@pytest.mark.parametrize("query", QUERIES, ids=lambda text: ascii(text[:10]))
def test_odd_searches_show_a_page(shop: Environment, wishes: list[Row], query: str) -> None:
    shop.reset(wishes[0], 0)
    text, _ = parts(shop.step(f"search[{query}]").observation)
    assert "Page 1 (Total results: " in text and text.count("[SEP]") >= 4


def test_an_option_of_two_groups_and_one_that_is_called_like_a_button() -> None:
    options = {"size": ("one", "buy now"), "color": ("one", "red")}
    product = Product("X", "T", "D", (), "$1.0", 1.0, "c", "q", "p", options, (), ())
    page = pages.item_page("wish", product)
    assert page.options["one"] == "color"  # the last group's, as in the original
    assert page.actions().count("click[buy now]") == page.actions().count("click[one]") == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("\n", ""),
        (" \n ", ""),
        (" ", " [SEP] "),
        ("\xa0", " [SEP] "),
        (" a ", " [SEP] a"),
        ("a\nb", " [SEP] a\nb"),
    ],
)
def test_white_space_on_a_page(text: str, shown: str) -> None:
    product = Product("X", "T", text, (), "$1.0", 1.0, "c", "q", "p", {}, (), ())
    page = pages.sub_page("wish", product, "Description")
    assert page.text == f"Instruction: [SEP] wish [SEP] Back to Search [SEP] < Prev{shown}"


def test_the_same_actions_give_the_same_texts(vault: Path, wishes: list[Row]) -> None:
    def play(seed: int) -> Iterator[object]:
        shop = Environment(vault, held_out=True)
        for row in wishes[:5]:
            yield shop.reset(row, seed)
            for action in ("search[warm hats]", "click[next >]", "click[< prev]", f"search[{row['question']}]"):
                yield shop.step(action)

    assert list(play(0)) == list(play(1))


def test_one_episode_leaves_nothing_for_the_next(shop: Environment, wishes: list[Row]) -> None:
    assert buy(shop, wishes[0], wishes[0]["product"], *wishes[0]["options"].values()) == 1.0
    text, _ = parts(shop.reset(wishes[1], 0))
    assert wishes[1]["question"] in text and wishes[0]["question"] not in text
    assert shop.step("click[buy now]").done is False


def test_an_episode_begins_with_a_goal(vault: Path, wishes: list[Row]) -> None:
    shop = Environment(vault, held_out=True)
    with pytest.raises(RuntimeError, match="reset"):
        shop.step("search[x]")
    with pytest.raises(KeyError):
        shop.reset({"question": "?"}, 0)
    with pytest.raises(KeyError):
        shop.reset({**wishes[0], "product": "NONE"}, 0)


# --- search ---


def test_terms() -> None:
    assert tokens("The Cat's toys, and it's 1,000.5 U.S. dollars!") == ["cat", "toi", "1,000.5", "u.", "dollar"]
    assert tokens("description:solid X-Large men\u2019s") == ["description:solid", "x", "larg", "men"]
    assert tokens("a an the") == [] and tokens("Äpfel naïve") == ["äpfel", "naïv"]


@pytest.mark.parametrize(
    ("terms", "kept"), [(0, 0), (23, 23), (24, 24), (39, 39), (40, 40), (41, 40), (57, 56), (1000, 984)]
)
def test_lengths_are_rounded_as_lucene_rounds_them(terms: int, kept: int) -> None:
    assert rounded_length(terms) == kept


def test_ranking() -> None:
    index = Index(
        {"b": "red shoe shoe", "a": "red shoe shoe", "c": "red hat", "d": "blue hat for a very long winter evening"}
    )
    assert index.search("shoes") == ("a", "b")  # equal scores in order of ids
    assert index.search("hats") == ("c", "d")  # the shorter one first
    assert index.search("red hats")[0] == "c" and len(index.search("red hats")) == 4
    assert index.search("the of") == () and index.search("") == ()
    assert Index({}).search("red") == ()
    assert len(Index({str(n): "hat" for n in range(80)}).search("hat")) == 50


# --- dialogue ---


def test_the_prompt_repeats_five_exchanges(shop: Environment, wishes: list[Row]) -> None:
    row = {**wishes[0], "question": "a {actions} wish"}
    transcript = Transcript(row, shop.reset(row, 0))
    for number in range(7):
        transcript.turns.append(Turn(f"search[{number}]", shop.step(f"search[{number}]").observation))
    system, user = dialogue.Dialogue().prompt(transcript)
    assert (system["role"], user["role"]) == ("system", "user") and system["content"] == dialogue.SYSTEM
    content = user["content"]
    assert "Wish: a {actions} wish\n" in content, "a wish is not taken for a field of the prompt"
    assert [n for n in range(1, 10) if f"\nObservation {n}: " in content] == [3, 4, 5, 6, 7, 8]
    assert content.count("Available actions:") == 1 and content.endswith("Action 8:")
    third = content.index("Observation 3: ")
    assert content.index("Action 3: search[2]") > third, "an action stands under the page that it was done on"
    first = dialogue.Dialogue().prompt(Transcript(row, shop.reset(row, 0)))[1]["content"]
    assert first.endswith("Search\nAction 1:") and "  search[<your query>]\n" in first


@pytest.mark.parametrize(
    ("completion", "action"),
    [
        ("search[red shoes]", "search[red shoes]"),
        (" click[Buy Now] ", "click[Buy Now]"),
        ("Action: click[buy now]", "click[buy now]"),
        ("Action:click[buy now]\nObservation 2: ...", "click[buy now]"),
        ("choose[b0]", "click[b0]"),
        ("Action: choose[b0]", "click[b0]"),
        ("", ""),
        ("\n\nclick[a]", "click[a]"),
        ("I would click[a]", "I would click[a]"),
    ],
)
def test_actions_of_completions(completion: str, action: str) -> None:
    assert dialogue.Dialogue().action(completion) == action


# --- the tasks' files ---


@pytest.mark.parametrize("name", ["webshop", "webshop-mini"])
def test_the_recipes_hold_the_dialogue_s_words(name: str) -> None:
    """So that a changed prompt is another recipe hash."""
    task = load_task(name)
    module = ast.parse((task.folder / "environment.py").read_text(encoding="utf-8"))
    own = {n.targets[0].id: n.value.value for n in module.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)}  # type: ignore[attr-defined]  # fmt: skip
    for recipe in task.file.recipes:
        assert recipe.prompt == own.get("PROMPT", dialogue.PROMPT)
        assert recipe.system == (None if "PROMPT" in own else dialogue.SYSTEM)
        assert recipe.options["catalogue"] == task.file.vault_files["catalogue.jsonl"]
        assert (recipe.scorer, recipe.scorer_version) == ("episodes", "1")
    assert [recipe.options["threshold"] for recipe in task.file.recipes][:2] in ([1.0, 0.5], [1.0])


def test_the_mini_shop_s_prompts_fit_the_tiny_model(vault: Path, wishes: list[Row]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(REPO / "templates" / "models" / "tiny" / "tokenizer.json"))
    task = load_task("webshop-mini")
    source = Source(task.folder / "environment.py", "Environment", vault, True, dict(task.file.recipes[0].options))
    shop, talk = source.environment(), source.dialogue()
    limit = int(task.file.recipes[0].options["max_prompt_tokens"])
    for row in wishes:
        transcript = Transcript(row, shop.reset(row, 0))
        kind = row["product"].rstrip("12345").lower()
        for action in (
            f"search[{kind}]",
            f"click[{row['product']}]",
            *(f"click[{v}]" for v in row["options"].values()),
        ):
            transcript.turns.append(Turn(action, shop.step(action).observation))
            prompt = talk.prompt(transcript)
            assert isinstance(prompt, str) and "[SEP]" not in prompt and prompt.count(row["question"]) == 1
            assert len(tokenizer.encode(prompt).ids) <= limit, prompt
        assert shop.step("click[buy now]").reward == 1.0


def test_a_copied_task_folder_works_alone(tmp_path: Path, train: Path) -> None:
    folder = tmp_path / "elsewhere"
    shutil.copytree(load_task("webshop-mini").folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shop = Source(folder / "environment.py", "Environment", train).environment()
    assert "WebShop" in shop.reset(rows(train / "goals.jsonl")[0], 0)


def test_the_engine_imports_nothing_of_the_suite() -> None:
    folder = REPO / "autorl_hpc" / "rollouts" / "webshop"
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autorl_hpc"):
                assert (node.module or "").startswith("autorl_hpc.rollouts"), path


def test_an_agent_s_copy_works_under_another_name(tmp_path: Path, train: Path) -> None:
    for path in (REPO / "autorl_hpc" / "rollouts").rglob("*.py"):
        copy = tmp_path / "autorl_rollouts" / path.relative_to(REPO / "autorl_hpc" / "rollouts")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text(encoding="utf-8").replace("autorl_hpc.rollouts", "autorl_rollouts"))
    own = (load_task("webshop").folder / "environment.py").read_text(encoding="utf-8")
    (tmp_path / "environment.py").write_text(own.replace("autorl_hpc.rollouts", "autorl_rollouts"))
    script = (
        "import json, pathlib, sys\n"
        "from environment import Dialogue, Environment\n"
        "data = pathlib.Path(sys.argv[1])\n"
        "goal = json.loads((data / 'goals.jsonl').read_text().split('\\n')[0])\n"
        "shop = Environment(data); shop.reset(goal); print(shop.step('search[tea]').observation.count('[SEP]'))\n"
        "print([name for name in sys.modules if name.startswith('autorl_hpc')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(train)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    count, modules = done.stdout.splitlines()
    assert int(count) > 10 and modules == "[]"


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


def test_an_agent_trains_on_its_own_catalogue(train: Path, vault: Path, wishes: list[Row]) -> None:
    shop = Environment(train, held_out=False, options={"catalogue": "of the grader"})
    for row in rows(train / "goals.jsonl"):
        assert buy(shop, row, row["product"], *row["options"].values()) == 1.0
    assert (
        buy(shop, wish(wishes, "HAT1", "small", "red"), "HAT1", "small", "red") == 0.8
    )  # one attribute is told in a text
    with pytest.raises(ValueError, match="withholds the attributes of 15 products"):
        Environment(train, held_out=True)


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


def test_a_vault_file_is_pinned_as_items_are(tmp_path: Path) -> None:
    own = Root(tmp_path / "root")
    task = load_task("webshop-mini")
    staged = stage_task(own, task, None)
    assert "catalogue.jsonl" in {file.path for file in staged.vault.files}
    assert {file.path for file in staged.store.files} == {"train/catalogue.jsonl", "train/goals.jsonl"}
    path = own.task_vault("webshop-mini") / "catalogue.jsonl"
    assert path.stat().st_mode & 0o777 == 0o400
    other = type(task)(task.folder, task.file.model_copy(update={"vault_files": {"catalogue.jsonl": "0" * 64}}))
    with pytest.raises(AutorlError, match=r"catalogue\.jsonl of task webshop-mini was staged by another version"):
        verify_staged_task(own, other)
    with pytest.raises(AutorlError, match=r"prepare\.py made another catalogue\.jsonl than task\.yaml pins"):
        stage_task(own, other, None, again=True)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AutorlError, match=r"catalogue\.jsonl of webshop-mini has"):
        verify_staged_task(own, task)
