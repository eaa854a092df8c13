"""What an LLM agent is told on its standard input: the task when it starts, and why it goes on when it is started again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from string import Template

from autorl_hpc.files.share import share
from autorl_hpc.files.view import RunView
from autorl_hpc.records.experiment import Budget
from autorl_hpc.records.run import RunRecord, Science
from autorl_hpc.states import Network, Protocol, Split
from autorl_hpc.supervise.limits import WORDS, Limits, amount

PROMPT_NAME = "prompt.md"
INTERRUPTED = "Your work was interrupted from outside, and every process that you had started was ended."
ENDED_EARLY = "You ended your work before your budget was used."


class Prompts:
    """The texts of one run. They are told to agents that ask for them (`prompt: true`)."""

    def __init__(self, record: RunRecord, workspace: Path, limits: Limits, look: Callable[[], RunView]) -> None:
        self.record = record
        self.workspace = workspace
        self.limits = limits
        self._look = look

    def first(self) -> str:
        """prompt.md: the task, the mode, the budget, how to submit. The same in every attempt."""
        science = self.record.science
        return _filled(
            "prompt.md",
            task=science.task,
            base_model=science.base_model,
            workspace=str(self.workspace),
            mode=mode_text(science.mode),
            budget="\n".join(f"- {line}" for line in budget_lines(science.budget, driver=self.limits.has_driver)),
            grace=grace_text(science.budget),
            most=most_text(science.budget.max_submissions),
            internet="" if science.network is Network.OPEN else "There is no internet. ",
        )

    def again(self, why: str, *, goes_on: bool) -> str:
        """What is told at a further start.

        Args:
            why: INTERRUPTED or ENDED_EARLY.
            goes_on: the agent's program continues its session; else it knows nothing any more and gets the task again.
        """
        view = self._look()
        best = view.best()
        score = None if best is None else view.score_of(best)
        so_far = f"{len(view.accepted())} submissions were accepted."
        if best is not None and score is not None and score.evaluation.score is not None:
            so_far += f" The best, `{best.model_path}`, scored {score.evaluation.score:.2f}."
        left = [
            f"- {WORDS[part.name]}: {amount(part.name, part.left)} of {amount(part.name, part.limit or 0.0)}"
            for part in self.limits.parts()
            if part.left is not None
        ]
        text = _filled("reprompt.md", why=why, left="\n".join(left), so_far=so_far, task=self.record.science.task)
        return text if goes_on else f"{self.first()}\n{text}"


def mode_text(mode: str) -> str:
    """What a mode allows, for instructions.md and prompts."""
    return (share("templates") / "workspace" / f"mode-{mode}.md").read_text(encoding="utf-8").strip()


def budget_lines(budget: Budget, *, driver: bool) -> list[str]:
    """The parts of the budget that limit a run, for people."""
    limits = {
        "wall_clock_s": budget.wall_clock_s,
        "gpu_hours": budget.gpu_hours,
        "tokens": budget.tokens if driver else None,
        "cost_usd": budget.cost_usd if driver else None,
        "submissions": budget.max_submissions,
    }
    lines = [f"{WORDS[name]}: {amount(name, value)}" for name, value in limits.items() if value is not None]
    lines[0] = f"time: {budget.wall_clock_s / 3600:.2f} hours of wall clock"
    return lines


def grace_text(budget: Budget) -> str:
    """What happens when a part of the budget is used up."""
    if budget.last_grace_s < 1:
        return ""
    return f"When a part of it is used up, {budget.last_grace_s:.0f} s are left for a last submission."


def most_text(most: int | None) -> str:
    """The limit of submissions."""
    if most is None:
        return "You may submit as often as you like."
    return f"At most {most} checkpoints of different content are accepted; an answer tells how many are left (`submissions_left`)."


def _filled(name: str, **values: str) -> str:
    text = (share("templates") / "workspace" / name).read_text(encoding="utf-8")
    return Template(text).substitute(values)


def feedback_text(science: Science) -> str:
    """What a feedback score is of."""
    part, split = science.feedback_part, Split.REPORT if science.protocol is Protocol.PAPER else Split.FEEDBACK
    if part is None:
        return f"A score is of {science.asked(split)} items; `standard_error` beside it says how far chance may move it, in points."
    return (
        f"To answer sooner, a feedback score is of a part of the feedback split: {part.n} of {science.splits[split].n} items, the same "
        "ones each time, for the base model too. `standard_error` beside it says how far chance may move it, in points: a smaller gain "
        "may be none. The final score is of a whole other split."
    )
