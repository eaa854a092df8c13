"""The shop's rewards by hand, on the catalogue that the package makes; its goals and prices."""

from __future__ import annotations

import minishop
import pytest
from minishop import Row, buy, wish

from autorl_hpc.rollouts.webshop import reward
from autorl_hpc.rollouts.webshop.shop_environment import Environment

root, vault, train, shop, wishes = minishop.root, minishop.vault, minishop.train, minishop.shop, minishop.wishes


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
