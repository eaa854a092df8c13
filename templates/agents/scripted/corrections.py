"""What an expert would have said where the model went: an episode of the model's as sequences to learn from.

For the household expert, which goes on from any state. Torch is not needed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from batches import Spoken, Tokens, merged
from words import Words

if TYPE_CHECKING:
    from collect import Expert

MOST_BRANCHES = 6  # of an episode: where it goes round in circles, the same would be said again and again


def corrected(
    episode: Any, goal: Mapping[str, Any], adviser: Expert, words: Words, most: int, draw: random.Random
) -> tuple[list[Tokens], int, int]:
    """An episode of the model's: its own sequence, in which the words that the expert would have said, too, are learned, and for some
    of the other turns the expert's words behind the same prompt. What was done otherwise is context, and not learned.
    Sequences of at most `most` tokens; the turns that the expert was asked at, and those in which it said something else.
    """
    turns = [(turn.action, turn.observation) for turn in episode.transcript.turns]
    spoken: list[Spoken] = []
    branches: list[Spoken] = []
    asked = other = 0
    for place, said in enumerate(episode.completions):
        advice = adviser.act(goal, episode.transcript.first, turns[:place]) if place < len(turns) else None
        agrees = advice is not None and advice == turns[place][0]
        spoken.append(Spoken(said.prompt, said.ids, np.zeros(len(said.ids), np.float32), agrees))
        asked += advice is not None
        if advice is not None and not agrees:
            other += 1
            ids = np.asarray(words.plain(f" {advice}") + words.ending(chat=False), np.int32)
            branches.append(Spoken(said.prompt, ids, np.zeros(len(ids), np.float32)))
    if len(branches) > MOST_BRANCHES:
        branches = draw.sample(branches, MOST_BRANCHES)
    found = merged(spoken, most, 1.0)
    for branch in branches:
        found += merged([branch], most, 1.0)
    return found, asked, other
