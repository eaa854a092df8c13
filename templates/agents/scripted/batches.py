"""Episodes as token sequences: prompts and the policy's own tokens, merged where one turn's prompt goes on from the turn before.

Numpy alone. Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Spoken(NamedTuple):
    """One turn: what was asked and what the policy said, in token ids; `logps` of the sampled ones.

    Attributes:
        taught: whether these words are to be learned from.
    """

    prompt: np.ndarray
    ids: np.ndarray
    logps: np.ndarray
    taught: bool = True


class Tokens(NamedTuple):
    """One sequence.

    Attributes:
        ids: token ids, int32.
        own: whether a token is the policy's, bool.
        logps: what the sampler gave the policy's tokens, 0 elsewhere, float32.
        advantage: of the episode; what each of its tokens weighs.
    """

    ids: np.ndarray
    own: np.ndarray
    logps: np.ndarray
    advantage: float = 0.0


def merged(turns: Iterable[Spoken], most: int, advantage: float = 0.0) -> list[Tokens]:
    """The turns of one episode as few sequences. Turn by turn it is the same, only that a common beginning is computed once.

    A prompt that does not go on, token by token, from the sequence so far (a window of history, another cut into tokens)
    begins a new one. Tokens above `most` are not trained on: a sequence is cut there.
    """
    found: list[Tokens] = []
    ids = np.empty(0, np.int32)
    own = np.empty(0, bool)
    logps = np.empty(0, np.float32)

    def close() -> None:
        if own[:most].any():
            found.append(Tokens(ids[:most], own[:most], logps[:most], advantage))

    for turn in turns:
        if len(ids) and len(turn.prompt) >= len(ids) and np.array_equal(turn.prompt[: len(ids)], ids):
            rest = turn.prompt[len(ids) :]
        else:
            close()
            ids, own, logps, rest = ids[:0], own[:0], logps[:0], turn.prompt
        ids = np.concatenate([ids, rest, turn.ids]).astype(np.int32)
        own = np.concatenate([own, np.zeros(len(rest), bool), np.full(len(turn.ids), turn.taught)])
        logps = np.concatenate([logps, np.zeros(len(rest), np.float32), turn.logps]).astype(np.float32)
    close()
    return found


def micro_batches(sequences: Sequence[Tokens], tokens: int) -> list[list[Tokens]]:
    """Batches of like length, each at most so many tokens with its padding, the longest first."""
    batches: list[list[Tokens]] = []
    for sequence in sorted(sequences, key=lambda one: -len(one.ids)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].ids) <= tokens:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    return batches


def padded(batch: Sequence[Tokens], pad: int) -> dict[str, np.ndarray]:
    """A batch as arrays, padded on the right: ids [n, t] int64; own [n, t]; logps [n, t]; advantages [n]."""
    width = max(len(one.ids) for one in batch)
    ids = np.full((len(batch), width), pad, np.int64)
    own = np.zeros((len(batch), width), bool)
    logps = np.zeros((len(batch), width), np.float32)
    for row, one in enumerate(batch):
        ids[row, : len(one.ids)] = one.ids
        own[row, : len(one.ids)], logps[row, : len(one.ids)] = one.own, one.logps
    advantages = np.asarray([one.advantage for one in batch], np.float32)
    return {"ids": ids, "own": own, "logps": logps, "advantages": advantages}
