"""The shop's pages, actions, search and dialogue, and what agents do wrongly there."""

from __future__ import annotations

import itertools
import re
import time

import minishop
import pytest
from minishop import Row, wish

from autorl_hpc.rollouts.environment import Transcript, Turn
from autorl_hpc.rollouts.webshop import shop_environment
from autorl_hpc.rollouts.webshop.shop_environment import Environment, ShopIndex, parse, parts, tokens

root, vault, train, shop, wishes = minishop.root, minishop.vault, minishop.train, minishop.shop, minishop.wishes


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
