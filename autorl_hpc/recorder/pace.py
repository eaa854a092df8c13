"""How often something may be looked at, by what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable

WALL_SHARE = 0.25
"""Of the time, that a look may take by the clock: on a slow file system it takes little CPU, but a server's time."""


class Pace:
    """A share of one core, with some credit for bursts: what is saved while nothing happens may be spent at once.

    Args:
        share: of a core, over time.
        burst_s: CPU seconds that can be saved up; half of them are there at the start.
        least_s, most_s: bounds of a pause.
        cpu: CPU seconds of the thread that looks.
    """

    def __init__(
        self,
        share: float,
        burst_s: float,
        least_s: float,
        most_s: float,
        now: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self.share, self.burst_s, self.least_s, self.most_s = share, burst_s, least_s, most_s
        self.credit_s = burst_s / 2
        self._now, self._cpu = now, cpu
        self._at = self._begun = now()
        self._used = 0.0

    def begin(self) -> None:
        """A look begins."""
        self._begun, self._used = self._now(), self._cpu()
        self.credit_s = min(self.burst_s, self.credit_s + self.share * (self._begun - self._at))
        self._at = self._begun

    def end(self) -> float:
        """A look has ended; seconds to wait for the next one."""
        self.credit_s -= self._cpu() - self._used
        pause_s = max(self.least_s, (self._now() - self._begun) * (1 / WALL_SHARE - 1))
        if self.credit_s < 0:
            pause_s = max(pause_s, -self.credit_s / self.share)
        return min(pause_s, self.most_s)


class Leavings:
    """What all other threads of this process leave of a share of a core, for one that can wait.

    So the sum stays below the share, whoever of the others needs how much, as long as they leave `least`.

    Args:
        whole: of a core, for the whole process.
        least, most: bounds of what is left.
        window_s: over which the others' use is averaged, with exponentially falling weight.
        process_cpu, own_cpu: CPU seconds of the process, and of the thread that asks.
    """

    def __init__(
        self,
        whole: float,
        least: float,
        most: float,
        window_s: float,
        now: Callable[[], float] = time.monotonic,
        process_cpu: Callable[[], float] = time.process_time,
        own_cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self.whole, self.least, self.most, self.window_s = whole, least, most, window_s
        self._now, self._process_cpu, self._own_cpu = now, process_cpu, own_cpu
        self._at, self._others_s = now(), process_cpu() - own_cpu()
        self._rate = whole

    def share(self) -> float:
        """The share of a core that is left now."""
        at, others_s = self._now(), self._process_cpu() - self._own_cpu()
        gap_s = at - self._at
        if gap_s > 0:
            rate = max(0.0, others_s - self._others_s) / gap_s
            self._rate += (rate - self._rate) * min(1.0, gap_s / self.window_s)
            self._at, self._others_s = at, others_s
        return min(self.most, max(self.least, self.whole - self._rate))


class Allowance:
    """`burst` of something at once, then one every `every_s`."""

    def __init__(self, burst: int, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.burst, self.every_s, self._now = burst, every_s, now
        self._left, self._at = float(burst), now()

    def left(self) -> bool:
        """Whether one more is allowed."""
        now = self._now()
        self._left, self._at = min(float(self.burst), self._left + (now - self._at) / self.every_s), now
        return self._left >= 1

    def take(self) -> None:
        """One was taken, allowed or not."""
        self._left = max(0.0, self._left - 1)
