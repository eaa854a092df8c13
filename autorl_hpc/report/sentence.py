"""Tell a run in one sentence (`sentence`): what the agent did, how it ended, what it gained, whether that is more than noise, and
where it failed."""

from __future__ import annotations

import signal

from autorl_hpc.report import format as fmt
from autorl_hpc.report.run_story.failures import OUT_OF_BUDGET
from autorl_hpc.report.summary import Gain, RunSummary
from autorl_hpc.scoring.stats import ALPHA
from autorl_hpc.states import EndedBy, FailureKind, Route, RunState

ROUTES = {
    Route.NONE: "no training",
    Route.COPY: "a copy of existing weights",
    Route.PREFERENCE: "preference training",
    Route.REJECTION_SAMPLING: "rejection sampling",
    Route.RL: "RL",
    Route.SFT_RL: "RL after SFT",
    Route.AVERAGING: "model averaging",
    Route.DISTILLATION: "distillation",
    Route.UNKNOWN: "a training of unknown kind",
}
"""What a route is called in a sentence; the others are abbreviations."""

MAX_ERROR_CHARS = 200
OUTCOMES = (FailureKind.NO_SUBMISSION, FailureKind.NO_GAIN, FailureKind.WORSE, FailureKind.INFRASTRUCTURE)
"""Failures that the rest of the sentence says already."""


def sentence(run: RunSummary) -> str:
    """Return the run in one sentence."""
    if run.damage:
        told = [f"The ledger is damaged, so the run does not count: {run.damage}"]
    elif run.state is RunState.QUEUED:
        told = ["Waits for its start"]
    elif run.excluded == "infrastructure":
        told = [
            f"Lost to the infrastructure after {fmt.duration(run.elapsed_s)}, not counted: {run.reason or run.fault}"
        ]
    elif run.accepted:
        told = [part for part in (_did(run), _submissions(run), _gain(run), _failure(run), _end(run)) if part]
    else:
        did = "" if run.story.route.executed in (Route.UNKNOWN, Route.NONE) else _did(run)
        told = [part for part in (_end(run), did, _submissions(run), _failure(run)) if part]
    text = "; ".join(told)
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def route_in_words(route: Route) -> str:
    """Return what a route is called: `SFT`, `rejection sampling`."""
    return ROUTES.get(route, str(route).upper())


def ending(ended_by: EndedBy, exit_code: int | None, elapsed_s: float, error: str | None = None) -> str:
    """Return how an agent ended: `exited with code 1 after 14 s: ModuleNotFoundError: No module named 'trl'`."""
    after = f"after {fmt.duration(elapsed_s)}"
    if ended_by in OUT_OF_BUDGET:
        return f"stopped {after}: {OUT_OF_BUDGET[ended_by]}"
    if ended_by is not EndedBy.AGENT_EXIT:
        return f"{ended_by} {after}"
    number = -exit_code if exit_code is not None and exit_code < 0 else (exit_code or 0) - 128
    if number in signal.valid_signals():
        told = f"killed by {signal.Signals(number).name} {after}"
    else:
        told = f"exited with code {exit_code} {after}" if exit_code else f"ended by itself {after}"
    return f"{told}: {fmt.clean(error, MAX_ERROR_CHARS)}" if error and exit_code else told


def _did(run: RunSummary) -> str:
    planned, executed = run.story.route.planned, run.story.route.executed
    iterations = [one for one in run.story.iterations if run.selected is None or one.submission_id <= run.selected]
    did = route_in_words(executed)
    if executed is Route.SFT_RL:
        seen = [route for one in iterations for route in (one.route.executed, one.route.planned)]
        did = f"{next((str(route).upper() for route in seen if route in (Route.GRPO, Route.PPO)), 'RL')} after SFT"
    if planned not in (executed, Route.UNKNOWN, Route.NONE) and executed is not Route.UNKNOWN:
        did = f"planned {route_in_words(planned)}, executed {did}"
    rows = next((one.rows for one in reversed(iterations) if one.rows is not None), None)
    return did if rows is None else f"{did} on {rows:,} rows"


def _submissions(run: RunSummary) -> str:
    if not run.accepted and not run.refused:
        return "nothing submitted"
    beside = [f"{run.refused} refused"] if run.refused else []
    beside += [f"{run.failed} not scored"] if run.failed else []
    return ", ".join([f"{run.accepted or 'no'} submission{'s' * (run.accepted != 1)}", *beside])


def _gain(run: RunSummary) -> str:
    base, best = run.baseline_feedback, run.best_feedback
    if run.improvement is not None:
        return gain_in_words(run.improvement)
    if best is None or best.score is None:
        return "no score yet" if run.excluded == "unfinished" else "no score"
    over = "" if base is None or base.score is None else f", {fmt.signed(best.score - base.score)} over the base model"
    return f"best feedback score {fmt.points(best.score)}{over}"


def gain_in_words(gain: Gain) -> str:
    """Return a gain and whether it is more than noise: `+3.2 [+1.1, +5.3] over the base model, more than noise`."""
    if gain.how == "base_kept":
        return "no gain, the base model counts"
    told = f"{fmt.signed(gain.difference)} {fmt.signed_between(gain.low, gain.high)}".strip() + " over the base model"
    if gain.low is None or gain.high is None:
        return f"{told}, without an interval"
    clear = gain.p_value < ALPHA if gain.p_value is not None else gain.low > 0 or gain.high < 0
    return f"{told}, {'more' if clear else 'no more'} than noise"


def _failure(run: RunSummary) -> str:
    failure = run.story.failure
    if failure is None:
        return "no failure" if run.accepted and run.ended_by is not None and not run.exit_code else ""
    if failure.kind in OUTCOMES or (run.story.last_error is not None and not run.accepted):
        return ""
    says = "; ".join(line.says for line in failure.evidence[:1])
    return f"{failure.kind}: {says}"[:MAX_ERROR_CHARS] if says else str(failure.kind)


def _end(run: RunSummary) -> str:
    if run.ended_by is None:
        return f"{run.state} {fmt.duration(run.elapsed_s)} of {fmt.duration(run.budget_s)}"
    if run.accepted and run.ended_by is EndedBy.AGENT_EXIT and not run.exit_code:
        return ""
    error = run.story.last_error
    return ending(run.ended_by, run.exit_code, run.elapsed_s, f"{error.says} ({error.where})" if error else None)
