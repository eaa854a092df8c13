"""The WebShop environment: pages, BM25 search, the environment (one goal, at most one purchase), and the chat dialogue."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autorl_hpc.rollouts.environment import Step, Transcript
from autorl_hpc.rollouts.search.backends import TermIndex
from autorl_hpc.rollouts.webshop.catalogue import CATALOGUE_NAME, Catalogue, Product, read
from autorl_hpc.rollouts.webshop.reward import Goal, Reward, from_row, reward

# --- pages as visible texts and clickable items
# Follows the templates of web_agent_site with `observation_mode="text"`: visible texts in order, joined by ` [SEP] `, and
# clickable texts in lower case. Reviews are always empty, because the text environment loads none.

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
    """A page: `links` are product numbers by clickable text, `options` names of options by clickable value; if two share a value,
    the last one's."""

    kind: Kind
    text: str
    buttons: tuple[str, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)

    def actions(self) -> list[str]:
        """Return the available actions as the model sees them."""
        if self.kind == "search":
            return [SEARCH_ACTION]
        clickable = dict.fromkeys([*(button.lower() for button in self.buttons), *self.links, *self.options])
        return [f"click[{text}]" for text in clickable]


def search_page(instruction: str) -> Page:
    """Return the first page."""
    return Page("search", _joined(["WebShop", "Instruction:", instruction, "Search"]))


def results_page(instruction: str, found: Sequence[Product], number: int) -> Page:
    """Return a page of all the results found, numbered from 1. As in the original, pages after the last one are empty."""
    shown = found[(number - 1) * PRODUCTS_A_PAGE : number * PRODUCTS_A_PAGE]
    buttons = (BACK_TO_SEARCH, *([PREVIOUS] if number > 1 else []), NEXT)
    texts = ["Instruction:", instruction, BACK_TO_SEARCH, f"Page {number} (Total results: {len(found)})", *buttons[1:]]
    for product in shown:
        texts += [product.asin, product.title, product.price_text]
    return Page("results", _joined(texts), buttons, links={product.asin.lower(): product.asin for product in shown})


def item_page(instruction: str, product: Product) -> Page:
    """Return a product's page."""
    buttons = (BACK_TO_SEARCH, PREVIOUS, *SUB_PAGES, BUY)
    texts = ["Instruction:", instruction, BACK_TO_SEARCH, PREVIOUS]
    for name, values in product.options.items():
        texts += [name, *values]
    texts += [product.title, f"Price: {product.price_text}", f"Rating: {product.rating}", *SUB_PAGES, BUY]
    options = {value: name for name, values in product.options.items() for value in values}
    return Page("item", _joined(texts), buttons, options=options)


def sub_page(instruction: str, product: Product, name: str) -> Page:
    """Return the page with a product's description, features or reviews."""
    # The template puts a space before each feature, so an empty one is still a text.
    body = {"Description": [product.description], "Features": [f" {text}" for text in product.features]}.get(name, [])
    return Page(
        "sub", _joined(["Instruction:", instruction, BACK_TO_SEARCH, PREVIOUS, *body]), (BACK_TO_SEARCH, PREVIOUS)
    )


def done_page(asin: str, options: Mapping[str, str], reward: float) -> Page:
    """Return the last page. The original leaves most of its fields empty, so it reveals nothing of the goal."""
    texts = [
        "Thank you for shopping with us!",
        "Your code:",
        "None",
        "(Paste it in your MTurk interface.)",
        "Purchased",
    ]
    texts += ["asin", asin, "options", json.dumps(dict(options), sort_keys=True)]
    texts += [part for name in ("attrs", "category", "query", "product category") for part in (name, "None")]
    texts += ["Target", "asin", "options", "attrs", "price upper", "instuction text", "category", "product category"]
    texts += ["query", "Goal", "None", "Reward", "Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None"]
    return Page("done", _joined(texts))


def _joined(texts: Iterable[str]) -> str:
    """Join texts as the original's HTML parser shows them: without empty ones, and white space with a line's end."""
    shown = (text for text in texts if text.strip(_SPACES) or (text and "\n" not in text))
    return SEPARATOR.join(text.strip() if text.strip(_SPACES) else "" for text in shown)


# --- search: BM25 as in Lucene and Anserini with WebShop's settings
# Follows pyserini 0.17's default analyzer: Lucene's 33 stop words, possessives, Porter stems, lengths rounded to Lucene's one byte,
# ties by product number. Not compared with a running Lucene: the tokenizer is a regular expression, the stemmer Snowball's `porter`.

RESULTS = 50  # Maximum number of products that a search returns
_STOP_WORDS = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was will with
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
_APOSTROPHES = "'\u2019\u2018"
_POSSESSIVE = re.compile(rf"(?<=.)[{_APOSTROPHES}][sS]\Z", re.DOTALL)
_LETTER = r"[^\W\d_]"
_TOKEN = re.compile(rf"\w+(?:(?:(?<={_LETTER})[{_APOSTROPHES}.:·](?={_LETTER})|(?<=\d)[{_APOSTROPHES}.,;](?=\d))\w+)*")
"""Unicode's word boundaries (UAX 29) for Latin text: "levi's", "u.s" and "1,000.5" are one token each."""
MAX_TOKEN_CHARS = 255
FREE_LENGTHS = 24  # Lengths below this are stored exactly in Lucene's byte


def tokens(text: str) -> list[str]:
    """Return the terms of a text, in order."""
    words = (_POSSESSIVE.sub("", word).lower() for word in _TOKEN.findall(text))
    return [_stem(word) for word in words if word not in STOP_WORDS and len(word) <= MAX_TOKEN_CHARS]


class ShopIndex:
    """BM25 over documents by id."""

    def __init__(self, documents: Mapping[str, str]) -> None:
        self._ids = sorted(documents)  # which orders equal scores as in the original
        self._index = TermIndex((tokens(documents[one]) for one in self._ids), rounded_length)

    def search(self, query: str) -> tuple[str, ...]:
        """Return ids of the best documents, best first; none if no term is known."""
        return tuple(self._ids[number] for number in self._index.best(tokens(query), RESULTS))


def rounded_length(terms: int) -> int:
    """Return a document's length as stored by Lucene: SmallFloat.byte4ToInt(intToByte4(n)), four significant bits above 24."""
    if terms < FREE_LENGTHS:
        return terms
    above = terms - FREE_LENGTHS
    shift = max(0, above.bit_length() - 4)
    return FREE_LENGTHS + (above >> shift << shift)


@functools.lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    import snowballstemmer

    return str(snowballstemmer.stemmer("porter").stemWord(word))


ACTIONS_HEADING = "\n\nAvailable actions:\n"  # Separates a page's text from the list of available actions
PINNED = "catalogue"  # Recipe option with the hash of the catalogue, which decides scores as much as the items do


@functools.lru_cache(maxsize=4)
def open_shop(path: Path) -> tuple[Catalogue, ShopIndex]:
    """Return a catalogue with its search index. All environments of a process share them."""
    catalogue = read(path)
    return catalogue, ShopIndex({asin: product.document for asin, product in catalogue.products.items()})


class Environment:
    """One customer in the shop. An action is `search[words]` or `click[text]`; any other action, or a click on a missing item,
    changes nothing. An observation is the page's text and the available actions."""

    def __init__(self, data: Path, *, held_out: bool = False, options: Mapping[str, Any] | None = None) -> None:
        """Open the shop whose catalogue.jsonl is in `data`: an agent's training data, or the vault for graders. Held-out goals are
        scored with the catalogue that the option `catalogue` pins, and with none that withholds attributes (ValueError)."""
        path = Path(data).resolve() / CATALOGUE_NAME
        self.catalogue, self._index = open_shop(path)
        pinned = (options or {}).get(PINNED)
        if held_out and pinned is not None and self.catalogue.sha256 != pinned:
            raise ValueError(f"{path} has sha256 {self.catalogue.sha256}, the recipe pins {pinned}")
        if held_out and (count := self.catalogue.withheld):
            raise ValueError(f"{path} withholds the attributes of {count} products: it is an agent's catalogue")
        self.last: Reward | None = None
        self._goal: Goal | None = None
        self._instruction = ""
        self.page = search_page("")

    def reset(self, goal: Mapping[str, Any], seed: int = 0) -> str:
        """Begin an episode; `goal` is a row of goals.jsonl or items.jsonl. `seed` is not used, because nothing is random. KeyError if
        the goal lacks a field, or its product is not in the catalogue."""
        del seed
        self._goal = from_row(goal)
        self._instruction = self._goal.instruction
        self._wanted = self.catalogue[self._goal.product]
        self.last = None
        self._to_search()
        return self._shown()

    def step(self, action: str) -> Step:
        """Perform one action. Raises RuntimeError: no episode has begun."""
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
        """Do nothing: other environments of this process share the shop."""

    def _shown(self) -> str:
        actions = "\n".join(self.page.actions())
        return f"{self.page.text}{ACTIONS_HEADING}{actions}" if actions else self.page.text

    def _to_search(self) -> None:
        self._query, self._number = "", 1
        self._product: Product | None = None
        self._options: dict[str, str] = {}
        self.page = search_page(self._instruction)

    def _search(self, query: str, number: int) -> None:
        self._query, self._number = query, number
        self._product, self._options = None, {}
        self.page = results_page(
            self._instruction, [self.catalogue[asin] for asin in self._index.search(query)], number
        )

    def _click(self, text: str) -> None:
        page = self.page
        # buttons first: an option with the same text can't be chosen
        if text in (button.lower() for button in page.buttons):
            self._press(text)
        elif text in page.options:
            self._options[page.options[text]] = text
        elif text in page.links:
            self._product = self.catalogue[page.links[text]]
            self.page = item_page(self._instruction, self._product)

    def _press(self, text: str) -> None:
        product = self._product
        if text == BACK_TO_SEARCH.lower():
            self._to_search()
        elif text == NEXT.lower():
            self._search(self._query, self._number + 1)
        elif text == PREVIOUS.lower() and self.page.kind == "sub":
            assert product is not None
            self.page = item_page(self._instruction, product)
        elif text == PREVIOUS.lower():
            self._search(self._query, self._number - (self.page.kind == "results"))
        elif text == BUY.lower():
            assert product is not None and self._goal is not None
            self.last = reward(product, self._options.values(), self._goal, self._wanted)
            self.page = done_page(product.asin, self._options, self.last.value)
        else:
            assert product is not None
            name = next(name for name in SUB_PAGES if name.lower() == text)
            self.page = sub_page(self._instruction, product, name)


def parse(action: str) -> tuple[str, str]:
    """Return name and argument of an action, the argument in lower case; ("", "") if it is invalid."""
    # Matches like the original's `(.+)\[(.+)\]`, which takes quadratic time on a row of brackets.
    line = action.split("\n", 1)[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 0))
    return ("", "") if start < 0 else (line[:start], line[start + 1 : end].lower())


def parts(observation: str) -> tuple[str, list[str]]:
    """Split an observation into the page's text and the available actions."""
    text, heading, actions = observation.rpartition(ACTIONS_HEADING)
    return (text, actions.split("\n")) if heading else (observation, [])


# --- the dialogue; the recipe in task.yaml holds the same texts

WINDOW = 5  # Exchanges that the prompt repeats
SYSTEM = (
    "You are shopping in an online store for a customer. You see the customer's wish, the current page and the actions that are "
    "possible on it. Choose the one action that leads best to buying a product that fits the wish. Answer with that action "
    "alone, for example `search[red shoes]` or `click[buy now]`, and nothing else."
)
PROMPT = """Buy a product in this online store that fits the customer's wish.

Wish: {question}

Available actions:
{actions}

Rules:
- Answer with exactly one of the available actions.
- To search: search[your words]
- To click: click[text as it stands in the list]
- Write nothing but the action.
{history}
Observation {n}: {observation}
Action {n}:"""
_FIELD = re.compile(r"\{([a-z]+)\}")


class Dialogue:
    """A chat of one system and one user message, which repeats the last five exchanges."""

    def prompt(self, transcript: Transcript) -> Sequence[Mapping[str, str]]:
        """Return the messages. Each action is listed under the page on which it was taken. The reference (AutoRL-Bench) lists
        it under the following page and drops the first page."""
        pages = [transcript.first, *(turn.observation for turn in transcript.turns)]
        first = max(0, len(transcript.turns) - WINDOW)
        history = "".join(
            f"\nObservation {number + 1}: {parts(pages[number])[0]}\nAction {number + 1}: {transcript.turns[number].action}\n"
            for number in range(first, len(transcript.turns))
        )
        text, actions = parts(pages[-1])
        values = {
            "question": str(transcript.goal["question"]),
            "actions": "\n".join(f"  {action}" for action in actions),
            "history": history,
            "n": str(len(pages)),
            "observation": text,
        }
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": filled(PROMPT, values)}]

    def action(self, completion: str) -> str:
        """Return the completion's first line without `Action:`; the paper's older `choose[...]` becomes a click."""
        text = completion.strip().split("\n", 1)[0].strip()
        if text.startswith("Action:"):
            text = text[len("Action:") :].strip()
        return f"click[{text[len('choose[') :]}" if text.startswith("choose[") else text


def filled(template: str, values: Mapping[str, str]) -> str:
    """Fill in all fields of the template in one pass, because a title may hold braces or what looks like a field."""
    return _FIELD.sub(lambda match: values[match[1]], template)
