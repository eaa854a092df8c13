"""The pages, as the texts that can be seen on them and the things that can be clicked.

Follows the templates of web_agent_site and what `observation_mode="text"` makes of them: visible texts in order, joined by
` [SEP] `, and clickable texts in lower case. Reviews are always empty, as in the text environment, which loads none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autorl_hpc.rollouts.webshop.catalogue import Product

SEPARATOR = " [SEP] "
PRODUCTS_A_PAGE = 10

BACK_TO_SEARCH = "Back to Search"
NEXT, PREVIOUS = "Next >", "< Prev"
BUY = "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")
SEARCH_ACTION = "search[<your query>]"

_SPACES = " \n\t\f\r"

Kind = Literal["search", "results", "item", "sub", "done"]


@dataclass(frozen=True)
class Page:
    """A page that is shown.

    Attributes:
        links: product numbers by their clickable text.
        options: the option's name by its clickable value; of equal values in two options, the last option's.
    """

    kind: Kind
    text: str
    buttons: tuple[str, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)

    def actions(self) -> list[str]:
        """What can be done here, as a model is told it."""
        if self.kind == "search":
            return [SEARCH_ACTION]
        clickable = dict.fromkeys([*(button.lower() for button in self.buttons), *self.links, *self.options])
        return [f"click[{text}]" for text in clickable]


def search_page(instruction: str) -> Page:
    """The first page."""
    return Page("search", _joined(["WebShop", "Instruction:", instruction, "Search"]))


def results_page(instruction: str, found: Sequence[Product], number: int) -> Page:
    """One page of results.

    Args:
        found: all results of the search.
        number: of the page, from 1. Behind the last page come empty ones, as in the original.
    """
    shown = found[(number - 1) * PRODUCTS_A_PAGE : number * PRODUCTS_A_PAGE]
    buttons = (BACK_TO_SEARCH, *([PREVIOUS] if number > 1 else []), NEXT)
    texts = ["Instruction:", instruction, BACK_TO_SEARCH, f"Page {number} (Total results: {len(found)})", *buttons[1:]]
    for product in shown:
        texts += [product.asin, product.title, product.price_text]
    return Page("results", _joined(texts), buttons, links={product.asin.lower(): product.asin for product in shown})


def item_page(instruction: str, product: Product) -> Page:
    """A product's page."""
    buttons = (BACK_TO_SEARCH, PREVIOUS, *SUB_PAGES, BUY)
    texts = ["Instruction:", instruction, BACK_TO_SEARCH, PREVIOUS]
    for name, values in product.options.items():
        texts += [name, *values]
    texts += [product.title, f"Price: {product.price_text}", f"Rating: {product.rating}", *SUB_PAGES, BUY]
    options = {value: name for name, values in product.options.items() for value in values}
    return Page("item", _joined(texts), buttons, options=options)


def sub_page(instruction: str, product: Product, name: str) -> Page:
    """Description, features or reviews of a product."""
    # A feature stands behind a space in its template, so an empty one is still a text.
    body = {"Description": [product.description], "Features": [f" {text}" for text in product.features]}.get(name, [])
    return Page(
        "sub",
        _joined(["Instruction:", instruction, BACK_TO_SEARCH, PREVIOUS, *body]),
        (BACK_TO_SEARCH, PREVIOUS),
    )


def done_page(asin: str, options: Mapping[str, str], reward: float) -> Page:
    """The last page. The original leaves most of its fields empty, and so tells nothing of the goal."""
    purchased = ["asin", asin, "options", json.dumps(dict(options), sort_keys=True)]
    for name in ("attrs", "category", "query", "product category"):
        purchased += [name, "None"]
    target = ["asin", "options", "attrs", "price upper", "instuction text", "category", "product category", "query"]
    texts = [
        "Thank you for shopping with us!",
        "Your code:",
        "None",
        "(Paste it in your MTurk interface.)",
        "Purchased",
    ]
    texts += [*purchased, "Target", *target, "Goal", "None", "Reward"]
    texts += ["Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None"]
    return Page("done", _joined(texts))


def _joined(texts: Iterable[str]) -> str:
    return SEPARATOR.join(text for text in map(_visible, texts) if text is not None)


def _visible(text: str) -> str | None:
    """A text as the original's HTML parser hands it on: nothing of an empty one or of white space with a line's end."""
    if not text.strip(_SPACES):
        return None if not text or "\n" in text else ""
    return text.strip()
