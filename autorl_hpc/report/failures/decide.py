"""The one kind of failure that a report names: the first of a fixed order whose rule holds."""

from __future__ import annotations

from collections.abc import Callable

from autorl_hpc.report.failures import rules
from autorl_hpc.report.failures.facts import IterationFacts, RunFacts
from autorl_hpc.report.story import EvidenceLine, Failure
from autorl_hpc.report.text import clean
from autorl_hpc.states import EndedBy, FailureKind, Fault, SubmissionState

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
    (FailureKind.STATIC_SHORTCUT, rules.static_shortcut),
    (FailureKind.TRAINING_COLLAPSE, rules.training_collapse),
    (FailureKind.ROLLOUT_CONSTRUCTION, rules.rollout_construction),
    (FailureKind.REWARD_OR_DATA, rules.reward_or_data),
    (FailureKind.EARLY_CODING, rules.early_coding),
)
"""In the order in which they are asked: what the weights and splits prove, before what numbers show, before what logs say.
A collapse is asked before its causes in rollouts and rewards, as only it says that the model was damaged."""


_CAUSES = dict(CAUSES)


def failure_of(facts: RunFacts | IterationFacts) -> Failure | None:
    """Why a run, or one of its iterations, did not help; None: it did, or it is not over."""
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
    shortcut = rules.static_shortcut(facts)
    if shortcut:
        return _failure(FailureKind.STATIC_SHORTCUT, shortcut)
    if facts.gain is not None and facts.gain.beyond_noise:
        return None
    cause = _cause(facts)
    if cause is not None:
        return cause
    if facts.gain is None:
        return None
    return _failure(FailureKind.NO_GAIN, (rules.gain_line(facts.gain, "feedback"),))


def _of_run(facts: RunFacts) -> Failure | None:
    if facts.fault in INFRASTRUCTURE or facts.ended_by is EndedBy.CRASHED:
        return _failure(FailureKind.INFRASTRUCTURE, _told(facts.fault or facts.ended_by, facts.reason, None))
    if facts.ended_by is EndedBy.CANCELLED:
        return None
    accepted = [each for each in facts.iterations if each.status is not SubmissionState.REFUSED]
    if not accepted:
        return _without_submission(facts)
    shortcut = rules.static_shortcut(facts)
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
    return _failure(FailureKind.NO_GAIN, (rules.gain_line(gain, "report" if facts.report_gain else "feedback"),))


def _without_submission(facts: RunFacts) -> Failure | None:
    """No accepted checkpoint: the cause if one shows, else what the ledger tells."""
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
    """One kind of a run that still goes on: only what has already happened."""
    found = _CAUSES[kind](facts)
    return _failure(kind, found) if found else None


def _cause(facts: RunFacts | IterationFacts) -> Failure | None:
    for kind, rule in CAUSES:
        found = rule(facts)
        if found:
            return _failure(kind, found)
    return None


def _commonest(facts: RunFacts) -> Failure | None:
    """The cause that most of a run's iterations share; of two that are equally common the later one."""
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
