"""Swaps: a warm engine takes in checkpoint after checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from autorl_hpc.grading.evaluate import prompt_tokens
from autorl_hpc.states import Split
from autorl_hpc.tasks.heldout import load_shots
from gpubench.cold import forget
from gpubench.figures import Figures
from gpubench.world import World

if TYPE_CHECKING:
    from autorl_hpc.rollouts.engine import ServingEngine

PROMPTS = 64
"""Asked before and after a swap. They share the recipe's beginning, so that a stale prefix cache would show."""

COLD_ROUNDS = 3
STAYED = 0.05
"""Share of a file's pages in memory above which a reading is not called cold."""


def measure(world: World, figures: Figures) -> None:
    """Loads and swaps by what was in memory before; and that the first checkpoint answers as before when it comes back."""
    options = world.options
    science = world.science(options.static_task)
    engine = world.engine(science)
    if world.engine_start_s is not None:
        figures.show("start of the engine, once", world.engine_start_s, "s")
    shots = load_shots(world.root, science.task, science.recipe)
    items = world.bench.items(science, Split.REPORT)[:PROMPTS]
    prompts = [prompt_tokens(engine, science.recipe, shots, item.question) for item in items]
    sampling = science.recipe.sampling.model_copy(update={"max_new_tokens": min(64, science.recipe.sampling.max_new_tokens)})  # fmt: skip

    def answers() -> list[str]:
        return [answer.text for answer in engine.generate(prompts, sampling, science.seed)]

    _load(engine, world.base, world.base_hash)
    other = world.variants.make(0, strong=True)
    first = answers()
    _load(engine, other.folder, other.content_hash)
    between = answers()
    _load(engine, world.base, world.base_hash)
    again = answers()
    changed = sum(a != b for a, b in zip(first, between, strict=True))
    equal = sum(a == b for a, b in zip(first, again, strict=True))
    what = "A, B, A: answers of the second A equal to the first's"
    if changed:
        note = f"{equal} of {len(first)}; B's differ from A's in {changed}"
        figures.show(what, 100.0 * equal / len(first), "%", above=100.0, note=note)
    else:
        figures.missing(what, "this model answers the same as B: nothing is shown")
    rows: dict[str, list[tuple[float, float, float]]] = {"warm": [], "prefetched": [], "cold": []}
    stayed = 0.0
    for number in range(options.rounds):
        made = world.variants.make(100 + number)
        rows["warm"].append(_load(engine, made.folder, made.content_hash))
    for number in range(options.rounds if hasattr(engine, "prefetch") else 0):
        made = world.variants.make(200 + number)
        engine.prefetch(made.folder, made.content_hash)  # type: ignore[attr-defined]
        answers()  # the work that loading is hidden behind
        rows["prefetched"].append(_load(engine, made.folder, made.content_hash))
    for number in range(min(COLD_ROUNDS, options.rounds)):
        made = world.variants.make(300 + number)
        stayed = max(stayed, forget(made.folder))
        rows["cold"].append(_load(engine, made.folder, made.content_hash))
    names = {
        "warm": "from the page cache",
        "prefetched": "announced while 64 prompts were answered",
        "cold": "from the disk",
    }
    for kind, measured in rows.items():
        if not measured:
            figures.missing(f"swap, {names[kind]}", "this engine can't be told what comes next")
            continue
        note = f"{100 * stayed:.0f} % of the pages stayed in memory" if kind == "cold" else ""
        if kind == "cold" and stayed > STAYED:
            figures.missing(f"swap, {names[kind]}", f"the pages can't be dropped here: {note}")
            continue
        figures.show(f"load, {names[kind]}", [row[0] for row in measured], "s", note=note)
        figures.show(f"swap, {names[kind]}", [row[1] for row in measured], "s", below=0.5)
        figures.show(f"load and swap by the clock, {names[kind]}", [row[2] for row in measured], "s")


def _load(engine: ServingEngine, folder: Path, content_hash: str) -> tuple[float, float, float]:
    """Seconds of loading and of swapping as the engine tells them, and of both by the clock."""
    started = time.monotonic()
    loaded = engine.load(folder, content_hash)
    return loaded.load_s, loaded.swap_s, time.monotonic() - started
