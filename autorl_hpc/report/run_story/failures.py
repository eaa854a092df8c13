"""Classify why a run or a submission did not help (the paper's taxonomy, extended), with evidence lines (`failure_of`).

docs/routes.md explains each rule and its thresholds. "Static shortcut without transfer" shows only over several tasks: the
leaderboard module gives it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from statistics import fmean, median_high
from typing import NamedTuple

from autorl_hpc.recorder.trainings import EVALUATED, of_evaluation
from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.format import clean
from autorl_hpc.report.run_story.logs import PREFIX, LogExcerpt, LogLine, Trace, lines_of, tracebacks
from autorl_hpc.report.story_records import EvidenceLine, Failure
from autorl_hpc.scoring.stats import beyond_noise
from autorl_hpc.states import EndedBy, FailureKind, Fault, SubmissionState

# --- the classifier's input, filled from ledger, recorder and scores


class ProcessExit(NamedTuple):
    """The end of a process or of a tool call. `exit_code`: negative for a signal; `ok`: for traces that tell no code."""

    command: str
    exit_code: int | None
    elapsed_s: float = 0.0
    ok: bool | None = None


class GainBounds(NamedTuple):
    """Gain over the base model in points, its interval and the test's p (None: not computed), and the source of it."""

    points: float
    low: float | None = None
    high: float | None = None
    where: str = ""
    p_value: float | None = None

    @property
    def beyond_noise(self) -> bool:
        """Return whether it is a gain, and more than noise."""
        return beyond_noise(self.points, self.p_value, self.low, self.high) > 0

    @property
    def worse(self) -> bool:
        """Return whether it is a loss, and more than noise."""
        return beyond_noise(self.points, self.p_value, self.low, self.high) < 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run or of one iteration.

    Attributes:
        flags: of the checkpoint's fingerprint.
        contaminated_items: held-out items whose whole text was in the workspace.
        hard_coded: files of the code with held-out items.
        crashes: errors that ended Python programs, as the observer saw them.
        samples: whether code or logs sample from a model. None: unknown; then a logged reward decides.
    """

    fault: Fault | None = None
    flags: Sequence[str] = ()
    contaminated_items: int = 0
    hard_coded: Sequence[EvidenceLine] = ()
    training: Sequence[TrainingPoint] = ()
    logs: Sequence[LogExcerpt] = ()
    exits: Sequence[ProcessExit] = ()
    crashes: Sequence[Trace] = ()
    samples: bool | None = None

    @cached_property
    def lines(self) -> list[LogLine]:
        return lines_of(self.logs)

    @cached_property
    def traces(self) -> list[Trace]:
        """Return the tracebacks in the logs, and crashes that no log shows."""
        told = tracebacks(self.lines)
        kinds = {trace.error.text.partition(":")[0].rsplit(".", 1)[-1] for trace in told}
        return told + [crash for crash in self.crashes if crash.error.text.partition(":")[0] not in kinds]


@dataclass(frozen=True, kw_only=True)
class IterationFacts(Facts):
    """One submission, and the time since the previous one (or the start).

    Attributes:
        score_before: feedback score of the checkpoint that this one builds on.
        gain: on the feedback split.
        code, message: of a refusal.
        dataset_rows: rows that the trainer trained on, if a log says so.
    """

    submission_id: int
    status: SubmissionState
    score: float | None = None
    score_before: float | None = None
    gain: GainBounds | None = None
    code: str | None = None
    message: str | None = None
    dataset_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunFacts(Facts):
    """A whole run. Flags and gains are those of the selected checkpoint.

    Attributes:
        ended_by: None: it is still running, or unknown.
        refused: all refusals, including those that are not an iteration.
        optimism_gap: feedback gain minus report gain, in points; None if one is unknown.
    """

    budget_s: float
    elapsed_s: float
    iterations: Sequence[IterationFacts] = ()
    ended_by: EndedBy | None = None
    reason: str | None = None
    refused: int = 0
    first_accepted_s: float | None = None
    feedback_gain: GainBounds | None = None
    report_gain: GainBounds | None = None
    optimism_gap: float | None = None


# --- evidence lines

MAX_EVIDENCE = 5  # lines shown per finding
Evidence = tuple[EvidenceLine, ...]


class Strength(IntEnum):
    """How much a finding proves."""

    NONE = 0
    SAID = 1  # a log or an exit code
    MEASURED = 2  # figures of a training
    PROVEN = 3  # the ledger: fingerprints, scores


def _line(where: str, says: str) -> Evidence:
    return (EvidenceLine(where=where, says=clean(says, 200) or ""),)


def _logged(lines: Iterable[LogLine]) -> Evidence:
    return tuple(line for where, text, _ in lines for line in _line(where, text))[:MAX_EVIDENCE]


def _point(point: TrainingPoint, says: str) -> Evidence:
    step = f", step {point.step}" if point.step is not None else ""
    return _line(f"{clean(point.source, 150)}{step}, {point.elapsed_s:.0f} s", says)


def strength_of(evidence: Evidence) -> Strength:
    strongest = Strength.NONE
    for where in (line.where for line in evidence):
        said = ", byte " in where or where.startswith(("process at", "training logs, ledger"))
        own = Strength.SAID if said or _CODE_PLACE.search(where) else Strength.MEASURED
        proven = where.startswith(("ledger", "feedback split", "report split"))
        strongest = max(strongest, Strength.PROVEN if proven else own)
    return strongest


def _gain(gain: GainBounds, split: str) -> Evidence:
    bounds = f" [{gain.low:+.1f}, {gain.high:+.1f}]" if gain.low is not None and gain.high is not None else ""
    return _line(gain.where or f"{split} split", f"{split} gain {gain.points:+.1f} points{bounds}")


def _ledger(submission_id: int | None, *words: object) -> Evidence:
    where = "ledger" if submission_id is None else f"ledger: submission {submission_id}"
    return (EvidenceLine(where=where, says=": ".join(clean(str(word), 200) or "" for word in words if word)),)


# --- one function per kind of failure; returns evidence, empty if the kind does not apply

MIN_POINTS = 5  # fewer logged steps show no trend
# share of logged steps without spread of rewards: GRPO's advantage is zero in these, so almost nothing is learned
ZERO_STD_SHARE = 0.8
EMPTY_SHARE, EMPTY_TOKENS = 0.5, 1.0  # share of logged steps with empty completions, and their greatest mean length
REWARD_RISE = 0.1  # least rise of the training reward from the first to the last third, as a share of its range
TINY_ROWS = 20  # A model trained on fewer rows memorises them
LOSS_FACTOR = 10.0  # times the median of the first third; a loss that grew tenfold does not recover
LOSS_FLOOR = 1.0  # A smaller loss has not exploded, whatever it was before (GRPO's starts at 0)
KL_EXPLODED = 10.0  # nats per token or sequence; runs of trl and verl stay below 1 while they learn
EARLY_SHARE = 0.5  # share of the budget: an agent that has neither trained nor submitted by then has trouble with code
GAP_POINTS = 3.0  # A smaller optimism gap is not a reason by itself
CONTAMINATED_ITEMS = 3  # whole held-out items in the workspace; one or two may be chance (docs/threat-model.md)
_CODE_PLACE = re.compile(r"\.py:\d+$")
_RAISED = re.compile(rf"^{PREFIX}[\w.]{{0,80}}(?:Error|Exception): ")
_ROLLOUT_WORDS = re.compile(
    r"(?:rollout|episode|tool call|generation|completion|answer|environment (?:step|reset|worker)|env (?:step|reset|worker))s?\b.{0,60}\b(?:fail|error|crash|timed? ?out|empty|could not|unable)"
    r"|(?:fail|could not|unable)\w*\b.{0,40}\b(?:parse|extract|roll ?out|step the env|reset the env|generat)"
    r"|(?:no|0|zero)\s+(?:valid\s+)?(?:completions|rollouts|answers|responses|episodes)\b(?! (?:were )?(?:fail|crash|empty|timed|dropp|skipp|truncat))"
    r"|(?:all|every)\s+(?:completions|rollouts|rewards|responses)\b.{0,30}\b(?:empty|identical|zero|same)",
    re.I,
)
# Words of an agent thinking aloud, about what may fail. Programs don't log such words.
_PROSE = re.compile(
    r"\b(?:may|might|would|should|maybe|perhaps|if|I|I'll|I'm|let me|let's|we|could(?! not)|can(?! ?not)|will)\b"
)
_OF_CODE = re.compile(r"\b(?:assert|raise|return|print\(|isnan|isfinite|isinf|def|elif)\b|^\s*#|print\(|\bf['\"]")
_DATA_WORDS = re.compile(
    r"(?:dataset|train(?:ing)? (?:set|data|examples))\b(?:(?!drop|remov|skip|truncat).){0,40}\b"
    r"(?:is empty|(?:has no|0) (?:rows|examples|samples)\b(?! (?:were )?(?:drop|remov|skip|truncat|too )))"
    r"|num_samples should be a positive integer value, but got num_samples=0"
    r"|num examples = 0\b",
    re.I,
)
_FORMAT_WORDS = re.compile(
    r"column names? .{0,60}(?:not in|missing|don't match)|keyerror: ['\"](?:prompt|text|messages|question|answer|chosen|rejected|completion|labels)['\"]"
    r"|mismatch between .{0,40}tokeniz|chat[_ ]template.{0,40}(?:is not set|mismatch|missing|differs)"
    r"|(?:format|prompt|template)s?\b.{0,40}\b(?:mismatch|(?:does|do) ?n[o']t match)|mismatch(?:ed)? (?:in |of |between )?.{0,20}(?:format|prompt|template)",
    re.I,
)


def _words(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.I)


# what ends programs for want of memory or by an engine's or a device's death: words in logs, and exit codes of a shell
BREAKS: dict[FailureKind, tuple[re.Pattern[str], frozenset[int]]] = {
    FailureKind.OUT_OF_MEMORY: (
        _words(
            r"outofmemory|out of memory|memoryerror|std::bad_alloc|bad_alloc\b",  # torch, CUDA, Python, C++
            r"defaultcpuallocator: can't allocate|cannot allocate memory|unable to allocate .{1,40} for an array",
            r"oom[-_ ]?kill|\(oom\)|low on memory|memory pressure",  # kernel, Slurm, Ray
            r"bus error|insufficient shared memory|no space left on device.{0,40}/dev/shm",
            # vLLM and SGLang
            r"no available memory for the cache blocks|free memory on device .{0,80}less than desired",
            r"larger than the (?:available kv cache memory|maximum number of tokens that can be stored in kv cache)",
            r"not enough memory|try to increase --mem-fraction-static|kv cache pool is full",
        ),
        frozenset({135, 137}),  # SIGBUS, SIGKILL
    ),
    FailureKind.ENGINE_CRASH: (
        _words(
            r"engine(?:dead|core)?error|engine core (?:init|proc|died|fail)|engine process (?:failed|died)",  # vLLM
            r"engine.{0,20}(?:is dead|has died|died|crashed)|worker ?proc.{0,30}(?:died|failed)",
            r"sigquit from a child process|scheduler hit an exception|sglang.{0,40}(?:died|crashed|is dead)",
            r"actordiederror|rayactorerror|workercrashederror|nodediederror|actor died unexpectedly",  # Ray
            r"cuda error|cublas_status|cudnn_status|device-side assert|illegal memory access|no kernel image",
            r"nccl\w*error|nccl (?:error|watchdog|timeout|communicator)|watchdog caught collective operation timeout",
            r"segmentation fault|core dumped|fatal python error",
        ),
        frozenset({134, 139}),  # SIGABRT, SIGSEGV
    ),
}
_NAN = re.compile(
    r"\b(?:loss|grad_norm|kl)['\"]?\s{0,3}[:=]\s{0,3}['\"]?(?:tensor\()?[-+]?(?:nan|inf(?:inity)?)\b", re.I
)
_TRAINER = re.compile(r"python|torchrun|accelerate|deepspeed|trl|llamafactory|axolotl|\.sh\b")
_NOT_OF_TRAINING = re.compile(
    r"(?<![a-z])(?:eval\w*|val|valid|validation|test|dev|best|min|lowest)[\s_/:-]{1,3}$", re.I
)
_TRAINED = frozenset({"loss", "reward", "rewards", "kl", "approxkl"})
# parts of metric names that may be NaN in sound training, like an evaluation's: the spread of one sample, the best one so far
_BESIDE = frozenset({"std", "margins", "accuracies", "best", "min"})
_NO = re.compile(r"\b(?:no|zero|without(?: any)?|never)\s+(?:[\w-]+\s+){0,2}$", re.I)
_ZERO = re.compile(r"(?<![\w.])0(?:\.0+)?%?\s+(?:[\w-]+\s+){0,2}$")
_PLURAL = re.compile(r"(?:[\w-]+\s+){0,2}[\w-]*s\b", re.I)
# words around a complaint that say that there is none: `no format mismatch`, `0 rollouts failed`, `mismatch count: 0`
_COUNTS_ZERO = re.compile(
    r"\w*(?: (?:be )?[a-z]+)?(?:[ _-](?:count|rate|number|ratio|share|total|event|error|failure|kill)s?)*['\")]{0,2}\s{0,3}[:=]?\s{0,3}0(?:\.0*)?(?![\w.])",
    re.I,
)


def copied_weights(facts: Facts) -> Evidence:
    """Detect weights that are the base model's or another model's."""
    flags = [flag for flag in ("untrained_copy", "foreign_weights") if flag in facts.flags]
    return tuple(line for flag in flags for line in _line("ledger: fingerprint", flag))


def held_out_items(facts: Facts) -> Evidence:
    """Detect whole held-out items in the workspace or in the code."""
    found: Evidence = ()
    if facts.contaminated_items >= CONTAMINATED_ITEMS:
        found += _line("ledger: contamination", f"{facts.contaminated_items} held-out items whole in the workspace")
    return found + tuple(facts.hard_coded[:MAX_EVIDENCE])


def feedback_only(facts: Facts) -> Evidence:
    """Detect a gain on the split whose scores are told that the report split does not have."""
    if not isinstance(facts, RunFacts) or (told := facts.feedback_gain) is None or (real := facts.report_gain) is None:
        return ()
    gap = facts.optimism_gap if facts.optimism_gap is not None else told.points - real.points
    if not told.beyond_noise or real.beyond_noise or gap < GAP_POINTS:
        return ()
    where = real.where or "report split"
    return _gain(told, "feedback") + _gain(real, "report") + _line(where, f"optimism gap {gap:.1f} points")


def training_collapse(facts: Facts) -> Evidence:
    """Detect NaN or Inf, exploding loss or KL, and identical answers. A low score alone is no sign of it."""
    found: Evidence = ()
    for own in _last_trainings(facts.training):
        found += _not_finite(own) + _exploded(own)
    told = [one for one in facts.lines if one.is_log and _has_nan(one.text) and not _OF_CODE.search(one.text)]
    if len(told) > 1 or not any(point.loss is not None for point in facts.training):
        found += _logged(told[:1])
    if "degenerate_outputs" in facts.flags:
        found += _line("ledger: fingerprint", "degenerate_outputs: most answers are one and the same text")
    return found


def _has_nan(text: str) -> bool:
    found = (match.start() for match in _NAN.finditer(text))
    return EVALUATED.match(text) is None and any(not _NOT_OF_TRAINING.search(text[:at]) for at in found)


def _last_trainings(training: Sequence[TrainingPoint]) -> Iterable[list[TrainingPoint]]:
    """Return the last training of each source. A drop in step or epoch starts a new training, so the earlier one was given up."""
    found: dict[str, list[TrainingPoint]] = {}
    for point in training:
        own = found.setdefault(point.source, [])
        pairs = [(getattr(own[-1], name), getattr(point, name)) for name in ("step", "epoch")] if own else []
        known = next(((old, new) for old, new in pairs if old is not None and new is not None), (0, 0))
        if known[1] < known[0]:
            own.clear()
        own.append(point)
    return found.values()


def _not_finite(own: Sequence[TrainingPoint]) -> Evidence:
    """Find the first metric of training that is not finite in two consecutive logged steps or in the last step.

    A gradient norm counts only in the last two: mixed-precision training starts with infinite ones and skips these steps.
    """
    parts = {name: set(re.split(r"[^a-z]+", name.lower())) for point in own for name in point.not_finite}
    gradients = {name for name, words in parts.items() if words >= {"grad", "norm"}}
    counted = gradients | {name for name, words in parts.items() if words & _TRAINED}
    bad = [
        [name for name in point.not_finite if name in counted and not (parts[name] & _BESIDE or of_evaluation(name))]
        for point in own
    ]
    hard = [not gradients.issuperset(names) for names in bad]
    at = next((n for n in range(len(own) - 1) if hard[n] and hard[n + 1]), None)
    if at is None and (hard[-1] or all(bad[-2:])):
        at = len(own) - 1
    return () if at is None else _point(own[at], f"{', '.join(bad[at][:5])}: no finite number")


def _exploded(own: Sequence[TrainingPoint]) -> Evidence:
    found: Evidence = ()
    losses = [(p, abs(p.loss)) for p in own if p.loss is not None and math.isfinite(p.loss)]
    if len(losses) >= MIN_POINTS:
        early = median_high(value for _, value in losses[: len(losses) // 3])
        usual = max(early, LOSS_FLOOR / LOSS_FACTOR)
        last, value = losses[-1]
        if value > LOSS_FACTOR * usual and value > LOSS_FLOOR:
            found += _point(last, f"loss {last.loss:.4g}, {value / usual:.0f} times that of the beginning")
    kls = [(p, p.kl) for p in own if p.kl is not None and math.isfinite(p.kl)]
    if kls and kls[-1][1] > KL_EXPLODED:
        found += _point(kls[-1][0], f"KL {kls[-1][1]:.4g}")
    return found


def rollout_construction(facts: Facts) -> Evidence:
    """Detect broken rollouts: tracebacks, empty or identical completions, unparsed answers, a constant reward."""
    rewarded = any(p.reward is not None or any("reward" in name for name in p.more) for p in facts.training)
    samples = rewarded or facts.samples
    traces = [trace.error for trace in facts.traces if trace.in_rollout] if samples is not False else []
    told = _told(facts, _ROLLOUT_WORDS, raised=False) if samples else ()
    empty, constant = _empty(facts.training), _constant_reward(facts.training)
    if traces:
        return _logged(traces) + empty
    if empty:
        return empty + told
    return told + constant if told and (constant or len(told) >= 3) else ()


def _empty(training: Sequence[TrainingPoint]) -> Evidence:
    names = ("completions/mean_length", "completion_length", "response_length/mean")
    lengths = [(point, point.more[name]) for point in training for name in names if name in point.more]
    short = [(point, value) for point, value in lengths if value <= EMPTY_TOKENS]
    if len(lengths) < MIN_POINTS or len(short) < EMPTY_SHARE * len(lengths):
        return ()
    point, value = short[-1]
    return _point(point, f"completions of {value:.3g} tokens in {len(short)} of {len(lengths)} steps")


def _rewards(training: Sequence[TrainingPoint]) -> list[tuple[TrainingPoint, float]]:
    found = [(p, p.reward) for p in training if p.reward is not None and math.isfinite(p.reward)]
    return found if len(found) >= MIN_POINTS else []


def _constant_reward(training: Sequence[TrainingPoint]) -> Evidence:
    rewards = _rewards(training)
    if len({value for _, value in rewards}) != 1:
        return ()
    return _point(rewards[-1][0], f"reward {rewards[-1][1]:.4g} in all {len(rewards)} logged steps")


def reward_or_data(facts: Facts) -> Evidence:
    """Detect rewards without spread, and empty or tiny data."""
    found = _no_spread(facts.training) + _constant_reward(facts.training)
    if isinstance(facts, IterationFacts) and facts.dataset_rows is not None and facts.dataset_rows < TINY_ROWS:
        found += _line("training log", f"trained on {facts.dataset_rows} rows")
    return found + _told(facts, _DATA_WORDS)


def out_of_memory(facts: Facts) -> Evidence:
    """Detect programs that asked for more memory than there was."""
    ended = isinstance(facts, RunFacts) and facts.ended_by is EndedBy.OUT_OF_MEMORY
    found = _line("ledger: sealed", OUT_OF_BUDGET[EndedBy.OUT_OF_MEMORY]) if ended else ()
    return found + _broke(facts, FailureKind.OUT_OF_MEMORY)


def engine_crash(facts: Facts) -> Evidence:
    """Detect an engine or a device that died under the agent, or under its weights."""
    if isinstance(facts, IterationFacts) and facts.status is SubmissionState.FAILED and facts.fault is Fault.ARTIFACT:
        said = facts.message or ""
        if any(words.search(said) for words, _ in BREAKS.values()):
            return _ledger(facts.submission_id, facts.code or facts.fault, said)
    memory, _ = BREAKS[FailureKind.OUT_OF_MEMORY]
    return tuple(line for line in _broke(facts, FailureKind.ENGINE_CRASH) if not memory.search(line.says))


def _told(facts: Facts, words: re.Pattern[str], *, raised: bool = True) -> Evidence:
    """Return lines that a program raised or logged with one of these words, but for those that count none."""
    told = [one for one in facts.lines if _complains(words, one.text)]
    said = [one for one in told if one.is_log and _PROSE.search(one.text) is None]
    return _logged(one for one in told if one in said or (raised and _RAISED.match(one.text)))


def _complains(words: re.Pattern[str], text: str) -> bool:
    return any(
        not (_NO.search(text[: found.start()]) or _COUNTS_ZERO.match(text, found.end()))
        and not (_ZERO.search(text[: found.start()]) and _PLURAL.match(text, found.start()))
        for found in words.finditer(text)
    )


def _broke(facts: Facts, kind: FailureKind) -> Evidence:
    """Return what ended programs in this way; nothing if a training logged steps and none broke after its last one."""
    words, codes = BREAKS[kind]
    steps = [point.elapsed_s for point in facts.training if point.loss is not None]
    if steps and not any(_broken_exit(each) and each.elapsed_s >= steps[-1] for each in facts.exits):
        return ()
    found = _logged(trace.error for trace in facts.traces if words.search(trace.error.text)) or _told(facts, words)
    return found or tuple(line for each in facts.exits if each.exit_code in codes for line in _broken_exit(each))


def _no_spread(training: Sequence[TrainingPoint]) -> Evidence:
    names = {"reward_std", "frac_reward_zero_std"}
    spreads = [point for point in training if names & point.more.keys()]
    flat = [p for p in spreads if p.more.get("reward_std", 1 - p.more.get("frac_reward_zero_std", 0)) <= 0]
    if len(spreads) < MIN_POINTS or len(flat) < ZERO_STD_SHARE * len(spreads):
        return ()
    return _point(flat[-1], f"no spread of rewards in {len(flat)} of {len(spreads)} logged steps")


def reward_without_score(facts: Facts) -> Evidence:
    """Detect a training reward that rises while the score does not."""
    if not isinstance(facts, IterationFacts):
        return ()
    rewards, score, before = _rewards(facts.training), facts.score, facts.score_before
    unmoved = facts.gain is not None and not facts.gain.beyond_noise and facts.gain.points <= 0
    if not rewards or score is None or before is None or not (score < before or unmoved):
        return ()
    values = [value for _, value in rewards]
    third = len(values) // 3
    first, last = fmean(values[:third]), fmean(values[-third:])
    if last - first <= REWARD_RISE * max(max(values) - min(values), abs(first)):
        return ()
    says = f"training reward {first:.4g} to {last:.4g} while the feedback score went from {before:.4g} to {score:.4g}"
    return _point(rewards[-1][0], says)


def early_coding(facts: Facts) -> Evidence:
    """Detect programs that broke before any training: tracebacks or exit codes, no training step, no submission."""
    stepped = [point for point in facts.training if (point.step or 0) > 0 or point.loss is not None]
    broken = _logged(trace.error for trace in facts.traces)
    broken += tuple(line for each in facts.exits for line in _broken_exit(each))[:3]
    if not broken or (isinstance(facts, IterationFacts) and (stepped or facts.score is not None)):
        return ()
    if isinstance(facts, RunFacts):
        submitted = math.inf if facts.first_accepted_s is None else facts.first_accepted_s
        first = min([submitted, *(point.elapsed_s for point in stepped)])
        ended = facts.ended_by is not None or facts.elapsed_s > EARLY_SHARE * facts.budget_s
        if first <= EARLY_SHARE * facts.budget_s or not ended:
            return ()
        when = "never" if math.isinf(first) else f"only after {first:.0f} of {facts.budget_s:.0f} s"
        broken += _line("training logs, ledger", f"a first training step or submission: {when}")
    return broken


def _broken_exit(each: ProcessExit) -> Evidence:
    code = each.exit_code
    if code == 0 or (code is None and each.ok is not False) or not _TRAINER.search(each.command):
        return ()
    how = "failed" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
    return _line(f"process at {each.elapsed_s:.0f} s", f"{how}: {clean(each.command, 150)}")


# --- the failure that a report names: the first of a fixed order whose rule holds

INFRASTRUCTURE = (Fault.CLUSTER, Fault.GRADER)
OUT_OF_BUDGET = {
    EndedBy.BUDGET: "its time was used up",
    EndedBy.GPU_HOURS: "its GPU-hours were used up",
    EndedBy.TOKENS: "its driver's tokens were used up",
    EndedBy.COST: "the money for its driver was used up",
    EndedBy.OUT_OF_MEMORY: "more memory than its budget",
    EndedBy.DISK: "more disk than its budget",
    EndedBy.PROCESSES: "more processes than its budget",
}
OTHER_CURRENCIES = (EndedBy.GPU_HOURS, EndedBy.TOKENS, EndedBy.COST)

# what spoils a gain, too, in order
SPOILS: dict[FailureKind, Callable[[Facts], Evidence]] = {
    FailureKind.COPIED_WEIGHTS: copied_weights,
    FailureKind.HELD_OUT_ITEMS: held_out_items,
    FailureKind.FEEDBACK_ONLY: feedback_only,
}

CAUSES: dict[FailureKind, Callable[[Facts], Evidence]] = {
    FailureKind.TRAINING_COLLAPSE: training_collapse,
    FailureKind.REWARD_WITHOUT_SCORE: reward_without_score,
    FailureKind.OUT_OF_MEMORY: out_of_memory,
    FailureKind.ENGINE_CRASH: engine_crash,
    FailureKind.ROLLOUT_CONSTRUCTION: rollout_construction,
    FailureKind.REWARD_OR_DATA: reward_or_data,
    FailureKind.FORMAT_MISMATCH: lambda facts: _told(facts, _FORMAT_WORDS),
    FailureKind.EARLY_CODING: early_coding,
}
"""The one with the strongest evidence is the failure; of equally strong ones the first: collapse before its causes in rollouts and
rewards, because only collapse says that the model was damaged."""

Found = Iterator[tuple[FailureKind, Evidence]]  # kinds in their order; the first with evidence is the failure


def failure_of(facts: RunFacts | IterationFacts) -> Failure | None:
    """Return why a run or an iteration did not help; None if it did, or is not over."""
    found = _of_iteration(facts) if isinstance(facts, IterationFacts) else _of_run(facts)
    return next((Failure(kind=kind, evidence=evidence) for kind, evidence in found if evidence), None)


def _strongest(facts: Facts) -> Found:
    """Yield the causes, the strongest evidence first."""
    found = [(kind, rule(facts)) for kind, rule in CAUSES.items()]
    yield from sorted(found, key=lambda one: -strength_of(one[1]))


def _outcome(gain: GainBounds | None, split: str) -> Found:
    """Yield what the gain alone says, where nothing shows a cause."""
    if gain is not None:
        yield FailureKind.WORSE if gain.worse else FailureKind.NO_GAIN, _gain(gain, split)


def _of_iteration(facts: IterationFacts) -> Found:
    number, status = facts.submission_id, facts.status
    if facts.fault in INFRASTRUCTURE:
        yield FailureKind.INFRASTRUCTURE, _ledger(number, facts.fault, facts.message)
    if status is SubmissionState.FAILED:
        yield FailureKind.ENGINE_CRASH, engine_crash(facts)
    if status is SubmissionState.REFUSED or (status is SubmissionState.FAILED and facts.fault is Fault.ARTIFACT):
        yield FailureKind.ARTIFACT_REFUSED, _ledger(number, facts.code or facts.fault, facts.message)
    if status is SubmissionState.ACCEPTED:
        return
    yield from ((kind, rule(facts)) for kind, rule in SPOILS.items())
    if facts.gain is not None and facts.gain.beyond_noise:
        return
    yield from _strongest(facts)
    yield from _outcome(facts.gain, "feedback")


def _of_run(facts: RunFacts) -> Found:
    if facts.fault in INFRASTRUCTURE or facts.ended_by is EndedBy.CRASHED:
        yield FailureKind.INFRASTRUCTURE, _ledger(None, facts.fault or facts.ended_by, facts.reason)
    if facts.ended_by is EndedBy.CANCELLED:
        return
    accepted = [each for each in facts.iterations if each.status is not SubmissionState.REFUSED]
    if not accepted:
        yield from _without_submission(facts)
        return
    yield from ((kind, rule(facts)) for kind, rule in SPOILS.items())
    gain = facts.report_gain or facts.feedback_gain
    if facts.ended_by is None or (gain is not None and gain.beyond_noise):
        return
    if all(each.status is SubmissionState.FAILED for each in accepted):
        yield from _of_iteration(accepted[-1])
        return
    # of what is equally strong: the whole run's cause, then the most common one of its iterations, of these the latest
    each_own = [failure for each in accepted if (failure := failure_of(each)) is not None and failure.kind in CAUSES]
    kinds = [failure.kind for failure in each_own]
    each_own.reverse()
    common = sorted(each_own, key=lambda failure: -kinds.count(failure.kind))
    found = [*_strongest(facts), *((failure.kind, failure.evidence) for failure in common)]
    yield from sorted(found, key=lambda one: -strength_of(one[1]))
    yield from _outcome(gain, "report" if facts.report_gain else "feedback")


def _without_submission(facts: RunFacts) -> Found:
    if facts.ended_by is None:
        yield FailureKind.EARLY_CODING, early_coding(facts)
        return
    if facts.refused:
        last = facts.iterations[-1] if facts.iterations else None
        says = (last.message if last is not None else None) or f"{facts.refused} refusals"
        yield FailureKind.ARTIFACT_REFUSED, _ledger(last.submission_id if last is not None else None, says)
    yield from _strongest(facts)
    if facts.ended_by in OUT_OF_BUDGET:
        says = f"{OUT_OF_BUDGET[facts.ended_by]} ({facts.elapsed_s:.0f} of {facts.budget_s:.0f} s) before anything was submitted"
        if facts.ended_by in OTHER_CURRENCIES and facts.reason:
            says += f": {clean(facts.reason, 200)}"
        yield FailureKind.BUDGET_OUT, (EvidenceLine(where="ledger: sealed", says=says),)
    yield FailureKind.NO_SUBMISSION, _line("ledger: sealed", "no submission was accepted")
