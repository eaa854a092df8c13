"""What a run used: GPUs, CPU, memory, disk and idle time, from the recorder's samples and the ledger's attempts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autorl_hpc.records.recorded import TraceEvent, UsageSample
from autorl_hpc.report.telling.spans import Span, overlap_s, union

HOUR_S = 3600.0
IDLE_SHARE = 0.05
"""Of one core, and of each GPU: a shell that sleeps and an agent's program that waits for its driver use less, the
smallest training more."""

LONGEST_GAP_S = 60.0
"""Samples come every few seconds; over a longer gap nobody looked, and nothing is said about it."""

DRIVER_STARTS = ("tool_result", "session")
"""After these events of a trace the agent waits for its driver, until the next event."""


@dataclass(frozen=True)
class Step:
    """What happened between two samples of one attempt.

    Attributes:
        cpu_share: cores in use; None: not measured.
        gpu_share: mean over the GPUs of the share of the time that some kernel ran; None: not measured.
        busiest_gpu: the largest of these shares.
    """

    span: Span
    cpu_share: float | None
    gpu_share: float | None
    busiest_gpu: float | None


@dataclass(frozen=True)
class Usage:
    """The samples of a run, taken together.

    Attributes:
        gpus: by attempt, how many GPUs were seen; an attempt without a sample is not in it.
        steps: in the order of the samples.
    """

    attempts: Mapping[int, Span] = field(default_factory=dict)
    gpus: Mapping[int, int] = field(default_factory=dict)
    gpu_model: str | None = None
    cpu_hours: float | None = None
    memory_peak_bytes: int | None = None
    disk_peak_bytes: int | None = None
    steps: tuple[Step, ...] = ()

    def gpu_hours(self, until_s: float = float("inf")) -> float | None:
        """GPU-hours that the agent had from the start to `until_s`: GPUs times time, at work or not. None: no GPU was seen."""
        if not any(self.gpus.values()):
            return None
        return sum(
            count * Span(span.begin_s, min(span.end_s, until_s)).seconds / HOUR_S
            for attempt, count in self.gpus.items()
            if (span := self.attempts.get(attempt)) is not None
        )

    @property
    def gpu_use(self) -> float | None:
        """Mean share of the time that kernels ran, each step by its length; None: nothing measured it."""
        known = [(step.span.seconds, step.gpu_share) for step in self.steps if step.gpu_share is not None]
        total = sum(seconds for seconds, _ in known)
        return min(1.0, sum(seconds * share for seconds, share in known) / total) if total > 0 else None

    def idle_s(self, trace: Sequence[TraceEvent]) -> float | None:
        """Seconds in which neither a core nor a GPU was at work and no driver was waited for; None: not measured."""
        measured = [step for step in self.steps if step.cpu_share is not None]
        if not measured:
            return None
        still = [step.span for step in measured if (step.cpu_share or 0.0) < IDLE_SHARE and _is_still(step.busiest_gpu)]
        quiet = union(still)
        return sum(span.seconds for span in quiet) - overlap_s(quiet, driver_spans(trace))


def _is_still(share: float | None) -> bool:
    return share is None or share < IDLE_SHARE


def usage_of(samples: Sequence[UsageSample], attempts: Mapping[int, Span]) -> Usage:
    """The samples of a run, taken together."""
    gpus: dict[int, int] = {}
    cpu_s: dict[int, float] = defaultdict(float)
    measured_cpu = False
    memory: int | None = None
    disk: int | None = None
    models: set[str] = set()
    for sample in samples:
        gpus[sample.attempt] = max(gpus.get(sample.attempt, 0), len(sample.gpus))
        if sample.cpu_s is not None:
            measured_cpu = True
            cpu_s[sample.attempt] = max(cpu_s[sample.attempt], sample.cpu_s)
        memory = _larger(memory, sample.memory_bytes)
        disk = _larger(disk, sample.disk_bytes)
        for gpu in sample.gpus:
            models.add(gpu.name)
    return Usage(
        attempts=attempts,
        gpus=gpus,
        gpu_model=", ".join(sorted(models - {""})) or None,
        cpu_hours=sum(cpu_s.values()) / HOUR_S if measured_cpu else None,
        memory_peak_bytes=memory,
        disk_peak_bytes=disk,
        steps=tuple(_steps(samples)),
    )


def _larger(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else max(a, b)


def _steps(samples: Sequence[UsageSample]) -> list[Step]:
    steps = []
    last: dict[int, UsageSample] = {}
    for sample in samples:
        before = last.get(sample.attempt)
        last[sample.attempt] = sample
        if before is None:
            continue
        seconds = sample.elapsed_s - before.elapsed_s
        if not 0 < seconds <= LONGEST_GAP_S:
            continue
        cpu = None
        if sample.cpu_s is not None and before.cpu_s is not None:
            cpu = max(0.0, sample.cpu_s - before.cpu_s) / seconds
        shares = [gpu.used_share for gpu in sample.gpus if gpu.used_share is not None]
        mean = sum(shares) / len(shares) if shares else None
        steps.append(Step(Span(before.elapsed_s, sample.elapsed_s), cpu, mean, max(shares, default=None)))
    return steps


def driver_spans(trace: Sequence[TraceEvent]) -> list[Span]:
    """When the agent waited for its driver: from a tool's result, or a session's start, to the next event of its source."""
    spans = []
    waiting: dict[tuple[str, int], float] = {}
    for event in trace:
        key = (event.source, event.attempt)
        began = waiting.pop(key, None)
        if began is not None:
            spans.append(Span(began, event.elapsed_s))
        if event.kind in DRIVER_STARTS:
            waiting[key] = event.elapsed_s
    return union(spans)
