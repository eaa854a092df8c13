"""Episodes as token sequences: prompts and the policy's own tokens, merged where one turn's prompt goes on from the turn before.

Numpy alone. Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

LEAST_SHARED = 16
"""Tokens that a sequence must save to stand behind a beginning with others."""
LEAST_TOGETHER = 12
"""Sequences of a kind from which on their beginning is computed once: each kind has attention of its own, whose launches cost more than
few copies of a beginning (pairs on an H200: 40,100 tokens/s shared, 67,800 each by itself; one large kind: 273,500 and 84,900)."""


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


class Group(NamedTuple):
    """Sequences behind one copy of the beginning that they share: `shared` tokens, then `number` times `length`, padded on the right.
    Without a common beginning `shared` is 0."""

    shared: int
    number: int
    length: int

    @property
    def tokens(self) -> int:
        return self.shared + self.number * self.length


class Pack(NamedTuple):
    """A micro-batch: groups one after the other, all [t].

    Attributes:
        ids: token ids, int64.
        own: whether a token is to be learned from, bool; never the first one of a sequence, which nothing comes before.
        logps: what the sampler gave the policy's tokens, float32.
        advantages: of each token's episode, float32.
        places: of each token in its own sequence, int64.
    """

    ids: np.ndarray
    own: np.ndarray
    logps: np.ndarray
    advantages: np.ndarray
    places: np.ndarray
    groups: tuple[Group, ...]

    @property
    def learned(self) -> int:
        """Tokens that weigh something."""
        return int((self.own & (self.advantages != 0)).sum())


def packs(sequences: Sequence[Tokens], tokens: int, pad: int, *, shared: bool = True) -> list[Pack]:
    """The sequences as micro-batches of at most so many tokens with their padding, but for a longer sequence.

    Few-shot examples are most of an episode's tokens, and the same in all episodes of a kind: with `shared` they are computed
    once for all that fit. Else each micro-batch is one group without a common beginning.
    """
    grouped: list[tuple[list[Tokens], int]] = []
    for members, common in _kinds(sequences) if shared else [(list(sequences), 0)]:
        grouped += _groups(members, common, tokens)
    batches: list[list[tuple[list[Tokens], int]]] = []
    size = 0
    for members, common in grouped:
        more = _tokens(members, common)
        if batches and shared and size + more <= tokens:
            batches[-1].append((members, common))
            size += more
        else:
            batches.append([(members, common)])
            size = more
    return [_pack(batch, pad) for batch in batches]


def same_beginning(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two sequences share at their beginnings."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(np.argmax(differ)) if differ.any() else length


def _kinds(sequences: Sequence[Tokens]) -> list[tuple[list[Tokens], int]]:
    """Many sequences with a beginning in common, and its length; last, the others, with 0. A beginning ends before the token
    that comes right before the first one that is learned."""
    found: list[tuple[list[Tokens], int]] = []
    kind: list[Tokens] = []
    common = 0
    # In the order of their ids those that share the most are neighbours.
    for one in sorted(sequences, key=lambda one: one.ids.astype(">i4").tobytes()):
        least = max(0, int(np.argmax(one.own)) - 1 if one.own.any() else len(one.ids) - 1)
        shares = min(common, least, same_beginning(kind[-1].ids, one.ids)) if kind else 0
        if kind and shares * len(kind) - common * (len(kind) - 1) >= LEAST_SHARED:
            kind, common = [*kind, one], shares
            continue
        found += [(kind, common)] if kind else []
        kind, common = [one], least
    found += [(kind, common)] if kind else []
    alone = [one for members, _ in found if len(members) < LEAST_TOGETHER for one in members]
    return [each for each in found if len(each[0]) >= LEAST_TOGETHER] + ([(alone, 0)] if alone else [])


def _groups(members: Sequence[Tokens], common: int, tokens: int) -> list[tuple[list[Tokens], int]]:
    """Groups of like length, the longest first, each at most so many tokens with its padding."""
    groups: list[tuple[list[Tokens], int]] = []
    for one in sorted(members, key=lambda one: -len(one.ids)):
        if groups and _tokens([*groups[-1][0], one], common) <= tokens:
            groups[-1][0].append(one)
        else:
            groups.append(([one], common))
    return groups


def _tokens(members: Sequence[Tokens], common: int) -> int:
    return common + len(members) * (max(len(one.ids) for one in members) - common)


def _pack(groups: Sequence[tuple[Sequence[Tokens], int]], pad: int) -> Pack:
    total = sum(_tokens(members, common) for members, common in groups)
    ids, places = np.full(total, pad, np.int64), np.zeros(total, np.int64)
    own, logps, advantages = np.zeros(total, bool), np.zeros(total, np.float32), np.zeros(total, np.float32)
    made = []
    at = 0
    for members, common in groups:
        length = max(len(one.ids) for one in members) - common
        ids[at : at + common] = members[0].ids[:common]
        places[at : at + common] = np.arange(common)
        at += common
        for one in members:
            rest = len(one.ids) - common
            ids[at : at + rest], own[at : at + rest] = one.ids[common:], one.own[common:]
            logps[at : at + rest], advantages[at : at + rest] = one.logps[common:], one.advantage
            places[at : at + length] = np.arange(common, common + length)
            own[at] = False
            at += length
        made.append(Group(common, len(members), length))
    return Pack(ids, own, logps, advantages, places, tuple(made))
