"""Goals: what a customer wants, generated from the products as WebShop's `get_synthetic_goals` does it.

web_agent_site/engine/goal.py and envs/web_agent_text_env.py at 64fa2a5c. The order, and so the number of a session, is that of
the original; the limit of the price is drawn there from an unseeded generator and follows here from the product's number.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autorl_hpc.rollouts.webshop.catalogue import Product, fraction

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
