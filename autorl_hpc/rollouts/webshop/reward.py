"""WebShop's goals, the files of its splits, and the reward of a purchase as `get_reward` of web_agent_site/engine/goal.py at 64fa2a5c computes it.

    reward = type * (attributes found + options found + price kept) / (attributes wanted + options wanted + 1)

Exact except for the noun tagger. String similarity is thefuzz 0.19 on difflib, as WebShop installs. Odd cases are kept: a wanted
option is compared as a pair of name and value, so a colour's name inside another word ("tan" in "titanium") can hide a match.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
import json
import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.rollouts.webshop.catalogue import CATALOGUE_NAME, Product, fraction

# --- goals, generated from products like WebShop's `get_synthetic_goals`
# web_agent_site/engine/goal.py and envs/web_agent_text_env.py at 64fa2a5c. Order and session numbers are the original's. The
# price limit follows from the product's number; the original draws it from an unseeded generator.

SHUFFLE_SEED = 233
LIMITS = tuple(10.0 * n for n in range(1, 100))  # Possible limits in dollars
LIMITS_ABOVE = 4  # A limit is the larger of two different ones among the first four above the price
NO_LIMIT = 1_000_000.0  # Dollars, for a product too expensive for any limit
LIMIT_SALT = "webshop-limit-1"


@dataclass(frozen=True)
class Goal:
    """What a customer wants: attributes, option values by name, at most that many dollars. Other suitable products than the one
    that the goal was made from are accepted too. `session` is its position in the original's order; -1 if none."""

    instruction: str
    product: str
    wanted: tuple[str, ...]
    options: Mapping[str, str]
    price_upper: float
    session: int = -1

    def row(self, identity: str) -> dict[str, Any]:
        """Return the goal as an item."""
        own = {**vars(self), "wanted": list(self.wanted), "options": dict(self.options)}
        return {"id": identity, "question": own.pop("instruction"), "answer": "", **own}


def from_row(row: Mapping[str, Any]) -> Goal:
    """Return the goal in an item. Raises KeyError: a field is missing."""
    return Goal(
        instruction=row["question"],
        product=row["product"],
        wanted=tuple(row["wanted"]),
        options=dict(row["options"]),
        price_upper=float(row["price_upper"]),
        session=int(row.get("session", -1)),
    )


def generate(products: Iterable[Product]) -> list[Goal]:
    """Return every combination of options of every product with an instruction, in the original's order of sessions."""
    found = [goal for product in products for goal in of_product(product)]
    random.Random(SHUFFLE_SEED).shuffle(found)
    return [replace(goal, session=session) for session, goal in enumerate(found)]


def of_product(product: Product) -> list[Goal]:
    """Return the goals of one product, options sorted by name; none if it has no instruction."""
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
    """Return the price limit in dollars, the same for all goals of a product."""
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
"""Colour words in the order of the search (COLOR_SET of engine/normalize.py; MIT licence)."""
SIMILAR = 85  # Of 100; strings with a higher ratio are the same attribute or option
SAME_TITLE = 0.2  # Share of the wanted title's nouns above which a product has the wanted type whatever its categories
OTHER_TITLE = 0.1  # Below this the product has another type even in the same category
SHARED_CATEGORIES = 2
NO_NOUNS_SCORE = 0.2
_LATIN_1 = dict.fromkeys(range(128, 256))
_NO_WORD = re.compile(r"\W")


class Reward(NamedTuple):
    """A reward from 0 to 1 with its parts: how far the product has the wanted type (0, 0.1, 0.5 or 1), the numbers of wanted
    attributes and options found, and whether the price limit was kept."""

    value: float
    kind: float
    attributes: int
    options: int
    price: bool


def reward(bought: Product, chosen: Iterable[str], goal: Goal, wanted: Product) -> Reward:
    """Return the reward of buying `bought` with the option values `chosen`, for a goal made from the product `wanted`."""
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
    """Return the reward from the type's score, the points, and the number of wanted attributes and options."""
    return points / (wanted + 1) * kind


def title_score(bought: Iterable[str], wanted: Iterable[str]) -> float:
    """Return the share of the wanted title's nouns in the bought product's title. As in the original, the denominator counts
    repetitions and the numerator does not."""
    wanted = list(wanted)
    return len(set(bought) & set(wanted)) / len(wanted) if wanted else NO_NOUNS_SCORE


def type_score(*, query_match: bool, category_match: bool, title: float) -> float:
    """Return 0, 0.1, 0.5 or 1: how far a product has the wanted type."""
    if title == 0.0:
        return 0.0
    if title < OTHER_TITLE:
        return 0.1
    return 1.0 if query_match or category_match or title > SAME_TITLE else 0.5


def attributes_found(bought: Product, wanted: Iterable[str]) -> int:
    """Count the wanted attributes that the product has, in its list of attributes or in its texts."""
    known = bought.attributes or ()
    return sum(
        any(similar(attribute, want) for attribute in known) or any(want in text for text in bought.texts)
        for want in wanted
    )


def options_found(chosen: Iterable[str], wanted: Mapping[str, str] | Iterable[str]) -> int:
    """Count the wanted options among the chosen values. Wanted are pairs of name and value, or values alone as in goals written
    by people."""
    values = [colour_of(value) for value in chosen]
    pairs = wanted.items() if isinstance(wanted, Mapping) else wanted
    return sum(any(similar(value, want) for value in values) for want in map(_colour_of_wanted, pairs))


def colour_of(value: str) -> str:
    """Return the first colour name inside a value, otherwise the value."""
    return next((colour for colour in COLOURS if colour in value), value)


def _colour_of_wanted(wanted: str | tuple[str, str]) -> str:
    """Return the colour if the pair's name or value is one; otherwise the pair as Python prints it."""
    if isinstance(wanted, str):
        return colour_of(wanted)
    return next((colour for colour in COLOURS if colour in wanted), str(wanted))


@functools.lru_cache(maxsize=1 << 16)
def similar(one: str, other: str) -> bool:
    """Return whether thefuzz 0.19's `token_set_ratio` (0 to 100, rounded) is above 85."""
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
    """Return lower-case words. Characters from 128 to 255 are dropped, not replaced: "café" becomes "caf"."""
    return _NO_WORD.sub(" ", text.translate(_LATIN_1)).lower().strip()


def _close(one: str, other: str) -> bool:
    if one == other:
        return True
    if not one or not other:
        return False
    matcher = difflib.SequenceMatcher(None, one, other)
    # The quick ratios are upper bounds; the rounding is thefuzz's.
    return all(
        round(100 * ratio()) > SIMILAR for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
    )


# --- the files of a task: an agent's catalogue and goals, the held-out goals, the grader's full catalogue

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
    """Write everything under `out`. A held-out goal may be in two splits; agents don't get the attributes and instructions of
    `withheld` products, and all ids of goals begin with `prefix`."""
    _write(out / "train" / CATALOGUE_NAME, (p.row(withheld=p.asin in withheld) for p in products))
    _write(out / "train" / GOALS_NAME, (goal.row(f"{prefix}-{goal.session:04d}") for goal in train))
    for split, goals in held_out.items():
        _write(out / split / ITEMS_NAME, (goal.row(f"{prefix}-{goal.session:04d}") for goal in goals))
    _write(out / CATALOGUE_NAME, (p.row() for p in products))


def attainable(goal: Goal, product: Product) -> bool:
    """Return whether buying the goal's own product with its own options gives reward 1. Odd cases in the original's comparison
    of options keep some goals below 1 even for the perfect purchase."""
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


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines in ASCII with sorted keys, so that equal rows give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8", newline="\n")
