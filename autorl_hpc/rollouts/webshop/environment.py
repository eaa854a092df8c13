"""The shop as an environment: one customer, one goal, at most one purchase."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autorl_hpc.rollouts.environment import Step
from autorl_hpc.rollouts.webshop import pages
from autorl_hpc.rollouts.webshop.catalogue import CATALOGUE_NAME, Catalogue, Product, read
from autorl_hpc.rollouts.webshop.goals import Goal, from_row
from autorl_hpc.rollouts.webshop.pages import Page
from autorl_hpc.rollouts.webshop.reward import Reward, reward
from autorl_hpc.rollouts.webshop.search import Index

ACTIONS_HEADING = "\n\nAvailable actions:\n"
"""Between a page's text and the list of what can be done on it."""
PINNED = "catalogue"
"""Of a recipe's options: the hash of the catalogue, since it decides scores as much as the items do."""


class Shop:
    """A catalogue with its search engine. It never changes, so all environments of a process share one."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._index = Index({asin: product.document for asin, product in catalogue.products.items()})

    def search(self, query: str) -> list[Product]:
        """The best products, best first."""
        return [self.catalogue[asin] for asin in self._index.search(query)]


@functools.lru_cache(maxsize=4)
def open_shop(path: Path) -> Shop:
    """The shop of a catalogue's file, read once a process; errors as for `catalogue.read`."""
    return Shop(read(path))


class Environment:
    """One customer in the shop.

    An action is `search[words]` or `click[text]`; text is compared in lower case. Anything else, and a click on what is not
    there, changes nothing. An observation is the page's text, then the list of available actions.
    """

    def __init__(self, data: Path, *, held_out: bool = False, options: Mapping[str, Any] | None = None) -> None:
        """Opens the shop in `data`.

        Args:
            data: a folder with catalogue.jsonl: an agent's training data, or the vault for graders.
            held_out: for held-out goals, which a catalogue with withheld attributes would score wrongly.
            options: the recipe's; `catalogue` is the sha256 of the file that held-out goals are scored with.

        Raises:
            OSError, ValueError: there is no catalogue, it is damaged, or it is another one than it should be.
        """
        path = Path(data).resolve() / CATALOGUE_NAME
        self.shop = open_shop(path)
        pinned = (options or {}).get(PINNED)
        if held_out and pinned is not None and self.shop.catalogue.sha256 != pinned:
            raise ValueError(f"{path} has sha256 {self.shop.catalogue.sha256}, the recipe pins {pinned}")
        if held_out and self.shop.catalogue.withheld:
            raise ValueError(
                f"{path} withholds the attributes of {self.shop.catalogue.withheld} products: it is an agent's catalogue"
            )
        self.last: Reward | None = None
        self._goal: Goal | None = None
        self._page = pages.search_page("")

    def reset(self, goal: Mapping[str, Any], seed: int = 0) -> str:
        """Begins an episode; `goal` is a row of goals.jsonl or items.jsonl. Nothing is drawn, so `seed` is not used.

        Raises:
            KeyError: the goal lacks a field, or its product is not in the catalogue.
        """
        del seed
        self._goal = from_row(goal)
        self._wanted = self.shop.catalogue[self._goal.product]
        self.last = None
        self._to_search()
        return self._shown()

    def step(self, action: str) -> Step:
        """One action.

        Raises:
            RuntimeError: no episode has begun.
        """
        if self._goal is None:
            raise RuntimeError("reset() comes before step()")
        if self.last is None:
            name, argument = parse(action)
            if name == "search" and argument:
                self._search(argument, 1)
            elif name == "click":
                self._click(argument)
        return Step(self._shown(), self.last is not None, 0.0 if self.last is None else self.last.value)

    def close(self) -> None:
        """The shop stays open for the others of this process."""

    @property
    def page(self) -> Page:
        """The page that is shown."""
        return self._page

    @property
    def _instruction(self) -> str:
        return "" if self._goal is None else self._goal.instruction

    def _shown(self) -> str:
        actions = "\n".join(self._page.actions())
        return f"{self._page.text}{ACTIONS_HEADING}{actions}" if actions else self._page.text

    def _to_search(self) -> None:
        self._query, self._number = "", 1
        self._product: Product | None = None
        self._options: dict[str, str] = {}
        self._page = pages.search_page(self._instruction)

    def _search(self, query: str, number: int) -> None:
        self._query, self._number = query, number
        self._product, self._options = None, {}
        self._page = pages.results_page(self._instruction, self.shop.search(query), number)

    def _click(self, text: str) -> None:
        page = self._page
        if text in (button.lower() for button in page.buttons):  # first: an option of the same text can't be chosen
            self._press(text)
        elif text in page.options:
            self._options[page.options[text]] = text
        elif text in page.links:
            self._product = self.shop.catalogue[page.links[text]]
            self._to_item()

    def _press(self, text: str) -> None:
        if text == pages.BACK_TO_SEARCH.lower():
            self._to_search()
        elif text == pages.NEXT.lower():
            self._search(self._query, self._number + 1)
        elif text == pages.PREVIOUS.lower():
            if self._page.kind == "sub":
                self._to_item()
            else:
                self._search(self._query, self._number - (self._page.kind == "results"))
        elif text == pages.BUY.lower():
            self._buy()
        else:
            self._to_sub_page(next(name for name in pages.SUB_PAGES if name.lower() == text))

    def _to_item(self) -> None:
        assert self._product is not None
        self._page = pages.item_page(self._instruction, self._product)

    def _to_sub_page(self, name: str) -> None:
        assert self._product is not None
        self._page = pages.sub_page(self._instruction, self._product, name)

    def _buy(self) -> None:
        assert self._product is not None and self._goal is not None
        self.last = reward(self._product, self._options.values(), self._goal, self._wanted)
        self._page = pages.done_page(self._product.asin, self._options, self.last.value)


def parse(action: str) -> tuple[str, str]:
    """Name and argument of an action, the argument in lower case; ("", "") where it is none."""
    # What the original's `(.+)\[(.+)\]` matches, which takes quadratic time on a row of brackets.
    line = action.split("\n", 1)[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 0))
    return ("", "") if start < 0 else (line[:start], line[start + 1 : end].lower())


def parts(observation: str) -> tuple[str, list[str]]:
    """A page's text and the available actions, from an observation."""
    text, heading, actions = observation.rpartition(ACTIONS_HEADING)
    return (text, actions.split("\n")) if heading else (observation, [])
