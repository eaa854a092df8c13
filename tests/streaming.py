"""Engines that answer prompts one by one by a plan, in place of vLLM: see players.py for those that are asked in batches."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence

from players import Player

from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.engine import Answer


class StreamingPlayer(Player):
    """A `Streaming` engine: answers come from a thread of its own, each after a drawn delay, so in any order.

    Attributes:
        asked: the keys of each `ask`.
        breaks_at: after so many answers it delivers an exception instead.
    """

    def __init__(
        self,
        act: Callable[[str], str],
        *,
        template: bool = False,
        seed: int = 0,
        most_s: float = 0.0,
        breaks_at: int | None = None,
        speak: Callable[[int, str], str] | None = None,
    ) -> None:
        super().__init__(act, template=template)
        self.asked: list[list[int]] = []
        self.streams = 0
        self.breaks_at = breaks_at
        self._draw, self._most_s = random.Random(seed), most_s
        self.speak = speak or (lambda key, text: self.act(text))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        raise AssertionError("a streaming engine was asked for a batch")

    def stream(self, sampling: Sampling, seed: int, deliver: Callable[[int, Answer | Exception], None]) -> _Stream:
        self.streams += 1
        return _Stream(self, deliver)

    def delay_s(self) -> float:
        return self._draw.random() * self._most_s


class _Stream:
    def __init__(self, player: StreamingPlayer, deliver: Callable[[int, Answer | Exception], None]) -> None:
        self._player, self._deliver = player, deliver
        self._line: queue.PriorityQueue[tuple[float, int, str]] = queue.PriorityQueue()
        self._keys: set[int] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._player.asked.append([key for key, _ in prompts])
        for key, prompt in prompts:
            assert key >= 0 and key not in self._keys, f"the key {key} was used before"
            self._keys.add(key)
            self._line.put((time.monotonic() + self._player.delay_s(), key, bytes(prompt).decode("utf-8")))

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        answered = 0
        while not self._closed.is_set():
            try:
                at, key, text = self._line.get(timeout=0.01)
            except queue.Empty:
                continue
            if self._closed.wait(max(0.0, at - time.monotonic())):
                return
            if answered == self._player.breaks_at:
                self._deliver(-1, ZeroDivisionError("out of memory"))
                return
            answered += 1
            try:
                said = self._player.speak(key, text)
            except Exception as error:
                self._deliver(-1, error)
                return
            self._deliver(key, Answer(said, len(said.split()), "cut off" in said))
