"""One function for each kind of failure: what it takes, and the lines that say so. None: it is not that.

Thresholds are docs/routes.md's; each says why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import fmean

from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.failures import reading
from autorl_hpc.report.failures.facts import Exit, Gain, IterationFacts, LogExcerpt, RunFacts
from autorl_hpc.report.story import EvidenceLine

Facts = RunFacts | IterationFacts
Evidence = tuple[EvidenceLine, ...]

MIN_POINTS = 5
"""Fewer logged steps than this show no trend."""
ZERO_STD_SHARE = 0.8
"""Of the logged steps without any spread of rewards: GRPO's advantage is zero in all of them, so hardly anything is learned."""
EMPTY_SHARE = 0.5
"""Of the logged steps with empty completions; mean length at most EMPTY_TOKENS."""
EMPTY_TOKENS = 1.0
REWARD_RISE = 0.1
"""A rise of the training reward by this share of its range so far, from the first to the last third, is one that a trainer's
author would call success."""
TINY_ROWS = 20
"""Rows: what is trained on fewer is learned by heart."""
LOSS_FACTOR = 10.0
"""Times the median of the first third; a loss that has grown tenfold doesn't come back."""
LOSS_FLOOR = 1.0
"""A loss below it is no explosion, whatever it was before (GRPO's starts at 0)."""
KL_EXPLODED = 10.0
"""Nats a token or sequence: trl's and verl's runs stay below 1 while they learn."""
FAR_UNDER_BASE = 10.0
"""Points below the base model, with the whole interval below zero."""
EARLY_SHARE = 0.5
"""Of the budget: who has neither trained nor submitted by then had trouble with code."""
GAP_POINTS = 3.0
"""An optimism gap below it is no reason by itself."""
_PARTS = re.compile(r"[^a-z]+")
_BESIDE = frozenset({"eval", "val", "valid", "validation", "test", "std", "margins", "accuracies"})
"""Parts of names of figures that may be no number in a sound training: of an empty evaluation, of one sample's spread."""
CONTAMINATED_ITEMS = 3
"""Whole held-out items in the workspace: one or two may be chance (docs/contamination.md)."""


def training_collapse(facts: Facts) -> Evidence | None:
    """NaN or Inf, exploding loss or KL, one and the same answer, or a score far under the base model's."""
    found: list[EvidenceLine] = []
    trainings = _stages(facts.training)
    found += _not_finite(trainings)
    told = reading.told_of_nan(reading.lines(facts.logs))
    if len(told) > 1 or not any(p.loss is not None for p in facts.training):
        found += reading.evidence(told)[:1]
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
    """The last training of each source: what was trained again was given up, and begins where the step or the epoch falls."""
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
    """Figures of the training itself that were no finite numbers in two logged steps running, or in the last one.

    A gradient norm alone must be the last two: scaled half-precision training begins with infinite ones and skips their steps.
    """
    found: list[EvidenceLine] = []
    for own in trainings:
        bad = [[name for name in p.not_finite if _is_of_training(name)] for p in own]
        hard = [[name for name in names if not _is_gradient(name)] for names in bad]
        at = next((n for n in range(len(own) - 1) if hard[n] and hard[n + 1]), None)
        if at is None and own and (hard[-1] or all(bad[-2:])):
            at = len(own) - 1
        if at is not None:
            found.append(reading.point_line(own[at], f"{', '.join(bad[at][:5])}: no finite number"))
    return found[:1]


def _is_of_training(name: str) -> bool:
    """Whether a trainer's figure is its loss, reward, KL or gradient norm, and none of an evaluation or a spread."""
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
                    reading.point_line(last, f"loss {value:.4g}, {abs(value) / usual:.0f} times that of the beginning")
                )
        kls = [(p, p.kl) for p in own if p.kl is not None and math.isfinite(p.kl)]
        if kls and kls[-1][1] > KL_EXPLODED:
            found.append(reading.point_line(kls[-1][0], f"KL {kls[-1][1]:.4g}"))
    return found


def _samples(facts: Facts) -> bool | None:
    """Whether anything sampled from a model; None: nobody knows."""
    rewarded = any(p.reward is not None or any("reward" in name for name in p.more) for p in facts.training)
    return True if rewarded else facts.samples


def rollout_construction(facts: Facts) -> Evidence | None:
    """Rollouts that broke: their own tracebacks, empty or identical completions, answers not parsed, a reward without any change."""
    known = list(reading.lines(facts.logs))
    samples = _samples(facts)
    traces = [t for t in reading.tracebacks(known) if t.in_rollout] if samples is not False else []
    told = reading.told_of_rollouts(known) if samples else []
    empty = _empty(facts.training)
    constant = _constant_reward(facts.training)
    if traces:
        return (*reading.evidence(traces), *empty)
    if empty:
        return (*empty, *reading.evidence(told))
    if told and (constant or len(told) >= 3):
        return (*reading.evidence(told), *constant)
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
        return (
            reading.point_line(point, f"completions of {value:.3g} tokens in {len(short)} of {len(lengths)} steps"),
        )
    return ()


def _constant_reward(training: Sequence[TrainingPoint]) -> Evidence:
    """All rewards one number over at least MIN_POINTS steps."""
    rewards = [(p, p.reward) for p in training if p.reward is not None]
    if len(rewards) >= MIN_POINTS and len({v for _, v in rewards}) == 1:
        point, value = rewards[-1]
        return (reading.point_line(point, f"reward {value:.4g} in all {len(rewards)} logged steps"),)
    return ()


def reward_or_data(facts: Facts) -> Evidence | None:
    """No spread of rewards, a reward that rises while the score falls, data that is empty, tiny or of the wrong format."""
    found: list[EvidenceLine] = [*_no_spread(facts.training), *_constant_reward(facts.training)]
    if isinstance(facts, IterationFacts):
        found += _against_score(facts)
        if facts.dataset_rows is not None and facts.dataset_rows < TINY_ROWS:
            found.append(EvidenceLine(where="training log", says=f"trained on {facts.dataset_rows} rows"))
    told = reading.told_of_data(reading.lines(facts.logs))
    return (*found, *reading.evidence(told)) or None


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
        return (reading.point_line(flat[-1], f"no spread of rewards in {len(flat)} of {len(spreads)} logged steps"),)
    return ()


def _against_score(facts: IterationFacts) -> Evidence:
    """The training reward rose and the feedback score fell."""
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
    return (reading.point_line(rewards[-1][0], says),)


def static_shortcut(facts: Facts) -> Evidence | None:
    """Gain, or the look of it, that doesn't come from learning the task."""
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
    found += list(facts.hard_coded)[: reading.MAX_EVIDENCE]
    if isinstance(facts, RunFacts):
        found += _no_transfer(facts)
    return tuple(found) or None


def _no_transfer(facts: RunFacts) -> Evidence:
    """A gain on the feedback split beyond noise, and none on the report split."""
    told, real = facts.feedback_gain, facts.report_gain
    if told is None or real is None or not told.beyond_noise or real.beyond_noise:
        return ()
    lines = (gain_line(told, "feedback"), gain_line(real, "report"))
    gap = facts.optimism_gap if facts.optimism_gap is not None else told.points - real.points
    if gap < GAP_POINTS:
        return ()
    return (*lines, EvidenceLine(where=real.where or "report split", says=f"optimism gap {gap:.1f} points"))


def early_coding(facts: Facts) -> Evidence | None:
    """Programs that broke before anything was trained: tracebacks or exit codes, no training step and no submission."""
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


def _broken(logs: Sequence[LogExcerpt], exits: Sequence[Exit]) -> Evidence | None:
    known = list(reading.lines(logs))
    found = (
        *reading.evidence(reading.tracebacks(known)),
        *(reading.exit_line(e) for e in reading.broken_exits(exits)[:3]),
    )
    return found or None


def gain_line(gain: Gain, split: str) -> EvidenceLine:
    """A gain with its interval."""
    bounds = f" [{gain.low:+.1f}, {gain.high:+.1f}]" if gain.low is not None and gain.high is not None else ""
    return EvidenceLine(where=gain.where or f"{split} split", says=f"{split} gain {gain.points:+.1f} points{bounds}")
