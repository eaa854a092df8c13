"""The reward of a purchase, as `get_reward` of web_agent_site/engine/goal.py at 64fa2a5c computes it.

    reward = type * (attributes found + options found + price kept) / (attributes wanted + options wanted + 1)

Exact but for the tagger of nouns: similarity of strings is that of thefuzz 0.19 on the standard library's difflib, which is
what WebShop's requirements install, and odd cases are kept: an option wanted is compared as a pair of name and value, so a
colour's name inside another word ("tan" in "titanium") can hide a perfect choice.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from autorl_hpc.rollouts.webshop.catalogue import Product, fraction

# Goals: what a customer wants, generated from the products as WebShop's `get_synthetic_goals` does it.
#
# web_agent_site/engine/goal.py and envs/web_agent_text_env.py at 64fa2a5c. The order, and so the number of a session, is that of
# the original; the limit of the price is drawn there from an unseeded generator and follows here from the product's number.

SHUFFLE_SEED = 233
LIMITS = tuple(10.0 * n for n in range(1, 100))
"""Dollars that a limit can be."""
LIMITS_ABOVE = 4
"""A limit is the larger of two different ones among the first four above the price."""
NO_LIMIT = 1_000_000.0
"""Dollars; of a product that is too dear for a limit."""
LIMIT_SALT = "webshop-limit-1"


@dataclass(frozen=True)
class Goal:
    """What a customer wants.

    Attributes:
        product: number of the product that the goal was made from; another one that does as well is as good.
        wanted: attributes asked for.
        options: value by the option's name.
        price_upper: dollars.
        session: the goal's place in the original's order; -1 where it has none.
    """

    instruction: str
    product: str
    wanted: tuple[str, ...]
    options: Mapping[str, str]
    price_upper: float
    session: int = -1

    def row(self, identity: str) -> dict[str, Any]:
        """The goal as an item."""
        return {
            "id": identity,
            "question": self.instruction,
            "answer": "",
            "product": self.product,
            "wanted": list(self.wanted),
            "options": dict(self.options),
            "price_upper": self.price_upper,
            "session": self.session,
        }


def from_row(row: Mapping[str, Any]) -> Goal:
    """The goal in an item.

    Raises:
        KeyError: a field is missing.
    """
    return Goal(
        instruction=row["question"],
        product=row["product"],
        wanted=tuple(row["wanted"]),
        options=dict(row["options"]),
        price_upper=float(row["price_upper"]),
        session=int(row.get("session", -1)),
    )


def generate(products: Iterable[Product]) -> list[Goal]:
    """Every combination of options of every product that has an instruction, in the original's order of sessions."""
    found = [goal for product in products for goal in of_product(product)]
    random.Random(SHUFFLE_SEED).shuffle(found)
    return [
        Goal(goal.instruction, goal.product, goal.wanted, goal.options, goal.price_upper, session)
        for session, goal in enumerate(found)
    ]


def of_product(product: Product) -> list[Goal]:
    """The goals of one product, options by name in alphabetical order; none where it has no instruction."""
    if product.instruction is None:
        return []
    limit = price_upper(product)
    money = "" if limit == NO_LIMIT else f", and price lower than {limit:.2f} dollars"
    names = sorted(product.options)
    goals = []
    for values in itertools.product(*(product.options[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        choice = ", and ".join(f"{name}: {value}" for name, value in options.items())
        text = f"{product.instruction}{' with ' + choice if choice else ''}{money}"
        goals.append(Goal(text, product.asin, product.wanted, options, limit))
    return goals


def price_upper(product: Product) -> float:
    """The limit of the price, dollars, the same for all goals of a product."""
    above = [limit for limit in LIMITS if limit > product.price][:LIMITS_ABOVE]
    pairs = list(itertools.combinations(above, 2))
    if not pairs:
        return NO_LIMIT
    return pairs[int(fraction(LIMIT_SALT, product.asin) * len(pairs))][1]


_COLOURS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel
camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry
cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey
heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight
mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow
red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal
tiger turquoise violet walnut wheat white wine yellow
"""
COLOURS = tuple(_COLOURS.split())
"""Words that stand for a colour, in the order in which they are looked for (COLOR_SET of engine/normalize.py; MIT licence)."""

SIMILAR = 85
"""Of 100: above it two strings are the same attribute or option."""
SAME_TITLE = 0.2
"""Share of the wanted title's nouns above which a product is of the wanted type whatever its categories."""
OTHER_TITLE = 0.1
"""Below it the product is of another type even in the same category."""
SHARED_CATEGORIES = 2
NO_NOUNS_SCORE = 0.2

_LATIN_1 = dict.fromkeys(range(128, 256))
_NO_WORD = re.compile(r"\W")


class Reward(NamedTuple):
    """A reward with what it is made of.

    Attributes:
        value: 0 to 1.
        kind: 0, 0.1, 0.5 or 1: how far the product is of the wanted type.
        attributes: wanted attributes found.
        options: wanted options found.
        price: whether the limit was kept.
    """

    value: float
    kind: float
    attributes: int
    options: int
    price: bool


def reward(bought: Product, chosen: Iterable[str], goal: Goal, wanted: Product) -> Reward:
    """The reward of buying `bought` with the option values `chosen`, for a goal made from the product `wanted`."""
    kind = type_score(
        query_match=bought.query == wanted.query,
        category_match=len(bought.categories & wanted.categories) >= SHARED_CATEGORIES,
        title=title_score(bought.nouns, wanted.nouns),
    )
    attributes = attributes_found(bought, goal.wanted)
    options = options_found(chosen, goal.options)
    price = bought.price <= goal.price_upper
    value = combine(kind, attributes + options + price, len(goal.wanted) + len(goal.options))
    return Reward(value, kind, attributes, options, price)


def combine(kind: float, points: int, wanted: int) -> float:
    """The reward from the type's score, the points won and the number of attributes and options wanted."""
    return points / (wanted + 1) * kind


def title_score(bought: Iterable[str], wanted: Iterable[str]) -> float:
    """Share of the wanted title's nouns that the bought one's title has.

    The denominator counts repetitions and the numerator doesn't, as in the original.
    """
    wanted = list(wanted)
    return len(set(bought) & set(wanted)) / len(wanted) if wanted else NO_NOUNS_SCORE


def type_score(*, query_match: bool, category_match: bool, title: float) -> float:
    """0, 0.1, 0.5 or 1: whether a product is of the wanted type."""
    if title == 0.0:
        return 0.0
    if title < OTHER_TITLE:
        return 0.1
    return 1.0 if query_match or category_match or title > SAME_TITLE else 0.5


def attributes_found(bought: Product, wanted: Iterable[str]) -> int:
    """How many of the wanted attributes the product has, by its list of attributes or in its texts."""
    known = bought.attributes or ()
    return sum(
        any(similar(attribute, want) for attribute in known) or any(want in text for text in bought.texts)
        for want in wanted
    )


def options_found(chosen: Iterable[str], wanted: Mapping[str, str] | Iterable[str]) -> int:
    """How many of the wanted options are among the chosen values.

    Wanted are pairs of name and value, or values alone as in goals that people wrote.
    """
    values = [colour_of(value) for value in chosen]
    pairs = wanted.items() if isinstance(wanted, Mapping) else wanted
    return sum(any(similar(value, want) for value in values) for want in map(_colour_of_wanted, pairs))


def colour_of(value: str) -> str:
    """The first colour's name inside a value, else the value itself."""
    return next((colour for colour in COLOURS if colour in value), value)


def _colour_of_wanted(wanted: str | tuple[str, str]) -> str:
    """A pair is a colour only where its name or value is one; else it is compared as Python prints it."""
    if isinstance(wanted, str):
        return colour_of(wanted)
    return next((colour for colour in COLOURS if colour in wanted), str(wanted))


@functools.lru_cache(maxsize=1 << 16)
def similar(one: str, other: str) -> bool:
    """Whether thefuzz 0.19's `token_set_ratio` is above 85 (of 100, rounded)."""
    if one == other:
        return True
    first, second = set(_processed(one).split()), set(_processed(other).split())
    if not first or not second:
        return False
    shared = " ".join(sorted(first & second))
    with_first = f"{shared} {' '.join(sorted(first - second))}".strip()
    with_second = f"{shared} {' '.join(sorted(second - first))}".strip()
    return any(_close(a, b) for a, b in ((shared, with_first), (shared, with_second), (with_first, with_second)))


def _processed(text: str) -> str:
    """Words in lower case. Characters from 128 to 255 are dropped, not replaced: "café" becomes "caf"."""
    return _NO_WORD.sub(" ", text.translate(_LATIN_1)).lower().strip()


def _close(one: str, other: str) -> bool:
    if one == other:
        return True
    if not one or not other:
        return False
    matcher = difflib.SequenceMatcher(None, one, other)
    # The quick ratios are upper bounds; rounding is thefuzz's.
    return all(
        round(100 * ratio()) > SIMILAR for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
    )
