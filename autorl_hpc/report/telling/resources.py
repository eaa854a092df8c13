"""What a run used: GPUs, CPU, memory, disk and idle time, from the recorder's samples and the ledger's attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autorl_hpc.files.spans import Span, joined, seconds_of, without
from autorl_hpc.report.telling.used import Used

HOUR_S = 3600.0
IDLE_SHARE = 0.05
"""Of one core, and of each GPU: a shell that sleeps and an agent's program that waits for its driver use less, the
smallest training more."""

MOST_CORES = 10_000
"""No node has as many: a line that tells of more CPU time is damaged."""

LONGEST_GAP_S = 60.0
"""Samples come every few seconds; over a longer gap nobody looked, and nothing is said about it."""


@dataclass(frozen=True)
class Usage:
    """The samples of a run, taken together. Null: not measured.

    Attributes:
        attempts: when each attempt went on.
        sampled: attempts that have samples.
        gpus: by attempt, how many GPUs were seen; an attempt of which no sample tells is not in it.
        gpu_use: mean share of the time that kernels ran, over all GPUs.
        still: when neither a core nor a GPU was at work.
    """

    attempts: Mapping[int, Span] = field(default_factory=dict)
    sampled: frozenset[int] = frozenset()
    gpus: Mapping[int, int] = field(default_factory=dict)
    gpu_model: str | None = None
    gpu_use: float | None = None
    cpu_hours: float | None = None
    memory_peak_bytes: int | None = None
    disk_peak_bytes: int | None = None
    still: tuple[Span, ...] | None = None

    def gpu_hours(self, until_s: float = float("inf")) -> float | None:
        """GPU-hours that the agent had from the start to `until_s`: GPUs times time, at work or not. None: no GPU was seen."""
        if self._had is None:
            return None
        return sum([count * max(0.0, min(end, until_s) - begin) / HOUR_S for count, (begin, end) in self._had])

    @cached_property
    def _had(self) -> list[tuple[int, Span]] | None:
        """How many GPUs were seen, and from when to when. None: none was."""
        if not any(self.gpus.values()):
            return None
        return [(count, self.attempts[attempt]) for attempt, count in self.gpus.items() if attempt in self.attempts]

    def gpu_counts(self) -> str | None:
        """`4`; `1, 4` if attempts had different numbers; `0` if there was none; None: no sample tells."""
        return ", ".join(map(str, sorted(set(self.gpus.values())))) or None

    def idle_s(self, driver: Sequence[Span]) -> float | None:
        """Seconds in which neither a core nor a GPU was at work and no driver was waited for (`driver`: when one was)."""
        return None if self.still is None else seconds_of(without(self.still, driver))


@dataclass
class _Attempt:
    """What the samples of one attempt say; `cpu_s` is the most of them."""

    gpus: int | None = None
    cpu_s: float | None = None
    last: Used | None = None


def usage_of(samples: Sequence[Used], attempts: Mapping[int, Span], every: int = 1) -> Usage:
    """The samples of a run, taken together.

    Args:
        every: of a long run, only every so many-th sample is among them.
    """
    longest_gap_s = LONGEST_GAP_S * every
    seen: dict[int, _Attempt] = {}
    used = gpu_s = 0.0
    still: list[Span] = []
    cores_known = False
    for sample in samples:  # one pass: a long run has twenty thousand
        now_s, gpus, cpu_s = sample["elapsed_s"], sample.get("gpus"), sample.get("cpu_s")
        if cpu_s is not None and cpu_s > MOST_CORES * (now_s + LONGEST_GAP_S):
            cpu_s = None
        number = sample.get("attempt", 1)
        attempt = seen.get(number) or seen.setdefault(number, _Attempt())
        if gpus is not None and (attempt.gpus is None or len(gpus) > attempt.gpus):
            attempt.gpus = len(gpus)
        if cpu_s is not None and cpu_s > (attempt.cpu_s or 0.0):
            attempt.cpu_s = cpu_s
        before, attempt.last = attempt.last, sample
        if before is None or not 0 < (seconds := now_s - before["elapsed_s"]) <= longest_gap_s:
            continue
        shares = [share for gpu in gpus if (share := gpu.get("used_share")) is not None] if gpus else ()
        if shares:
            used += seconds * sum(shares) / len(shares)
            gpu_s += seconds
        if cpu_s is not None and (cpu_before_s := before.get("cpu_s")) is not None:
            cores_known = True
            if (cpu_s - cpu_before_s) / seconds < IDLE_SHARE and not (shares and max(shares) >= IDLE_SHARE):
                still.append((before["elapsed_s"], now_s))
    last = [one.last for one in seen.values() if one.last is not None]
    models = {gpu.get("name", "") for sample in last for gpu in sample.get("gpus") or ()} - {""}
    cpu = [one.cpu_s for one in seen.values() if one.cpu_s is not None]
    return Usage(
        attempts=attempts,
        sampled=frozenset(seen),
        gpus={number: one.gpus for number, one in seen.items() if one.gpus is not None},
        gpu_model=", ".join(sorted(models)) or None,
        gpu_use=min(1.0, used / gpu_s) if gpu_s > 0 else None,
        cpu_hours=sum(cpu) / HOUR_S if cpu else None,
        memory_peak_bytes=max((b for s in samples if (b := s.get("memory_bytes")) is not None), default=None),
        disk_peak_bytes=max((b for s in samples if (b := s.get("disk_bytes")) is not None), default=None),
        still=joined(still) if cores_known else None,
    )
