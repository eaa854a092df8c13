"""Demonstrations for interactive tasks: an expert plays training goals, and what it won becomes token sequences.

Run as `python code/collect.py --model MODEL --out output/traces`. Needs no GPU. What earlier calls have written is kept, so
an interrupted collection goes on where it was. The expert is chosen by what the goals hold.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import episodes
import household
import machine
import numpy as np
import shopping
from autorl_rollouts.pool import Lost, Pool
from batches import Spoken, Tokens, merged
from words import Words

MOST_GOALS = 3000
PART_GOALS = 200  # goals between two files
LIVE_A_WORKER = 2  # episodes under way: one is stepped while the other waits for the expert
STRAY_SHARE = 0.1
"""Of the household's turns: something else is done than the expert says, which is not learned. A model that saw nothing but faultless
play would not know what to do after its own first fault."""


class Expert(Protocol):
    """Plays by what a player sees."""

    def act(self, goal: Mapping[str, Any], first: str, turns: Sequence[tuple[str, str]]) -> str | None:
        """The next words, None to give up."""
        ...


def expert_for(goals: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> Expert:
    """The expert for such goals."""
    goal = goals[0]
    if "pddl_problem" in goal:
        return household.Expert(household.prior_of(goals))
    if "wanted" in goal:
        return shopping.Shopper()
    if "walkthrough" in goal:
        return shopping.Walkthrough()
    recipe = meta["recipe"]
    return shopping.Searcher(int(recipe["max_steps"]), str(recipe["prompt"]).rstrip().endswith("Thought:"))


@dataclass
class _Live:
    goal: Mapping[str, Any]
    draw: random.Random
    first: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)
    spoken: list[Spoken] = field(default_factory=list)


class Play:
    """Episodes of an expert, many at once, on a pool of environments; `words` makes the tokenizer, asked when the first game has begun."""

    def __init__(self, expert: Expert, pool: Pool, words: Callable[[], Words], recipe: Mapping[str, Any]) -> None:
        self._expert, self._pool, self._words = expert, pool, words
        self._steps = int(recipe["max_steps"])
        self._live = LIVE_A_WORKER * pool.size

    def of(self, goals: Sequence[Mapping[str, Any]], *, until: float) -> Iterator[tuple[str, float, list[Spoken]]]:
        """Goal, reward and turns of each episode, as they end; no episode begins after the moment `until`."""
        waiting = list(reversed(goals))
        live: dict[int, _Live] = {}
        tickets: dict[int, int] = {}

        def begin(slot: int) -> None:
            if waiting and time.monotonic() < until:
                goal = waiting.pop()
                live[slot] = _Live(goal, random.Random(f"{machine.seed()}/{goal['id']}"))
                tickets[self._pool.begin(slot, live[slot].goal, 0)] = slot

        for slot in range(self._live):
            begin(slot)
        while tickets:
            event = self._pool.next()
            if event is None:
                continue
            slot = tickets.pop(event.ticket, -1)
            if isinstance(event, Lost):  # the goals under way on this worker are left out
                for gone in [n for n in event.slots if n in live]:
                    tickets = {ticket: at for ticket, at in tickets.items() if at != gone}
                    del live[gone]
                    begin(gone)
                continue
            if slot < 0:
                continue
            one = live[slot]
            over = event.error is not None or event.done or not self._go_on(one, slot, event, tickets)
            if over:
                yield str(one.goal["id"]), 0.0 if event.error else event.reward, one.spoken
                del live[slot]
                begin(slot)

    def _go_on(self, one: _Live, slot: int, event: Any, tickets: dict[int, int]) -> bool:
        """Takes in an answer and acts on it; False where the episode ends here."""
        if one.first is None:
            one.first = event.observation
        else:
            one.turns.append((event.action, event.observation))
        said = self._expert.act(one.goal, one.first, one.turns) if len(one.turns) < self._steps else None
        if said is None or event.prompt is None:
            return False
        stray = self._stray(one)
        said, taught = (said, True) if stray is None else (stray, False)
        plain, words = isinstance(event.prompt, str), self._words()
        asked = words.encode(event.prompt) if plain else words.chat(event.prompt)
        chat = asked is not None and not plain
        if asked is None:
            asked = words.encode("\n\n".join(message["content"] for message in event.prompt))
        answer = words.plain(said if chat else f" {said}") + words.ending(chat=chat)
        nothing = np.zeros(len(answer), np.float32)
        one.spoken.append(Spoken(np.asarray(asked, np.int32), np.asarray(answer, np.int32), nothing, taught))
        tickets[self._pool.act(slot, said, last=len(one.turns) + 1 >= self._steps)] = slot
        return True

    def _stray(self, one: _Live) -> str | None:
        """What is done in place of the expert's word, now and then; never at the beginning, nor where few steps are left."""
        if not isinstance(self._expert, household.Expert) or not one.turns or 2 * len(one.turns) > self._steps:
            return None
        return self._expert.stray(one.first or "", one.draw) if one.draw.random() < STRAY_SHARE else None


def write_part(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A packed file of JSON lines, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with gzip.open(partial, "wt", encoding="ascii", compresslevel=1) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    partial.rename(path)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of all parts."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="ascii") as file:
            rows += [json.loads(line) for line in file]
    return rows


def read_traces(folder: Path) -> list[Tokens]:
    """The sequences of all parts of a collection."""
    return [
        Tokens(np.asarray(row["ids"], np.int32), np.asarray(row["own"], bool), np.zeros(len(row["ids"]), np.float32))
        for row in read_rows(folder)
        if row["ids"]
    ]


def rows_of(goal: str, reward: float, sequences: Sequence[Tokens]) -> list[dict[str, Any]]:
    """An episode's sequences as rows; one without any, where it was not won, so that the goal is not played again."""
    if reward < 1.0 or not sequences:
        return [{"goal": goal, "reward": reward, "ids": [], "own": []}]
    return [
        {"goal": goal, "reward": reward, "ids": one.ids.tolist(), "own": one.own.astype(int).tolist()}
        for one in sequences
    ]


def main() -> None:
    """Collects until the time is up or all goals are played."""
    given = machine.arguments("demonstrations by an expert", goals={"type": int, "default": MOST_GOALS})
    workspace = Path(os.environ["WORKSPACE"])
    meta = machine.read_meta(workspace)
    until = machine.deadline(workspace, meta, given.share)

    begun = time.monotonic()

    def load() -> Words:
        from transformers import AutoTokenizer

        return Words(AutoTokenizer.from_pretrained(given.model), [], meta["recipe"].get("stop") or [])

    loading = ThreadPoolExecutor(1).submit(load)  # while the goals are read and the workers start

    config = json.loads((given.model / "config.json").read_text(encoding="utf-8"))
    source = episodes.source_of(workspace, meta)
    goals, _ = episodes.chosen(source, given.goals, 0, machine.seed())
    expert = expert_for(goals, meta)
    given.out.mkdir(parents=True, exist_ok=True)
    rows = read_rows(given.out)
    played = {row["goal"] for row in rows}
    won = len({row["goal"] for row in rows if row["ids"]})
    left = [goal for goal in goals if str(goal["id"]) not in played]
    steps, before = 0, len(played)
    part: list[dict[str, Any]] = []

    def keep() -> None:
        if part:
            write_part(given.out / f"{len(played):06d}.jsonl.gz", part)
            part.clear()
        pace = {"games_per_s": round((len(played) - before) / (time.monotonic() - begun), 2), "workers": pool.size}
        print(json.dumps({"played": len(played), "won": won, "steps": steps, **pace}), flush=True)

    print(f"{len(left)} games to play, after {time.monotonic() - begun:.1f} s", flush=True)
    with Pool(source, episodes.workers_here(1)) as pool:
        for goal, reward, spoken in Play(expert, pool, loading.result, meta["recipe"]).of(left, until=until):
            if len(played) == before:
                print(f"the first one is over after {time.monotonic() - begun:.1f} s", flush=True)
            part += rows_of(goal, reward, merged(spoken, int(config["max_position_embeddings"])))
            played.add(goal)
            won += reward >= 1.0
            steps += len(spoken)
            if len(played) % PART_GOALS == 0:
                keep()
        keep()


if __name__ == "__main__":
    main()
