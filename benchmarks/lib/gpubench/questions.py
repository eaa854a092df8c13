"""A split of questions: the suite's warm engine, a new engine a submission, and one bare call in a living engine."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from autorl_hpc.grading.evaluate import prompt_tokens
from autorl_hpc.states import Split
from autorl_hpc.tasks.heldout import load_shots
from gpubench.figures import Figures
from gpubench.starting import Started
from gpubench.usage import Usage
from gpubench.world import World


@dataclass
class Warm:
    """What the suite's side left: what is asked, for the reference; and its figures."""

    job: dict[str, Any]
    wall_s: list[float] = field(default_factory=list)
    generate_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def items(self) -> int:
        return len(self.job["prompts"])


def suite(world: World, figures: Figures) -> Warm:
    """Evaluations of one checkpoint after the other, each from its files to its outcomes, as the daemon makes them."""
    options = world.options
    science = world.science(options.static_task)
    engine = world.engine(science)
    shots = load_shots(world.root, science.task, science.recipe)
    items = world.bench.items(science, Split.REPORT)[: options.items]
    prompts = [prompt_tokens(engine, science.recipe, shots, item.question) for item in items]
    sampling = science.recipe.sampling.model_dump(mode="json")
    warm = Warm(
        {
            "kind": "generate",
            "prompts": prompts,
            "sampling": sampling,
            "seed": science.seed,
            "repeat": 1,
            "dtype": science.recipe.dtype,
        }
    )
    what = f"{science.task}, {len(items)} items"
    for number in range(options.evaluations + 1):
        made = world.variants.make(600 + number)
        started = time.monotonic()
        with Usage() as usage:
            answers = world.bench.answer(science, made.folder, made.content_hash, Split.REPORT, limit=len(items))
            scored = world.bench.rate(answers)
        wall, timings = time.monotonic() - started, scored.evaluation.timings
        tokens = sum(outcome.tokens for outcome in scored.outcomes)
        told = ", ".join(f"{name} {value:.2f}" for name, value in timings.model_dump().items() if value)
        if number == 0:
            figures.show(f"{what}: first evaluation by a new engine", wall, "s", note=told)
            continue
        figures.say(f"evaluation {number}: {wall:.2f} s ({told}), {tokens} tokens, score {scored.evaluation.score}")
        warm.wall_s.append(wall)
        warm.generate_s.append(timings.generate_s)
        warm.tokens.append(tokens)
        busy = usage.share()
    figures.show(f"{what}: load, swap, generate, score by a warm engine", warm.wall_s, "s")
    figures.show(f"{what}: its generation alone", warm.generate_s, "s")
    rates = [tokens / wall for tokens, wall in zip(warm.tokens, warm.generate_s, strict=True)]
    figures.show(f"{what}: tokens a second while generating", rates, "tokens/s")
    if busy is not None:
        figures.show(f"{what}: GPU busy during the last evaluation, by NVML", 100 * busy, "%")
    return warm


def fresh(figures: Figures, warm: Warm, started: Started) -> None:
    """A process that made an engine, asked everything in one call, and ended: the reference's way."""
    what = "a new engine for the submission, from its process's start to its end"
    if started.wall_s is None:
        figures.missing(what, started.problem or "it did not end in time")
        return
    parts = {k: v for k, v in started.parts.items() if isinstance(v, float)}
    told = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
    figures.show(what, started.wall_s, "s", note=told)
    own = statistics.median(warm.wall_s)
    answered = started.parts.get("until_done_s")
    note = "" if answered is None else f"{answered / own:.1f} x if its time ends with its answers, not with its process"
    figures.show("speed against a new engine a submission", started.wall_s / own, "x", above=30, note=note)


def living(figures: Figures, warm: Warm, parts: dict[str, Any], told: list[dict[str, Any]]) -> None:
    """Calls of an engine that stays up, by nothing but its own `generate`: what the hardware allows."""
    calls = [call for call in told if call.get("event") == "generated"]
    if calls and "engine_s" in parts:
        until = parts["import_s"] + parts["engine_s"] + calls[0]["seconds"]
        ratio = until / statistics.median(warm.wall_s)
        note = f"import {parts['import_s']:.1f}, engine {parts['engine_s']:.1f}: {ratio:.1f} x the warm engine's time"
        figures.show("start of a new engine and first answers, as vLLM's cache was found", until, "s", note=note)
    if len(calls) < 2:
        figures.missing("one bare call of generate in a living engine", "the process told no second call")
        return
    seconds = [float(call["seconds"]) for call in calls[1:]]
    tokens = [int(call["tokens"]) for call in calls[1:]]
    figures.show("one bare call of generate in a living engine", seconds, "s", note="the prefix cache emptied before")
    bare = statistics.median(t / s for t, s in zip(tokens, seconds, strict=True))
    figures.show("its tokens a second", [t / s for t, s in zip(tokens, seconds, strict=True)], "tokens/s")
    own = statistics.median(t / s for t, s in zip(warm.tokens, warm.generate_s, strict=True))
    whole = statistics.median(t / s for t, s in zip(warm.tokens, warm.wall_s, strict=True))
    figures.show("throughput of the suite's generation against it, in tokens", 100 * own / bare, "%", above=90)
    figures.show(
        "the same with load, swap and scoring",
        100 * whole / bare,
        "%",
        note=f"in items a second: {100 * statistics.median(seconds) / statistics.median(warm.wall_s):.0f} %",
    )
