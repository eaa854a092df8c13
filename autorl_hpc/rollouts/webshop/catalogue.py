"""Products: how they are read, written, priced, and what the search sees of them.

The fields follow WebShop's `load_products` (web_agent_site/engine/engine.py at 64fa2a5c), with one difference: a price that is
given as a range is drawn there from an unseeded generator; here it follows from the product's number.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CATALOGUE_NAME = "catalogue.jsonl"
CATEGORY_SEPARATOR = "\u203a"

DEFAULT_PRICE = 100.0
"""Dollars, of a product without a price."""
PRICE_SALT = "webshop-price-1"
"""Another salt is another catalogue: change it and every score changes."""


@dataclass(frozen=True)
class Product:
    """One product.

    Attributes:
        price_text: as pages show it, such as `$17.49 to $18.49`.
        price: dollars to be paid.
        options: values by the option's name, in the page's order, all in lower case.
        nouns: of the title, in lower case and with repetitions, by a part-of-speech tagger.
        attributes: what the product is said to be beyond its texts; None where they are withheld.
        instruction: the wish that goals for this product express; None where there is none or it is withheld.
        wanted: the attributes that `instruction` asks for.
    """

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
        """What the search engine indexes: search_engine/convert_product_file_format.py at 64fa2a5c."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        first = self.features[0] if self.features else ""
        return " ".join([self.title, self.description, first, options]).lower()

    @functools.cached_property
    def texts(self) -> tuple[str, str, str]:
        """Title, features and description in lower case, where the reward looks for attributes."""
        return self.title.lower(), " ".join(self.features).lower(), self.description.lower()

    @functools.cached_property
    def categories(self) -> frozenset[str]:
        """The steps of the path of categories."""
        return frozenset(part.strip() for part in self.product_category.split(CATEGORY_SEPARATOR))

    def row(self, *, withheld: bool = False) -> dict[str, Any]:
        """The product as a line of a catalogue.

        Args:
            withheld: leave out what belongs to goals: attributes, instruction, and which of them it asks for.
        """
        row: dict[str, Any] = {
            "asin": self.asin,
            "title": self.title,
            "description": self.description,
            "features": list(self.features),
            "price_text": self.price_text,
            "price": self.price,
            "category": self.category,
            "query": self.query,
            "product_category": self.product_category,
            # As pairs: keys are sorted when a row is written, and the order of options is that of the page.
            "options": [[name, list(values)] for name, values in self.options.items()],
            "nouns": list(self.nouns),
        }
        if withheld:
            return {**row, "withheld": True}
        row["attributes"] = None if self.attributes is None else list(self.attributes)
        if self.instruction is not None:
            row |= {"instruction": self.instruction, "wanted": list(self.wanted)}
        return row


def from_row(row: Mapping[str, Any]) -> Product:
    """The product in a line of a catalogue."""
    attributes = row.get("attributes")
    return Product(
        asin=row["asin"],
        title=row["title"],
        description=row["description"],
        features=tuple(row["features"]),
        price_text=row["price_text"],
        price=row["price"],
        category=row["category"],
        query=row["query"],
        product_category=row["product_category"],
        options={name: tuple(values) for name, values in row["options"]},
        nouns=tuple(row["nouns"]),
        attributes=None if attributes is None else tuple(attributes),
        instruction=row.get("instruction"),
        wanted=tuple(row.get("wanted", ())),
    )


def from_raw(raw: Mapping[str, Any], entry: Mapping[str, Any], nouns: Iterable[str]) -> Product:
    """A product of the official files.

    Args:
        raw: of items_shuffle_1000.json.
        entry: of items_ins_v2_1000.json: attributes, and perhaps an instruction.
        nouns: of the title.
    """
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
    """The one or two prices in `$17.49 - $18.49`, dollars; the default without one.

    Raises:
        ValueError: a price can't be read.
    """
    if not text:
        return (DEFAULT_PRICE,)
    found = [float("".join(c for c in part if c in "0123456789.")) for part in text.split("$")[1:]]
    if not found:
        raise ValueError(f"no price in {text!r}")
    return tuple(found[:2])


def price_of(asin: str, pricing: tuple[float, ...]) -> float:
    """The price to be paid, dollars: evenly distributed over a range, and the same on every machine."""
    first, last = pricing[0], pricing[-1]
    return first if first == last else first + (last - first) * fraction(PRICE_SALT, asin)


def fraction(*key: str) -> float:
    """A number from 0 to below 1 that follows from the key alone."""
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
    return int(digest[:13], 16) / 16.0**13  # 52 bits: every value is a float


@dataclass(frozen=True)
class Catalogue:
    """All products, in the file's order."""

    products: Mapping[str, Product]
    withheld: int = 0  # products whose attributes are not told
    sha256: str = ""  # of the file

    def __getitem__(self, asin: str) -> Product:
        return self.products[asin]


def read(path: Path) -> Catalogue:
    """The catalogue in a file of one JSON object a line.

    Raises:
        OSError: it can't be read.
        ValueError: it is damaged.
    """
    # Not splitlines(): a title may hold a character that it takes for a line's end.
    data = path.read_bytes()
    rows = [json.loads(line) for line in data.split(b"\n") if line]
    try:
        products = {row["asin"]: from_row(row) for row in rows}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no catalogue: {error!r}") from error
    return Catalogue(products, sum("withheld" in row for row in rows), hashlib.sha256(data).hexdigest())
