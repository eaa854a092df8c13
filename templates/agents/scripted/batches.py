"""Episodes as token sequences: prompts and the policy's own tokens, merged where one turn's prompt goes on from the turn before.

Numpy alone. Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

ROW_TOKENS = 4096
"""Of a row with several sequences: attention looks at all pairs of a row's tokens, allowed or not."""
LEAST_SAVED = 16
"""Tokens that a sequence must save to stand in a row with others."""
MASKED_WIDTH = 16


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


class Row(NamedTuple):
    """One row of a batch: a sequence, or several behind one copy of the beginning that they share.

    Attributes:
        ids: token ids, int32, [t]: the beginning, then what is left of one sequence after the other.
        own: whether a token is the policy's, bool, [t]; never the first one of a part, which nothing here comes right before.
        logps: what the sampler gave the policy's tokens, float32, [t].
        advantages: of each token's episode, float32, [t].
        places: of each token in its own sequence, int32, [t].
        parts: 0 in the beginning, else the number of the sequence, int32, [t]. A token looks at its own part and at part 0.
    """

    ids: np.ndarray
    own: np.ndarray
    logps: np.ndarray
    advantages: np.ndarray
    places: np.ndarray
    parts: np.ndarray


def rows_of(sequences: Sequence[Tokens], *, shared: bool = True, most: int = ROW_TOKENS) -> list[Row]:
    """The sequences as rows. Those with a beginning in common stand in one row of at most so many tokens, wherever that saves some.

    Few-shot examples are most of an episode's tokens, and the same in all episodes of a kind. In the order of their ids those
    that share the most are neighbours.
    """
    if not shared:
        return [_row([one], 0) for one in sequences]
    found: list[Row] = []
    row: list[Tokens] = []
    common = total = 0
    for one in sorted(sequences, key=lambda one: one.ids.astype(">i4").tobytes()):
        least = int(np.argmax(one.own)) - 1 if one.own.any() else len(one.ids) - 1
        if row:
            shares = max(0, min(common, least, same_beginning(row[-1].ids, one.ids)))
            joint = total + len(one.ids) + (common * (len(row) - 1)) - shares * len(row)
            if joint <= min(most, total + len(one.ids) - LEAST_SAVED):
                row, common, total = [*row, one], shares, joint
                continue
            found.append(_row(row, common))
        row, common, total = [one], max(0, least), len(one.ids)
    return [*found, _row(row, common)] if row else found


def same_beginning(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two sequences share at their beginnings."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(np.argmax(differ)) if differ.any() else length


def _row(sequences: Sequence[Tokens], common: int) -> Row:
    if len(sequences) == 1:
        common = len(sequences[0].ids)
    first = sequences[0]
    cuts = [(0, first, slice(None, common))] + [
        (number, one, slice(common, None)) for number, one in enumerate(sequences, 1) if len(one.ids) > common
    ]
    return Row(
        np.concatenate([one.ids[cut] for _, one, cut in cuts]).astype(np.int32),
        np.concatenate([one.own[cut] for _, one, cut in cuts]),
        np.concatenate([one.logps[cut] for _, one, cut in cuts]).astype(np.float32),
        np.concatenate([np.full(len(one.ids[cut]), one.advantage, np.float32) for _, one, cut in cuts]),
        np.concatenate([np.arange(len(one.ids), dtype=np.int32)[cut] for _, one, cut in cuts]),
        np.concatenate([np.full(len(one.ids[cut]), number, np.int32) for number, one, cut in cuts]),
    )


def micro_batches(rows: Sequence[Row], tokens: int) -> list[list[Row]]:
    """Batches of like length, each at most so many tokens with its padding, the longest first."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda one: -len(one.ids)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].ids) <= tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def padded(batch: Sequence[Row], pad: int) -> dict[str, np.ndarray]:
    """A batch as arrays [n, t] by the names of `Row`, padded on the right; ids, places and parts int64. Where some row is packed the
    width is one that attention with a mask likes."""
    width = max(len(one.ids) for one in batch)
    if any(one.parts[-1] for one in batch):
        width = -(-width // MASKED_WIDTH) * MASKED_WIDTH
    fill = {"ids": pad, "own": False, "logps": 0.0, "advantages": 0.0, "places": 0, "parts": -1}
    kinds = {"own": bool, "logps": np.float32, "advantages": np.float32}
    arrays = {name: np.full((len(batch), width), value, kinds.get(name, np.int64)) for name, value in fill.items()}
    for number, one in enumerate(batch):
        for name, array in arrays.items():
            array[number, : len(one.ids)] = getattr(one, name)
    return arrays
