"""Makes WebShop's splits from the official files of the 1,000 products.

Products, not goals, are dealt out, and products with the same instruction stay together. The report split has the products of
sessions 0 to 99, which the paper's protocol asks (`paper/items.jsonl`), and more up to 100; the feedback split has 60. Goals
that no purchase can satisfy (`attainable`) are not asked in either. All goals of the other products are for training.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from autorl_hpc.rollouts.webshop.catalogue import Product, from_raw
from autorl_hpc.rollouts.webshop.reward import Goal, at_most, attainable, generate, groups, write_task

PRODUCTS_FILE = "items_shuffle_1000.reconstructed.json.gz"
ATTRIBUTES_FILE = "items_ins_v2_1000.json"
NOUNS_FILE = "title_nouns.en_core_web_sm-3.8.json"

PAPER_SESSIONS = 100
REPORT_PRODUCTS, FEEDBACK_PRODUCTS = 100, 60
GOALS_A_PRODUCT = 5
"""Some products have hundreds of goals, which differ in size and colour alone."""


def prepare(source: Path | None, out: Path) -> None:
    """Writes train/, feedback/, report/, paper/ and the grader's catalogue.jsonl under `out`."""
    if source is None:
        raise ValueError("webshop is made from the official files")
    products = read_products(source)
    by_number = {product.asin: product for product in products}
    goals = generate(products)
    report, feedback = held_out_products(products, goals)
    asked = [goal for goal in goals if attainable(goal, by_number[goal.product])]
    write_task(
        out,
        products,
        train=[goal for goal in goals if goal.product not in report | feedback],
        held_out={
            "feedback": at_most((goal for goal in asked if goal.product in feedback), GOALS_A_PRODUCT),
            "report": at_most((goal for goal in asked if goal.product in report), GOALS_A_PRODUCT),
            "paper": goals[:PAPER_SESSIONS],
        },
        withheld=report | feedback,
        prefix="webshop",
    )


def read_products(source: Path) -> list[Product]:
    """The products of the official files, in order."""
    raw = json.loads(gzip.decompress((source / PRODUCTS_FILE).read_bytes()))
    attributes: dict[str, Any] = json.loads((source / ATTRIBUTES_FILE).read_bytes())
    nouns: dict[str, list[str]] = json.loads((source / NOUNS_FILE).read_bytes())
    return [from_raw(row, attributes[row["asin"]], nouns[row["asin"]]) for row in raw]


def held_out_products(products: list[Product], goals: list[Goal]) -> tuple[set[str], set[str]]:
    """Numbers of the products of the report and the feedback split."""
    by_number = {product.asin: product for product in products}
    askable = {goal.product for goal in goals if attainable(goal, by_number[goal.product])}
    of_paper = {goal.product for goal in goals[:PAPER_SESSIONS]}
    report: set[str] = set()
    feedback: set[str] = set()
    # Those of the paper's sessions come first: they must be in the report split.
    for group in sorted(
        groups(product for product in products if product.instruction),
        key=lambda group: not any(product.asin in of_paper for product in group),
    ):
        numbers = {product.asin for product in group}
        if numbers & of_paper or (numbers <= askable and len(report | numbers) <= REPORT_PRODUCTS):
            report |= numbers
        elif numbers <= askable and len(feedback | numbers) <= FEEDBACK_PRODUCTS:
            feedback |= numbers
    return report, feedback
