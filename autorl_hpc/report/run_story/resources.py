"""What a run used: GPUs, CPU, memory, disk and idle time, from the recorder's samples and the ledger's attempts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.safe_open import DriverTotals
from autorl_hpc.recorder.traces.totals import Span, TraceTotals, joined, seconds_of, without
from autorl_hpc.records.recorded import ProcessSeen, TraceEvent, TrainingPoint
from autorl_hpc.report.run_story.logs import Recorded, UsageLine
from autorl_hpc.report.story_records import ReferenceMetrics, SkillMetrics
from autorl_hpc.report.summary import Point
from autorl_hpc.states import Fault, SubmissionState

HOUR_S = 3600.0
IDLE_SHARE = 0.05
"""Of one core, and of each GPU: a shell that sleeps and an agent's program that waits for its driver use less, the
smallest training more."""

MOST_CORES = 10_000
"""No node has as many: a line that tells of more CPU time is damaged."""

LONGEST_GAP_S = 60.0
"""Samples come every few seconds; over a longer gap nobody looked, and nothing is said about it."""


@dataclass(frozen=True)
class UsageSeries:
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
    last: UsageLine | None = None


def usage_of(samples: Sequence[UsageLine], attempts: Mapping[int, Span], every: int = 1) -> UsageSeries:
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
    return UsageSeries(
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


# What the gateway counted takes the place of what an agent's trace tells: it is measured where the requests pass.


def with_counted(told: TraceTotals, counted: DriverTotals | None) -> TraceTotals:
    """The trace's totals with the gateway's tokens and calls, and its cost where the experiment names prices. Tools, errors and the
    spans of sessions stay the trace's."""
    if counted is None:
        return told
    points = counted.points
    cost_usd = counted.cost_usd
    if cost_usd is None and told.cost_usd is not None:
        cost_usd = told.cost_usd
        points = tuple((at, tokens, told.cost_at(at) or 0.0) for at, tokens, _ in points)
    last_s = points[-1][0] if points else None
    return replace(
        told,
        tokens_in=counted.tokens_in,
        tokens_out=counted.tokens_out,
        tokens_cached=counted.tokens_cached,
        driver_calls=counted.calls,
        cost_usd=cost_usd,
        points=points,
        driver_spans=told.driver_spans if told.sessions else joined(counted.spans),
        last_driver_s=told.last_driver_s if told.sessions else last_s,
    )


# When each attempt of a run went on, in budget time.


def attempts_of(view: RunView, elapsed_s: float) -> dict[int, Span]:
    """Begin and end of each attempt by its number: up to the next one, the last up to `elapsed_s`."""
    begun = sorted({a.attempt: a.elapsed_s for a in view.attempts}.items())
    ends = [*(begin for _, begin in begun[1:]), elapsed_s]
    return {number: (begin, max(begin, end)) for (number, begin), end in zip(begun, ends, strict=False)}


# AutoRL-Bench's metrics by its names (its core/metrics.py), over budget seconds and the ledger in place of wall clocks
# and the agent's own files. docs/statistics.md writes down each formula and where it departs from the reference's.

INFRASTRUCTURE = (Fault.CLUSTER, Fault.GRADER)


def reference_metrics(
    points: Sequence[Point],
    *,
    base_score: float | None,
    elapsed_s: float,
    allowed_s: float,
    ended: bool,
    refused_unrecorded: int = 0,
) -> ReferenceMetrics:
    """The metrics of one run.

    Args:
        points: every submission that the ledger keeps, in order.
        base_score: the base model's feedback score in points; None: not known, so nothing is an improvement.
        elapsed_s, allowed_s: budget used, and budget with what was given back, in seconds.
        ended: the agent's part is over. Before, how the run ends is unknown.
        refused_unrecorded: refusals beyond those that the ledger keeps one by one.
    """
    valid = [p for p in points if p.score is not None]
    best = max(valid, key=lambda p: p.score or 0.0, default=None)
    better = next((p for p in valid if base_score is not None and p.score is not None and p.score > base_score), None)
    return ReferenceMetrics(
        valid_submission_rate=_valid_rate(points, refused_unrecorded),
        first_valid_idx=next((i for i, p in enumerate(points, 1) if p.score is not None), None),
        first_valid_delay=valid[0].elapsed_s if valid else None,
        time_to_first_improvement=better.elapsed_s if better else None,
        time_to_best=best.elapsed_s if best else None,
        monotonic_ratio=_monotonic_ratio([p.score for p in valid if p.score is not None]),
        copy_model_count=_copies(points),
        time_used_ratio=elapsed_s / allowed_s if ended and allowed_s > 0 else None,
        last_submit_gap=max(0.0, elapsed_s - points[-1].elapsed_s) if ended and points else None,
    )


def _valid_rate(points: Sequence[Point], refused_unrecorded: int) -> float | None:
    """Scored ones of those that were decided on their own merits: not what waits, not what the infrastructure lost."""
    decided = [
        p for p in points if p.status is not SubmissionState.ACCEPTED and (p.score is not None or not _lost_by_us(p))
    ]
    count = len(decided) + refused_unrecorded
    return sum(p.score is not None for p in decided) / count if count else None


def _lost_by_us(point: Point) -> bool:
    return point.fault in INFRASTRUCTURE


def _monotonic_ratio(scores: Sequence[float]) -> float | None:
    """Of the steps from one score to the next, the share that goes up."""
    if len(scores) < 2:
        return None
    return sum(after > before for before, after in pairwise(scores)) / (len(scores) - 1)


def _copies(points: Sequence[Point]) -> int:
    """Submissions that are the base model: by content, or by a fingerprint that finds nothing trained in them."""
    copies = {
        p.submission_id for p in points if p.is_base or (p.fingerprint and "untrained_copy" in p.fingerprint.flags)
    }
    return sum(p.submission_id in copies or p.same_as in copies for p in points)


# What the reference's summarization skill asks of a run: human help, failures that were overcome, how far it came.

SHELL_AGENT = "shell"
"""The agent that is a person."""

ATTACHED = "attach"
"""Events whose names begin so tell that a person looked into the sandbox with a terminal of their own."""

PROGRAMS = ("python", "accelerate", "torchrun", "deepspeed")
"""Whose failing is an attempt that failed; of `grep` a code other than 0 is an answer."""

RUNS_A_PROGRAM = re.compile(
    rf"(?:^|[;&|(\n])\s*(?:\w+=\S*\s+|(?:nohup|time|exec|env|timeout\s+\S+)\s+)*(?:[^\s;&|(]*/)?(?:{'|'.join(PROGRAMS)})"
)
"""A shell's line that starts one of them."""

FIRST_SIGNAL = 128
"""Codes of a shell above it tell of a signal."""

Stage = Literal["none", "design", "implementation", "execution", "evaluation"]


def skill_metrics(
    agent: str,
    points: Sequence[Point],
    recorded: Recorded,
    events: Sequence[Mapping[str, Any]],
    *,
    started: bool,
    said_something: bool,
) -> SkillMetrics:
    """The metrics of one run.

    Args:
        events: lines of events.jsonl.
        started: an attempt began.
        said_something: the agent's log is not empty.
    """
    return SkillMetrics(
        without_human_help=_alone(agent, events, started),
        recovered_from=_recovered(points, recorded) if started else None,
        stage_reached=_stage(points, recorded, said_something),
    )


def _alone(agent: str, events: Sequence[Mapping[str, Any]], started: bool) -> bool | None:
    if not started:
        return None
    if agent == SHELL_AGENT or any(str(event["event"]).startswith(ATTACHED) for event in events):
        return False
    return True if events else None  # without the list of events nobody knows who looked in


def _recovered(points: Sequence[Point], recorded: Recorded) -> int | None:
    """Submissions that were refused or could not be scored, and programs that failed, before the last scored submission.

    None: nobody learned how any program ended. Without a scored submission nothing was recovered from.
    """
    last = max((p.elapsed_s for p in points if p.score is not None), default=None)
    if last is None:
        return 0
    submissions = sum(
        p.elapsed_s < last
        and p.status in (SubmissionState.REFUSED, SubmissionState.FAILED)
        and p.fault not in INFRASTRUCTURE
        for p in points
    )
    programs = _failed_processes([p for p in recorded.processes.records if p.what == "ended" and p.elapsed_s < last])
    if programs is None:
        programs = _failed_calls([e for e in recorded.trace.records if e.elapsed_s < last])
    return None if programs is None else submissions + programs


def _failed_processes(ended: Sequence[ProcessSeen]) -> int | None:
    """None: the exit code of none of the programs is known; where no program ran, of nothing that did."""
    looked_at = [one for one in ended if _is_program(one)] or ended
    return sum(map(failed, looked_at)) if any(one.exit_code is not None for one in looked_at) else None


def _failed_calls(trace: Sequence[TraceEvent]) -> int | None:
    """The same by the results of tool calls, some of which tell no code where all went well."""
    commands = {e.call_id: e.command for e in trace if e.kind == "tool_call" and e.command}
    results = [(e, e.command or commands.get(e.call_id)) for e in trace if e.kind == "tool_result"]
    told = [(e.exit_code or 0, command) for e, command in results if command and (e.exit_code is not None or e.ok)]
    codes = [code for code, command in told if RUNS_A_PROGRAM.search(command)]
    return sum(0 < code <= FIRST_SIGNAL for code in codes) if told else None


def _is_program(process: ProcessSeen) -> bool:
    words = process.command.split(None, 1)
    return bool(words) and words[0].rsplit("/", 1)[-1].startswith(PROGRAMS)


def failed(process: ProcessSeen) -> bool:
    """Whether a program of the agent's ended with an error. A signal is none: agents stop what they started."""
    if process.what != "ended" or process.exit_code is None or process.exit_code <= 0:
        return False
    return _is_program(process)


def _stage(points: Sequence[Point], recorded: Recorded, said_something: bool) -> Stage:
    if any(p.score is not None for p in points):
        return "evaluation"
    if any(p.status is not SubmissionState.REFUSED for p in points) or _has_trained(recorded):
        return "execution"
    if any(one.files > 0 for one in recorded.revisions.records):
        return "implementation"
    return "design" if said_something or recorded.trace.records or recorded.processes.records else "none"


def _has_trained(recorded: Recorded) -> bool:
    return any((point.step or 0) > 0 for point in recorded.training.records)


# Training steps between two submissions, from the points that training logs gave.


@dataclass(frozen=True)
class Trained:
    """What was trained in one stretch of time.

    Attributes:
        steps: optimizer steps of all trainings in it; None: no log tells a step.
    """

    points: tuple[TrainingPoint, ...] = ()
    steps: int | None = None
    last_loss: float | None = None
    last_reward: float | None = None


def trained_by(points: Sequence[TrainingPoint], times: Sequence[float]) -> list[Trained]:
    """What was trained up to each of `times` (ascending seconds of budget), since the one before."""
    ordered = sorted(points, key=lambda p: p.elapsed_s)
    found, at = [], 0
    last_step: dict[str, int] = {}
    for time_s in times:
        begin = at
        while at < len(ordered) and ordered[at].elapsed_s <= time_s:
            at += 1
        found.append(_trained(tuple(ordered[begin:at]), last_step))
    return found


def _trained(points: tuple[TrainingPoint, ...], last_step: dict[str, int]) -> Trained:
    """`last_step`: by source, the last step seen, which goes on from one stretch to the next."""
    steps: int | None = None
    for point in points:
        if point.step is None:
            continue
        before = last_step.get(point.source, 0)
        # A step below the last one is a new training that writes to the same place: it began at 0.
        steps = (steps or 0) + (point.step - before if point.step >= before else max(point.step, 0))
        last_step[point.source] = point.step
    return Trained(
        points=points,
        steps=steps,
        last_loss=next((p.loss for p in reversed(points) if p.loss is not None), None),
        last_reward=next((p.reward for p in reversed(points) if p.reward is not None), None),
    )
