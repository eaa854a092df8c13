"""Games: the suite's playground with its engine, the two bounds of it, and the reference's loop on some games."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autorl_hpc.grading.evaluate import Playground, source_of
from autorl_hpc.records.run import Science
from autorl_hpc.rollouts.engine import Answer
from autorl_hpc.states import Split
from autorl_hpc.tasks.heldout import Item
from autorl_hpc.tasks.loader import load_task
from gpubench.figures import Figures
from gpubench.recorder import Replay, recorded
from gpubench.usage import Usage
from gpubench.world import World


@dataclass
class Played:
    """What the suite's side left: seconds, calls of the model, and what the reference's loop shall play."""

    wall_s: float
    calls: int
    games: int
    job: dict[str, Any]


def suite(world: World, figures: Figures) -> Played:
    """All games of the report split at once by the base model; then the engine without games, and games without an engine."""
    options = world.options
    science = _science(world)
    engine = world.engine(science)
    items = world.bench.items(science, Split.REPORT)[: options.games]
    engine.load(world.base, world.base_hash)
    recorder = recorded(engine)
    with Usage() as usage:
        wall, answers = _play(world, science, items, recorder)
    steps = int(_sum(answers, "steps"))
    asked = recorder.asked
    what = f"{science.task}, {len(items)} games x {science.recipe.max_steps} steps"
    wrote, read = sum(answer.tokens for _, answer in asked), sum(len(prompt) for prompt, _ in asked)
    cores = len(os.sched_getaffinity(0))
    figures.show(f"{what}, from cold worker processes", wall, "s", note=f"{steps} steps, {len(asked)} calls")
    figures.show(f"{what}: steps a second", steps / wall, "steps/s", note=f"{wrote} tokens written, {read} read")
    figures.show(f"{what}: won by the base model", _sum(answers, "reward"), "games")
    if (busy := usage.share()) is not None:
        figures.show(f"{what}: GPU busy, by NVML", 100 * busy, "%")
    played = Played(wall, len(asked), len(items), _job(world, science, items))

    other = world.variants.make(0)
    for folder, content in ((other.folder, other.content_hash), (world.base, world.base_hash)):
        engine.load(folder, content)  # there and back: nothing is left in the prefix cache, as before the run
    started = time.monotonic()
    told = engine.generate([prompt for prompt, _ in asked], science.recipe.sampling, science.seed)
    engine_s = time.monotonic() - started
    note = f"{sum(answer.tokens for answer in told) / engine_s:,.0f} tokens/s"
    figures.show("the same prompts in one call, without environments", engine_s, "s", note=note)
    environments_s, answers = _play(world, science, items, Replay(recorder))
    again = _sum(answers, "steps")
    figures.show(
        f"the same actions without an engine, on {cores} cores, from cold worker processes",
        environments_s,
        "s",
        note=f"{again / environments_s:,.0f} steps/s, {again:.0f} steps",
    )
    started = time.monotonic()
    for text in recorder.texts:
        engine.encode(text)
    figures.show("their texts to tokens once more, in one thread", time.monotonic() - started, "s")
    bound = max(engine_s, environments_s)
    name = "the engine" if engine_s >= environments_s else "the environments"
    figures.show(f"what bounds it: {name}; the bound as a share of the run's time", 100 * bound / wall, "%")
    return played


def reference(figures: Figures, played: Played, told: Sequence[dict[str, Any]]) -> None:
    """The reference's loop, measured on some games, and as long as it would need for the calls of all."""
    games = [line for line in told if line.get("event") == "played"]
    if not games:
        figures.missing("the reference's loop", "the process told of no game")
        return
    stock = "stock environment" if played.job["stock"] else "the task's own environment: there is no stock one"
    seconds, calls = sum(game["seconds"] for game in games), sum(game["calls"] for game in games)
    asked = sum(game["asked_s"] for game in games)
    figures.show(
        f"the reference's loop, a game ({stock})",
        [game["seconds"] for game in games],
        "s",
        note=f"{calls} calls, {100 * asked / seconds:.0f} % of the time in the engine",
    )
    for problem in {game["problem"] for game in games if game["problem"]}:
        figures.say(f"a game ended early: {problem}")
    if not calls:
        return
    whole = seconds / calls * played.calls
    note = f"measured on {len(games)} of {played.games} games, {calls} of {played.calls} calls; engine's start left out"
    figures.show("the reference's loop for all of them, extrapolated by calls", whole, "s", note=note)
    figures.show("speed against the reference's loop", whole / played.wall_s, "x", above=20)


def _science(world: World) -> Science:
    science = world.science(world.options.game_task)
    if world.options.steps is None:
        return science
    return science.model_copy(update={"recipe": science.recipe.model_copy(update={"max_steps": world.options.steps})})


def _play(world: World, science: Science, items: list[Item], engine: Any) -> tuple[float, list[list[Answer]]]:
    """Seconds from nothing: worker processes, libraries, translations of the games and all."""
    playground = Playground(world.root)
    started = time.monotonic()
    try:
        answers = playground.play(science, items, engine)
        return time.monotonic() - started, answers
    finally:
        playground.close()


def _sum(answers: list[list[Answer]], name: str) -> float:
    """Over all episodes, of what the playground tells of each."""
    return sum(float(json.loads(drawn[0].text)[name]) for drawn in answers)


def _job(world: World, science: Science, items: list[Item]) -> dict[str, Any]:
    source = source_of(world.root, load_task(science.task), science)
    wanted = max(1, min(world.options.reference_games, len(items)))
    chosen = items[:: max(1, len(items) // wanted)][:wanted]
    return {
        "kind": "play",
        "goals": [{**item.data, "id": item.id, "question": item.question} for item in chosen],
        "sampling": science.recipe.sampling.model_dump(mode="json"),
        "max_steps": science.recipe.max_steps,
        "dtype": science.recipe.dtype,
        "data": str(source.data),
        "file": str(source.file),
        "name": source.name,
        "options": dict(source.options),
        "stock": science.task == "alfworld",
    }
