"""Which of an engine's workers answers which prompt of a stream."""

from __future__ import annotations

from autorl_hpc.rollouts.engine import CONVERSATION

MOVES_ABOVE = 8
"""A conversation leaves its worker where that has more than twice the prompts of the one with least to do, and so many more."""


class Routes:
    """Of one stream. A new conversation goes to the worker with the fewest tokens to do, and stays there for its prefix cache.

    Not for several threads at once.
    """

    def __init__(self, workers: int, answer_tokens: int) -> None:
        """
        Args:
            answer_tokens: an answer's at most.
        """
        self._answer_tokens = answer_tokens
        self._tokens = [0] * workers
        self._asked: list[dict[int, int]] = [{} for _ in range(workers)]  # keys and tokens to do
        self._homes: dict[int, tuple[int, int]] = {}  # by conversation: a worker, and the tokens that it knows

    def give(self, key: int, length: int) -> int:
        """The worker for a prompt of `length` tokens; it counts as busy with it until `done`."""
        conversation = key // CONVERSATION
        least = self._tokens.index(min(self._tokens))
        number, known = self._homes.get(conversation, (least, 0))
        if len(self._asked[number]) > 2 * len(self._asked[least]) + MOVES_ABOVE:
            number, known = least, 0
        cost = max(0, length - known) + self._answer_tokens
        self._homes[conversation] = (number, length)
        self._asked[number][key] = cost
        self._tokens[number] += cost
        return number

    def done(self, number: int, key: int) -> None:
        """A worker answered."""
        self._tokens[number] -= self._asked[number].pop(key, 0)

    def busy(self) -> list[int]:
        """The workers that have something to answer."""
        return [number for number, asked in enumerate(self._asked) if asked]
