"""What a run used (GPUs, CPU, memory, disk, idle time), its metrics by AutoRL-Bench's definitions, and training steps by stretch.

From the recorder's samples, the gateway's counts and the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.safe_open import DriverTotals
from autorl_hpc.recorder.traces.totals import Span, TraceTotals, joined, seconds_of, without
from autorl_hpc.records.recorded import ProcessSeen, TraceEvent, TrainingPoint
from autorl_hpc.report.run_story.failures import INFRASTRUCTURE
from autorl_hpc.report.run_story.logs import UsageLine
from autorl_hpc.report.story_records import ReferenceMetrics
from autorl_hpc.report.summary import Point
from autorl_hpc.states import SubmissionState

HOUR_S = 3600.0
IDLE_SHARE = 0.05
"""Of one core, and of each GPU. A sleeping shell and an agent's program that waits for its driver use less, the smallest training
more."""

MOST_CORES = 10_000  # no node has so many cores: a line with more CPU time than this allows is damaged
LONGEST_GAP_S = 60.0  # samples come every few seconds; nothing is claimed about a longer gap


@dataclass(frozen=True)
class UsageSeries:
    """The usage samples of a run, merged. Null: not measured.

    Attributes:
        attempts: when each attempt ran.
        sampled: attempts that have samples.
        gpus: number of GPUs seen, by attempt; attempts without a GPU sample are missing.
        gpu_use: mean share of time in which kernels ran, over all GPUs.
        still: spans in which no core and no GPU was busy.
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
        """Return the agent's GPU-hours from the start to `until_s`: GPUs times time, busy or not. None: no GPU was seen."""
        if not any(self.gpus.values()):
            return None
        had = [(count, self.attempts[attempt]) for attempt, count in self.gpus.items() if attempt in self.attempts]
        return sum(count * max(0.0, min(end, until_s) - begin) / HOUR_S for count, (begin, end) in had)

    def gpu_counts(self) -> str | None:
        """Return `4`; `1, 4` if attempts had different numbers; `0` if there were none; None without samples."""
        return ", ".join(map(str, sorted(set(self.gpus.values())))) or None

    def idle_s(self, driver: Sequence[Span]) -> float | None:
        """Return seconds without a busy core or GPU in which the agent did not wait for its driver (`driver`: those spans)."""
        return None if self.still is None else seconds_of(without(self.still, driver))


def usage_of(
    samples: Sequence[UsageLine], attempts: Mapping[int, Span], every: int = 1, given: Mapping[int, int] | None = None
) -> UsageSeries:
    """Merge the samples of a run, of which only one in `every` is present for a long run. `given`: GPUs of each attempt's job by the
    ledger; where more were seen, they are a node's, and what the job's did is unknown."""
    gpus: dict[int, int] = {}
    cpu_s: dict[int, float] = {}
    last: dict[int, UsageLine] = {}
    models: set[str] = set()
    used = gpu_s = 0.0
    still: list[Span] = []
    cores_known = False
    for sample in samples:
        number, now_s, cpu = sample.attempt, sample.elapsed_s, sample.cpu_s
        if cpu is not None and cpu > MOST_CORES * (now_s + LONGEST_GAP_S):
            cpu = None
        seen, most = sample.gpus or (), (given or {}).get(number, math.inf)
        if sample.gpus is not None:
            gpus[number] = max(gpus.get(number, 0), int(min(len(seen), most)))
            models |= {gpu.name for gpu in seen if most}
        if cpu:
            cpu_s[number] = max(cpu_s.get(number, 0.0), cpu)
        before, last[number] = last.get(number), sample
        if before is None or not 0 < (seconds := now_s - before.elapsed_s) <= LONGEST_GAP_S * every:
            continue
        shares = [gpu.used_share for gpu in seen if gpu.used_share is not None and len(seen) <= most]
        if shares:
            used += seconds * sum(shares) / len(shares)
            gpu_s += seconds
        if cpu is not None and before.cpu_s is not None:
            cores_known = True
            if (cpu - before.cpu_s) / seconds < IDLE_SHARE and max(shares, default=0.0) < IDLE_SHARE:
                still.append((before.elapsed_s, now_s))
    return UsageSeries(
        attempts=attempts,
        sampled=frozenset(last),
        gpus=gpus,
        gpu_model=", ".join(sorted(models - {""})) or None,
        gpu_use=min(1.0, used / gpu_s) if gpu_s > 0 else None,
        cpu_hours=sum(cpu_s.values()) / HOUR_S if cpu_s else None,
        memory_peak_bytes=max((s.memory_bytes for s in samples if s.memory_bytes is not None), default=None),
        disk_peak_bytes=max((s.disk_bytes for s in samples if s.disk_bytes is not None), default=None),
        still=joined(still) if cores_known else None,
    )


def with_counted(told: TraceTotals, counted: DriverTotals | None) -> TraceTotals:
    """Return the trace's totals with the gateway's tokens and calls, because the gateway sees the requests, and its cost if the
    experiment sets prices. Tools, errors and session spans stay those of the trace."""
    if counted is None:
        return told
    points, cost_usd = counted.points, counted.cost_usd
    if cost_usd is None and told.cost_usd is not None:
        cost_usd = told.cost_usd
        points = tuple((at, tokens, told.cost_at(at) or 0.0) for at, tokens, _ in points)
    return replace(
        told,
        tokens_in=counted.tokens_in,
        tokens_out=counted.tokens_out,
        tokens_cached=counted.tokens_cached,
        driver_calls=counted.calls,
        cost_usd=cost_usd,
        points=points,
        driver_spans=told.driver_spans if told.sessions else joined(counted.spans),
    )


def attempts_of(view: RunView, elapsed_s: float) -> dict[int, Span]:
    """Return begin and end of each attempt in budget time by its number; the last attempt ends at `elapsed_s`."""
    begun = sorted({a.attempt: a.elapsed_s for a in view.attempts}.items())
    ends = [*(begin for _, begin in begun[1:]), elapsed_s]
    return {number: (begin, max(begin, end)) for (number, begin), end in zip(begun, ends, strict=False)}


# --- AutoRL-Bench's metrics (its core/metrics.py), on budget seconds and the ledger, not wall clocks and the agent's files
# docs/statistics.md has each formula and its differences from the reference.


def reference_metrics(
    points: Sequence[Point],
    *,
    base_score: float | None,
    elapsed_s: float,
    allowed_s: float,
    ended: bool,
    refused_unrecorded: int = 0,
) -> ReferenceMetrics:
    """Compute the metrics of one run.

    Args:
        points: every submission in the ledger, in order.
        base_score: the base model's feedback score in points; None: unknown, so nothing counts as an improvement.
        elapsed_s, allowed_s: budget used, and budget including time given back, in seconds.
        ended: the agent has ended. Before that, how the run ends is unknown.
        refused_unrecorded: refusals that the ledger counts without an entry each.
    """
    valid = [(p.elapsed_s, p.score) for p in points if p.score is not None]
    steps = list(pairwise(score for _, score in valid))
    known = [p for p in points if p.status is not SubmissionState.ACCEPTED]
    decided = sum(p.score is not None or p.fault not in INFRASTRUCTURE for p in known) + refused_unrecorded
    copies = {
        p.submission_id for p in points if p.is_base or (p.fingerprint and "untrained_copy" in p.fingerprint.flags)
    }
    return ReferenceMetrics(
        valid_submission_rate=len(valid) / decided if decided else None,
        first_valid_idx=next((i for i, p in enumerate(points, 1) if p.score is not None), None),
        first_valid_delay=valid[0][0] if valid else None,
        time_to_first_improvement=next((s for s, v in valid if base_score is not None and v > base_score), None),
        time_to_best=max(valid, key=lambda pair: pair[1])[0] if valid else None,
        monotonic_ratio=sum(after > before for before, after in steps) / len(steps) if steps else None,
        copy_model_count=sum(p.submission_id in copies or p.same_as in copies for p in points),
        time_used_ratio=elapsed_s / allowed_s if ended and allowed_s > 0 else None,
        last_submit_gap=max(0.0, elapsed_s - points[-1].elapsed_s) if ended and points else None,
        rollbacks=_rollbacks(points),
    )


def _rollbacks(points: Sequence[Point]) -> int | None:
    """Count submissions whose parent is an earlier one than the last; going back to the base model is none. None: there is
    no submission, or none after the first has a fingerprint."""
    count, known, last = 0, False, None
    taken = [point for point in points if point.status is not SubmissionState.REFUSED]
    for point in taken:
        print_ = point.fingerprint if point.fingerprint is not None and not point.fingerprint.reason else None
        parent = point.same_as if point.same_as is not None else print_.parent if print_ is not None else None
        known |= last is not None and (print_ is not None or point.same_as is not None)
        count += last is not None and parent is not None and parent != last
        last = point.same_as or point.submission_id
    return count if known or len(taken) == 1 else None


# --- the agent's programs

# programs whose non-zero exit code is a failure; of `grep` it is an answer
PROGRAMS = ("python", "accelerate", "torchrun", "deepspeed")
OUR_PROGRAMS = (
    "./submit",
    "./timer",
    "/run/autorl-inside.py",
)  # what a workspace and a sandbox of ours start with Python


def answered(trace: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Return the results of tool calls, each with the command of its call."""
    commands = {e.call_id: e.command for e in trace if e.kind == "tool_call" and e.command}
    results = [e for e in trace if e.kind == "tool_result"]
    return [e.model_copy(update={"command": e.command or commands.get(e.call_id)}) for e in results]


def is_program(process: ProcessSeen) -> bool:
    """Return whether a process is one of PROGRAMS."""
    return process.command.partition(" ")[0].rsplit("/", 1)[-1].startswith(PROGRAMS)


_UTILITIES = """
apptainer ar awk base64 basename bash bunzip2 bwrap bzip2 cat chmod claude codex cp curl cut date dd dirname du echo env find gemini
git grep gunzip gzip head hostname id install jq kill ln ls mkdir mktemp mv nice node nohup npm nvidia-smi opencode openssl ps rm
rsync sed setsid sh sha256sum sleep sort split srun stat stdbuf sync tail tar tee test timeout touch tr true unzip wc wget which xargs
xz zip zstd
"""
# programs that train nothing, whatever they cost: tools of a shell, and agents' own programs
UTILITIES = frozenset(_UTILITIES.split())
MIN_TRAINING_CPU_S = 2.0  # to import torch takes more


def may_train(process: ProcessSeen) -> bool:
    """Return whether a program may have trained a model: any but a utility, our own, and those known to have used little time."""
    words = process.command.split()
    name = words[0].rsplit("/", 1)[-1].strip("-") if words else ""
    if name in UTILITIES or any(word in OUR_PROGRAMS for word in words[1:3]):
        return False
    return process.what != "ended" or process.cpu_s is None or process.cpu_s >= MIN_TRAINING_CPU_S


def failed(process: ProcessSeen) -> bool:
    """Return whether a program of the agent ended with an error. A signal is not one: agents stop what they started."""
    return process.what == "ended" and (process.exit_code or 0) > 0 and is_program(process)


# --- training between two submissions, from logged training points


@dataclass(frozen=True)
class Trained:
    """The training in one stretch of time. `steps`: optimizer steps of all trainings; None if no log has a step."""

    points: tuple[TrainingPoint, ...] = ()
    steps: int | None = None
    last_loss: float | None = None
    last_reward: float | None = None


def trained_by(points: Sequence[TrainingPoint], times: Sequence[float]) -> list[Trained]:
    """Return the training up to each of `times` (ascending seconds of budget), since the previous one."""
    found: list[Trained] = []
    last_step: dict[str, int] = {}
    begin_s = float("-inf")
    for time_s in times:
        own = tuple(sorted((p for p in points if begin_s < p.elapsed_s <= time_s), key=lambda p: p.elapsed_s))
        steps: int | None = None
        for point in own:
            if point.step is not None:
                before = last_step.get(point.source, 0)
                # A lower step is a new training that writes to the same place: it began at 0.
                steps = (steps or 0) + (point.step - before if point.step >= before else max(point.step, 0))
                last_step[point.source] = point.step
        losses = [p.loss for p in own if p.loss is not None]
        rewards = [p.reward for p in own if p.reward is not None]
        found.append(Trained(own, steps, losses[-1] if losses else None, rewards[-1] if rewards else None))
        begin_s = time_s
    return found
