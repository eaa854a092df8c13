"""Classify why a run or a submission did not help (the paper's taxonomy, extended), with evidence lines; see `failure_of`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.format import clean
from autorl_hpc.report.story_records import EvidenceLine, Failure
from autorl_hpc.states import EndedBy, FailureKind, Fault, SubmissionState

# --- the classifier's input, filled from ledger, recorder and scores


@dataclass(frozen=True)
class LogExcerpt:
    """A part of a log, unchanged; `offset` is the position of its first byte."""

    source: str
    offset: int
    text: str
    only_tracebacks: bool = False
    """True for an excerpt cut out around a traceback: its other lines are not log lines."""


@dataclass(frozen=True)
class ProcessExit:
    """The end of a process or of a tool call. `exit_code`: negative for a signal, None if unknown."""

    command: str
    exit_code: int | None
    elapsed_s: float = 0.0
    ok: bool | None = None
    """For traces that say only whether a call failed, without a code."""


@dataclass(frozen=True)
class GainBounds:
    """Gain over the base model in points, with the bounds of its interval; None if a bound could not be computed."""

    points: float
    low: float | None = None
    high: float | None = None
    where: str = ""
    """Source: ledger entries or a file."""

    @property
    def beyond_noise(self) -> bool:
        """Return whether the whole interval is above zero; False without a bound."""
        return self.low is not None and self.low > 0

    @property
    def below_noise(self) -> bool:
        """Return whether the whole interval is below zero; False without a bound."""
        return self.high is not None and self.high < 0


@dataclass(frozen=True)
class IterationFacts:
    """One submission, and the time since the previous one (or the start)."""

    submission_id: int
    status: SubmissionState
    score: float | None = None
    base_score: float | None = None
    score_before: float | None = None
    """Feedback score of the iteration that this one builds on."""
    gain: GainBounds | None = None
    """On the feedback split."""
    fault: Fault | None = None
    code: str | None = None
    """Code of a refusal."""
    message: str | None = None
    flags: Sequence[str] = ()
    contaminated_items: int = 0
    """Held-out items whose whole text was in the workspace."""
    hard_coded: Sequence[EvidenceLine] = ()
    """Lines of code with held-out items or their answers."""
    dataset_rows: int | None = None
    """Rows that the trainer trained on, if a log says so."""
    training: Sequence[TrainingPoint] = ()
    logs: Sequence[LogExcerpt] = ()
    exits: Sequence[ProcessExit] = ()
    samples: bool | None = None
    """Whether code or logs sample from a model (RL, or data made of samples). None: unknown; then a logged reward decides."""


@dataclass(frozen=True)
class RunFacts:
    """A whole run."""

    budget_s: float
    elapsed_s: float
    iterations: Sequence[IterationFacts] = ()
    failures: Sequence[Failure | None] = ()
    """`failure_of` each iteration, if already computed."""
    ended_by: EndedBy | None = None
    """None: it is still running, or unknown."""
    fault: Fault | None = None
    reason: str | None = None
    refused: int = 0
    """All refusals, including those that are not an iteration."""
    first_accepted_s: float | None = None
    feedback_gain: GainBounds | None = None
    """Of the selected checkpoint."""
    report_gain: GainBounds | None = None
    optimism_gap: float | None = None
    """Feedback gain minus report gain, in points; None if one is unknown."""
    flags: Sequence[str] = ()
    """Of the selected checkpoint."""
    contaminated_items: int = 0
    hard_coded: Sequence[EvidenceLine] = ()
    training: Sequence[TrainingPoint] = ()
    logs: Sequence[LogExcerpt] = ()
    exits: Sequence[ProcessExit] = ()
    samples: bool | None = None
    """As in `IterationFacts`."""


# --- signs of trouble in training points, logs and exits

MAX_LOG_CHARS = 400_000
"""Limit for all excerpts together; the ends are read, because tracebacks are there."""

MAX_LINE_CHARS = 2_000
MAX_TRACE_CHARS = 8_000
"""Length of a traceback inside a line of JSON."""
MAX_FRAME_LINES = 18
"""The last frames of a traceback, each with source line and markers: the error is in these."""
MAX_EVIDENCE = 5
"""Lines shown per finding."""

_PREFIX = r"(?:\[[\w: ]{1,20}\]:?\s)?"
"""Prefix that a launcher adds to each line: `[rank0]:`."""
_ERROR = re.compile(rf"^\s*{_PREFIX}\s*([A-Za-z_][\w.]{{0,80}})(?::\s?(.{{0,300}})|\s*$)")
_RAISED = re.compile(rf"^{_PREFIX}[\w.]{{0,80}}(?:Error|Exception): ")
_FRAME = re.compile(rf'^{_PREFIX}\s+File "([^"]{{0,500}})", line \d+, in (.{{1,100}})')
_INDENTED = re.compile(rf"^{_PREFIX}\s+\S")
_INSTALLED = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|\.?venv|(?:mini|ana)?conda\d?)/|/lib(?:64)?/python\d|^/usr/(?:local/)?lib|^<frozen"
)
"""Folders of installed packages and of Python: frames there show what a library did, not the agent's code."""
_ROLLOUT_FRAME = re.compile(
    r"rollout|generat|vllm|(?:^|_)env|environment|episode|sampl(?!er)|reward|tool|playout|completion|parse(?!_?arg|_?conf|_?cli|_?opt|r)",
    re.I,
)
_ROLLOUT_WORDS = re.compile(
    r"(?:rollout|episode|tool call|generation|completion|answer|environment (?:step|reset|worker)|env (?:step|reset|worker))s?\b.{0,60}\b(?:fail|error|crash|timed? ?out|empty|could not|unable)"
    r"|(?:fail|could not|unable)\w*\b.{0,40}\b(?:parse|extract|roll ?out|step the env|reset the env|generat)"
    r"|(?:no|0|zero)\s+(?:valid\s+)?(?:completions|rollouts|answers|responses|episodes)\b"
    r"|(?:all|every)\s+(?:completions|rollouts|rewards|responses)\b.{0,30}\b(?:empty|identical|zero|same)",
    re.I,
)
_PROSE = re.compile(
    r"\b(?:may|might|would|should|maybe|perhaps|if|I|I'll|I'm|let me|let's|we|could(?! not)|can(?! ?not)|will)\b"
)
"""Words of an agent thinking aloud, about what may fail. Programs don't log such words."""
_OF_TRACE = re.compile(r"^\s*(?:\{\s*\"|\"[\w.-]{1,40}\"\s*:)")
"""A line of JSON from an agent's trace. What it quotes may be code, a file or a thought instead of a log."""
_OF_CODE = re.compile(r"\b(?:assert|raise|return|print\(|isnan|isfinite|isinf|def|elif)\b|^\s*#|print\(|\bf['\"]")
_ESCAPED = re.compile(r"Traceback \(most recent call last\):(\\+)n")
_DATA_WORDS = re.compile(
    r"(?:dataset|train(?:ing)? (?:set|data|examples))\b.{0,40}\b(?:is empty|has no|0 (?:rows|examples|samples))"
    r"|num_samples should be a positive integer value, but got num_samples=0"
    r"|num examples = 0\b|column names? .{0,60}(?:not in|missing|don't match)|keyerror: ['\"](?:prompt|text|messages|question|answer|chosen|rejected|completion|labels)['\"]"
    r"|mismatch between .{0,40}tokeniz|chat_template is not set",
    re.I,
)


_NAN = re.compile(
    r"\b(?:loss|grad_norm|kl)['\"]?\s{0,3}[:=]\s{0,3}['\"]?(?:tensor\()?[-+]?(?:nan|inf(?:inity)?)\b", re.I
)


class LogLine(NamedTuple):
    """One line of a log."""

    where: str
    text: str
    is_log: bool = True
    """False for a line of a trace or of an excerpt around a traceback: read for tracebacks only."""


def lines(logs: Sequence[LogExcerpt]) -> Iterator[LogLine]:
    """Yield lines of log excerpts, each with its byte offset. A traceback inside a line of JSON gives several lines."""
    left = MAX_LOG_CHARS
    for log in logs:
        text = log.text[-left:] if left else ""
        left -= len(text)
        offset = log.offset + len(log.text[: len(log.text) - len(text)].encode("utf-8", "replace"))
        for line in text.split("\n"):
            where = f"{clean(log.source, 150)}, byte {offset}"
            escaped = _ESCAPED.search(line)
            if escaped is not None:
                for inner in _unescaped(line[escaped.start() : escaped.start() + MAX_TRACE_CHARS], escaped[1]):
                    yield LogLine(where, inner[:MAX_LINE_CHARS], False)
            else:
                is_log = not log.only_tracebacks and _OF_TRACE.match(line) is None
                yield LogLine(where, line[:MAX_LINE_CHARS], is_log)
            offset += len(line.encode("utf-8", "replace")) + 1


def _unescaped(text: str, slashes: str) -> list[str]:
    """Return the lines of a text inside a JSON string, or a nested one: `slashes` are the backslashes before each `n`."""
    found = []
    for line in text.split(slashes + "n"):
        whole, end, _ = line.replace(slashes + '\\"', "\1").replace(slashes + '"', "\1").partition('"')
        found.append(whole.replace("\1", '"'))
        if end:
            break
    return found


class Trace(NamedTuple):
    """One Python traceback."""

    where: str
    error: str
    """The last line: class and message."""
    in_rollout: bool
    """Whether a frame is in code for rollouts, environments, rewards or sampling."""


def tracebacks(known: Sequence[LogLine]) -> list[Trace]:
    """Return complete tracebacks in order."""
    found: list[Trace] = []
    begun: LogLine | None = None
    frames: list[str] = []
    for line in known:
        if "Traceback (most recent call last)" in line.text:
            begun, frames = line, []
        elif begun is not None:
            if _INDENTED.match(line.text) or not line.text.strip():
                frames.append(line.text)
            elif (match := _ERROR.match(line.text)) is not None:
                last = frames[-MAX_FRAME_LINES:]
                in_rollout = any(_is_of_rollout(frame) for frame in last)
                found.append(Trace(begun.where, f"{match[1]}: {match[2] or ''}".strip(": "), in_rollout))
                begun = None
            if begun is not None and not line.is_log and line.text.endswith("…"):  # a trace quotes only the beginning
                in_rollout = any(_is_of_rollout(frame) for frame in frames)
                found.append(Trace(begun.where, f"a traceback, cut: {line.text.strip()}", in_rollout))
                begun = None
            if len(frames) > 400:
                begun = None
    return found


def _is_of_rollout(frame: str) -> bool:
    """Match the names of function and file, not of folders; frames in installed code don't count."""
    match = _FRAME.match(frame)
    if match is None or _INSTALLED.search(match[1]) is not None:
        return False
    if match[2].strip() != "<module>" and _ROLLOUT_FRAME.search(match[2]) is not None:
        return True
    return _ROLLOUT_FRAME.search(match[1].rsplit("/", 1)[-1]) is not None


def told_of_rollouts(known: Iterable[LogLine]) -> list[LogLine]:
    """Return lines that complain of rollouts, environments or answers that could not be parsed."""
    return [line for line in known if _ROLLOUT_WORDS.search(line.text) and _is_said(line)]


def told_of_nan(known: Iterable[LogLine]) -> list[LogLine]:
    """Return lines that log a non-finite loss, without printed lines of code."""
    return [line for line in known if line.is_log and _NAN.search(line.text) and not _OF_CODE.search(line.text)]


def told_of_data(known: Iterable[LogLine]) -> list[LogLine]:
    """Return lines that complain of an empty or badly formatted data set, including last lines of tracebacks."""
    return [line for line in known if _DATA_WORDS.search(line.text) and (_RAISED.match(line.text) or _is_said(line))]


def _is_said(line: LogLine) -> bool:
    """Return whether a program logged the line, judging by its words."""
    return line.is_log and _PROSE.search(line.text) is None


def evidence(found: Iterable[LogLine | Trace]) -> tuple[EvidenceLine, ...]:
    """Return the first `MAX_EVIDENCE` as lines to show."""
    shown = []
    for each in found:
        text = each.text if isinstance(each, LogLine) else each.error
        shown.append(EvidenceLine(where=each.where, says=clean(text, 200) or ""))
        if len(shown) >= MAX_EVIDENCE:
            break
    return tuple(shown)


def broken_exits(exits: Sequence[ProcessExit]) -> list[ProcessExit]:
    """Return failed ends of training programs (Python, launchers, trainers); signals count too."""
    return [
        e
        for e in exits
        if (e.exit_code not in (0, None) or (e.exit_code is None and e.ok is False))
        and re.search(r"python|torchrun|accelerate|deepspeed|trl|llamafactory|axolotl|\.sh\b", e.command)
    ]


def exit_line(each: ProcessExit) -> EvidenceLine:
    """Return how a program ended, as a line to show."""
    code = each.exit_code or 0
    how = f"signal {-code}" if code < 0 else "failed" if each.exit_code is None else f"exit code {code}"
    return EvidenceLine(where=f"process at {each.elapsed_s:.0f} s", says=f"{how}: {clean(each.command, 150)}")


def point_line(point: TrainingPoint, says: str) -> EvidenceLine:
    """Return a training point as a line to show."""
    step = f", step {point.step}" if point.step is not None else ""
    return EvidenceLine(where=f"{clean(point.source, 150)}{step}, {point.elapsed_s:.0f} s", says=says)


# --- one function per kind of failure; returns evidence lines, or None if the kind does not apply
# Thresholds are explained in docs/routes.md.

Facts = RunFacts | IterationFacts
Evidence = tuple[EvidenceLine, ...]

MIN_POINTS = 5
"""Fewer logged steps show no trend."""
ZERO_STD_SHARE = 0.8
"""Share of logged steps without spread of rewards: GRPO's advantage is zero in these, so almost nothing is learned."""
EMPTY_SHARE = 0.5
"""Share of logged steps with empty completions (mean length at most EMPTY_TOKENS)."""
EMPTY_TOKENS = 1.0
REWARD_RISE = 0.1
"""Least rise of the training reward from the first to the last third, as a share of its range: a trainer's author would
call this success."""
TINY_ROWS = 20
"""A model trained on fewer rows memorises them."""
LOSS_FACTOR = 10.0
"""Times the median of the first third; a loss that grew tenfold does not recover."""
LOSS_FLOOR = 1.0
"""A smaller loss has not exploded, whatever it was before (GRPO's starts at 0)."""
KL_EXPLODED = 10.0
"""Nats per token or sequence; runs of trl and verl stay below 1 while they learn."""
FAR_UNDER_BASE = 10.0
"""Points below the base model, with the whole interval below zero."""
EARLY_SHARE = 0.5
"""Share of the budget: an agent that has neither trained nor submitted by then has trouble with code."""
GAP_POINTS = 3.0
"""A smaller optimism gap is not a reason by itself."""
_PARTS = re.compile(r"[^a-z]+")
_BESIDE = frozenset({"eval", "val", "valid", "validation", "test", "std", "margins", "accuracies"})
"""Parts of metric names that may be NaN in sound training: an empty evaluation, the spread of one sample."""
CONTAMINATED_ITEMS = 3
"""Whole held-out items in the workspace; one or two may be chance (docs/contamination.md)."""


def training_collapse(facts: Facts) -> Evidence | None:
    """Detect NaN or Inf, exploding loss or KL, identical answers, or a score far below the base model's."""
    found: list[EvidenceLine] = []
    trainings = _stages(facts.training)
    found += _not_finite(trainings)
    told = told_of_nan(lines(facts.logs))
    if len(told) > 1 or not any(p.loss is not None for p in facts.training):
        found += evidence(told)[:1]
    found += _exploded(trainings)
    if "degenerate_outputs" in facts.flags:
        found.append(
            EvidenceLine(where="ledger: fingerprint", says="degenerate_outputs: most answers are one and the same text")
        )
    if (
        isinstance(facts, IterationFacts)
        and facts.gain is not None
        and facts.gain.below_noise
        and facts.gain.points <= -FAR_UNDER_BASE
    ):
        found.append(gain_line(facts.gain, "feedback"))
    return tuple(found) or None


def _stages(training: Sequence[TrainingPoint]) -> list[list[TrainingPoint]]:
    """Return the last training of each source. A drop in step or epoch starts a new training, so the earlier one was given up."""
    found: dict[str, list[TrainingPoint]] = {}
    for point in training:
        own = found.setdefault(point.source, [])
        if own and _fell(own[-1], point):
            own.clear()
        own.append(point)
    return list(found.values())


def _fell(before: TrainingPoint, point: TrainingPoint) -> bool:
    if before.step is not None and point.step is not None:
        return point.step < before.step
    return before.epoch is not None and point.epoch is not None and point.epoch < before.epoch


def _not_finite(trainings: Sequence[Sequence[TrainingPoint]]) -> list[EvidenceLine]:
    """Find the first training metric that is not finite in two consecutive logged steps or in the last step.

    A gradient norm counts only in the last two: mixed-precision training starts with infinite ones and skips these steps.
    """
    found: list[EvidenceLine] = []
    for own in trainings:
        bad = [[name for name in p.not_finite if _is_of_training(name)] for p in own]
        hard = [[name for name in names if not _is_gradient(name)] for names in bad]
        at = next((n for n in range(len(own) - 1) if hard[n] and hard[n + 1]), None)
        if at is None and own and (hard[-1] or all(bad[-2:])):
            at = len(own) - 1
        if at is not None:
            found.append(point_line(own[at], f"{', '.join(bad[at][:5])}: no finite number"))
    return found[:1]


def _is_of_training(name: str) -> bool:
    """Return whether a metric is the training's loss, reward, KL or gradient norm, not one of an evaluation or a spread."""
    parts = set(_PARTS.split(name.lower()))
    return not parts & _BESIDE and (bool(parts & {"loss", "reward", "rewards", "kl", "approxkl"}) or _is_gradient(name))


def _is_gradient(name: str) -> bool:
    return {"grad", "norm"} <= set(_PARTS.split(name.lower()))


def _exploded(trainings: Sequence[Sequence[TrainingPoint]]) -> list[EvidenceLine]:
    found: list[EvidenceLine] = []
    for own in trainings:
        losses = [(p, p.loss) for p in own if p.loss is not None and math.isfinite(p.loss)]
        if len(losses) >= MIN_POINTS:
            early = sorted(abs(v) for _, v in losses[: max(1, len(losses) // 3)])
            usual = max(early[len(early) // 2], LOSS_FLOOR / LOSS_FACTOR)
            last, value = losses[-1]
            if abs(value) > LOSS_FACTOR * usual and abs(value) > LOSS_FLOOR:
                found.append(
                    point_line(last, f"loss {value:.4g}, {abs(value) / usual:.0f} times that of the beginning")
                )
        kls = [(p, p.kl) for p in own if p.kl is not None and math.isfinite(p.kl)]
        if kls and kls[-1][1] > KL_EXPLODED:
            found.append(point_line(kls[-1][0], f"KL {kls[-1][1]:.4g}"))
    return found


def _samples(facts: Facts) -> bool | None:
    """Return whether anything sampled from a model; None if unknown."""
    rewarded = any(p.reward is not None or any("reward" in name for name in p.more) for p in facts.training)
    return True if rewarded else facts.samples


def rollout_construction(facts: Facts) -> Evidence | None:
    """Detect broken rollouts: tracebacks, empty or identical completions, unparsed answers, a constant reward."""
    known = list(lines(facts.logs))
    samples = _samples(facts)
    traces = [t for t in tracebacks(known) if t.in_rollout] if samples is not False else []
    told = told_of_rollouts(known) if samples else []
    empty = _empty(facts.training)
    constant = _constant_reward(facts.training)
    if traces:
        return (*evidence(traces), *empty)
    if empty:
        return (*empty, *evidence(told))
    if told and (constant or len(told) >= 3):
        return (*evidence(told), *constant)
    return None


def _empty(training: Sequence[TrainingPoint]) -> Evidence:
    lengths = [
        (p, v)
        for p in training
        if p.more
        for k, v in p.more.items()
        if k in ("completions/mean_length", "completion_length", "response_length/mean")
    ]
    short = [(p, v) for p, v in lengths if v <= EMPTY_TOKENS]
    if len(lengths) >= MIN_POINTS and len(short) >= EMPTY_SHARE * len(lengths):
        point, value = short[-1]
        return (point_line(point, f"completions of {value:.3g} tokens in {len(short)} of {len(lengths)} steps"),)
    return ()


def _constant_reward(training: Sequence[TrainingPoint]) -> Evidence:
    """Return evidence if all rewards are equal over at least MIN_POINTS steps."""
    rewards = [(p, p.reward) for p in training if p.reward is not None]
    if len(rewards) >= MIN_POINTS and len({v for _, v in rewards}) == 1:
        point, value = rewards[-1]
        return (point_line(point, f"reward {value:.4g} in all {len(rewards)} logged steps"),)
    return ()


def reward_or_data(facts: Facts) -> Evidence | None:
    """Detect rewards without spread, a reward that rises while the score falls, and empty, tiny or badly formatted data."""
    found: list[EvidenceLine] = [*_no_spread(facts.training), *_constant_reward(facts.training)]
    if isinstance(facts, IterationFacts):
        found += _against_score(facts)
        if facts.dataset_rows is not None and facts.dataset_rows < TINY_ROWS:
            found.append(EvidenceLine(where="training log", says=f"trained on {facts.dataset_rows} rows"))
    told = told_of_data(lines(facts.logs))
    return (*found, *evidence(told)) or None


def _no_spread(training: Sequence[TrainingPoint]) -> Evidence:
    spreads: list[tuple[TrainingPoint, bool]] = []
    for point in training:
        if not point.more:
            continue
        std = point.more.get("reward_std")
        share = point.more.get("frac_reward_zero_std")
        if std is not None or share is not None:
            spreads.append((point, std == 0 if std is not None else (share or 0) >= 1))
    flat = [point for point, is_flat in spreads if is_flat]
    if len(spreads) >= MIN_POINTS and len(flat) >= ZERO_STD_SHARE * len(spreads):
        return (point_line(flat[-1], f"no spread of rewards in {len(flat)} of {len(spreads)} logged steps"),)
    return ()


def _against_score(facts: IterationFacts) -> Evidence:
    """Return evidence if the training reward rose and the feedback score fell."""
    rewards = [(p, p.reward) for p in facts.training if p.reward is not None and math.isfinite(p.reward)]
    before = facts.score_before if facts.score_before is not None else facts.base_score
    if len(rewards) < MIN_POINTS or facts.score is None or before is None or facts.score >= before:
        return ()
    if facts.gain is not None and not facts.gain.below_noise and facts.score_before is None:
        return ()
    third = max(1, len(rewards) // 3)
    first, last = fmean(v for _, v in rewards[:third]), fmean(v for _, v in rewards[-third:])
    spread = max(v for _, v in rewards) - min(v for _, v in rewards)
    if spread <= 0 or last - first <= REWARD_RISE * max(spread, abs(first)):
        return ()
    says = f"training reward {first:.4g} to {last:.4g} while the feedback score went from {before:.4g} to {facts.score:.4g}"
    return (point_line(rewards[-1][0], says),)


def static_shortcut(facts: Facts) -> Evidence | None:
    """Detect a gain, or an apparent one, that does not come from learning the task."""
    found: list[EvidenceLine] = []
    for flag in ("untrained_copy", "foreign_weights"):
        if flag in facts.flags:
            found.append(EvidenceLine(where="ledger: fingerprint", says=flag))
    if facts.contaminated_items >= CONTAMINATED_ITEMS:
        found.append(
            EvidenceLine(
                where="ledger: contamination", says=f"{facts.contaminated_items} held-out items whole in the workspace"
            )
        )
    found += list(facts.hard_coded)[:MAX_EVIDENCE]
    if isinstance(facts, RunFacts):
        found += _no_transfer(facts)
    return tuple(found) or None


def _no_transfer(facts: RunFacts) -> Evidence:
    """Return evidence if the gain on the feedback split is beyond noise and that on the report split is not."""
    told, real = facts.feedback_gain, facts.report_gain
    if told is None or real is None or not told.beyond_noise or real.beyond_noise:
        return ()
    lines = (gain_line(told, "feedback"), gain_line(real, "report"))
    gap = facts.optimism_gap if facts.optimism_gap is not None else told.points - real.points
    if gap < GAP_POINTS:
        return ()
    return (*lines, EvidenceLine(where=real.where or "report split", says=f"optimism gap {gap:.1f} points"))


def early_coding(facts: Facts) -> Evidence | None:
    """Detect programs that broke before any training: tracebacks or exit codes, no training step, no submission."""
    stepped = [p for p in facts.training if (p.step or 0) > 0 or p.loss is not None]
    if isinstance(facts, IterationFacts):
        return None if stepped or facts.score is not None else _broken(facts.logs, facts.exits)
    first = min((p.elapsed_s for p in stepped), default=math.inf)
    submitted = facts.first_accepted_s if facts.first_accepted_s is not None else math.inf
    late = min(first, submitted) > EARLY_SHARE * facts.budget_s
    if not late or (math.isinf(first) and math.isinf(submitted) and not facts.logs and not facts.exits):
        return None
    broken = _broken(facts.logs, facts.exits)
    if broken is None:
        return None
    when = (
        "never"
        if math.isinf(min(first, submitted))
        else f"only after {min(first, submitted):.0f} of {facts.budget_s:.0f} s"
    )
    return (*broken, EvidenceLine(where="training logs, ledger", says=f"a first training step or submission: {when}"))


def _broken(logs: Sequence[LogExcerpt], exits: Sequence[ProcessExit]) -> Evidence | None:
    known = list(lines(logs))
    found = (
        *evidence(tracebacks(known)),
        *(exit_line(e) for e in broken_exits(exits)[:3]),
    )
    return found or None


def gain_line(gain: GainBounds, split: str) -> EvidenceLine:
    """Return a gain with its interval, as a line to show."""
    bounds = f" [{gain.low:+.1f}, {gain.high:+.1f}]" if gain.low is not None and gain.high is not None else ""
    return EvidenceLine(where=gain.where or f"{split} split", says=f"{split} gain {gain.points:+.1f} points{bounds}")


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

CAUSES: tuple[tuple[FailureKind, Callable[[RunFacts | IterationFacts], tuple[EvidenceLine, ...] | None]], ...] = (
    (FailureKind.STATIC_SHORTCUT, static_shortcut),
    (FailureKind.TRAINING_COLLAPSE, training_collapse),
    (FailureKind.ROLLOUT_CONSTRUCTION, rollout_construction),
    (FailureKind.REWARD_OR_DATA, reward_or_data),
    (FailureKind.EARLY_CODING, early_coding),
)
"""In order: what weights and splits prove, then what numbers show, then what logs say. Collapse comes before its causes in
rollouts and rewards, because only collapse says that the model was damaged."""


_CAUSES = dict(CAUSES)


def failure_of(facts: RunFacts | IterationFacts) -> Failure | None:
    """Return why a run or an iteration did not help; None if it did, or is not over."""
    return _of_iteration(facts) if isinstance(facts, IterationFacts) else _of_run(facts)


def _of_iteration(facts: IterationFacts) -> Failure | None:
    if facts.fault in INFRASTRUCTURE:
        return _failure(FailureKind.INFRASTRUCTURE, _told(facts.fault, facts.message, facts.submission_id))
    if facts.status is SubmissionState.REFUSED or (
        facts.status is SubmissionState.FAILED and facts.fault is Fault.ARTIFACT
    ):
        return _failure(
            FailureKind.ARTIFACT_REFUSED, _told(facts.code or facts.fault, facts.message, facts.submission_id)
        )
    if facts.status is SubmissionState.ACCEPTED:
        return None
    shortcut = static_shortcut(facts)
    if shortcut:
        return _failure(FailureKind.STATIC_SHORTCUT, shortcut)
    if facts.gain is not None and facts.gain.beyond_noise:
        return None
    cause = _cause(facts)
    if cause is not None:
        return cause
    if facts.gain is None:
        return None
    return _failure(FailureKind.NO_GAIN, (gain_line(facts.gain, "feedback"),))


def _of_run(facts: RunFacts) -> Failure | None:
    if facts.fault in INFRASTRUCTURE or facts.ended_by is EndedBy.CRASHED:
        return _failure(FailureKind.INFRASTRUCTURE, _told(facts.fault or facts.ended_by, facts.reason, None))
    if facts.ended_by is EndedBy.CANCELLED:
        return None
    accepted = [each for each in facts.iterations if each.status is not SubmissionState.REFUSED]
    if not accepted:
        return _without_submission(facts)
    shortcut = static_shortcut(facts)
    if shortcut:
        return _failure(FailureKind.STATIC_SHORTCUT, shortcut)
    gain = facts.report_gain or facts.feedback_gain
    if facts.ended_by is None or (gain is not None and gain.beyond_noise):
        return None
    if all(_is_refusal(each) for each in accepted):
        return _of_iteration(accepted[-1])
    cause = _cause(facts) or _commonest(facts)
    if cause is not None:
        return cause
    if gain is None:
        return None
    return _failure(FailureKind.NO_GAIN, (gain_line(gain, "report" if facts.report_gain else "feedback"),))


def _without_submission(facts: RunFacts) -> Failure | None:
    """Return the failure of a run without accepted checkpoint: its cause if there is evidence, else what the ledger says."""
    if facts.ended_by is None:
        return rules_only(facts, FailureKind.EARLY_CODING)
    if facts.refused:
        refused = [each for each in facts.iterations if each.status is SubmissionState.REFUSED]
        last = refused[-1] if refused else None
        says = clean(last.message, 200) if last is not None and last.message else f"{facts.refused} refusals"
        where = f"ledger: submission {last.submission_id}" if last is not None else "ledger"
        return _failure(FailureKind.ARTIFACT_REFUSED, (EvidenceLine(where=where, says=says or ""),))
    cause = _cause(facts)
    if cause is not None:
        return cause
    if facts.ended_by in OUT_OF_BUDGET:
        says = f"{OUT_OF_BUDGET[facts.ended_by]} ({facts.elapsed_s:.0f} of {facts.budget_s:.0f} s) before anything was submitted"
        if facts.ended_by in OTHER_CURRENCIES and facts.reason:
            says += f": {clean(facts.reason, 200)}"
        return _failure(FailureKind.BUDGET_OUT, (EvidenceLine(where="ledger: sealed", says=says),))
    return _failure(
        FailureKind.NO_SUBMISSION, (EvidenceLine(where="ledger: sealed", says="no submission was accepted"),)
    )


def rules_only(facts: RunFacts, kind: FailureKind) -> Failure | None:
    """Apply one kind's rule to a run that is still going: it counts only what already happened."""
    found = _CAUSES[kind](facts)
    return _failure(kind, found) if found else None


def _cause(facts: RunFacts | IterationFacts) -> Failure | None:
    for kind, rule in CAUSES:
        found = rule(facts)
        if found:
            return _failure(kind, found)
    return None


def _commonest(facts: RunFacts) -> Failure | None:
    """Return the most common cause among a run's iterations; of equally common ones the latest."""
    asked = facts.failures or [_of_iteration(each) for each in facts.iterations]
    known = [failure for failure in asked if failure is not None and failure.kind in _CAUSES]
    if not known:
        return None
    kinds = [failure.kind for failure in known]
    return max(enumerate(known), key=lambda pair: (kinds.count(pair[1].kind), pair[0]))[1]


def _is_refusal(each: IterationFacts) -> bool:
    return each.status is SubmissionState.FAILED


def _told(what: object, message: str | None, submission_id: int | None) -> tuple[EvidenceLine, ...]:
    where = f"ledger: submission {submission_id}" if submission_id is not None else "ledger"
    return (EvidenceLine(where=where, says=": ".join(str(x) for x in (what, clean(message, 200)) if x)),)


def _failure(kind: FailureKind, evidence: tuple[EvidenceLine, ...]) -> Failure:
    return Failure(kind=kind, evidence=evidence)
