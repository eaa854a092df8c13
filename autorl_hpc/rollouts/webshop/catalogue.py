"""WebShop products: reading, writing, prices, and the text that the search indexes. Fields follow `load_products`
(web_agent_site/engine/engine.py at 64fa2a5c), but a price within a range follows from the product's number."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

CATALOGUE_NAME = "catalogue.jsonl"
CATEGORY_SEPARATOR = "\u203a"
DEFAULT_PRICE = 100.0  # Dollars, for a product without a price
PRICE_SALT = "webshop-price-1"  # Another salt gives other prices and changes every score


@dataclass(frozen=True)
class Product:
    """One product. `price`: dollars to be paid. `options`: values by the option's name, in the page's order. `nouns`: of the
    title, with repetitions. `attributes`: beyond its texts; None if withheld. `instruction`: the wish of its goals, `wanted`:
    the attributes that it asks for."""

    asin: str
    title: str
    description: str
    features: tuple[str, ...]
    price_text: str
    price: float
    category: str
    query: str
    product_category: str
    options: Mapping[str, tuple[str, ...]]
    nouns: tuple[str, ...]
    attributes: tuple[str, ...] | None
    instruction: str | None = None
    wanted: tuple[str, ...] = ()
    rating: str = "N.A."

    @functools.cached_property
    def document(self) -> str:
        """Return the text that the search indexes: search_engine/convert_product_file_format.py at 64fa2a5c."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        first = self.features[0] if self.features else ""
        return " ".join([self.title, self.description, first, options]).lower()

    @functools.cached_property
    def texts(self) -> tuple[str, str, str]:
        """Title, features and description in lower case, where the reward looks for attributes."""
        return self.title.lower(), " ".join(self.features).lower(), self.description.lower()

    @functools.cached_property
    def categories(self) -> frozenset[str]:
        """The parts of the category path."""
        return frozenset(part.strip() for part in self.product_category.split(CATEGORY_SEPARATOR))

    def row(self, *, withheld: bool = False) -> dict[str, Any]:
        """Return the product as a row of a catalogue, perhaps without the fields that belong to goals."""
        left_out = {"rating", *(OF_GOALS if withheld else () if self.instruction is not None else OF_GOALS[1:])}
        row = {name: value for name, value in vars(self).items() if name in FIELDS and name not in left_out}
        # As pairs, because rows are written with sorted keys and options have the page's order.
        row["options"] = [[name, list(values)] for name, values in self.options.items()]
        return {**row, "withheld": True} if withheld else row


OF_GOALS = ("attributes", "instruction", "wanted")
FIELDS = frozenset(field.name for field in fields(Product))


def from_row(row: Mapping[str, Any]) -> Product:
    """Return the product in a row of a catalogue."""
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in row.items() if name in FIELDS
    }
    options = {name: tuple(values) for name, values in row["options"]}
    found |= {"attributes": found.get("attributes"), "options": options}
    return Product(**found)


def from_raw(raw: Mapping[str, Any], entry: Mapping[str, Any], nouns: Iterable[str]) -> Product:
    """Return a product from the official files: `raw` of items_shuffle_1000.json, `entry` of items_ins_v2_1000.json (attributes,
    perhaps an instruction), and the title's nouns."""
    pricing = prices(raw.get("pricing"))
    features = raw["small_description"]
    options = {
        name.lower(): tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
        for name, values in (raw["customization_options"] or {}).items()
        if values is not None
    }
    return Product(
        asin=raw["asin"],
        title=raw["name"],
        description=raw["full_description"],
        features=tuple(features) if isinstance(features, list) else (features,),
        price_text=" to ".join(f"${price}" for price in pricing),
        price=price_of(raw["asin"], pricing),
        category=raw["category"],
        query=raw["query"].lower().strip(),
        product_category=raw["product_category"],
        options=options,
        nouns=tuple(nouns),
        attributes=tuple(entry["attributes"]),
        instruction=entry.get("instruction"),
        wanted=tuple(entry.get("instruction_attributes", ())),
    )


def prices(text: str | None) -> tuple[float, ...]:
    """Return the one or two prices in `$17.49 - $18.49`, in dollars; the default if there is none, ValueError if unreadable."""
    if not text:
        return (DEFAULT_PRICE,)
    found = [float("".join(c for c in part if c in "0123456789.")) for part in text.split("$")[1:]]
    if not found:
        raise ValueError(f"no price in {text!r}")
    return tuple(found[:2])


def price_of(asin: str, pricing: tuple[float, ...]) -> float:
    """Return the price to be paid in dollars: uniform over a range, and the same on every machine."""
    first, last = pricing[0], pricing[-1]
    return first if first == last else first + (last - first) * fraction(PRICE_SALT, asin)


def fraction(*key: str) -> float:
    """Return a number in [0, 1) that depends on the key alone."""
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
    return int(digest[:13], 16) / 16.0**13  # 52 bits: every value is a float


@dataclass(frozen=True)
class Catalogue:
    """All products, in the file's order."""

    products: Mapping[str, Product]
    withheld: int = 0  # number of products with withheld attributes
    sha256: str = ""  # of the file

    def __getitem__(self, asin: str) -> Product:
        return self.products[asin]


def read(path: Path) -> Catalogue:
    """Read a catalogue: one JSON object per line. Raises ValueError: it is damaged."""
    # Not splitlines(), because a title may hold a character that it takes for a line's end.
    data = path.read_bytes()
    rows = [json.loads(line) for line in data.split(b"\n") if line]
    try:
        products = {row["asin"]: from_row(row) for row in rows}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no catalogue: {error!r}") from error
    return Catalogue(products, sum("withheld" in row for row in rows), hashlib.sha256(data).hexdigest())
