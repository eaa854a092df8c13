"""Makes a small shop from nothing: 30 products, 90 goals, in the manner of WebShop and through the same code.

Nothing is drawn at random: products are written down here, and who belongs to which split is an order by hash.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from autorl_hpc.rollouts.webshop.catalogue import CATEGORY_SEPARATOR, Product, price_of
from autorl_hpc.rollouts.webshop.reward import generate, groups, write_task

REPORT_PRODUCTS, FEEDBACK_PRODUCTS = 9, 6

COLOURS = ("red", "blue", "green")
SIZES = ("small", "large")


class Kind(NamedTuple):
    """A kind of product; its five products differ in material, attributes, price and title.

    Attributes:
        products: title, description, prices in dollars, attributes wanted of it, further attributes.
    """

    prefix: str
    category: str
    path: tuple[str, str, str]
    query: str
    options: dict[str, tuple[str, ...]]
    products: tuple[tuple[str, str, tuple[float, ...], tuple[str, ...], tuple[str, ...]], ...]


KINDS = (
    Kind("HAT", "fashion", ("Clothing", "Winter", "Hats"), "hats", {"size": SIZES, "color": COLOURS}, (
        ("Wool Hat", "A knitted hat.", (12.5,), ("warm", "hand wash"), ("soft",)),
        ("Cotton Hat", "For mild days.", (9.0,), ("light weight", "machine wash"), ()),
        ("Felt Hat", "With a ribbon.", (31.0, 39.0), ("warm", "water resistant"), ()),
        ("Straw Hat", "For the beach.", (14.0,), ("light weight", "hand made"), ("sun protection",)),
        ("Fleece Hat", "For running.", (18.0,), ("warm", "machine wash"), ("quick drying",)),
    )),
    Kind("SCARF", "fashion", ("Clothing", "Winter", "Scarves"), "scarves", {"color": COLOURS}, (
        ("Wool Scarf", "Two metres long.", (22.0,), ("warm", "hand made"), ()),
        ("Silk Scarf", "With a print.", (48.0,), ("soft", "light weight"), ("gift box",)),
        ("Cotton Scarf", "Also a towel.", (11.0,), ("soft", "machine wash"), ()),
        ("Fleece Scarf", "A loop.", (13.0, 17.0), ("warm", "quick drying"), ()),
        ("Linen Scarf", "For summer.", (27.0,), ("light weight", "hand wash"), ()),
    )),
    Kind("MUG", "garden", ("Home", "Kitchen", "Mugs"), "mugs", {"color": COLOURS}, (
        ("Clay Mug", "Glazed inside.", (8.0,), ("hand made", "eco friendly"), ()),
        ("Steel Mug", "With a lid.", (19.0,), ("leak proof", "dishwasher safe"), ()),
        ("Glass Mug", "With two walls.", (15.0, 18.0), ("heat resistant", "dishwasher safe"), ()),
        ("Bamboo Mug", "For the office.", (10.0,), ("eco friendly", "light weight"), ()),
        ("Enamel Mug", "For the camp fire.", (12.0,), ("heat resistant", "light weight"), ()),
    )),
    Kind("LAMP", "garden", ("Home", "Light", "Lamps"), "lamps", {"size": SIZES}, (
        ("Desk Lamp", "With an arm.", (35.0,), ("easy assemble", "energy efficient"), ()),
        ("Paper Lamp", "To hang.", (16.0,), ("eco friendly", "easy assemble"), ()),
        # Titles of this length are common in shops; they make a share of nouns small.
        ("Lamp Light Torch Lantern Bulb Glow Shine Tent Camp Garden Porch Wool Battery", "A lantern.", (29.0,),
         ("water resistant", "energy efficient"), ()),
        ("Brass Floor Lamp Living Room Corner Wool Shade", "A tall one.", (120.0,), ("hand made", "energy efficient"), ()),
        ("Salt Lamp", "A block of salt.", (985.0,), ("hand made", "eco friendly"), ()),
    )),
    Kind("SOAP", "beauty", ("Beauty", "Bath", "Soaps"), "soaps", {"scent": ("rose", "lemon", "mint")}, (
        ("Olive Soap", "A bar.", (4.0,), ("cruelty free", "sensitive skin"), ()),
        ("Honey Soap", "A bar in paper.", (5.5,), ("hand made", "sensitive skin"), ()),
        ("Oat Soap", "With grains.", (6.0,), ("dry skin", "cruelty free"), ("plastic free",)),
        ("Clay Soap", "A round one.", (7.0, 9.0), ("oily skin", "cruelty free"), ()),
        ("Milk Soap", "Three bars.", (9.0,), ("dry skin", "hand made"), ()),
    )),
    Kind("TEA", "grocery", ("Food", "Drinks", "Teas"), "teas", {}, (
        ("Mint Tea", "Twenty bags. Caffeine free.", (3.0,), ("caffeine free", "non gmo"), ()),
        ("Black Tea", "Loose leaves.", (6.0,), ("fair trade", "non gmo"), ()),
        ("Green Tea", "Fifty bags.", (8.0,), ("fair trade", "usda organic"), ()),
        ("Herb Tea", "A tin.", (7.5,), ("caffeine free", "usda organic"), ()),
        ("Fruit Tea", "Twenty bags.", (3.5,), ("caffeine free", "sugar free"), ("plastic free",)),
    )),
)  # fmt: skip


def prepare(source: Path | None, out: Path) -> None:
    """Writes train/, feedback/, report/ and the grader's catalogue.jsonl under `out`; `source` is not used."""
    del source
    products = make_products()
    numbers = [product.asin for group in groups(products) for product in group]
    report = set(numbers[:REPORT_PRODUCTS])
    feedback = set(numbers[REPORT_PRODUCTS : REPORT_PRODUCTS + FEEDBACK_PRODUCTS])
    goals = generate(products)
    write_task(
        out,
        products,
        train=[goal for goal in goals if goal.product not in report | feedback],
        held_out={
            "feedback": [goal for goal in goals if goal.product in feedback],
            "report": [goal for goal in goals if goal.product in report],
        },
        withheld=report | feedback,
        prefix="webshop-mini",
    )


def make_products() -> list[Product]:
    """The 30 products."""
    return [_product(kind, number) for kind in KINDS for number in range(len(kind.products))]


def _product(kind: Kind, number: int) -> Product:
    title, description, pricing, wanted, further = kind.products[number]
    asin = f"{kind.prefix}{number + 1}"
    return Product(
        asin=asin,
        title=title,
        description=description,
        features=tuple(f"It is {attribute}." for attribute in wanted[:1]),
        price_text=" to ".join(f"${price}" for price in pricing),
        price=price_of(asin, pricing),
        category=kind.category,
        query=kind.query,
        product_category=f" {CATEGORY_SEPARATOR} ".join(kind.path),
        options=kind.options,
        nouns=tuple(title.lower().split()),  # every word of these titles is one
        attributes=(*wanted, *further),
        instruction=f"Find me {wanted[0]}, {wanted[1]} {kind.query}",
        wanted=wanted,
    )
